//! The driver for remote agents that speak the Agent2Agent protocol, 1.0 or 0.3, found by their card. There is no process
//! and no keeper: all that is held here is a name for the conversation, and in a turn one connection or two.
//!
//! Layout, in reading order:
//! - `address`: where an agent is; `card`: how it is called there, and what lets us in.
//! - `talk`: one turn, in one loop; `round`: what becomes of its task; `open`: what that is heard on; `told`: what
//!   was told of it.
//! - `words`: both wire forms; `remote`: the calls; `http`: what carries them.

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
use std::time::Duration;

use qd_catalog::REMOTE_TOKEN;
use qd_link::LinkClosed;
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;

use self::address::A2aAddress;
use self::client::A2aClient;
use self::conversation::A2aConversation;
use self::http::A2aHttpClient;
use crate::root_certificates::CERT_FILE_VAR;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// One remote agent.
pub(crate) struct A2aAgent {
    conversation: A2aConversation,
}

impl A2aAgent {
    /// Gets the agent's card within the limit. Nothing is begun at the other end before there is a prompt.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let failed = |why: String| RunError::new("agent_failed_to_start", why);
        let address = manifest.address().ok_or_else(|| failed("its manifest has no address".to_owned()))?;
        let address = A2aAddress::parse(address).map_err(failed)?;
        // What comes with the session wins over what every session gets.
        let variable = |name: &str| {
            let value = spec.env.get(name).or_else(|| manifest.startup.env.get(name));
            value.map(String::as_str).filter(|value| !value.trim().is_empty())
        };
        let client = A2aHttpClient::new(variable(CERT_FILE_VAR).map(Into::into));
        let found = A2aClient::discover(client, &address, variable(REMOTE_TOKEN));
        let late = || format!("the agent's card did not come within {} s", limit.as_secs());
        let remote = match tokio::time::timeout(limit, found).await {
            Ok(found) => found.map_err(failed)?,
            Err(_) => return Err(RunError::new("agent_not_ready", late())),
        };
        Ok(Self { conversation: A2aConversation::new(Arc::new(remote), spec.agent_session_id.clone()) })
    }

    /// The agent's name for the conversation, by which it is gone on with. It gives one with its first answer.
    pub(crate) fn session_id(&self) -> Option<String> {
        self.conversation.context_id().map(str::to_owned)
    }

    /// One turn. If it is dropped, its task is asked to stop, and not waited for.
    pub(crate) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
        self.conversation.turn(turn, prompt).await.map(DriverTurnEnd::Stopped)
    }
}
