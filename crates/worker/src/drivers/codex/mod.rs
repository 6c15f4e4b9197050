//! The driver for Codex's own server on stdio: one process for each session, from its start to its end. It turns
//! prompts into what the agent says; queueing, deadlines and killing are its caller's.
//!
//! Layout, in reading order:
//! - `opening`: the handshake, and a thread new or old.
//! - `talk`: turns and the time between them, in one loop each; `round`: what is open in one turn; `stopping`: its cancel.
//! - `compose`, `words`, `items`, `calls`, `ends`, `usage`: prompts, what is told, tools, those that are open, how turns end,
//!   tokens and their price.
//! - `asks`, `forms`: permissions and questions.
//! - `wire`: lines of JSON-RPC.

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

/// One live agent.
pub(crate) struct CodexAgent {
    process: AgentProcess,
    conversation: CodexConversation<pipe::Receiver, pipe::Sender>,
    /// Held as long as the agent lives: without it the keeper ends everything.
    _keeper: Arc<KeeperHandle>,
}

impl CodexAgent {
    /// Starts the server and opens its thread, the old one if the specification names it, within the limit.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<KeeperHandle>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let late = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        let until = tokio::time::Instant::now() + limit;
        let started = tokio::time::timeout_at(
            until,
            AgentProcess::start(&keeper, spec, AgentProgram::from_manifest(manifest, spec)),
        )
        .await;
        let (mut process, stdin, stdout) = started.map_err(|_| late())??;
        let mut peer = CodexConnection::new(stdout, stdin, process.exited());
        let opening = CodexHandshakeOptions::from_spec(spec);
        let opened =
            match tokio::time::timeout_at(until, handshake::perform_handshake(&mut peer, &opening)).await {
                Ok(Ok(opened)) => opened,
                Ok(Err(CodexHandshakeError::AgentExited)) => {
                    return Err(process.exit_error("before it was ready").await);
                }
                Ok(Err(CodexHandshakeError::Refused(refusal))) => {
                    let error = RunError { code: "agent_failed_to_start".to_owned(), ..run_error(&refusal) };
                    return Err(process.with_stderr(error).await);
                }
                Err(_) => return Err(process.with_stderr(late()).await),
            };
        let talk = CodexConversation::new(peer, opened, TokenPricing::from_spec(spec));
        Ok(Self { process, conversation: talk, _keeper: keeper })
    }

    /// The agent's name for the conversation, by which it can be resumed: the one that it is in, also if that is new
    /// because the old one could not be gone on with.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.conversation.thread_id().to_owned())
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

    /// The time between turns: late words go to `voice` under the runs before. Comes back when the agent has ended;
    /// nothing is lost if the wait is given up.
    pub(crate) async fn idle(&mut self, voice: &AgentOutput) -> RunError {
        self.conversation.idle(voice).await;
        self.process.exit_error("between two turns").await
    }

    /// Ends it politely: closes its stdin and waits a little. The rest is the keeper's.
    pub(crate) async fn stop(self) {
        let Self { process, conversation: talk, _keeper } = self;
        process.drain_and_wait(talk.hang_up()).await;
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
