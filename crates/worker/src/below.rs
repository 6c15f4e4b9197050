//! Everything that one agent started, in its keeper's hands: what a life and a place ask of it, in their words. If the
//! keeper is gone there is no answer that would be true, so none is given.

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::{Keeper, KeeperError, Sweep, Swept, What};
use qd_protocol::event::{Processes, RunError};

use crate::window::Window;

/// The keeper is of no use any more: it is dead, or what it says makes no sense.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the keeper is gone")]
pub(crate) struct KeeperGone;

/// What is below a worker and belongs to one agent.
#[derive(Debug)]
pub(crate) struct Below {
    keeper: Arc<Keeper>,
    /// Names of the agent's own helpers, which no turn has to answer for.
    spare: Vec<String>,
    /// Where people look at its terminal.
    window: Arc<Window>,
}

impl Below {
    pub(crate) fn new(keeper: Keeper, spare: Vec<String>, window: Arc<Window>) -> Self {
        Self { keeper: Arc::new(keeper), spare, window }
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    pub(crate) fn keeper(&self) -> &Arc<Keeper> {
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
    pub(crate) async fn begin_turn(&self) -> Result<(), KeeperGone> {
        self.keeper.begin_turn().await.map_err(gone)
    }

    /// The turn ended by itself, and what it left running is left on purpose.
    pub(crate) async fn end_turn(&self) -> Result<(), KeeperGone> {
        self.keeper.end_turn().await.map_err(gone)
    }

    /// Ends what the turn started.
    pub(crate) async fn sweep_turn(&self, grace: Duration) -> Result<Processes, KeeperGone> {
        self.sweep(What::Turn, grace).await.map(counted)
    }

    /// Ends the agent, and keeps what its turns left running on purpose; tells whether there is any of that.
    pub(crate) async fn sweep_agent(&self, grace: Duration) -> Result<bool, KeeperGone> {
        self.sweep(What::Agent, grace).await?;
        Ok(!self.keeper.left().await.map_err(gone)?.is_empty())
    }

    /// Ends the turn, if one is open, and the agent with it, and keeps what earlier turns left running on purpose; tells
    /// whether there is any of that. What the turn started is counted, but a survivor is one whosever it was.
    pub(crate) async fn end_agent(&self, grace: Duration) -> Result<(Processes, bool), KeeperGone> {
        // Both at once: an agent that lived on could start more, and is not the turn's.
        let (mut turn, agent) =
            tokio::try_join!(self.sweep(What::Turn, grace), self.sweep(What::Agent, grace))?;
        for survivor in agent.survivors {
            if !turn.survivors.contains(&survivor) {
                turn.survivors.push(survivor);
            }
        }
        self.end_turn().await?;
        Ok((counted(turn), !self.keeper.left().await.map_err(gone)?.is_empty()))
    }

    /// Ends everything.
    pub(crate) async fn sweep_all(&self, grace: Duration) -> Result<(), KeeperGone> {
        self.sweep(What::All, grace).await.map(drop)
    }

    async fn sweep(&self, what: What, grace: Duration) -> Result<Swept, KeeperGone> {
        let spare = if what == What::Turn { self.spare.clone() } else { Vec::new() };
        let swept = self.keeper.sweep(Sweep { what, grace, spare }).await.map_err(gone)?;
        if !swept.survivors.is_empty() {
            tracing::warn!(survivors = ?swept.survivors, "the kernel does not let go of these processes");
        }
        Ok(swept)
    }
}

fn counted(Swept { killed, survivors }: Swept) -> Processes {
    Processes { killed, survivors: u32::try_from(survivors.len()).unwrap_or(u32::MAX) }
}

impl From<KeeperGone> for RunError {
    fn from(KeeperGone: KeeperGone) -> Self {
        let message = "the process that keeps what the agent starts was lost; all of it has been ended";
        Self::new("keeper_lost", message)
    }
}

fn gone(error: KeeperError) -> KeeperGone {
    tracing::warn!(%error, "the keeper did not do as it was told");
    KeeperGone
}
