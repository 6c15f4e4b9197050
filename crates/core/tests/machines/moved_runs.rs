//! Moving a queued run to another place: what may be moved, what a move changes, and what it leaves as it was.

use qd_core::rows::{RunDoc, UpdatedRow};
use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, SessionCommand, SessionInput, SessionPhase, SessionStep,
};
use qd_protocol::api::RunStatus;
use qd_protocol::event::{EventBody, QueueReason};
use qd_protocol::link::{AgentUpdate, TurnStopReason};
use qd_protocol::{FinishReason, RunId};

use crate::harness::{SessionHarness, finishes, kinds, started};

fn move_run(harness: &mut SessionHarness, run: &str, before: Option<&str>) -> SessionStep {
    let id = |text: &str| RunId::parse(text).unwrap();
    harness.command(SessionCommand::MoveQueued { run: id(run), before: before.map(id) })
}

fn order(harness: &SessionHarness) -> Vec<&str> {
    harness.state.runs.iter().map(|run| run.id.as_str()).collect()
}

/// A session that works on `active`, with these runs behind it.
fn session_with_queue(queued: &[&str]) -> SessionHarness {
    let mut harness = SessionHarness::new();
    harness.prompt("active");
    queued.iter().for_each(|run| drop(harness.prompt(run)));
    harness
}

#[test]
fn a_queued_run_is_moved_before_another_or_to_the_end_and_runs_in_that_order() {
    let mut harness = session_with_queue(&["a", "b", "c"]);
    let moved = move_run(&mut harness, "c", Some("a"));
    assert_eq!(
        (kinds(&moved), &moved.reply),
        (vec!["run.moved"], &Some(CommandReply::Moved { position: 1 }))
    );
    assert_eq!(order(&harness), ["active", "c", "a", "b"]);
    let moved = move_run(&mut harness, "a", None);
    assert_eq!(moved.reply, Some(CommandReply::Moved { position: 3 }));
    assert_eq!(order(&harness), ["active", "c", "b", "a"]);
    for (ending, next) in [("active", Some("c")), ("c", Some("b")), ("b", Some("a")), ("a", None)] {
        let ended = harness.end(ending, TurnStopReason::EndTurn);
        assert_eq!(started(&ended).as_deref(), next);
    }
}

#[test]
fn a_move_to_where_the_run_already_is_changes_nothing_and_is_no_error() {
    let mut harness = session_with_queue(&["a", "b"]);
    for (run, before, position) in [("a", Some("b"), 1), ("a", Some("a"), 1), ("b", None, 2)] {
        let moved = move_run(&mut harness, run, before);
        assert_eq!(moved.reply, Some(CommandReply::Moved { position }), "{run} before {before:?}");
        assert!(moved.events.is_empty() && moved.effects.is_empty());
    }
    assert_eq!(order(&harness), ["active", "a", "b"]);
}

#[test]
fn only_queued_runs_are_moved_and_only_before_queued_runs() {
    let mut harness = session_with_queue(&["a", "b"]);
    let mut refused = |run: &str, before: Option<&str>, refusal: CommandRefusal| {
        let step = move_run(&mut harness, run, before);
        assert_eq!(step.reply, Some(CommandReply::Refused(refusal)), "{run} before {before:?}");
        assert!(step.events.is_empty(), "{step:?}");
    };
    refused("active", None, CommandRefusal::NotQueued);
    refused("nobody", Some("a"), CommandRefusal::NotQueued);
    refused("b", Some("active"), CommandRefusal::MoveTargetNotQueued);
    refused("b", Some("nobody"), CommandRefusal::MoveTargetNotQueued);
    assert_eq!(order(&harness), ["active", "a", "b"]);
}

#[test]
fn a_suspended_run_keeps_its_place_before_all_queued_runs() {
    let mut harness = session_with_queue(&["a", "b"]);
    let child = qd_protocol::SessionId::parse("child").unwrap();
    harness.command(SessionCommand::AddChild { child });
    let suspended = harness.end("active", TurnStopReason::Suspended);
    assert!(kinds(&suspended).contains(&"run.suspended"), "{suspended:?}");
    let refused = move_run(&mut harness, "b", Some("active"));
    assert_eq!(refused.reply, Some(CommandReply::Refused(CommandRefusal::MoveTargetNotQueued)));
    move_run(&mut harness, "b", Some("a"));
    assert_eq!(order(&harness), ["active", "b", "a"]);
    assert_eq!(harness.state.phase(), SessionPhase::Waiting);
}

#[test]
fn a_missed_steer_still_runs_next_after_a_move() {
    let mut harness = session_with_queue(&["a", "b"]);
    harness.command(SessionCommand::Steer { text: "left".into() });
    move_run(&mut harness, "b", Some("a"));
    let ended = harness.end("active", TurnStopReason::EndTurn);
    let next = started(&ended).unwrap();
    assert!(!["a", "b"].contains(&next.as_str()), "the steer runs next: {next}");
    assert_eq!(order(&harness), [next.as_str(), "b", "a"]);
}

#[test]
fn a_run_that_waits_for_a_slot_passes_its_wait_to_the_run_that_is_moved_before_it() {
    let mut harness = SessionHarness::without_worker();
    harness.context.slot_available = false;
    harness.prompt("a");
    harness.prompt("b");
    let moved = move_run(&mut harness, "b", Some("a"));
    assert_eq!(kinds(&moved), ["run.moved", "run.queued"]);
    let EventBody::RunQueued(queued) = &moved.events[1].body else { panic!("{moved:?}") };
    assert_eq!((queued.reason, queued.position), (QueueReason::Capacity, 1));
    assert_eq!(harness.state.phase(), SessionPhase::Queued);
    harness.context.slot_available = true;
    assert_eq!(kinds(&harness.input(SessionInput::Wake)), ["worker.started"]);
    harness.context.agent = AgentAvailability::Ready { steerable: true };
    let ready = harness.receive(AgentUpdate::Ready { agent_session_id: None, steers: true });
    assert_eq!(started(&ready).as_deref(), Some("b"));
    let ended = harness.end("b", TurnStopReason::EndTurn);
    assert_eq!(started(&ended).as_deref(), Some("a"));
}

#[test]
fn a_run_that_was_accepted_to_start_at_once_is_listed_as_queued_when_it_is_moved_back_under_a_halt() {
    let mut harness = SessionHarness::without_worker();
    harness.prompt("a");
    harness.prompt("b");
    harness.context.halted = true;
    let moved = move_run(&mut harness, "a", None);
    assert_eq!(moved.reply, Some(CommandReply::Moved { position: 2 }));
    let states: Vec<(&str, RunStatus)> = moved
        .rows
        .iter()
        .map(|row| match row {
            UpdatedRow::Run { id, doc: RunDoc { state, .. }, .. } => (id.as_str(), *state),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(states, [("a", RunStatus::Queued), ("b", RunStatus::Queued)]);
}

#[test]
fn a_cancel_hits_moved_runs_like_all_others() {
    let mut harness = session_with_queue(&["a", "b"]);
    move_run(&mut harness, "b", Some("a"));
    let cancelled = harness.cancel();
    let ends = [("b".to_owned(), FinishReason::Cancelled), ("a".to_owned(), FinishReason::Cancelled)];
    assert_eq!(finishes(&cancelled), ends);
}
