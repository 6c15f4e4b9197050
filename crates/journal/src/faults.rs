//! Fault injection for tests: makes the storage fail, observes the writer's steps, or crashes the process at one of
//! them. It is inactive unless [`JournalOptions::faults`](crate::JournalOptions) is set, which the daemon never does on
//! its own.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

use parking_lot::Mutex;

/// A step of the writer, in the order in which they happen for a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriterStep {
    /// Everything is written but not committed.
    Committing,
    /// The sync has returned.
    Committed,
    /// The events are published to readers.
    Published,
    /// The callers have their answers.
    Answered,
}

type StepWatcher = Box<dyn Fn(WriterStep) + Send>;

/// Where the whole process crashes, as by `kill -9`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InjectedCrash {
    /// The append at which it happens, counted from 1.
    pub append: u64,
    /// Crash just after the commit, before anything is published, instead of just before it.
    pub after_commit: bool,
}

/// Faults to inject into the writer.
#[derive(Default)]
pub struct FaultInjector {
    /// The maximum number of pages of the database; 0 for no limit. A spent reserve adds its own pages.
    pub page_limit: AtomicU32,
    /// Refuses writes as on a read-only file system.
    pub read_only: AtomicBool,
    /// This many of the next commits fail as if the disk had failed.
    pub failing_commits: AtomicU32,
    crash: Option<InjectedCrash>,
    /// The number of appends attempted so far.
    appends: AtomicU64,
    watch: Mutex<Option<StepWatcher>>,
}

impl fmt::Debug for FaultInjector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultInjector").finish_non_exhaustive()
    }
}

impl FaultInjector {
    /// Injects nothing but a crash of the process.
    pub fn crashing_at(crash: InjectedCrash) -> Self {
        Self { crash: Some(crash), ..Self::default() }
    }

    /// Calls `watch` on the writer's thread at every step. The writer waits for it.
    pub fn on_step(&self, watch: impl Fn(WriterStep) + Send + 'static) {
        *self.watch.lock() = Some(Box::new(watch));
    }

    pub(crate) fn report_step(&self, step: WriterStep) {
        if let Some(watch) = self.watch.lock().as_ref() {
            watch(step);
        }
    }

    /// Called when this many appends are about to be committed.
    pub(crate) fn before_commit(&self, appends: usize) {
        self.appends.fetch_add(appends as u64, SeqCst);
        self.report_step(WriterStep::Committing);
        self.crash_if(|crash| !crash.after_commit);
    }

    /// Called when the appends are committed.
    pub(crate) fn after_commit(&self) {
        self.report_step(WriterStep::Committed);
        self.crash_if(|crash| crash.after_commit);
    }

    fn crash_if(&self, applies: impl Fn(&InjectedCrash) -> bool) {
        let due = |crash: &InjectedCrash| self.appends.load(SeqCst) >= crash.append;
        if self.crash.as_ref().is_some_and(|crash| applies(crash) && due(crash)) {
            let _result =
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
