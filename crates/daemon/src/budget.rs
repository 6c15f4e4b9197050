//! Whose money is spent. A budget counts its session or fleet and all below it; the sums come from the journal's rows, so
//! nothing has to be passed up a tree, and what is remembered here is only a verdict that any actor can read.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use qd_core::session::SessionCommand;
use qd_journal::{JournalReadError, SessionFilter, SessionKey};
use qd_protocol::ApiError;

use crate::daemon::{Daemon, read_failed};

/// The sessions whose own budget is spent.
#[derive(Debug, Default)]
pub(crate) struct SpentBudgets {
    spent: Mutex<HashSet<SessionKey>>,
}

impl SpentBudgets {
    /// Whether any of these is spent: a session's own budget and those above it.
    pub(crate) fn any_spent(&self, line: &[SessionKey]) -> bool {
        let spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        !spent.is_empty() && line.iter().any(|key| spent.contains(key))
    }

    /// Remembers a verdict; true if it is news that this one is spent.
    fn set_spent(&self, key: SessionKey, is_spent: bool) -> bool {
        let mut spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        if is_spent {
            return spent.insert(key);
        }
        spent.remove(&key);
        false
    }
}

/// What a session, or a fleet, and all below it may cost.
struct TreeBudget {
    key: SessionKey,
    budget_usd: Option<f64>,
}

impl Daemon {
    /// A session's own key and those of whatever is above it: sessions, and the fleet of the highest.
    pub(crate) async fn session_lineage(&self, session: SessionKey) -> Result<Vec<SessionKey>, ApiError> {
        let purses = self.tree_budgets(session).await.map_err(read_failed)?;
        Ok(purses.into_iter().map(|purse| purse.key).collect())
    }

    async fn tree_budgets(&self, session: SessionKey) -> Result<Vec<TreeBudget>, JournalReadError> {
        let rows = self.journal.lineage(session).await?;
        let highest = rows.last().and_then(|row| row.parent);
        let mut purses: Vec<TreeBudget> =
            rows.iter().map(|row| TreeBudget { key: row.key, budget_usd: row.budget_usd }).collect();
        if let Some(key) = highest
            && let Some(fleet) = self.journal.fleet_by_key(key).await?
        {
            purses.push(TreeBudget { key, budget_usd: fleet.budget_usd });
        }
        Ok(purses)
    }

    /// Judges the budgets of a session and of those above it anew. Whoever is newly over has every live run of its
    /// tree stopped; the verdict is set before the first of them is told, so none can start behind our back.
    pub(crate) async fn check_budgets(self: &Arc<Self>, session: SessionKey) -> Result<(), JournalReadError> {
        for TreeBudget { key, budget_usd } in self.tree_budgets(session).await? {
            let is_spent = match budget_usd {
                Some(budget) => self.journal.tree_cost(key).await? >= budget,
                None => false,
            };
            if self.budgets.set_spent(key, is_spent) {
                let daemon = Arc::clone(self);
                self.spawn(async move { daemon.stop_tree(key).await });
            }
        }
        Ok(())
    }

    /// Dollars that are left to a session by its own budget and those above it; `None`: there is no budget.
    pub(crate) async fn budget_left(&self, line: &[SessionKey]) -> Option<f64> {
        let mut least: Option<f64> = None;
        for TreeBudget { key, budget_usd } in self.tree_budgets(*line.first()?).await.ok()? {
            let Some(budget) = budget_usd else { continue };
            let left = (budget - self.journal.tree_cost(key).await.ok()?).max(0.0);
            least = Some(least.map_or(left, |least| least.min(left)));
        }
        least
    }

    async fn stop_tree(self: Arc<Self>, root: SessionKey) {
        let mut left = vec![root];
        while let Some(key) = left.pop() {
            let below = SessionFilter { parent: Some(key), ..SessionFilter::default() };
            match self.journal.sessions(below, None, usize::MAX).await {
                Ok(rows) => left.extend(rows.iter().map(|row| row.key)),
                Err(error) => {
                    tracing::warn!(%error, "could not read the sessions below one whose budget is spent")
                }
            }
            // A fleet has no runs of its own.
            let Ok(Some(row)) = self.journal.session_by_key(key).await else { continue };
            if row.live {
                let told = match self.session_address(&row) {
                    Ok(session) => {
                        self.send_command(&session, SessionCommand::OverBudget, None).await.map(drop)
                    }
                    Err(error) => Err(error),
                };
                if let Err(error) = told {
                    tracing::warn!(session = %row.id, %error, "could not stop a run whose budget is spent");
                }
            }
        }
    }
}
