//! An agent that has been started, whatever its driver: start, turns, the time between them, stop.

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::KeeperHandle;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::limits::START_S;
use qd_protocol::link::AgentUpdate;
use qd_protocol::manifest::{DriverKind, Manifest};
use qd_protocol::worker::AgentSpec;

use crate::a2a::A2aAgent;
use crate::acp::AcpAgent;
use crate::agent_kind::AgentKind;
use crate::claude::ClaudeAgent;
use crate::codex::CodexAgent;
use crate::exec::ExecAgent;
use crate::peer::PeerWorkerAgent;
use crate::pty::PtyAgent;
use crate::terminal_window::TerminalWindow;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// What supervises the processes of an agent, and shows its terminal.
#[derive(Debug, Clone, Copy)]
pub struct AgentSupervision<'a> {
    pub keeper: &'a Arc<KeeperHandle>,
    pub window: &'a TerminalWindow,
}

/// An agent that has been started.
pub enum RunningAgent {
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
    /// Starts the agent, and waits until it accepts a prompt.
    pub async fn start(
        kind: AgentKind,
        spec: &AgentSpec,
        supervision: Option<AgentSupervision<'_>>,
    ) -> Result<Self, RunError> {
        let limit = |manifest: &Manifest| {
            Duration::from_secs(manifest.startup.init_timeout_seconds.unwrap_or(START_S))
        };
        match (kind, supervision) {
            (AgentKind::Echo, _) => Ok(Self::Echo),
            // Boxed, because the future of every start would otherwise be as large as the largest of them.
            (AgentKind::Remote(manifest), _) if manifest.driver() == DriverKind::Worker => {
                let peer = Box::pin(PeerWorkerAgent::start(spec, &manifest, limit(&manifest))).await?;
                Ok(Self::Peer(Box::new(peer)))
            }
            (AgentKind::Remote(manifest), _) => {
                let a2a = Box::pin(A2aAgent::start(spec, &manifest, limit(&manifest))).await?;
                Ok(Self::A2a(Box::new(a2a)))
            }
            (AgentKind::Process(manifest), Some(AgentSupervision { keeper, window })) => {
                let limit = limit(&manifest);
                let keeper = Arc::clone(keeper);
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
                        let pty = PtyAgent::start(spec, &manifest, keeper, window, limit).await?;
                        Ok(Self::Pty(Box::new(pty)))
                    }
                    other @ (DriverKind::Echo | DriverKind::A2a | DriverKind::Worker) => {
                        let message = format!("an agent with the driver {other} does not run below a keeper");
                        Err(RunError::new("agent_failed_to_start", message))
                    }
                }
            }
            (AgentKind::Process(_), None) => {
                Err(RunError::new("agent_failed_to_start", "the agent has no keeper"))
            }
        }
    }

    /// The update that reports the agent as ready.
    pub fn ready_update(&self, spec: &AgentSpec) -> AgentUpdate {
        match self {
            Self::Echo | Self::Exec(_) => {
                AgentUpdate::Ready { agent_session_id: spec.agent_session_id.clone(), steers: false }
            }
            Self::Acp(acp) => AgentUpdate::Ready { agent_session_id: acp.session_id(), steers: acp.steers() },
            Self::Claude(claude) => {
                AgentUpdate::Ready { agent_session_id: claude.session_id(), steers: claude.steers() }
            }
            Self::Codex(codex) => AgentUpdate::Ready { agent_session_id: codex.session_id(), steers: true },
            // The conversation has no id: it lives in the agent's process.
            Self::Pty(pty) => AgentUpdate::Ready { agent_session_id: None, steers: pty.steers() },
            // A task in progress may refuse another message or make a new task of it, so no steer is promised.
            Self::A2a(a2a) => AgentUpdate::Ready { agent_session_id: a2a.session_id(), steers: false },
            // The conversation has no id: it lives in the connection.
            Self::Peer(_) => AgentUpdate::Ready { agent_session_id: None, steers: true },
        }
    }

    /// Runs one turn. If the future is dropped, the agent must be ended.
    pub async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
        match self {
            Self::Echo => crate::echo::turn(turn, &prompt.text).await,
            Self::Acp(acp) => acp.turn(turn, prompt).await,
            Self::Claude(claude) => claude.turn(turn, prompt).await,
            Self::Exec(exec) => exec.turn(turn, prompt).await,
            Self::Codex(codex) => codex.turn(turn, prompt).await,
            Self::Pty(pty) => pty.turn(turn, prompt).await,
            Self::A2a(a2a) => a2a.turn(turn, prompt).await,
            Self::Peer(peer) => peer.turn(turn, prompt).await,
        }
    }

    /// Runs between turns. Resolves if the agent exits by itself.
    pub async fn idle(&mut self, output: &AgentOutput) -> RunError {
        match self {
            // Nothing of the agent runs here between turns.
            Self::Echo | Self::Exec(_) | Self::A2a(_) => std::future::pending().await,
            Self::Acp(acp) => Box::pin(acp.idle(output)).await,
            Self::Claude(claude) => Box::pin(claude.idle(output)).await,
            Self::Codex(codex) => Box::pin(codex.idle(output)).await,
            Self::Pty(pty) => Box::pin(pty.idle()).await,
            Self::Peer(peer) => Box::pin(peer.idle()).await,
        }
    }

    /// Stops the agent and gives it time to exit by itself.
    pub async fn stop(self) {
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
