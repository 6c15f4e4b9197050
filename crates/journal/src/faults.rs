//! The seam through which tests make the storage fail and watch the writer's steps. Nothing is here unless
//! [`Options::faults`](crate::Options) is set, which no daemon does.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

/// A step of the writer, in the order in which they come for one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Everything is written but not committed.
    Committing,
    /// The sync has returned.
    Committed,
    /// Readers have it.
    Published,
    /// The callers know.
    Answered,
}

type Watch = Box<dyn Fn(Step) + Send>;

/// Failures to come.
#[derive(Default)]
pub struct Faults {
    /// The journal may not have more pages than this; 0: as many as it likes. A spent reserve adds its own.
    pub page_limit: AtomicU32,
    /// Whether writes are refused as on a read-only file system.
    pub read_only: AtomicBool,
    /// So many commits fail as if the disk had.
    pub failing_commits: AtomicU32,
    watch: Mutex<Option<Watch>>,
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").finish_non_exhaustive()
    }
}

impl Faults {
    /// Calls `watch` on the writer's thread at every step, which waits for it.
    pub fn watch(&self, watch: impl Fn(Step) + Send + 'static) {
        *crate::held(&self.watch) = Some(Box::new(watch));
    }

    pub(crate) fn step(&self, step: Step) {
        if let Some(watch) = crate::held(&self.watch).as_ref() {
            watch(step);
        }
    }

    pub(crate) fn commit_fails(&self) -> bool {
        self.failing_commits.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
    }
}
