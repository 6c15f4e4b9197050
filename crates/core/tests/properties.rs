//! Random ways through a larger world than the walk can cover: more of everything, in an order that nobody chose.
//! The seed is printed; `QD_SEED=N` runs it again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod simulation;

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use simulation::seeded::runner;
use simulation::{ActionBudget, SimulatedAction, SimulatedSession};

const CASES: u32 = 20_000;
const STEPS: usize = 80;
/// Nothing much happens after a close, so it comes late.
const CLOSES_AFTER: usize = 50;

const PLENTY: ActionBudget = ActionBudget {
    prompts: 12,
    cancels: 4,
    single_cancels: 3,
    steers: 6,
    answers: 6,
    removes: 3,
    clears: 2,
    halts: 3,
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
    late: 4,
    asks: 4,
    says: 12,
};

#[test]
fn no_random_order_breaks_the_contract_and_every_journal_replays_byte_for_byte() {
    let (seed, mut runner) = runner(CASES);
    println!("properties: {CASES} cases of {STEPS} steps, QD_SEED={seed}");
    // Left to chance alone, clients would do all that they can before the agent has said a word.
    let turns = prop::bool::weighted(0.6);
    let choices = prop::collection::vec((any::<prop::sample::Index>(), turns), STEPS);
    let restarts = prop::option::of(0..2u32);
    let seen = RefCell::new(BTreeMap::<&str, usize>::new());
    let result = runner.run(&(choices, restarts), |(choices, restarts)| {
        let mut small = SimulatedSession::with_restarts(PLENTY, restarts);
        small.keeps_journal = true;
        for (at, (choice, agents_turn)) in choices.into_iter().enumerate() {
            let mut actions = small.actions();
            let of_agent = |action: &SimulatedAction| {
                matches!(action, SimulatedAction::Agent(_) | SimulatedAction::Mend)
            };
            if agents_turn && actions.iter().any(of_agent) {
                actions.retain(of_agent);
            }
            if at < CLOSES_AFTER {
                actions.retain(|action| *action != SimulatedAction::Close);
            }
            if !actions.is_empty() {
                small.act(*choice.get(&actions));
            }
        }
        small.check_bytes(&small.journal);
        for event in &small.journal {
            *seen.borrow_mut().entry(event.body.kind()).or_default() += 1;
        }
        settle(small);
        Ok(())
    });
    println!("properties saw {:?}", seen.borrow());
    if let Err(error) = result {
        panic!("QD_SEED={seed}: {error}");
    }
}

/// Lets the world run out: clients do nothing more, the halt is lifted, the agent obeys. Everything must end.
fn settle(mut small: SimulatedSession) {
    small.left = ActionBudget { cancels: 1, ..ActionBudget::NOTHING };
    for _ in 0..1000 {
        // The last action is the agent's, if it can do anything; a final cancel frees one that waits for a person.
        match small.actions().last() {
            Some(action) => small.act(*action),
            None => return small.check_end(),
        }
    }
    panic!("the world did not come to rest: {:?}", small.state);
}
