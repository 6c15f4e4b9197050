//! Merges the streamed text of runs that finished long ago, so that the journal grows more slowly: in the background while
//! little is written, and for `qd gc`. The journal does it in small transactions; this file decides when and how fast.
//!
//! Design: docs/design/streamed-text-is-merged.md

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use qd_journal::{AppendError, MergePosition, MergeSavings};
use qd_protocol::Millis;
use qd_protocol::limits::{MERGE_DELAY_S, MERGE_INTERVAL_S};

use crate::daemon::Daemon;

/// The shortest pause between two transactions in the background.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// The pause while others write. The writer is then busy with merging for one commit in half a second.
const BUSY_PAUSE: Duration = Duration::from_millis(500);
/// In the background, merging rests this many times as long as a transaction takes.
const REST_FACTOR: u32 = 4;

impl Daemon {
    /// Merges old text some time after the start and then at intervals, until the daemon stops.
    pub(crate) async fn watch_old_text(self: Arc<Self>) {
        let mut stopping = self.stop_signal();
        let mut delay = Duration::from_secs(MERGE_DELAY_S);
        loop {
            tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => return,
                () = tokio::time::sleep(delay) => {}
            }
            match self.merge_old_text(true).await {
                Ok(savings) if savings.events > 0 => {
                    tracing::info!(
                        events = savings.events,
                        bytes = savings.bytes,
                        "merged old streamed text"
                    );
                }
                Ok(_) | Err(AppendError::Stopped) => {}
                Err(error) => {
                    tracing::warn!(%error, "old streamed text could not be merged; it is tried again later")
                }
            }
            delay = Duration::from_secs(MERGE_INTERVAL_S);
        }
    }

    /// Merges all text that is old enough. In the background it pauses between transactions, for longer while others
    /// write.
    pub(crate) async fn merge_old_text(&self, in_background: bool) -> Result<MergeSavings, AppendError> {
        let mut total = MergeSavings::default();
        let Some(before) = self.merge_before() else { return Ok(total) };
        let commits = || self.journal.stats().commits.load(Ordering::Relaxed);
        let mut next = Some(MergePosition::default());
        while let Some(position) = next {
            if self.is_stopping() {
                return Err(AppendError::Stopped);
            }
            let (started, commits_before) = (Instant::now(), commits());
            let (savings, rest) = self.journal.merge_some(position, before).await?;
            total.events += savings.events;
            total.bytes += savings.bytes;
            next = rest;
            if in_background {
                tokio::time::sleep((started.elapsed() * REST_FACTOR).max(PAUSE_MIN)).await;
                if commits() != commits_before {
                    tokio::time::sleep(BUSY_PAUSE).await;
                }
            }
        }
        Ok(total)
    }

    /// Text from before this time may be merged; nothing if the setting `merge_after_s` is 0.
    pub(crate) fn merge_before(&self) -> Option<Millis> {
        let after_ms = u64::try_from(self.merge_after.as_millis()).unwrap_or(u64::MAX);
        (after_ms > 0).then(|| Millis(Millis::now().0.saturating_sub(after_ms)))
    }
}
