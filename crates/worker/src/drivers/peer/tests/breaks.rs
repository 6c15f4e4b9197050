//! Connections that break, in a turn and between turns.

use qd_protocol::link::TurnStopReason;
use serde_json::{Value, json};

use super::{ready_worker, worker_in_run};
use crate::drivers::harness::assert_ended_well;

#[tokio::test]
async fn a_break_in_the_middle_of_a_run_is_an_error_that_says_so() {
    let (mut stage, mut hand, listening) = worker_in_run().await;
    hand.send_text("half a").await;
    stage.wait_for_text("half a").await;
    drop(hand);
    let error = stage.wait_for_end("a").await.outcome.error.unwrap();
    assert_eq!(error.code, "agent_unreachable");
    for words in ["broke in the middle of the run", "was not sent again", &listening.port.to_string()] {
        assert!(error.message.contains(words), "{error:?}");
    }
    stage.prompt("b", "again");
    let mut hand = listening.accept().await;
    assert_eq!(hand.expect_run().await["assignment"], "again");
    hand.complete_run("fine").await;
    assert_ended_well(&stage.wait_for_end("b").await);
}

#[tokio::test]
async fn the_last_words_before_a_break_are_heard() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    hand.complete_run("fine").await;
    drop(hand);
    assert_ended_well(&stage.wait_for_end("a").await);
}

#[tokio::test]
async fn a_connection_that_ended_between_turns_is_made_anew_with_the_conversation() {
    let (mut stage, mut hand, listening) = worker_in_run().await;
    let transcript = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]);
    hand.send(json!({"kind": "terminal", "status": "completed", "result": "y", "transcript": transcript}))
        .await;
    assert_ended_well(&stage.wait_for_end("a").await);
    stage.prompt("b", "more");
    assert_eq!(hand.expect_run().await.get("messages"), None, "on the same connection it remembers");
    hand.send(json!({"kind": "terminal", "status": "completed", "transcript": transcript})).await;
    assert_ended_well(&stage.wait_for_end("b").await);
    hand.close().await;
    stage.prompt("c", "and more");
    let mut hand = listening.accept().await;
    let expected = json!({"kind": "run", "assignment": "and more", "messages": transcript});
    assert_eq!(hand.expect_run().await, expected);
    hand.complete_run("fine").await;
    assert_ended_well(&stage.wait_for_end("c").await);
    hand.close().await;
    stage.prompt("d", "x");
    let run = listening.accept().await.expect_run().await;
    assert_eq!(run.get("messages"), None, "it gave none with its last terminal: {run}");
}

#[tokio::test]
async fn a_conversation_that_is_too_long_is_not_kept() {
    let (mut stage, mut hand, listening) = worker_in_run().await;
    let long = Value::String("x".repeat(super::super::TRANSCRIPT_MAX));
    hand.send(json!({"kind": "terminal", "status": "completed", "transcript": [long]})).await;
    assert_ended_well(&stage.wait_for_end("a").await);
    hand.close().await;
    stage.prompt("b", "x");
    assert_eq!(listening.accept().await.expect_run().await.get("messages"), None);
}

#[tokio::test]
async fn a_worker_that_does_not_come_back_fails_the_run_and_not_the_session() {
    let (mut stage, hand, listening) = ready_worker().await;
    hand.close().await;
    let port = listening.port;
    drop(listening);
    stage.prompt("a", "x");
    let error = stage.wait_for_end("a").await.outcome.error.unwrap();
    assert_eq!(error.code, "agent_unreachable");
    assert!(
        error.message.contains(&port.to_string()) && error.message.contains("is it running?"),
        "{error:?}"
    );
    stage.prompt("b", "x");
    assert_eq!(stage.wait_for_end("b").await.stop(), TurnStopReason::Error);
}

#[tokio::test]
async fn a_break_after_a_cancel_is_a_cancel() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    stage.cancel("a");
    hand.next_frame().await;
    drop(hand);
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.outcome.error), (TurnStopReason::Cancelled, None));
}

#[tokio::test]
async fn a_cancel_ends_the_wait_for_a_connection_and_nothing_is_sent() {
    let (mut stage, hand, listening) = ready_worker().await;
    hand.close().await;
    stage.prompt("a", "x");
    // It is let in by the kernel and answered by nobody.
    let stream = listening.accept_stream().await;
    stage.cancel("a");
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    drop(stream);
    stage.prompt("b", "y");
    assert_eq!(listening.accept().await.expect_run().await["assignment"], "y");
}
