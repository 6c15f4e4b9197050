//! A cancel reaches the remote task at whatever moment it comes, and the turn ends when the task has.

use super::*;

#[tokio::test]
async fn a_cancelled_turn_ends_when_its_task_has() {
    for version in BOTH {
        let form = Form(version);
        let (mut stage, mut server) = Stage::ready(card(version, true)).await;
        stage.prompt("a", "x");
        let feed = server.call().await.stream();
        feed.event(form.artifact("x", "words", false)).await;
        stage.until_text("words").await;
        stage.cancel("a");
        let call = server.expect(form.method("CancelTask")).await;
        assert_eq!(call.params["id"], "t");
        // It is ahead of its stream, and has not stopped: it is asked again, and nothing is told twice.
        call.result(form.task("working", None, &[("x", "words to the last")]));
        let again = server.expect(form.method("CancelTask")).await;
        feed.event(form.artifact("x", " to the last", true)).await;
        feed.event(form.status("canceled", None)).await;
        let ended = stage.ended("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (Stop::Cancelled, " to the last"));
        again.refuse(-32002, "it is over");
        feed.left().await;
        assert!(server.is_quiet());
    }
}

#[tokio::test]
async fn a_cancel_before_the_task_has_a_name_is_said_as_soon_as_it_has_one() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    let call = server.call().await;
    stage.cancel("a");
    let feed = call.stream();
    feed.event(form.told_task("submitted", None, &[])).await;
    let call = server.expect("CancelTask").await;
    call.result(form.task("canceled", None, &[]));
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
    stage.prompt("b", "x");
    server.call().await.result(form.told_task("completed", Some(("m", "next")), &[]));
    let ended = stage.ended("b").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, "next"), "the cancel was the other's");
}

#[tokio::test]
async fn a_cancel_while_the_agent_waits_for_an_answer_stops_its_task() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    server.call().await.stream().event(form.status("input-required", Some(("q", "Well?")))).await;
    stage.until_ask().await;
    stage.cancel("a");
    server.expect("CancelTask").await.result(form.task("canceled", None, &[]));
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
}

#[tokio::test]
async fn a_task_that_is_gone_or_over_has_stopped() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    let _feed = begun(&mut stage, &mut server).await;
    stage.cancel("a");
    server.expect("CancelTask").await.refuse(-32001, "which task?");
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);

    stage.prompt("b", "x");
    let _feed = begun(&mut stage, &mut server).await;
    stage.cancel("b");
    server.expect("CancelTask").await.refuse(-32002, "it is over");
    server.expect("GetTask").await.result(form.task("completed", None, &[("x", "words and more")]));
    assert_eq!(stage.ended("b").await.text(), " and more", "what it made in the end is told");
}

#[tokio::test]
async fn a_task_that_will_not_stop_is_named_and_left() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    let _feed = begun(&mut stage, &mut server).await;
    stage.cancel("a");
    server.expect("CancelTask").await.refuse(-32004, "we never stop");
    server.expect("GetTask").await.result(form.task("working", None, &[("x", "words")]));
    let ended = stage.ended("a").await;
    assert_eq!(ended.stop(), Stop::Cancelled);
    assert!(ended.notices().contains("will not stop its task t"), "{}", ended.notices());
}

#[tokio::test]
async fn a_request_to_stop_that_fails_is_made_again() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    let _feed = begun(&mut stage, &mut server).await;
    stage.cancel("a");
    server.expect("CancelTask").await.http(503, &json!("busy"));
    server.expect("CancelTask").await.refuse(-32603, "oops");
    server.expect("CancelTask").await.result(form.task("canceled", None, &[]));
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
}

#[tokio::test]
async fn a_cancelled_task_that_cannot_be_heard_any_more_is_over_when_it_says_so() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    let feed = begun(&mut stage, &mut server).await;
    stage.cancel("a");
    let call = server.expect("CancelTask").await;
    // Its stream becomes unreadable before it has answered.
    feed.raw(b"data: {\"error\":{\"code\":-32603,\"message\":\"oops\"}}\n\n").await;
    server.expect("GetTask").await.refuse(-32001, "not yet there");
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
    call.result(form.task("canceled", None, &[]));

    stage.prompt("b", "x");
    let feed = begun(&mut stage, &mut server).await;
    stage.cancel("b");
    let call = server.expect("CancelTask").await;
    feed.raw(b"data: {\"error\":{\"code\":-32603,\"message\":\"oops\"}}\n\n").await;
    // No task at all: there is nothing to be heard, and the answer to the cancel decides.
    server.expect("GetTask").await.result(json!("?"));
    call.result(form.task("canceled", None, &[("x", "words to the end")]));
    let ended = stage.ended("b").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (Stop::Cancelled, " to the end"));
}

#[tokio::test]
async fn a_turn_that_is_killed_leaves_no_connection_and_asks_once_more() {
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    let feed = begun(&mut stage, &mut server).await;
    stage.cancel("a");
    let unanswered = server.expect("CancelTask").await;
    stage.kill("a");
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
    feed.left().await;
    server.expect("CancelTask").await;
    drop(unanswered);
    assert_eq!(stage.gone().await, Gone::Stopped);
}

/// A turn whose task has said something.
async fn begun(stage: &mut Stage, server: &mut Server) -> super::server::Feed {
    let feed = server.expect("SendStreamingMessage").await.stream();
    feed.event(Form(Version::One).artifact("x", "words", false)).await;
    stage.until_text("words").await;
    feed
}
