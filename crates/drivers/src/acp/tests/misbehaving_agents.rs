//! Agents that misbehave must harm nobody but themselves.

use std::time::Duration;

use qd_protocol::event::PermissionDecision;
use qd_protocol::link::TurnStopReason;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::super::connection::AcpConnection;
use super::fake_agent::FakeAcpAgent;
use super::{start_fake_agent, start_with};
use crate::harness::{assert_ended_well, decision_reply};

#[tokio::test(start_paused = true)]
async fn garbage_between_the_messages_is_ignored() {
    let mut agent = start_with(
        |_| {},
        async |pipe| {
            let mut fake = FakeAcpAgent::new(pipe);
            fake.write_line("npm warn deprecated").await;
            fake.handshake().await;
            let prompt = fake.expect_prompt().await;
            for line in [
                "",
                "{",
                "[1,2]",
                "null",
                "{\"jsonrpc\":\"2.0\"}",
                "{\"jsonrpc\":\"1.0\",\"id\":1,\"result\":{}}",
                "\u{0}",
            ] {
                fake.write_line(line).await;
            }
            fake.send(json!({"id": 999, "result": {}})).await;
            fake.send(json!({"method": "session/update", "params": {"sessionId": "s", "update": {"sessionUpdate": "dance"}}})).await;
            fake.send(json!({"method": "session/update", "params": {"sessionId": "another", "update": {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "not ours"}}}})).await;
            fake.send(json!({"method": "session/update"})).await;
            fake.send(json!({"method": "_no/such/thing", "params": {}})).await;
            fake.send_text("sense").await;
            fake.finish_turn(prompt).await;
        },
    );
    agent.next_update().await;
    let ended = agent.run_turn("a", "x").await;
    assert_ended_well(&ended);
    assert_eq!(ended.text(), "sense");
}

#[tokio::test(start_paused = true)]
async fn requests_that_we_do_not_know_are_refused_and_known_ones_with_bad_parameters_too() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        for (method, code) in [
            ("craft/drainMidTurnQueue", -32601),
            ("terminal/create", -32601),
            ("session/request_permission", -32602),
            ("fs/read_text_file", -32602),
        ] {
            fake.send(json!({"id": method, "method": method, "params": {"sessionId": "s"}})).await;
            let answer = fake.next_json().await;
            assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(method), &json!(code)));
        }
        fake.finish_turn(prompt).await;
    })
    .await;
    assert_ended_well(&agent.run_turn("a", "x").await);
}

#[tokio::test]
async fn files_are_served_in_the_workspace_and_nowhere_else() {
    let (cwd_sender, cwd_receiver) = std::sync::mpsc::channel::<std::path::PathBuf>();
    let mut agent = start_with(
        move |spec| cwd_sender.send(spec.cwd.clone()).expect("it is taken"),
        async move |pipe| {
            let cwd = cwd_receiver.recv().expect("it was given");
            let mut fake = FakeAcpAgent::new(pipe);
            fake.handshake().await;
            let prompt = fake.expect_prompt().await;
            let path = cwd.join("new.txt");
            let write = json!({"sessionId": "s", "path": path, "content": "words"});
            fake.send(json!({"id": 1, "method": "fs/write_text_file", "params": write})).await;
            assert!(fake.next_json().await["result"].is_object());
            fake.send(
                json!({"id": 2, "method": "fs/read_text_file", "params": {"sessionId": "s", "path": path}}),
            )
            .await;
            assert_eq!(fake.next_json().await["result"]["content"], "words");
            fake.send(json!({"id": 3, "method": "fs/read_text_file", "params": {"sessionId": "s", "path": "/etc/hostname"}})).await;
            let response = fake.next_json().await;
            assert!(
                response["error"]["message"]
                    .as_str()
                    .is_some_and(|message| message.contains("outside the workspace")),
                "{response}"
            );
            fake.finish_turn(prompt).await;
        },
    );
    agent.next_update().await;
    agent.prompt("a", "x");
    for (tool, implicit) in [("Write", false), ("Read", true), ("Read", true)] {
        let ask = agent.wait_for_ask().await;
        assert_eq!((ask.tool.as_deref(), ask.implicit), (Some(tool), implicit));
        agent.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    }
    assert_ended_well(&agent.wait_for_end("a").await);
    assert_eq!(std::fs::read_to_string(agent.workspace.path().join("new.txt")).unwrap(), "words");
}

#[tokio::test(start_paused = true)]
async fn an_agent_of_another_version_or_without_an_answer_is_not_ready() {
    let mut agent = start_with(
        |_| {},
        async |pipe| {
            let mut fake = FakeAcpAgent::new(pipe);
            let (id, _) = fake.expect_method("initialize").await;
            fake.send_response(id, json!({"protocolVersion": 2})).await;
            fake.wait_for_hang_up().await;
        },
    );
    let error = agent.wait_for_failure().await;
    assert!(error.message.contains("version 2"), "{}", error.message);

    let mut agent = start_with(|_| {}, async |pipe| drop(pipe));
    assert_eq!(agent.wait_for_failure().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn a_stop_reason_that_we_do_not_know_is_an_error_and_never_a_success() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.end_turn(prompt, "bored").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    assert_eq!(agent.run_turn("a", "x").await.outcome.stop, TurnStopReason::Error);
}

#[tokio::test(start_paused = true)]
async fn a_dead_agents_stream_is_over_even_if_something_holds_it_open() {
    let (driver_end, mut agent_end) = tokio::io::duplex(1024);
    let (from, to) = tokio::io::split(driver_end);
    let (die, dead) = tokio::sync::oneshot::channel::<()>();
    let exited = Box::pin(async move {
        dead.await.expect("it dies");
    });
    let mut connection = AcpConnection::new(from, to, exited);
    agent_end.write_all(b"{\"jsonrpc\":\"2.0\",\"method\":\"last/words\"}\n").await.unwrap();
    die.send(()).unwrap();
    assert!(connection.next(true).await.is_some(), "a message written before the exit is read");
    assert!(connection.next(true).await.is_none());
    drop(agent_end);
}

#[tokio::test(start_paused = true)]
async fn a_line_that_is_too_long_is_skipped() {
    let (driver_end, mut agent_end) = tokio::io::duplex(1 << 20);
    let (from, to) = tokio::io::split(driver_end);
    let mut connection = AcpConnection::new(from, to, Box::pin(std::future::pending()));
    let write = async {
        let chunk = vec![b'x'; 1 << 20];
        for _ in 0..65 {
            agent_end.write_all(&chunk).await.unwrap();
        }
        agent_end.write_all(b"\n{\"jsonrpc\":\"2.0\",\"method\":\"after/all\"}\n").await.unwrap();
        tokio::time::sleep(Duration::MAX).await;
    };
    tokio::select! {
        () = write => {}
        message = connection.next(true) => assert!(message.is_some()),
    }
}
