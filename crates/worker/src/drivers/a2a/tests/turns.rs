//! What a turn tells and how it ends, when nothing goes wrong on the way.

use qd_protocol::event::{AskKind, Decision};

use super::*;

#[tokio::test]
async fn an_answer_is_told_as_it_comes_and_the_next_prompt_goes_on_with_it() {
    for version in BOTH {
        let form = Form(version);
        let (mut stage, mut server) = Stage::ready(card(version, true)).await;
        stage.prompt("a", "hello");
        let call = server.expect(form.method("SendStreamingMessage")).await;
        assert_eq!(call.headers["a2a-version"], version.name());
        let told = &call.params["message"];
        assert_eq!(told["parts"], json!([form.part("hello")]));
        assert_eq!((told.get("contextId"), told.get("taskId")), (None, None));
        assert!(told["messageId"].as_str().unwrap().len() > 16);
        let feed = call.stream();
        feed.event(form.told_task("submitted", None, &[])).await;
        feed.event(form.status("working", Some(("m1", "looking it up")))).await;
        feed.event(form.artifact("x", "the answer ", false)).await;
        stage.until_text("the answer ").await;
        // Cut in the middle of a character, with comments, other line ends and an event of a later version around it.
        let piece = json!({"jsonrpc": "2.0", "id": 1, "result": form.artifact("x", "is 42 €", true)});
        let event =
            format!(": still here\r\n\r\ndata: {{\"result\":{{\"song\":1}}}}\r\n\r\ndata: {piece}\r\n\r\n");
        let cut = event.find('€').unwrap() + 1;
        feed.raw(&event.as_bytes()[..cut]).await;
        feed.raw(&event.as_bytes()[cut..]).await;
        feed.event(form.status("completed", None)).await;
        let ended = stage.ended("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, "is 42 €"), "{version:?}");
        assert_eq!(stage.hear().await, Up::Ready { agent_session_id: Some("c".to_owned()), steers: false });

        stage.prompt("b", "and now?");
        let call = server.expect(form.method("SendStreamingMessage")).await;
        assert_eq!(call.params["message"]["contextId"], "c", "it is the same conversation");
        assert_eq!(call.params["message"].get("taskId"), None, "and another task");
        call.result(form.told_task("completed", Some(("m2", "good")), &[]));
        let ended = stage.ended("b").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, "good"));
        assert!(server.is_quiet(), "what is over is not stopped");
    }
}

#[tokio::test]
async fn a_message_is_an_answer_too() {
    for version in BOTH {
        let form = Form(version);
        let (mut stage, mut server) = Stage::ready(card(version, true)).await;
        stage.prompt("a", "hello");
        let message = form.message("m", "hi there");
        let feed = server.call().await.stream();
        feed.event(if version == Version::One { json!({ "message": message }) } else { message }).await;
        let ended = stage.ended("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, "hi there"));
        feed.left().await;
        assert!(matches!(stage.hear().await, Up::Ready { agent_session_id: Some(id), .. } if id == "c"));
    }
}

#[tokio::test]
async fn an_agent_without_streams_is_looked_at_until_it_is_done() {
    for version in BOTH {
        let form = Form(version);
        let (mut stage, mut server) = Stage::ready(card(version, false)).await;
        stage.prompt("a", "hello");
        let call = server.expect(form.method("SendMessage")).await;
        let at_once = match version {
            Version::One => json!({"returnImmediately": true}),
            Version::Old => json!({"blocking": false}),
        };
        assert_eq!(call.params["configuration"], at_once);
        call.result(form.told_task("working", Some(("m1", "on it")), &[]));
        let call = server.expect(form.method("GetTask")).await;
        assert_eq!(call.params["id"], "t");
        call.result(form.task("working", Some(("m1", "on it")), &[("x", "one ")]));
        let call = server.expect(form.method("GetTask")).await;
        call.result(form.task("completed", None, &[("x", "one two")]));
        let ended = stage.ended("a").await;
        assert_eq!(
            (ended.stop(), ended.text().as_str(), ended.thoughts().as_str()),
            (Stop::EndTurn, "one two", "on it\n")
        );
    }
}

#[tokio::test]
async fn a_question_is_asked_and_its_answer_goes_to_the_same_task() {
    for version in BOTH {
        let form = Form(version);
        let (mut stage, mut server) = Stage::ready(card(version, true)).await;
        stage.prompt("a", "book a flight");
        let feed = server.call().await.stream();
        feed.event(form.told_task("working", None, &[])).await;
        feed.event(form.status("input-required", Some(("q1", "Where to?")))).await;
        let ask = stage.until_ask().await;
        assert_eq!((ask.kind, ask.prompt.as_str(), ask.options.len()), (AskKind::Question, "Where to?", 0));
        feed.left().await;
        stage.answer(&ask, Answer { value: Some("Rome".to_owned()), ..Answer::default() });
        let call = server.expect(form.method("SendStreamingMessage")).await;
        let told = &call.params["message"];
        assert_eq!((&told["taskId"], &told["contextId"]), (&json!("t"), &json!("c")));
        assert_eq!(told["parts"], json!([form.part("Rome")]));
        let feed = call.stream();
        // Some show the task as it was before they take the answer in.
        feed.event(form.told_task("input-required", Some(("q1", "Where to?")), &[])).await;
        feed.event(form.status("working", None)).await;
        feed.event(form.status("input-required", Some(("q2", "Which day?")))).await;
        let ask = stage.until_ask().await;
        assert_eq!(ask.prompt, "Which day?");
        stage.answer(&ask, Answer { value: Some("Monday".to_owned()), ..Answer::default() });
        let call = server.expect(form.method("SendStreamingMessage")).await;
        call.result(form.told_task("completed", Some(("m", "booked")), &[]));
        let ended = stage.ended("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, "booked"));
    }
}

#[tokio::test]
async fn a_question_that_is_refused_ends_the_task_and_the_agent_is_told_why() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    server.call().await.stream().event(form.status("input-required", Some(("q", "May I?")))).await;
    let ask = stage.until_ask().await;
    let no = Answer { decision: Some(Decision::Deny), reason: Some("not today".to_owned()), value: None };
    stage.answer(&ask, no);
    let call = server.expect("CancelTask").await;
    assert_eq!(call.params, json!({"id": "t", "metadata": {"reason": "not today"}}));
    call.result(form.task("canceled", None, &[]));
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (Stop::Error, "question_refused"));
}

#[tokio::test]
async fn how_a_task_ends_is_how_the_turn_does() {
    for version in BOTH {
        let form = Form(version);
        for (state, words, message) in [
            ("failed", Some(("m", "out of ideas")), "out of ideas"),
            ("failed", None, "the agent failed and did not say why"),
            ("rejected", Some(("m", "not my job")), "not my job"),
            ("canceled", Some(("m", "maintenance")), "not from here: maintenance"),
        ] {
            let (mut stage, mut server) = Stage::ready(card(version, true)).await;
            stage.prompt("a", "x");
            server.call().await.stream().event(form.status(state, words)).await;
            let ended = stage.ended("a").await;
            assert_eq!((ended.stop(), ended.error().code.as_str()), (Stop::Error, "agent_error"));
            assert!(ended.error().message.contains(message), "{state}: {}", ended.error().message);
            assert!(server.is_quiet(), "what is over is not stopped");
        }
    }
}

#[tokio::test]
async fn an_agent_that_wants_to_be_authorised_ends_the_turn_with_what_to_do() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    server.call().await.stream().event(form.status("auth-required", Some(("m", "log in at H")))).await;
    let call = server.expect("CancelTask").await;
    call.refuse(-32002, "no");
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (Stop::Error, "auth_required"));
    let message = &ended.error().message;
    assert!(message.contains("log in at H") && message.contains("A2A_TOKEN"), "{message}");
}

#[tokio::test]
async fn a_prompt_that_is_refused_fails_with_the_agents_words_and_the_agent_lives_on() {
    let form = Form(Version::One);
    let (mut stage, mut server) = Stage::ready(card(Version::One, true)).await;
    stage.prompt("a", "x");
    server.call().await.refuse(-32005, "no pictures, please");
    let ended = stage.ended("a").await;
    assert_eq!(ended.error().message, "no pictures, please (-32005)");
    stage.prompt("b", "x");
    server.call().await.http(401, &json!({"error": "who are you?"}));
    let ended = stage.ended("b").await;
    let message = &ended.error().message;
    assert!(message.contains("HTTP 401") && message.contains("give the session A2A_TOKEN"), "{message}");
    stage.prompt("c", "x");
    server.call().await.result(form.told_task("completed", Some(("m", "fine")), &[]));
    assert_eq!(stage.ended("c").await.text(), "fine");
}

#[tokio::test]
async fn calls_by_path_do_as_well() {
    let form = Form(Version::One);
    let rest = |_: &Server| {
        json!({"capabilities": {"streaming": true}, "supportedInterfaces":
        [{"url": "/v1/", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"}]})
    };
    let (mut stage, mut server) = Stage::ready(rest).await;
    stage.prompt("a", "hello");
    let call = server.expect("POST /v1/message:stream").await;
    assert_eq!(call.params["message"]["parts"], json!([{"text": "hello"}]));
    let feed = call.stream();
    let plain = |event: Value| format!("data: {event}\n\n").into_bytes();
    feed.raw(&plain(form.told_task("working", None, &[]))).await;
    feed.raw(&plain(form.artifact("x", "half", false))).await;
    stage.until_text("half").await;
    stage.cancel("a");
    let call = server.expect("POST /v1/tasks/t:cancel").await;
    call.http(
        409,
        &json!({"error": {"code": 409, "message": "no", "details": [{"reason": "TASK_NOT_CANCELABLE"}]}}),
    );
    let call = server.expect("GET /v1/tasks/t?historyLength=20").await;
    call.http(200, &form.task("completed", None, &[("x", "half and half")]));
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, " and half"));
}
