//! Runs that wait for the reset of their account's quota.

use crate::harness::{SessionHarness, clocks_at, error, finishes, kinds, started};
use qd_core::quota::usual_account;
use qd_core::rows::{SessionDoc, UpdatedRow};
use qd_core::session::{
    AgentAvailability, CommandReply, SessionCommand, SessionEffect, SessionInput, SessionPhase, SessionStep,
};
use qd_protocol::api::{RunStatus, SessionStatus};
use qd_protocol::event::{EventBody, QueueReason, RunError};
use qd_protocol::limits::QUOTA_WAIT_MAX_S;
use qd_protocol::link::{AgentUpdate, TurnOutcome, TurnStopReason};
use qd_protocol::{FinishReason, Millis, RunId};

const NOW: u64 = 1_000_000;
const RESET: Millis = Millis(NOW + 60_000);

fn session() -> SessionHarness {
    let mut harness = SessionHarness::new();
    harness.context.now = clocks_at(NOW);
    harness
}

/// The agent ends the turn of this run because its quota is exhausted.
fn exhaust(harness: &mut SessionHarness, run: &str, resets_at: Option<Millis>) -> SessionStep {
    let run = RunId::parse(run).unwrap();
    let outcome = TurnOutcome::failed(RunError::quota_exhausted("no more today", resets_at));
    let step = harness.receive(AgentUpdate::TurnEnded { run, outcome });
    // What the daemon does: the account's quota is known from the moment it is decided.
    for row in &step.rows {
        if let UpdatedRow::Quota(quota) = row {
            harness.context.quota_until = Some(quota.until);
        }
    }
    step
}

fn release(harness: &mut SessionHarness) -> SessionStep {
    harness.context.quota_until = None;
    harness.input(SessionInput::Wake)
}

/// The runs that a step queues for a quota, with their positions and the reset.
fn queued(step: &SessionStep) -> Vec<(String, u32, Option<Millis>)> {
    let queued = step.events.iter().filter_map(|event| match &event.body {
        EventBody::RunQueued(queued) if queued.reason == QueueReason::Quota => {
            Some((event.run.as_ref()?.to_string(), queued.position, queued.until))
        }
        _ => None,
    });
    queued.collect()
}

fn entry(run: &str, position: u32) -> (String, u32, Option<Millis>) {
    (run.to_owned(), position, Some(RESET))
}

#[test]
fn the_run_that_exhausts_the_quota_fails_and_the_queued_ones_wait_for_the_reset() {
    let mut harness = session();
    for run in ["a", "b", "c"] {
        harness.prompt(run);
    }
    let step = exhaust(&mut harness, "a", Some(RESET));
    assert_eq!(
        kinds(&step),
        ["error.raised", "message.finished", "run.finished", "quota.reached", "run.queued", "run.queued"]
    );
    let failure = error(&step).unwrap();
    assert_eq!((failure.code.as_str(), failure.resets_at), ("quota_exhausted", Some(RESET)));
    assert_eq!(queued(&step), [entry("b", 1), entry("c", 2)]);
    assert!(step.effects.contains(&SessionEffect::WakeAccount));
    let Some(EventBody::QuotaReached(reached)) =
        step.events.iter().map(|event| &event.body).find(|body| body.kind() == "quota.reached")
    else {
        panic!("{step:?}")
    };
    assert_eq!((&reached.account, reached.until), (&usual_account("script"), RESET));
    assert_eq!(started(&release(&mut harness)), Some("b".to_owned()));
}

#[test]
fn a_reset_that_nobody_can_mean_is_not_waited_for() {
    let too_far = Millis(NOW + QUOTA_WAIT_MAX_S * 1000 + 1);
    for resets_at in [None, Some(Millis(0)), Some(Millis(NOW)), Some(too_far)] {
        let mut harness = session();
        harness.prompt("a");
        harness.prompt("b");
        let step = exhaust(&mut harness, "a", resets_at);
        let failure = error(&step).unwrap();
        assert_eq!((failure.code.as_str(), failure.resets_at), ("quota_exhausted", None), "{resets_at:?}");
        assert_eq!(started(&step), Some("b".to_owned()), "{resets_at:?}");
        assert!(!kinds(&step).contains(&"quota.reached"), "{resets_at:?}");
    }
}

#[test]
fn a_prompt_for_an_exhausted_account_is_queued_with_the_reset_and_told_once() {
    let mut harness = SessionHarness::without_worker();
    harness.context.now = clocks_at(NOW);
    harness.context.quota_until = Some(RESET);
    let step = harness.prompt("a");
    assert_eq!(queued(&step), [entry("a", 1)]);
    assert!(matches!(step.reply, Some(CommandReply::Accepted { position: 1, .. })));
    assert!(step.effects.is_empty(), "no agent is started: {:?}", step.effects);
    assert!(harness.input(SessionInput::Wake).events.is_empty(), "it was told already");
    assert_eq!(queued(&harness.prompt("b")), [entry("b", 2)]);

    let later = Some(Millis(RESET.0 + 1));
    harness.context.quota_until = later;
    let moved: Vec<_> =
        queued(&harness.input(SessionInput::Wake)).into_iter().map(|it| (it.0, it.2)).collect();
    assert_eq!(moved, [("a".to_owned(), later), ("b".to_owned(), later)], "another reset is told");
    let step = release(&mut harness);
    assert!(matches!(step.effects[..], [SessionEffect::LaunchAgent { .. }]), "{:?}", step.effects);
}

#[test]
fn a_turn_under_way_goes_on_when_another_session_exhausts_the_quota() {
    let mut harness = session();
    harness.prompt("a");
    harness.context.quota_until = Some(RESET);
    assert!(harness.input(SessionInput::Wake).events.is_empty());
    assert_eq!(queued(&harness.prompt("b")), [entry("b", 1)]);
    let step = harness.end("a", TurnStopReason::EndTurn);
    assert_eq!((finishes(&step), started(&step)), (vec![("a".to_owned(), FinishReason::EndTurn)], None));
}

#[test]
fn a_second_report_of_the_same_reset_changes_nothing_and_a_later_one_counts() {
    let mut harness = session();
    harness.prompt("a");
    harness.context.quota_until = Some(RESET);
    assert!(!kinds(&exhaust(&mut harness, "a", Some(RESET))).contains(&"quota.reached"));
    let mut harness = session();
    harness.prompt("a");
    harness.context.quota_until = Some(RESET);
    assert!(kinds(&exhaust(&mut harness, "a", Some(Millis(RESET.0 + 1)))).contains(&"quota.reached"));
}

#[test]
fn the_quota_is_known_even_if_its_run_was_being_cancelled() {
    let mut harness = session();
    harness.prompt("a");
    harness.cancel();
    harness.prompt("b");
    let step = exhaust(&mut harness, "a", Some(RESET));
    assert_eq!(finishes(&step), [("a".to_owned(), FinishReason::Cancelled)]);
    assert_eq!(queued(&step), [entry("b", 1)]);
}

#[test]
fn waiting_runs_can_be_cancelled_removed_and_moved() {
    let mut harness = session();
    for run in ["a", "b", "c", "d"] {
        harness.prompt(run);
    }
    exhaust(&mut harness, "a", Some(RESET));
    let id = |run: &str| RunId::parse(run).unwrap();
    let step = harness.command(SessionCommand::MoveQueued { run: id("d"), before: Some(id("b")) });
    assert_eq!(step.reply, Some(CommandReply::Moved { position: 1 }));
    let step = harness.command(SessionCommand::RemoveQueued { run: id("b") });
    assert_eq!(step.reply, Some(CommandReply::Removed(vec![id("b")])));
    let step = harness.command(SessionCommand::Cancel {
        run: Some(id("c")),
        by: qd_protocol::event::RunStopCause::User,
        reason: None,
    });
    assert_eq!(finishes(&step), [("c".to_owned(), FinishReason::Cancelled)]);
    let steer = harness.command(SessionCommand::Steer { text: "x".into() });
    assert!(matches!(steer.reply, Some(CommandReply::Refused(_))), "nothing runs that could be steered");
    assert_eq!(started(&release(&mut harness)), Some("d".to_owned()));
}

#[test]
fn a_spent_budget_ends_waiting_runs_and_a_halt_outlasts_the_reset() {
    let mut harness = session();
    harness.prompt("a");
    harness.prompt("b");
    exhaust(&mut harness, "a", Some(RESET));
    harness.context.halted = true;
    assert!(release(&mut harness).events.is_empty(), "nothing starts under a halt");
    harness.context.halted = false;
    harness.context.quota_until = Some(RESET);
    harness.context.over_budget = true;
    let step = harness.input(SessionInput::Wake);
    assert_eq!(finishes(&step), [("b".to_owned(), FinishReason::BudgetExceeded)]);
}

#[test]
fn a_run_that_waited_for_a_slot_waits_for_the_reset_and_then_for_a_slot_again() {
    let mut harness = SessionHarness::without_worker();
    harness.context.now = clocks_at(NOW);
    harness.context.slot_available = false;
    harness.prompt("a");
    assert!(harness.state.waits_for_slot());
    harness.context.quota_until = Some(RESET);
    assert_eq!(queued(&harness.input(SessionInput::Wake)), [entry("a", 1)]);
    assert!(!harness.state.waits_for_slot(), "it must not stand in line without using a slot");
    assert_eq!(kinds(&release(&mut harness)), ["run.queued"]);
    assert!(harness.state.waits_for_slot());
}

#[test]
fn a_failing_idle_agent_does_not_fail_a_run_that_waits_for_the_reset() {
    let mut harness = session();
    harness.prompt("a");
    harness.prompt("b");
    exhaust(&mut harness, "a", Some(RESET));
    let gone = qd_protocol::link::AgentExitReason::Failed(RunError::new("agent_exited", "it died"));
    let step = harness.input(SessionInput::WorkerGone(gone));
    assert_eq!(kinds(&step), ["worker.exited"]);
    harness.context.agent = AgentAvailability::Absent;
    assert!(matches!(release(&mut harness).effects[..], [SessionEffect::LaunchAgent { .. }]));
}

#[test]
fn lists_show_a_waiting_session_as_idle_with_a_queue_and_the_reset() {
    let mut harness = SessionHarness::without_worker();
    harness.context.now = clocks_at(NOW);
    let accepted = harness.prompt("a");
    harness.context.agent = AgentAvailability::Starting;
    let states = |step: &SessionStep| -> Vec<RunStatus> {
        let state = |row: &UpdatedRow| match row {
            UpdatedRow::Run { doc, .. } => Some(doc.state),
            _ => None,
        };
        step.rows.iter().filter_map(state).collect()
    };
    assert_eq!(states(&accepted), [RunStatus::Accepted]);
    harness.context.quota_until = Some(RESET);
    assert_eq!(states(&harness.input(SessionInput::Wake)), [RunStatus::Queued]);
    assert_eq!(harness.state.phase(), SessionPhase::Unstarted);
    let view = SessionDoc::of(&harness.state).view(false, Some(RESET));
    assert_eq!((view.state, view.queued, view.quota_until), (SessionStatus::Idle, 1, Some(RESET)));
    assert_eq!(view.account, Some(usual_account("script")));
    let view = SessionDoc::of(&harness.state).view(false, None);
    assert_eq!((view.state, view.queued, view.quota_until), (SessionStatus::Starting, 0, None));
}
