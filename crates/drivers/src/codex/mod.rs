//! Driver for Codex's own app server over stdio. It holds one server process per session, from start to exit, and turns
//! prompts into updates. Queueing, deadlines and killing belong to the caller.
//!
//! Layout, in reading order:
//! - `handshake`: initializes the server and opens a new or an old thread.
//! - `conversation`: the loops for a turn and for the time between turns; `turn`: the state of one turn; `cancel`: how
//!   a turn is cancelled.
//! - `prompt_content`: prompts; `event_decoder`: notifications, with `items`, `tool_calls`, `turn_end` and `usage`.
//! - `asks`, `forms`: permission requests and questions.
//! - `connection`: JSON-RPC messages, one per line.

mod asks;
mod cancel;
mod connection;
mod conversation;
mod event_decoder;
mod forms;
mod handshake;
mod items;
mod prompt_content;
#[cfg(test)]
mod tests;
mod tool_calls;
mod turn;
mod turn_end;
mod usage;

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::KeeperHandle;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use tokio::net::unix::pipe;

use self::connection::CodexConnection;
use self::conversation::{CodexConversation, run_error};
use self::handshake::{CodexHandshakeError, CodexHandshakeOptions};
use super::pricing::TokenPricing;
use super::process::{AgentProcess, AgentProgram};
use super::tool_server::ToolServer;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// A running Codex server with an open thread.
pub(crate) struct CodexAgent {
    process: AgentProcess,
    conversation: CodexConversation<pipe::Receiver, pipe::Sender>,
    /// Held for as long as the agent lives: dropping it makes the keeper end everything.
    _keeper: Arc<KeeperHandle>,
}

impl CodexAgent {
    /// Starts the server and opens a thread, resuming the one named in `spec` if there is one. Fails if the server is
    /// not ready within `limit`.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<KeeperHandle>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let timeout_error = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        let deadline = tokio::time::Instant::now() + limit;
        let started = tokio::time::timeout_at(
            deadline,
            AgentProcess::start(&keeper, spec, AgentProgram::from_manifest(manifest, spec)),
        )
        .await;
        let (mut process, stdin, stdout) = started.map_err(|_| timeout_error())??;
        let mut connection = CodexConnection::new(stdout, stdin, process.exited());
        let options = CodexHandshakeOptions::from_spec(spec);
        let handshake =
            match tokio::time::timeout_at(deadline, handshake::perform_handshake(&mut connection, &options))
                .await
            {
                Ok(Ok(handshake)) => handshake,
                Ok(Err(CodexHandshakeError::AgentExited)) => {
                    return Err(process.exit_error("before it was ready").await);
                }
                Ok(Err(CodexHandshakeError::Refused(refusal))) => {
                    let error = RunError { code: "agent_failed_to_start".to_owned(), ..run_error(&refusal) };
                    return Err(process.with_stderr(error).await);
                }
                Err(_) => return Err(process.with_stderr(timeout_error()).await),
            };
        let conversation = CodexConversation::new(connection, handshake, TokenPricing::from_spec(spec));
        Ok(Self { process, conversation, _keeper: keeper })
    }

    /// The id of the current thread, with which it can be resumed. If the old thread could not be resumed, this is the
    /// id of the new one.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.conversation.thread_id().to_owned())
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

    /// Serves the agent between turns: late output goes to `output` under the earlier runs. Returns when the agent has
    /// exited. Cancel safe.
    pub(crate) async fn idle(&mut self, output: &AgentOutput) -> RunError {
        self.conversation.idle(output).await;
        self.process.exit_error("between two turns").await
    }

    /// Asks the agent to exit by closing its stdin, and waits a little. The keeper ends it if it does not.
    pub(crate) async fn stop(self) {
        let Self { process, conversation, _keeper } = self;
        process.drain_and_wait(conversation.close_stdin()).await;
    }
}

impl<'a> CodexHandshakeOptions<'a> {
    fn from_spec(spec: &'a AgentSpec) -> Self {
        Self {
            cwd: &spec.cwd,
            model: spec.model.as_deref(),
            system_prompt: spec.system_prompt.as_deref(),
            resume: spec.agent_session_id.as_deref(),
            tools: ToolServer::from_spec(spec),
        }
    }
}
