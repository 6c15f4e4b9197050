//! The public handle of the journal: open, append, read, subscribe, close. Every method is a short call into the module
//! that does the work. This file owns the threads and the home's lock, which end with the last handle.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use qd_protocol::api::{ReferenceKind, ReferenceMatch};
use qd_protocol::limits::EVENT_MAX;
use qd_protocol::{AskId, EventNumber, FleetId, MailId, Millis, RunId, Seq, SessionId, WorkspaceId};
use rusqlite::{Connection, OptionalExtension};
use tokio::sync::{oneshot, watch};

use crate::blobs::{BlobFile, BlobStore};
use crate::check::JournalCheck;
use crate::checkpoint::{Checkpointer, checkpoint};
use crate::database_file;
use crate::error::{AppendError, JournalOpenError, JournalReadError};
use crate::event::{EventDraft, NewEvent, SessionKey, WorkspaceKey};
use crate::faults::FaultInjector;
use crate::gc::{self, ClosedSessions, JournalSizes};
use crate::index::SessionIndex;
use crate::key_clock::{KeyClock, UptimeReader};
use crate::lists::{
    self, AskFilter, FleetFilter, JournalCounts, MailFilter, RunFilter, SessionFilter, StoredResponse,
};
use crate::lock::HomeLock;
use crate::merge::{self, MergePosition, MergeSavings};
use crate::queue::{AppendJob, AppendReceipt, IdempotencyRecord, WriterQueue, WriterTask};
use crate::read::{
    self, JournalPage, PAGE_BYTES, ReaderPool, SessionEventPage, SessionHistory, StoredEventPage,
};
use crate::reserve::DiskReserve;
use crate::ring::{EventFilter, EventHub, JournalActivity};
use crate::rows::{
    AskRow, FleetRow, MailRow, RowChange, RunRow, SEQ_COUNTER, SESSION_COUNTER, SessionRow, WorkspaceRow,
    from_sql_int,
};
use crate::schema;
use crate::stats::JournalStats;
use crate::subscription::Subscription;
use crate::writer::JournalWriter;

/// How long a page waits until what is committed is published. The writer publishes right after its commit.
const PUBLISH_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// How long to wait after a failed attempt to recreate the disk reserve before the next attempt.
    pub reserve_retry: Duration,
    /// Reads the uptime, by which idempotency keys expire. If there is none, they expire by the wall clock.
    pub read_uptime: UptimeReader,
    /// Faults to inject, for tests.
    pub faults: Option<Arc<FaultInjector>>,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self { reserve_retry: Duration::from_secs(1), read_uptime: || None, faults: None }
    }
}

/// Events and rows that are written together or not at all.
#[derive(Debug, Default)]
pub struct AppendRequest {
    /// In the order in which they get their seqs.
    pub events: Vec<NewEvent>,
    /// Row changes, applied in order after the events.
    pub rows: Vec<RowChange>,
    /// A response to store under its `Idempotency-Key`. A key that is already in use makes the append a violation.
    pub idempotency: Option<IdempotencyRecord>,
    /// Whether the append may use the disk reserve. Only cancels and the ends of runs may.
    pub may_use_reserve: bool,
}

/// A handle to the journal of one home. Clones share the same journal. The home's lock is released by
/// [`close`](Self::close), or when the last handle is dropped.
#[derive(Debug, Clone)]
pub struct Journal {
    inner: Arc<JournalInner>,
}

#[derive(Debug)]
struct JournalInner {
    home: PathBuf,
    queue: Arc<WriterQueue>,
    hub: Arc<EventHub>,
    pool: Arc<ReaderPool>,
    stats: Arc<JournalStats>,
    checkpoints: Arc<Checkpointer>,
    blobs: BlobStore,
    key_clock: Arc<KeyClock>,
    next_session: AtomicI64,
    next_workspace: AtomicI64,
    /// Held from the plan of a merge to its end, because a plan is made from what the last one left.
    merging: tokio::sync::Mutex<()>,
    /// Absent once the journal is closed.
    running: Mutex<Option<JournalThreads>>,
}

#[derive(Debug)]
struct JournalThreads {
    writer: JoinHandle<()>,
    checkpointer: JoinHandle<()>,
    /// Declared last, because the lock is released only after nothing touches the home any more.
    lock: HomeLock,
}

impl Journal {
    /// Takes the home's lock, migrates the database to the newest schema and starts the threads. Creates missing
    /// directories and files, but no journal in a home that has had one.
    pub fn open(home: &Path, options: JournalOptions) -> Result<Self, JournalOpenError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(home)
            .map_err(JournalOpenError::io("create the home"))?;
        let lock = HomeLock::acquire(home)?;
        database_file::ensure_journal(home)?;
        let reserve = DiskReserve::open(home, options.reserve_retry)?;
        let db = schema::open_writer(home)?;
        let checkpoint_db = schema::open_checkpointer(home)?;
        let highest =
            HighestKeys::read(&db).map_err(JournalOpenError::database("read where the journal ends"))?;
        let index =
            SessionIndex::read(&db).map_err(JournalOpenError::database("read where the journal ends"))?;
        let key_clock =
            KeyClock::open(&db, options.read_uptime).map_err(JournalOpenError::database("read its clock"))?;
        let key_clock = Arc::new(key_clock);
        let blobs = BlobStore::open(home)?;
        let (queue, hub) = (Arc::new(WriterQueue::default()), Arc::new(EventHub::new(highest.seq)));
        let (stats, checkpoints) = (Arc::new(JournalStats::default()), Arc::new(Checkpointer::default()));
        let writer = JournalWriter {
            home: home.to_owned(),
            queue: queue.clone(),
            hub: hub.clone(),
            stats: stats.clone(),
            checkpoints: checkpoints.clone(),
            reserve,
            faults: options.faults,
            key_clock: Arc::clone(&key_clock),
            last: highest.seq,
            index,
            queued_at_commit: 0,
        };
        let (checkpointer, counters) = (checkpoints.clone(), stats.clone());
        let checkpointer =
            spawn_thread("qd-checkpoint", move || checkpointer.run(&checkpoint_db, &counters))?;
        let writer =
            spawn_thread("qd-journal", move || writer.run(db)).inspect_err(|_| checkpoints.stop())?;
        let inner = JournalInner {
            home: home.to_owned(),
            queue,
            hub,
            pool: Arc::new(ReaderPool::new(home)),
            stats,
            checkpoints,
            blobs,
            key_clock,
            next_session: AtomicI64::new(highest.session + 1),
            next_workspace: AtomicI64::new(highest.workspace + 1),
            merging: tokio::sync::Mutex::default(),
            running: Mutex::new(Some(JournalThreads { writer, checkpointer, lock })),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Appends events and rows. When this returns, they are synced and visible to readers. If the future is dropped,
    /// the append may still happen.
    pub async fn append(&self, append: AppendRequest) -> Result<AppendReceipt, AppendError> {
        let AppendRequest { events, rows, idempotency, may_use_reserve } = append;
        for event in &events {
            check_event(event)?;
        }
        let events = events.into_iter().map(EventDraft::from).collect();
        let (reply, receipt) = oneshot::channel();
        self.inner
            .queue
            .put(WriterTask::Append(AppendJob { events, rows, idempotency, may_use_reserve, answer: reply }))
            .await?;
        receipt.await.unwrap_or(Err(AppendError::Stopped))
    }

    /// The seq of the last published event.
    pub fn head(&self) -> Seq {
        self.inner.hub.head()
    }

    /// Reports every published batch of events and every purge.
    pub fn activity(&self) -> watch::Receiver<JournalActivity> {
        self.inner.hub.activity()
    }

    /// Allocates a key that no session or fleet has ever had.
    pub fn new_session_key(&self) -> SessionKey {
        SessionKey(self.inner.next_session.fetch_add(1, Ordering::Relaxed))
    }

    /// Allocates a key that no workspace has ever had.
    pub fn new_workspace_key(&self) -> WorkspaceKey {
        WorkspaceKey(self.inner.next_workspace.fetch_add(1, Ordering::Relaxed))
    }

    /// The snapshot and events from which a session's machine is rebuilt.
    pub async fn load(&self, session: SessionKey) -> Result<SessionHistory, JournalReadError> {
        self.read(move |db| read::load_session(db, session)).await
    }

    /// Finds a workspace by its id, including removed ones.
    pub async fn workspace(&self, id: &WorkspaceId) -> Result<Option<WorkspaceRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::workspace(db, id.as_str())).await
    }

    /// Finds a workspace by its key, including removed ones.
    pub async fn workspace_by_key(
        &self,
        key: WorkspaceKey,
    ) -> Result<Option<WorkspaceRow>, JournalReadError> {
        self.read(move |db| lists::workspace_by_key(db, key)).await
    }

    /// Finds the workspace at a path, unless it was removed.
    pub async fn workspace_by_path(&self, path: &str) -> Result<Option<WorkspaceRow>, JournalReadError> {
        let path = path.to_owned();
        self.read(move |db| lists::workspace_by_path(db, &path)).await
    }

    pub async fn session(&self, id: &SessionId) -> Result<Option<SessionRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::session(db, id.as_str())).await
    }

    pub async fn session_by_key(&self, key: SessionKey) -> Result<Option<SessionRow>, JournalReadError> {
        self.read(move |db| lists::session_by_key(db, key)).await
    }

    pub async fn fleet(&self, id: &FleetId) -> Result<Option<FleetRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::fleet(db, &id)).await
    }

    pub async fn fleet_by_key(&self, key: SessionKey) -> Result<Option<FleetRow>, JournalReadError> {
        self.read(move |db| lists::fleet_by_key(db, key)).await
    }

    /// Lists fleets in the order of creation.
    pub async fn fleets(
        &self,
        filter: FleetFilter,
        after: Option<&FleetId>,
        limit: usize,
    ) -> Result<Vec<FleetRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::fleets(db, filter, after.as_ref(), limit)).await
    }

    pub async fn run(&self, id: &RunId) -> Result<Option<RunRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::run(db, id.as_str())).await
    }

    pub async fn ask(&self, id: &AskId) -> Result<Option<AskRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::ask(db, id.as_str())).await
    }

    /// Finds a message. If its mailbox was purged, only id and fingerprint are left.
    pub async fn mail(&self, id: &MailId) -> Result<Option<MailRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::mail(db, id.as_str())).await
    }

    /// Lists messages in the order of arrival.
    pub async fn list_mail(
        &self,
        filter: MailFilter,
        after: Option<&MailId>,
        limit: usize,
    ) -> Result<Vec<MailRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::list_mail(db, filter, after.as_ref(), limit)).await
    }

    /// Lists the workspaces that are not removed, in the order of creation.
    pub async fn workspaces(
        &self,
        after: Option<&WorkspaceId>,
        limit: usize,
    ) -> Result<Vec<WorkspaceRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::workspaces(db, after.as_ref(), limit)).await
    }

    /// Lists sessions in the order of creation.
    pub async fn sessions(
        &self,
        filter: SessionFilter,
        after: Option<&SessionId>,
        limit: usize,
    ) -> Result<Vec<SessionRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::sessions(db, filter, after.as_ref(), limit)).await
    }

    /// Lists runs in the order of acceptance.
    pub async fn runs(
        &self,
        filter: RunFilter,
        after: Option<&RunId>,
        limit: usize,
    ) -> Result<Vec<RunRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::runs(db, filter, after.as_ref(), limit)).await
    }

    /// Lists asks, the oldest first unless the filter says otherwise.
    pub async fn asks(
        &self,
        filter: AskFilter,
        after: Option<&AskId>,
        limit: usize,
    ) -> Result<Vec<AskRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::asks(db, filter, after.as_ref(), limit)).await
    }

    /// The cost in USD of a session and all sessions below it.
    pub async fn tree_cost(&self, root: SessionKey) -> Result<f64, JournalReadError> {
        self.read(move |db| lists::tree_cost(db, root)).await
    }

    /// The number of open sessions in a tree, including its root.
    pub async fn tree_size(&self, root: SessionKey) -> Result<usize, JournalReadError> {
        self.read(move |db| lists::tree_size(db, root)).await
    }

    /// A session and its ancestors, the session itself first.
    pub async fn lineage(&self, session: SessionKey) -> Result<Vec<SessionRow>, JournalReadError> {
        self.read(move |db| lists::lineage(db, session)).await
    }

    /// Resolves a reference typed by a user: an id, a session's title, or the beginning of an id. If an id or title
    /// matches exactly, only exact matches are returned.
    pub async fn resolve(&self, text: &str, limit: usize) -> Result<Vec<ReferenceMatch>, JournalReadError> {
        let text = text.to_owned();
        self.read(move |db| lists::resolve(db, &text, limit)).await
    }

    /// For each id, the shortest reference that [`Self::resolve`] takes for it and for nothing else of these kinds.
    pub async fn short_ids(
        &self,
        ids: Vec<String>,
        kinds: Vec<ReferenceKind>,
    ) -> Result<BTreeMap<String, String>, JournalReadError> {
        self.read(move |db| lists::short_ids(db, ids, &kinds)).await
    }

    /// The request fingerprint and the response stored under an `Idempotency-Key`, unless it has expired.
    pub async fn idempotent_response(&self, key: &str) -> Result<Option<StoredResponse>, JournalReadError> {
        let key = key.to_owned();
        let now = self.inner.key_clock.now();
        self.read(move |db| lists::idempotent_response(db, &key, now)).await
    }

    /// A value that belongs to the daemon as a whole. See [`RowChange::Meta`].
    pub async fn meta(&self, key: &'static str) -> Result<Option<Vec<u8>>, JournalReadError> {
        self.read(move |db| lists::meta(db, key)).await
    }

    /// All such values whose keys begin with `prefix`, in the order of their keys.
    pub async fn meta_values(&self, prefix: &'static str) -> Result<Vec<Vec<u8>>, JournalReadError> {
        self.read(move |db| lists::meta_values(db, prefix)).await
    }

    /// Counts of open sessions, live sessions, unfinished runs and pending asks.
    pub async fn counts(&self) -> Result<JournalCounts, JournalReadError> {
        self.read(lists::counts).await
    }

    /// A page of published events after a cursor. A page can be empty without being the end; continue at `scanned`.
    /// Rows can be read as soon as they are committed, just before their events are published. So the page has all that
    /// is committed, and waits until that is published: it has the events of every row that was read before.
    pub async fn page(
        &self,
        filter: &EventFilter,
        after: Seq,
        limit: usize,
    ) -> Result<JournalPage, JournalReadError> {
        let filter = filter.clone();
        let read =
            move |db: &Connection| read::page(db, &filter, after, read::last_seq(db)?, limit, PAGE_BYTES);
        let page = self.read(read).await?;
        if page.scanned_through > self.head() {
            let mut activity = self.activity();
            let published = activity.wait_for(|activity| activity.head >= page.scanned_through);
            // This fails only if the writer has stopped after a commit. What is committed counts all the same.
            let _ = tokio::time::timeout(PUBLISH_LIMIT, published).await;
        }
        Ok(page)
    }

    /// A page of a session's events after a number, limited to one run and to some kinds if given (no kinds means all).
    /// A page can be empty without being the end; continue at `scanned`.
    pub async fn session_events(
        &self,
        session: SessionKey,
        run: Option<&RunId>,
        kinds: &[&str],
        after: EventNumber,
        limit: usize,
    ) -> Result<SessionEventPage, JournalReadError> {
        let run = run.cloned();
        let kinds: Vec<String> = kinds.iter().map(|kind| (*kind).to_owned()).collect();
        self.read(move |db| read::session_events(db, session, run.as_ref(), &kinds, after, limit)).await
    }

    /// A page of published events of these kinds after a cursor, as they are stored: about `bytes` of data. A page can be
    /// empty without being the end; continue at `scanned_through`.
    pub async fn stored_events(
        &self,
        kinds: &'static [&'static str],
        after: Seq,
        bytes: usize,
    ) -> Result<StoredEventPage, JournalReadError> {
        let head = self.head();
        self.read(move |db| read::stored_events(db, kinds, after, head, bytes)).await
    }

    /// The keys of all sessions that were not purged.
    pub async fn session_keys(&self) -> Result<Vec<SessionKey>, JournalReadError> {
        self.read(read::session_keys).await
    }

    /// Subscribes to events after a cursor, or from now on if there is none. Every event published after this returns
    /// is delivered.
    pub fn subscribe(&self, filter: EventFilter, after: Option<Seq>) -> Subscription {
        let JournalInner { hub, pool, stats, .. } = &*self.inner;
        Subscription::new(hub.clone(), pool.clone(), stats.clone(), filter, after)
    }

    /// The store for texts and files too large for an event.
    pub fn blobs(&self) -> &BlobStore {
        &self.inner.blobs
    }

    /// Counters for operators.
    pub fn stats(&self) -> &JournalStats {
        &self.inner.stats
    }

    /// Begins a check of every row, which the caller carries out step by step.
    pub async fn begin_check(&self) -> Result<JournalCheck, JournalReadError> {
        let home = self.inner.home.clone();
        let opened = tokio::task::spawn_blocking(move || JournalCheck::open(&home)).await;
        opened.unwrap_or_else(|failure| Err(JournalReadError::Io(failure.to_string())))
    }

    /// Runs SQLite's quick check and returns the problems found; empty if the file is sound.
    pub async fn quick_check(&self) -> Result<Vec<String>, JournalReadError> {
        self.read(gc::quick_check).await
    }

    /// The disk space used by the journal and its blobs.
    pub async fn sizes(&self) -> Result<JournalSizes, JournalReadError> {
        let home = self.inner.home.clone();
        let mut sizes = self.read(move |db| gc::sizes(db, &home)).await?;
        let files = self.blobs().list().await.map_err(|error| JournalReadError::Io(error.to_string()))?;
        sizes.blobs = files.iter().map(|file| file.blob.size).sum();
        Ok(sizes)
    }

    /// Sessions closed before `before`, the longest closed first, and how many events they have. [`RowChange::Purge`]
    /// deletes them.
    pub async fn closed_before(
        &self,
        before: Millis,
        limit: usize,
    ) -> Result<ClosedSessions, JournalReadError> {
        self.read(move |db| gc::closed_sessions(db, before, limit)).await
    }

    /// Blobs last put before `before` that nothing refers to any more, assuming the sessions in `without` are purged.
    pub async fn unreferenced_blobs(
        &self,
        before: Millis,
        without: &[SessionKey],
    ) -> Result<Vec<BlobFile>, JournalReadError> {
        // List the files first: a file that is put and referred to after this is either not listed or too young.
        let files = self.blobs().list().await.map_err(|error| JournalReadError::Io(error.to_string()))?;
        let mut old: Vec<BlobFile> = files.into_iter().filter(|file| file.put_at < before).collect();
        if old.is_empty() {
            return Ok(old);
        }
        let without: Arc<HashSet<SessionKey>> = Arc::new(without.iter().copied().collect());
        let mut referenced = HashSet::new();
        let mut after = Some(Seq(0));
        while let Some(seq) = after {
            let without = without.clone();
            (after, referenced) = self
                .read(move |db| {
                    let next = gc::hashes_in_events(db, seq, &without, &mut referenced)?;
                    Ok((next, referenced))
                })
                .await?;
        }
        let referenced = self
            .read(move |db| {
                gc::hashes_in_rows(db, &without, &mut referenced)?;
                Ok(referenced)
            })
            .await?;
        old.retain(|file| !referenced.contains(&file.blob.sha256));
        Ok(old)
    }

    /// Merges streamed text of finished runs from before `before`: at most one transaction of a few hundred events.
    /// Returns the position to continue at; nothing at the end.
    pub async fn merge_some(
        &self,
        position: MergePosition,
        before: Millis,
    ) -> Result<(MergeSavings, Option<MergePosition>), AppendError> {
        let _turn = self.inner.merging.lock().await;
        let planned = self.read(move |db| merge::plan_next(db, position, before)).await;
        let (plan, next) = planned.map_err(|error| match error {
            JournalReadError::Stopped => AppendError::Stopped,
            error => AppendError::Io(error.to_string()),
        })?;
        let Some(plan) = plan else { return Ok((MergeSavings::default(), next)) };
        let savings = plan.savings();
        let (reply, merged) = oneshot::channel();
        self.inner.queue.put(WriterTask::Merge { plan: Box::new(plan), reply }).await?;
        let merged = merged.await.unwrap_or(Err(AppendError::Stopped))?;
        Ok((if merged { savings } else { MergeSavings::default() }, next))
    }

    /// What [`merge_some`](Self::merge_some) would save until its end.
    pub async fn mergeable(&self, before: Millis) -> Result<MergeSavings, JournalReadError> {
        let (mut total, mut next) = (MergeSavings::default(), Some(MergePosition::default()));
        while let Some(position) = next {
            let plan;
            (plan, next) = self.read(move |db| merge::plan_next(db, position, before)).await?;
            let savings = plan.map(|plan| plan.savings()).unwrap_or_default();
            total.events += savings.events;
            total.bytes += savings.bytes;
        }
        Ok(total)
    }

    /// Returns at most this many free pages to the file system, and reports how many it returned. The writer does this
    /// between two batches, so request few pages at a time.
    pub async fn vacuum(&self, pages: u32) -> Result<u64, AppendError> {
        let (reply, freed) = oneshot::channel();
        self.inner.queue.put(WriterTask::Vacuum { pages, reply }).await?;
        freed.await.unwrap_or(Err(AppendError::Stopped))
    }

    /// Writes everything queued, checkpoints the log, ends the threads and releases the home. Subscriptions get the
    /// events that are still in memory, and then end.
    pub async fn close(&self) {
        let running = self.inner.running.lock().take();
        let Some(running) = running else { return };
        let inner = self.inner.clone();
        inner.queue.close();
        inner.checkpoints.stop();
        let threads = tokio::task::spawn_blocking(move || running.join());
        let lock = threads.await;
        inner.hub.close();
        inner.pool.close().await;
        let home = inner.home.clone();
        let final_checkpoint = tokio::task::spawn_blocking(move || {
            match schema::open_checkpointer(&home) {
                Ok(db) => {
                    if let Err(error) = checkpoint(&db, "TRUNCATE") {
                        tracing::warn!(%error, "the journal's log could not be checkpointed at shutdown; the next start reads it");
                    }
                }
                Err(error) => tracing::warn!(%error, "the journal's log could not be opened at shutdown"),
            }
            drop(lock);
        });
        if final_checkpoint.await.is_err() {
            tracing::error!("the final checkpoint of the journal panicked");
        }
    }

    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, JournalReadError> + Send + 'static,
    ) -> Result<T, JournalReadError> {
        self.inner.pool.read(read).await
    }
}

impl JournalThreads {
    /// Waits for the threads, which have already been asked to stop.
    fn join(self) -> HomeLock {
        for thread in [self.writer, self.checkpointer] {
            if thread.join().is_err() {
                tracing::error!("a thread of the journal panicked");
            }
        }
        self.lock
    }
}

impl Drop for JournalInner {
    fn drop(&mut self) {
        let Some(running) = self.running.lock().take() else { return };
        self.queue.close();
        self.checkpoints.stop();
        let lock = running.join();
        self.hub.close();
        self.pool.abandon();
        drop(lock);
    }
}

/// Checks what the SSE frame and reading by number rely on: a number exactly if the event belongs to a session or
/// fleet, and data that is a JSON object on one line.
fn check_event(event: &NewEvent) -> Result<(), AppendError> {
    let NewEvent { scope, number, kind, data, .. } = event;
    let refuse = |reason: &str| Err(AppendError::Violation(format!("{kind}: {reason}")));
    if scope.stream().is_some() != number.is_some() {
        return refuse("an event of a session or fleet must have a number, and no other event may have one");
    }
    if number.is_some_and(|number| number.0 == 0) {
        return refuse("the numbers of a session's events start at 1");
    }
    if data.len() > EVENT_MAX {
        return refuse("the data exceeds the size limit of an event");
    }
    if data.first() != Some(&b'{')
        || data.last() != Some(&b'}')
        || data.iter().any(|b| matches!(b, b'\n' | b'\r'))
    {
        return refuse("the data is not a JSON object on one line");
    }
    Ok(())
}

fn spawn_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, JournalOpenError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(JournalOpenError::io("start the journal's threads"))
}

/// The highest seq and keys ever allocated. Numbers of purged rows count, because they must never be reused.
struct HighestKeys {
    seq: Seq,
    session: i64,
    workspace: i64,
}

impl HighestKeys {
    fn read(db: &Connection) -> rusqlite::Result<Self> {
        let highest = |sql: &str| -> rusqlite::Result<i64> {
            Ok(db.query_row(sql, [], |row| row.get::<_, Option<i64>>(0))?.unwrap_or(0))
        };
        let counter = |name: &str| -> rusqlite::Result<i64> {
            let value = db.query_row("SELECT value FROM counters WHERE name = ?1", [name], |row| row.get(0));
            Ok(value.optional()?.unwrap_or(0))
        };
        let seq = highest("SELECT max(gid) FROM events")?.max(counter(SEQ_COUNTER)?);
        let session = highest("SELECT max(key) FROM session_names")?
            .max(highest("SELECT max(session) FROM session_events")?)
            .max(counter(SESSION_COUNTER)?);
        let workspace = highest("SELECT max(key) FROM workspace_names")?;
        Ok(Self { seq: Seq(from_sql_int(seq)), session, workspace })
    }
}
