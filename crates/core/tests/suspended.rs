//! Runs that wait for the sessions that they started, one promise at a time.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;

use harness::{SessionHarness, error, finishes, kinds, started};
use qd_core::rows::{SessionDoc, UpdatedRow};
use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, SessionCommand, SessionEffect, SessionInput,
    SessionPhase, SessionStep, deadline,
};
use qd_protocol::api::{RunStatus, SessionStatus};
use qd_protocol::event::{AskKind, ChildResult, EventBody, RunError, RunStopCause};
use qd_protocol::limits::{EVENT_MAX, HEAD_MAX};
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnOutcome, TurnStopReason, TurnUpdate};
use qd_protocol::{EventNumber, FinishReason, Millis, RunId, SessionId};

const READY: AgentAvailability = AgentAvailability::Ready { steerable: true };

fn child(name: &str) -> SessionId {
    SessionId::parse(name).unwrap()
}

fn spawn(bench: &mut SessionHarness, name: &str) -> SessionStep {
    bench.command(SessionCommand::AddChild { child: child(name) })
}

fn result(name: &str, text: &str) -> ChildResult {
    let finish_reason = Some(FinishReason::EndTurn);
    ChildResult { session_id: child(name), finish_reason, text: text.to_owned() }
}

fn ends(bench: &mut SessionHarness, name: &str) -> SessionStep {
    bench.command(SessionCommand::ChildEnded(result(name, "done")))
}

/// A run `a` that waits for the sessions `x` and `y`.
fn waiting() -> SessionHarness {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    spawn(&mut bench, "x");
    spawn(&mut bench, "y");
    bench.end("a", TurnStopReason::Suspended);
    bench
}

#[test]
fn a_run_that_started_nothing_has_nothing_to_wait_for() {
    let mut bench = SessionHarness::new();
    spawn(&mut bench, "before");
    bench.prompt("a");
    let ended = bench.end("a", TurnStopReason::Suspended);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Error)]);
    assert_eq!(error(&ended).unwrap().code, "nothing_to_wait_for");
}

#[test]
fn a_suspended_run_stays_active_and_is_shown_as_such() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    spawn(&mut bench, "x");
    let transcript = vec![serde_json::json!({"role": "user"})];
    let outcome =
        TurnOutcome { transcript: transcript.clone(), ..TurnOutcome::of(TurnStopReason::Suspended) };
    let suspended = bench.hear(AgentUpdate::Terminal { run: RunId::parse("a").unwrap(), outcome });
    assert_eq!(kinds(&suspended), ["run.suspended"]);
    let EventBody::RunSuspended(body) = &suspended.events[0].body else { panic!("{suspended:?}") };
    assert_eq!((&body.children, &body.transcript), (&vec![child("x")], &transcript));
    assert_eq!(suspended.effects, [SessionEffect::QueryChildren { children: vec![child("x")] }]);
    let [UpdatedRow::Run { doc, .. }] = &suspended.rows[..] else { panic!("{suspended:?}") };
    assert_eq!(doc.state, RunStatus::Suspended);
    assert_eq!(bench.state.phase(), SessionPhase::Waiting);
    assert_eq!(SessionDoc::of(&bench.state).view(false).state, SessionStatus::Waiting);
    let steered = bench.command(SessionCommand::Steer { text: "left".into() });
    assert_eq!(steered.reply, Some(CommandReply::Refused(CommandRefusal::NotRunning)));
    assert_eq!(bench.prompt("b").reply, Some(CommandReply::Accepted { position: 1, event: Some(0) }));
}

#[test]
fn a_run_is_resumed_once_when_all_that_it_waits_for_has_ended() {
    let mut bench = waiting();
    assert_eq!(kinds(&ends(&mut bench, "x")), ["session.updated"]);
    assert!(ends(&mut bench, "x").events.is_empty(), "said twice, noted once");
    assert!(ends(&mut bench, "stranger").events.is_empty());
    let last = bench.command(SessionCommand::ChildEnded(result("y", "forty-two")));
    assert_eq!(kinds(&last), ["session.updated", "run.resumed"]);
    let EventBody::RunResumed(resumed) = &last.events[1].body else { panic!("{last:?}") };
    assert_eq!(resumed.children, [result("x", "done"), result("y", "forty-two")]);
    let run = RunId::parse("a").unwrap();
    assert_eq!(last.effects, [SessionEffect::SendPrompt { number: last.events[1].number, run }]);
    assert!(ends(&mut bench, "y").events.is_empty());

    let text = TurnUpdate::Text { text: "so".to_owned() };
    bench.hear(AgentUpdate::Turn { run: RunId::parse("a").unwrap(), update: text });
    assert_eq!(finishes(&bench.end("a", TurnStopReason::EndTurn)), [("a".to_owned(), FinishReason::EndTurn)]);
}

#[test]
fn a_second_suspend_waits_for_the_sessions_started_since() {
    let mut bench = waiting();
    ends(&mut bench, "x");
    ends(&mut bench, "y");
    spawn(&mut bench, "z");
    let again = bench.end("a", TurnStopReason::Suspended);
    assert_eq!(again.effects, [SessionEffect::QueryChildren { children: vec![child("z")] }]);
    ends(&mut bench, "z");
    let third = bench.end("a", TurnStopReason::Suspended);
    assert_eq!(error(&third).unwrap().code, "nothing_to_wait_for");
}

#[test]
fn a_resume_without_an_agent_launches_one_first() {
    let mut bench = waiting();
    bench.world.agent = AgentAvailability::Absent;
    let gone = bench.hear(AgentUpdate::Gone(AgentExitReason::Lost));
    assert_eq!(kinds(&gone), ["worker.exited"], "the run costs no process, and loses none");
    assert!(gone.effects.is_empty());
    ends(&mut bench, "x");
    let last = ends(&mut bench, "y");
    assert_eq!(kinds(&last), ["session.updated", "worker.started"]);
    bench.world.agent = READY;
    let attached = bench.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: false,
        run_time_ms: None,
    });
    assert_eq!(kinds(&attached), ["run.resumed"], "and its first prompt is not given again");
    assert!(matches!(attached.effects[..], [SessionEffect::SendPrompt { .. }]));
}

#[test]
fn a_run_that_cannot_be_resumed_fails_like_one_that_cannot_start() {
    let mut bench = waiting();
    bench.world.agent = AgentAvailability::Absent;
    bench.hear(AgentUpdate::Gone(AgentExitReason::Stopped));
    ends(&mut bench, "x");
    ends(&mut bench, "y");
    bench.world.agent = AgentAvailability::Starting;
    let gone = bench.hear(AgentUpdate::Gone(AgentExitReason::Failed(RunError::new(
        "agent_not_started",
        "no such program",
    ))));
    assert_eq!(finishes(&gone), [("a".to_owned(), FinishReason::Error)]);
}

#[test]
fn nothing_is_resumed_under_a_halt_or_without_room() {
    let mut bench = waiting();
    bench.world.halted = true;
    ends(&mut bench, "x");
    assert_eq!(kinds(&ends(&mut bench, "y")), ["session.updated"]);
    (bench.world.halted, bench.world.slot_available, bench.world.agent) =
        (false, false, AgentAvailability::WorkerOnly);
    assert_eq!(kinds(&bench.input(SessionInput::Wake)), ["run.queued"]);
    bench.world.slot_available = true;
    assert!(matches!(
        bench.input(SessionInput::Wake).effects[..],
        [SessionEffect::LaunchAgent { new_worker: false, .. }]
    ));
}

#[test]
fn a_resume_that_was_cut_off_is_sent_again_under_its_own_number() {
    let mut bench = waiting();
    let first = bench.state.active_run().unwrap().1.number;
    ends(&mut bench, "x");
    let resumed = ends(&mut bench, "y");
    let again =
        bench.input(SessionInput::WorkerAttached { applied: first, reattached: true, run_time_ms: None });
    assert_eq!(again.effects, resumed.effects);
}

#[test]
fn a_cancel_ends_a_suspended_run_at_once_and_goes_on_to_those_below() {
    for run in [None, RunId::parse("a").ok()] {
        let mut bench = waiting();
        let cancelled = bench.command(SessionCommand::Cancel { run, by: RunStopCause::User, reason: None });
        assert_eq!(finishes(&cancelled), [("a".to_owned(), FinishReason::Cancelled)]);
        assert!(
            matches!(cancelled.effects[..], [SessionEffect::CancelChildren { .. }]),
            "{:?}",
            cancelled.effects
        );
        assert_eq!(started(&bench.prompt("b")).as_deref(), Some("b"));
    }
}

#[test]
fn a_spent_budget_a_halt_and_a_close_end_a_suspended_run_at_once() {
    let mut bench = waiting();
    let spent = bench.command(SessionCommand::OverBudget);
    assert_eq!(finishes(&spent), [("a".to_owned(), FinishReason::BudgetExceeded)]);
    let mut bench = waiting();
    let halted = bench.command(SessionCommand::CancelActiveRun);
    assert_eq!(finishes(&halted), [("a".to_owned(), FinishReason::Cancelled)]);
    let mut bench = waiting();
    let closed = bench.command(SessionCommand::Close { purge: false });
    assert_eq!(finishes(&closed), [("a".to_owned(), FinishReason::Cancelled)]);
}

#[test]
fn a_turn_that_is_told_to_stop_does_not_get_out_of_it_by_suspending() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    spawn(&mut bench, "x");
    bench.cancel();
    assert_eq!(
        finishes(&bench.end("a", TurnStopReason::Suspended)),
        [("a".to_owned(), FinishReason::Cancelled)]
    );
}

#[test]
fn the_time_of_a_suspended_run_stands_still() {
    let mut bench = SessionHarness::new();
    bench.state.settings.limits.run_timeout_s = Some(10.0);
    bench.prompt("a");
    spawn(&mut bench, "x");
    bench.world.now = Millis(4_000);
    bench.end("a", TurnStopReason::Suspended);
    assert_eq!(deadline(&bench.state, bench.world.agent), None);
    bench.world.now = Millis(1_000_000);
    ends(&mut bench, "x");
    assert_eq!(deadline(&bench.state, bench.world.agent), Some(Millis(1_006_000)));
}

#[test]
fn what_the_turn_left_open_is_closed_when_it_suspends() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    spawn(&mut bench, "x");
    bench.ask("a", "ask1", AskKind::Permission);
    bench.command(SessionCommand::Steer { text: "left".into() });
    let suspended = bench.end("a", TurnStopReason::Suspended);
    let expected = ["ask.resolved", "steer.missed", "run.accepted", "message.created", "run.suspended"];
    assert_eq!(kinds(&suspended), expected);
    let late = bench.ask("a", "ask2", AskKind::Permission);
    assert_eq!(kinds(&late), ["ask.opened", "ask.resolved"], "nobody waits for the answer any more");
    assert_eq!(deadline(&bench.state, bench.world.agent), None);
    assert_eq!(bench.state.phase(), SessionPhase::Waiting);
}

#[test]
fn a_rebuilt_session_asks_again_for_those_that_it_does_not_know_of() {
    let mut bench = waiting();
    ends(&mut bench, "x");
    bench.world.agent = AgentAvailability::Lost;
    let woken = bench.input(SessionInput::Wake);
    assert!(woken.events.is_empty());
    assert_eq!(woken.effects, [SessionEffect::QueryChildren { children: vec![child("y")] }]);
}

#[test]
fn what_became_of_many_sessions_fits_one_event() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    let names: Vec<String> = (0..1000).map(|at| format!("{at:0>128}")).collect();
    for name in &names {
        spawn(&mut bench, name);
    }
    bench.end("a", TurnStopReason::Suspended);
    let text = "\u{1}".repeat(HEAD_MAX);
    let mut last = SessionStep::default();
    for name in &names {
        last = bench.command(SessionCommand::ChildEnded(result(name, &text)));
    }
    let resumed = last.events.last().unwrap();
    assert_eq!(resumed.body.kind(), "run.resumed");
    assert!(resumed.body.encode().unwrap().len() <= EVENT_MAX);

    spawn(&mut bench, "one");
    let outcome = TurnOutcome {
        transcript: vec![text.repeat(100).into()],
        ..TurnOutcome::of(TurnStopReason::Suspended)
    };
    let failed = bench.hear(AgentUpdate::Terminal { run: RunId::parse("a").unwrap(), outcome });
    assert_eq!(error(&failed).unwrap().code, "transcript_too_large");
}

#[test]
fn a_session_with_one_above_tells_it_when_nothing_is_left_to_do() {
    let mut bench = SessionHarness::new();
    bench.state.settings.parent = Some(child("above"));
    bench.prompt("a");
    bench.prompt("b");
    assert!(!bench.end("a", TurnStopReason::EndTurn).effects.contains(&SessionEffect::NotifyParent));
    assert_eq!(bench.end("b", TurnStopReason::Error).effects, [SessionEffect::NotifyParent]);
    bench.command(SessionCommand::Close { purge: true });
    let closed = bench.hear(AgentUpdate::Gone(AgentExitReason::Stopped));
    assert_eq!(closed.effects, [SessionEffect::NotifyParent, SessionEffect::Purge]);
}
