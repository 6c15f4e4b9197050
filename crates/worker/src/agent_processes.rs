//! Everything that one agent started, in its keeper's hands: what a life and a place ask of it, in their words. If the
//! keeper is gone there is no answer that would be true, so none is given.

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::{KeeperError, KeeperHandle, SweepRequest, SweepResult, SweepScope};
use qd_protocol::event::{ProcessCleanup, RunError};

use crate::terminal_window::TerminalWindow;

/// The keeper is of no use any more: it is dead, or what it says makes no sense.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the keeper is gone")]
pub(crate) struct KeeperLostError;

/// What is below a worker and belongs to one agent.
#[derive(Debug)]
pub(crate) struct AgentProcesses {
    keeper: Arc<KeeperHandle>,
    /// Names of the agent's own helpers, which no turn has to answer for.
    helper_names: Vec<String>,
    /// Where people look at its terminal.
    window: Arc<TerminalWindow>,
}

impl AgentProcesses {
    pub(crate) fn new(keeper: KeeperHandle, helper_names: Vec<String>, window: Arc<TerminalWindow>) -> Self {
        Self { keeper: Arc::new(keeper), helper_names, window }
    }

    pub(crate) fn window(&self) -> &TerminalWindow {
        &self.window
    }

    pub(crate) fn keeper(&self) -> &Arc<KeeperHandle> {
        &self.keeper
    }

    /// Ends everything and the keeper itself, and comes back when that is done.
    pub(crate) async fn close(below: Arc<Self>) {
        let alone = Arc::into_inner(below).and_then(|below| Arc::into_inner(below.keeper));
        match alone {
            Some(keeper) => keeper.close().await,
            // Its last owner lets it go, and so the rest of it.
            None => tracing::warn!("a keeper could not be closed: somebody else holds it"),
        }
    }

    /// What starts from now on belongs to a turn.
    pub(crate) async fn begin_turn(&self) -> Result<(), KeeperLostError> {
        self.keeper.begin_turn().await.map_err(keeper_lost)
    }

    /// The turn ended by itself, and what it left running is left on purpose.
    pub(crate) async fn end_turn(&self) -> Result<(), KeeperLostError> {
        self.keeper.end_turn().await.map_err(keeper_lost)
    }

    /// Ends what the turn started.
    pub(crate) async fn sweep_turn(&self, grace: Duration) -> Result<ProcessCleanup, KeeperLostError> {
        self.sweep(SweepScope::Turn, grace).await.map(process_counts)
    }

    /// Ends the agent, and keeps what its turns left running on purpose; tells whether there is any of that.
    pub(crate) async fn sweep_agent(&self, grace: Duration) -> Result<bool, KeeperLostError> {
        self.sweep(SweepScope::Agent, grace).await?;
        Ok(!self.keeper.list_leftovers().await.map_err(keeper_lost)?.is_empty())
    }

    /// Ends the turn, if one is open, and the agent with it, and keeps what earlier turns left running on purpose; tells
    /// whether there is any of that. What the turn started is counted, but a survivor is one whosever it was.
    pub(crate) async fn end_agent(&self, grace: Duration) -> Result<(ProcessCleanup, bool), KeeperLostError> {
        // Both at once: an agent that lived on could start more, and is not the turn's.
        let (mut turn, agent) =
            tokio::try_join!(self.sweep(SweepScope::Turn, grace), self.sweep(SweepScope::Agent, grace))?;
        for survivor in agent.survivors {
            if !turn.survivors.contains(&survivor) {
                turn.survivors.push(survivor);
            }
        }
        self.end_turn().await?;
        Ok((process_counts(turn), !self.keeper.list_leftovers().await.map_err(keeper_lost)?.is_empty()))
    }

    /// Ends everything.
    pub(crate) async fn sweep_all(&self, grace: Duration) -> Result<(), KeeperLostError> {
        self.sweep(SweepScope::All, grace).await.map(drop)
    }

    async fn sweep(&self, what: SweepScope, grace: Duration) -> Result<SweepResult, KeeperLostError> {
        let spare = if what == SweepScope::Turn { self.helper_names.clone() } else { Vec::new() };
        let swept =
            self.keeper.sweep(SweepRequest { scope: what, grace, spare }).await.map_err(keeper_lost)?;
        if !swept.survivors.is_empty() {
            tracing::warn!(survivors = ?swept.survivors, "the kernel does not let go of these processes");
        }
        Ok(swept)
    }
}

fn process_counts(SweepResult { killed, survivors }: SweepResult) -> ProcessCleanup {
    ProcessCleanup { killed, survivors: u32::try_from(survivors.len()).unwrap_or(u32::MAX) }
}

impl From<KeeperLostError> for RunError {
    fn from(KeeperLostError: KeeperLostError) -> Self {
        let message = "the process that keeps what the agent starts was lost; all of it has been ended";
        Self::new("keeper_lost", message)
    }
}

fn keeper_lost(error: KeeperError) -> KeeperLostError {
    tracing::warn!(%error, "the keeper did not do as it was told");
    KeeperLostError
}
