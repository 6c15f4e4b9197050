//! Checks the journal for damage: slowly in the background, and at once for `qd doctor`. The journal reads itself in
//! small steps; this file decides when and how fast, logs what is found, and keeps the last result for the metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use qd_journal::{JournalCheck, JournalReadError};
use qd_protocol::Millis;
use qd_protocol::api::JournalCheckReport;
use qd_protocol::limits::{JOURNAL_CHECK_DELAY_S, JOURNAL_CHECK_INTERVAL_S};

use crate::daemon::Daemon;

/// The shortest pause between two steps of a check in the background.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// A check in the background rests this many times as long as it reads, so it uses at most a fifth of one core.
const REST_FACTOR: u32 = 4;

/// What the checks have found.
#[derive(Debug, Default)]
pub(crate) struct JournalChecks {
    /// Checks that were finished.
    pub(crate) finished: AtomicU64,
    /// Damaged places that the last check found.
    pub(crate) damaged_places: AtomicU64,
    /// The damage that was logged, so that each place is logged once.
    logged: Mutex<Vec<String>>,
    /// One check at a time for callers who wait; the one in the background is not counted.
    waiting: tokio::sync::Mutex<()>,
}

/// How fast a check reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CheckPace {
    /// For the background: mostly resting.
    Slow,
    /// For somebody who waits.
    Fast,
}

impl Daemon {
    /// Checks the journal some time after the start and then at intervals, until the daemon stops.
    pub(crate) async fn watch_journal(self: Arc<Self>) {
        let mut stopping = self.stop_signal();
        let mut delay = self.journal_check_delay();
        loop {
            tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => return,
                () = tokio::time::sleep(delay) => {}
            }
            if let Err(error) = self.run_check(CheckPace::Slow).await {
                tracing::warn!(%error, "the journal could not be checked for damage; it is tried again later");
            }
            delay = Duration::from_secs(JOURNAL_CHECK_INTERVAL_S);
        }
    }

    /// Checks the whole journal now.
    pub(crate) async fn check_journal(&self) -> Result<JournalCheckReport, JournalReadError> {
        let _turn = self.journal_checks.waiting.lock().await;
        self.run_check(CheckPace::Fast).await
    }

    /// In a build with debug assertions, `QD_CHECK_AFTER_MS` replaces the delay of the first check, for tests.
    fn journal_check_delay(&self) -> Duration {
        let for_tests = || std::env::var("QD_CHECK_AFTER_MS").ok()?.parse().ok().map(Duration::from_millis);
        let delay = if cfg!(debug_assertions) { for_tests() } else { None };
        delay.unwrap_or(Duration::from_secs(JOURNAL_CHECK_DELAY_S))
    }

    async fn run_check(&self, pace: CheckPace) -> Result<JournalCheckReport, JournalReadError> {
        let mut check = self.journal.begin_check().await?;
        loop {
            if self.is_stopping() {
                return Err(JournalReadError::Stopped);
            }
            let started = Instant::now();
            let (rest, more) = step_blocking(check).await?;
            check = rest;
            if !more {
                break;
            }
            let pause = (started.elapsed() * REST_FACTOR).max(PAUSE_MIN);
            match pace {
                CheckPace::Slow => tokio::time::sleep(pause).await,
                CheckPace::Fast => tokio::task::yield_now().await,
            }
        }
        let report = tokio::task::spawn_blocking(move || check.into_report()).await;
        let mut report = report.map_err(|failure| JournalReadError::Io(failure.to_string()))?;
        report.checked_at = Millis::now();
        self.record_check(&report);
        Ok(report)
    }

    fn record_check(&self, report: &JournalCheckReport) {
        let checks = &self.journal_checks;
        checks.finished.fetch_add(1, Ordering::Relaxed);
        checks.damaged_places.store(report.damage.len() as u64, Ordering::Relaxed);
        let mut logged = checks.logged.lock();
        let found: Vec<String> = report.damage.iter().map(ToString::to_string).collect();
        for damage in found.iter().filter(|damage| !logged.contains(damage)) {
            tracing::error!("the journal is damaged: {damage}; `qd doctor` says what to do");
        }
        tracing::debug!(
            rows = report.rows,
            bytes = report.bytes,
            damaged = found.len(),
            "checked the journal"
        );
        *logged = found;
    }
}

/// Runs one step on a thread that may block.
async fn step_blocking(mut check: JournalCheck) -> Result<(JournalCheck, bool), JournalReadError> {
    let step = move || check.step().map(|more| (check, more));
    let stepped = tokio::task::spawn_blocking(step).await;
    stepped.unwrap_or_else(|failure| Err(JournalReadError::Io(failure.to_string())))
}
