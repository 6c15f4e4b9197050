//! Every interleaving of a small world: three prompts, two cancels, a steer, an ask with two answers, a halt, a close
//! and a change of policy, with an agent that answers early, late or never, dies, or is cut off. Worlds that differ
//! only in what cannot matter any more are visited once, so the walk is over all orders and still ends.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and this one tells how far it went"
)]

mod world;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use world::{Budget, Small};

#[derive(Default)]
struct Walk {
    /// How many ways lead from a world to an end.
    seen: HashMap<u128, f64>,
    steps: u64,
}

fn digest(bytes: &[u8]) -> u128 {
    let half = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        (salt, bytes).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(1) << 64 | half(2)
}

impl Walk {
    /// Every way on from here. An agent may linger for ever, so a world can come round to itself only through a
    /// deadline, and deadlines run out.
    fn from(&mut self, small: &Small) -> f64 {
        let key = digest(&small.canonical());
        if let Some(ways) = self.seen.get(&key) {
            return *ways;
        }
        let actions = small.actions();
        if actions.is_empty() {
            small.check_end();
        }
        let mut ways = if actions.is_empty() { 1.0 } else { 0.0 };
        for action in actions {
            let mut next = small.clone();
            next.act(action);
            self.steps += 1;
            ways += self.from(&next);
        }
        self.seen.insert(key, ways);
        ways
    }
}

fn walk(name: &str, budget: Budget) {
    // Deep, not wide: the longest way is some dozens of steps, each with a world on the stack.
    let walker = std::thread::Builder::new().stack_size(512 << 20).spawn(move || {
        let mut walk = Walk::default();
        let ways = walk.from(&Small::new(budget));
        (walk.seen.len(), walk.steps, ways)
    });
    let (worlds, steps, ways) =
        walker.unwrap().join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    println!("walk {name}: {worlds} worlds, {steps} steps, {ways:.3e} interleavings");
    assert!(worlds > 1000, "a walk that sees so little proves nothing");
}

#[test]
fn no_order_of_prompts_cancels_a_steer_and_answers_breaks_the_contract() {
    let budget = Budget {
        prompts: 3,
        cancels: 2,
        steers: 1,
        asks: 1,
        answers: 2,
        says: 1,
        late: 1,
        ..Budget::NOTHING
    };
    walk("prompts, cancels, steer, ask", budget);
}

#[test]
fn no_order_with_a_halt_a_close_and_a_new_policy_breaks_the_contract() {
    let budget = Budget {
        prompts: 3,
        cancels: 1,
        halts: 1,
        closes: 1,
        policies: 1,
        asks: 1,
        answers: 2,
        steers: 1,
        ..Budget::NOTHING
    };
    walk("halt, close, policy", budget);
}

#[test]
fn no_order_with_a_dying_agent_and_a_broken_link_breaks_the_contract() {
    let budget = Budget {
        prompts: 2,
        cancels: 1,
        deaths: 1,
        vanishes: 1,
        breaks: 1,
        steers: 1,
        asks: 1,
        answers: 2,
        ..Budget::NOTHING
    };
    walk("death, loss, broken link", budget);
}

#[test]
fn no_order_of_removals_and_single_cancels_breaks_the_contract() {
    let budget = Budget {
        prompts: 3,
        single_cancels: 2,
        removes: 1,
        clears: 1,
        cancels: 1,
        says: 1,
        ..Budget::NOTHING
    };
    walk("remove, clear, cancel of one run", budget);
}
