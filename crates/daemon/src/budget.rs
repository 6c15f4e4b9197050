//! Which budgets are spent. A budget covers its session or fleet and all descendants. The sums come from the journal's
//! rows, so nothing is passed up a tree; only the verdict is kept in memory, where every actor can read it.
//!
//! Design: docs/design/rows-with-their-events.md

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use qd_core::session::SessionCommand;
use qd_journal::{JournalReadError, SessionFilter, SessionKey};
use qd_protocol::ApiError;
use qd_protocol::event::EventActor;

use crate::actor::retry_delivery;
use crate::daemon::{Daemon, read_failed};

/// The sessions and fleets whose own budget is spent.
#[derive(Debug, Default)]
pub(crate) struct SpentBudgets {
    spent: Mutex<HashSet<SessionKey>>,
}

impl SpentBudgets {
    /// Whether any budget of this lineage is spent: a session's own or one above it.
    pub(crate) fn any_spent(&self, lineage: &[SessionKey]) -> bool {
        let spent = self.spent.lock();
        !spent.is_empty() && lineage.iter().any(|key| spent.contains(key))
    }

    /// Stores a verdict. Returns true if this budget was not known to be spent before.
    fn set_spent(&self, key: SessionKey, is_spent: bool) -> bool {
        let mut spent = self.spent.lock();
        if is_spent {
            return spent.insert(key);
        }
        spent.remove(&key);
        false
    }
}

/// The budget of a session or fleet, which covers all its descendants too.
struct TreeBudget {
    key: SessionKey,
    budget_usd: Option<f64>,
}

impl Daemon {
    /// A session's own key and the keys of its ancestors: sessions, then the fleet of the topmost, if it has one.
    pub(crate) async fn session_lineage(&self, session: SessionKey) -> Result<Vec<SessionKey>, ApiError> {
        let budgets = self.tree_budgets(session).await.map_err(read_failed)?;
        Ok(budgets.into_iter().map(|budget| budget.key).collect())
    }

    async fn tree_budgets(&self, session: SessionKey) -> Result<Vec<TreeBudget>, JournalReadError> {
        let rows = self.journal.lineage(session).await?;
        let top_parent = rows.last().and_then(|row| row.parent);
        let mut budgets: Vec<TreeBudget> =
            rows.iter().map(|row| TreeBudget { key: row.key, budget_usd: row.budget_usd }).collect();
        if let Some(key) = top_parent
            && let Some(fleet) = self.journal.fleet_by_key(key).await?
        {
            budgets.push(TreeBudget { key, budget_usd: fleet.budget_usd });
        }
        Ok(budgets)
    }

    /// Judges the budgets of a session and its ancestors again. When a budget becomes spent, every live run of its
    /// tree is stopped. The verdict is set before the first session gets its command, so no run can start in between.
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

    /// The dollars that a session may still spend under its own budget and those above it; `None` if there is no
    /// budget.
    pub(crate) async fn budget_left(&self, lineage: &[SessionKey]) -> Option<f64> {
        let mut least: Option<f64> = None;
        for TreeBudget { key, budget_usd } in self.tree_budgets(*lineage.first()?).await.ok()? {
            let Some(budget) = budget_usd else { continue };
            let left = (budget - self.journal.tree_cost(key).await.ok()?).max(0.0);
            least = Some(least.map_or(left, |least| least.min(left)));
        }
        least
    }

    async fn stop_tree(self: Arc<Self>, root: SessionKey) {
        let mut pending = vec![root];
        while let Some(key) = pending.pop() {
            let read_children = || async {
                let children = SessionFilter { parent: Some(key), ..SessionFilter::default() };
                self.journal.sessions(children, None, usize::MAX).await.map_err(read_failed)
            };
            let children = retry_delivery(&self, read_children).await.unwrap_or_default();
            pending.extend(children.iter().map(|row| row.key));
            let stop = || async {
                match self.journal.session_by_key(key).await.map_err(read_failed)? {
                    Some(row) if row.live => {
                        let session = self.session_address(&row)?;
                        let actor = Arc::new(EventActor::DAEMON);
                        self.send_command(&session, &actor, SessionCommand::OverBudget, None).await.map(drop)
                    }
                    // It has no run to stop. A fleet never has one of its own.
                    _ => Ok(()),
                }
            };
            let _stopped = retry_delivery(&self, stop).await;
        }
    }
}
