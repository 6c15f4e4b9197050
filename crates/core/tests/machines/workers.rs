//! A session and its worker, one promise at a time: when it is started, what its exit means for a run, how often it
//! may crash, and how a session closes around it.

use qd_core::rows::SessionDoc;
use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, SessionCommand, SessionEffect, SessionInput,
    SessionPhase, SessionState, SettingsUpdate,
};
use qd_protocol::api::SessionStatus;
use qd_protocol::event::{
    AskAnswer, AskKind, EventBody, PermissionDecision, QueueReason, RunError, RunStopCause, SessionLimits,
    WorkerExitReason,
};
use qd_protocol::limits::KILL_S;
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnOutcome, TurnStopReason};
use qd_protocol::sandbox::{SandboxLevel, SandboxSetting};
use qd_protocol::sandbox_spec::SandboxReport;
use qd_protocol::{AskId, EventNumber, FinishReason, RunId, WorkerId};

use crate::harness::{SessionHarness, clocks_at, error, finishes, kinds, started};

const READY: AgentAvailability = AgentAvailability::Ready { steerable: true };

fn ready() -> AgentUpdate {
    AgentUpdate::Ready { agent_session_id: None, steers: true }
}

fn failed() -> AgentExitReason {
    AgentExitReason::Failed(RunError::new("agent_exited", "it exited with 3"))
}

fn limits(restarts: u32, window_s: f64) -> SessionLimits {
    SessionLimits { restarts: Some(restarts), restart_window_s: Some(window_s), ..SessionLimits::default() }
}

/// Crashes the worker of a waiting run, `apart` milliseconds after the previous crash.
fn crash(harness: &mut SessionHarness, apart: u64) -> qd_core::session::SessionStep {
    harness.context.now = harness.context.now.plus(apart);
    harness.context.agent = AgentAvailability::Absent;
    harness.input(SessionInput::WorkerGone(AgentExitReason::Lost))
}

#[test]
fn a_prompt_without_a_worker_starts_one_that_is_named_by_its_event() {
    let mut harness = SessionHarness::without_worker();
    let accepted = harness.prompt("a");
    assert_eq!(kinds(&accepted), ["run.accepted", "message.created", "worker.started"]);
    let event = accepted.events.last().unwrap();
    let worker = WorkerId::of_session(&harness.state.id, event.number);
    assert_eq!(event.run, None);
    assert_eq!(harness.state.worker, Some(worker.clone()));
    assert_eq!(accepted.effects, [SessionEffect::LaunchAgent { worker, new_worker: true }]);
}

#[test]
fn the_session_shows_how_its_agent_was_confined_and_a_correction_by_the_worker() {
    let report = |level| SandboxReport { level, ..SandboxReport::default() };
    let mut harness = SessionHarness::without_worker();
    let view = |harness: &SessionHarness| SessionDoc::of(&harness.state).view(false, None).sandbox.unwrap();
    let shown = |harness: &SessionHarness| view(harness).level;
    assert_eq!(shown(&harness), None, "no agent was started");
    harness.context.sandbox = Some(report(SandboxLevel::Deck));
    let accepted = harness.prompt("a");
    let EventBody::WorkerStarted(started) = &accepted.events.last().unwrap().body else { panic!() };
    assert_eq!(started.sandbox, Some(report(SandboxLevel::Deck)));
    harness.context.agent = AgentAvailability::Starting;
    assert_eq!(kinds(&harness.receive(AgentUpdate::Confined(report(SandboxLevel::Deck)))), [] as [&str; 0]);
    assert_eq!(shown(&harness), Some(SandboxLevel::Deck));
    let corrected = harness.receive(AgentUpdate::Confined(report(SandboxLevel::Off)));
    assert_eq!(kinds(&corrected), ["session.updated"]);
    assert_eq!(shown(&harness), Some(SandboxLevel::Off), "the worker has the last word");
    let sandbox = Some(SandboxSetting::Workspace);
    harness.command(SessionCommand::UpdateSettings(SettingsUpdate { sandbox, ..SettingsUpdate::default() }));
    let sandbox = view(&harness);
    assert_eq!((sandbox.asked, sandbox.level), (SandboxSetting::Workspace, Some(SandboxLevel::Off)));
}

#[test]
fn a_worker_that_was_given_up_interrupts_its_run_with_the_reason_and_the_queue_goes_on() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.prompt("b");
    harness.context.agent = AgentAvailability::Lost;
    let reason = RunError::new("worker_unreachable", "it could not be reached");
    let gone = harness.input(SessionInput::WorkerGone(AgentExitReason::Unreachable(reason.clone())));
    let ended = gone.events.iter().find_map(|event| match &event.body {
        EventBody::RunFinished(finished) => Some((finished.finish_reason, finished.error.clone())),
        _ => None,
    });
    assert_eq!(ended, Some((FinishReason::Interrupted, Some(reason.clone()))));
    let EventBody::WorkerExited(exited) = &gone.events[0].body else { panic!("{:?}", gone.events) };
    assert_eq!((exited.reason, exited.error.as_ref()), (WorkerExitReason::Lost, Some(&reason)));
    assert!(matches!(gone.effects.last(), Some(SessionEffect::LaunchAgent { new_worker: true, .. })));
}

#[test]
fn a_resting_worker_is_given_an_agent_without_another_event() {
    let mut harness = SessionHarness::new();
    harness.context.agent = AgentAvailability::Starting;
    let waits = harness.prompt("a");
    assert!(waits.effects.is_empty(), "its idle agent is being stopped, and that comes first");
    harness.context.agent = AgentAvailability::IdleStopped;
    let rested = harness.receive(AgentUpdate::IdleStopped);
    assert!(rested.events.is_empty());
    let worker = harness.state.worker.clone().unwrap();
    assert_eq!(rested.effects, [SessionEffect::LaunchAgent { worker, new_worker: false }]);
}

#[test]
fn without_a_slot_a_run_is_queued_visibly_and_once() {
    let mut harness = SessionHarness::without_worker();
    harness.context.slot_available = false;
    let first = harness.prompt("a");
    assert!(matches!(first.reply, Some(CommandReply::Accepted { position: 1, .. })));
    assert_eq!(kinds(&first), ["run.accepted", "message.created", "run.queued"]);
    let EventBody::RunQueued(queued) = &first.events[2].body else { panic!("{first:?}") };
    assert_eq!((queued.reason, queued.position), (QueueReason::Capacity, 1));
    assert!(first.effects.is_empty());
    let second = harness.prompt("b");
    assert!(matches!(second.reply, Some(CommandReply::Accepted { position: 2, .. })));
    assert_eq!(kinds(&second), ["run.accepted", "message.created", "run.queued"]);
    assert!(harness.input(SessionInput::Wake).events.is_empty());

    assert_eq!(harness.state.phase(), SessionPhase::Queued);
    let session = SessionDoc::of(&harness.state).view(false, None);
    assert_eq!((session.state, session.busy, session.queued), (SessionStatus::Idle, true, 2));
    let steered = harness.command(SessionCommand::Steer { text: "left".into() });
    assert_eq!(steered.reply, Some(CommandReply::Refused(CommandRefusal::NotRunning)));

    harness.context.slot_available = true;
    let woken = harness.input(SessionInput::Wake);
    assert_eq!(kinds(&woken), ["worker.started"]);
    assert_eq!(SessionDoc::of(&harness.state).view(false, None).state, SessionStatus::Starting);
}

#[test]
fn a_run_that_waits_for_a_slot_can_be_removed_from_the_queue() {
    let mut harness = SessionHarness::without_worker();
    harness.context.slot_available = false;
    harness.prompt("a");
    let cleared = harness.command(SessionCommand::ClearQueue);
    assert_eq!(finishes(&cleared), [("a".to_owned(), FinishReason::Cancelled)]);
}

#[test]
fn a_notice_about_preparing_an_agent_belongs_to_no_run_and_changes_nothing() {
    let mut harness = SessionHarness::without_worker();
    harness.prompt("a");
    harness.context.agent = AgentAvailability::Starting;
    let before = SessionDoc::of(&harness.state).phase;
    let noticed = harness.input(SessionInput::Notice { text: "works elsewhere".to_owned() });
    assert_eq!(kinds(&noticed), ["notice.shown"]);
    assert!(noticed.events[0].run.is_none() && noticed.effects.is_empty() && !noticed.session_changed);
    assert_eq!(SessionDoc::of(&harness.state).phase, before);
    harness.context.agent = AgentAvailability::Absent;
    harness.command(SessionCommand::Close { purge: false });
    harness.input(SessionInput::WorkerGone(AgentExitReason::Stopped));
    assert!(harness.state.closed);
    assert!(harness.input(SessionInput::Notice { text: "too late".to_owned() }).events.is_empty());
}

#[test]
fn a_ready_agent_needs_no_slot() {
    let mut harness = SessionHarness::new();
    harness.context.slot_available = false;
    assert_eq!(started(&harness.prompt("a")).as_deref(), Some("a"));
}

#[test]
fn the_exit_of_a_worker_ends_its_run_and_counts_once() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    // The link has not noticed yet; the machine knows from the update.
    assert_eq!(harness.context.agent, READY);
    harness.prompt("b");
    let gone = harness.receive(AgentUpdate::Gone(failed()));
    assert_eq!(
        kinds(&gone)[..4],
        ["worker.exited", "error.raised", "message.finished", "run.finished"],
        "the worker's exit, and then its consequences"
    );
    assert_eq!(finishes(&gone), [("a".to_owned(), FinishReason::Error)]);
    assert_eq!(started(&gone), None, "the next run does not start on a worker that is gone");
    assert!(matches!(gone.effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]));
    let EventBody::WorkerExited(exited) = &gone.events[0].body else { panic!("{gone:?}") };
    assert_eq!(exited.reason, WorkerExitReason::Failed);
    assert_eq!(exited.error.as_ref().map(|error| error.code.as_str()), Some("agent_exited"));
}

#[test]
fn the_exit_of_a_worker_that_does_not_exist_is_ignored() {
    let mut harness = SessionHarness::without_worker();
    let again = harness.input(SessionInput::WorkerGone(AgentExitReason::Lost));
    assert!(again.events.is_empty() && again.effects.is_empty());
}

#[test]
fn a_cancelled_run_whose_worker_is_lost_ends_as_cancelled() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.cancel();
    let gone = harness.input(SessionInput::WorkerGone(AgentExitReason::Lost));
    assert_eq!(finishes(&gone), [("a".to_owned(), FinishReason::Cancelled)]);
}

#[test]
fn a_queued_prompt_does_not_fail_with_an_idle_agent_under_a_halt() {
    let mut harness = SessionHarness::new();
    harness.context.halted = true;
    harness.prompt("a");
    let gone = harness.receive(AgentUpdate::Gone(failed()));
    assert_eq!(kinds(&gone), ["worker.exited"]);
    assert!(harness.state.is_busy());
}

#[test]
fn a_reattached_worker_is_reported_and_gets_what_it_missed() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    let number = harness.state.active_run().unwrap().1.number;
    let first =
        harness.input(SessionInput::WorkerAttached { applied: number, reattached: false, run_time_ms: None });
    assert!(first.events.is_empty() && first.effects.is_empty());
    let again = harness.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: true,
        run_time_ms: None,
    });
    assert_eq!(kinds(&again), ["worker.reattached"]);
    assert!(matches!(again.effects[..], [SessionEffect::SendPrompt { .. }]));
}

#[test]
fn limits_that_the_worker_enforced_alone_end_the_run_as_ours_do() {
    for (stop, reason) in [
        (TurnStopReason::Timeout, FinishReason::Timeout),
        (TurnStopReason::BudgetExceeded, FinishReason::BudgetExceeded),
    ] {
        let mut harness = SessionHarness::new();
        harness.prompt("a");
        assert_eq!(finishes(&harness.end("a", stop)), [("a".to_owned(), reason)]);
    }
}

#[test]
fn beyond_the_limit_runs_end_at_once_until_the_crashes_are_older() {
    let mut harness = SessionHarness::without_worker();
    harness.state.settings.limits = limits(2, 60.0);
    harness.prompt("a");
    for _ in 0..2 {
        let lost = crash(&mut harness, 10_000);
        assert!(
            matches!(lost.effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]),
            "it is started again"
        );
    }
    harness.prompt("b");
    let last = crash(&mut harness, 10_000);
    assert!(last.effects.is_empty(), "no worker is started");
    let ended = ["a", "b"].map(|run| (run.to_owned(), FinishReason::Error));
    assert_eq!(finishes(&last), ended);
    let error = error(&last).unwrap();
    assert_eq!(error.code, "restart_limit");
    assert_eq!(
        error.message,
        "the agent crashed 3 times within 60 s and may be restarted 2 times in that time: raise `restarts` with a \
         PATCH of the session, or wait until the crashes are older"
    );
    let next = harness.prompt("c");
    assert_eq!(finishes(&next), [("c".to_owned(), FinishReason::Error)]);
    assert!(matches!(next.reply, Some(CommandReply::Accepted { position: 0, .. })));

    harness.context.now = clocks_at(70_000);
    assert!(matches!(harness.prompt("d").effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]));
}

#[test]
fn a_patch_of_the_limit_lets_the_next_run_start() {
    let mut harness = SessionHarness::without_worker();
    harness.state.settings.limits = limits(0, 60.0);
    harness.prompt("a");
    let never = error(&crash(&mut harness, 0)).unwrap();
    assert!(never.message.starts_with("the agent crashed once within 60 s and may be restarted 0 times"));
    assert!(harness.state.worker.is_none());
    harness.command(SessionCommand::UpdateSettings(SettingsUpdate {
        limits: Some(limits(1, 60.0)),
        ..SettingsUpdate::default()
    }));
    assert!(matches!(harness.prompt("b").effects[..], [SessionEffect::LaunchAgent { .. }]));
}

#[test]
fn the_recorded_crashes_are_bounded_by_the_limit() {
    let mut harness = SessionHarness::without_worker();
    harness.state.settings.limits = limits(1, 1e6);
    for run in ["a", "b", "c", "d", "e"] {
        harness.prompt(run);
        harness.state.worker = Some(WorkerId::of_session(&harness.state.id, harness.state.number));
        crash(&mut harness, 1);
    }
    assert_eq!(harness.state.crashes, [clocks_at(4), clocks_at(5)]);
}

#[test]
fn an_agent_that_did_not_let_go_is_stopped_and_never_given_the_next_run() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.cancel();
    for _ in 0..2 {
        harness.context.now = harness.context.now.plus(harness.deadline().unwrap());
        harness.input(SessionInput::Tick);
    }
    assert!(!harness.state.is_busy(), "it was asked, killed, and abandoned");
    let next = harness.prompt("b");
    assert_eq!((started(&next), next.effects), (None, vec![SessionEffect::StopAgent]));
    let rebuilt: SessionState = serde_json::from_slice(&serde_json::to_vec(&harness.state).unwrap()).unwrap();
    harness.state = rebuilt;
    assert_eq!(
        harness.input(SessionInput::Wake).effects,
        [SessionEffect::StopAgent],
        "the next daemon knows it too"
    );
    let gone = harness.receive(AgentUpdate::Gone(failed()));
    assert!(harness.state.crashes.is_empty(), "a worker that we stop has not crashed");
    assert!(matches!(gone.effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]));
    harness.context.agent = READY;
    assert_eq!(started(&harness.receive(ready())).as_deref(), Some("b"));
}

#[test]
fn a_session_closes_when_its_worker_is_gone() {
    let mut harness = SessionHarness::new();
    let closing = harness.command(SessionCommand::Close { purge: false });
    assert_eq!(closing.effects, [SessionEffect::StopAgent]);
    assert!(!harness.state.closed);
    assert_eq!(harness.input(SessionInput::Wake).effects, [SessionEffect::StopAgent]);
    let gone = harness.receive(AgentUpdate::Gone(AgentExitReason::Stopped));
    assert_eq!(kinds(&gone), ["worker.exited", "session.closed"]);
}

#[test]
fn a_session_closes_without_a_worker_that_never_ends() {
    let mut harness = SessionHarness::new();
    harness.context.now = clocks_at(1000);
    harness.command(SessionCommand::Close { purge: false });
    assert_eq!(harness.deadline(), Some((KILL_S + 5) * 1000));
    harness.context.now = clocks_at(1000 + (KILL_S + 5) * 1000);
    assert_eq!(kinds(&harness.input(SessionInput::Tick)), ["session.closed"]);
    assert_eq!(harness.deadline(), None);
    assert!(
        harness.receive(AgentUpdate::Gone(AgentExitReason::Stopped)).events.is_empty(),
        "nothing comes after session.closed"
    );
    let found = harness.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: true,
        run_time_ms: None,
    });
    assert_eq!((found.events.len(), found.effects), (0, vec![SessionEffect::StopAgent]));
}

#[test]
fn a_session_without_a_worker_closes_at_once() {
    let mut harness = SessionHarness::without_worker();
    let closed = harness.command(SessionCommand::Close { purge: true });
    assert_eq!(kinds(&closed), ["session.updated", "session.closed"]);
    assert_eq!(closed.effects, [SessionEffect::Purge]);
}

#[test]
fn a_run_from_before_workers_existed_is_interrupted_when_it_is_loaded() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.state.worker = None;
    harness.context.agent = AgentAvailability::Absent;
    let woken = harness.input(SessionInput::Wake);
    assert_eq!(finishes(&woken), [("a".to_owned(), FinishReason::Interrupted)]);
}

#[test]
fn a_snapshot_from_before_workers_existed_is_still_read() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.state.worker = None;
    let mut old = serde_json::to_value(&harness.state).unwrap();
    let forget = |value: &mut serde_json::Value, names: &[&str]| {
        for name in names {
            assert!(value.as_object_mut().unwrap().remove(*name).is_some(), "{name} is written");
        }
    };
    forget(&mut old, &["worker", "stopping", "crashes"]);
    forget(&mut old["runs"][0], &["lacks_room"]);
    forget(&mut old["runs"][0]["started"], &["resumed", "children", "suspended"]);
    assert_eq!(serde_json::from_value::<SessionState>(old).unwrap(), harness.state);
}

#[test]
fn time_while_the_worker_is_disconnected_is_counted_by_the_worker() {
    let mut harness = SessionHarness::new();
    harness.state.settings.limits.run_timeout_s = Some(10.0);
    harness.prompt("a");
    harness.context.now = clocks_at(4_000);
    harness.context.agent = AgentAvailability::Lost;
    harness.context.now = clocks_at(60_000);
    assert_eq!(harness.deadline(), None, "the worker enforces the limit");
    assert!(harness.input(SessionInput::Tick).events.is_empty());
    harness.context.agent = READY;
    let found =
        SessionInput::WorkerAttached { applied: EventNumber(99), reattached: true, run_time_ms: Some(5_000) };
    assert_eq!(kinds(&harness.input(found)), ["worker.reattached"]);
    assert_eq!(harness.deadline(), Some(5_000));
    harness.ask("a", "ask1", AskKind::Permission);
    harness.context.now = clocks_at(90_000);
    let found =
        SessionInput::WorkerAttached { applied: EventNumber(99), reattached: true, run_time_ms: Some(5_000) };
    harness.input(found);
    harness.context.now = clocks_at(100_000);
    let answer = AskAnswer { decision: Some(PermissionDecision::AllowOnce), ..AskAnswer::default() };
    harness.command(SessionCommand::Answer {
        ask: AskId::parse("ask1").unwrap(),
        answer,
        shown_sha256: None,
    });
    assert_eq!(harness.deadline(), Some(5_000), "the wait for a person is kept as well");
}

/// The end of a run's turn that has left processes running.
fn end_leaving(run: &str) -> AgentUpdate {
    let outcome = TurnOutcome { leaves_processes: true, ..TurnOutcome::of(TurnStopReason::EndTurn) };
    AgentUpdate::TurnEnded { run: RunId::parse(run).unwrap(), outcome }
}

#[test]
fn a_stop_that_meets_the_end_of_a_turn_waits_until_what_the_turn_left_is_ended() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.prompt("b");
    let a = RunId::parse("a").unwrap();
    harness.command(SessionCommand::Cancel { run: Some(a), by: RunStopCause::User, reason: None });
    let met = harness.receive(end_leaving("a"));
    assert_eq!((kinds(&met), met.effects.as_slice()), (vec![], [].as_slice()));

    // A worker that was lost meanwhile gets the cancel again, because it may not have received it.
    let (applied, run_time_ms) = (EventNumber(0), None);
    let attached = harness.input(SessionInput::WorkerAttached { applied, reattached: true, run_time_ms });
    assert!(attached.effects.iter().any(|effect| matches!(effect, SessionEffect::CancelTurn { .. })));

    let ended = harness.end("a", TurnStopReason::EndTurn);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Cancelled)]);
    assert_eq!(started(&ended).as_deref(), Some("b"), "the queue goes on");
    let left = harness.receive(end_leaving("b"));
    assert_eq!(finishes(&left), [("b".to_owned(), FinishReason::EndTurn)], "without a stop nothing waits");
}

#[test]
fn a_killed_turn_that_is_given_up_names_the_worker_that_did_not_report() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.cancel();
    harness.receive(end_leaving("a"));
    let mut last = Vec::new();
    while let Some(remaining) = harness.deadline().filter(|_| harness.state.is_busy()) {
        harness.context.now = harness.context.now.plus(remaining);
        last = harness.input(SessionInput::Tick).events;
    }
    let finished = last.iter().find_map(|event| match &event.body {
        EventBody::RunFinished(finished) => Some(finished),
        _ => None,
    });
    let processes = &finished.unwrap().processes;
    assert_eq!((processes.survivors, processes.surviving.len()), (1, 1));
    let worker = harness.state.worker.as_ref().unwrap();
    assert!(processes.surviving[0].name.contains(worker.as_str()), "{processes:?}");
}
