//! A broken connection loses nothing: the task's events are received again, and nothing is emitted twice.

use super::*;

#[tokio::test]
async fn a_broken_stream_is_reopened_and_nothing_is_emitted_twice() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    let stream = server.next_call().await.start_stream();
    stream.send_event(format.status("working", Some(("m1", "begun")))).await;
    stream.send_event(format.artifact("x", "one ", false)).await;
    harness.wait_for_text("one ").await;
    stream.break_off().await;
    let call = server.expect("SubscribeToTask").await;
    assert_eq!(call.params, json!({"id": "t"}));
    let stream = call.start_stream();
    stream.send_event(format.task_event("working", Some(("m1", "begun")), &[("x", "one two ")])).await;
    stream.send_event(format.artifact("x", "three", true)).await;
    // A server that is stopped ends its streams properly, which does not end the task.
    harness.wait_for_text("three").await;
    drop(stream);
    server.expect("SubscribeToTask").await.send_http(502, &json!("away"));
    let stream = server.expect("SubscribeToTask").await.start_stream();
    stream.send_event(format.task_event("completed", None, &[("x", "one two three four")])).await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!(
        (ended.stop(), ended.text().as_str(), ended.thoughts().as_str()),
        (TurnStopReason::EndTurn, " four", "")
    );
}

#[tokio::test]
async fn a_reopened_stream_is_not_trusted_until_it_shows_the_task() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V0_3).await;
    let stream = server.next_call().await.start_stream();
    stream.send_event(format.artifact("x", "one ", false)).await;
    harness.wait_for_text("one ").await;
    stream.break_off().await;
    let stream = server.expect("tasks/resubscribe").await.start_stream();
    // `two ` was sent during the break: `three ` must not be emitted before it.
    stream.send_event(format.artifact("x", "three ", true)).await;
    server.expect("tasks/get").await.send_result(format.task("working", None, &[("x", "one two three ")]));
    harness.wait_for_text("two three ").await;
    stream.send_event(format.artifact("x", "four", true)).await;
    stream.send_event(format.status("completed", None)).await;
    server.expect("tasks/get").await.send_result(format.task(
        "completed",
        None,
        &[("x", "one two three four")],
    ));
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "four"));
}

#[tokio::test]
async fn a_task_that_cannot_be_subscribed_to_is_polled() {
    for version in ALL_VERSIONS {
        let (format, mut harness, mut server) = start_turn(version).await;
        let stream = server.next_call().await.start_stream();
        stream.send_event(format.status("working", Some(("m1", "begun")))).await;
        harness.wait_for_text("begun").await;
        stream.break_off().await;
        server.expect(format.method("SubscribeToTask")).await.send_error(-32004, "no");
        server.expect(format.method("GetTask")).await.send_result(format.task("working", None, &[]));
        server.expect(format.method("GetTask")).await.send_result(format.task(
            "completed",
            None,
            &[("x", "done")],
        ));
        let ended = harness.wait_for_end("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "done"));
    }
}

#[tokio::test]
async fn a_task_that_the_agent_no_longer_knows_has_failed() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    let stream = server.next_call().await.start_stream();
    stream.send_event(format.status("working", Some(("m", "begun")))).await;
    harness.wait_for_text("begun").await;
    stream.break_off().await;
    server.expect("SubscribeToTask").await.send_error(-32001, "which?");
    server.expect("GetTask").await.send_error(-32001, "I know no such task");
    let ended = harness.wait_for_end("a").await;
    assert_eq!(ended.stop(), TurnStopReason::Error);
    assert!(ended.error().message.contains("I know no such task"), "{:?}", ended.error());
}

#[tokio::test]
async fn a_prompt_is_not_sent_again_if_delivery_is_uncertain() {
    let (mut harness, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    harness.prompt("a", "x");
    server.next_call().await.start_stream().break_off().await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (TurnStopReason::Error, "agent_unreachable"));
    assert!(ended.error().message.contains("not sent again"), "{:?}", ended.error());
    assert!(server.has_no_calls());
    harness.prompt("b", "x");
    drop(server.next_call().await.start_stream());
    assert!(harness.wait_for_end("b").await.error().message.contains("without an answer"));
}

#[tokio::test]
async fn a_question_whose_answer_was_lost_is_asked_again() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    server.stream_one_event(format.status("input-required", Some(("q", "Well?")))).await;
    let ask = harness.wait_for_ask().await;
    harness.answer_value(&ask, "yes");
    server.expect("SendStreamingMessage").await.send_http(503, &json!("away"));
    let stream = server.expect("SubscribeToTask").await.start_stream();
    stream.send_event(format.task_event("input-required", Some(("q", "Well?")), &[])).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!(ask.prompt, "Well?");
    harness.answer_value(&ask, "yes!");
    let call = server.expect("SendStreamingMessage").await;
    assert_eq!(call.params["message"]["parts"], json!([{"text": "yes!"}]));
    call.send_result(format.task_event("completed", Some(("m", "thanks")), &[]));
    assert_eq!(harness.wait_for_end("a").await.text(), "thanks");
}

#[tokio::test]
async fn a_question_after_a_break_comes_after_the_missed_output() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V0_3).await;
    let stream = server.next_call().await.start_stream();
    stream.send_event(format.artifact("x", "one ", false)).await;
    harness.wait_for_text("one ").await;
    stream.break_off().await;
    let stream = server.expect("tasks/resubscribe").await.start_stream();
    stream.send_event(format.status("input-required", Some(("q", "Well?")))).await;
    let call = server.expect("tasks/get").await;
    call.send_result(format.task("input-required", Some(("q", "Well?")), &[("x", "one two ")]));
    harness.wait_for_text("two ").await;
    let ask = harness.wait_for_ask().await;
    harness.answer_value(&ask, "yes");
    let stream = server.expect("message/stream").await.start_stream();
    stream.send_event(format.artifact("x", "three", true)).await;
    stream.send_event(format.status("completed", None)).await;
    assert_eq!(harness.wait_for_end("a").await.text(), "three");
}

#[tokio::test]
async fn a_question_that_stays_open_after_its_answer_is_asked_again() {
    let format = A2aTestFormat(A2aVersion::V1_0);
    let (mut harness, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, false)).await;
    let open = || format.task("input-required", Some(("q", "Well?")), &[]);
    harness.prompt("a", "x");
    server.expect("SendMessage").await.send_result(json!({ "task": open() }));
    let ask = harness.wait_for_ask().await;
    harness.answer_value(&ask, "yes");
    server.expect("SendMessage").await.send_result(json!({ "task": open() }));
    for _ in 0..3 {
        server.expect("GetTask").await.send_result(open());
    }
    let again = harness.wait_for_ask().await;
    assert_eq!(again.prompt, "Well?");
    assert_ne!(again.id, ask.id);
    harness.answer_value(&again, "yes!");
    server.expect("SendMessage").await.send_result(format.task_event(
        "completed",
        Some(("m", "thanks")),
        &[],
    ));
    assert_eq!(harness.wait_for_end("a").await.text(), "thanks");
}
