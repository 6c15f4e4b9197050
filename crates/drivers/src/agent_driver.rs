//! What a driver is to the worker: it starts an agent, says when the agent is ready, runs its turns, serves it between
//! turns, and stops it. Queueing, deadlines of a turn and killing belong to the worker.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use qd_keeper::KeeperHandle;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::limits::START_S;
use qd_protocol::link::AgentUpdate;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;

use crate::terminal_window::TerminalWindow;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// An agent that has been started and accepts prompts. The futures are boxed, because the worker does not know which
/// driver it has; one that never resolves, as between the turns of `echo`, takes no memory.
pub trait AgentDriver: Send {
    /// The update that reports the agent as ready. Asked for again after each turn, because the id of a conversation
    /// may change.
    fn ready_update(&self, spec: &AgentSpec) -> AgentUpdate;

    /// Runs one turn. If the future is dropped, the agent is in an unknown state and must be ended.
    fn turn<'a>(
        &'a mut self,
        turn: &'a DriverTurn<'a>,
        prompt: &'a DriverPrompt,
    ) -> BoxFuture<'a, Result<DriverTurnEnd, LinkClosed>>;

    /// Serves the agent between turns, and resolves if it exits by itself. Dropping the future loses nothing. An agent
    /// of which nothing runs here between turns keeps this default.
    fn idle<'a>(&'a mut self, _output: &'a AgentOutput) -> BoxFuture<'a, RunError> {
        Box::pin(std::future::pending())
    }

    /// Stops the agent and gives it time to exit by itself. What stays is ended by the keeper.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// What a driver starts its agent with.
#[derive(Debug)]
pub(crate) struct AgentStart<'a> {
    pub(crate) spec: &'a AgentSpec,
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) supervision: Option<AgentSupervision<'a>>,
}

/// What supervises the processes of an agent, and shows its terminal.
#[derive(Debug, Clone, Copy)]
pub struct AgentSupervision<'a> {
    pub keeper: &'a Arc<KeeperHandle>,
    pub window: &'a TerminalWindow,
}

impl<'a> AgentStart<'a> {
    /// How long the agent may take until it is ready.
    pub(crate) fn time_limit(&self) -> Duration {
        Duration::from_secs(self.manifest.startup.init_timeout_seconds.unwrap_or(START_S))
    }

    /// The keeper and the window of an agent that is a process.
    pub(crate) fn supervision(&self) -> Result<AgentSupervision<'a>, RunError> {
        self.supervision.ok_or_else(|| RunError::new("agent_failed_to_start", "the agent has no keeper"))
    }
}
