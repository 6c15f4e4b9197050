//! What a turn tells and how it ends, when nothing goes wrong on the way.

use qd_protocol::event::{AskKind, PermissionDecision};

use super::*;

#[tokio::test]
async fn an_answer_is_told_as_it_comes_and_the_next_prompt_goes_on_with_it() {
    for version in ALL_VERSIONS {
        let form = A2aTestFormat(version);
        let (mut stage, mut server) = A2aDriverHarness::ready(card(version, true)).await;
        stage.prompt("a", "hello");
        let call = server.expect(form.method("SendStreamingMessage")).await;
        assert_eq!(call.headers["a2a-version"], version.name());
        let told = &call.params["message"];
        assert_eq!(told["parts"], json!([form.part("hello")]));
        assert_eq!((told.get("contextId"), told.get("taskId")), (None, None));
        assert!(told["messageId"].as_str().unwrap().len() > 16);
        let feed = call.start_stream();
        feed.send_event(form.task_event("submitted", None, &[])).await;
        feed.send_event(form.status("working", Some(("m1", "looking it up")))).await;
        feed.send_event(form.artifact("x", "the answer ", false)).await;
        stage.wait_for_text("the answer ").await;
        // Cut in the middle of a character, with comments, other line ends and an event of a later version around it.
        let piece = json!({"jsonrpc": "2.0", "id": 1, "result": form.artifact("x", "is 42 €", true)});
        let event =
            format!(": still here\r\n\r\ndata: {{\"result\":{{\"song\":1}}}}\r\n\r\ndata: {piece}\r\n\r\n");
        let cut = event.find('€').unwrap() + 1;
        feed.send_raw(&event.as_bytes()[..cut]).await;
        feed.send_raw(&event.as_bytes()[cut..]).await;
        feed.send_event(form.status("completed", None)).await;
        let ended = stage.wait_for_end("a").await;
        assert_eq!(
            (ended.stop(), ended.text().as_str()),
            (TurnStopReason::EndTurn, "is 42 €"),
            "{version:?}"
        );
        assert_eq!(
            stage.next_update().await,
            AgentUpdate::Ready { agent_session_id: Some("c".to_owned()), steers: false }
        );

        stage.prompt("b", "and now?");
        let call = server.expect(form.method("SendStreamingMessage")).await;
        assert_eq!(call.params["message"]["contextId"], "c", "it is the same conversation");
        assert_eq!(call.params["message"].get("taskId"), None, "and another task");
        call.send_result(form.task_event("completed", Some(("m2", "good")), &[]));
        let ended = stage.wait_for_end("b").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "good"));
        assert!(server.has_no_calls(), "what is over is not stopped");
    }
}

#[tokio::test]
async fn a_message_is_an_answer_too() {
    for version in ALL_VERSIONS {
        let form = A2aTestFormat(version);
        let (mut stage, mut server) = A2aDriverHarness::ready(card(version, true)).await;
        stage.prompt("a", "hello");
        let message = form.message("m", "hi there");
        let feed = server.next_call().await.start_stream();
        feed.send_event(if version == A2aVersion::V1_0 { json!({ "message": message }) } else { message })
            .await;
        let ended = stage.wait_for_end("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "hi there"));
        feed.wait_closed().await;
        assert!(
            matches!(stage.next_update().await, AgentUpdate::Ready { agent_session_id: Some(id), .. } if id == "c")
        );
    }
}

#[tokio::test]
async fn an_agent_without_streams_is_looked_at_until_it_is_done() {
    for version in ALL_VERSIONS {
        let form = A2aTestFormat(version);
        let (mut stage, mut server) = A2aDriverHarness::ready(card(version, false)).await;
        stage.prompt("a", "hello");
        let call = server.expect(form.method("SendMessage")).await;
        let at_once = match version {
            A2aVersion::V1_0 => json!({"returnImmediately": true}),
            A2aVersion::V0_3 => json!({"blocking": false}),
        };
        assert_eq!(call.params["configuration"], at_once);
        call.send_result(form.task_event("working", Some(("m1", "on it")), &[]));
        let call = server.expect(form.method("GetTask")).await;
        assert_eq!(call.params["id"], "t");
        call.send_result(form.task("working", Some(("m1", "on it")), &[("x", "one ")]));
        let call = server.expect(form.method("GetTask")).await;
        call.send_result(form.task("completed", None, &[("x", "one two")]));
        let ended = stage.wait_for_end("a").await;
        assert_eq!(
            (ended.stop(), ended.text().as_str(), ended.thoughts().as_str()),
            (TurnStopReason::EndTurn, "one two", "on it\n")
        );
    }
}

#[tokio::test]
async fn a_question_is_asked_and_its_answer_goes_to_the_same_task() {
    for version in ALL_VERSIONS {
        let form = A2aTestFormat(version);
        let (mut stage, mut server) = A2aDriverHarness::ready(card(version, true)).await;
        stage.prompt("a", "book a flight");
        let feed = server.next_call().await.start_stream();
        feed.send_event(form.task_event("working", None, &[])).await;
        feed.send_event(form.status("input-required", Some(("q1", "Where to?")))).await;
        let ask = stage.wait_for_ask().await;
        assert_eq!((ask.kind, ask.prompt.as_str(), ask.options.len()), (AskKind::Question, "Where to?", 0));
        feed.wait_closed().await;
        stage.answer(&ask, AskAnswer { value: Some("Rome".to_owned()), ..AskAnswer::default() });
        let call = server.expect(form.method("SendStreamingMessage")).await;
        let told = &call.params["message"];
        assert_eq!((&told["taskId"], &told["contextId"]), (&json!("t"), &json!("c")));
        assert_eq!(told["parts"], json!([form.part("Rome")]));
        let feed = call.start_stream();
        // Some show the task as it was before they take the answer in.
        feed.send_event(form.task_event("input-required", Some(("q1", "Where to?")), &[])).await;
        feed.send_event(form.status("working", None)).await;
        feed.send_event(form.status("input-required", Some(("q2", "Which day?")))).await;
        let ask = stage.wait_for_ask().await;
        assert_eq!(ask.prompt, "Which day?");
        stage.answer(&ask, AskAnswer { value: Some("Monday".to_owned()), ..AskAnswer::default() });
        let call = server.expect(form.method("SendStreamingMessage")).await;
        call.send_result(form.task_event("completed", Some(("m", "booked")), &[]));
        let ended = stage.wait_for_end("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "booked"));
    }
}

#[tokio::test]
async fn a_question_that_is_refused_ends_the_task_and_the_agent_is_told_why() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    server
        .next_call()
        .await
        .start_stream()
        .send_event(form.status("input-required", Some(("q", "May I?"))))
        .await;
    let ask = stage.wait_for_ask().await;
    let no = AskAnswer {
        decision: Some(PermissionDecision::Deny),
        reason: Some("not today".to_owned()),
        value: None,
    };
    stage.answer(&ask, no);
    let call = server.expect("CancelTask").await;
    assert_eq!(call.params, json!({"id": "t", "metadata": {"reason": "not today"}}));
    call.send_result(form.task("canceled", None, &[]));
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (TurnStopReason::Error, "question_refused"));
}

#[tokio::test]
async fn how_a_task_ends_is_how_the_turn_does() {
    for version in ALL_VERSIONS {
        let form = A2aTestFormat(version);
        for (state, words, message) in [
            ("failed", Some(("m", "out of ideas")), "out of ideas"),
            ("failed", None, "the agent failed and did not say why"),
            ("rejected", Some(("m", "not my job")), "not my job"),
            ("canceled", Some(("m", "maintenance")), "not from here: maintenance"),
        ] {
            let (mut stage, mut server) = A2aDriverHarness::ready(card(version, true)).await;
            stage.prompt("a", "x");
            server.next_call().await.start_stream().send_event(form.status(state, words)).await;
            let ended = stage.wait_for_end("a").await;
            assert_eq!((ended.stop(), ended.error().code.as_str()), (TurnStopReason::Error, "agent_error"));
            assert!(ended.error().message.contains(message), "{state}: {}", ended.error().message);
            assert!(server.has_no_calls(), "what is over is not stopped");
        }
    }
}

#[tokio::test]
async fn an_agent_that_wants_to_be_authorised_ends_the_turn_with_what_to_do() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    server
        .next_call()
        .await
        .start_stream()
        .send_event(form.status("auth-required", Some(("m", "log in at H"))))
        .await;
    let call = server.expect("CancelTask").await;
    call.send_error(-32002, "no");
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (TurnStopReason::Error, "auth_required"));
    let message = &ended.error().message;
    assert!(message.contains("log in at H") && message.contains("A2A_TOKEN"), "{message}");
}

#[tokio::test]
async fn a_prompt_that_is_refused_fails_with_the_agents_words_and_the_agent_lives_on() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let (mut stage, mut server) = A2aDriverHarness::ready(card(A2aVersion::V1_0, true)).await;
    stage.prompt("a", "x");
    server.next_call().await.send_error(-32005, "no pictures, please");
    let ended = stage.wait_for_end("a").await;
    assert_eq!(ended.error().message, "no pictures, please (-32005)");
    stage.prompt("b", "x");
    server.next_call().await.send_http(401, &json!({"error": "who are you?"}));
    let ended = stage.wait_for_end("b").await;
    let message = &ended.error().message;
    assert!(message.contains("HTTP 401") && message.contains("give the session A2A_TOKEN"), "{message}");
    stage.prompt("c", "x");
    server.next_call().await.send_result(form.task_event("completed", Some(("m", "fine")), &[]));
    assert_eq!(stage.wait_for_end("c").await.text(), "fine");
}

#[tokio::test]
async fn calls_by_path_do_as_well() {
    let form = A2aTestFormat(A2aVersion::V1_0);
    let rest = |_: &FakeA2aServer| {
        json!({"capabilities": {"streaming": true}, "supportedInterfaces":
        [{"url": "/v1/", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"}]})
    };
    let (mut stage, mut server) = A2aDriverHarness::ready(rest).await;
    stage.prompt("a", "hello");
    let call = server.expect("POST /v1/message:stream").await;
    assert_eq!(call.params["message"]["parts"], json!([{"text": "hello"}]));
    let feed = call.start_stream();
    let plain = |event: Value| format!("data: {event}\n\n").into_bytes();
    feed.send_raw(&plain(form.task_event("working", None, &[]))).await;
    feed.send_raw(&plain(form.artifact("x", "half", false))).await;
    stage.wait_for_text("half").await;
    stage.cancel("a");
    let call = server.expect("POST /v1/tasks/t:cancel").await;
    call.send_http(
        409,
        &json!({"error": {"code": 409, "message": "no", "details": [{"reason": "TASK_NOT_CANCELABLE"}]}}),
    );
    let call = server.expect("GET /v1/tasks/t?historyLength=20").await;
    call.send_http(200, &form.task("completed", None, &[("x", "half and half")]));
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, " and half"));
}
