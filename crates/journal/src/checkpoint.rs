//! Moves SQLite's log into the database file on a thread of its own, so that no append waits for it. It sleeps while
//! nothing is written. Only the last step, the few pages that came while it worked, is left to the writer, because
//! only between two of its transactions can the log be complete and begun anew.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::Connection;

use crate::lock_ignoring_poison;
use crate::schema::LOG_SIZE_LIMIT;
use crate::stats::JournalStats;

/// How long after a commit the log is looked at.
const CHECKPOINT_DELAY: Duration = Duration::from_millis(200);
/// The log's page and what goes before each.
const LOG_FRAME_BYTES: u64 = 4096 + 24;
/// A log longer than this is to be begun anew even while appends keep coming.
const LOG_RESTART_BYTES: u64 = LOG_SIZE_LIMIT / 2;

/// What the thread and the writer say to each other.
#[derive(Debug, Default)]
pub(crate) struct Checkpointer {
    state: Mutex<CheckpointState>,
    changed: Condvar,
    /// Whether something was committed since the thread last looked. Apart from the lock, so that a commit costs no
    /// system call but the first after a pause.
    dirty: AtomicBool,
    writer_needed: AtomicBool,
}

#[derive(Debug, Default)]
struct CheckpointState {
    stopped: bool,
}

impl Checkpointer {
    /// Something was committed.
    pub(crate) fn mark_dirty(&self) {
        if !self.dirty.swap(true, Ordering::AcqRel) {
            let _state = lock_ignoring_poison(&self.state);
            self.changed.notify_one();
        }
    }

    /// Whether the writer is to call [`finish`](Self::finish) between two transactions.
    pub(crate) fn needs_writer(&self) -> bool {
        self.writer_needed.load(Ordering::Acquire)
    }

    /// Moves what is left, so that the next transaction can begin the log anew.
    pub(crate) fn finish_checkpoint(&self, db: &Connection) {
        self.writer_needed.store(false, Ordering::Release);
        if let Err(error) = checkpoint(db, "PASSIVE") {
            tracing::debug!(%error, "the writer could not finish a checkpoint");
        }
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        lock_ignoring_poison(&self.state).stopped = true;
        self.changed.notify_one();
    }

    /// The thread.
    pub(crate) fn run(&self, db: &Connection, stats: &Arc<JournalStats>) {
        loop {
            {
                let mut state = lock_ignoring_poison(&self.state);
                while !state.stopped && !self.dirty.load(Ordering::Acquire) {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                if !state.stopped {
                    let pause =
                        self.changed.wait_timeout_while(state, CHECKPOINT_DELAY, |state| !state.stopped);
                    state = pause.unwrap_or_else(PoisonError::into_inner).0;
                }
                if state.stopped {
                    return;
                }
            }
            self.dirty.store(false, Ordering::Release);
            match checkpoint(db, "PASSIVE") {
                Ok((logged, moved)) => {
                    stats.log_bytes.store(logged * LOG_FRAME_BYTES, Ordering::Relaxed);
                    if logged * LOG_FRAME_BYTES > LOG_RESTART_BYTES {
                        self.writer_needed.store(true, Ordering::Release);
                    } else if moved < logged {
                        // A reader was in the way; look again even if nothing more is written.
                        self.dirty.store(true, Ordering::Release);
                    }
                }
                // On a full disk this fails until there is room; the log keeps everything meanwhile.
                Err(error) => tracing::debug!(%error, "a checkpoint failed"),
            }
        }
    }
}

/// Pages in the log, and how many of them are in the file as well.
pub(crate) fn checkpoint(db: &Connection, mode: &str) -> rusqlite::Result<(u64, u64)> {
    db.prepare_cached(&format!("PRAGMA wal_checkpoint({mode})"))?.query_row([], |row| {
        let (logged, moved): (i64, i64) = (row.get(1)?, row.get(2)?);
        Ok((u64::try_from(logged).unwrap_or(0), u64::try_from(moved).unwrap_or(0)))
    })
}
