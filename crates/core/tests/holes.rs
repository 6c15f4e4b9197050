//! The holes that were proven in the systems we succeed, each as a promise of ours: H1 to H11 of the research on
//! crush, and the bugs of CAP's inbox. H10 and H12 are about the command line and about several workspaces, and are
//! tested with the real binary in `tests/`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bench;

use bench::{Bench, finishes, started};
use qd_core::session::{Accept, Command, Effect, Input, Link, Phase, Refusal, Reply};
use qd_protocol::event::{Answer, AskKind, Body, Decision, RunError};
use qd_protocol::link::{Gone, Reply as AskReply, Stop, Up};
use qd_protocol::{AskId, FinishReason, RunId};

#[test]
fn h1_a_prompt_accepted_while_a_cancelled_run_unwinds_starts_when_it_has() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.cancel();
    bench.prompt("b");
    let ended = bench.end("a", Stop::Cancelled);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Cancelled)]);
    assert_eq!(started(&ended).as_deref(), Some("b"));
}

#[test]
fn h1_an_error_lets_the_queue_go_on() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.prompt("b");
    let ended = bench.end("a", Stop::Error);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Error)]);
    assert_eq!(started(&ended).as_deref(), Some("b"));
}

#[test]
fn h2_a_prompt_sent_on_sight_of_the_terminal_is_not_queued_behind_the_dying_run() {
    for stop in [Stop::EndTurn, Stop::Error, Stop::Cancelled] {
        let mut bench = Bench::new();
        bench.prompt("a");
        bench.end("a", stop);
        assert_eq!(bench.state.phase(), Phase::Idle);
        let next = bench.prompt("b");
        assert!(matches!(next.reply, Some(Reply::Accepted { position: 0, .. })));
        assert_eq!(started(&next).as_deref(), Some("b"));
    }
}

#[test]
fn h3_a_second_client_or_a_rebuild_replaces_neither_the_run_nor_its_queue() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.prompt("b");
    let before = bench.state.clone();
    let woken = bench.input(Input::Wake);
    assert_eq!((woken.events.len(), started(&woken)), (0, None));
    assert_eq!(bench.state, before);
    let hit = bench.cancel();
    let runs = ["a", "b"].map(|run| RunId::parse(run).unwrap());
    assert_eq!(hit.reply, Some(Reply::Cancelled(runs.to_vec())));
}

#[test]
fn h4_a_terminal_is_not_held_back_by_the_queue_and_an_error_names_its_own_run() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.prompt("b");
    assert_eq!(finishes(&bench.end("a", Stop::EndTurn)), [("a".to_owned(), FinishReason::EndTurn)]);
    let failed = bench.end("b", Stop::Error);
    let raised: Vec<_> =
        failed.events.iter().filter(|event| matches!(event.body, Body::ErrorRaised(_))).collect();
    assert_eq!(raised.len(), 1);
    assert_eq!(raised[0].run.as_ref().map(RunId::as_str), Some("b"));
}

#[test]
fn h5_a_cleared_queue_gives_every_prompt_in_it_its_terminal() {
    let mut bench = Bench::new();
    for run in ["a", "b", "c"] {
        bench.prompt(run);
    }
    let cleared = bench.command(Command::Clear);
    let ended = ["b", "c"].map(|run| (run.to_owned(), FinishReason::Cancelled));
    assert_eq!(finishes(&cleared), ended);
    bench.prompt("d");
    assert_eq!(started(&bench.end("a", Stop::EndTurn)).as_deref(), Some("d"));
}

#[test]
fn h6_the_queue_is_served_in_the_order_of_acceptance() {
    let mut bench = Bench::new();
    for run in ["a", "b", "c"] {
        bench.prompt(run);
    }
    assert_eq!(started(&bench.end("a", Stop::EndTurn)).as_deref(), Some("b"));
    bench.prompt("d");
    assert_eq!(started(&bench.end("b", Stop::Error)).as_deref(), Some("c"));
    assert_eq!(started(&bench.end("c", Stop::EndTurn)).as_deref(), Some("d"));
}

#[test]
fn h7_every_run_of_a_chain_has_a_terminal_of_its_own() {
    let mut bench = Bench::new();
    for run in ["a", "b", "c"] {
        bench.prompt(run);
    }
    for run in ["a", "b", "c"] {
        assert_eq!(finishes(&bench.end(run, Stop::EndTurn)), [(run.to_owned(), FinishReason::EndTurn)]);
    }
}

#[test]
fn h8_closing_a_session_cancels_its_run_and_closes_only_after_it() {
    let mut bench = Bench::new();
    bench.prompt("a");
    let closing = bench.command(Command::Close { purge: false });
    assert!(closing.effects.iter().any(|effect| matches!(effect, Effect::Cancel { .. })));
    assert!(!bench.state.closed);
    assert_eq!(bench.prompt("b").reply, Some(Reply::Refused(Refusal::Closed)));
    let ended = bench.end("a", Stop::EndTurn);
    assert_eq!(finishes(&ended), [("a".to_owned(), FinishReason::Cancelled)]);
    assert_eq!((ended.effects, bench.state.closed), (vec![Effect::StopAgent], false));
    let gone = bench.hear(Up::Gone(Gone::Stopped));
    assert!(matches!(gone.events.last().map(|event| &event.body), Some(Body::SessionClosed(_))));
}

#[test]
fn h9_a_session_is_busy_from_the_moment_a_prompt_is_accepted() {
    let mut bench = Bench::new();
    bench.world.link = Link::Absent;
    bench.prompt("a");
    assert!(bench.state.busy() && bench.state.phase() == Phase::Unstarted);
    bench.world.link = Link::Ready { steers: true };
    bench.hear(Up::Ready { agent_session_id: None, steers: true });
    bench.prompt("b");
    bench.end("a", Stop::EndTurn);
    assert!(bench.state.busy());
    bench.end("b", Stop::EndTurn);
    assert!(!bench.state.busy());
}

#[test]
fn h11_a_repeated_prompt_runs_once() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.prompt("b");
    let again = bench.prompt("b");
    assert_eq!(again.reply, Some(Reply::Accepted { position: 1, event: None }));
    assert!(again.events.is_empty());
    let other = Accept {
        run: RunId::parse("b").unwrap(),
        prompt: "q".into(),
        attachments: Vec::new(),
        fingerprint: "other".to_owned(),
    };
    assert_eq!(bench.command(Command::Accept(other)).reply, Some(Reply::Refused(Refusal::RunIdConflict)));
}

#[test]
fn cap_inbox_a_steer_while_a_permission_is_open_neither_answers_it_nor_is_lost() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.ask("a", "ask1", AskKind::Permission);
    let steered = bench.command(Command::Steer { text: "left".into() });
    assert!(matches!(steered.reply, Some(Reply::Steered { .. })));
    assert_eq!(bench.state.pending_asks().count(), 1);
    assert!(steered.effects.iter().any(|effect| matches!(effect, Effect::Steer { .. })));
}

#[test]
fn cap_inbox_a_steer_does_not_answer_a_question() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.ask("a", "ask1", AskKind::Question);
    let steered = bench.command(Command::Steer { text: "left".into() });
    assert!(!steered.effects.iter().any(|effect| matches!(effect, Effect::Answer { .. })));
    assert_eq!(bench.state.pending_asks().count(), 1);
}

#[test]
fn cap_inbox_an_answer_to_an_old_ask_never_resolves_a_new_one() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.ask("a", "old", AskKind::Permission);
    let allow = || Answer { decision: Some(Decision::AllowOnce), ..Answer::default() };
    let old = AskId::parse("old").unwrap();
    let first = bench.command(Command::Answer { ask: old.clone(), answer: allow() });
    assert!(matches!(first.effects[..], [Effect::Answer { reply: AskReply::Answered(_), .. }]));
    bench.ask("a", "new", AskKind::Permission);
    let again = bench.command(Command::Answer { ask: old, answer: allow() });
    assert_eq!(again.reply, Some(Reply::Refused(Refusal::AskNotOpen)));
    assert_eq!(bench.state.pending_asks().count(), 1);
}

#[test]
fn an_agent_that_exits_in_its_turn_has_failed_and_the_next_run_gets_another() {
    let mut bench = Bench::new();
    bench.prompt("a");
    bench.prompt("b");
    bench.world.link = Link::Absent;
    let gone = bench.input(Input::Gone(Gone::Failed(RunError::new("agent_exited", "3"))));
    assert_eq!(finishes(&gone), [("a".to_owned(), FinishReason::Error)]);
    assert!(matches!(gone.effects[..], [Effect::Launch { fresh: true, .. }]));
}
