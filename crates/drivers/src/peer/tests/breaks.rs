//! Connections that break, in a turn and between turns.

use qd_protocol::link::TurnStopReason;
use serde_json::{Value, json};

use super::{ready_worker, worker_in_run};
use crate::harness::assert_ended_well;

#[tokio::test]
async fn a_break_in_the_middle_of_a_run_is_an_error_that_says_so() {
    let (mut harness, mut worker, listener) = worker_in_run().await;
    worker.send_text("half a").await;
    harness.wait_for_text("half a").await;
    drop(worker);
    let error = harness.wait_for_end("a").await.outcome.error.unwrap();
    assert_eq!(error.code, "agent_unreachable");
    for expected in ["broke in the middle of the run", "was not sent again", &listener.port.to_string()] {
        assert!(error.message.contains(expected), "{error:?}");
    }
    harness.prompt("b", "again");
    let mut worker = listener.accept().await;
    assert_eq!(worker.expect_run().await["assignment"], "again");
    worker.complete_run("fine").await;
    assert_ended_well(&harness.wait_for_end("b").await);
}

#[tokio::test]
async fn a_terminal_right_before_a_break_is_received() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.complete_run("fine").await;
    drop(worker);
    assert_ended_well(&harness.wait_for_end("a").await);
}

#[tokio::test]
async fn a_connection_that_ended_between_turns_is_reopened_with_the_conversation() {
    let (mut harness, mut worker, listener) = worker_in_run().await;
    let transcript = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]);
    worker
        .send(json!({"kind": "terminal", "status": "completed", "result": "y", "transcript": transcript}))
        .await;
    assert_ended_well(&harness.wait_for_end("a").await);
    harness.prompt("b", "more");
    assert_eq!(worker.expect_run().await.get("messages"), None, "on the same connection it remembers");
    worker.send(json!({"kind": "terminal", "status": "completed", "transcript": transcript})).await;
    assert_ended_well(&harness.wait_for_end("b").await);
    worker.close().await;
    harness.prompt("c", "and more");
    let mut worker = listener.accept().await;
    let expected = json!({"kind": "run", "assignment": "and more", "messages": transcript});
    assert_eq!(worker.expect_run().await, expected);
    worker.complete_run("fine").await;
    assert_ended_well(&harness.wait_for_end("c").await);
    worker.close().await;
    harness.prompt("d", "x");
    let run = listener.accept().await.expect_run().await;
    assert_eq!(run.get("messages"), None, "it gave none with its last terminal: {run}");
}

#[tokio::test]
async fn a_conversation_that_is_too_long_is_not_kept() {
    let (mut harness, mut worker, listener) = worker_in_run().await;
    let long = Value::String("x".repeat(super::super::TRANSCRIPT_MAX));
    worker.send(json!({"kind": "terminal", "status": "completed", "transcript": [long]})).await;
    assert_ended_well(&harness.wait_for_end("a").await);
    worker.close().await;
    harness.prompt("b", "x");
    assert_eq!(listener.accept().await.expect_run().await.get("messages"), None);
}

#[tokio::test]
async fn a_worker_that_does_not_come_back_fails_the_run_and_not_the_session() {
    let (mut harness, worker, listener) = ready_worker().await;
    worker.close().await;
    let port = listener.port;
    drop(listener);
    harness.prompt("a", "x");
    let error = harness.wait_for_end("a").await.outcome.error.unwrap();
    assert_eq!(error.code, "agent_unreachable");
    assert!(
        error.message.contains(&port.to_string()) && error.message.contains("is it running?"),
        "{error:?}"
    );
    harness.prompt("b", "x");
    assert_eq!(harness.wait_for_end("b").await.stop(), TurnStopReason::Error);
}

#[tokio::test]
async fn a_break_after_a_cancel_is_a_cancel() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    harness.cancel("a");
    worker.next_frame().await;
    drop(worker);
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.outcome.error), (TurnStopReason::Cancelled, None));
}

#[tokio::test]
async fn a_cancel_ends_the_wait_for_a_connection_and_nothing_is_sent() {
    let (mut harness, worker, listener) = ready_worker().await;
    worker.close().await;
    harness.prompt("a", "x");
    // The kernel accepts the connection, but nobody answers it.
    let stream = listener.accept_stream().await;
    harness.cancel("a");
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    drop(stream);
    harness.prompt("b", "y");
    assert_eq!(listener.accept().await.expect_run().await["assignment"], "y");
}
