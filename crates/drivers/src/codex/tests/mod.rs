//! Tests of the driver, seen from the session's end of a link. At the other end of an in-memory pipe is a fake server
//! whose every line the test writes, or a recording. Time is paused: it moves on only when every task waits for it.

mod asks;
mod cancels;
mod fake_agent;
mod handshake;
mod recorded;
mod turns;

use std::future::pending;

use qd_catalog::Catalog;
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnUpdate};
use qd_protocol::worker::AgentSpec;
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::fake_agent::FakeCodexAgent;
use super::connection::CodexConnection;
use super::conversation::{CodexConversation, run_error};
use super::handshake::{CodexHandshakeError, CodexHandshakeOptions, perform_handshake};
use crate::harness::{DriverHarness, hung_up_error, let_all_wait};
use crate::pricing::TokenPricing;
use crate::stdio_agent::StdioConversation;

type CodexTestConversation = CodexConversation<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// An agent that is ready, and its fake server.
async fn ready_agent() -> (DriverHarness, FakeCodexAgent) {
    let (mut harness, mut fake) = start_with(|_| {});
    fake.handshake().await;
    assert!(matches!(harness.next_update().await, AgentUpdate::Ready { steers: true, .. }));
    (harness, fake)
}

/// An agent whose turn has begun.
async fn agent_in_turn() -> (DriverHarness, FakeCodexAgent) {
    let (mut harness, mut fake) = ready_agent().await;
    harness.prompt("a", "x");
    fake.accept_prompt("u").await;
    fake.start_turn("u").await;
    let_all_wait().await;
    (harness, fake)
}

/// An agent that was started, before its handshake.
fn start_with(change: impl FnOnce(&mut AgentSpec)) -> (DriverHarness, FakeCodexAgent) {
    let change = |spec: &mut AgentSpec| {
        spec.cwd = "/w".into();
        change(spec);
    };
    let (harness, agent_end) = DriverHarness::new("codex", change, open_conversation);
    (harness, FakeCodexAgent::new(agent_end))
}

/// Opens a conversation over a pipe.
async fn open_conversation(
    spec: AgentSpec,
    pipe: DuplexStream,
) -> Result<(CodexTestConversation, AgentUpdate), AgentExitReason> {
    let (from, to) = tokio::io::split(pipe);
    let mut connection = CodexConnection::new(from, to, Box::pin(pending()));
    let handshake = match perform_handshake(&mut connection, &CodexHandshakeOptions::from_spec(&spec)).await {
        Ok(handshake) => handshake,
        Err(CodexHandshakeError::AgentExited) => return Err(hung_up_error()),
        Err(CodexHandshakeError::Refused(error)) => return Err(AgentExitReason::Failed(run_error(&error))),
    };
    let modes = Catalog::built_in().get("codex").expect("it is built in").modes;
    let conversation = CodexConversation::new(connection, handshake, TokenPricing::from_spec(&spec), modes);
    let ready = AgentUpdate::Ready { agent_session_id: conversation.session_id(), steers: true };
    Ok((conversation, ready))
}

fn text(text: &str) -> TurnUpdate {
    TurnUpdate::Text { text: text.to_owned() }
}
