//! Tests of the driver, seen from the session's end of a link. The test writes the agent's lines itself, at the other
//! end of an in-memory pipe.

use std::future::pending;
use std::sync::Arc;

use qd_protocol::link::{AgentExitReason, AgentUpdate};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{SessionId, WorkerId};
use serde_json::json;
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use super::*;
use crate::agent_launcher::{StartFunction, boxed};
use crate::harness::{AgentPipe, DriverHarness, assert_ended_well, hung_up_error};

type ExampleTestConversation = ExampleConversation<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// Opens a conversation over a pipe.
async fn open_conversation(
    spec: AgentSpec,
    pipe: DuplexStream,
) -> Result<(ExampleTestConversation, AgentUpdate), AgentExitReason> {
    let (from, to) = tokio::io::split(pipe);
    let mut lines = LineTransport::new(from, to, Box::pin(pending()));
    let session = match perform_handshake(&mut lines, spec.agent_session_id).await {
        Ok(session) => session,
        Err(StdioHandshakeError::AgentExited) => return Err(hung_up_error()),
        Err(StdioHandshakeError::Refused(reason)) => {
            return Err(AgentExitReason::Failed(RunError::new("refused", reason)));
        }
    };
    let conversation = ExampleConversation { lines, session };
    let ready = AgentUpdate::Ready { agent_session_id: conversation.session_id(), steers: false };
    Ok((conversation, ready))
}

/// An agent that is ready, and its end of the pipe.
async fn ready_agent() -> (DriverHarness, AgentPipe) {
    let resume = |spec: &mut AgentSpec| spec.agent_session_id = Some("old".to_owned());
    let (mut harness, agent_side) = DriverHarness::new("example", resume, open_conversation);
    let mut agent = AgentPipe::new(agent_side);
    assert_eq!(agent.next_json().await, json!({"hello": {"resume": "old"}}));
    agent.write_line("a library prints this").await;
    agent.write_line(r#"{"ready":"old"}"#).await;
    let agent_session_id = Some("old".to_owned());
    assert_eq!(harness.next_update().await, AgentUpdate::Ready { agent_session_id, steers: false });
    (harness, agent)
}

#[tokio::test(start_paused = true)]
async fn a_turn_has_its_text_and_ends_when_the_agent_says_so() {
    let (mut harness, mut agent) = ready_agent().await;
    harness.prompt("a", "hi");
    assert_eq!(agent.next_json().await, json!({"prompt": "hi"}));
    agent.write_line(r#"{"text":"hello "}"#).await;
    agent.write_line(r#"{"text":"there"}"#).await;
    agent.write_line(r#"{"done":{"stopped":false}}"#).await;
    let ended = harness.wait_for_end("a").await;
    assert_ended_well(&ended);
    assert_eq!(ended.text(), "hello there");

    harness.prompt("b", "again");
    assert_eq!(agent.next_json().await, json!({"prompt": "again"}));
    agent.write_line(r#"{"failed":"no model"}"#).await;
    let ended = harness.wait_for_end("b").await;
    assert_eq!(
        (ended.stop(), ended.outcome.error.unwrap().message),
        (TurnStopReason::Error, "no model".into())
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancel_is_passed_on_and_the_turn_ends_when_the_agent_has_stopped() {
    let (mut harness, mut agent) = ready_agent().await;
    harness.prompt("a", "hi");
    assert_eq!(agent.next_json().await, json!({"prompt": "hi"}));
    harness.cancel("a");
    assert_eq!(agent.next_json().await, json!("stop"));
    agent.write_line(r#"{"done":{"stopped":true}}"#).await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_refuses_or_exits_is_reported() {
    let (mut harness, agent_side) = DriverHarness::new("example", |_| {}, open_conversation);
    let mut agent = AgentPipe::new(agent_side);
    assert_eq!(agent.next_json().await, json!({"hello": {"resume": null}}));
    agent.write_line(r#"{"failed":"not signed in"}"#).await;
    assert_eq!(harness.wait_for_failure().await.message, "not signed in");

    let (mut harness, agent) = ready_agent().await;
    harness.prompt("a", "hi");
    drop(agent);
    assert_eq!(harness.wait_for_failure().await.code, "hung_up");
}

/// In a driver of your own, this is the line in `registered_driver()`.
#[tokio::test]
async fn the_driver_fits_into_the_table_and_starts_nothing_without_a_keeper() {
    let registered: StartFunction = |start| boxed(start_example_agent(start));
    let spec = AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), "example", "/");
    let started = registered(AgentStart { spec: &spec, manifest: Arc::default(), supervision: None }).await;
    assert_eq!(started.err().map(|error| error.message).as_deref(), Some("the agent has no keeper"));
}
