//! Driver for Codex's own app server over stdio. It holds one server process per session, from start to exit, and turns
//! prompts into updates. Queueing, deadlines and killing belong to the caller.
//!
//! Layout, in reading order:
//! - `handshake`: initializes the server and opens a new or an old thread.
//! - `conversation`: the loops for a turn and for the time between turns; `turn`: the state of one turn; `cancel`: how
//!   a turn is cancelled.
//! - `prompt_content`: prompts; `event_decoder`: notifications, with `items`, `tool_calls`, `turn_end` and `usage`.
//! - `asks`: permission requests and questions.
//! - `connection`: JSON-RPC messages, one per line.

mod asks;
mod cancel;
mod connection;
mod conversation;
mod event_decoder;
mod handshake;
mod items;
mod prompt_content;
mod rate_limits;
#[cfg(test)]
mod tests;
mod tool_calls;
mod turn;
mod turn_end;
mod usage;

use qd_protocol::event::RunError;
use qd_protocol::worker::AgentSpec;
use tokio::net::unix::pipe;

use self::connection::CodexConnection;
use self::conversation::{CodexConversation, run_error};
use self::handshake::CodexHandshakeOptions;
use crate::agent_driver::AgentStart;
use crate::pricing::TokenPricing;
use crate::stdio_agent::{StdioAgent, StdioAgentStart, refused_start};
use crate::tool_server::ToolServer;

/// Starts the server and opens a thread, resuming the one named in the specification if there is one.
pub(crate) async fn start_codex_agent(
    start: AgentStart<'_>,
) -> Result<StdioAgent<CodexConversation<pipe::Receiver, pipe::Sender>>, RunError> {
    let start = StdioAgentStart::new(start)?;
    let (mut process, stdin, stdout) = start.start_process(start.program()).await?;
    let mut connection = CodexConnection::new(stdout, stdin, process.exited());
    let options = CodexHandshakeOptions::from_spec(start.spec);
    let handshake = handshake::perform_handshake(&mut connection, &options);
    match start.finish_step(&mut process, handshake).await? {
        Ok(handshake) => {
            let pricing = TokenPricing::from_spec(start.spec);
            let conversation =
                CodexConversation::new(connection, handshake, pricing, start.manifest.modes.clone());
            Ok(start.into_agent(process, conversation, true))
        }
        Err(refusal) => Err(refused_start(&mut process, run_error(&refusal)).await),
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
