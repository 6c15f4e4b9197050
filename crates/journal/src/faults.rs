//! The seam through which tests make the storage fail, watch the writer's steps, and have the process die at one of
//! them. Nothing is here unless [`Options::faults`](crate::Options) is set, which no daemon does by itself.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

/// A step of the writer, in the order in which they come for one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriterStep {
    /// Everything is written but not committed.
    Committing,
    /// The sync has returned.
    Committed,
    /// Readers have it.
    Published,
    /// The callers know.
    Answered,
}

type StepWatcher = Box<dyn Fn(WriterStep) + Send>;

/// Where the whole process is to die, as by `kill -9`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InjectedCrash {
    /// At which append, counted from 1.
    pub append: u64,
    /// Just after it is kept, before anybody knows; else just before.
    pub after_commit: bool,
}

/// Failures to come.
#[derive(Default)]
pub struct FaultInjector {
    /// The journal may not have more pages than this; 0: as many as it likes. A spent reserve adds its own.
    pub page_limit: AtomicU32,
    /// Whether writes are refused as on a read-only file system.
    pub read_only: AtomicBool,
    /// So many commits fail as if the disk had.
    pub failing_commits: AtomicU32,
    crash: Option<InjectedCrash>,
    /// How many appends were tried.
    appends: AtomicU64,
    watch: Mutex<Option<StepWatcher>>,
}

impl fmt::Debug for FaultInjector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").finish_non_exhaustive()
    }
}

impl FaultInjector {
    /// Nothing fails but all of it, at one append.
    pub fn crashing_at(death: InjectedCrash) -> Self {
        Self { crash: Some(death), ..Self::default() }
    }

    /// Calls `watch` on the writer's thread at every step, which waits for it.
    pub fn on_step(&self, watch: impl Fn(WriterStep) + Send + 'static) {
        *crate::lock_ignoring_poison(&self.watch) = Some(Box::new(watch));
    }

    pub(crate) fn report_step(&self, step: WriterStep) {
        if let Some(watch) = crate::lock_ignoring_poison(&self.watch).as_ref() {
            watch(step);
        }
    }

    /// So many appends are about to be kept.
    pub(crate) fn before_commit(&self, appends: usize) {
        self.appends.fetch_add(appends as u64, SeqCst);
        self.report_step(WriterStep::Committing);
        self.crash_if(|death| !death.after_commit);
    }

    /// They are.
    pub(crate) fn after_commit(&self) {
        self.report_step(WriterStep::Committed);
        self.crash_if(|death| death.after_commit);
    }

    fn crash_if(&self, here: impl Fn(&InjectedCrash) -> bool) {
        let due = |death: &InjectedCrash| self.appends.load(SeqCst) >= death.append;
        if self.crash.as_ref().is_some_and(|death| here(death) && due(death)) {
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
