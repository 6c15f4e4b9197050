//! Tests of the driver, seen from the session's end of a link. The agent is a fake whose every line a test writes, or a
//! recording. The two are connected by an in-memory pipe, and time is paused.

mod cancels;
mod fake_agent;
mod modes;
mod recorded;
mod steers;
mod turns;

use std::future::pending;

use qd_catalog::Catalog;
use qd_protocol::event::RunError;
use qd_protocol::link::{AgentExitReason, AgentUpdate};
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::fake_agent::FakeClaudeAgent;
use super::conversation::ClaudeConversation;
use super::event_decoder::ClaudeEventDecoder;
use super::handshake::{ClaudeHandshakeError, perform_handshake};
use super::usage::ClaudeUsageCounter;
use crate::harness::{DriverHarness, hung_up_error};
use crate::line_transport::LineTransport;
use crate::mode_guard::ModeGuard;
use crate::pricing::TokenPricing;
use crate::stdio_agent::StdioConversation;

type ClaudeTestConversation = ClaudeConversation<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// What the driver gets besides the agent.
#[derive(Default)]
struct ClaudeTestSetup {
    pricing: TokenPricing,
    /// The id of the conversation to resume.
    resumed: Option<String>,
    resume_failure: Option<String>,
}

/// A fake agent whose lines the test writes, after its handshake.
async fn start_fake_agent<F, A>(play: F) -> DriverHarness
where
    F: FnOnce(FakeClaudeAgent) -> A + Send + 'static,
    A: Future<Output = ()> + Send + 'static,
{
    let mut harness = start_with(ClaudeTestSetup::default(), |pipe| async move {
        let mut fake = FakeClaudeAgent::new(pipe);
        fake.handshake().await;
        play(fake).await;
    });
    assert!(matches!(harness.next_update().await, AgentUpdate::Ready { steers: true, .. }));
    harness
}

/// Any agent at the other end of a pipe.
fn start_with<F, A>(setup: ClaudeTestSetup, run_agent: F) -> DriverHarness
where
    F: FnOnce(DuplexStream) -> A,
    A: Future<Output = ()> + Send + 'static,
{
    let (harness, agent_end) = DriverHarness::new("claude", |_| {}, |_, pipe| open_conversation(setup, pipe));
    harness.with_agent_task(run_agent(agent_end))
}

/// Opens a conversation over a pipe.
async fn open_conversation(
    setup: ClaudeTestSetup,
    pipe: DuplexStream,
) -> Result<(ClaudeTestConversation, AgentUpdate), AgentExitReason> {
    let (from, to) = tokio::io::split(pipe);
    let mut lines = LineTransport::new(from, to, Box::pin(pending()));
    let mode = match perform_handshake(&mut lines).await {
        Ok(mode) => mode,
        Err(ClaudeHandshakeError::AgentExited) => return Err(hung_up_error()),
        Err(ClaudeHandshakeError::Refused(why)) => {
            return Err(AgentExitReason::Failed(RunError::new("refused", why)));
        }
    };
    let modes = Catalog::built_in().get("claude").expect("it is built in").modes;
    let ClaudeTestSetup { pricing, resumed, resume_failure } = setup;
    let decoder = ClaudeEventDecoder::new(ClaudeUsageCounter::new(pricing, None, resumed.is_some()));
    let conversation = ClaudeConversation::new(
        lines,
        resumed.unwrap_or_else(|| "s".to_owned()),
        decoder,
        ModeGuard::new(modes, mode),
        true,
        resume_failure,
    );
    let ready = AgentUpdate::Ready { agent_session_id: conversation.session_id(), steers: true };
    Ok((conversation, ready))
}
