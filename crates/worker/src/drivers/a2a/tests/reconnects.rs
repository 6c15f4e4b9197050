//! A connection that breaks costs nothing: the task is heard again, and nothing is told twice.

use super::*;

#[tokio::test]
async fn a_stream_that_breaks_is_taken_up_again_and_nothing_is_told_twice() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    let feed = server.next_call().await.start_stream();
    feed.send_event(form.status("working", Some(("m1", "begun")))).await;
    feed.send_event(form.artifact("x", "one ", false)).await;
    stage.wait_for_text("one ").await;
    feed.break_off().await;
    let call = server.expect("SubscribeToTask").await;
    assert_eq!(call.params, json!({"id": "t"}));
    let feed = call.start_stream();
    feed.send_event(form.task_event("working", Some(("m1", "begun")), &[("x", "one two ")])).await;
    feed.send_event(form.artifact("x", "three", true)).await;
    // A server that is stopped ends its streams properly; that is no end of the task.
    stage.wait_for_text("three").await;
    drop(feed);
    server.expect("SubscribeToTask").await.send_http(502, &json!("away"));
    let feed = server.expect("SubscribeToTask").await.start_stream();
    feed.send_event(form.task_event("completed", None, &[("x", "one two three four")])).await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!(
        (ended.stop(), ended.text().as_str(), ended.thoughts().as_str()),
        (TurnStopReason::EndTurn, " four", "")
    );
}

#[tokio::test]
async fn a_stream_that_shows_no_task_when_it_is_taken_up_again_is_not_trusted() {
    let form = A2aTestFormat(A2aVersion::V0_3);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V0_3, true)).await;
    stage.prompt("a", "x");
    let feed = server.next_call().await.start_stream();
    feed.send_event(form.artifact("x", "one ", false)).await;
    stage.wait_for_text("one ").await;
    feed.break_off().await;
    let feed = server.expect("tasks/resubscribe").await.start_stream();
    // `two ` was said while nobody listened: three must not be told before it.
    feed.send_event(form.artifact("x", "three ", true)).await;
    server.expect("tasks/get").await.send_result(form.task("working", None, &[("x", "one two three ")]));
    stage.wait_for_text("two three ").await;
    feed.send_event(form.artifact("x", "four", true)).await;
    feed.send_event(form.status("completed", None)).await;
    server.expect("tasks/get").await.send_result(form.task(
        "completed",
        None,
        &[("x", "one two three four")],
    ));
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "four"));
}

#[tokio::test]
async fn a_task_that_cannot_be_listened_to_again_is_looked_at() {
    for version in ALL_VERSIONS {
        let form = A2aTestFormat(version);
        let (mut stage, mut server) = A2aDriverHarness::ready(card(version, true)).await;
        stage.prompt("a", "x");
        let feed = server.next_call().await.start_stream();
        feed.send_event(form.status("working", Some(("m1", "begun")))).await;
        stage.wait_for_text("begun").await;
        feed.break_off().await;
        server.expect(form.method("SubscribeToTask")).await.send_error(-32004, "no");
        server.expect(form.method("GetTask")).await.send_result(form.task("working", None, &[]));
        server.expect(form.method("GetTask")).await.send_result(form.task(
            "completed",
            None,
            &[("x", "done")],
        ));
        let ended = stage.wait_for_end("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "done"));
    }
}

#[tokio::test]
async fn a_task_that_nobody_knows_any_more_has_failed() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    let feed = server.next_call().await.start_stream();
    feed.send_event(form.status("working", Some(("m", "begun")))).await;
    stage.wait_for_text("begun").await;
    feed.break_off().await;
    server.expect("SubscribeToTask").await.send_error(-32001, "which?");
    server.expect("GetTask").await.send_error(-32001, "I know no such task");
    let ended = stage.wait_for_end("a").await;
    assert_eq!(ended.stop(), TurnStopReason::Error);
    assert!(ended.error().message.contains("I know no such task"), "{:?}", ended.error());
}

#[tokio::test]
async fn a_prompt_of_which_nobody_knows_whether_it_was_taken_is_not_sent_again() {
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    server.next_call().await.start_stream().break_off().await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (TurnStopReason::Error, "agent_unreachable"));
    assert!(ended.error().message.contains("not sent again"), "{:?}", ended.error());
    assert!(server.has_no_calls());
    stage.prompt("b", "x");
    drop(server.next_call().await.start_stream());
    assert!(stage.wait_for_end("b").await.error().message.contains("without one"));
}

#[tokio::test]
async fn an_answer_that_was_lost_on_the_way_is_asked_for_again() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    server
        .next_call()
        .await
        .start_stream()
        .send_event(form.status("input-required", Some(("q", "Well?"))))
        .await;
    let ask = stage.wait_for_ask().await;
    stage.answer(&ask, AskAnswer { value: Some("yes".to_owned()), ..AskAnswer::default() });
    server.expect("SendStreamingMessage").await.send_http(503, &json!("away"));
    let feed = server.expect("SubscribeToTask").await.start_stream();
    feed.send_event(form.task_event("input-required", Some(("q", "Well?")), &[])).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!(ask.prompt, "Well?");
    stage.answer(&ask, AskAnswer { value: Some("yes!".to_owned()), ..AskAnswer::default() });
    let call = server.expect("SendStreamingMessage").await;
    assert_eq!(call.params["message"]["parts"], json!([{"text": "yes!"}]));
    call.send_result(form.task_event("completed", Some(("m", "thanks")), &[]));
    assert_eq!(stage.wait_for_end("a").await.text(), "thanks");
}

#[tokio::test]
async fn a_question_after_a_break_comes_after_what_was_missed() {
    let form = A2aTestFormat(A2aVersion::V0_3);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V0_3, true)).await;
    stage.prompt("a", "x");
    let feed = server.next_call().await.start_stream();
    feed.send_event(form.artifact("x", "one ", false)).await;
    stage.wait_for_text("one ").await;
    feed.break_off().await;
    let feed = server.expect("tasks/resubscribe").await.start_stream();
    feed.send_event(form.status("input-required", Some(("q", "Well?")))).await;
    let call = server.expect("tasks/get").await;
    call.send_result(form.task("input-required", Some(("q", "Well?")), &[("x", "one two ")]));
    stage.wait_for_text("two ").await;
    let ask = stage.wait_for_ask().await;
    stage.answer(&ask, AskAnswer { value: Some("yes".to_owned()), ..AskAnswer::default() });
    let feed = server.expect("message/stream").await.start_stream();
    feed.send_event(form.artifact("x", "three", true)).await;
    feed.send_event(form.status("completed", None)).await;
    assert_eq!(stage.wait_for_end("a").await.text(), "three");
}

#[tokio::test]
async fn a_question_that_stays_open_after_its_answer_is_asked_again() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, false)).await;
    let open = || form.task("input-required", Some(("q", "Well?")), &[]);
    stage.prompt("a", "x");
    server.expect("SendMessage").await.send_result(json!({ "task": open() }));
    let ask = stage.wait_for_ask().await;
    stage.answer(&ask, AskAnswer { value: Some("yes".to_owned()), ..AskAnswer::default() });
    server.expect("SendMessage").await.send_result(json!({ "task": open() }));
    for _ in 0..3 {
        server.expect("GetTask").await.send_result(open());
    }
    let again = stage.wait_for_ask().await;
    assert_eq!(again.prompt, "Well?");
    assert_ne!(again.id, ask.id);
    stage.answer(&again, AskAnswer { value: Some("yes!".to_owned()), ..AskAnswer::default() });
    server.expect("SendMessage").await.send_result(form.task_event("completed", Some(("m", "thanks")), &[]));
    assert_eq!(stage.wait_for_end("a").await.text(), "thanks");
}
