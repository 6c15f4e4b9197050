//! The driver for agents that speak the Agent Client Protocol on their stdio: one agent, from its start to its end.
//! It turns prompts into what the agent says; queueing, deadlines and killing are its caller's.
//!
//! Layout, in reading order:
//! - `profile`: what is peculiar to one agent.
//! - `opening`: the handshake, and a session new or old, in the right mode.
//! - `talk`: turns and the time between them, in one loop each; `round`: what is open in one turn.
//! - `compose`: prompts; `ear`: updates, with `calls`, `diff` and `usage`; `asks`: permissions and questions.
//! - `service`: what is done for the agent: `files` and `terminals`.
//! - `wire`: lines of JSON-RPC.

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
pub(crate) use self::event_decoder::META_KEY;
use self::handshake::{AcpHandshakeError, AcpHandshakeOptions};
use self::profile::AcpProfile;
pub(crate) use self::prompt_content::unseen_messages;
use super::process::{AgentProcess, AgentProgram};
use super::tool_server::ToolServer;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// One live agent.
pub(crate) struct AcpAgent {
    process: AgentProcess,
    conversation: AcpConversation<pipe::Receiver, pipe::Sender>,
    steers: bool,
    /// Held as long as the agent lives: without it the keeper ends everything.
    _keeper: Arc<KeeperHandle>,
}

impl AcpAgent {
    /// Starts the agent's process and opens its session, the old one if the specification names it, within the limit.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<KeeperHandle>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let late = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        if manifest.resume.next_minute && spec.agent_session_id.is_some() {
            wait_for_next_minute(spec.last_active).await;
        }
        let until = tokio::time::Instant::now() + limit;
        let started = tokio::time::timeout_at(
            until,
            AgentProcess::start(&keeper, spec, AgentProgram::from_manifest(manifest, spec)),
        )
        .await;
        let (mut process, stdin, stdout) = started.map_err(|_| late())??;
        let mut peer = AcpConnection::new(stdout, stdin, process.exited());
        let service = AcpClientService::for_workspace(&spec.cwd, Some(Arc::clone(&keeper)));
        let opening = AcpHandshakeOptions::from_spec(
            spec,
            AcpProfile::from_manifest(manifest, spec),
            service.runs_commands(),
        );
        let opened =
            match tokio::time::timeout_at(until, handshake::perform_handshake(&mut peer, &opening)).await {
                Ok(Ok(opened)) => opened,
                Ok(Err(AcpHandshakeError::AgentExited)) => {
                    return Err(process.exit_error("before it was ready").await);
                }
                Ok(Err(AcpHandshakeError::Refused(told))) => {
                    let told = RunError { code: "agent_failed_to_start".to_owned(), ..run_error(&told) };
                    return Err(process.with_stderr(told).await);
                }
                Err(_) => return Err(process.with_stderr(late()).await),
            };
        let talk = AcpConversation::new(peer, opened, service);
        Ok(Self { process, conversation: talk, steers: manifest.can_steer(), _keeper: keeper })
    }

    /// The agent's name for the conversation, by which it can be resumed: the one that it is in, also if that is new
    /// because the old one could not be gone on with. Under the old name each later start would fail in the same way
    /// and lose what has been said since.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.conversation.session_id().to_string())
    }

    /// Whether a turn can be steered.
    pub(crate) fn steers(&self) -> bool {
        self.steers
    }

    /// One turn. If it is dropped, the agent is in an unknown state and must be ended.
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

    /// The time between turns: late words go to `voice` under the run before. Comes back when the agent has ended;
    /// nothing is lost if the wait is given up.
    pub(crate) async fn idle(&mut self, voice: &AgentOutput) -> RunError {
        self.conversation.idle(voice).await;
        self.process.exit_error("between two turns").await
    }

    /// Ends it politely: closes its stdin and waits a little. The rest is the keeper's.
    pub(crate) async fn stop(self) {
        let Self { process, conversation: talk, _keeper, .. } = self;
        process.drain_and_wait(talk.hang_up()).await;
    }
}

/// Waits until the minute is over in which a conversation was last used.
async fn wait_for_next_minute(used: Option<Millis>) {
    const MINUTE: u64 = 60_000;
    let now = Millis::now();
    if used.is_some_and(|used| used.0 / MINUTE == now.0 / MINUTE) {
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
