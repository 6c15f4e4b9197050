//! Mentions: which sessions get a message, what follows, and where it ends.

use qd_core::fleet::FleetInput;
use qd_protocol::event::{EventBody, FinishReason};
use qd_protocol::fleet::{FleetSpec, FleetStatus};
use qd_protocol::limits::FLEET_MENTIONS_MAX;

use crate::fleet::fleet_harness::{FleetHarness, spec};

fn mentioning_fleet(routes: &[&str]) -> FleetHarness {
    FleetHarness::start(FleetSpec { mentions: true, ..spec(&["a", "b", "c"], &["a"], routes) })
}

#[test]
fn a_mentioned_session_gets_a_run_that_triggers_routes() {
    let mut fleet = mentioning_fleet(&["b.done -> c"]);
    fleet.done_with("a", "done\n@b look\n@nobody too\n@a not oneself");
    assert_eq!(fleet.busy_sessions(), ["b"]);
    assert!(fleet.state.assignments[0].by_mention);
    fleet.crash();
    fleet.done("b");
    assert_eq!(fleet.busy_sessions(), ["c"], "its end triggers a route");
    fleet.done("c");
    assert_eq!(fleet.status(), FleetStatus::Done);
}

#[test]
fn mentions_need_the_setting_and_a_successful_run() {
    let mut silent = FleetHarness::start(spec(&["a", "b"], &["a"], &[]));
    silent.done_with("a", "@b look");
    assert_eq!(silent.status(), FleetStatus::Done);
    let mut failing = mentioning_fleet(&[]);
    failing.end("a", FinishReason::Error, "@b look");
    assert_eq!(failing.status(), FleetStatus::Failed);
}

#[test]
fn a_mention_delivered_as_a_steer_is_no_longer_awaited() {
    let mut fleet = mentioning_fleet(&["b.done -> c"]);
    fleet.done_with("a", "@b look");
    let (_, run) = fleet.open_runs().remove(0);
    fleet.step(FleetInput::RunDeliveredAsSteer(run.clone()));
    assert!(fleet.busy_sessions().is_empty(), "its end is not b's end");
    assert_eq!(fleet.status(), FleetStatus::Done);
    let step = fleet.step(FleetInput::RunDeliveredAsSteer(run));
    assert!(step.events.is_empty(), "a repeat has no effect");
    fleet.crash();
}

#[test]
fn a_mention_is_followed_beside_the_routes() {
    let mut fleet = mentioning_fleet(&["a.done -> c"]);
    fleet.done_with("a", "@b look");
    assert_eq!(fleet.busy_sessions(), ["c", "b"]);
    fleet.done("b").done("c");
    assert_eq!(fleet.status(), FleetStatus::Done);
}

#[test]
fn a_cycle_of_mentions_ends_with_a_problem() {
    let mut fleet = mentioning_fleet(&[]);
    let mut sent = 0;
    while let Some(name) = fleet.busy_sessions().first().cloned() {
        fleet.done_with(&name, "@a on\n@b on\n@c on");
        sent = fleet.assigned.len();
    }
    assert_eq!(sent, 1 + FLEET_MENTIONS_MAX as usize, "each under a run of its own");
    assert_eq!(fleet.status(), FleetStatus::Failed);
    let refused =
        |body: &&EventBody| matches!(body, EventBody::FleetMentioned(mentioned) if mentioned.error.is_some());
    assert!(fleet.events.iter().any(|body| refused(&body)));
    fleet.crash();
}

#[test]
fn a_cancelled_fleet_sends_no_mentions() {
    let mut fleet = mentioning_fleet(&[]);
    fleet.cancel();
    fleet.done_with("a", "@b look");
    assert_eq!(fleet.status(), FleetStatus::Cancelled);
}
