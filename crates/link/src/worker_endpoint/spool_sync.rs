//! Keeps a seat's spool safe while nobody else has what is in it. The sync is made on a thread that may wait, and the
//! seat goes on meanwhile.

use std::sync::Arc;
use std::time::Duration;

use super::EndpointShared;
use crate::spool::Spool;

/// How long a spool may go without a sync while no daemon is attached, and without another try after it has failed.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// Syncs the spool while no daemon is attached, and tries again what it would not take.
pub(super) async fn sync_spool_while_detached(shared: Arc<EndpointShared>) {
    loop {
        shared.sync_needed.notified().await;
        while let Some(unsettled) = shared.take_spool_if_unsynced() {
            if let Some(mut spool) = unsettled {
                let sync = move || {
                    let synced = spool.sync();
                    (spool, synced)
                };
                let Ok((spool, synced)) = tokio::task::spawn_blocking(sync).await else {
                    tracing::error!("the spool is lost: its sync panicked");
                    return;
                };
                if let Err(error) = &synced {
                    tracing::error!(%error, "the spool cannot be synced");
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
    /// Whether there is something to settle, and the spool if it is to be synced.
    fn take_spool_if_unsynced(&self) -> Option<Option<Box<dyn Spool>>> {
        let mut state = self.lock();
        state.outbox.flush_to_spool();
        let failing = state.outbox.is_failing();
        let unsynced = if state.connection.is_none() { state.outbox.take_spool_to_sync() } else { None };
        (failing || unsynced.is_some()).then_some(unsynced)
    }
}
