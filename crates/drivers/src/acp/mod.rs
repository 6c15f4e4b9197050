//! Driver for agents that speak the Agent Client Protocol (ACP) over stdio. It holds one agent from start to exit and
//! turns prompts into updates. Queueing, deadlines and killing belong to the caller.
//!
//! Layout, in reading order:
//! - `profile`: the quirks of one agent, taken from its manifest.
//! - `handshake`: initializes the agent and opens a new or an old session in the right mode.
//! - `conversation`: the loops for a turn and for the time between turns; `turn`: the state of one turn.
//! - `prompt_content`: prompts; `event_decoder`: updates, with `tool_calls`, `diff` and `usage`; `asks`: permission
//!   requests and questions.
//! - `client_service`: requests that we serve for the agent, with `files` and `terminals`.
//! - `connection`: JSON-RPC messages, one per line.

mod asks;
mod client_service;
mod connection;
mod conversation;
mod diff;
mod event_decoder;
mod files;
mod handshake;
mod profile;
mod prompt_content;
mod terminals;
#[cfg(test)]
mod tests;
mod tool_calls;
mod turn;
mod usage;

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::KeeperHandle;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::Millis;
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use tokio::net::unix::pipe;

use self::client_service::AcpClientService;
use self::connection::AcpConnection;
use self::conversation::{AcpConversation, run_error};
use self::handshake::{AcpHandshakeError, AcpHandshakeOptions};
use self::profile::AcpProfile;
pub(crate) use self::prompt_content::unseen_messages;
use super::process::{AgentProcess, AgentProgram};
use super::tool_server::ToolServer;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// A running ACP agent with an open session.
pub(crate) struct AcpAgent {
    process: AgentProcess,
    conversation: AcpConversation<pipe::Receiver, pipe::Sender>,
    steers: bool,
    /// Held for as long as the agent lives: dropping it makes the keeper end everything.
    _keeper: Arc<KeeperHandle>,
}

impl AcpAgent {
    /// Starts the agent's process and opens its session, resuming the one named in `spec` if there is one. Fails if the
    /// agent is not ready within `limit`.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<KeeperHandle>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let timeout_error = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        if manifest.resume.next_minute && spec.agent_session_id.is_some() {
            wait_for_next_minute(spec.last_active).await;
        }
        let deadline = tokio::time::Instant::now() + limit;
        let started = tokio::time::timeout_at(
            deadline,
            AgentProcess::start(&keeper, spec, AgentProgram::from_manifest(manifest, spec)),
        )
        .await;
        let (mut process, stdin, stdout) = started.map_err(|_| timeout_error())??;
        let mut connection = AcpConnection::new(stdout, stdin, process.exited());
        let service = AcpClientService::for_workspace(&spec.cwd, Some(Arc::clone(&keeper)));
        let options = AcpHandshakeOptions::from_spec(
            spec,
            AcpProfile::from_manifest(manifest, spec),
            service.runs_commands(),
        );
        let handshake =
            match tokio::time::timeout_at(deadline, handshake::perform_handshake(&mut connection, &options))
                .await
            {
                Ok(Ok(handshake)) => handshake,
                Ok(Err(AcpHandshakeError::AgentExited)) => {
                    return Err(process.exit_error("before it was ready").await);
                }
                Ok(Err(AcpHandshakeError::Refused(refusal))) => {
                    let error = RunError { code: "agent_failed_to_start".to_owned(), ..run_error(&refusal) };
                    return Err(process.with_stderr(error).await);
                }
                Err(_) => return Err(process.with_stderr(timeout_error()).await),
            };
        let conversation = AcpConversation::new(connection, handshake, service);
        Ok(Self { process, conversation, steers: manifest.can_steer(), _keeper: keeper })
    }

    /// The agent's id for the current conversation, with which it can be resumed. If the old conversation could not be
    /// resumed, this is the id of the new one: under the old id every later start would fail in the same way and lose
    /// everything said since.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.conversation.session_id().to_string())
    }

    pub(crate) fn steers(&self) -> bool {
        self.steers
    }

    /// Runs one turn. If the future is dropped, the agent is in an unknown state and must be ended.
    pub(crate) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
        match self.conversation.turn(turn, prompt).await? {
            Some(outcome) => Ok(DriverTurnEnd::Stopped(outcome)),
            None => {
                Ok(DriverTurnEnd::AgentExited(self.process.exit_error("in the middle of its turn").await))
            }
        }
    }

    /// Serves the agent between turns: late output goes to `output` under the previous run. Returns when the agent has
    /// exited. Cancel safe.
    pub(crate) async fn idle(&mut self, output: &AgentOutput) -> RunError {
        self.conversation.idle(output).await;
        self.process.exit_error("between two turns").await
    }

    /// Asks the agent to exit by closing its stdin, and waits a little. The keeper ends it if it does not.
    pub(crate) async fn stop(self) {
        let Self { process, conversation, _keeper, .. } = self;
        process.drain_and_wait(conversation.hang_up()).await;
    }
}

/// Waits for the end of the minute in which the conversation was last used. For agents whose manifest sets
/// `resume.next_minute`.
async fn wait_for_next_minute(last_used: Option<Millis>) {
    const MINUTE: u64 = 60_000;
    let now = Millis::now();
    if last_used.is_some_and(|last_used| last_used.0 / MINUTE == now.0 / MINUTE) {
        tokio::time::sleep(Duration::from_millis(MINUTE - now.0 % MINUTE)).await;
    }
}

impl<'a> AcpHandshakeOptions<'a> {
    fn from_spec(spec: &'a AgentSpec, profile: AcpProfile, runs_commands: bool) -> Self {
        Self {
            cwd: &spec.cwd,
            model: spec.model.as_deref(),
            system_prompt: spec.system_prompt.as_deref(),
            resume: spec.agent_session_id.as_deref(),
            profile,
            runs_commands,
            tools: ToolServer::from_spec(spec),
        }
    }
}
