//! Questions that an agent asks people by a tool call: they live and die with the turn like any other, the answer goes to the
//! call and not down the link, and nothing of it depends on how often anybody says it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;

use harness::{SessionHarness, kinds};
use qd_core::session::{
    CommandRefusal, CommandReply, SessionCommand, SessionEffect, SessionInput, SessionState, SessionStep,
};
use qd_protocol::event::{AskAnswer, EventBody, ResolvedBy};
use qd_protocol::link::TurnStopReason;
use qd_protocol::{AskId, EventNumber, Millis};

fn id(text: &str) -> AskId {
    AskId::parse(text).unwrap()
}

fn asks(bench: &mut SessionHarness, ask: &str) -> SessionStep {
    let options = vec!["red".to_owned(), "blue".to_owned()];
    bench.command(SessionCommand::OpenQuestion { ask: id(ask), prompt: "which?".to_owned(), options })
}

fn answers(bench: &mut SessionHarness, ask: &str, value: &str) -> SessionStep {
    let answer = AskAnswer { value: Some(value.to_owned()), ..AskAnswer::default() };
    bench.command(SessionCommand::Answer { ask: id(ask), answer })
}

fn goes_down(step: &SessionStep) -> bool {
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
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    assert_eq!(asks(&mut bench, "q").reply, Some(CommandReply::QuestionOpened(id("q"))));
    let wrong = answers(&mut bench, "q", "green");
    assert!(
        matches!(wrong.reply, Some(CommandReply::Refused(CommandRefusal::InvalidAnswer(_)))),
        "{wrong:?}"
    );
    let right = answers(&mut bench, "q", "blue");
    assert_eq!(kinds(&right), ["ask.resolved"]);
    assert!(!goes_down(&right));
    let again = bench.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: true,
        run_time_ms: None,
    });
    assert!(!goes_down(&again), "nor when a worker is found again");
    let taken = bench.command(SessionCommand::AnswerDelivered { ask: id("q") });
    assert_eq!(kinds(&taken), ["ask.delivered"]);
    let twice = bench.command(SessionCommand::AnswerDelivered { ask: id("q") });
    assert_eq!((kinds(&twice), twice.reply), (vec![], Some(CommandReply::Done)));
}

#[test]
fn a_question_needs_a_turn_that_nobody_stops() {
    let mut bench = SessionHarness::new();
    assert_eq!(asks(&mut bench, "q").reply, Some(CommandReply::Refused(CommandRefusal::NoTurn)));
    bench.prompt("a");
    asks(&mut bench, "q");
    let cancelled = bench.cancel();
    assert_eq!(resolved(&cancelled), Some(ResolvedBy::Cancel));
    assert!(!goes_down(&cancelled), "the agent never asked it");
    assert_eq!(asks(&mut bench, "r").reply, Some(CommandReply::Refused(CommandRefusal::NoTurn)));
    bench.end("a", TurnStopReason::Cancelled);
    assert_eq!(asks(&mut bench, "s").reply, Some(CommandReply::Refused(CommandRefusal::NoTurn)));
    bench.command(SessionCommand::Close { purge: false });
    bench.world.agent = qd_core::session::AgentAvailability::Absent;
    bench.input(SessionInput::WorkerGone(qd_protocol::link::AgentExitReason::Stopped));
    assert!(bench.state.closed);
    assert_eq!(asks(&mut bench, "t").reply, Some(CommandReply::Refused(CommandRefusal::Closed)));
    assert_eq!(
        bench.command(SessionCommand::WithdrawQuestion { ask: id("t") }).reply,
        Some(CommandReply::Done)
    );
}

#[test]
fn a_call_takes_back_what_a_call_asked_and_nothing_else() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    asks(&mut bench, "q");
    bench.ask("a", "own", qd_protocol::event::AskKind::Question);
    assert_eq!(kinds(&bench.command(SessionCommand::WithdrawQuestion { ask: id("own") })), [] as [&str; 0]);
    let back = bench.command(SessionCommand::WithdrawQuestion { ask: id("q") });
    assert_eq!((resolved(&back), goes_down(&back)), (Some(ResolvedBy::Agent), false));
    assert_eq!(kinds(&bench.command(SessionCommand::WithdrawQuestion { ask: id("q") })), [] as [&str; 0]);
    assert_eq!(kinds(&bench.command(SessionCommand::AnswerDelivered { ask: id("own") })), [] as [&str; 0]);
}

#[test]
fn a_question_ends_with_its_turn_and_waiting_for_it_is_no_run_time() {
    let mut bench = SessionHarness::new();
    bench.prompt("a");
    let run_time = |state: &SessionState, now: u64| state.active_run().unwrap().1.run_time(Millis(now));
    bench.world.now = Millis(1_000);
    asks(&mut bench, "q");
    bench.world.now = Millis(61_000);
    assert_eq!(run_time(&bench.state, 61_000), 1_000);
    answers(&mut bench, "q", "red");
    bench.world.now = Millis(62_000);
    // The worker knows nothing of the question, and has counted the minute as well.
    bench.input(SessionInput::WorkerAttached {
        applied: EventNumber(0),
        reattached: true,
        run_time_ms: Some(62_000),
    });
    assert_eq!(run_time(&bench.state, 62_000), 2_000);
    asks(&mut bench, "r");
    let ended = bench.end("a", TurnStopReason::EndTurn);
    assert_eq!(resolved(&ended), Some(ResolvedBy::End));
    assert!(bench.state.asks.is_empty());
}
