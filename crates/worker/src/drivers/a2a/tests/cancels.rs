//! A cancel reaches the remote task at whatever moment it comes, and the turn ends when the task has.

use super::*;

#[tokio::test]
async fn a_cancelled_turn_ends_when_its_task_has() {
    for version in ALL_VERSIONS {
        let form = A2aTestFormat(version);
        let (mut stage, mut server) = A2aDriverHarness::ready(card(version, true)).await;
        stage.prompt("a", "x");
        let feed = server.next_call().await.start_stream();
        feed.send_event(form.artifact("x", "words", false)).await;
        stage.wait_for_text("words").await;
        stage.cancel("a");
        let call = server.expect(form.method("CancelTask")).await;
        assert_eq!(call.params["id"], "t");
        // It is ahead of its stream, and has not stopped: it is asked again, and nothing is told twice.
        call.send_result(form.task("working", None, &[("x", "words to the last")]));
        let again = server.expect(form.method("CancelTask")).await;
        feed.send_event(form.artifact("x", " to the last", true)).await;
        feed.send_event(form.status("canceled", None)).await;
        let ended = stage.wait_for_end("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::Cancelled, " to the last"));
        again.send_error(-32002, "it is over");
        feed.wait_closed().await;
        assert!(server.has_no_calls());
    }
}

#[tokio::test]
async fn a_cancel_before_the_task_has_a_name_is_said_as_soon_as_it_has_one() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    let call = server.next_call().await;
    stage.cancel("a");
    let feed = call.start_stream();
    feed.send_event(form.task_event("submitted", None, &[])).await;
    let call = server.expect("CancelTask").await;
    call.send_result(form.task("canceled", None, &[]));
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    stage.prompt("b", "x");
    server.next_call().await.send_result(form.task_event("completed", Some(("m", "next")), &[]));
    let ended = stage.wait_for_end("b").await;
    assert_eq!(
        (ended.stop(), ended.text().as_str()),
        (TurnStopReason::EndTurn, "next"),
        "the cancel was the other's"
    );
}

#[tokio::test]
async fn a_cancel_while_the_agent_waits_for_an_answer_stops_its_task() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    server
        .next_call()
        .await
        .start_stream()
        .send_event(form.status("input-required", Some(("q", "Well?"))))
        .await;
    stage.wait_for_ask().await;
    stage.cancel("a");
    server.expect("CancelTask").await.send_result(form.task("canceled", None, &[]));
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test]
async fn a_task_that_is_gone_or_over_has_stopped() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    let _feed = start_streaming_turn(&mut stage, &mut server).await;
    stage.cancel("a");
    server.expect("CancelTask").await.send_error(-32001, "which task?");
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);

    stage.prompt("b", "x");
    let _feed = start_streaming_turn(&mut stage, &mut server).await;
    stage.cancel("b");
    server.expect("CancelTask").await.send_error(-32002, "it is over");
    server.expect("GetTask").await.send_result(form.task("completed", None, &[("x", "words and more")]));
    assert_eq!(stage.wait_for_end("b").await.text(), " and more", "what it made in the end is told");
}

#[tokio::test]
async fn a_task_that_will_not_stop_is_named_and_left() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    let _feed = start_streaming_turn(&mut stage, &mut server).await;
    stage.cancel("a");
    server.expect("CancelTask").await.send_error(-32004, "we never stop");
    server.expect("GetTask").await.send_result(form.task("working", None, &[("x", "words")]));
    let ended = stage.wait_for_end("a").await;
    assert_eq!(ended.stop(), TurnStopReason::Cancelled);
    assert!(ended.notices().contains("will not stop its task t"), "{}", ended.notices());
}

#[tokio::test]
async fn a_request_to_stop_that_fails_is_made_again() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    let _feed = start_streaming_turn(&mut stage, &mut server).await;
    stage.cancel("a");
    server.expect("CancelTask").await.send_http(503, &json!("busy"));
    server.expect("CancelTask").await.send_error(-32603, "oops");
    server.expect("CancelTask").await.send_result(form.task("canceled", None, &[]));
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test]
async fn a_cancelled_task_that_cannot_be_heard_any_more_is_over_when_it_says_so() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    let feed = start_streaming_turn(&mut stage, &mut server).await;
    stage.cancel("a");
    let call = server.expect("CancelTask").await;
    // Its stream becomes unreadable before it has answered.
    feed.send_raw(b"data: {\"error\":{\"code\":-32603,\"message\":\"oops\"}}\n\n").await;
    server.expect("GetTask").await.send_error(-32001, "not yet there");
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    call.send_result(form.task("canceled", None, &[]));

    stage.prompt("b", "x");
    let feed = start_streaming_turn(&mut stage, &mut server).await;
    stage.cancel("b");
    let call = server.expect("CancelTask").await;
    feed.send_raw(b"data: {\"error\":{\"code\":-32603,\"message\":\"oops\"}}\n\n").await;
    // No task at all: there is nothing to be heard, and the answer to the cancel decides.
    server.expect("GetTask").await.send_result(json!("?"));
    call.send_result(form.task("canceled", None, &[("x", "words to the end")]));
    let ended = stage.wait_for_end("b").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::Cancelled, " to the end"));
}

#[tokio::test]
async fn a_turn_that_is_killed_leaves_no_connection_and_asks_once_more() {
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    let feed = start_streaming_turn(&mut stage, &mut server).await;
    stage.cancel("a");
    let unanswered = server.expect("CancelTask").await;
    stage.kill("a");
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    feed.wait_closed().await;
    server.expect("CancelTask").await;
    drop(unanswered);
    assert_eq!(stage.wait_for_exit().await, AgentExitReason::Stopped);
}

/// A turn whose task has said something.
async fn start_streaming_turn(
    stage: &mut A2aDriverHarness,
    server: &mut FakeA2aServer,
) -> super::server::FakeA2aStream {
    let feed = server.expect("SendStreamingMessage").await.start_stream();
    feed.send_event(A2aTestFormat(A2aVersion::V1_0).artifact("x", "words", false)).await;
    stage.wait_for_text("words").await;
    feed
}
