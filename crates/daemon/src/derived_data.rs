//! Keeps the derived data, from which searches and usage reports are answered, in step with the journal. One task reads
//! the events and applies them in small transactions, mostly resting so that agents do not notice; while a request
//! waits, it does not rest. The journal's own file and its writer are not touched.
//!
//! Design: docs/design/derived-data-in-its-own-file.md

mod audit_entries;
mod event_changes;
mod usage_sums;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use qd_home::DaemonHome;
use qd_journal::derived::{AuditFilter, DerivedSizes, SearchFilter, SearchPosition, SearchWords};
use qd_journal::{DerivedDataError, DerivedStore, Journal, JournalActivity, JournalReadError};
use qd_protocol::audit::{AuditEntry, AuditPage};
use qd_protocol::limits::{INDEX_FREE_BYTES, INDEX_WAIT_S};
use qd_protocol::search::{IndexProgress, SearchHit, SearchPage};
use qd_protocol::usage_report::{UsageGrouping, UsageReport};
use qd_protocol::{ApiError, ErrorCode, Millis, Seq};
use tokio::sync::{Notify, watch};

use self::event_changes::{DERIVED_KINDS, EventChanges};
pub(crate) use self::usage_sums::{UsageZone, build_usage_report};
use crate::daemon::{Daemon, stopping_error};
use crate::http::unreadable_row;

/// New events are indexed once nothing was written for this long.
const INDEX_QUIET: Duration = Duration::from_secs(1);
/// If writing never stops, new events are indexed after this time.
const INDEX_LAG: Duration = Duration::from_secs(10);
/// While there is more to index, indexing rests this many times as long as it works, so it uses at most a fifth of one
/// core.
const REST_FACTOR: u32 = 4;
/// The rest while others write.
const BUSY_REST: Duration = Duration::from_millis(500);
/// The pause after a failure, such as a full disk.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// About how much event data one transaction applies.
const BATCH_BYTES: usize = 256 << 10;

/// The derived data, and how far it has followed the journal.
#[derive(Debug)]
pub(crate) struct DerivedData {
    home: PathBuf,
    store: Arc<DerivedStore>,
    progress: watch::Sender<FollowProgress>,
    /// Wakes the task that follows the journal.
    wake: Notify,
    /// Requests that wait for the task.
    waiting: AtomicUsize,
    /// How many times a rebuild was requested.
    rebuilds: AtomicU64,
}

/// What the task that follows the journal has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct FollowProgress {
    is_open: bool,
    /// All events up to here are applied.
    seq: Seq,
    /// The purges, as the journal counts them, whose sessions are removed.
    purges: u64,
    /// The requested rebuilds that have begun.
    rebuilds: u64,
}

impl FollowProgress {
    /// Whether everything that was so at a moment has been applied.
    fn covers(self, activity: JournalActivity, rebuilds: u64) -> bool {
        self.is_open
            && self.seq >= activity.head
            && self.purges >= activity.purges
            && self.rebuilds >= rebuilds
    }
}

/// Why the derived data could not follow the journal for now.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error(transparent)]
    Journal(#[from] JournalReadError),
    #[error(transparent)]
    Derived(#[from] DerivedDataError),
    /// The index must not use up what the journal keeps for cancels and ends of runs.
    #[error("less than {} MiB are free on the disk of the home", INDEX_FREE_BYTES >> 20)]
    LittleSpace,
}

impl DerivedData {
    pub(crate) fn new(home: &DaemonHome) -> Self {
        Self {
            home: home.path().to_owned(),
            store: Arc::new(DerivedStore::new(home.path())),
            progress: watch::Sender::default(),
            wake: Notify::new(),
            waiting: AtomicUsize::new(0),
            rebuilds: AtomicU64::new(0),
        }
    }

    /// Follows the journal until it is closed. Every rest ends when a request waits.
    async fn follow(&self, journal: &Journal) {
        let mut activity = journal.activity();
        let mut failures = FollowFailures::default();
        loop {
            activity.mark_unchanged();
            let started = Instant::now();
            match self.follow_once(journal).await {
                Ok(true) if self.waiting.load(Ordering::SeqCst) > 0 => {}
                Ok(true) => {
                    let is_busy = activity.has_changed().unwrap_or_default();
                    let busy_rest = if is_busy { BUSY_REST } else { Duration::ZERO };
                    self.rest((started.elapsed() * REST_FACTOR).max(busy_rest)).await;
                }
                Ok(false) => {
                    failures = FollowFailures::default();
                    tokio::select! {
                        () = self.wake.notified() => {}
                        changed = activity.changed() => match changed {
                            Ok(()) => self.wait_for_quiet(&mut activity).await,
                            Err(_) => return,
                        },
                    }
                }
                Err(FollowError::Journal(JournalReadError::Stopped)) => return,
                Err(error) => {
                    let needs_rebuild =
                        matches!(&error, FollowError::Derived(error) if error.needs_rebuild());
                    if needs_rebuild {
                        self.request_rebuild();
                    }
                    if !failures.record_failure(&error) || !needs_rebuild {
                        // Not a rest: a request that waits must not make this a busy loop.
                        tokio::time::sleep(RETRY_DELAY).await;
                    }
                }
            }
        }
    }

    /// Waits until nothing was written for a while, so that indexing takes no time from agents at work, or until events
    /// have waited for long enough. It looks now and then instead of being woken by every commit.
    async fn wait_for_quiet(&self, activity: &mut watch::Receiver<JournalActivity>) {
        let started = Instant::now();
        while started.elapsed() < INDEX_LAG {
            activity.mark_unchanged();
            let was_woken = self.rest(INDEX_QUIET).await;
            if was_woken || !activity.has_changed().unwrap_or_default() {
                return;
            }
        }
    }

    /// Waits for this time, or until a request waits. Returns whether one does.
    async fn rest(&self, time: Duration) -> bool {
        tokio::select! {
            () = self.wake.notified() => true,
            () = tokio::time::sleep(time) => false,
        }
    }

    /// Does one part of what is to be done: opens the file, begins a rebuild, removes purged sessions or applies a batch
    /// of events. Returns whether there is more to do.
    async fn follow_once(&self, journal: &Journal) -> Result<bool, FollowError> {
        let mut progress = *self.progress.borrow();
        let activity = *journal.activity().borrow();
        let rebuilds = self.rebuilds.load(Ordering::SeqCst);
        if !progress.is_open || progress.rebuilds < rebuilds {
            progress = self.open(journal, progress, rebuilds).await?;
        } else if progress.purges < activity.purges {
            self.remove_purged(journal).await?;
            progress.purges = activity.purges;
        } else if progress.seq < activity.head {
            self.check_space()?;
            let page = journal.stored_events(&DERIVED_KINDS, progress.seq, BATCH_BYTES).await?;
            let (events, seq) = (page.events, page.scanned_through);
            self.with_store(move |store| {
                let mut changes = EventChanges::default();
                events.iter().for_each(|event| changes.add_event(event));
                store.apply(&changes.into_changes(), seq)
            })
            .await?;
            progress.seq = seq;
        } else {
            return Ok(false);
        }
        self.progress.send_replace(progress);
        Ok(true)
    }

    /// Opens the file, or empties it for a rebuild.
    async fn open(
        &self,
        journal: &Journal,
        before: FollowProgress,
        rebuilds: u64,
    ) -> Result<FollowProgress, FollowError> {
        self.check_space()?;
        // Purges from before this moment are found by what is missing now.
        let JournalActivity { head, purges } = *journal.activity().borrow();
        let mut seq = Seq(0);
        if before.rebuilds == rebuilds {
            seq = self.with_store(|store| store.open()).await?;
        }
        // An older journal was restored, or a rebuild is requested.
        if seq > head || before.rebuilds < rebuilds {
            self.with_store(|store| store.clear()).await?;
            seq = Seq(0);
        }
        self.remove_purged(journal).await?;
        tracing::debug!(from = seq.0, to = head.0, "the derived data follows the journal");
        Ok(FollowProgress { is_open: true, seq, purges, rebuilds })
    }

    fn check_space(&self) -> Result<(), FollowError> {
        if self.has_space_for(0) { Ok(()) } else { Err(FollowError::LittleSpace) }
    }

    /// Whether this many bytes can be written and leave enough for the journal. A file system that does not say how much
    /// is free is written to until it is full.
    fn has_space_for(&self, bytes: u64) -> bool {
        !rustix::fs::statvfs(&self.home).is_ok_and(|disk| {
            disk.f_bavail.saturating_mul(disk.f_frsize) < INDEX_FREE_BYTES.saturating_add(bytes)
        })
    }

    async fn remove_purged(&self, journal: &Journal) -> Result<(), FollowError> {
        let existing = journal.session_keys().await?;
        self.with_store(move |store| store.remove_other_sessions(&existing)).await?;
        Ok(())
    }

    /// Runs a call of the store on a thread that may block.
    async fn with_store<T: Send + 'static>(
        &self,
        call: impl FnOnce(&DerivedStore) -> Result<T, DerivedDataError> + Send + 'static,
    ) -> Result<T, DerivedDataError> {
        let store = Arc::clone(&self.store);
        let called = tokio::task::spawn_blocking(move || call(&store)).await;
        called.unwrap_or_else(|failure| Err(DerivedDataError::Io(std::io::Error::other(failure))))
    }

    fn request_rebuild(&self) -> u64 {
        let rebuilds = self.rebuilds.fetch_add(1, Ordering::SeqCst) + 1;
        self.wake.notify_one();
        rebuilds
    }

    /// Waits until everything that is in the journal now is applied, but no longer than [`INDEX_WAIT_S`]. Returns the
    /// last event of the journal, and whether all of it is applied.
    async fn catch_up(&self, journal: &Journal) -> (Seq, bool) {
        let activity = *journal.activity().borrow();
        let rebuilds = self.rebuilds.load(Ordering::SeqCst);
        let mut progress = self.progress.subscribe();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let _waiting = CountedWait(&self.waiting);
        self.wake.notify_one();
        let limit = Duration::from_secs(INDEX_WAIT_S);
        let covered = progress.wait_for(|progress| progress.covers(activity, rebuilds));
        (activity.head, tokio::time::timeout(limit, covered).await.is_ok())
    }
}

/// What went wrong since the index last had everything.
#[derive(Debug, Default)]
struct FollowFailures {
    reasons: HashSet<String>,
}

impl FollowFailures {
    /// Records a failure and returns whether it is the first of its kind. Only then it is logged.
    fn record_failure(&mut self, error: &FollowError) -> bool {
        let is_first = self.reasons.insert(error.to_string());
        if is_first {
            tracing::warn!(%error, "the search index cannot follow the journal; it is tried again");
        }
        is_first
    }
}

/// A request that waits for the task. It is no longer counted when this is dropped.
struct CountedWait<'a>(&'a AtomicUsize);

impl Drop for CountedWait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Daemon {
    /// Follows the journal until the daemon stops.
    pub(crate) async fn keep_derived_data(self: Arc<Self>) {
        let mut stopping = self.stop_signal();
        tokio::select! {
            _ = stopping.wait_for(|stop| *stop) => {}
            () = self.derived.follow(&self.journal) => {}
        }
    }

    /// Finds texts, newest first.
    pub(crate) async fn search(
        &self,
        words: SearchWords,
        filter: SearchFilter,
        before: Option<SearchPosition>,
        limit: usize,
    ) -> Result<SearchPage, ApiError> {
        let find = move |store: &DerivedStore| store.search(&words, &filter, before, limit + 1);
        let ((mut hits, indexed_seq), journal_seq, complete) = self.read_derived(find).await?;
        let has_more = hits.len() > limit;
        hits.truncate(limit);
        let next_before = hits.last().filter(|_| has_more).map(|(position, _)| position.to_string());
        let hits: Vec<SearchHit> = hits.into_iter().map(|(_, hit)| hit).collect();
        Ok(SearchPage { hits, next_before, complete, index: IndexProgress { indexed_seq, journal_seq } })
    }

    /// The disk space of the derived data. Zero while the file cannot be read.
    pub(crate) async fn derived_sizes(&self) -> DerivedSizes {
        self.derived.with_store(|store| store.sizes()).await.unwrap_or_default()
    }

    /// Removes purged sessions from the derived data, and gives the space that it no longer uses back to the disk. Returns
    /// the bytes that were freed. Failing is only logged: the data can be derived again, so nobody depends on it.
    pub(crate) async fn shrink_derived(&self) -> u64 {
        let before = self.derived_sizes().await;
        self.derived.catch_up(&self.journal).await;
        let shrunk = match self.derived_sizes().await {
            DerivedSizes { unused: 0, .. } => return 0,
            // The file is written once more before the old one is given up.
            sizes if !self.derived.has_space_for(sizes.files) => Err(FollowError::LittleSpace),
            _ => self.derived.with_store(|store| store.shrink()).await.map_err(FollowError::from),
        };
        if let Err(error) = shrunk {
            tracing::warn!(%error, "the search index could not be made smaller");
        }
        before.files.saturating_sub(self.derived_sizes().await.files)
    }

    /// Adds up the usage that was reported at a time or later.
    pub(crate) async fn report_usage(
        &self,
        by: UsageGrouping,
        since: Option<Millis>,
        zone: UsageZone,
    ) -> Result<UsageReport, ApiError> {
        let read = move |store: &DerivedStore| store.usage(since);
        let ((entries, indexed_seq), journal_seq, complete) = self.read_derived(read).await?;
        let report = build_usage_report(by, &zone, &entries);
        Ok(UsageReport { since, complete, index: IndexProgress { indexed_seq, journal_seq }, ..report })
    }

    /// Who did what: a page of entries.
    pub(crate) async fn audit(&self, filter: AuditFilter, limit: usize) -> Result<AuditPage, ApiError> {
        let read = move |store: &DerivedStore| store.audit(filter, limit + 1);
        let ((mut documents, indexed_seq), journal_seq, complete) = self.read_derived(read).await?;
        let has_more = documents.len() > limit;
        documents.truncate(limit);
        let next = documents.last().filter(|_| has_more).map(|(seq, _)| seq.to_string());
        let decode = |(seq, entry): (Seq, Vec<u8>)| {
            serde_json::from_slice::<AuditEntry>(&entry)
                .map_err(unreadable_row("the audit entry of event", seq))
        };
        let entries = documents.into_iter().map(decode).collect::<Result<Vec<_>, _>>()?;
        Ok(AuditPage { entries, next, complete, index: IndexProgress { indexed_seq, journal_seq } })
    }

    /// Derives everything again from the journal. Waits for it like a search.
    pub(crate) async fn rebuild_derived(&self) -> Result<IndexProgress, ApiError> {
        self.derived.request_rebuild();
        let (journal_seq, complete) = self.derived.catch_up(&self.journal).await;
        let progress = *self.derived.progress.borrow();
        let indexed_seq = if complete { progress.seq.max(journal_seq) } else { progress.seq };
        Ok(IndexProgress { indexed_seq, journal_seq })
    }

    /// Reads once everything is applied, or the time for it has passed. A damaged file is created anew meanwhile. Returns
    /// what was read, the last event of the journal, and whether all of it was read.
    async fn read_derived<T: Send + 'static>(
        &self,
        read: impl Fn(&DerivedStore) -> Result<T, DerivedDataError> + Clone + Send + 'static,
    ) -> Result<(T, Seq, bool), ApiError> {
        let mut is_first = true;
        loop {
            let (head, complete) = self.derived.catch_up(&self.journal).await;
            match self.derived.with_store(read.clone()).await {
                Ok(found) => return Ok((found, head, complete)),
                Err(error) if is_first && error.needs_rebuild() => {
                    tracing::warn!(%error, "the search index is damaged; it is built anew from the journal");
                    self.derived.request_rebuild();
                    is_first = false;
                }
                Err(_) if self.is_stopping() => return Err(stopping_error()),
                Err(error) => {
                    let message = "the search index cannot be read now; the daemon's log says why, and it is tried \
                                   again every few seconds";
                    return Err(ApiError::new(ErrorCode::StorageFailed, message).with_source(error));
                }
            }
        }
    }
}
