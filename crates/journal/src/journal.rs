//! The journal as others hold it: opening, appending, reading, closing. Everything here is a short call into the room
//! that does it; the threads and the home's lock are owned here and end with the last handle.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use qd_protocol::api::ReferenceMatch;
use qd_protocol::limits::EVENT_MAX;
use qd_protocol::{AskId, EventNumber, FleetId, MailId, Millis, RunId, Seq, SessionId, WorkspaceId};
use rusqlite::{Connection, OptionalExtension};
use tokio::sync::oneshot;

use crate::blobs::{BlobFile, BlobStore};
use crate::checkpoint::{Checkpointer, checkpoint};
use crate::error::{AppendError, JournalOpenError, JournalReadError};
use crate::event::{EventDraft, NewEvent, SessionKey, WorkspaceKey};
use crate::faults::FaultInjector;
use crate::gc::{self, ClosedSessions, JournalSizes};
use crate::index::SessionIndex;
use crate::lists::{
    self, AskFilter, FleetFilter, JournalCounts, MailFilter, RunFilter, SessionFilter, StoredResponse,
};
use crate::lock::HomeLock;
use crate::lock_ignoring_poison;
use crate::queue::{AppendJob, AppendReceipt, IdempotencyRecord, WriterQueue, WriterTask};
use crate::read::{self, JournalPage, PAGE_BYTES, ReaderPool, SessionEventPage, SessionHistory};
use crate::reserve::DiskReserve;
use crate::ring::{EventFilter, EventHub};
use crate::rows::{
    AskRow, FleetRow, MailRow, RowChange, RunRow, SEQ_COUNTER, SESSION_COUNTER, SessionRow, WorkspaceRow,
    from_sql_int,
};
use crate::schema;
use crate::stats::JournalStats;
use crate::subscription::Subscription;
use crate::writer::JournalWriter;

/// How a journal is opened.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// How long after a failed attempt to have the reserve back the next may be made.
    pub reserve_retry: Duration,
    /// Failures to inject; for tests.
    pub faults: Option<Arc<FaultInjector>>,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self { reserve_retry: Duration::from_secs(1), faults: None }
    }
}

/// What is written together or not at all.
#[derive(Debug, Default)]
pub struct AppendRequest {
    /// Events, in order.
    pub events: Vec<NewEvent>,
    /// Row changes, applied in order after the events.
    pub rows: Vec<RowChange>,
    /// An answer to be given again under its `Idempotency-Key`. A key that is taken is a violation.
    pub idempotency: Option<IdempotencyRecord>,
    /// Whether it may use the reserve: cancels and ends.
    pub may_use_reserve: bool,
}

/// A handle; clones are the same journal. The home is free again after [`close`](Self::close), or when the last
/// handle is gone.
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
    next_session: AtomicI64,
    next_workspace: AtomicI64,
    /// Gone once the journal is closed.
    running: Mutex<Option<JournalThreads>>,
}

#[derive(Debug)]
struct JournalThreads {
    writer: JoinHandle<()>,
    checkpointer: JoinHandle<()>,
    /// Last, so that the home is free only when nobody touches it any more.
    lock: HomeLock,
}

impl Journal {
    /// Takes the home's lock, brings the file to the newest schema and starts the threads. Makes what is missing.
    pub fn open(home: &Path, options: JournalOptions) -> Result<Self, JournalOpenError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(home)
            .map_err(JournalOpenError::io("make the home"))?;
        let lock = HomeLock::acquire(home)?;
        let reserve = DiskReserve::open(home, options.reserve_retry)?;
        let db = schema::open_writer(home)?;
        let checkpoint_db = schema::open_checkpointer(home)?;
        let highest =
            HighestKeys::read(&db).map_err(JournalOpenError::database("read where the journal ends"))?;
        let index =
            SessionIndex::read(&db).map_err(JournalOpenError::database("read where the journal ends"))?;
        let blobs = BlobStore::open(home)?;
        let (queue, board) = (Arc::new(WriterQueue::default()), Arc::new(EventHub::new(highest.seq)));
        let (stats, checkpoints) = (Arc::new(JournalStats::default()), Arc::new(Checkpointer::default()));
        let writer = JournalWriter {
            home: home.to_owned(),
            queue: queue.clone(),
            hub: board.clone(),
            stats: stats.clone(),
            checkpoints: checkpoints.clone(),
            reserve,
            faults: options.faults,
            last: highest.seq,
            index,
            queued_at_commit: 0,
        };
        let (points, numbers) = (checkpoints.clone(), stats.clone());
        let checkpointer = spawn_thread("qd-checkpoint", move || points.run(&checkpoint_db, &numbers))?;
        let writer =
            spawn_thread("qd-journal", move || writer.run(db)).inspect_err(|_| checkpoints.stop())?;
        let inner = JournalInner {
            home: home.to_owned(),
            queue,
            hub: board,
            pool: Arc::new(ReaderPool::new(home)),
            stats,
            checkpoints,
            blobs,
            next_session: AtomicI64::new(highest.session + 1),
            next_workspace: AtomicI64::new(highest.workspace + 1),
            running: Mutex::new(Some(JournalThreads { writer, checkpointer, lock })),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Appends; it is synced and visible to readers when this returns. If the future is dropped the append may
    /// still be made.
    pub async fn append(&self, append: AppendRequest) -> Result<AppendReceipt, AppendError> {
        let AppendRequest { events, rows, idempotency: remember, may_use_reserve: reserve } = append;
        for event in &events {
            check_event(event)?;
        }
        let events = events.into_iter().map(EventDraft::from).collect();
        let (answer, answered) = oneshot::channel();
        self.inner
            .queue
            .put(WriterTask::Append(AppendJob {
                events,
                rows,
                idempotency: remember,
                may_use_reserve: reserve,
                answer,
            }))
            .await?;
        answered.await.unwrap_or(Err(AppendError::Stopped))
    }

    /// The last event that readers can see.
    pub fn head(&self) -> Seq {
        self.inner.hub.head()
    }

    /// A key that no session has had.
    pub fn new_session_key(&self) -> SessionKey {
        SessionKey(self.inner.next_session.fetch_add(1, Ordering::Relaxed))
    }

    /// A key that no workspace has had.
    pub fn new_workspace_key(&self) -> WorkspaceKey {
        WorkspaceKey(self.inner.next_workspace.fetch_add(1, Ordering::Relaxed))
    }

    /// What a session's machine is rebuilt from.
    pub async fn load(&self, session: SessionKey) -> Result<SessionHistory, JournalReadError> {
        self.read(move |db| read::load_session(db, session)).await
    }

    /// One workspace, also if it was removed.
    pub async fn workspace(&self, id: &WorkspaceId) -> Result<Option<WorkspaceRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::workspace(db, id.as_str())).await
    }

    /// One workspace, also if it was removed.
    pub async fn workspace_by_key(
        &self,
        key: WorkspaceKey,
    ) -> Result<Option<WorkspaceRow>, JournalReadError> {
        self.read(move |db| lists::workspace_by_key(db, key)).await
    }

    /// The workspace of a path, unless it was removed.
    pub async fn workspace_by_path(&self, path: &str) -> Result<Option<WorkspaceRow>, JournalReadError> {
        let path = path.to_owned();
        self.read(move |db| lists::workspace_by_path(db, &path)).await
    }

    /// One session.
    pub async fn session(&self, id: &SessionId) -> Result<Option<SessionRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::session(db, id.as_str())).await
    }

    /// One session.
    pub async fn session_by_key(&self, key: SessionKey) -> Result<Option<SessionRow>, JournalReadError> {
        self.read(move |db| lists::session_by_key(db, key)).await
    }

    /// The fleet of this id.
    pub async fn fleet(&self, id: &FleetId) -> Result<Option<FleetRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::fleet(db, &id)).await
    }

    /// The fleet of this key.
    pub async fn fleet_by_key(&self, key: SessionKey) -> Result<Option<FleetRow>, JournalReadError> {
        self.read(move |db| lists::fleet_by_key(db, key)).await
    }

    /// Fleets, in the order of creation.
    pub async fn fleets(
        &self,
        filter: FleetFilter,
        after: Option<&FleetId>,
        limit: usize,
    ) -> Result<Vec<FleetRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::fleets(db, filter, after.as_ref(), limit)).await
    }

    /// One run.
    pub async fn run(&self, id: &RunId) -> Result<Option<RunRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::run(db, id.as_str())).await
    }

    /// One ask.
    pub async fn ask(&self, id: &AskId) -> Result<Option<AskRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::ask(db, id.as_str())).await
    }

    /// One message; of one in a purged mailbox, its id alone.
    pub async fn mail(&self, id: &MailId) -> Result<Option<MailRow>, JournalReadError> {
        let id = id.clone();
        self.read(move |db| lists::mail(db, id.as_str())).await
    }

    /// Messages, in the order of arrival.
    pub async fn mails(
        &self,
        filter: MailFilter,
        after: Option<&MailId>,
        limit: usize,
    ) -> Result<Vec<MailRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::mails(db, filter, after.as_ref(), limit)).await
    }

    /// Workspaces that are not removed, in the order of creation.
    pub async fn workspaces(
        &self,
        after: Option<&WorkspaceId>,
        limit: usize,
    ) -> Result<Vec<WorkspaceRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::workspaces(db, after.as_ref(), limit)).await
    }

    /// Sessions, in the order of creation.
    pub async fn sessions(
        &self,
        filter: SessionFilter,
        after: Option<&SessionId>,
        limit: usize,
    ) -> Result<Vec<SessionRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::sessions(db, filter, after.as_ref(), limit)).await
    }

    /// Runs, in the order of acceptance.
    pub async fn runs(
        &self,
        filter: RunFilter,
        after: Option<&RunId>,
        limit: usize,
    ) -> Result<Vec<RunRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::runs(db, filter, after.as_ref(), limit)).await
    }

    /// Asks, the oldest first unless the filter says otherwise.
    pub async fn asks(
        &self,
        filter: AskFilter,
        after: Option<&AskId>,
        limit: usize,
    ) -> Result<Vec<AskRow>, JournalReadError> {
        let after = after.cloned();
        self.read(move |db| lists::asks(db, filter, after.as_ref(), limit)).await
    }

    /// What a session and all below it have cost.
    pub async fn tree_cost(&self, root: SessionKey) -> Result<f64, JournalReadError> {
        self.read(move |db| lists::tree_cost(db, root)).await
    }

    /// How many sessions of a tree are open, its root included.
    pub async fn tree_size(&self, root: SessionKey) -> Result<usize, JournalReadError> {
        self.read(move |db| lists::tree_size(db, root)).await
    }

    /// A session and those above it, the nearest first.
    pub async fn lineage(&self, session: SessionKey) -> Result<Vec<SessionRow>, JournalReadError> {
        self.read(move |db| lists::lineage(db, session)).await
    }

    /// What a text may mean: an id, a title, or the beginning of an id. If something is called exactly so, only that.
    pub async fn resolve(&self, text: &str, limit: usize) -> Result<Vec<ReferenceMatch>, JournalReadError> {
        let text = text.to_owned();
        self.read(move |db| lists::resolve(db, &text, limit)).await
    }

    /// The fingerprint and the answer under an `Idempotency-Key`, while it is remembered.
    pub async fn idempotent_response(&self, key: &str) -> Result<Option<StoredResponse>, JournalReadError> {
        let key = key.to_owned();
        self.read(move |db| lists::idempotent_response(db, &key, Millis::now())).await
    }

    /// Something of the whole daemon.
    pub async fn meta(&self, key: &'static str) -> Result<Option<Vec<u8>>, JournalReadError> {
        self.read(move |db| lists::meta(db, key)).await
    }

    /// How much there is of what matters now.
    pub async fn counts(&self) -> Result<JournalCounts, JournalReadError> {
        self.read(lists::counts).await
    }

    /// A page of events after a cursor, as they were published. It may be empty and not the end: then the next one
    /// goes on at `scanned`.
    pub async fn page(
        &self,
        filter: &EventFilter,
        after: Seq,
        limit: usize,
    ) -> Result<JournalPage, JournalReadError> {
        let (filter, head) = (filter.clone(), self.head());
        self.read(move |db| read::page(db, &filter, after, head, limit, PAGE_BYTES)).await
    }

    /// Events of a session after a number: of one run, if given, and of some kinds, if any are. It may be empty and
    /// not the end: then the next one goes on at `scanned`.
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

    /// Watches from a cursor on, or from now. Whatever is published after this returns is seen.
    pub fn subscribe(&self, filter: EventFilter, after: Option<Seq>) -> Subscription {
        let JournalInner { hub: board, pool, stats, .. } = &*self.inner;
        Subscription::new(board.clone(), pool.clone(), stats.clone(), filter, after)
    }

    /// Texts and files too large for an event.
    pub fn blobs(&self) -> &BlobStore {
        &self.inner.blobs
    }

    /// Numbers for an operator.
    pub fn stats(&self) -> &JournalStats {
        &self.inner.stats
    }

    /// What SQLite finds wrong with the file; nothing if it is sound.
    pub async fn quick_check(&self) -> Result<Vec<String>, JournalReadError> {
        self.read(gc::quick_check).await
    }

    /// What the journal takes on the disk.
    pub async fn sizes(&self) -> Result<JournalSizes, JournalReadError> {
        let home = self.inner.home.clone();
        let mut sizes = self.read(move |db| gc::sizes(db, &home)).await?;
        let files = self.blobs().list().await.map_err(|error| JournalReadError::Io(error.to_string()))?;
        sizes.blobs = files.iter().map(|file| file.blob.size).sum();
        Ok(sizes)
    }

    /// Sessions that were closed before `before`, the longest closed first, and how many events they have. They are
    /// deleted by [`RowChange::Purge`].
    pub async fn closed_before(
        &self,
        before: Millis,
        limit: usize,
    ) -> Result<ClosedSessions, JournalReadError> {
        self.read(move |db| gc::closed_sessions(db, before, limit)).await
    }

    /// Files that were put before `before` and that nothing names once the sessions `without` are purged.
    pub async fn loose_blobs(
        &self,
        before: Millis,
        without: &[SessionKey],
    ) -> Result<Vec<BlobFile>, JournalReadError> {
        // Listed first: a file that is put and named after this is not among them, or is too young.
        let files = self.blobs().list().await.map_err(|error| JournalReadError::Io(error.to_string()))?;
        let mut old: Vec<BlobFile> = files.into_iter().filter(|file| file.put_at < before).collect();
        if old.is_empty() {
            return Ok(old);
        }
        let without: Arc<HashSet<SessionKey>> = Arc::new(without.iter().copied().collect());
        let mut named = HashSet::new();
        let mut after = Some(Seq(0));
        while let Some(seq) = after {
            let without = without.clone();
            (after, named) = self
                .read(move |db| {
                    let next = gc::hashes_in_events(db, seq, &without, &mut named)?;
                    Ok((next, named))
                })
                .await?;
        }
        let named = self
            .read(move |db| {
                gc::hashes_in_rows(db, &without, &mut named)?;
                Ok(named)
            })
            .await?;
        old.retain(|file| !named.contains(&file.blob.sha256));
        Ok(old)
    }

    /// Gives at most so many free pages back to the file system, and says how many were. The writer does it between
    /// two batches, so ask for few at a time.
    pub async fn vacuum(&self, pages: u32) -> Result<u64, AppendError> {
        let (answer, answered) = oneshot::channel();
        self.inner.queue.put(WriterTask::Vacuum { pages, answer }).await?;
        answered.await.unwrap_or(Err(AppendError::Stopped))
    }

    /// Writes what waits, moves the log into the file, ends the threads and lets go of the home. Subscriptions get
    /// what they have not seen as far as it is in memory, and end.
    pub async fn close(&self) {
        let running = lock_ignoring_poison(&self.inner.running).take();
        let Some(running) = running else { return };
        let inner = self.inner.clone();
        inner.queue.close();
        inner.checkpoints.stop();
        let threads = tokio::task::spawn_blocking(move || running.join());
        let lock = threads.await;
        inner.hub.close();
        inner.pool.close().await;
        let home = inner.home.clone();
        let last = tokio::task::spawn_blocking(move || {
            match schema::open_checkpointer(&home) {
                Ok(db) => {
                    if let Err(error) = checkpoint(&db, "TRUNCATE") {
                        tracing::warn!(%error, "the journal's log could not be moved at the end; it is read at the next start");
                    }
                }
                Err(error) => tracing::warn!(%error, "the journal's log could not be opened at the end"),
            }
            drop(lock);
        });
        if last.await.is_err() {
            tracing::error!("the journal's end broke off");
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
    /// Waits for the threads, which have been told to end.
    fn join(self) -> HomeLock {
        for thread in [self.writer, self.checkpointer] {
            if thread.join().is_err() {
                tracing::error!("a thread of the journal had panicked");
            }
        }
        self.lock
    }
}

impl Drop for JournalInner {
    fn drop(&mut self) {
        let Some(running) = lock_ignoring_poison(&self.running).take() else { return };
        self.queue.close();
        self.checkpoints.stop();
        let lock = running.join();
        self.hub.close();
        self.pool.abandon();
        drop(lock);
    }
}

/// What must hold of an event for its frame to be one and for its session to be readable by number.
fn check_event(event: &NewEvent) -> Result<(), AppendError> {
    let NewEvent { scope, number, kind, data, .. } = event;
    let refuse = |why: &str| Err(AppendError::Violation(format!("{kind}: {why}")));
    if scope.stream().is_some() != number.is_some() {
        return refuse("an event has a number in its session, and one without a session has none");
    }
    if number.is_some_and(|number| number.0 == 0) {
        return refuse("the first event of a session has the number 1");
    }
    if data.len() > EVENT_MAX {
        return refuse("the data is larger than an event may be");
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

/// The highest numbers that were ever given out.
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
