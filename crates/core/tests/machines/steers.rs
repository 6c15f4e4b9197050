//! Steers that meet a cancel.

use qd_core::session::SessionCommand;
use qd_protocol::EventNumber;
use qd_protocol::event::EventBody;
use qd_protocol::link::{AgentUpdate, TurnStopReason};

use crate::harness::SessionHarness;

/// Steers the running turn, and returns the number under which the agent gets the steer.
fn steer(harness: &mut SessionHarness, text: &str) -> EventNumber {
    let step = harness.command(SessionCommand::Steer { text: text.into() });
    let accepted = step.events.iter().find(|event| matches!(event.body, EventBody::SteerAccepted(_)));
    accepted.expect("a running turn can be steered").number
}

#[test]
fn a_steer_from_before_a_cancel_starts_nothing_even_if_the_agent_reports_it_as_missed() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    let before = steer(&mut harness, "left");
    harness.cancel();
    let missed = harness.receive(AgentUpdate::SteerMissed { steer: before });
    let accepts = |body: &EventBody| matches!(body, EventBody::RunAccepted(_));
    assert!(!missed.events.iter().any(|event| accepts(&event.body)), "{missed:?}");
    harness.end("a", TurnStopReason::Cancelled);
    assert!(!harness.state.is_busy(), "{:?}", harness.state.runs);
}

#[test]
fn a_second_cancel_includes_the_steers_that_came_after_the_first() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.cancel();
    let between = steer(&mut harness, "right");
    harness.cancel();
    harness.receive(AgentUpdate::SteerMissed { steer: between });
    harness.end("a", TurnStopReason::Cancelled);
    assert!(!harness.state.is_busy(), "{:?}", harness.state.runs);
}

#[test]
fn a_steer_from_after_a_cancel_runs_next() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.cancel();
    let after = steer(&mut harness, "right");
    harness.receive(AgentUpdate::SteerMissed { steer: after });
    harness.end("a", TurnStopReason::Cancelled);
    assert_eq!(harness.state.runs.len(), 1, "{:?}", harness.state.runs);
}
