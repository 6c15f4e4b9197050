//! The driver for agents that speak Claude Code's own protocol on their stdio: lines of JSON, some of which want an
//! answer. One agent, from its start to its end; queueing, deadlines and killing are its caller's.
//!
//! Layout, in reading order:
//! - `opening`: the handshake.
//! - `talk`: turns and the time between them, in one loop each; `round`: what is open in one turn.
//! - `compose`, `ear`, `asks`, `tally`: prompts, what is heard, permissions and questions, what it costs.
//! - `words`: the protocol's lines.

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

/// The flags for a conversation under a name of ours, and for one that is to go on.
const NEW_SESSION_FLAG: &str = "--session-id";
const RESUME_FLAG: &str = "--resume";
/// The flag before the servers that it is given.
const MCP_CONFIG_FLAG: &str = "--mcp-config";

/// One live agent.
pub(crate) struct ClaudeAgent {
    process: AgentProcess,
    conversation: ClaudeConversation<pipe::Receiver, pipe::Sender>,
    steers: bool,
    /// Held as long as the agent lives: without it the keeper ends everything.
    _keeper: Arc<KeeperHandle>,
}

impl ClaudeAgent {
    /// Starts the agent's process, in its old conversation if the specification names one, within the limit. A
    /// conversation that is not there is begun anew: one that never had a prompt has left nothing to go on with.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<KeeperHandle>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let start =
            ClaudeLauncher { spec, manifest, keeper: &keeper, deadline: Instant::now() + limit, limit };
        let mut forgot = None;
        if let Some(old) = &spec.agent_session_id {
            match start.start_process(RESUME_FLAG, old).await? {
                Ok((process, lines)) => {
                    let talk = start.conversation(lines, old.clone(), None);
                    return Ok(Self {
                        process,
                        conversation: talk,
                        steers: manifest.can_steer(),
                        _keeper: keeper,
                    });
                }
                Err(ClaudeStartRefusal { reason: why, .. }) => forgot = Some(why),
            }
        }
        let name = messages::random_uuid()
            .map_err(|cause| RunError::new("agent_failed_to_start", cause.to_string()))?;
        match start.start_process(NEW_SESSION_FLAG, &name).await? {
            Ok((process, lines)) => {
                let talk = start.conversation(lines, name, forgot);
                Ok(Self { process, conversation: talk, steers: manifest.can_steer(), _keeper: keeper })
            }
            Err(ClaudeStartRefusal { reason: why, mut process }) => {
                Err(process.with_stderr(RunError::new("agent_failed_to_start", why)).await)
            }
        }
    }

    /// The agent's name for the conversation, by which it can be resumed. It is known before the first prompt.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.conversation.session_id().to_owned())
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

/// A start, which may need a second process.
struct ClaudeLauncher<'a> {
    spec: &'a AgentSpec,
    manifest: &'a Manifest,
    keeper: &'a KeeperHandle,
    limit: Duration,
    deadline: Instant,
}

/// What it is told of a server. Everybody can read a command line, and nothing in it is a secret.
fn mcp_config_args(tools: &ToolServer) -> [String; 2] {
    let server = json!({ "type": "stdio", "command": tools.command, "args": tools.args, "env": tools.env });
    [MCP_CONFIG_FLAG.to_owned(), json!({ "mcpServers": { SERVER_NAME: server } }).to_string()]
}

/// A process that would not begin, and why.
struct ClaudeStartRefusal {
    reason: String,
    process: AgentProcess,
}

type ClaudeStartedProcess = (AgentProcess, LineTransport<pipe::Receiver, pipe::Sender>);

impl ClaudeLauncher<'_> {
    /// Starts the process in the conversation of this name.
    async fn start_process(
        &self,
        flag: &str,
        name: &str,
    ) -> Result<Result<ClaudeStartedProcess, ClaudeStartRefusal>, RunError> {
        let mut program = AgentProgram::from_manifest(self.manifest, self.spec);
        program.argv.extend(ToolServer::from_spec(self.spec).iter().flat_map(mcp_config_args));
        program.argv.extend([flag.to_owned(), name.to_owned()]);
        let started = timeout_at(self.deadline, AgentProcess::start(self.keeper, self.spec, program)).await;
        let (mut process, stdin, stdout) = started.map_err(|_| self.timeout_error())??;
        let mut lines = LineTransport::new(stdout, stdin, process.exited());
        match timeout_at(self.deadline, handshake::perform_handshake(&mut lines)).await {
            Ok(Ok(())) => Ok(Ok((process, lines))),
            Ok(Err(ClaudeHandshakeError::Refused(why))) => {
                // Two of them at once could both write to the same conversation.
                let gone = timeout_at(self.deadline, process.exited()).await;
                match gone {
                    Ok(()) => Ok(Err(ClaudeStartRefusal { reason: why, process })),
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
        forgot: Option<String>,
    ) -> ClaudeConversation<pipe::Receiver, pipe::Sender> {
        let resumed = self.spec.agent_session_id.as_ref() == Some(&session);
        let tally =
            ClaudeUsageCounter::new(TokenPricing::from_spec(self.spec), self.spec.model.clone(), resumed);
        ClaudeConversation::new(
            lines,
            session,
            ClaudeEventDecoder::new(tally),
            self.manifest.can_steer(),
            forgot,
        )
    }

    fn timeout_error(&self) -> RunError {
        let message = format!("the agent was not ready within {} s", self.limit.as_secs());
        RunError::new("agent_not_ready", message)
    }
}
