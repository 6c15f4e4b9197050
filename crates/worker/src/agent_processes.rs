//! The processes that one agent started, as its keeper knows them: sweeping a turn, the agent or everything. If the
//! keeper is lost, no answer would be true, so every operation fails with [`KeeperLostError`].

use std::sync::Arc;
use std::time::Duration;

use qd_drivers::agent_driver::AgentSupervision;
use qd_drivers::terminal_window::TerminalWindow;
use qd_keeper::{KeeperError, KeeperHandle, ProcessIdentity, SweepRequest, SweepResult, SweepScope};
use qd_protocol::event::{ProcessCleanup, RunError, SurvivingProcess};

/// How many survivors of a sweep are named. More would only make the event longer.
const SURVIVORS_NAMED_MAX: usize = 100;

/// The keeper cannot be used any more: it is dead, or its replies make no sense.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the keeper is gone")]
pub(crate) struct KeeperLostError;

/// The processes of one agent, all below one keeper.
#[derive(Debug)]
pub(crate) struct AgentProcesses {
    keeper: Arc<KeeperHandle>,
    /// Names of the agent's own helper processes, which a sweep of a turn spares.
    helper_names: Vec<String>,
    /// Serves people who watch the agent's terminal.
    window: Arc<TerminalWindow>,
}

impl AgentProcesses {
    pub(crate) fn new(keeper: KeeperHandle, helper_names: Vec<String>, window: Arc<TerminalWindow>) -> Self {
        Self { keeper: Arc::new(keeper), helper_names, window }
    }

    /// What drivers need to start processes.
    pub(crate) fn supervision(&self) -> AgentSupervision<'_> {
        AgentSupervision { keeper: &self.keeper, window: &self.window }
    }

    pub(crate) fn keeper(&self) -> &Arc<KeeperHandle> {
        &self.keeper
    }

    /// Ends everything and the keeper itself, and returns when that is done.
    pub(crate) async fn close(processes: Arc<Self>) {
        let sole_owner = Arc::into_inner(processes).and_then(|processes| Arc::into_inner(processes.keeper));
        match sole_owner {
            Some(keeper) => keeper.close().await,
            // The keeper and its processes end when its last owner drops it.
            None => tracing::warn!("a keeper could not be closed because it is still in use"),
        }
    }

    /// Processes started from now on belong to a turn.
    pub(crate) async fn begin_turn(&self) -> Result<(), KeeperLostError> {
        self.keeper.begin_turn().await.map_err(keeper_lost)
    }

    /// The turn has ended. Processes that it left running count as left on purpose. Returns whether there are any.
    pub(crate) async fn end_turn(&self) -> Result<bool, KeeperLostError> {
        self.keeper.end_turn(self.helper_names.clone()).await.map_err(keeper_lost)
    }

    /// Ends the processes that the turn started, or those that it left if it has ended already.
    pub(crate) async fn sweep_turn(
        &self,
        has_ended: bool,
        grace: Duration,
    ) -> Result<ProcessCleanup, KeeperLostError> {
        let scope = if has_ended { SweepScope::EndedTurn } else { SweepScope::Turn };
        self.sweep(scope, grace).await.map(process_cleanup)
    }

    /// Ends the agent, but not what its turns left running on purpose. Returns whether there are such leftovers.
    pub(crate) async fn sweep_agent(&self, grace: Duration) -> Result<bool, KeeperLostError> {
        self.sweep(SweepScope::Agent, grace).await?;
        Ok(!self.keeper.list_leftovers().await.map_err(keeper_lost)?.is_empty())
    }

    /// Ends the open turn, if there is one, and the agent, but not what earlier turns left running on purpose. Also
    /// returns whether there are such leftovers. Killed processes are counted for the turn, survivors for both sweeps.
    pub(crate) async fn end_agent(&self, grace: Duration) -> Result<(ProcessCleanup, bool), KeeperLostError> {
        // Both at once: the agent does not belong to the turn, and could start more processes while the turn is swept.
        let (mut turn, agent) =
            tokio::try_join!(self.sweep(SweepScope::Turn, grace), self.sweep(SweepScope::Agent, grace))?;
        for survivor in agent.survivors {
            if !turn.survivors.contains(&survivor) {
                turn.survivors.push(survivor);
            }
        }
        self.end_turn().await?;
        Ok((process_cleanup(turn), !self.keeper.list_leftovers().await.map_err(keeper_lost)?.is_empty()))
    }

    pub(crate) async fn sweep_all(&self, grace: Duration) -> Result<(), KeeperLostError> {
        self.sweep(SweepScope::All, grace).await.map(drop)
    }

    async fn sweep(&self, scope: SweepScope, grace: Duration) -> Result<SweepResult, KeeperLostError> {
        let spare = match scope {
            SweepScope::Turn | SweepScope::EndedTurn => self.helper_names.clone(),
            SweepScope::Agent | SweepScope::All => Vec::new(),
        };
        let swept = self.keeper.sweep(SweepRequest { scope, grace, spare }).await.map_err(keeper_lost)?;
        if !swept.survivors.is_empty() {
            tracing::warn!(survivors = ?swept.survivors, "these processes could not be killed");
        }
        Ok(swept)
    }
}

/// What a sweep did, as the run reports it.
pub(crate) fn process_cleanup(SweepResult { killed, survivors }: SweepResult) -> ProcessCleanup {
    let name =
        |process: &ProcessIdentity| SurvivingProcess { pid: Some(process.pid), name: process.name.clone() };
    ProcessCleanup {
        killed,
        survivors: u32::try_from(survivors.len()).unwrap_or(u32::MAX),
        surviving: survivors.iter().take(SURVIVORS_NAMED_MAX).map(name).collect(),
    }
}

impl From<KeeperLostError> for RunError {
    fn from(KeeperLostError: KeeperLostError) -> Self {
        let message =
            "the keeper, which supervises the agent's processes, was lost; all of them have been ended";
        Self::new("keeper_lost", message)
    }
}

fn keeper_lost(error: KeeperError) -> KeeperLostError {
    tracing::warn!(%error, "the keeper failed a request");
    KeeperLostError
}
