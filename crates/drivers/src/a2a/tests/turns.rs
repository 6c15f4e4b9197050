//! Turns and how they end when no connection breaks.

use qd_protocol::event::{AskKind, PermissionDecision};

use super::*;

#[tokio::test]
async fn an_answer_is_emitted_as_it_comes_and_the_next_prompt_continues_the_conversation() {
    for version in ALL_VERSIONS {
        let format = A2aTestFormat(version);
        let (mut harness, mut server) = A2aDriverHarness::ready(card(version, true)).await;
        harness.prompt("a", "hello");
        let call = server.expect(format.method("SendStreamingMessage")).await;
        assert_eq!(call.headers["a2a-version"], version.name());
        let message = &call.params["message"];
        assert_eq!(message["parts"], json!([format.part("hello")]));
        assert_eq!((message.get("contextId"), message.get("taskId")), (None, None));
        assert!(message["messageId"].as_str().unwrap().len() > 16);
        let stream = call.start_stream();
        stream.send_event(format.task_event("submitted", None, &[])).await;
        stream.send_event(format.status("working", Some(("m1", "looking it up")))).await;
        stream.send_event(format.artifact("x", "the answer ", false)).await;
        harness.wait_for_text("the answer ").await;
        // An event cut in the middle of a character, with comments, other line ends and an event of a later version
        // around it.
        let piece = json!({"jsonrpc": "2.0", "id": 1, "result": format.artifact("x", "is 42 €", true)});
        let event =
            format!(": still here\r\n\r\ndata: {{\"result\":{{\"song\":1}}}}\r\n\r\ndata: {piece}\r\n\r\n");
        let cut = event.find('€').unwrap() + 1;
        stream.send_raw(&event.as_bytes()[..cut]).await;
        stream.send_raw(&event.as_bytes()[cut..]).await;
        stream.send_event(format.status("completed", None)).await;
        let ended = harness.wait_for_end("a").await;
        assert_eq!(
            (ended.stop(), ended.text().as_str()),
            (TurnStopReason::EndTurn, "is 42 €"),
            "{version:?}"
        );
        assert_eq!(
            harness.next_update().await,
            AgentUpdate::Ready { agent_session_id: Some("c".to_owned()), steers: false }
        );

        harness.prompt("b", "and now?");
        let call = server.expect(format.method("SendStreamingMessage")).await;
        assert_eq!(call.params["message"]["contextId"], "c", "it is the same conversation");
        assert_eq!(call.params["message"].get("taskId"), None, "and another task");
        call.send_result(format.task_event("completed", Some(("m2", "good")), &[]));
        let ended = harness.wait_for_end("b").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "good"));
        assert!(server.has_no_calls(), "a finished task is not cancelled");
    }
}

#[tokio::test]
async fn a_message_is_an_answer_too() {
    for version in ALL_VERSIONS {
        let format = A2aTestFormat(version);
        let (mut harness, mut server) = A2aDriverHarness::ready(card(version, true)).await;
        harness.prompt("a", "hello");
        let message = format.message("m", "hi there");
        let stream = server.next_call().await.start_stream();
        stream
            .send_event(if version == A2aVersion::V1_0 { json!({ "message": message }) } else { message })
            .await;
        let ended = harness.wait_for_end("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "hi there"));
        stream.wait_closed().await;
        assert!(
            matches!(harness.next_update().await, AgentUpdate::Ready { agent_session_id: Some(id), .. } if id == "c")
        );
    }
}

#[tokio::test]
async fn an_agent_without_streams_is_polled_until_it_is_done() {
    for version in ALL_VERSIONS {
        let format = A2aTestFormat(version);
        let (mut harness, mut server) = A2aDriverHarness::ready(card(version, false)).await;
        harness.prompt("a", "hello");
        let call = server.expect(format.method("SendMessage")).await;
        let configuration = match version {
            A2aVersion::V1_0 => json!({"returnImmediately": true}),
            A2aVersion::V0_3 => json!({"blocking": false}),
        };
        assert_eq!(call.params["configuration"], configuration);
        call.send_result(format.task_event("working", Some(("m1", "on it")), &[]));
        let call = server.expect(format.method("GetTask")).await;
        assert_eq!(call.params["id"], "t");
        call.send_result(format.task("working", Some(("m1", "on it")), &[("x", "one ")]));
        let call = server.expect(format.method("GetTask")).await;
        call.send_result(format.task("completed", None, &[("x", "one two")]));
        let ended = harness.wait_for_end("a").await;
        assert_eq!(
            (ended.stop(), ended.text().as_str(), ended.thoughts().as_str()),
            (TurnStopReason::EndTurn, "one two", "on it\n")
        );
    }
}

#[tokio::test]
async fn a_question_is_asked_and_its_answer_goes_to_the_same_task() {
    for version in ALL_VERSIONS {
        let format = A2aTestFormat(version);
        let (mut harness, mut server) = A2aDriverHarness::ready(card(version, true)).await;
        harness.prompt("a", "book a flight");
        let stream = server.next_call().await.start_stream();
        stream.send_event(format.task_event("working", None, &[])).await;
        stream.send_event(format.status("input-required", Some(("q1", "Where to?")))).await;
        let ask = harness.wait_for_ask().await;
        assert_eq!((ask.kind, ask.prompt.as_str(), ask.options.len()), (AskKind::Question, "Where to?", 0));
        stream.wait_closed().await;
        harness.answer_value(&ask, "Rome");
        let call = server.expect(format.method("SendStreamingMessage")).await;
        let message = &call.params["message"];
        assert_eq!((&message["taskId"], &message["contextId"]), (&json!("t"), &json!("c")));
        assert_eq!(message["parts"], json!([format.part("Rome")]));
        let stream = call.start_stream();
        // Some agents show the task as it was before they received the answer.
        stream.send_event(format.task_event("input-required", Some(("q1", "Where to?")), &[])).await;
        stream.send_event(format.status("working", None)).await;
        stream.send_event(format.status("input-required", Some(("q2", "Which day?")))).await;
        let ask = harness.wait_for_ask().await;
        assert_eq!(ask.prompt, "Which day?");
        harness.answer_value(&ask, "Monday");
        let call = server.expect(format.method("SendStreamingMessage")).await;
        call.send_result(format.task_event("completed", Some(("m", "booked")), &[]));
        let ended = harness.wait_for_end("a").await;
        assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "booked"));
    }
}

#[tokio::test]
async fn a_declined_question_cancels_the_task_with_the_reason() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    server.stream_one_event(format.status("input-required", Some(("q", "May I?")))).await;
    let ask = harness.wait_for_ask().await;
    let denial = AskAnswer {
        decision: Some(PermissionDecision::Deny),
        reason: Some("not today".to_owned()),
        value: None,
    };
    harness.answer(&ask, denial);
    let call = server.expect("CancelTask").await;
    assert_eq!(call.params, json!({"id": "t", "metadata": {"reason": "not today"}}));
    call.send_result(format.task("canceled", None, &[]));
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (TurnStopReason::Error, "question_refused"));
}

#[tokio::test]
async fn the_turn_ends_as_its_task_does() {
    for version in ALL_VERSIONS {
        let format = A2aTestFormat(version);
        for (state, message, expected) in [
            ("failed", Some(("m", "out of ideas")), "out of ideas"),
            ("failed", None, "the agent failed and did not say why"),
            ("rejected", Some(("m", "not my job")), "not my job"),
            ("canceled", Some(("m", "maintenance")), "not from here: maintenance"),
        ] {
            let (mut harness, mut server) = A2aDriverHarness::ready(card(version, true)).await;
            harness.prompt("a", "x");
            server.stream_one_event(format.status(state, message)).await;
            let ended = harness.wait_for_end("a").await;
            assert_eq!((ended.stop(), ended.error().code.as_str()), (TurnStopReason::Error, "agent_error"));
            assert!(ended.error().message.contains(expected), "{state}: {}", ended.error().message);
            assert!(server.has_no_calls(), "a finished task is not cancelled");
        }
    }
}

#[tokio::test]
async fn an_agent_that_wants_to_be_authorised_ends_the_turn_with_what_to_do() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    server.stream_one_event(format.status("auth-required", Some(("m", "log in at H")))).await;
    let call = server.expect("CancelTask").await;
    call.send_error(-32002, "no");
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.error().code.as_str()), (TurnStopReason::Error, "auth_required"));
    let message = &ended.error().message;
    assert!(message.contains("log in at H") && message.contains("A2A_TOKEN"), "{message}");
}

#[tokio::test]
async fn a_refused_prompt_fails_with_the_agents_message_and_the_next_one_works() {
    let (format, mut harness, mut server) = start_turn(A2aVersion::V1_0).await;
    server.next_call().await.send_error(-32005, "no pictures, please");
    let ended = harness.wait_for_end("a").await;
    assert_eq!(ended.error().message, "no pictures, please (-32005)");
    harness.prompt("b", "x");
    server.next_call().await.send_http(401, &json!({"error": "who are you?"}));
    let ended = harness.wait_for_end("b").await;
    let message = &ended.error().message;
    assert!(message.contains("HTTP 401") && message.contains("give the session A2A_TOKEN"), "{message}");
    harness.prompt("c", "x");
    server.next_call().await.send_result(format.task_event("completed", Some(("m", "fine")), &[]));
    assert_eq!(harness.wait_for_end("c").await.text(), "fine");
}

#[tokio::test]
async fn calls_by_path_work_as_well() {
    let format = A2aTestFormat(A2aVersion::V1_0);
    let rest = |_: &FakeA2aServer| {
        json!({"capabilities": {"streaming": true}, "supportedInterfaces":
        [{"url": "/v1/", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"}]})
    };
    let (mut harness, mut server) = A2aDriverHarness::ready(rest).await;
    harness.prompt("a", "hello");
    let call = server.expect("POST /v1/message:stream").await;
    assert_eq!(call.params["message"]["parts"], json!([{"text": "hello"}]));
    let stream = call.start_stream();
    let event_bytes = |event: Value| format!("data: {event}\n\n").into_bytes();
    stream.send_raw(&event_bytes(format.task_event("working", None, &[]))).await;
    stream.send_raw(&event_bytes(format.artifact("x", "half", false))).await;
    harness.wait_for_text("half").await;
    harness.cancel("a");
    let call = server.expect("POST /v1/tasks/t:cancel").await;
    call.send_http(
        409,
        &json!({"error": {"code": 409, "message": "no", "details": [{"reason": "TASK_NOT_CANCELABLE"}]}}),
    );
    let call = server.expect("GET /v1/tasks/t?historyLength=20").await;
    call.send_http(200, &format.task("completed", None, &[("x", "half and half")]));
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, " and half"));
}
