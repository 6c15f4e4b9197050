//! A connection that breaks costs nothing: the task is heard again, and nothing is told twice.

use super::*;

#[tokio::test]
async fn a_stream_that_breaks_is_taken_up_again_and_nothing_is_told_twice() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    let feed = server.call().await.stream();
    feed.event(form.status("working", Some(("m1", "begun")))).await;
    feed.event(form.artifact("x", "one ", false)).await;
    stage.until_text("one ").await;
    feed.break_off().await;
    let call = server.expect("SubscribeToTask").await;
    assert_eq!(call.params, json!({"id": "t"}));
    let feed = call.stream();
    feed.event(form.told_task("working", Some(("m1", "begun")), &[("x", "one two ")])).await;
    feed.event(form.artifact("x", "three", true)).await;
    // A server that is stopped ends its streams properly; that is no end of the task.
    stage.until_text("three").await;
    drop(feed);
    server.expect("SubscribeToTask").await.http(502, &json!("away"));
    let feed = server.expect("SubscribeToTask").await.stream();
    feed.event(form.told_task("completed", None, &[("x", "one two three four")])).await;
    let ended = stage.ended("a").await;
    assert_eq!(
        (ended.stop(), ended.text().as_str(), ended.thoughts().as_str()),
        (Stop::EndTurn, " four", "")
    );
}

#[tokio::test]
async fn a_stream_that_shows_no_task_when_it_is_taken_up_again_is_not_trusted() {
    let form = Form(Version::Old);
    let (mut stage, mut server) = Stage::ready(card(Version::Old, true)).await;
    stage.prompt("a", "x");
    let feed = server.call().await.stream();
    feed.event(form.artifact("x", "one ", false)).await;
    stage.until_text("one ").await;
    feed.break_off().await;
    let feed = server.expect("tasks/resubscribe").await.stream();
    // `two ` was said while nobody listened: three must not be told before it.
    feed.event(form.artifact("x", "three ", true)).await;
    server.expect("tasks/get").await.result(form.task("working", None, &[("x", "one two three ")]));
    stage.until_text("two three ").await;
    feed.event(form.artifact("x", "four", true)).await;
    feed.event(form.status("completed", None)).await;
    server.expect("tasks/get").await.result(form.task("completed", None, &[("x", "one two three four")]));
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, "four"));
}

#[tokio::test]
async fn a_task_that_cannot_be_listened_to_again_is_looked_at() {
    for version in BOTH {
        let form = Form(version);
        let (mut stage, mut server) = Stage::ready(card(version, true)).await;
        stage.prompt("a", "x");
        let feed = server.call().await.stream();
        feed.event(form.status("working", Some(("m1", "begun")))).await;
        stage.until_text("begun").await;
        feed.break_off().await;
        server.expect(form.method("SubscribeToTask")).await.refuse(-32004, "no");
        server.expect(form.method("GetTask")).await.result(form.task("working", None, &[]));
        server.expect(form.method("GetTask")).await.result(form.task("completed", None, &[("x", "done")]));
        let ended = stage.ended("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, "done"));
    }
}

#[tokio::test]
async fn a_task_that_nobody_knows_any_more_has_failed() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    let feed = server.call().await.stream();
    feed.event(form.status("working", Some(("m", "begun")))).await;
    stage.until_text("begun").await;
    feed.break_off().await;
    server.expect("SubscribeToTask").await.refuse(-32001, "which?");
    server.expect("GetTask").await.refuse(-32001, "I know no such task");
    let ended = stage.ended("a").await;
    assert_eq!(ended.stop(), Stop::Error);
    assert!(ended.error().message.contains("I know no such task"), "{:?}", ended.error());
}

#[tokio::test]
async fn a_prompt_of_which_nobody_knows_whether_it_was_taken_is_not_sent_again() {
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    server.call().await.stream().break_off().await;
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (Stop::Error, "agent_unreachable"));
    assert!(ended.error().message.contains("not sent again"), "{:?}", ended.error());
    assert!(server.is_quiet());
    stage.prompt("b", "x");
    drop(server.call().await.stream());
    assert!(stage.ended("b").await.error().message.contains("without one"));
}

#[tokio::test]
async fn an_answer_that_was_lost_on_the_way_is_asked_for_again() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    server.call().await.stream().event(form.status("input-required", Some(("q", "Well?")))).await;
    let ask = stage.until_ask().await;
    stage.answer(&ask, Answer { value: Some("yes".to_owned()), ..Answer::default() });
    server.expect("SendStreamingMessage").await.http(503, &json!("away"));
    let feed = server.expect("SubscribeToTask").await.stream();
    feed.event(form.told_task("input-required", Some(("q", "Well?")), &[])).await;
    let ask = stage.until_ask().await;
    assert_eq!(ask.prompt, "Well?");
    stage.answer(&ask, Answer { value: Some("yes!".to_owned()), ..Answer::default() });
    let call = server.expect("SendStreamingMessage").await;
    assert_eq!(call.params["message"]["parts"], json!([{"text": "yes!"}]));
    call.result(form.told_task("completed", Some(("m", "thanks")), &[]));
    assert_eq!(stage.ended("a").await.text(), "thanks");
}

#[tokio::test]
async fn a_question_after_a_break_comes_after_what_was_missed() {
    let form = Form(Version::Old);
    let (mut stage, mut server) = Stage::ready(card(Version::Old, true)).await;
    stage.prompt("a", "x");
    let feed = server.call().await.stream();
    feed.event(form.artifact("x", "one ", false)).await;
    stage.until_text("one ").await;
    feed.break_off().await;
    let feed = server.expect("tasks/resubscribe").await.stream();
    feed.event(form.status("input-required", Some(("q", "Well?")))).await;
    let call = server.expect("tasks/get").await;
    call.result(form.task("input-required", Some(("q", "Well?")), &[("x", "one two ")]));
    stage.until_text("two ").await;
    let ask = stage.until_ask().await;
    stage.answer(&ask, Answer { value: Some("yes".to_owned()), ..Answer::default() });
    let feed = server.expect("message/stream").await.stream();
    feed.event(form.artifact("x", "three", true)).await;
    feed.event(form.status("completed", None)).await;
    assert_eq!(stage.ended("a").await.text(), "three");
}

#[tokio::test]
async fn a_question_that_stays_open_after_its_answer_is_asked_again() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, false)).await;
    let open = || form.task("input-required", Some(("q", "Well?")), &[]);
    stage.prompt("a", "x");
    server.expect("SendMessage").await.result(json!({ "task": open() }));
    let ask = stage.until_ask().await;
    stage.answer(&ask, Answer { value: Some("yes".to_owned()), ..Answer::default() });
    server.expect("SendMessage").await.result(json!({ "task": open() }));
    for _ in 0..3 {
        server.expect("GetTask").await.result(open());
    }
    let again = stage.until_ask().await;
    assert_eq!(again.prompt, "Well?");
    assert_ne!(again.id, ask.id);
    stage.answer(&again, Answer { value: Some("yes!".to_owned()), ..Answer::default() });
    server.expect("SendMessage").await.result(form.told_task("completed", Some(("m", "thanks")), &[]));
    assert_eq!(stage.ended("a").await.text(), "thanks");
}
