//! Syncs an endpoint's spool while no daemon is attached to journal its updates. The sync runs on a blocking thread,
//! and the endpoint continues meanwhile.

use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::EndpointShared;
use crate::spool::Spool;
use crate::task_watch::TaskStuck;

/// The longest time between syncs while no daemon is attached, and the pause after a failed sync or append.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// Syncs the spool while no daemon is attached, and retries appends that failed.
pub(super) async fn sync_spool_while_detached(shared: Arc<EndpointShared>) -> Result<Infallible, TaskStuck> {
    loop {
        shared.sync_needed.notified().await;
        while let Some(unsynced) = shared.take_spool_if_unsynced() {
            if let Some(mut spool) = unsynced {
                let sync = move || {
                    let synced = catch_unwind(AssertUnwindSafe(|| spool.sync()));
                    (spool, synced)
                };
                let Ok((spool, synced)) = tokio::task::spawn_blocking(sync).await else {
                    return Err(TaskStuck("the spool is lost, because its sync was aborted"));
                };
                {
                    let mut state = shared.lock();
                    state.outbox.return_spool(spool, matches!(synced, Ok(Ok(()))));
                    shared.notify_changed(&state);
                }
                match synced {
                    Ok(Ok(())) => {}
                    // The daemon has given the session up; the owner of the endpoint notices that as well, and ends it.
                    Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                        tracing::debug!("the spool was removed");
                    }
                    Ok(Err(error)) => tracing::error!(%error, "failed to sync the spool"),
                    Err(_) => return Err(TaskStuck("syncing the spool panicked")),
                }
            }
            tokio::time::sleep(SYNC_INTERVAL).await;
        }
    }
}

impl EndpointShared {
    /// Retries failed appends, then takes the spool if it has to be synced. The outer `None` means that there is
    /// nothing to do.
    fn take_spool_if_unsynced(&self) -> Option<Option<Box<dyn Spool>>> {
        let mut state = self.lock();
        let was_failing = state.outbox.is_failing();
        state.outbox.retry_spool();
        let failing = state.outbox.is_failing();
        if was_failing && !failing {
            // The agent may wait for the space that this has freed in memory.
            self.notify_changed(&state);
        }
        let unsynced = if state.connection.is_none() { state.outbox.take_spool_to_sync() } else { None };
        (failing || unsynced.is_some()).then_some(unsynced)
    }
}
