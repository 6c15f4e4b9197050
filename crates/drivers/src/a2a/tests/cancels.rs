//! A cancel reaches the remote task whenever it comes, and the turn ends when the task has ended.

use super::*;

#[tokio::test]
async fn a_cancelled_turn_ends_when_its_task_has() {
    for version in ALL_VERSIONS {
        let (format, mut harness, mut server) = start_turn(version).await;
        let stream = server.next_call().await.start_stream();
        stream.send_event(format.artifact("x", "words", false)).await;
        harness.wait_for_text("words").await;
        harness.cancel("a");
        let call = server.expect(format.method("CancelTask")).await;
        assert_eq!(call.params["id"], "t");
        // The response is ahead of the stream, and the task has not stopped. It is cancelled again, and nothing is
        // emitted twice.
        call.send_result(format.task("working", None, &[("x", "words to the last")]));
        let again = server.expect(format.method("CancelTask")).await;
        stream.send_event(format.artifact("x", " to the last", true)).await;
        stream.send_event(format.status("canceled", None)).await;
        let ended = harness.wait_for_end("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::Cancelled, " to the last"));
        again.send_error(-32002, "it is over");
        stream.wait_closed().await;
        assert!(server.has_no_calls());
    }
}

#[tokio::test]
async fn a_cancel_before_the_task_id_is_known_is_sent_as_soon_as_it_is() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    let call = server.next_call().await;
    harness.cancel("a");
    let stream = call.start_stream();
    stream.send_event(format.task_event("submitted", None, &[])).await;
    let call = server.expect("CancelTask").await;
    call.send_result(format.task("canceled", None, &[]));
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    harness.prompt("b", "x");
    server.next_call().await.send_result(format.task_event("completed", Some(("m", "next")), &[]));
    let ended = harness.wait_for_end("b").await;
    assert_eq!(
        (ended.stop(), ended.text().as_str()),
        (TurnStopReason::EndTurn, "next"),
        "the cancel was for the other turn"
    );
}

#[tokio::test]
async fn a_cancel_while_the_agent_waits_for_an_answer_stops_its_task() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    server.stream_one_event(format.status("input-required", Some(("q", "Well?")))).await;
    harness.wait_for_ask().await;
    harness.cancel("a");
    server.expect("CancelTask").await.send_result(format.task("canceled", None, &[]));
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test]
async fn a_task_that_is_gone_or_over_has_stopped() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    let _stream = start_streaming_turn(&mut harness, &mut server).await;
    harness.cancel("a");
    server.expect("CancelTask").await.send_error(-32001, "which task?");
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);

    harness.prompt("b", "x");
    let _stream = start_streaming_turn(&mut harness, &mut server).await;
    harness.cancel("b");
    server.expect("CancelTask").await.send_error(-32002, "it is over");
    server.expect("GetTask").await.send_result(format.task("completed", None, &[("x", "words and more")]));
    assert_eq!(harness.wait_for_end("b").await.text(), " and more", "its last output is emitted");
}

#[tokio::test]
async fn a_task_that_will_not_stop_is_named_in_a_notice_and_abandoned() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    let _stream = start_streaming_turn(&mut harness, &mut server).await;
    harness.cancel("a");
    server.expect("CancelTask").await.send_error(-32004, "we never stop");
    server.expect("GetTask").await.send_result(format.task("working", None, &[("x", "words")]));
    let ended = harness.wait_for_end("a").await;
    assert_eq!(ended.stop(), TurnStopReason::Cancelled);
    assert!(ended.notices().contains("will not stop its task t"), "{}", ended.notices());
}

#[tokio::test]
async fn a_cancel_that_fails_is_repeated() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    let _stream = start_streaming_turn(&mut harness, &mut server).await;
    harness.cancel("a");
    server.expect("CancelTask").await.send_http(503, &json!("busy"));
    server.expect("CancelTask").await.send_error(-32603, "oops");
    server.expect("CancelTask").await.send_result(format.task("canceled", None, &[]));
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test]
async fn a_cancelled_task_without_a_stream_ends_by_poll_or_cancel_response() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    let stream = start_streaming_turn(&mut harness, &mut server).await;
    harness.cancel("a");
    let call = server.expect("CancelTask").await;
    // The stream becomes unreadable before the cancel is answered.
    stream.send_raw(b"data: {\"error\":{\"code\":-32603,\"message\":\"oops\"}}\n\n").await;
    server.expect("GetTask").await.send_error(-32001, "not yet there");
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    call.send_result(format.task("canceled", None, &[]));

    harness.prompt("b", "x");
    let stream = start_streaming_turn(&mut harness, &mut server).await;
    harness.cancel("b");
    let call = server.expect("CancelTask").await;
    stream.send_raw(b"data: {\"error\":{\"code\":-32603,\"message\":\"oops\"}}\n\n").await;
    // The poll returns no task, so the response to the cancel decides.
    server.expect("GetTask").await.send_result(json!("?"));
    call.send_result(format.task("canceled", None, &[("x", "words to the end")]));
    let ended = harness.wait_for_end("b").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::Cancelled, " to the end"));
}

#[tokio::test]
async fn a_killed_turn_leaves_no_connection_and_cancels_its_task_once_more() {
    let (mut harness, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    harness.prompt("a", "x");
    let stream = start_streaming_turn(&mut harness, &mut server).await;
    harness.cancel("a");
    let unanswered = server.expect("CancelTask").await;
    harness.kill("a");
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    stream.wait_closed().await;
    server.expect("CancelTask").await;
    drop(unanswered);
    assert_eq!(harness.wait_for_exit().await, AgentExitReason::Stopped);
}

/// Starts a turn whose task has emitted some text.
async fn start_streaming_turn(
    harness: &mut A2aDriverHarness,
    server: &mut FakeA2aServer,
) -> super::server::FakeA2aStream {
    let stream = server.expect("SendStreamingMessage").await.start_stream();
    stream.send_event(A2aTestFormat(A2aVersion::V1_0).artifact("x", "words", false)).await;
    harness.wait_for_text("words").await;
    stream
}
