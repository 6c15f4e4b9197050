//! Driver for agents that speak the Agent Client Protocol (ACP) over stdio. What it shares with
//! other agents on stdio is in `stdio_agent`.
//!
//! Layout, in reading order:
//! - `profile`: the quirks of one agent, taken from its manifest.
//! - `handshake`: initializes the agent and opens a new or an old session in the right mode; `session_settings`: what the
//!   agent reports then; `settings_guard`: keeps the mode and the options in which the agent asks.
//! - `conversation`: the loops for a turn and for the time between turns; `turn`: the state of one turn; `turn_end`:
//!   its outcome.
//! - `prompt_content`: prompts; `event_decoder`: updates, with `tool_calls`, `tool_names`, `tool_inputs`, `diff` and
//!   `usage`; `asks`: permission requests and questions.
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
mod session_settings;
mod settings_guard;
mod terminals;
#[cfg(test)]
mod tests;
mod tool_calls;
mod tool_inputs;
mod tool_names;
mod turn;
mod turn_end;
mod usage;

use std::sync::Arc;
use std::time::Duration;

use qd_protocol::Millis;
use qd_protocol::event::RunError;
use qd_protocol::manifest::{Manifest, McpTransport};
use qd_protocol::worker::AgentSpec;
use tokio::net::unix::pipe;

use self::client_service::AcpClientService;
use self::connection::AcpConnection;
use self::conversation::AcpConversation;
use self::handshake::AcpHandshakeOptions;
use self::profile::AcpProfile;
use self::turn_end::run_error;
use crate::agent_driver::AgentStart;
use crate::stdio_agent::{StdioAgent, StdioAgentStart, refused_start};
use crate::tool_gateway::ToolGateway;
use crate::tool_server::ToolServer;

/// Starts the agent's process and opens its session, resuming the one named in the specification if there is one.
pub(crate) async fn start_acp_agent(
    start: AgentStart<'_>,
) -> Result<StdioAgent<AcpConversation<pipe::Receiver, pipe::Sender>>, RunError> {
    if start.manifest.resume.next_minute && start.spec.agent_session_id.is_some() {
        wait_for_next_minute(start.spec.last_active).await;
    }
    let start = StdioAgentStart::new(start)?;
    let (mut process, stdin, stdout) = start.start_process(start.program()).await?;
    let mut connection = AcpConnection::new(stdout, stdin, process.exited());
    let service = AcpClientService::for_agent(start.spec, Some(Arc::clone(&start.keeper)));
    let profile = AcpProfile::from_manifest(&start.manifest, start.spec);
    let mut options = AcpHandshakeOptions::from_spec(start.spec, profile, service.runs_commands());
    options.tool_gateway = open_tool_gateway(&start.manifest, start.spec).await;
    let handshake = handshake::perform_handshake(&mut connection, &options);
    match start.finish_step(&mut process, handshake).await? {
        Ok(handshake) => {
            let mut conversation = AcpConversation::new(connection, handshake, service);
            conversation.hold_tool_gateway(options.tool_gateway);
            let steers = start.manifest.can_steer();
            Ok(start.into_agent(process, conversation, steers))
        }
        Err(refusal) => Err(refused_start(&mut process, run_error(&refusal)).await),
    }
}

/// Opens a gateway to our tools, if the agent takes no MCP server on stdio. If that fails, the agent starts without the
/// tools.
async fn open_tool_gateway(manifest: &Manifest, spec: &AgentSpec) -> Option<ToolGateway> {
    let access = spec.mcp.as_deref().filter(|_| manifest.turn.mcp_transport == McpTransport::Http)?;
    match ToolGateway::open(access).await {
        Ok(gateway) => Some(gateway),
        Err(error) => {
            tracing::warn!(session = %spec.session, %error, "an agent starts without the tools of `qd mcp`");
            None
        }
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
            earlier_cost_usd: spec.conversation_cost_usd,
            profile,
            runs_commands,
            tools: ToolServer::from_spec(spec),
            tool_gateway: None,
        }
    }
}
