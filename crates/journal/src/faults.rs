//! The seam through which tests make the storage fail, watch the writer's steps, and have the process die at one of
//! them. Nothing is here unless [`Options::faults`](crate::Options) is set, which no daemon does by itself.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

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

/// Where the whole process is to die, as by `kill -9`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    /// At which append, counted from 1.
    pub append: u64,
    /// Just after it is kept, before anybody knows; else just before.
    pub kept: bool,
}

/// Failures to come.
#[derive(Default)]
pub struct Faults {
    /// The journal may not have more pages than this; 0: as many as it likes. A spent reserve adds its own.
    pub page_limit: AtomicU32,
    /// Whether writes are refused as on a read-only file system.
    pub read_only: AtomicBool,
    /// So many commits fail as if the disk had.
    pub failing_commits: AtomicU32,
    death: Option<Death>,
    /// How many appends were tried.
    appends: AtomicU64,
    watch: Mutex<Option<Watch>>,
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").finish_non_exhaustive()
    }
}

impl Faults {
    /// Nothing fails but all of it, at one append.
    pub fn dying(death: Death) -> Self {
        Self { death: Some(death), ..Self::default() }
    }

    /// Calls `watch` on the writer's thread at every step, which waits for it.
    pub fn watch(&self, watch: impl Fn(Step) + Send + 'static) {
        *crate::held(&self.watch) = Some(Box::new(watch));
    }

    pub(crate) fn step(&self, step: Step) {
        if let Some(watch) = crate::held(&self.watch).as_ref() {
            watch(step);
        }
    }

    /// So many appends are about to be kept.
    pub(crate) fn committing(&self, appends: usize) {
        self.appends.fetch_add(appends as u64, SeqCst);
        self.step(Step::Committing);
        self.die_if(|death| !death.kept);
    }

    /// They are.
    pub(crate) fn committed(&self) {
        self.step(Step::Committed);
        self.die_if(|death| death.kept);
    }

    fn die_if(&self, here: impl Fn(&Death) -> bool) {
        let due = |death: &Death| self.appends.load(SeqCst) >= death.append;
        if self.death.as_ref().is_some_and(|death| here(death) && due(death)) {
            let _no_answer =
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            loop {
                std::thread::park();
            }
        }
    }

    pub(crate) fn commit_fails(&self) -> bool {
        self.failing_commits.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
    }
}
