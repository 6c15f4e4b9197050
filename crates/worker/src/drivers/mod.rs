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
mod dialer;
pub(crate) mod echo;
mod emit;
mod exec;
#[cfg(test)]
mod harness;
mod line_transport;
mod peer;
mod pricing;
mod process;
pub(crate) mod pty;
#[cfg(test)]
mod recording;
pub(crate) mod tool_server;
mod turn_state;

use std::sync::Arc;
use std::time::Duration;

use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::limits::START_S;
use qd_protocol::link::AgentUpdate;
use qd_protocol::manifest::{DriverKind, Manifest};
use qd_protocol::worker::AgentSpec;

use self::a2a::A2aAgent;
use self::acp::AcpAgent;
use self::claude::ClaudeAgent;
use self::codex::CodexAgent;
use self::exec::ExecAgent;
use self::peer::PeerWorkerAgent;
use self::pty::PtyAgent;
use crate::agent_kind::AgentKind;
use crate::agent_processes::AgentProcesses;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// An agent that has been started.
pub(crate) enum RunningAgent {
    Echo,
    Acp(Box<AcpAgent>),
    Claude(Box<ClaudeAgent>),
    Exec(Box<ExecAgent>),
    Codex(Box<CodexAgent>),
    Pty(Box<PtyAgent>),
    A2a(Box<A2aAgent>),
    Peer(Box<PeerWorkerAgent>),
}

impl RunningAgent {
    /// Starts it, and waits until it takes a prompt.
    pub(crate) async fn start(
        kind: AgentKind,
        spec: &AgentSpec,
        below: Option<&Arc<AgentProcesses>>,
    ) -> Result<Self, RunError> {
        let limit = |manifest: &Manifest| {
            Duration::from_secs(manifest.startup.init_timeout_seconds.unwrap_or(START_S))
        };
        match (kind, below) {
            (AgentKind::Echo, _) => Ok(Self::Echo),
            // Both boxed, since the start of every agent has room for the largest of all.
            (AgentKind::Remote(manifest), _) if manifest.driver() == DriverKind::Worker => {
                let peer = Box::pin(PeerWorkerAgent::start(spec, &manifest, limit(&manifest))).await?;
                Ok(Self::Peer(Box::new(peer)))
            }
            (AgentKind::Remote(manifest), _) => {
                let a2a = Box::pin(A2aAgent::start(spec, &manifest, limit(&manifest))).await?;
                Ok(Self::A2a(Box::new(a2a)))
            }
            (AgentKind::Process(manifest), Some(below)) => {
                let limit = limit(&manifest);
                let keeper = Arc::clone(below.keeper());
                match manifest.driver() {
                    DriverKind::Acp => {
                        let acp = AcpAgent::start(spec, &manifest, keeper, limit).await?;
                        Ok(Self::Acp(Box::new(acp)))
                    }
                    DriverKind::Claude => {
                        let claude = ClaudeAgent::start(spec, &manifest, keeper, limit).await?;
                        Ok(Self::Claude(Box::new(claude)))
                    }
                    DriverKind::Exec => Ok(Self::Exec(Box::new(ExecAgent::new(spec, manifest, keeper)))),
                    DriverKind::Codex => {
                        let codex = CodexAgent::start(spec, &manifest, keeper, limit).await?;
                        Ok(Self::Codex(Box::new(codex)))
                    }
                    DriverKind::Pty => {
                        let pty = PtyAgent::start(spec, &manifest, keeper, below.window(), limit).await?;
                        Ok(Self::Pty(Box::new(pty)))
                    }
                    other @ (DriverKind::Echo | DriverKind::A2a | DriverKind::Worker) => {
                        let message = format!("an agent by {other} has nothing below a keeper");
                        Err(RunError::new("agent_failed_to_start", message))
                    }
                }
            }
            (AgentKind::Process(_), None) => {
                Err(RunError::new("agent_failed_to_start", "the agent has no keeper"))
            }
        }
    }

    /// What is told of it then.
    pub(crate) fn ready_update(&self, spec: &AgentSpec) -> AgentUpdate {
        match self {
            Self::Echo | Self::Exec(_) => {
                AgentUpdate::Ready { agent_session_id: spec.agent_session_id.clone(), steers: false }
            }
            Self::Acp(acp) => AgentUpdate::Ready { agent_session_id: acp.session_id(), steers: acp.steers() },
            Self::Claude(claude) => {
                AgentUpdate::Ready { agent_session_id: claude.session_id(), steers: claude.steers() }
            }
            Self::Codex(codex) => AgentUpdate::Ready { agent_session_id: codex.session_id(), steers: true },
            // It has no name for its conversation: that is its process.
            Self::Pty(pty) => AgentUpdate::Ready { agent_session_id: None, steers: pty.steers() },
            // A task at work may refuse another message, or make another task of it: no steer is promised.
            Self::A2a(a2a) => AgentUpdate::Ready { agent_session_id: a2a.session_id(), steers: false },
            // Its conversation is its connection.
            Self::Peer(_) => AgentUpdate::Ready { agent_session_id: None, steers: true },
        }
    }

    /// One turn.
    pub(crate) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
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
    pub(crate) async fn idle(&mut self, voice: &AgentOutput) -> RunError {
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
