//! Moves SQLite's log into the database file on a thread of its own, so that no append waits for it. The thread sleeps
//! while nothing is written. The writer does only the last step, for the few pages that were added meanwhile: the log
//! can be fully moved and restarted only between two of the writer's transactions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rusqlite::Connection;

use crate::schema::LOG_SIZE_LIMIT;
use crate::stats::JournalStats;

/// The delay between a commit and the next checkpoint.
const CHECKPOINT_DELAY: Duration = Duration::from_millis(200);
/// The size of a page in the log, with its frame header.
const LOG_FRAME_BYTES: u64 = 4096 + 24;
/// When the log is longer than this, the writer is asked to finish the checkpoint even while appends keep coming.
const LOG_RESTART_BYTES: u64 = LOG_SIZE_LIMIT / 2;

/// The state shared by the checkpoint thread and the writer.
#[derive(Debug, Default)]
pub(crate) struct Checkpointer {
    state: Mutex<CheckpointState>,
    changed: Condvar,
    /// Whether anything was committed since the last checkpoint began. It is outside the lock, so that a commit needs a
    /// system call only if the thread is asleep.
    dirty: AtomicBool,
    writer_needed: AtomicBool,
}

#[derive(Debug, Default)]
struct CheckpointState {
    stopped: bool,
}

impl Checkpointer {
    /// Records that something was committed, and wakes the thread.
    pub(crate) fn mark_dirty(&self) {
        if !self.dirty.swap(true, Ordering::AcqRel) {
            let _state = self.state.lock();
            self.changed.notify_one();
        }
    }

    /// Whether the writer must call [`finish_checkpoint`](Self::finish_checkpoint) between two transactions.
    pub(crate) fn needs_writer(&self) -> bool {
        self.writer_needed.load(Ordering::Acquire)
    }

    /// Moves the rest of the log, so that the next transaction can restart it.
    pub(crate) fn finish_checkpoint(&self, db: &Connection) {
        self.writer_needed.store(false, Ordering::Release);
        if let Err(error) = checkpoint(db, "PASSIVE") {
            tracing::debug!(%error, "the writer could not finish a checkpoint");
        }
    }

    /// Asks the thread to stop.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_one();
    }

    /// The body of the checkpoint thread.
    pub(crate) fn run(&self, db: &Connection, stats: &Arc<JournalStats>) {
        loop {
            {
                let mut state = self.state.lock();
                while !state.stopped && !self.dirty.load(Ordering::Acquire) {
                    self.changed.wait(&mut state);
                }
                if !state.stopped {
                    self.changed.wait_while_for(&mut state, |state| !state.stopped, CHECKPOINT_DELAY);
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
                        // A reader held back the checkpoint. Try again even if nothing more is written.
                        self.dirty.store(true, Ordering::Release);
                    }
                }
                // On a full disk this fails until space is free. Nothing is lost: the log keeps everything meanwhile.
                Err(error) => tracing::debug!(%error, "a checkpoint failed"),
            }
        }
    }
}

/// Runs a checkpoint. Returns the pages in the log, and how many of them are also in the database file.
pub(crate) fn checkpoint(db: &Connection, mode: &str) -> rusqlite::Result<(u64, u64)> {
    db.prepare_cached(&format!("PRAGMA wal_checkpoint({mode})"))?.query_row([], |row| {
        let (logged, moved): (i64, i64) = (row.get(1)?, row.get(2)?);
        Ok((u64::try_from(logged).unwrap_or(0), u64::try_from(moved).unwrap_or(0)))
    })
}
