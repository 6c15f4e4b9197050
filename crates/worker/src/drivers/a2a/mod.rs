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
mod http;
mod open;
mod remote;
mod round;
mod talk;
#[cfg(test)]
mod tests;
mod told;
mod words;

use std::sync::Arc;
use std::time::Duration;

use qd_catalog::REMOTE_TOKEN;
use qd_link::Closed;
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;

use self::address::Address;
use self::http::Client;
use self::remote::Remote;
use self::talk::Talk;
use crate::roots::NAMED_BY;
use crate::turn::{End, Prompt, Turn};

/// One remote agent.
pub(crate) struct A2a {
    talk: Talk,
}

impl A2a {
    /// Gets the agent's card within the limit. Nothing is begun at the other end before there is a prompt.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let failed = |why: String| RunError::new("agent_failed_to_start", why);
        let address = manifest.address().ok_or_else(|| failed("its manifest has no address".to_owned()))?;
        let address = Address::parse(address).map_err(failed)?;
        // What comes with the session wins over what every session gets.
        let variable = |name: &str| {
            let value = spec.env.get(name).or_else(|| manifest.startup.env.get(name));
            value.map(String::as_str).filter(|value| !value.trim().is_empty())
        };
        let client = Client::new(variable(NAMED_BY).map(Into::into));
        let found = Remote::find(client, &address, variable(REMOTE_TOKEN));
        let late = || format!("the agent's card did not come within {} s", limit.as_secs());
        let remote = match tokio::time::timeout(limit, found).await {
            Ok(found) => found.map_err(failed)?,
            Err(_) => return Err(RunError::new("agent_not_ready", late())),
        };
        Ok(Self { talk: Talk::new(Arc::new(remote), spec.agent_session_id.clone()) })
    }

    /// The agent's name for the conversation, by which it is gone on with. It gives one with its first answer.
    pub(crate) fn session_id(&self) -> Option<String> {
        self.talk.context().map(str::to_owned)
    }

    /// One turn. If it is dropped, its task is asked to stop, and not waited for.
    pub(crate) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<End, Closed> {
        self.talk.turn(turn, prompt).await.map(End::Stopped)
    }
}
