//! Every interleaving of small simulations: prompts, cancels, a steer, an ask with two answers, a halt, an exhausted
//! quota, a close, child sessions; with an agent that answers early, late or never, is stopped when idle, dies, is lost or
//! disconnected, and a daemon that dies after any commit. States that differ only in what can no longer matter are
//! visited once, so a walk covers all orders and still ends.

#![expect(clippy::print_stdout, reason = "this test reports how far it went")]

use std::collections::HashMap;

use crate::simulation::{ActionBudget, SimulatedAction, SimulatedSession};

#[derive(Default)]
struct InterleavingWalk {
    /// The number of paths from a state to an end.
    paths_to_end: HashMap<u128, f64>,
    steps: u64,
    /// Where states are written to be compared.
    text: Vec<u8>,
}

impl InterleavingWalk {
    /// Explores every continuation from here and counts the paths. An agent may linger for ever, so a state can recur
    /// only through a deadline, and deadlines run out.
    fn from(&mut self, session: SimulatedSession) -> f64 {
        let key = session.key(&mut self.text);
        if let Some(paths) = self.paths_to_end.get(&key) {
            return *paths;
        }
        let mut actions = session.actions();
        let paths = match actions.pop() {
            None => {
                session.check_end();
                1.0
            }
            Some(last) => {
                let others: f64 = actions.into_iter().map(|action| self.after(session.clone(), action)).sum();
                others + self.after(session, last)
            }
        };
        self.paths_to_end.insert(key, paths);
        paths
    }

    fn after(&mut self, mut session: SimulatedSession, action: SimulatedAction) -> f64 {
        session.act(action);
        self.steps += 1;
        self.from(session)
    }
}

fn walk(name: &str, budget: ActionBudget) {
    walk_in(name, SimulatedSession::new(budget));
}

fn walk_in(name: &str, session: SimulatedSession) {
    // Deep, not wide: the longest path has some dozens of steps, each with a whole simulation on the stack.
    let walker = std::thread::Builder::new().stack_size(512 << 20).spawn(move || {
        let mut walk = InterleavingWalk::default();
        let paths = walk.from(session);
        (walk.paths_to_end.len(), walk.steps, paths)
    });
    let (states, steps, paths) =
        walker.unwrap().join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    println!("walk {name}: {states} worlds, {steps} steps, {paths:.3e} interleavings");
    assert!(states > 1000, "a walk that sees so few states proves nothing");
}

#[test]
fn no_order_of_prompts_cancels_a_steer_and_answers_breaks_the_contract() {
    let budget = ActionBudget {
        prompts: 3,
        cancels: 2,
        steers: 1,
        asks: 1,
        answers: 2,
        says: 1,
        late: 1,
        ..ActionBudget::NOTHING
    };
    walk("prompts, cancels, steer, ask", budget);
}

#[test]
fn no_order_with_a_halt_a_close_and_a_new_policy_breaks_the_contract() {
    let budget = ActionBudget {
        prompts: 3,
        cancels: 1,
        halts: 1,
        closes: 1,
        policies: 1,
        asks: 1,
        answers: 2,
        steers: 1,
        ..ActionBudget::NOTHING
    };
    walk("halt, close, policy", budget);
}

#[test]
fn no_order_with_an_exhausted_quota_forgets_a_run_or_starts_one_too_early() {
    let budget =
        ActionBudget { prompts: 3, cancels: 1, moves: 1, halts: 1, quotas: 2, ..ActionBudget::NOTHING };
    walk("quota, halt, moves", budget);
}

#[test]
fn no_order_with_an_exhausted_quota_and_too_few_slots_forgets_a_suspended_run() {
    let budget = ActionBudget {
        prompts: 2,
        spawns: 1,
        suspends: 1,
        fills: 1,
        rests: 1,
        quotas: 2,
        crashes: 1,
        vanishes: 1,
        ..ActionBudget::NOTHING
    };
    walk_in("quota, suspend, slots, worktree", SimulatedSession::in_worktree(budget));
}

#[test]
fn no_order_with_a_dying_agent_and_a_broken_link_breaks_the_contract() {
    let budget = ActionBudget {
        prompts: 2,
        cancels: 1,
        deaths: 1,
        vanishes: 1,
        breaks: 1,
        steers: 1,
        asks: 1,
        answers: 2,
        ..ActionBudget::NOTHING
    };
    walk("death, loss, broken link", budget);
}

#[test]
fn no_order_of_removals_and_single_cancels_breaks_the_contract() {
    let budget = ActionBudget {
        prompts: 3,
        single_cancels: 2,
        removes: 1,
        clears: 1,
        cancels: 1,
        says: 1,
        ..ActionBudget::NOTHING
    };
    walk("remove, clear, cancel of one run", budget);
}

#[test]
fn no_order_of_moves_in_the_queue_breaks_the_contract() {
    let budget =
        ActionBudget { prompts: 3, moves: 2, halts: 1, fills: 1, steers: 1, ..ActionBudget::NOTHING };
    walk("moves, halt, slots", budget);
}

#[test]
fn no_order_with_too_few_slots_and_an_idle_agent_breaks_the_contract() {
    let budget = ActionBudget {
        prompts: 3,
        fills: 2,
        rests: 2,
        steers: 1,
        cancels: 1,
        clears: 1,
        closes: 1,
        vanishes: 1,
        ..ActionBudget::NOTHING
    };
    walk("slots, idle agent", budget);
}

#[test]
fn no_order_lets_a_cancelled_run_leave_a_process_and_deny_it() {
    let budget = ActionBudget {
        prompts: 2,
        cancels: 1,
        single_cancels: 1,
        leaves: 2,
        breaks: 1,
        crashes: 1,
        vanishes: 1,
        closes: 1,
        ..ActionBudget::NOTHING
    };
    walk("cancel at the end of a turn", budget);
}

#[test]
fn no_order_of_crashes_starts_a_worker_too_many() {
    let budget = ActionBudget {
        prompts: 4,
        deaths: 2,
        vanishes: 2,
        forgives: 1,
        steers: 1,
        cancels: 1,
        ..ActionBudget::NOTHING
    };
    walk_in("restart limit", SimulatedSession::with_restarts(budget, Some(1)));
}

#[test]
fn no_commit_after_which_the_daemon_dies_breaks_the_contract() {
    let budget = ActionBudget {
        prompts: 2,
        cancels: 1,
        steers: 1,
        asks: 1,
        answers: 1,
        crashes: 2,
        closes: 1,
        vanishes: 1,
        ..ActionBudget::NOTHING
    };
    walk("death of the daemon", budget);
}

#[test]
fn no_order_with_child_sessions_resumes_a_run_too_early_twice_or_never() {
    let budget = ActionBudget {
        prompts: 2,
        spawns: 2,
        suspends: 2,
        cancels: 1,
        single_cancels: 1,
        steers: 1,
        rests: 1,
        deaths: 1,
        ..ActionBudget::NOTHING
    };
    walk("suspend", budget);
}

#[test]
fn no_death_of_the_daemon_forgets_a_suspended_run_or_resumes_it_twice() {
    let budget = ActionBudget {
        prompts: 2,
        spawns: 2,
        suspends: 2,
        crashes: 2,
        vanishes: 1,
        fills: 1,
        closes: 1,
        ..ActionBudget::NOTHING
    };
    walk("suspend, death of the daemon", budget);
}

#[test]
fn no_prompts_that_arrive_together_start_an_agent_twice_or_never() {
    let budget = ActionBudget {
        prompts: 4,
        batches: 2,
        failed_preparations: 1,
        rests: 1,
        fills: 1,
        cancels: 1,
        crashes: 1,
        closes: 1,
        ..ActionBudget::NOTHING
    };
    walk_in("batches, worktree", SimulatedSession::in_worktree(budget));
}

#[test]
fn no_order_with_too_few_slots_forgets_a_suspended_run() {
    let budget = ActionBudget {
        prompts: 2,
        spawns: 1,
        suspends: 1,
        fills: 2,
        rests: 2,
        outdates: 1,
        halts: 1,
        crashes: 1,
        vanishes: 1,
        ..ActionBudget::NOTHING
    };
    walk_in("suspend, slots, worktree", SimulatedSession::in_worktree(budget));
}

#[test]
fn no_reboot_forgets_a_run_or_a_deadline() {
    let budget = ActionBudget {
        prompts: 2,
        cancels: 1,
        asks: 1,
        answers: 1,
        spawns: 1,
        suspends: 1,
        closes: 1,
        reboots: 1,
        ..ActionBudget::NOTHING
    };
    walk("reboot", budget);
}
