//! Promises of the driver, seen from the session's end of a link. At the other end is an agent whose every line a test
//! writes, or one that was recorded; between the two is a pipe in memory, and time stands still.

mod cancels;
mod fake_agent;
mod recorded;
mod steers;
mod turns;

use std::future::pending;

use qd_protocol::event::RunError;
use qd_protocol::link::{AgentExitReason, AgentUpdate};
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::fake_agent::FakeClaudeAgent;
use super::conversation::ClaudeConversation;
use super::event_decoder::ClaudeEventDecoder;
use super::handshake::{ClaudeHandshakeError, perform_handshake};
use super::usage::ClaudeUsageCounter;
use crate::drivers::harness::{DriverHarness, hung_up_error, impl_harness_driver};
use crate::drivers::line_transport::LineTransport;
use crate::drivers::pricing::TokenPricing;

type ClaudeTestConversation = ClaudeConversation<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

impl_harness_driver!(ClaudeTestConversation);

/// What the driver is given besides the agent.
#[derive(Default)]
struct ClaudeTestSetup {
    pricing: TokenPricing,
    /// The conversation that it goes on with.
    resumed: Option<String>,
    resume_failure: Option<String>,
}

/// An agent whose lines the test writes, after its handshake.
async fn start_fake_agent<F, A>(play: F) -> DriverHarness
where
    F: FnOnce(FakeClaudeAgent) -> A + Send + 'static,
    A: Future<Output = ()> + Send + 'static,
{
    let mut stage = start_with(ClaudeTestSetup::default(), |far| async move {
        let mut hand = FakeClaudeAgent::new(far);
        hand.handshake().await;
        play(hand).await;
    });
    assert!(matches!(stage.next_update().await, AgentUpdate::Ready { steers: true, .. }));
    stage
}

/// Any agent at the far end of a pipe.
fn start_with<F, A>(given: ClaudeTestSetup, far: F) -> DriverHarness
where
    F: FnOnce(DuplexStream) -> A,
    A: Future<Output = ()> + Send + 'static,
{
    let (stage, other) = DriverHarness::new("claude", |_| {}, |_, near| open_conversation(given, near));
    stage.with_agent_task(far(other))
}

/// A conversation, after its opening.
async fn open_conversation(
    given: ClaudeTestSetup,
    near: DuplexStream,
) -> Result<(ClaudeTestConversation, AgentUpdate), AgentExitReason> {
    let (from, to) = tokio::io::split(near);
    let mut lines = LineTransport::new(from, to, Box::pin(pending()));
    match perform_handshake(&mut lines).await {
        Ok(()) => {}
        Err(ClaudeHandshakeError::AgentExited) => return Err(hung_up_error()),
        Err(ClaudeHandshakeError::Refused(why)) => {
            return Err(AgentExitReason::Failed(RunError::new("refused", why)));
        }
    }
    let ClaudeTestSetup { pricing, resumed, resume_failure: forgot } = given;
    let ear = ClaudeEventDecoder::new(ClaudeUsageCounter::new(pricing, None, resumed.is_some()));
    let talk = ClaudeConversation::new(lines, resumed.unwrap_or_else(|| "s".to_owned()), ear, true, forgot);
    let hello = AgentUpdate::Ready { agent_session_id: Some(talk.session_id().to_owned()), steers: true };
    Ok((talk, hello))
}
