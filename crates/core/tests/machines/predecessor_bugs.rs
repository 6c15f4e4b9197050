//! Bugs that were proven in the systems before this one, each as a promise of ours: H1 to H11 of the research on
//! crush, and the bugs of CAP's inbox. H10 and H12 are about the command line and about several workspaces, and are
//! tested with the real binary in `tests/`.

use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, PromptSubmission, SessionCommand, SessionEffect,
    SessionInput, SessionPhase,
};
use qd_protocol::event::{AskAnswer, AskKind, EventBody, PermissionDecision, RunError};
use qd_protocol::link::{AgentExitReason, AgentUpdate, AskResolution as AskReply, TurnStopReason};
use qd_protocol::{AskId, FinishReason, RunId};

use crate::harness::{SessionHarness, finishes, started};

#[test]
fn h1_a_prompt_accepted_while_a_cancelled_run_unwinds_starts_when_it_has() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.cancel();
    harness.prompt("b");
    let ended = harness.end("a", TurnStopReason::Cancelled);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Cancelled)]);
    assert_eq!(started(&ended).as_deref(), Some("b"));
}

#[test]
fn h1_an_error_lets_the_queue_go_on() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.prompt("b");
    let ended = harness.end("a", TurnStopReason::Error);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Error)]);
    assert_eq!(started(&ended).as_deref(), Some("b"));
}

#[test]
fn h2_a_prompt_sent_on_sight_of_the_terminal_is_not_queued_behind_the_dying_run() {
    for stop in [TurnStopReason::EndTurn, TurnStopReason::Error, TurnStopReason::Cancelled] {
        let mut harness = SessionHarness::new();
        harness.prompt("a");
        harness.end("a", stop);
        assert_eq!(harness.state.phase(), SessionPhase::Idle);
        let next = harness.prompt("b");
        assert!(matches!(next.reply, Some(CommandReply::Accepted { position: 0, .. })));
        assert_eq!(started(&next).as_deref(), Some("b"));
    }
}

#[test]
fn a_run_ends_as_cancelled_only_if_somebody_cancelled_it() {
    for (stop, reason) in [
        (TurnStopReason::EndTurn, FinishReason::EndTurn),
        (TurnStopReason::Cancelled, FinishReason::Error),
        (TurnStopReason::Error, FinishReason::Error),
        (TurnStopReason::MaxTokens, FinishReason::MaxTokens),
        (TurnStopReason::MaxTurns, FinishReason::MaxTurns),
        (TurnStopReason::Refused, FinishReason::Refused),
        (TurnStopReason::Timeout, FinishReason::Timeout),
        (TurnStopReason::BudgetExceeded, FinishReason::BudgetExceeded),
    ] {
        let mut harness = SessionHarness::new();
        harness.prompt("a");
        assert_eq!(finishes(&harness.end("a", stop)), [("a".to_owned(), reason)], "{stop:?}");
        harness.prompt("b");
        harness.cancel();
        let cancelled = harness.end("b", stop);
        assert_eq!(finishes(&cancelled), [("b".to_owned(), FinishReason::Cancelled)], "{stop:?}");
    }
}

#[test]
fn h3_a_second_client_or_a_rebuild_replaces_neither_the_run_nor_its_queue() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.prompt("b");
    let before = harness.state.clone();
    let woken = harness.input(SessionInput::Wake);
    assert_eq!((woken.events.len(), started(&woken)), (0, None));
    assert_eq!(harness.state, before);
    let hit = harness.cancel();
    let runs = ["a", "b"].map(|run| RunId::parse(run).unwrap());
    assert_eq!(hit.reply, Some(CommandReply::Cancelled(runs.to_vec())));
}

#[test]
fn h4_a_terminal_is_not_held_back_by_the_queue_and_an_error_names_its_own_run() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.prompt("b");
    assert_eq!(
        finishes(&harness.end("a", TurnStopReason::EndTurn)),
        [("a".to_owned(), FinishReason::EndTurn)]
    );
    let failed = harness.end("b", TurnStopReason::Error);
    let raised: Vec<_> =
        failed.events.iter().filter(|event| matches!(event.body, EventBody::ErrorRaised(_))).collect();
    assert_eq!(raised.len(), 1);
    assert_eq!(raised[0].run.as_ref().map(RunId::as_str), Some("b"));
}

#[test]
fn h5_a_cleared_queue_gives_every_prompt_in_it_its_terminal() {
    let mut harness = SessionHarness::new();
    for run in ["a", "b", "c"] {
        harness.prompt(run);
    }
    let cleared = harness.command(SessionCommand::ClearQueue);
    let ended = ["b", "c"].map(|run| (run.to_owned(), FinishReason::Cancelled));
    assert_eq!(finishes(&cleared), ended);
    harness.prompt("d");
    assert_eq!(started(&harness.end("a", TurnStopReason::EndTurn)).as_deref(), Some("d"));
}

#[test]
fn h6_the_queue_is_served_in_the_order_of_acceptance() {
    let mut harness = SessionHarness::new();
    for run in ["a", "b", "c"] {
        harness.prompt(run);
    }
    assert_eq!(started(&harness.end("a", TurnStopReason::EndTurn)).as_deref(), Some("b"));
    harness.prompt("d");
    assert_eq!(started(&harness.end("b", TurnStopReason::Error)).as_deref(), Some("c"));
    assert_eq!(started(&harness.end("c", TurnStopReason::EndTurn)).as_deref(), Some("d"));
}

#[test]
fn h7_every_run_of_a_chain_has_a_terminal_of_its_own() {
    let mut harness = SessionHarness::new();
    for run in ["a", "b", "c"] {
        harness.prompt(run);
    }
    for run in ["a", "b", "c"] {
        assert_eq!(
            finishes(&harness.end(run, TurnStopReason::EndTurn)),
            [(run.to_owned(), FinishReason::EndTurn)]
        );
    }
}

#[test]
fn h8_closing_a_session_cancels_its_run_and_closes_only_after_it() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    let closing = harness.command(SessionCommand::Close { purge: false });
    assert!(closing.effects.iter().any(|effect| matches!(effect, SessionEffect::CancelTurn { .. })));
    assert!(!harness.state.closed);
    assert_eq!(harness.prompt("b").reply, Some(CommandReply::Refused(CommandRefusal::Closed)));
    let ended = harness.end("a", TurnStopReason::EndTurn);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Cancelled)]);
    assert_eq!((ended.effects, harness.state.closed), (vec![SessionEffect::StopAgent], false));
    let gone = harness.receive(AgentUpdate::Gone(AgentExitReason::Stopped));
    assert!(matches!(gone.events.last().map(|event| &event.body), Some(EventBody::SessionClosed(_))));
}

#[test]
fn h9_a_session_is_busy_from_the_moment_a_prompt_is_accepted() {
    let mut harness = SessionHarness::new();
    harness.context.agent = AgentAvailability::Absent;
    harness.prompt("a");
    assert!(harness.state.is_busy() && harness.state.phase() == SessionPhase::Unstarted);
    harness.context.agent = AgentAvailability::Ready { steerable: true };
    harness.receive(AgentUpdate::Ready { agent_session_id: None, steers: true });
    harness.prompt("b");
    harness.end("a", TurnStopReason::EndTurn);
    assert!(harness.state.is_busy());
    harness.end("b", TurnStopReason::EndTurn);
    assert!(!harness.state.is_busy());
}

#[test]
fn h11_a_repeated_prompt_runs_once() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.prompt("b");
    let again = harness.prompt("b");
    assert_eq!(again.reply, Some(CommandReply::Accepted { position: 1, event: None }));
    assert!(again.events.is_empty());
    let other = PromptSubmission {
        run: RunId::parse("b").unwrap(),
        prompt: "q".into(),
        attachments: Vec::new(),
        fingerprint: "other".to_owned(),
    };
    assert_eq!(
        harness.command(SessionCommand::AcceptPrompt(other)).reply,
        Some(CommandReply::Refused(CommandRefusal::RunIdConflict))
    );
}

#[test]
fn cap_inbox_a_steer_while_a_permission_is_open_neither_answers_it_nor_is_lost() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.ask("a", "ask1", AskKind::Permission);
    let steered = harness.command(SessionCommand::Steer { text: "left".into() });
    assert!(matches!(steered.reply, Some(CommandReply::Steered { .. })));
    assert_eq!(harness.state.pending_asks().count(), 1);
    assert!(steered.effects.iter().any(|effect| matches!(effect, SessionEffect::SendSteer { .. })));
}

#[test]
fn cap_inbox_a_steer_does_not_answer_a_question() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.ask("a", "ask1", AskKind::Question);
    let steered = harness.command(SessionCommand::Steer { text: "left".into() });
    assert!(!steered.effects.iter().any(|effect| matches!(effect, SessionEffect::SendAnswer { .. })));
    assert_eq!(harness.state.pending_asks().count(), 1);
}

#[test]
fn cap_inbox_an_answer_to_an_old_ask_never_resolves_a_new_one() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.ask("a", "old", AskKind::Permission);
    let allow = || AskAnswer { decision: Some(PermissionDecision::AllowOnce), ..AskAnswer::default() };
    let old = AskId::parse("old").unwrap();
    let first =
        harness.command(SessionCommand::Answer { ask: old.clone(), answer: allow(), shown_sha256: None });
    assert!(matches!(first.effects[..], [SessionEffect::SendAnswer { reply: AskReply::Answered(_), .. }]));
    harness.ask("a", "new", AskKind::Permission);
    let again = harness.command(SessionCommand::Answer { ask: old, answer: allow(), shown_sha256: None });
    assert_eq!(again.reply, Some(CommandReply::Refused(CommandRefusal::AskNotOpen)));
    assert_eq!(harness.state.pending_asks().count(), 1);
}

#[test]
fn an_agent_that_exits_in_its_turn_has_failed_and_the_next_run_gets_another() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    harness.prompt("b");
    harness.context.agent = AgentAvailability::Absent;
    let gone =
        harness.input(SessionInput::WorkerGone(AgentExitReason::Failed(RunError::new("agent_exited", "3"))));
    assert_eq!(finishes(&gone), [("a".to_owned(), FinishReason::Error)]);
    assert!(matches!(gone.effects[..], [SessionEffect::LaunchAgent { new_worker: true, .. }]));
}
