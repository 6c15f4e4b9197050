//! Mentions: who is written to, what comes of it, and where it ends.

use qd_core::fleet::FleetInput;
use qd_protocol::event::{EventBody, FinishReason};
use qd_protocol::fleet::{FleetSpec, FleetStatus};
use qd_protocol::limits::FLEET_MENTIONS_MAX;

use crate::fleet_harness::{FleetHarness, spec};

fn crew(routes: &[&str]) -> FleetHarness {
    FleetHarness::start(FleetSpec { mentions: true, ..spec(&["a", "b", "c"], &["a"], routes) })
}

#[test]
fn who_is_mentioned_is_given_a_run_that_counts() {
    let mut crew = crew(&["b.done -> c"]);
    crew.says("a", "done\n@b look\n@nobody too\n@a not oneself");
    assert_eq!(crew.working(), ["b"]);
    assert!(crew.state.assignments[0].by_mention);
    crew.crash();
    crew.done("b");
    assert_eq!(crew.working(), ["c"], "its end triggers a route");
    crew.done("c");
    assert_eq!(crew.stands(), FleetStatus::Done);
}

#[test]
fn without_the_key_or_without_an_end_that_is_well_nobody_is_written_to() {
    let mut silent = FleetHarness::start(spec(&["a", "b"], &["a"], &[]));
    silent.says("a", "@b look");
    assert_eq!(silent.stands(), FleetStatus::Done);
    let mut failing = crew(&[]);
    failing.end("a", FinishReason::Error, "@b look");
    assert_eq!(failing.stands(), FleetStatus::Failed);
}

#[test]
fn what_was_told_to_a_run_that_was_there_is_waited_for_no_more() {
    let mut crew = crew(&["b.done -> c"]);
    crew.says("a", "@b look");
    let (_, run) = crew.open().remove(0);
    crew.step(FleetInput::RunAbsorbed(run.clone()));
    assert!(crew.working().is_empty(), "its end is not b's end");
    assert_eq!(crew.stands(), FleetStatus::Done);
    let step = crew.step(FleetInput::RunAbsorbed(run));
    assert!(step.events.is_empty(), "said twice, it happened once");
    crew.crash();
}

#[test]
fn a_mention_is_followed_beside_the_routes() {
    let mut crew = crew(&["a.done -> c"]);
    crew.says("a", "@b look");
    assert_eq!(crew.working(), ["c", "b"]);
    crew.done("b").done("c");
    assert_eq!(crew.stands(), FleetStatus::Done);
}

#[test]
fn a_circle_of_mentions_ends_with_a_problem() {
    let mut crew = crew(&[]);
    let mut sent = 0;
    while let Some(name) = crew.working().first().cloned() {
        crew.says(&name, "@a on\n@b on\n@c on");
        sent = crew.given.len();
    }
    assert_eq!(sent, 1 + FLEET_MENTIONS_MAX as usize, "each under a run of its own");
    assert_eq!(crew.stands(), FleetStatus::Failed);
    let refused =
        |body: &&EventBody| matches!(body, EventBody::FleetMentioned(mentioned) if mentioned.error.is_some());
    assert!(crew.events.iter().any(|body| refused(&body)));
    crew.crash();
}

#[test]
fn a_cancelled_fleet_writes_to_nobody() {
    let mut crew = crew(&[]);
    crew.cancel();
    crew.says("a", "@b look");
    assert_eq!(crew.stands(), FleetStatus::Cancelled);
}
