//! Questions that an agent asks people by a tool call: they live and die with the turn like any other, the answer goes to the
//! call and not down the link, and nothing of it depends on how often anybody says it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bench;

use bench::{Bench, kinds};
use qd_core::session::{Command, Effect, Input, Refusal, Reply, State, Step};
use qd_protocol::event::{Answer, Body, ResolvedBy};
use qd_protocol::link::Stop;
use qd_protocol::{AskId, Millis, Number};

fn id(text: &str) -> AskId {
    AskId::parse(text).unwrap()
}

fn asks(bench: &mut Bench, ask: &str) -> Step {
    let options = vec!["red".to_owned(), "blue".to_owned()];
    bench.command(Command::Question { ask: id(ask), prompt: "which?".to_owned(), options })
}

fn answers(bench: &mut Bench, ask: &str, value: &str) -> Step {
    let answer = Answer { value: Some(value.to_owned()), ..Answer::default() };
    bench.command(Command::Answer { ask: id(ask), answer })
}

fn goes_down(step: &Step) -> bool {
    step.effects.iter().any(|effect| matches!(effect, Effect::Answer { .. }))
}

fn resolved(step: &Step) -> Option<ResolvedBy> {
    step.events.iter().find_map(|event| match &event.body {
        Body::AskResolved(resolved) => Some(resolved.by),
        _ => None,
    })
}

#[test]
fn an_answer_goes_to_the_call_and_not_to_the_agent() {
    let mut bench = Bench::new();
    bench.prompt("a");
    assert_eq!(asks(&mut bench, "q").reply, Some(Reply::Asked(id("q"))));
    let wrong = answers(&mut bench, "q", "green");
    assert!(matches!(wrong.reply, Some(Reply::Refused(Refusal::InvalidAnswer(_)))), "{wrong:?}");
    let right = answers(&mut bench, "q", "blue");
    assert_eq!(kinds(&right), ["ask.resolved"]);
    assert!(!goes_down(&right));
    let again = bench.input(Input::Attached { applied: Number(0), again: true, run_time_ms: None });
    assert!(!goes_down(&again), "nor when a worker is found again");
    let taken = bench.command(Command::AnswerTaken { ask: id("q") });
    assert_eq!(kinds(&taken), ["ask.delivered"]);
    let twice = bench.command(Command::AnswerTaken { ask: id("q") });
    assert_eq!((kinds(&twice), twice.reply), (vec![], Some(Reply::Done)));
}

#[test]
fn a_question_needs_a_turn_that_nobody_stops() {
    let mut bench = Bench::new();
    assert_eq!(asks(&mut bench, "q").reply, Some(Reply::Refused(Refusal::NoTurn)));
    bench.prompt("a");
    asks(&mut bench, "q");
    let cancelled = bench.cancel();
    assert_eq!(resolved(&cancelled), Some(ResolvedBy::Cancel));
    assert!(!goes_down(&cancelled), "the agent never asked it");
    assert_eq!(asks(&mut bench, "r").reply, Some(Reply::Refused(Refusal::NoTurn)));
    bench.end("a", Stop::Cancelled);
    assert_eq!(asks(&mut bench, "s").reply, Some(Reply::Refused(Refusal::NoTurn)));
    bench.command(Command::Close { purge: false });
    bench.world.link = qd_core::session::Link::Absent;
    bench.input(Input::Gone(qd_protocol::link::Gone::Stopped));
    assert!(bench.state.closed);
    assert_eq!(asks(&mut bench, "t").reply, Some(Reply::Refused(Refusal::Closed)));
    assert_eq!(bench.command(Command::TakeBack { ask: id("t") }).reply, Some(Reply::Done));
}

#[test]
fn a_call_takes_back_what_a_call_asked_and_nothing_else() {
    let mut bench = Bench::new();
    bench.prompt("a");
    asks(&mut bench, "q");
    bench.ask("a", "own", qd_protocol::event::AskKind::Question);
    assert_eq!(kinds(&bench.command(Command::TakeBack { ask: id("own") })), [] as [&str; 0]);
    let back = bench.command(Command::TakeBack { ask: id("q") });
    assert_eq!((resolved(&back), goes_down(&back)), (Some(ResolvedBy::Agent), false));
    assert_eq!(kinds(&bench.command(Command::TakeBack { ask: id("q") })), [] as [&str; 0]);
    assert_eq!(kinds(&bench.command(Command::AnswerTaken { ask: id("own") })), [] as [&str; 0]);
}

#[test]
fn a_question_ends_with_its_turn_and_waiting_for_it_is_no_run_time() {
    let mut bench = Bench::new();
    bench.prompt("a");
    let run_time = |state: &State, now: u64| state.active().unwrap().1.run_time(Millis(now));
    bench.world.now = Millis(1_000);
    asks(&mut bench, "q");
    bench.world.now = Millis(61_000);
    assert_eq!(run_time(&bench.state, 61_000), 1_000);
    answers(&mut bench, "q", "red");
    bench.world.now = Millis(62_000);
    // The worker knows nothing of the question, and has counted the minute as well.
    bench.input(Input::Attached { applied: Number(0), again: true, run_time_ms: Some(62_000) });
    assert_eq!(run_time(&bench.state, 62_000), 2_000);
    asks(&mut bench, "r");
    let ended = bench.end("a", Stop::EndTurn);
    assert_eq!(resolved(&ended), Some(ResolvedBy::End));
    assert!(bench.state.asks.is_empty());
}
