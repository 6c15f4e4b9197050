//! Promises of the driver, seen from the session's end of a link. At the other end of a pipe in memory is a server whose
//! every line the test writes itself, or one that was recorded. Time stands still: it moves on when everybody waits.

mod asks;
mod cancels;
mod fake_agent;
mod handshake;
mod recorded;
mod turns;

use std::future::pending;

use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnUpdate};
use qd_protocol::worker::AgentSpec;
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::fake_agent::FakeCodexAgent;
use super::connection::CodexConnection;
use super::conversation::{CodexConversation, run_error};
use super::handshake::{CodexHandshakeError, CodexHandshakeOptions, perform_handshake};
use crate::drivers::harness::{DriverHarness, hung_up_error, impl_harness_driver, let_all_wait};
use crate::drivers::pricing::TokenPricing;

type CodexTestConversation = CodexConversation<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

impl_harness_driver!(CodexTestConversation);

/// An agent that is ready, and its far end.
async fn ready_agent() -> (DriverHarness, FakeCodexAgent) {
    let (mut stage, mut hand) = start_with(|_| {});
    hand.handshake().await;
    assert!(matches!(stage.next_update().await, AgentUpdate::Ready { steers: true, .. }));
    (stage, hand)
}

/// One that has a turn, which has begun.
async fn agent_in_turn() -> (DriverHarness, FakeCodexAgent) {
    let (mut stage, mut hand) = ready_agent().await;
    stage.prompt("a", "x");
    hand.accept_prompt("u").await;
    hand.start_turn("u").await;
    let_all_wait().await;
    (stage, hand)
}

/// One that has been started, and nothing more.
fn start_with(change: impl FnOnce(&mut AgentSpec)) -> (DriverHarness, FakeCodexAgent) {
    let change = |spec: &mut AgentSpec| {
        spec.cwd = "/w".into();
        change(spec);
    };
    let (stage, far) = DriverHarness::new("codex", change, open_conversation);
    (stage, FakeCodexAgent::new(far))
}

/// A conversation, after its opening.
async fn open_conversation(
    spec: AgentSpec,
    near: DuplexStream,
) -> Result<(CodexTestConversation, AgentUpdate), AgentExitReason> {
    let (from, to) = tokio::io::split(near);
    let mut peer = CodexConnection::new(from, to, Box::pin(pending()));
    let opened = match perform_handshake(&mut peer, &CodexHandshakeOptions::from_spec(&spec)).await {
        Ok(opened) => opened,
        Err(CodexHandshakeError::AgentExited) => return Err(hung_up_error()),
        Err(CodexHandshakeError::Refused(told)) => return Err(AgentExitReason::Failed(run_error(&told))),
    };
    let talk = CodexConversation::new(peer, opened, TokenPricing::from_spec(&spec));
    let hello = AgentUpdate::Ready { agent_session_id: Some(talk.thread_id().to_owned()), steers: true };
    Ok((talk, hello))
}

fn text(text: &str) -> TurnUpdate {
    TurnUpdate::Text { text: text.to_owned() }
}
