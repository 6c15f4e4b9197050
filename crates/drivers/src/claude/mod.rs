//! Driver for agents that speak Claude Code's own protocol over stdio: one JSON object per line, some of which need a
//! response. What it shares with other agents on stdio is in `stdio_agent`.
//!
//! Layout, in reading order:
//! - `handshake`: waits until the program is ready.
//! - `conversation`: the loops for a turn and for the time between turns; `turn`: the state of one turn.
//! - `prompt_content`: prompts; `event_decoder`: output, with `task_list`; `asks`: permission requests and questions; `usage`: tokens and
//!   cost; `context`: how full the context is.
//! - `messages`: the protocol's lines.

mod asks;
mod context;
mod conversation;
mod event_decoder;
mod handshake;
mod messages;
mod prompt_content;
mod task_list;
#[cfg(test)]
mod tests;
mod turn;
mod usage;

use futures_util::FutureExt;
use qd_protocol::event::RunError;
use serde_json::json;
use tokio::net::unix::pipe;

use self::conversation::ClaudeConversation;
use self::event_decoder::ClaudeEventDecoder;
use self::usage::ClaudeUsageCounter;
use crate::agent_driver::AgentStart;
use crate::line_transport::LineTransport;
use crate::mode_guard::ModeGuard;
use crate::pricing::TokenPricing;
use crate::process::AgentProcess;
use crate::stdio_agent::{StdioAgent, StdioAgentStart, StdioHandshakeError, refused_start};
use crate::tool_server::{SERVER_NAME, ToolServer};

/// The flags that start a conversation with an id of ours and that resume one.
const NEW_SESSION_FLAG: &str = "--session-id";
const RESUME_FLAG: &str = "--resume";
/// The flag for MCP servers, with a JSON object as its value.
const MCP_CONFIG_FLAG: &str = "--mcp-config";

type ClaudeLines = LineTransport<pipe::Receiver, pipe::Sender>;

/// Starts the agent's process and resumes the conversation named in the specification, if there is one. If the agent
/// does not find that conversation, a new one is started: a conversation that never had a prompt leaves nothing to
/// resume.
pub(crate) async fn start_claude_agent(
    start: AgentStart<'_>,
) -> Result<StdioAgent<ClaudeConversation<pipe::Receiver, pipe::Sender>>, RunError> {
    let start = StdioAgentStart::new(start)?;
    let mut resume_failure = None;
    if let Some(old_id) = &start.spec.agent_session_id {
        match start_process(&start, RESUME_FLAG, old_id).await? {
            Ok(started) => return Ok(into_agent(start, started, old_id.clone(), None)),
            Err(ClaudeStartRefusal { reason, .. }) => resume_failure = Some(reason),
        }
    }
    let session_id =
        messages::random_uuid().map_err(|cause| RunError::new("agent_failed_to_start", cause.to_string()))?;
    match start_process(&start, NEW_SESSION_FLAG, &session_id).await? {
        Ok(started) => Ok(into_agent(start, started, session_id, resume_failure)),
        Err(ClaudeStartRefusal { reason, mut process }) => {
            Err(refused_start(&mut process, RunError::new("agent_failed_to_start", reason)).await)
        }
    }
}

/// A process that is ready.
struct ClaudeReadyProcess {
    process: AgentProcess,
    lines: ClaudeLines,
    /// The mode that it is in, if it reports one.
    mode: Option<String>,
}

/// A process that refused to start the conversation.
struct ClaudeStartRefusal {
    reason: String,
    process: AgentProcess,
}

/// Starts the process with the conversation of this id. `flag` says whether that is new or resumed.
async fn start_process(
    start: &StdioAgentStart<'_>,
    flag: &str,
    session_id: &str,
) -> Result<Result<ClaudeReadyProcess, ClaudeStartRefusal>, RunError> {
    let mut program = start.program();
    program.argv.extend(ToolServer::from_spec(start.spec).iter().flat_map(mcp_config_args));
    program.argv.extend([flag.to_owned(), session_id.to_owned()]);
    let (mut process, stdin, stdout) = start.start_process(program).await?;
    let mut lines = LineTransport::new(stdout, stdin, process.exited());
    match start.finish_step(&mut process, handshake::perform_handshake(&mut lines)).await? {
        Ok(mode) => Ok(Ok(ClaudeReadyProcess { process, lines, mode })),
        Err(reason) => {
            // Wait for the exit: two processes at once could both write to the same conversation.
            let exited = process.exited().map(Ok::<(), StdioHandshakeError<String>>);
            let _exited = start.finish_step(&mut process, exited).await?;
            Ok(Err(ClaudeStartRefusal { reason, process }))
        }
    }
}

fn into_agent(
    start: StdioAgentStart<'_>,
    ready: ClaudeReadyProcess,
    session: String,
    resume_failure: Option<String>,
) -> StdioAgent<ClaudeConversation<pipe::Receiver, pipe::Sender>> {
    let ClaudeReadyProcess { process, lines, mode } = ready;
    let modes = ModeGuard::new(start.manifest.modes.clone(), mode);
    let steers = start.manifest.can_steer();
    let resumed = start.spec.agent_session_id.as_ref() == Some(&session);
    let pricing = TokenPricing::from_spec(start.spec);
    let decoder =
        ClaudeEventDecoder::new(ClaudeUsageCounter::new(pricing, start.spec.model.clone(), resumed));
    let conversation = ClaudeConversation::new(lines, session, decoder, modes, steers, resume_failure);
    start.into_agent(process, conversation, steers)
}

/// The arguments that configure our MCP server. Every user of the machine can read a command line, so they hold no
/// secret.
fn mcp_config_args(tools: &ToolServer) -> [String; 2] {
    let server = json!({ "type": "stdio", "command": tools.command, "args": tools.args, "env": tools.env });
    [MCP_CONFIG_FLAG.to_owned(), json!({ "mcpServers": { SERVER_NAME: server } }).to_string()]
}
