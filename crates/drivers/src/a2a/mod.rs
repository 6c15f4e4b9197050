//! Driver for remote agents that speak the Agent2Agent protocol (A2A), version 1.0 or 0.3, and are found by their agent
//! card. There is no process and no keeper: the driver holds only the id of the conversation, and during a turn one or
//! two connections.
//!
//! Layout, in reading order:
//! - `address`: where an agent is; `card`: how it is called there, and its credential.
//! - `conversation`: the loop of a turn; `turn`: the state of a turn and its task; `event_source`: where events of the
//!   task come from; `emitted_output`: what was already emitted.
//! - `messages`: both wire formats; `client`: the calls; `http`: the transport.

mod address;
mod card;
mod client;
mod conversation;
mod emitted_output;
mod event_source;
mod http;
mod messages;
#[cfg(test)]
mod tests;
mod turn;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use qd_catalog::REMOTE_TOKEN;
use qd_link::LinkClosed;
use qd_protocol::event::RunError;
use qd_protocol::link::AgentUpdate;
use qd_protocol::worker::AgentSpec;

use self::address::A2aAddress;
use self::client::A2aClient;
use self::conversation::A2aConversation;
use self::http::A2aHttpClient;
use crate::agent_driver::{AgentDriver, AgentStart};
use crate::root_certificates::CERT_FILE_VAR;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// A remote agent whose card was fetched.
pub(crate) struct A2aAgent {
    conversation: A2aConversation,
}

impl A2aAgent {
    /// Fetches the agent's card within the time limit. Nothing is started at the remote end before the first prompt.
    pub(crate) async fn start(start: AgentStart<'_>) -> Result<Self, RunError> {
        let limit = start.time_limit();
        let AgentStart { spec, manifest, .. } = start;
        let start_error = |reason: String| RunError::new("agent_failed_to_start", reason);
        let address = manifest
            .address()
            .ok_or_else(|| start_error("the agent's manifest has no address".to_owned()))?;
        let address = A2aAddress::parse(address).map_err(start_error)?;
        // The session's variables take precedence over the manifest's.
        let variable = |name: &str| {
            let value = spec.env.get(name).or_else(|| manifest.startup.env.get(name));
            value.map(String::as_str).filter(|value| !value.trim().is_empty())
        };
        let http_client = A2aHttpClient::new(variable(CERT_FILE_VAR).map(Into::into));
        let discovery = A2aClient::discover(http_client, &address, variable(REMOTE_TOKEN));
        let timeout_message = || format!("the agent's card did not arrive within {} s", limit.as_secs());
        let client = match tokio::time::timeout(limit, discovery).await {
            Ok(client) => client.map_err(start_error)?,
            Err(_) => return Err(RunError::new("agent_not_ready", timeout_message())),
        };
        Ok(Self { conversation: A2aConversation::new(Arc::new(client), spec.agent_session_id.clone()) })
    }
}

impl AgentDriver for A2aAgent {
    /// The id of the conversation is known after the agent's first response. A task in progress may refuse another
    /// message or make a new task of it, so no steer is promised.
    fn ready_update(&self, _: &AgentSpec) -> AgentUpdate {
        let agent_session_id = self.conversation.context_id().map(str::to_owned);
        AgentUpdate::Ready { agent_session_id, steers: false }
    }

    /// If the future is dropped, its task is cancelled without waiting for the result.
    fn turn<'a>(
        &'a mut self,
        turn: &'a DriverTurn<'a>,
        prompt: &'a DriverPrompt,
    ) -> BoxFuture<'a, Result<DriverTurnEnd, LinkClosed>> {
        Box::pin(async move { self.conversation.turn(turn, prompt).await.map(DriverTurnEnd::Stopped) })
    }
}
