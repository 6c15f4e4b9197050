//! Driver for agents that speak Claude Code's own protocol over stdio: one JSON object per line, some of which need a
//! response. It holds one agent from start to exit. Queueing, deadlines and killing belong to the caller.
//!
//! Layout, in reading order:
//! - `handshake`: waits until the program is ready.
//! - `conversation`: the loops for a turn and for the time between turns; `turn`: the state of one turn.
//! - `prompt_content`: prompts; `event_decoder`: output; `asks`: permission requests and questions; `usage`: tokens and
//!   cost.
//! - `messages`: the protocol's lines.

mod asks;
mod conversation;
mod event_decoder;
mod handshake;
mod messages;
mod prompt_content;
#[cfg(test)]
mod tests;
mod turn;
mod usage;

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::KeeperHandle;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use serde_json::json;
use tokio::net::unix::pipe;
use tokio::time::{Instant, timeout_at};

use self::conversation::ClaudeConversation;
use self::event_decoder::ClaudeEventDecoder;
use self::handshake::ClaudeHandshakeError;
use self::usage::ClaudeUsageCounter;
use super::line_transport::LineTransport;
use super::pricing::TokenPricing;
use super::process::{AgentProcess, AgentProgram};
use super::tool_server::{SERVER_NAME, ToolServer};
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// The flags that start a conversation with an id of ours and that resume one.
const NEW_SESSION_FLAG: &str = "--session-id";
const RESUME_FLAG: &str = "--resume";
/// The flag for MCP servers, with a JSON object as its value.
const MCP_CONFIG_FLAG: &str = "--mcp-config";

/// A running Claude Code process.
pub(crate) struct ClaudeAgent {
    process: AgentProcess,
    conversation: ClaudeConversation<pipe::Receiver, pipe::Sender>,
    steers: bool,
    /// Held for as long as the agent lives: dropping it makes the keeper end everything.
    _keeper: Arc<KeeperHandle>,
}

impl ClaudeAgent {
    /// Starts the agent's process and resumes the conversation named in `spec`, if there is one. If the agent does not
    /// find that conversation, a new one is started: a conversation that never had a prompt leaves nothing to resume.
    /// Fails if the agent is not ready within `limit`.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<KeeperHandle>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let launcher =
            ClaudeLauncher { spec, manifest, keeper: &keeper, deadline: Instant::now() + limit, limit };
        let mut resume_failure = None;
        if let Some(old_id) = &spec.agent_session_id {
            match launcher.start_process(RESUME_FLAG, old_id).await? {
                Ok((process, lines)) => {
                    let conversation = launcher.conversation(lines, old_id.clone(), None);
                    return Ok(Self { process, conversation, steers: manifest.can_steer(), _keeper: keeper });
                }
                Err(ClaudeStartRefusal { reason, .. }) => resume_failure = Some(reason),
            }
        }
        let session_id = messages::random_uuid()
            .map_err(|cause| RunError::new("agent_failed_to_start", cause.to_string()))?;
        match launcher.start_process(NEW_SESSION_FLAG, &session_id).await? {
            Ok((process, lines)) => {
                let conversation = launcher.conversation(lines, session_id, resume_failure);
                Ok(Self { process, conversation, steers: manifest.can_steer(), _keeper: keeper })
            }
            Err(ClaudeStartRefusal { reason, mut process }) => {
                Err(process.with_stderr(RunError::new("agent_failed_to_start", reason)).await)
            }
        }
    }

    /// The agent's id for the conversation, with which it can be resumed. It is known before the first prompt.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.conversation.session_id().to_owned())
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

/// Starts the agent's process. A failed resume needs a second process.
struct ClaudeLauncher<'a> {
    spec: &'a AgentSpec,
    manifest: &'a Manifest,
    keeper: &'a KeeperHandle,
    limit: Duration,
    deadline: Instant,
}

/// The arguments that configure our MCP server. Every user of the machine can read a command line, so they hold no
/// secret.
fn mcp_config_args(tools: &ToolServer) -> [String; 2] {
    let server = json!({ "type": "stdio", "command": tools.command, "args": tools.args, "env": tools.env });
    [MCP_CONFIG_FLAG.to_owned(), json!({ "mcpServers": { SERVER_NAME: server } }).to_string()]
}

/// A process that refused to start the conversation.
struct ClaudeStartRefusal {
    reason: String,
    process: AgentProcess,
}

type ClaudeStartedProcess = (AgentProcess, LineTransport<pipe::Receiver, pipe::Sender>);

impl ClaudeLauncher<'_> {
    /// Starts the process with the conversation of this id. `flag` says whether that is new or resumed.
    async fn start_process(
        &self,
        flag: &str,
        session_id: &str,
    ) -> Result<Result<ClaudeStartedProcess, ClaudeStartRefusal>, RunError> {
        let mut program = AgentProgram::from_manifest(self.manifest, self.spec);
        program.argv.extend(ToolServer::from_spec(self.spec).iter().flat_map(mcp_config_args));
        program.argv.extend([flag.to_owned(), session_id.to_owned()]);
        let started = timeout_at(self.deadline, AgentProcess::start(self.keeper, self.spec, program)).await;
        let (mut process, stdin, stdout) = started.map_err(|_| self.timeout_error())??;
        let mut lines = LineTransport::new(stdout, stdin, process.exited());
        match timeout_at(self.deadline, handshake::perform_handshake(&mut lines)).await {
            Ok(Ok(())) => Ok(Ok((process, lines))),
            Ok(Err(ClaudeHandshakeError::Refused(reason))) => {
                // Wait for the exit: two processes at once could both write to the same conversation.
                let exited = timeout_at(self.deadline, process.exited()).await;
                match exited {
                    Ok(()) => Ok(Err(ClaudeStartRefusal { reason, process })),
                    Err(_) => Err(process.with_stderr(self.timeout_error()).await),
                }
            }
            Ok(Err(ClaudeHandshakeError::AgentExited)) => {
                Err(process.exit_error("before it was ready").await)
            }
            Err(_) => Err(process.with_stderr(self.timeout_error()).await),
        }
    }

    fn conversation(
        &self,
        lines: LineTransport<pipe::Receiver, pipe::Sender>,
        session: String,
        resume_failure: Option<String>,
    ) -> ClaudeConversation<pipe::Receiver, pipe::Sender> {
        let resumed = self.spec.agent_session_id.as_ref() == Some(&session);
        let usage =
            ClaudeUsageCounter::new(TokenPricing::from_spec(self.spec), self.spec.model.clone(), resumed);
        ClaudeConversation::new(
            lines,
            session,
            ClaudeEventDecoder::new(usage),
            self.manifest.can_steer(),
            resume_failure,
        )
    }

    fn timeout_error(&self) -> RunError {
        let message = format!("the agent was not ready within {} s", self.limit.as_secs());
        RunError::new("agent_not_ready", message)
    }
}
