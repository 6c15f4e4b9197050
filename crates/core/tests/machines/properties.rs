//! Random paths through a larger simulation than the walk can cover: more of everything, in random order. The seed is
//! printed; `QD_SEED=N` repeats it.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use qd_protocol::event::EventBody;
use qd_protocol::{FinishReason, Millis, RunId};

use crate::simulation::seeded::runner;
use crate::simulation::{ActionBudget, SimulatedAction, SimulatedSession};

const CASES: u32 = 20_000;
const STEPS: usize = 80;
/// Not much happens after a close, so it comes late.
const CLOSES_AFTER: usize = 50;

const PLENTY: ActionBudget = ActionBudget {
    prompts: 12,
    cancels: 4,
    single_cancels: 3,
    steers: 6,
    answers: 6,
    removes: 3,
    clears: 2,
    moves: 5,
    halts: 3,
    quotas: 3,
    fills: 3,
    policies: 1,
    forgives: 1,
    closes: 1,
    spawns: 4,
    suspends: 4,
    deaths: 2,
    vanishes: 2,
    rests: 3,
    breaks: 3,
    crashes: 4,
    reboots: 2,
    clock_changes: 2,
    late: 4,
    asks: 4,
    says: 12,
    batches: 6,
    outdates: 2,
    failed_preparations: 1,
    leaves: 4,
};

#[test]
fn no_random_order_breaks_the_contract_and_every_journal_replays_byte_for_byte() {
    let (seed, mut runner) = runner(CASES);
    println!("properties: {CASES} cases of {STEPS} steps, QD_SEED={seed}");
    // By chance alone, clients would use up their actions before the agent has done anything.
    let turns = prop::bool::weighted(0.6);
    let choices = prop::collection::vec((any::<prop::sample::Index>(), turns), STEPS);
    let restarts = prop::option::of(0..2u32);
    let worktree = any::<bool>();
    let seen = RefCell::new(BTreeMap::<&str, usize>::new());
    let result = runner.run(&(choices, restarts, worktree), |(choices, restarts, worktree)| {
        let mut session = SimulatedSession::with_restarts(PLENTY, restarts);
        session.set_worktree(worktree);
        session.keeps_journal = true;
        for (at, (choice, agents_turn)) in choices.into_iter().enumerate() {
            let mut actions = session.actions();
            let is_agent_action = |action: &SimulatedAction| {
                matches!(action, SimulatedAction::Agent(_) | SimulatedAction::Mend)
            };
            if agents_turn && actions.iter().any(is_agent_action) {
                actions.retain(is_agent_action);
            }
            if at < CLOSES_AFTER {
                actions.retain(|action| *action != SimulatedAction::Close);
            }
            if !actions.is_empty() {
                session.act(*choice.get(&actions));
            }
        }
        session.check_bytes(&session.journal);
        for event in &session.journal {
            *seen.borrow_mut().entry(event.body.kind()).or_default() += 1;
        }
        settle(session);
        Ok(())
    });
    println!("properties saw {:?}", seen.borrow());
    if let Err(error) = result {
        panic!("QD_SEED={seed}: {error}");
    }
}

/// One step of the test below: how long nothing happens, what happens then, and what the wall clock of the second
/// session shows.
type ClockStep = (u64, prop::sample::Index, u64);

#[test]
fn a_clock_that_is_set_at_any_moment_changes_nothing_but_timestamps() {
    let (seed, mut runner) = runner(CASES / 10);
    println!("clocks: {} cases of {STEPS} steps, QD_SEED={seed}", CASES / 10);
    let wall_clocks = prop_oneof![0..1000u64, 1_000_000_000_000..3_000_000_000_000u64];
    let pauses = prop_oneof![3 => Just(0), 1 => 0..20_000u64];
    let steps = prop::collection::vec((pauses, any::<prop::sample::Index>(), wall_clocks), STEPS);
    let ends = RefCell::new(BTreeMap::<&str, usize>::new());
    let result = runner.run(&steps, |steps: Vec<ClockStep>| {
        // A quota resets at a time of the wall clock, so that one depends on it.
        let budget = ActionBudget { clock_changes: 0, quotas: 0, closes: 0, ..PLENTY };
        let mut steady = SimulatedSession::new(budget);
        steady.keeps_journal = true;
        steady.state.settings.limits.run_timeout_s = Some(60.0);
        let mut adjusted = steady.clone();
        for (pause, choice, wall) in steps {
            let actions = steady.actions();
            if actions.is_empty() {
                continue;
            }
            let action = *choice.get(&actions);
            for session in [&mut steady, &mut adjusted] {
                session.pass_time(pause);
            }
            adjusted.set_clock(Millis(wall));
            steady.act(action);
            adjusted.act(action);
            prop_assert_eq!(steady.deadline(), adjusted.deadline());
            prop_assert_eq!(outcome(&steady), outcome(&adjusted));
        }
        for (kind, _, _) in outcome(&steady) {
            *ends.borrow_mut().entry(kind).or_default() += 1;
        }
        Ok(())
    });
    println!("clocks saw {:?}", ends.borrow());
    if let Err(error) = result {
        panic!("QD_SEED={seed}: {error}");
    }
}

/// What a session's events say, without their times.
fn outcome(session: &SimulatedSession) -> Vec<(&'static str, Option<&RunId>, Option<FinishReason>)> {
    let reason = |body: &EventBody| match body {
        EventBody::RunFinished(finished) => Some(finished.finish_reason),
        _ => None,
    };
    session.journal.iter().map(|event| (event.body.kind(), event.run.as_ref(), reason(&event.body))).collect()
}

/// Runs the simulation to its end: clients do nothing more, the halt is lifted, the quota resets, the agent obeys. Everything must end.
fn settle(mut session: SimulatedSession) {
    session.budget = ActionBudget { cancels: 1, ..ActionBudget::NOTHING };
    for _ in 0..1000 {
        // The last action is the agent's, if it can do anything; a final cancel frees a run that waits for a person.
        match session.actions().last() {
            Some(action) => session.act(*action),
            None => return session.check_end(),
        }
    }
    panic!("the simulation did not come to an end: {:?}", session.state);
}
