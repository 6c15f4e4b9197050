//! Tests of the driver and of the scripted agent, seen from the session's end of a link. The two are connected by an
//! in-memory pipe. Time is paused: it moves on only when every task waits for it.

mod fake_agent;
mod misbehaving_agents;
mod profiles;
mod recorded;
mod resume;
mod script;
mod turns;

use std::future::pending;

use qd_catalog::Catalog;
use qd_protocol::link::{AgentExitReason, AgentUpdate};
use qd_protocol::worker::AgentSpec;
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::fake_agent::FakeAcpAgent;
use super::client_service::AcpClientService;
use super::connection::AcpConnection;
use super::conversation::AcpConversation;
use super::handshake::{AcpHandshakeError, AcpHandshakeOptions, perform_handshake};
use super::profile::AcpProfile;
use super::turn_end::run_error;
use crate::harness::{DriverHarness, hung_up_error};
use crate::policy_enforcement::enforce_policy;
use crate::stdio_agent::StdioConversation;
use qd_script::{ScriptSetup, serve};

type AcpTestConversation = AcpConversation<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// The scripted agent, ready for a prompt.
async fn scripted() -> DriverHarness {
    scripted_with(ScriptSetup::default(), |_| {}).await
}

/// The scripted agent with its own setup and a changed specification.
async fn scripted_with(setup: ScriptSetup, change: impl FnOnce(&mut AgentSpec)) -> DriverHarness {
    let mut harness = start_with(change, async |pipe| {
        let (from, to) = tokio::io::split(pipe);
        serve(from, to, setup).await;
    });
    assert!(matches!(harness.next_update().await, AgentUpdate::Ready { .. }));
    harness
}

/// A fake agent that behaves as its manifest says, after its handshake.
async fn start_fake_agent<A>(
    agent: &str,
    play: impl FnOnce(FakeAcpAgent) -> A + Send + 'static,
) -> DriverHarness
where
    A: Future<Output = ()> + Send + 'static,
{
    let change = |spec: &mut AgentSpec| agent.clone_into(&mut spec.agent);
    let mut harness = start_with(change, |pipe| async move {
        let mut fake = FakeAcpAgent::new(pipe);
        fake.handshake().await;
        play(fake).await;
    });
    assert!(matches!(harness.next_update().await, AgentUpdate::Ready { .. }));
    harness
}

/// Any agent at the other end of a pipe.
fn start_with<F, A>(change: impl FnOnce(&mut AgentSpec), run_agent: F) -> DriverHarness
where
    F: FnOnce(DuplexStream) -> A,
    A: Future<Output = ()> + Send + 'static,
{
    let (harness, agent_end) =
        DriverHarness::new("script", change, |spec, pipe| open_conversation(spec, pipe, false));
    harness.with_agent_task(run_agent(agent_end))
}

/// Opens a conversation over a pipe.
async fn open_conversation(
    spec: AgentSpec,
    pipe: DuplexStream,
    runs_commands: bool,
) -> Result<(AcpTestConversation, AgentUpdate), AgentExitReason> {
    let (from, to) = tokio::io::split(pipe);
    let mut connection = AcpConnection::new(from, to, Box::pin(pending()));
    let mut manifest = Catalog::built_in().get(&spec.agent).expect("the agent is built in");
    manifest.policy.file = None;
    // The settings of whoever runs the tests do not count.
    manifest.policy.allowed_by_settings = None;
    let manifest = enforce_policy(manifest, &spec).expect("the agent can be made to ask");
    let options =
        AcpHandshakeOptions::from_spec(&spec, AcpProfile::from_manifest(&manifest, &spec), runs_commands);
    let handshake = match perform_handshake(&mut connection, &options).await {
        Ok(handshake) => handshake,
        Err(AcpHandshakeError::AgentExited) => return Err(hung_up_error()),
        Err(AcpHandshakeError::Refused(error)) => return Err(AgentExitReason::Failed(run_error(&error))),
    };
    let conversation = AcpConversation::new(connection, handshake, AcpClientService::for_agent(&spec, None));
    let ready =
        AgentUpdate::Ready { agent_session_id: conversation.session_id(), steers: manifest.can_steer() };
    Ok((conversation, ready))
}
