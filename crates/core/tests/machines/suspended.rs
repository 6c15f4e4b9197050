//! Runs that wait for the child sessions they started, one promise at a time.

use qd_core::rows::{SessionDoc, UpdatedRow};
use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, SessionCommand, SessionEffect, SessionInput,
    SessionPhase, SessionStep,
};
use qd_protocol::api::{RunStatus, SessionStatus};
use qd_protocol::event::{AskKind, ChildResult, EventBody, RunError, RunStopCause};
use qd_protocol::limits::{EVENT_MAX, HEAD_MAX};
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnOutcome, TurnStopReason, TurnUpdate};
use qd_protocol::{EventNumber, FinishReason, RunId, SessionId};

use crate::harness::{SessionHarness, clocks_at, error, finishes, kinds, started};

const READY: AgentAvailability = AgentAvailability::Ready { steerable: true };

fn child(name: &str) -> SessionId {
    SessionId::parse(name).unwrap()
}

fn spawn(harness: &mut SessionHarness, name: &str) -> SessionStep {
    harness.command(SessionCommand::AddChild { child: child(name) })
}

fn result(name: &str, text: &str) -> ChildResult {
    let finish_reason = Some(FinishReason::EndTurn);
    ChildResult { session_id: child(name), finish_reason, text: text.to_owned() }
}

fn end_child(harness: &mut SessionHarness, name: &str) -> SessionStep {
    harness.command(SessionCommand::ChildEnded(result(name, "done")))
}

/// A run `a` that waits for the sessions `x` and `y`.
fn suspended_run() -> SessionHarness {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    spawn(&mut harness, "x");
    spawn(&mut harness, "y");
    harness.end("a", TurnStopReason::Suspended);
    harness
}

#[test]
fn a_run_that_started_nothing_has_nothing_to_wait_for() {
    let mut harness = SessionHarness::new();
    spawn(&mut harness, "before");
    harness.prompt("a");
    let ended = harness.end("a", TurnStopReason::Suspended);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Error)]);
    assert_eq!(error(&ended).unwrap().code, "nothing_to_wait_for");
}

#[test]
fn a_suspended_run_stays_active_and_is_shown_as_such() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    spawn(&mut harness, "x");
    let transcript = vec![serde_json::json!({"role": "user"})];
    let outcome =
        TurnOutcome { transcript: transcript.clone(), ..TurnOutcome::of(TurnStopReason::Suspended) };
    let suspended = harness.receive(AgentUpdate::TurnEnded { run: RunId::parse("a").unwrap(), outcome });
    assert_eq!(kinds(&suspended), ["run.suspended"]);
    let EventBody::RunSuspended(body) = &suspended.events[0].body else { panic!("{suspended:?}") };
    assert_eq!((&body.children, &body.transcript), (&vec![child("x")], &transcript));
    assert_eq!(suspended.effects, [SessionEffect::QueryChildren { children: vec![child("x")] }]);
    let [UpdatedRow::Run { doc, .. }] = &suspended.rows[..] else { panic!("{suspended:?}") };
    assert_eq!(doc.state, RunStatus::Suspended);
    assert_eq!(harness.state.phase(), SessionPhase::Waiting);
    assert_eq!(SessionDoc::of(&harness.state).view(false, None).state, SessionStatus::Waiting);
    let steered = harness.command(SessionCommand::Steer { text: "left".into() });
    assert_eq!(steered.reply, Some(CommandReply::Refused(CommandRefusal::NotRunning)));
    assert_eq!(harness.prompt("b").reply, Some(CommandReply::Accepted { position: 1, event: Some(0) }));
}

#[test]
fn a_run_is_resumed_once_when_all_awaited_sessions_have_ended() {
    let mut harness = suspended_run();
    assert_eq!(kinds(&end_child(&mut harness, "x")), ["session.updated"]);
    assert!(end_child(&mut harness, "x").events.is_empty(), "a repeat is ignored");
    assert!(end_child(&mut harness, "stranger").events.is_empty());
    let last = harness.command(SessionCommand::ChildEnded(result("y", "forty-two")));
    assert_eq!(kinds(&last), ["session.updated", "run.resumed"]);
    let EventBody::RunResumed(resumed) = &last.events[1].body else { panic!("{last:?}") };
    assert_eq!(resumed.children, [result("x", "done"), result("y", "forty-two")]);
    let run = RunId::parse("a").unwrap();
    assert_eq!(last.effects, [SessionEffect::SendPrompt { number: last.events[1].number, run }]);
    assert!(end_child(&mut harness, "y").events.is_empty());

    let text = TurnUpdate::Text { text: "so".to_owned() };
    harness.receive(AgentUpdate::Turn { run: RunId::parse("a").unwrap(), update: text });
    assert_eq!(
        finishes(&harness.end("a", TurnStopReason::EndTurn)),
        [("a".to_owned(), FinishReason::EndTurn)]
    );
}

#[test]
fn a_second_suspend_waits_for_the_sessions_started_since() {
    let mut harness = suspended_run();
    end_child(&mut harness, "x");
    end_child(&mut harness, "y");
    spawn(&mut harness, "z");
    let again = harness.end("a", TurnStopReason::Suspended);
    assert_eq!(again.effects, [SessionEffect::QueryChildren { children: vec![child("z")] }]);
    end_child(&mut harness, "z");
    let third = harness.end("a", TurnStopReason::Suspended);
    assert_eq!(error(&third).unwrap().code, "nothing_to_wait_for");
}

#[test]
fn a_resume_without_an_agent_launches_one_first() {
    let mut harness = suspended_run();
    harness.context.agent = AgentAvailability::Absent;
    let gone = harness.receive(AgentUpdate::Gone(AgentExitReason::Lost));
    assert_eq!(kinds(&gone), ["worker.exited"], "a suspended run needs no worker");
    assert!(gone.effects.is_empty());
    end_child(&mut harness, "x");
    let last = end_child(&mut harness, "y");
    assert_eq!(kinds(&last), ["session.updated", "worker.started"]);
    harness.context.agent = READY;
    let attached = harness.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: false,
        run_time_ms: None,
    });
    assert_eq!(kinds(&attached), ["run.resumed"], "and its first prompt is not sent again");
    assert!(matches!(attached.effects[..], [SessionEffect::SendPrompt { .. }]));
}

#[test]
fn a_run_that_cannot_be_resumed_fails_like_one_that_cannot_start() {
    let mut harness = suspended_run();
    harness.context.agent = AgentAvailability::Absent;
    harness.receive(AgentUpdate::Gone(AgentExitReason::Stopped));
    end_child(&mut harness, "x");
    end_child(&mut harness, "y");
    harness.context.agent = AgentAvailability::Starting;
    let gone = harness.receive(AgentUpdate::Gone(AgentExitReason::Failed(RunError::new(
        "agent_not_started",
        "no such program",
    ))));
    assert_eq!(finishes(&gone), [("a".to_owned(), FinishReason::Error)]);
}

#[test]
fn nothing_is_resumed_under_a_halt_or_without_a_slot() {
    let mut harness = suspended_run();
    harness.context.halted = true;
    end_child(&mut harness, "x");
    assert_eq!(kinds(&end_child(&mut harness, "y")), ["session.updated"]);
    (harness.context.halted, harness.context.slot_available, harness.context.agent) =
        (false, false, AgentAvailability::IdleStopped);
    assert_eq!(kinds(&harness.input(SessionInput::Wake)), ["run.queued"]);
    harness.context.slot_available = true;
    assert!(matches!(
        harness.input(SessionInput::Wake).effects[..],
        [SessionEffect::LaunchAgent { new_worker: false, .. }]
    ));
}

#[test]
fn a_resume_that_was_cut_off_is_sent_again_under_its_own_number() {
    let mut harness = suspended_run();
    let first = harness.state.active_run().unwrap().1.number;
    end_child(&mut harness, "x");
    let resumed = end_child(&mut harness, "y");
    let again =
        harness.input(SessionInput::WorkerAttached { applied: first, reattached: true, run_time_ms: None });
    assert_eq!(again.effects, resumed.effects);
}

#[test]
fn a_cancel_ends_a_suspended_run_at_once_and_cancels_the_children() {
    for run in [None, RunId::parse("a").ok()] {
        let mut harness = suspended_run();
        let cancelled = harness.command(SessionCommand::Cancel { run, by: RunStopCause::User, reason: None });
        assert_eq!(finishes(&cancelled), [("a".to_owned(), FinishReason::Cancelled)]);
        assert!(
            matches!(cancelled.effects[..], [SessionEffect::CancelChildren { .. }]),
            "{:?}",
            cancelled.effects
        );
        assert_eq!(started(&harness.prompt("b")).as_deref(), Some("b"));
    }
}

#[test]
fn a_spent_budget_a_halt_and_a_close_end_a_suspended_run_at_once() {
    let mut harness = suspended_run();
    let spent = harness.command(SessionCommand::OverBudget);
    assert_eq!(finishes(&spent), [("a".to_owned(), FinishReason::BudgetExceeded)]);
    let mut harness = suspended_run();
    let halted = harness.command(SessionCommand::CancelActiveRun);
    assert_eq!(finishes(&halted), [("a".to_owned(), FinishReason::Cancelled)]);
    let mut harness = suspended_run();
    let closed = harness.command(SessionCommand::Close { purge: false });
    assert_eq!(finishes(&closed), [("a".to_owned(), FinishReason::Cancelled)]);
}

#[test]
fn a_turn_that_is_being_stopped_cannot_escape_by_suspending() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    spawn(&mut harness, "x");
    harness.cancel();
    assert_eq!(
        finishes(&harness.end("a", TurnStopReason::Suspended)),
        [("a".to_owned(), FinishReason::Cancelled)]
    );
}

#[test]
fn the_time_of_a_suspended_run_stands_still() {
    let mut harness = SessionHarness::new();
    harness.state.settings.limits.run_timeout_s = Some(10.0);
    harness.prompt("a");
    spawn(&mut harness, "x");
    harness.context.now = clocks_at(4_000);
    harness.end("a", TurnStopReason::Suspended);
    assert_eq!(harness.deadline(), None);
    harness.context.now = clocks_at(1_000_000);
    end_child(&mut harness, "x");
    assert_eq!(harness.deadline(), Some(6_000));
}

#[test]
fn open_asks_and_steers_are_settled_when_the_turn_suspends() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    spawn(&mut harness, "x");
    harness.ask("a", "ask1", AskKind::Permission);
    harness.command(SessionCommand::Steer { text: "left".into() });
    let suspended = harness.end("a", TurnStopReason::Suspended);
    let expected = ["ask.resolved", "steer.missed", "run.accepted", "message.created", "run.suspended"];
    assert_eq!(kinds(&suspended), expected);
    let late = harness.ask("a", "ask2", AskKind::Permission);
    assert_eq!(kinds(&late), ["ask.opened", "ask.resolved"], "nobody waits for the answer any more");
    assert_eq!(harness.deadline(), None);
    assert_eq!(harness.state.phase(), SessionPhase::Waiting);
}

#[test]
fn a_rebuilt_session_queries_the_children_that_it_still_waits_for() {
    let mut harness = suspended_run();
    end_child(&mut harness, "x");
    harness.context.agent = AgentAvailability::Lost;
    let woken = harness.input(SessionInput::Wake);
    assert!(woken.events.is_empty());
    assert_eq!(woken.effects, [SessionEffect::QueryChildren { children: vec![child("y")] }]);
}

#[test]
fn the_results_of_many_sessions_fit_into_one_event() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    let names: Vec<String> = (0..1000).map(|at| format!("{at:0>128}")).collect();
    for name in &names {
        spawn(&mut harness, name);
    }
    harness.end("a", TurnStopReason::Suspended);
    let text = "\u{1}".repeat(HEAD_MAX);
    let mut last = SessionStep::default();
    for name in &names {
        last = harness.command(SessionCommand::ChildEnded(result(name, &text)));
    }
    let resumed = last.events.last().unwrap();
    assert_eq!(resumed.body.kind(), "run.resumed");
    assert!(resumed.body.encode(None).unwrap().len() <= EVENT_MAX);

    spawn(&mut harness, "one");
    let outcome = TurnOutcome {
        transcript: vec![text.repeat(100).into()],
        ..TurnOutcome::of(TurnStopReason::Suspended)
    };
    let failed = harness.receive(AgentUpdate::TurnEnded { run: RunId::parse("a").unwrap(), outcome });
    assert_eq!(error(&failed).unwrap().code, "transcript_too_large");
}

#[test]
fn a_child_session_notifies_its_parent_when_it_becomes_idle() {
    let mut harness = SessionHarness::new();
    harness.state.settings.parent = Some(child("above"));
    harness.prompt("a");
    harness.prompt("b");
    assert!(!harness.end("a", TurnStopReason::EndTurn).effects.contains(&SessionEffect::NotifyParent));
    assert_eq!(harness.end("b", TurnStopReason::Error).effects, [SessionEffect::NotifyParent]);
    harness.command(SessionCommand::Close { purge: true });
    let closed = harness.receive(AgentUpdate::Gone(AgentExitReason::Stopped));
    assert_eq!(closed.effects, [SessionEffect::NotifyParent, SessionEffect::Purge]);
}
