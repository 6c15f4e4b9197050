//! Promises of the driver and of the scripted agent, seen from the session's end of a link. Between the two is a pipe
//! in memory, and time stands still: it moves on when everybody waits for it.

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
use super::conversation::{AcpConversation, run_error};
use super::handshake::{AcpHandshakeError, AcpHandshakeOptions, perform_handshake};
use super::profile::AcpProfile;
use crate::drivers::harness::{DriverHarness, hung_up_error, impl_harness_driver};
use crate::script::{ScriptSetup, serve};

type AcpTestConversation = AcpConversation<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

impl_harness_driver!(AcpTestConversation);

/// The scripted agent, ready.
async fn scripted() -> DriverHarness {
    scripted_with(ScriptSetup::default(), |_| {}).await
}

/// The same with what its process was given, and what the session was.
async fn scripted_with(setup: ScriptSetup, change: impl FnOnce(&mut AgentSpec)) -> DriverHarness {
    let mut stage = start_with(change, async |far| {
        let (from, to) = tokio::io::split(far);
        serve(from, to, setup).await;
    });
    assert!(matches!(stage.next_update().await, AgentUpdate::Ready { .. }));
    stage
}

/// An agent by hand, of the kind that a manifest describes and after its handshake.
async fn start_fake_agent<A>(
    agent: &str,
    play: impl FnOnce(FakeAcpAgent) -> A + Send + 'static,
) -> DriverHarness
where
    A: Future<Output = ()> + Send + 'static,
{
    let change = |spec: &mut AgentSpec| agent.clone_into(&mut spec.agent);
    let mut stage = start_with(change, |far| async move {
        let mut hand = FakeAcpAgent::new(far);
        hand.handshake().await;
        play(hand).await;
    });
    assert!(matches!(stage.next_update().await, AgentUpdate::Ready { .. }));
    stage
}

/// Any agent at the far end of a pipe.
fn start_with<F, A>(change: impl FnOnce(&mut AgentSpec), far: F) -> DriverHarness
where
    F: FnOnce(DuplexStream) -> A,
    A: Future<Output = ()> + Send + 'static,
{
    let (stage, other) =
        DriverHarness::new("script", change, |spec, near| open_conversation(spec, near, false));
    stage.with_agent_task(far(other))
}

/// A conversation, after its opening.
async fn open_conversation(
    spec: AgentSpec,
    near: DuplexStream,
    runs_commands: bool,
) -> Result<(AcpTestConversation, AgentUpdate), AgentExitReason> {
    let (from, to) = tokio::io::split(near);
    let mut peer = AcpConnection::new(from, to, Box::pin(pending()));
    let manifest = Catalog::built_in().get(&spec.agent).expect("it is built in");
    let opening =
        AcpHandshakeOptions::from_spec(&spec, AcpProfile::from_manifest(&manifest, &spec), runs_commands);
    let opened = match perform_handshake(&mut peer, &opening).await {
        Ok(opened) => opened,
        Err(AcpHandshakeError::AgentExited) => return Err(hung_up_error()),
        Err(AcpHandshakeError::Refused(told)) => return Err(AgentExitReason::Failed(run_error(&told))),
    };
    let talk = AcpConversation::new(peer, opened, AcpClientService::for_workspace(&spec.cwd, None));
    let hello = AgentUpdate::Ready {
        agent_session_id: Some(talk.session_id().to_string()),
        steers: manifest.can_steer(),
    };
    Ok((talk, hello))
}
