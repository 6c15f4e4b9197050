//! What one session takes from its agent: so many open asks, and so much text in all.

use crate::harness::{SessionHarness, error, finishes, kinds};
use qd_core::session::{CommandRefusal, CommandReply, SessionCommand, SessionEffect, SessionStep};
use qd_protocol::event::{AskAnswer, AskKind, EventBody, NoticeShown};
use qd_protocol::limits::ASKS_OPEN_MAX;
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use qd_protocol::{AskId, FinishReason, RunId};

fn ask_question(harness: &mut SessionHarness, id: &str) -> SessionStep {
    let ask = AskId::parse(id).unwrap();
    harness.command(SessionCommand::OpenQuestion { ask, prompt: "which?".to_owned(), options: Vec::new() })
}

fn answer_question(harness: &mut SessionHarness, id: &str) {
    let answer = AskAnswer { value: Some("this".to_owned()), ..AskAnswer::default() };
    let ask = AskId::parse(id).unwrap();
    let answered = harness.command(SessionCommand::Answer { ask, answer, shown_sha256: None });
    assert_eq!(kinds(&answered), ["ask.resolved"]);
}

fn notices(step: &SessionStep) -> Vec<&NoticeShown> {
    step.events
        .iter()
        .filter_map(|event| match &event.body {
            EventBody::NoticeShown(notice) => Some(notice),
            _ => None,
        })
        .collect()
}

#[test]
fn the_ask_that_reaches_the_limit_says_so_and_a_tool_asks_again_later() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    for number in 1..ASKS_OPEN_MAX {
        assert!(notices(&harness.ask("a", &format!("p{number}"), AskKind::Permission)).is_empty());
    }
    let last = ask_question(&mut harness, "q");
    assert_eq!(notices(&last)[0].limit.as_deref(), Some("ASKS_OPEN_MAX"));
    let refused = ask_question(&mut harness, "r");
    assert_eq!(refused.reply, Some(CommandReply::Refused(CommandRefusal::TooManyAsks)));
    assert!(refused.events.is_empty(), "a refusal that is repeated does not fill the journal");
    answer_question(&mut harness, "q");
    let opened = ask_question(&mut harness, "r");
    assert_eq!(opened.reply, Some(CommandReply::QuestionOpened(AskId::parse("r").unwrap())));
}

#[test]
fn a_worker_that_holds_nothing_back_opens_no_more_than_twice_as_many() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    for number in 0..3 * ASKS_OPEN_MAX {
        harness.ask("a", &format!("p{number}"), AskKind::Question);
    }
    assert_eq!(harness.state.pending_asks().count(), 2 * ASKS_OPEN_MAX);
}

#[test]
fn a_run_that_says_too_much_is_stopped_and_prompts_wait_for_a_higher_limit() {
    let mut harness = SessionHarness::new();
    harness.state.settings.limits.max_journal_mb = Some(1);
    harness.prompt("a");
    let say = |bytes: usize| {
        let update = TurnUpdate::Text { text: "x".repeat(bytes) };
        AgentUpdate::Turn { run: RunId::parse("a").unwrap(), update }
    };
    assert_eq!(kinds(&harness.receive(say(1 << 19))), ["text.delta"]);
    let last = harness.receive(say(1 << 19));
    assert_eq!(kinds(&last), ["text.delta", "run.cancel_requested"]);
    assert!(last.effects.iter().any(|effect| matches!(effect, SessionEffect::CancelTurn { .. })));
    let ended = harness.end("a", TurnStopReason::Cancelled);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Error)]);
    assert_eq!(error(&ended).unwrap().code, "journal_limit");
    let refused = harness.prompt("b");
    assert_eq!(refused.reply, Some(CommandReply::Refused(CommandRefusal::JournalLimit)));
    harness.state.settings.limits.max_journal_mb = Some(2);
    assert!(matches!(harness.prompt("b").reply, Some(CommandReply::Accepted { .. })));
}

#[test]
fn what_is_no_text_counts_too() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    let before = harness.state.output_bytes;
    harness.receive(AgentUpdate::Turn { run: RunId::parse("a").unwrap(), update: TurnUpdate::ModelCall });
    assert!(harness.state.output_bytes > before);
}
