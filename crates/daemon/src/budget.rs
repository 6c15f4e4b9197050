//! Whose money is spent. A budget counts its session and all below it; the sums come from the journal's rows, so
//! nothing has to be passed up a tree, and what is remembered here is only a verdict that any actor can read.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use qd_core::session::Command;
use qd_journal::{ReadError, SessionFilter, SessionKey, SessionRow};

use crate::daemon::Daemon;

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

impl Daemon {
    /// Judges the budgets of a session and of those above it anew. Whoever is newly over has every live run of its
    /// tree stopped; the verdict is set before the first of them is told, so none can start behind our back.
    pub(crate) async fn check_budgets(self: &Arc<Self>, session: SessionKey) -> Result<(), ReadError> {
        for row in self.journal.line(session).await? {
            let is_spent = match row.budget_usd {
                Some(budget) => self.journal.tree_cost(row.key).await? >= budget,
                None => false,
            };
            if self.budgets.set(row.key, is_spent) {
                let daemon = Arc::clone(self);
                self.spawn(async move { daemon.stop_tree(row).await });
            }
        }
        Ok(())
    }

    /// Dollars that are left to a session by its own budget and those above it; `None`: there is no budget.
    pub(crate) async fn budget_left(&self, line: &[SessionKey]) -> Option<f64> {
        let own = *line.first()?;
        let rows = self.journal.line(own).await.ok()?;
        let mut least: Option<f64> = None;
        for row in rows {
            let Some(budget) = row.budget_usd else { continue };
            let left = (budget - self.journal.tree_cost(row.key).await.ok()?).max(0.0);
            least = Some(least.map_or(left, |least| least.min(left)));
        }
        least
    }

    async fn stop_tree(self: Arc<Self>, root: SessionRow) {
        let mut left = vec![root];
        while let Some(row) = left.pop() {
            let below = SessionFilter { parent: Some(row.key), ..SessionFilter::default() };
            match self.journal.sessions(below, None, usize::MAX).await {
                Ok(rows) => left.extend(rows),
                Err(error) => {
                    tracing::warn!(%error, "could not read the sessions below one whose budget is spent")
                }
            }
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
