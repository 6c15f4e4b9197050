//! Syncs an endpoint's spool while no daemon is attached to journal its updates. The sync runs on a blocking thread,
//! and the endpoint continues meanwhile.

use std::sync::Arc;
use std::time::Duration;

use super::EndpointShared;
use crate::spool::Spool;

/// The longest time between syncs while no daemon is attached, and the pause after a failed one.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// Syncs the spool while no daemon is attached, and retries appends that failed.
pub(super) async fn sync_spool_while_detached(shared: Arc<EndpointShared>) {
    loop {
        shared.sync_needed.notified().await;
        while let Some(unsynced) = shared.take_spool_if_unsynced() {
            if let Some(mut spool) = unsynced {
                let sync = move || {
                    let synced = spool.sync();
                    (spool, synced)
                };
                let Ok((spool, synced)) = tokio::task::spawn_blocking(sync).await else {
                    tracing::error!("lost the spool: its sync panicked");
                    return;
                };
                if let Err(error) = &synced {
                    tracing::error!(%error, "failed to sync the spool");
                }
                let mut state = shared.lock();
                state.outbox.return_spool(spool, synced.is_ok());
                shared.notify_changed(&state);
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
        state.outbox.flush_to_spool();
        let failing = state.outbox.is_failing();
        let unsynced = if state.connection.is_none() { state.outbox.take_spool_to_sync() } else { None };
        (failing || unsynced.is_some()).then_some(unsynced)
    }
}
