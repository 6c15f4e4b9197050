//! Agents that do not behave: they must harm nobody but themselves.

use std::time::Duration;

use qd_protocol::event::PermissionDecision;
use qd_protocol::link::TurnStopReason;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::super::connection::AcpConnection;
use super::fake_agent::FakeAcpAgent;
use super::{start_fake_agent, start_with};
use crate::drivers::harness::{assert_ended_well, decision_reply};

#[tokio::test(start_paused = true)]
async fn garbage_between_the_messages_is_ignored() {
    let mut agent = start_with(
        |_| {},
        async |far| {
            let mut hand = FakeAcpAgent::new(far);
            hand.write_line("npm warn deprecated").await;
            hand.handshake().await;
            let prompt = hand.expect_prompt().await;
            for line in [
                "",
                "{",
                "[1,2]",
                "null",
                "{\"jsonrpc\":\"2.0\"}",
                "{\"jsonrpc\":\"1.0\",\"id\":1,\"result\":{}}",
                "\u{0}",
            ] {
                hand.write_line(line).await;
            }
            hand.send(json!({"id": 999, "result": {}})).await;
            hand.send(json!({"method": "session/update", "params": {"sessionId": "s", "update": {"sessionUpdate": "dance"}}})).await;
            hand.send(json!({"method": "session/update", "params": {"sessionId": "another", "update": {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "not ours"}}}})).await;
            hand.send(json!({"method": "session/update"})).await;
            hand.send(json!({"method": "_no/such/thing", "params": {}})).await;
            hand.send_text("sense").await;
            hand.finish_turn(prompt).await;
        },
    );
    agent.next_update().await;
    let ended = agent.run_turn("a", "x").await;
    assert_ended_well(&ended);
    assert_eq!(ended.text(), "sense");
}

#[tokio::test(start_paused = true)]
async fn requests_that_we_do_not_know_are_refused_and_known_ones_with_bad_parameters_too() {
    let mut agent = start_fake_agent("script", async |mut hand| {
        let prompt = hand.expect_prompt().await;
        for (method, code) in [
            ("craft/drainMidTurnQueue", -32601),
            ("terminal/create", -32601),
            ("session/request_permission", -32602),
            ("fs/read_text_file", -32602),
        ] {
            hand.send(json!({"id": method, "method": method, "params": {"sessionId": "s"}})).await;
            let answer = hand.next_json().await;
            assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(method), &json!(code)));
        }
        hand.finish_turn(prompt).await;
    })
    .await;
    assert_ended_well(&agent.run_turn("a", "x").await);
}

#[tokio::test]
async fn files_are_served_in_the_workspace_and_nowhere_else() {
    let (place, given) = std::sync::mpsc::channel::<std::path::PathBuf>();
    let mut agent = start_with(
        move |spec| place.send(spec.cwd.clone()).expect("it is taken"),
        async move |far| {
            let cwd = given.recv().expect("it was given");
            let mut hand = FakeAcpAgent::new(far);
            hand.handshake().await;
            let prompt = hand.expect_prompt().await;
            let path = cwd.join("new.txt");
            let write = json!({"sessionId": "s", "path": path, "content": "words"});
            hand.send(json!({"id": 1, "method": "fs/write_text_file", "params": write})).await;
            assert!(hand.next_json().await["result"].is_object());
            hand.send(
                json!({"id": 2, "method": "fs/read_text_file", "params": {"sessionId": "s", "path": path}}),
            )
            .await;
            assert_eq!(hand.next_json().await["result"]["content"], "words");
            hand.send(json!({"id": 3, "method": "fs/read_text_file", "params": {"sessionId": "s", "path": "/etc/hostname"}})).await;
            let refused = hand.next_json().await;
            assert!(
                refused["error"]["message"].as_str().is_some_and(|it| it.contains("outside the workspace")),
                "{refused}"
            );
            hand.finish_turn(prompt).await;
        },
    );
    agent.next_update().await;
    agent.prompt("a", "x");
    for (tool, unasked) in [("Write", false), ("Read", true), ("Read", true)] {
        let ask = agent.wait_for_ask().await;
        assert_eq!((ask.tool.as_deref(), ask.implicit), (Some(tool), unasked));
        agent.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    }
    assert_ended_well(&agent.wait_for_end("a").await);
    assert_eq!(std::fs::read_to_string(agent.workspace.path().join("new.txt")).unwrap(), "words");
}

#[tokio::test(start_paused = true)]
async fn an_agent_of_another_version_or_without_an_answer_is_not_ready() {
    let mut agent = start_with(
        |_| {},
        async |far| {
            let mut hand = FakeAcpAgent::new(far);
            let (id, _) = hand.expect_method("initialize").await;
            hand.send_response(id, json!({"protocolVersion": 2})).await;
            hand.wait_for_hang_up().await;
        },
    );
    let error = agent.wait_for_failure().await;
    assert!(error.message.contains("version 2"), "{}", error.message);

    let mut agent = start_with(|_| {}, async |far| drop(far));
    assert_eq!(agent.wait_for_failure().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn a_stop_reason_that_we_do_not_know_is_an_error_and_never_a_success() {
    let mut agent = start_fake_agent("script", async |mut hand| {
        let prompt = hand.expect_prompt().await;
        hand.end_turn(prompt, "bored").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    assert_eq!(agent.run_turn("a", "x").await.outcome.stop, TurnStopReason::Error);
}

#[tokio::test(start_paused = true)]
async fn a_dead_agents_stream_is_over_even_if_something_holds_it_open() {
    let (near, mut far) = tokio::io::duplex(1024);
    let (from, to) = tokio::io::split(near);
    let (die, dead) = tokio::sync::oneshot::channel::<()>();
    let exited = Box::pin(async move {
        dead.await.expect("it dies");
    });
    let mut peer = AcpConnection::new(from, to, exited);
    far.write_all(b"{\"jsonrpc\":\"2.0\",\"method\":\"last/words\"}\n").await.unwrap();
    die.send(()).unwrap();
    assert!(peer.next(true).await.is_some(), "what it wrote before is heard");
    assert!(peer.next(true).await.is_none());
    drop(far);
}

#[tokio::test(start_paused = true)]
async fn a_line_without_an_end_is_skipped_when_it_is_too_long() {
    let (near, mut far) = tokio::io::duplex(1 << 20);
    let (from, to) = tokio::io::split(near);
    let mut peer = AcpConnection::new(from, to, Box::pin(std::future::pending()));
    let write = async {
        let much = vec![b'x'; 1 << 20];
        for _ in 0..65 {
            far.write_all(&much).await.unwrap();
        }
        far.write_all(b"\n{\"jsonrpc\":\"2.0\",\"method\":\"after/all\"}\n").await.unwrap();
        tokio::time::sleep(Duration::MAX).await;
    };
    tokio::select! {
        () = write => {}
        message = peer.next(true) => assert!(message.is_some()),
    }
}
