//! Whose money is spent. A budget counts its session or fleet and all below it; the sums come from the journal's rows, so
//! nothing has to be passed up a tree, and what is remembered here is only a verdict that any actor can read.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use qd_core::session::Command;
use qd_journal::{ReadError, SessionFilter, SessionKey};
use qd_protocol::ApiError;

use crate::daemon::{Daemon, read_failed};

/// The sessions whose own budget is spent.
#[derive(Debug, Default)]
pub(crate) struct Budgets {
    spent: Mutex<HashSet<SessionKey>>,
}

impl Budgets {
    /// Whether any of these is spent: a session's own budget and those above it.
    pub(crate) fn any_spent(&self, line: &[SessionKey]) -> bool {
        let spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        !spent.is_empty() && line.iter().any(|key| spent.contains(key))
    }

    /// Remembers a verdict; true if it is news that this one is spent.
    fn set(&self, key: SessionKey, is_spent: bool) -> bool {
        let mut spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        if is_spent {
            return spent.insert(key);
        }
        spent.remove(&key);
        false
    }
}

/// What a session, or a fleet, and all below it may cost.
struct Purse {
    key: SessionKey,
    budget_usd: Option<f64>,
}

impl Daemon {
    /// A session's own key and those of whatever is above it: sessions, and the fleet of the highest.
    pub(crate) async fn line(&self, session: SessionKey) -> Result<Vec<SessionKey>, ApiError> {
        let purses = self.purses(session).await.map_err(read_failed)?;
        Ok(purses.into_iter().map(|purse| purse.key).collect())
    }

    async fn purses(&self, session: SessionKey) -> Result<Vec<Purse>, ReadError> {
        let rows = self.journal.line(session).await?;
        let highest = rows.last().and_then(|row| row.parent);
        let mut purses: Vec<Purse> =
            rows.iter().map(|row| Purse { key: row.key, budget_usd: row.budget_usd }).collect();
        if let Some(key) = highest
            && let Some(fleet) = self.journal.fleet_by_key(key).await?
        {
            purses.push(Purse { key, budget_usd: fleet.budget_usd });
        }
        Ok(purses)
    }

    /// Judges the budgets of a session and of those above it anew. Whoever is newly over has every live run of its
    /// tree stopped; the verdict is set before the first of them is told, so none can start behind our back.
    pub(crate) async fn check_budgets(self: &Arc<Self>, session: SessionKey) -> Result<(), ReadError> {
        for Purse { key, budget_usd } in self.purses(session).await? {
            let is_spent = match budget_usd {
                Some(budget) => self.journal.tree_cost(key).await? >= budget,
                None => false,
            };
            if self.budgets.set(key, is_spent) {
                let daemon = Arc::clone(self);
                self.spawn(async move { daemon.stop_tree(key).await });
            }
        }
        Ok(())
    }

    /// Dollars that are left to a session by its own budget and those above it; `None`: there is no budget.
    pub(crate) async fn budget_left(&self, line: &[SessionKey]) -> Option<f64> {
        let mut least: Option<f64> = None;
        for Purse { key, budget_usd } in self.purses(*line.first()?).await.ok()? {
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
                let told = match self.session_ref(&row) {
                    Ok(session) => self.command(&session, Command::OverBudget, None).await.map(drop),
                    Err(error) => Err(error),
                };
                if let Err(error) = told {
                    tracing::warn!(session = %row.id, %error, "could not stop a run whose budget is spent");
                }
            }
        }
    }
}
