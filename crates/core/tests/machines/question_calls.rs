//! Questions that an agent asks people through a tool call: they end with the turn like any other ask, the answer
//! goes to the tool call and not over the link, and repeats change nothing.

use qd_core::session::{
    CommandRefusal, CommandReply, SessionCommand, SessionEffect, SessionInput, SessionState, SessionStep,
};
use qd_protocol::event::{AskAnswer, EventBody, ResolvedBy};
use qd_protocol::link::TurnStopReason;
use qd_protocol::{AskId, EventNumber};

use crate::harness::{SessionHarness, clocks_at, kinds};

fn id(text: &str) -> AskId {
    AskId::parse(text).unwrap()
}

fn open_question(harness: &mut SessionHarness, ask: &str) -> SessionStep {
    let options = vec!["red".to_owned(), "blue".to_owned()];
    harness.command(SessionCommand::OpenQuestion { ask: id(ask), prompt: "which?".to_owned(), options })
}

fn answer(harness: &mut SessionHarness, ask: &str, value: &str) -> SessionStep {
    let answer = AskAnswer { value: Some(value.to_owned()), ..AskAnswer::default() };
    harness.command(SessionCommand::Answer { ask: id(ask), answer, shown_sha256: None })
}

fn sends_answer(step: &SessionStep) -> bool {
    step.effects.iter().any(|effect| matches!(effect, SessionEffect::SendAnswer { .. }))
}

fn resolved(step: &SessionStep) -> Option<ResolvedBy> {
    step.events.iter().find_map(|event| match &event.body {
        EventBody::AskResolved(resolved) => Some(resolved.by),
        _ => None,
    })
}

#[test]
fn an_answer_goes_to_the_call_and_not_to_the_agent() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    assert_eq!(open_question(&mut harness, "q").reply, Some(CommandReply::QuestionOpened(id("q"))));
    let wrong = answer(&mut harness, "q", "green");
    assert!(
        matches!(wrong.reply, Some(CommandReply::Refused(CommandRefusal::InvalidAnswer(_)))),
        "{wrong:?}"
    );
    let right = answer(&mut harness, "q", "blue");
    assert_eq!(kinds(&right), ["ask.resolved"]);
    assert!(!sends_answer(&right));
    let again = harness.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: true,
        run_time_ms: None,
    });
    assert!(!sends_answer(&again), "nor when a worker is reattached");
    let taken = harness.command(SessionCommand::AnswerDelivered { ask: id("q") });
    assert_eq!(kinds(&taken), ["ask.delivered"]);
    let twice = harness.command(SessionCommand::AnswerDelivered { ask: id("q") });
    assert_eq!((kinds(&twice), twice.reply), (vec![], Some(CommandReply::Done)));
}

#[test]
fn a_question_needs_a_turn_that_is_not_being_stopped() {
    let mut harness = SessionHarness::new();
    assert_eq!(open_question(&mut harness, "q").reply, Some(CommandReply::Refused(CommandRefusal::NoTurn)));
    harness.prompt("a");
    open_question(&mut harness, "q");
    let cancelled = harness.cancel();
    assert_eq!(resolved(&cancelled), Some(ResolvedBy::Cancel));
    assert!(!sends_answer(&cancelled), "the agent never asked it");
    assert_eq!(open_question(&mut harness, "r").reply, Some(CommandReply::Refused(CommandRefusal::NoTurn)));
    harness.end("a", TurnStopReason::Cancelled);
    assert_eq!(open_question(&mut harness, "s").reply, Some(CommandReply::Refused(CommandRefusal::NoTurn)));
    harness.command(SessionCommand::Close { purge: false });
    harness.context.agent = qd_core::session::AgentAvailability::Absent;
    harness.input(SessionInput::WorkerGone(qd_protocol::link::AgentExitReason::Stopped));
    assert!(harness.state.closed);
    assert_eq!(open_question(&mut harness, "t").reply, Some(CommandReply::Refused(CommandRefusal::Closed)));
    assert_eq!(
        harness.command(SessionCommand::WithdrawQuestion { ask: id("t") }).reply,
        Some(CommandReply::Done)
    );
}

#[test]
fn a_call_withdraws_only_questions_asked_by_a_call() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    open_question(&mut harness, "q");
    harness.ask("a", "own", qd_protocol::event::AskKind::Question);
    assert_eq!(kinds(&harness.command(SessionCommand::WithdrawQuestion { ask: id("own") })), [] as [&str; 0]);
    let back = harness.command(SessionCommand::WithdrawQuestion { ask: id("q") });
    assert_eq!((resolved(&back), sends_answer(&back)), (Some(ResolvedBy::Agent), false));
    assert_eq!(kinds(&harness.command(SessionCommand::WithdrawQuestion { ask: id("q") })), [] as [&str; 0]);
    assert_eq!(kinds(&harness.command(SessionCommand::AnswerDelivered { ask: id("own") })), [] as [&str; 0]);
}

#[test]
fn a_question_ends_with_its_turn_and_waiting_for_it_is_not_run_time() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    let run_time = |state: &SessionState, now: u64| state.active_run().unwrap().1.run_time(clocks_at(now));
    harness.context.now = clocks_at(1_000);
    open_question(&mut harness, "q");
    harness.context.now = clocks_at(61_000);
    assert_eq!(run_time(&harness.state, 61_000), 1_000);
    answer(&mut harness, "q", "red");
    harness.context.now = clocks_at(62_000);
    // The worker does not know about the question, and has counted the minute as run time.
    harness.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: true,
        run_time_ms: Some(62_000),
    });
    assert_eq!(run_time(&harness.state, 62_000), 2_000);
    open_question(&mut harness, "r");
    let ended = harness.end("a", TurnStopReason::EndTurn);
    assert_eq!(resolved(&ended), Some(ResolvedBy::End));
    assert!(harness.state.asks.is_empty());
}
