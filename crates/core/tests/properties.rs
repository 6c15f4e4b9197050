//! Random paths through a larger simulation than the walk can cover: more of everything, in random order. The seed is
//! printed; `QD_SEED=N` repeats it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod simulation;

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use simulation::seeded::runner;
use simulation::{ActionBudget, SimulatedAction, SimulatedSession};

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
    let seen = RefCell::new(BTreeMap::<&str, usize>::new());
    let result = runner.run(&(choices, restarts), |(choices, restarts)| {
        let mut session = SimulatedSession::with_restarts(PLENTY, restarts);
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

/// Runs the simulation to its end: clients do nothing more, the halt is lifted, the agent obeys. Everything must end.
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
