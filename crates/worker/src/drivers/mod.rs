//! One room per way to reach an agent. A driver turns one prompt into what its agent says; when the turn is stopped
//! from outside, its future is dropped. What is peculiar to an agent stands in its manifest; no driver knows one by name.
//!
//! - [`Agent`]: any of them, from its start to its end.
//! - `process`: an agent's process, below the keeper; `lines`: its two streams; `telling`: what is said of a turn;
//!   `floor`: what is said and asked in one; `price`: what its tokens cost; `tools`: those of `qd mcp`, for the agent;
//!   `dial`: connections to one that is elsewhere.
//! - `stage` and `recorded`: what the drivers' tests share.

mod a2a;
pub(crate) mod acp;
mod claude;
mod codex;
mod dial;
pub(crate) mod echo;
mod exec;
mod floor;
mod lines;
mod peer;
mod price;
mod process;
pub(crate) mod pty;
#[cfg(test)]
mod recorded;
#[cfg(test)]
mod stage;
mod telling;
pub(crate) mod tools;

use std::sync::Arc;
use std::time::Duration;

use qd_link::{Closed, Voice};
use qd_protocol::event::RunError;
use qd_protocol::limits::START_S;
use qd_protocol::link::Up;
use qd_protocol::manifest::{Driver, Manifest};
use qd_protocol::worker::AgentSpec;

use self::a2a::A2a;
use self::acp::Acp;
use self::claude::Claude;
use self::codex::Codex;
use self::exec::Exec;
use self::peer::Peer;
use self::pty::Pty;
use crate::below::Below;
use crate::kinds::Kind;
use crate::turn::{End, Prompt, Turn};

/// An agent that has been started.
pub(crate) enum Agent {
    Echo,
    Acp(Box<Acp>),
    Claude(Box<Claude>),
    Exec(Box<Exec>),
    Codex(Box<Codex>),
    Pty(Box<Pty>),
    A2a(Box<A2a>),
    Peer(Box<Peer>),
}

impl Agent {
    /// Starts it, and waits until it takes a prompt.
    pub(crate) async fn start(
        kind: Kind,
        spec: &AgentSpec,
        below: Option<&Arc<Below>>,
    ) -> Result<Self, RunError> {
        let limit = |manifest: &Manifest| {
            Duration::from_secs(manifest.startup.init_timeout_seconds.unwrap_or(START_S))
        };
        match (kind, below) {
            (Kind::Echo, _) => Ok(Self::Echo),
            // Both boxed, since the start of every agent has room for the largest of all.
            (Kind::Remote(manifest), _) if manifest.driver() == Driver::Worker => {
                let peer = Box::pin(Peer::start(spec, &manifest, limit(&manifest))).await?;
                Ok(Self::Peer(Box::new(peer)))
            }
            (Kind::Remote(manifest), _) => {
                let a2a = Box::pin(A2a::start(spec, &manifest, limit(&manifest))).await?;
                Ok(Self::A2a(Box::new(a2a)))
            }
            (Kind::Driven(manifest), Some(below)) => {
                let limit = limit(&manifest);
                let keeper = Arc::clone(below.keeper());
                match manifest.driver() {
                    Driver::Acp => {
                        let acp = Acp::start(spec, &manifest, keeper, limit).await?;
                        Ok(Self::Acp(Box::new(acp)))
                    }
                    Driver::Claude => {
                        let claude = Claude::start(spec, &manifest, keeper, limit).await?;
                        Ok(Self::Claude(Box::new(claude)))
                    }
                    Driver::Exec => Ok(Self::Exec(Box::new(Exec::new(spec, manifest, keeper)))),
                    Driver::Codex => {
                        let codex = Codex::start(spec, &manifest, keeper, limit).await?;
                        Ok(Self::Codex(Box::new(codex)))
                    }
                    Driver::Pty => {
                        let pty = Pty::start(spec, &manifest, keeper, below.window(), limit).await?;
                        Ok(Self::Pty(Box::new(pty)))
                    }
                    other @ (Driver::Echo | Driver::A2a | Driver::Worker) => {
                        let message = format!("an agent by {other} has nothing below a keeper");
                        Err(RunError::new("agent_failed_to_start", message))
                    }
                }
            }
            (Kind::Driven(_), None) => Err(RunError::new("agent_failed_to_start", "the agent has no keeper")),
        }
    }

    /// What is told of it then.
    pub(crate) fn ready(&self, spec: &AgentSpec) -> Up {
        match self {
            Self::Echo | Self::Exec(_) => {
                Up::Ready { agent_session_id: spec.agent_session_id.clone(), steers: false }
            }
            Self::Acp(acp) => Up::Ready { agent_session_id: acp.session_id(), steers: acp.steers() },
            Self::Claude(claude) => {
                Up::Ready { agent_session_id: claude.session_id(), steers: claude.steers() }
            }
            Self::Codex(codex) => Up::Ready { agent_session_id: codex.session_id(), steers: true },
            // It has no name for its conversation: that is its process.
            Self::Pty(pty) => Up::Ready { agent_session_id: None, steers: pty.steers() },
            // A task at work may refuse another message, or make another task of it: no steer is promised.
            Self::A2a(a2a) => Up::Ready { agent_session_id: a2a.session_id(), steers: false },
            // Its conversation is its connection.
            Self::Peer(_) => Up::Ready { agent_session_id: None, steers: true },
        }
    }

    /// One turn.
    pub(crate) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<End, Closed> {
        match self {
            Self::Echo => echo::turn(turn, &prompt.text).await,
            Self::Acp(acp) => acp.turn(turn, prompt).await,
            Self::Claude(claude) => claude.turn(turn, prompt).await,
            Self::Exec(exec) => exec.turn(turn, prompt).await,
            Self::Codex(codex) => codex.turn(turn, prompt).await,
            Self::Pty(pty) => pty.turn(turn, prompt).await,
            Self::A2a(a2a) => a2a.turn(turn, prompt).await,
            Self::Peer(peer) => peer.turn(turn, prompt).await,
        }
    }

    /// Between turns; resolves if the agent ends by itself.
    pub(crate) async fn idle(&mut self, voice: &Voice) -> RunError {
        match self {
            // Between turns nothing of it is here.
            Self::Echo | Self::Exec(_) | Self::A2a(_) => std::future::pending().await,
            Self::Acp(acp) => Box::pin(acp.idle(voice)).await,
            Self::Claude(claude) => Box::pin(claude.idle(voice)).await,
            Self::Codex(codex) => Box::pin(codex.idle(voice)).await,
            Self::Pty(pty) => Box::pin(pty.idle()).await,
            Self::Peer(peer) => Box::pin(peer.idle()).await,
        }
    }

    /// Ends it politely.
    pub(crate) async fn stop(self) {
        match self {
            Self::Echo | Self::Exec(_) | Self::A2a(_) => {}
            Self::Acp(acp) => acp.stop().await,
            Self::Claude(claude) => claude.stop().await,
            Self::Codex(codex) => codex.stop().await,
            Self::Pty(pty) => pty.stop().await,
            Self::Peer(peer) => peer.stop().await,
        }
    }
}
