//! A session and its worker, one promise at a time: when one is started, what its end means to a run, how often it may
//! crash, and how a session closes around it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;

use harness::{SessionHarness, error, finishes, kinds, started};
use qd_core::rows::SessionDoc;
use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, SessionCommand, SessionEffect, SessionInput,
    SessionPhase, SessionState, SettingsUpdate, deadline,
};
use qd_protocol::api::SessionStatus;
use qd_protocol::event::{
    AskAnswer, AskKind, EventBody, PermissionDecision, QueueReason, RunError, SessionLimits, WorkerExitReason,
};
use qd_protocol::limits::KILL_S;
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnStopReason};
use qd_protocol::{AskId, EventNumber, FinishReason, Millis, WorkerId};

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

/// Lets the worker of a waiting run crash, `apart` milliseconds after the last.
fn crash(bench: &mut SessionHarness, apart: u64) -> qd_core::session::SessionStep {
    bench.world.now = bench.world.now.plus(apart);
    bench.world.agent = AgentAvailability::Absent;
    bench.input(SessionInput::WorkerGone(AgentExitReason::Lost))
}

#[test]
fn a_prompt_without_a_worker_starts_one_that_is_named_by_its_event() {
    let mut bench = SessionHarness::without_worker();
    let accepted = bench.prompt("a");
    assert_eq!(kinds(&accepted), ["run.accepted", "message.created", "worker.started"]);
    let event = accepted.events.last().unwrap();
    let worker = WorkerId::of_session(&bench.state.id, event.number);
    assert_eq!(event.run, None);
    assert_eq!(bench.state.worker, Some(worker.clone()));
    assert_eq!(accepted.effects, [SessionEffect::LaunchAgent { worker, new_worker: true }]);
}

#[test]
fn a_resting_worker_is_given_an_agent_without_another_event() {
    let mut bench = SessionHarness::new();
    bench.world.agent = AgentAvailability::Starting;
    let waits = bench.prompt("a");
    assert!(waits.effects.is_empty(), "it is being put to rest, and that comes first");
    bench.world.agent = AgentAvailability::WorkerOnly;
    let rested = bench.hear(AgentUpdate::Rested);
    assert!(rested.events.is_empty());
    let worker = bench.state.worker.clone().unwrap();
    assert_eq!(rested.effects, [SessionEffect::LaunchAgent { worker, new_worker: false }]);
}

#[test]
fn without_room_a_run_waits_visibly_and_is_told_so_once() {
    let mut bench = SessionHarness::without_worker();
    bench.world.slot_available = false;
    let first = bench.prompt("a");
    assert!(matches!(first.reply, Some(CommandReply::Accepted { position: 1, .. })));
    assert_eq!(kinds(&first), ["run.accepted", "message.created", "run.queued"]);
    let EventBody::RunQueued(queued) = &first.events[2].body else { panic!("{first:?}") };
    assert_eq!((queued.reason, queued.position), (QueueReason::Capacity, 1));
    assert!(first.effects.is_empty());
    let second = bench.prompt("b");
    assert!(matches!(second.reply, Some(CommandReply::Accepted { position: 2, .. })));
    assert_eq!(kinds(&second), ["run.accepted", "message.created", "run.queued"]);
    assert!(bench.input(SessionInput::Wake).events.is_empty());

    assert_eq!(bench.state.phase(), SessionPhase::Queued);
    let session = SessionDoc::of(&bench.state).view(false);
    assert_eq!((session.state, session.busy, session.queued), (SessionStatus::Idle, true, 2));
    let steered = bench.command(SessionCommand::Steer { text: "left".into() });
    assert_eq!(steered.reply, Some(CommandReply::Refused(CommandRefusal::NotRunning)));

    bench.world.slot_available = true;
    let woken = bench.input(SessionInput::Wake);
    assert_eq!(kinds(&woken), ["worker.started"]);
    assert_eq!(SessionDoc::of(&bench.state).view(false).state, SessionStatus::Starting);
}

#[test]
fn a_run_that_waits_for_room_can_be_taken_out_of_the_queue() {
    let mut bench = SessionHarness::without_worker();
    bench.world.slot_available = false;
    bench.prompt("a");
    let cleared = bench.command(SessionCommand::ClearQueue);
    assert_eq!(finishes(&cleared), [("a".to_owned(), FinishReason::Cancelled)]);
}

#[test]
fn what_is_noticed_on_the_way_to_an_agent_belongs_to_no_run_and_changes_nothing() {
    let mut bench = SessionHarness::without_worker();
    bench.prompt("a");
    bench.world.agent = AgentAvailability::Starting;
    let before = SessionDoc::of(&bench.state).phase;
    let noticed = bench.input(SessionInput::Notice { text: "works elsewhere".to_owned() });
    assert_eq!(kinds(&noticed), ["notice.shown"]);
    assert!(noticed.events[0].run.is_none() && noticed.effects.is_empty() && !noticed.session_changed);
    assert_eq!(SessionDoc::of(&bench.state).phase, before);
    bench.world.agent = AgentAvailability::Absent;
    bench.command(SessionCommand::Close { purge: false });
    bench.input(SessionInput::WorkerGone(AgentExitReason::Stopped));
    assert!(bench.state.closed);
    assert!(bench.input(SessionInput::Notice { text: "too late".to_owned() }).events.is_empty());
}

#[test]
fn a_ready_agent_needs_no_room() {
    let mut bench = SessionHarness::new();
    bench.world.slot_available = false;
    assert_eq!(started(&bench.prompt("a")).as_deref(), Some("a"));
}

#[test]
fn the_last_word_of_a_worker_ends_its_run_and_is_heard_once() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    // The link has not noticed yet; the machine knows better.
    assert_eq!(bench.world.agent, READY);
    bench.prompt("b");
    let gone = bench.hear(AgentUpdate::Gone(failed()));
    assert_eq!(
        kinds(&gone)[..4],
        ["worker.exited", "error.raised", "message.finished", "run.finished"],
        "the worker's end, and then what came of it"
    );
    assert_eq!(finishes(&gone), [("a".to_owned(), FinishReason::Error)]);
    assert_eq!(started(&gone), None, "the next run is not given to one that is gone");
    assert!(matches!(gone.effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]));
    let EventBody::WorkerExited(exited) = &gone.events[0].body else { panic!("{gone:?}") };
    assert_eq!(exited.reason, WorkerExitReason::Failed);
    assert_eq!(exited.error.as_ref().map(|error| error.code.as_str()), Some("agent_exited"));
}

#[test]
fn a_worker_that_nobody_has_is_not_gone_again() {
    let mut bench = SessionHarness::without_worker();
    let again = bench.input(SessionInput::WorkerGone(AgentExitReason::Lost));
    assert!(again.events.is_empty() && again.effects.is_empty());
}

#[test]
fn a_cancelled_run_whose_worker_is_lost_ends_as_cancelled() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    bench.cancel();
    let gone = bench.input(SessionInput::WorkerGone(AgentExitReason::Lost));
    assert_eq!(finishes(&gone), [("a".to_owned(), FinishReason::Cancelled)]);
}

#[test]
fn a_queued_prompt_does_not_fail_with_an_idle_agent_under_a_halt() {
    let mut bench = SessionHarness::new();
    bench.world.halted = true;
    bench.prompt("a");
    let gone = bench.hear(AgentUpdate::Gone(failed()));
    assert_eq!(kinds(&gone), ["worker.exited"]);
    assert!(bench.state.is_busy());
}

#[test]
fn a_worker_found_again_is_told_of_and_gets_what_it_missed() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    let number = bench.state.active_run().unwrap().1.number;
    let first =
        bench.input(SessionInput::WorkerAttached { applied: number, reattached: false, run_time_ms: None });
    assert!(first.events.is_empty() && first.effects.is_empty());
    let again = bench.input(SessionInput::WorkerAttached {
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
        let mut bench = SessionHarness::new();
        bench.prompt("a");
        assert_eq!(finishes(&bench.end("a", stop)), [("a".to_owned(), reason)]);
    }
}

#[test]
fn beyond_the_limit_runs_end_at_once_until_the_crashes_are_older() {
    let mut bench = SessionHarness::without_worker();
    bench.state.settings.limits = limits(2, 60.0);
    bench.prompt("a");
    for _ in 0..2 {
        let lost = crash(&mut bench, 10_000);
        assert!(
            matches!(lost.effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]),
            "it is started again"
        );
    }
    bench.prompt("b");
    let last = crash(&mut bench, 10_000);
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
    let next = bench.prompt("c");
    assert_eq!(finishes(&next), [("c".to_owned(), FinishReason::Error)]);
    assert!(matches!(next.reply, Some(CommandReply::Accepted { position: 0, .. })));

    bench.world.now = Millis(70_000);
    assert!(matches!(bench.prompt("d").effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]));
}

#[test]
fn a_patch_of_the_limit_lets_the_next_run_start() {
    let mut bench = SessionHarness::without_worker();
    bench.state.settings.limits = limits(0, 60.0);
    bench.prompt("a");
    let never = error(&crash(&mut bench, 0)).unwrap();
    assert!(never.message.starts_with("the agent crashed once within 60 s and may be restarted 0 times"));
    assert!(bench.state.worker.is_none());
    bench.command(SessionCommand::UpdateSettings(SettingsUpdate {
        limits: Some(limits(1, 60.0)),
        ..SettingsUpdate::default()
    }));
    assert!(matches!(bench.prompt("b").effects[..], [SessionEffect::LaunchAgent { .. }]));
}

#[test]
fn what_is_kept_of_crashes_is_bounded_by_the_limit() {
    let mut bench = SessionHarness::without_worker();
    bench.state.settings.limits = limits(1, 1e6);
    for run in ["a", "b", "c", "d", "e"] {
        bench.prompt(run);
        bench.state.worker = Some(WorkerId::of_session(&bench.state.id, bench.state.number));
        crash(&mut bench, 1);
    }
    assert_eq!(bench.state.crashes, [Millis(4), Millis(5)]);
}

#[test]
fn an_agent_that_did_not_let_go_is_stopped_and_never_given_the_next_run() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    bench.cancel();
    for _ in 0..2 {
        bench.world.now = deadline(&bench.state, bench.world.agent).unwrap();
        bench.input(SessionInput::Tick);
    }
    assert!(!bench.state.is_busy(), "it was asked, killed, and abandoned");
    let next = bench.prompt("b");
    assert_eq!((started(&next), next.effects), (None, vec![SessionEffect::StopAgent]));
    let rebuilt: SessionState = serde_json::from_slice(&serde_json::to_vec(&bench.state).unwrap()).unwrap();
    bench.state = rebuilt;
    assert_eq!(
        bench.input(SessionInput::Wake).effects,
        [SessionEffect::StopAgent],
        "the next daemon knows it too"
    );
    let gone = bench.hear(AgentUpdate::Gone(failed()));
    assert!(bench.state.crashes.is_empty(), "one that we end is no crash");
    assert!(matches!(gone.effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]));
    bench.world.agent = READY;
    assert_eq!(started(&bench.hear(ready())).as_deref(), Some("b"));
}

#[test]
fn a_session_closes_when_its_worker_is_gone() {
    let mut bench = SessionHarness::new();
    let closing = bench.command(SessionCommand::Close { purge: false });
    assert_eq!(closing.effects, [SessionEffect::StopAgent]);
    assert!(!bench.state.closed);
    assert_eq!(bench.input(SessionInput::Wake).effects, [SessionEffect::StopAgent]);
    let gone = bench.hear(AgentUpdate::Gone(AgentExitReason::Stopped));
    assert_eq!(kinds(&gone), ["worker.exited", "session.closed"]);
}

#[test]
fn a_session_closes_without_a_worker_that_never_ends() {
    let mut bench = SessionHarness::new();
    bench.world.now = Millis(1000);
    bench.command(SessionCommand::Close { purge: false });
    let at = deadline(&bench.state, bench.world.agent).unwrap();
    assert_eq!(at, Millis(1000 + (KILL_S + 5) * 1000));
    bench.world.now = at;
    assert_eq!(kinds(&bench.input(SessionInput::Tick)), ["session.closed"]);
    assert_eq!(deadline(&bench.state, bench.world.agent), None);
    assert!(
        bench.hear(AgentUpdate::Gone(AgentExitReason::Stopped)).events.is_empty(),
        "nothing comes after session.closed"
    );
    let found = bench.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: true,
        run_time_ms: None,
    });
    assert_eq!((found.events.len(), found.effects), (0, vec![SessionEffect::StopAgent]));
}

#[test]
fn a_session_without_a_worker_closes_at_once() {
    let mut bench = SessionHarness::without_worker();
    let closed = bench.command(SessionCommand::Close { purge: true });
    assert_eq!(kinds(&closed), ["session.updated", "session.closed"]);
    assert_eq!(closed.effects, [SessionEffect::Purge]);
}

#[test]
fn a_run_from_the_time_before_workers_is_interrupted_when_it_is_loaded() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    bench.state.worker = None;
    bench.world.agent = AgentAvailability::Absent;
    let woken = bench.input(SessionInput::Wake);
    assert_eq!(finishes(&woken), [("a".to_owned(), FinishReason::Interrupted)]);
}

#[test]
fn a_snapshot_from_the_time_before_workers_is_still_read() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    bench.state.worker = None;
    let mut old = serde_json::to_value(&bench.state).unwrap();
    let forget = |value: &mut serde_json::Value, names: &[&str]| {
        for name in names {
            assert!(value.as_object_mut().unwrap().remove(*name).is_some(), "{name} is written");
        }
    };
    forget(&mut old, &["worker", "stopping", "crashes"]);
    forget(&mut old["runs"][0], &["lacks_room"]);
    forget(&mut old["runs"][0]["started"], &["resumed", "children", "suspended"]);
    assert_eq!(serde_json::from_value::<SessionState>(old).unwrap(), bench.state);
}

#[test]
fn time_without_sight_of_the_worker_is_counted_as_the_worker_counts_it() {
    let mut bench = SessionHarness::new();
    bench.state.settings.limits.run_timeout_s = Some(10.0);
    bench.prompt("a");
    bench.world.now = Millis(4_000);
    bench.input(SessionInput::LinkLost);
    bench.world.agent = AgentAvailability::Lost;
    bench.world.now = Millis(60_000);
    assert_eq!(deadline(&bench.state, AgentAvailability::Lost), None, "the worker holds it to the limit");
    assert!(bench.input(SessionInput::Tick).events.is_empty());
    bench.world.agent = READY;
    let found =
        SessionInput::WorkerAttached { applied: EventNumber(99), reattached: true, run_time_ms: Some(5_000) };
    assert_eq!(kinds(&bench.input(found)), ["worker.reattached"]);
    assert_eq!(deadline(&bench.state, READY), Some(Millis(65_000)));
    bench.ask("a", "ask1", AskKind::Permission);
    bench.world.now = Millis(90_000);
    let found =
        SessionInput::WorkerAttached { applied: EventNumber(99), reattached: true, run_time_ms: Some(5_000) };
    bench.input(found);
    bench.world.now = Millis(100_000);
    let answer = AskAnswer { decision: Some(PermissionDecision::AllowOnce), ..AskAnswer::default() };
    bench.command(SessionCommand::Answer { ask: AskId::parse("ask1").unwrap(), answer });
    assert_eq!(deadline(&bench.state, READY), Some(Millis(105_000)), "nor is a wait for a person lost");
}
