//! Reads events back: the pool of read-only connections, pages of a topic, and one session's events. Every read is
//! short, because a long one would keep SQLite from restarting its log.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use qd_protocol::link::UpdateNumber;
use qd_protocol::{
    ClockReading, EventNumber, FleetId, MachineUptime, Millis, RunId, Seq, SessionId, WorkspaceId,
};
use rusqlite::{Connection, OptionalExtension, Params, Row, params};
use tokio::sync::Semaphore;

use crate::error::JournalReadError;
use crate::event::{
    EventDraft, EventScope, PublishedEvent, SessionKey, StoredEvent, WorkspaceKey, intern_kind,
};
use crate::merge::{MERGED_SPAN, MergedPart, MergedParts};
use crate::ring::{EventFilter, EventTopic};
use crate::rows::{from_sql_int, to_sql_int};
use crate::schema::{self, INDEXED_THROUGH_SQL};

/// Connections that can read at the same time.
pub(crate) const READERS: usize = 4;
/// Events that one read scans before it returns what it has found.
const SCAN_MAX: usize = 16 << 10;
/// The maximum size of a page's events, unless a single event is larger.
pub const PAGE_BYTES: usize = 4 << 20;

/// A page of a topic's events.
#[derive(Debug)]
pub struct JournalPage {
    pub events: Vec<Arc<PublishedEvent>>,
    /// Everything up to here has been scanned; the next page continues after it.
    pub scanned_through: Seq,
    /// Whether there were no more events when the page was read.
    pub end: bool,
}

/// A page of a session's events.
#[derive(Debug)]
pub struct SessionEventPage {
    pub events: Vec<StoredEvent>,
    /// Everything up to here has been scanned; the next page continues after it.
    pub scanned_through: EventNumber,
    /// Whether there were no more events when the page was read.
    pub end: bool,
}

/// A page of the events of all sessions, as they are stored.
#[derive(Debug)]
pub struct StoredEventPage {
    pub events: Vec<StoredEvent>,
    /// Everything up to here has been scanned; the next page continues after it.
    pub scanned_through: Seq,
}

/// The data from which a session's machine is rebuilt.
#[derive(Debug)]
pub struct SessionHistory {
    /// The last snapshot, with the number of the last event included in it.
    pub snapshot: Option<(EventNumber, Vec<u8>)>,
    /// All events after the snapshot, in order.
    pub events: Vec<StoredEvent>,
}

/// The read-only connections. Each read takes one, on a thread of tokio's blocking pool.
#[derive(Debug)]
pub(crate) struct ReaderPool {
    home: PathBuf,
    idle: Mutex<Vec<Connection>>,
    permits: Arc<Semaphore>,
}

impl ReaderPool {
    pub(crate) fn new(home: &Path) -> Self {
        Self { home: home.to_owned(), idle: Mutex::default(), permits: Arc::new(Semaphore::new(READERS)) }
    }

    /// Runs a read in one transaction. If the caller drops the future, the read still runs to its end and holds its
    /// permit until then.
    pub(crate) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        read: impl FnOnce(&Connection) -> Result<T, JournalReadError> + Send + 'static,
    ) -> Result<T, JournalReadError> {
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| JournalReadError::Stopped)?;
        let pool = self.clone();
        let work = move || {
            let _permit = permit;
            let idle = pool.idle.lock().pop();
            let db = match idle {
                Some(db) => db,
                None => schema::open_reader(&pool.home)?,
            };
            // One transaction, so that all statements see the same state of the journal.
            db.prepare_cached("BEGIN DEFERRED")?.execute([])?;
            let result = read(&db);
            if db.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([])).is_ok() {
                pool.idle.lock().push(db);
            }
            result
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(failure) => Err(JournalReadError::Io(format!("a read failed to finish: {failure}"))),
        }
    }

    /// Waits for the running reads and refuses new ones.
    pub(crate) async fn close(&self) {
        let all = u32::try_from(READERS).expect("there are few readers");
        let permits = self.permits.acquire_many(all).await;
        self.permits.close();
        drop(permits);
        self.idle.lock().clear();
    }

    /// Like [`close`](Self::close) but without waiting, for a journal that is dropped.
    pub(crate) fn abandon(&self) {
        self.permits.close();
        self.idle.lock().clear();
    }
}

const COLUMNS: &str =
    "e.gid, e.session, e.number, e.workspace, e.ts, e.kind, e.run, e.up, e.data, e.uptime, e.parts";
/// The column `parts`, which only merged rows have.
const PARTS_COLUMN: usize = 10;

/// An event on its way to a reader.
enum EventSource<'r, 'c> {
    /// An event with a row of its own.
    Row(&'r Row<'c>),
    /// An event that was merged into the row of another one.
    Part(StoredEvent),
}

impl EventSource<'_, '_> {
    fn seq(&self) -> Result<Seq, JournalReadError> {
        match self {
            Self::Row(row) => Ok(Seq(from_sql_int(row.get(0)?))),
            Self::Part(event) => Ok(event.seq),
        }
    }

    fn number(&self) -> Result<Option<EventNumber>, JournalReadError> {
        match self {
            Self::Row(row) => number_column(row),
            Self::Part(event) => Ok(event.number),
        }
    }

    fn kind(&self) -> Result<&str, JournalReadError> {
        match self {
            Self::Row(row) => text_column(row, 5),
            Self::Part(event) => Ok(&event.kind),
        }
    }

    fn run(&self) -> Result<Option<&str>, JournalReadError> {
        match self {
            Self::Row(row) => row.get_ref(6)?.as_str_or_null().map_err(damage_error),
            Self::Part(event) => Ok(event.run.as_ref().map(RunId::as_str)),
        }
    }

    fn workspace(&self) -> Result<Option<i64>, JournalReadError> {
        match self {
            Self::Row(row) => Ok(row.get(3)?),
            Self::Part(event) => Ok(event.scope.workspace.as_ref().map(|(WorkspaceKey(key), _)| *key)),
        }
    }

    fn data(&self) -> Result<&[u8], JournalReadError> {
        match self {
            Self::Row(row) => blob_column(row, 8),
            Self::Part(event) => Ok(&event.data),
        }
    }

    fn draft(self, scopes: &mut ScopeCache<'_>) -> Result<EventDraft, JournalReadError> {
        match self {
            Self::Row(row) => event_draft(row, scopes),
            Self::Part(event) => {
                let StoredEvent { number, ts, scope, run, kind, data, update_number, .. } = event;
                Ok(EventDraft::new(scope, number, ts, run, kind, &data, update_number))
            }
        }
    }

    fn stored(self, scopes: &mut ScopeCache<'_>) -> Result<StoredEvent, JournalReadError> {
        match self {
            Self::Row(row) => stored_event(row, scopes),
            Self::Part(event) => Ok(event),
        }
    }
}

/// A page of a topic: the events after `after`, up to and including `head`.
pub(crate) fn page(
    db: &Connection,
    filter: &EventFilter,
    after: Seq,
    head: Seq,
    limit: usize,
    bytes: usize,
) -> Result<JournalPage, JournalReadError> {
    let mut page = JournalPage { events: Vec::new(), scanned_through: after, end: true };
    if after >= head || limit == 0 {
        page.end = after >= head;
        return Ok(page);
    }
    let mut scopes = ScopeCache::new(db);
    let (mut scanned, mut taken) = (0, 0);
    // Breaks with `true` if there may be more events.
    let visit = |event: EventSource<'_, '_>| -> Result<ControlFlow<bool>, JournalReadError> {
        let seq = event.seq()?;
        if seq <= after {
            return Ok(ControlFlow::Continue(()));
        }
        if seq > head {
            return Ok(ControlFlow::Break(false));
        }
        let in_topic = match filter.topic {
            EventTopic::Workspace(WorkspaceKey(key)) => event.workspace()? == Some(key),
            EventTopic::All | EventTopic::Session(_) => true,
        };
        if in_topic && filter.matches_kind(event.kind()?) {
            let size = event.data()?.len();
            if page.events.len() == limit || (taken + size > bytes && !page.events.is_empty()) {
                return Ok(ControlFlow::Break(true));
            }
            taken += size;
            page.events.push(Arc::new(event.draft(&mut scopes)?.publish(seq)));
        }
        page.scanned_through = seq;
        scanned += 1;
        Ok(if scanned == SCAN_MAX { ControlFlow::Break(true) } else { ControlFlow::Continue(()) })
    };
    let outcome = match filter.topic {
        EventTopic::Session(session) => {
            // Without a row after the cursor, the last row can still be a merged one that reaches beyond it.
            let number = first_number_after(db, session, after)?.unwrap_or(i64::MAX);
            visit_session_events(db, session, number, visit)?
        }
        EventTopic::All | EventTopic::Workspace(_) => visit_all_events(db, after, visit)?,
    };
    page.end = outcome != ControlFlow::Break(true);
    if page.end {
        page.scanned_through = head;
    }
    Ok(page)
}

/// The seq of the last committed event, which may not be published yet.
pub(crate) fn last_seq(db: &Connection) -> Result<Seq, JournalReadError> {
    let seq: Option<i64> =
        db.prepare_cached("SELECT max(gid) FROM events")?.query_row([], |row| row.get(0))?;
    Ok(Seq(from_sql_int(seq.unwrap_or(0))))
}

/// A page of the events of these kinds after `after`, up to and including `head`, as they are stored.
pub(crate) fn stored_events(
    db: &Connection,
    kinds: &[&str],
    after: Seq,
    head: Seq,
    bytes: usize,
) -> Result<StoredEventPage, JournalReadError> {
    let mut page = StoredEventPage { events: Vec::new(), scanned_through: after };
    let mut scopes = ScopeCache::new(db);
    let (mut scanned, mut taken) = (0, 0);
    // Breaks with `true` if there may be more events.
    let outcome = visit_all_events(db, after, |event| -> Result<ControlFlow<bool>, JournalReadError> {
        let seq = event.seq()?;
        if seq <= after {
            return Ok(ControlFlow::Continue(()));
        }
        if seq > head {
            return Ok(ControlFlow::Break(false));
        }
        if kinds.contains(&event.kind()?) {
            taken += event.data()?.len();
            page.events.push(event.stored(&mut scopes)?);
        }
        page.scanned_through = seq;
        scanned += 1;
        let is_full = scanned == SCAN_MAX || taken >= bytes;
        Ok(if is_full { ControlFlow::Break(true) } else { ControlFlow::Continue(()) })
    })?;
    if outcome != ControlFlow::Break(true) {
        page.scanned_through = head.max(after);
    }
    Ok(page)
}

/// The keys of all sessions.
pub(crate) fn session_keys(db: &Connection) -> Result<Vec<SessionKey>, JournalReadError> {
    let mut statement = db.prepare_cached("SELECT key FROM sessions")?;
    let keys = statement.query_map([], |row| row.get(0).map(SessionKey))?;
    Ok(keys.collect::<Result<_, _>>()?)
}

/// Passes all events after a seq to `visit`, in order, until it breaks. The parts of a merged row come where they were:
/// events of other sessions may lie between them.
fn visit_all_events<B, E: From<JournalReadError>>(
    db: &Connection,
    after: Seq,
    mut visit: impl FnMut(EventSource<'_, '_>) -> Result<ControlFlow<B>, E>,
) -> Result<ControlFlow<B>, E> {
    let mut scopes = ScopeCache::new(db);
    // Parts of merged rows whose turn has not come yet.
    let mut waiting: BTreeMap<Seq, StoredEvent> = BTreeMap::new();
    // A row is stored at its first part, so rows before the cursor may reach beyond it, but not far.
    let earlier = format!(
        "SELECT {COLUMNS} FROM events e INDEXED BY events_merged
         WHERE e.parts IS NOT NULL AND e.gid > ?1 AND e.gid <= ?2 ORDER BY e.gid"
    );
    let reach = [to_sql_int(after.0.saturating_sub(MERGED_SPAN)), to_sql_int(after.0)];
    let _: ControlFlow<()> = visit_rows(db, &earlier, reach, |row| {
        let parts = parts_of_row(row, &mut scopes)?.into_iter().filter(|event| event.seq > after);
        waiting.extend(parts.map(|event| (event.seq, event)));
        Ok::<_, JournalReadError>(ControlFlow::Continue(()))
    })?;
    let sql = format!("SELECT {COLUMNS} FROM events e WHERE e.gid > ?1 ORDER BY e.gid");
    let outcome = visit_rows(db, &sql, [to_sql_int(after.0)], |row| {
        let seq = Seq(from_sql_int(row.get(0).map_err(JournalReadError::from)?));
        while let Some(part) = waiting.first_entry().filter(|part| *part.key() < seq) {
            if let broken @ ControlFlow::Break(_) = visit(EventSource::Part(part.remove()))? {
                return Ok(broken);
            }
        }
        if is_merged(row)? {
            let parts = parts_of_row(row, &mut scopes)?;
            waiting.extend(parts.into_iter().map(|event| (event.seq, event)));
            return Ok(ControlFlow::Continue(()));
        }
        visit(EventSource::Row(row))
    })?;
    if outcome.is_break() {
        return Ok(outcome);
    }
    for part in waiting.into_values() {
        if let broken @ ControlFlow::Break(_) = visit(EventSource::Part(part))? {
            return Ok(broken);
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Passes rows to `visit` until it breaks.
fn visit_rows<B, E: From<JournalReadError>>(
    db: &Connection,
    sql: &str,
    values: impl Params,
    mut visit: impl FnMut(&Row<'_>) -> Result<ControlFlow<B>, E>,
) -> Result<ControlFlow<B>, E> {
    let mut statement = db.prepare_cached(sql).map_err(JournalReadError::from)?;
    let mut rows = statement.query(values).map_err(JournalReadError::from)?;
    while let Some(row) = rows.next().map_err(JournalReadError::from)? {
        if let broken @ ControlFlow::Break(_) = visit(row)? {
            return Ok(broken);
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Passes a session's events from a number on to `visit`: first the indexed ones, then the few that are not indexed
/// yet. If a merged row contains the number, the parts before it are passed too.
fn visit_session_events<B>(
    db: &Connection,
    session: SessionKey,
    from: i64,
    mut visit: impl FnMut(EventSource<'_, '_>) -> Result<ControlFlow<B>, JournalReadError>,
) -> Result<ControlFlow<B>, JournalReadError> {
    let mut scopes = ScopeCache::new(db);
    let visit_indexed = |row: &Row<'_>| {
        if !is_merged(row)? {
            return visit(EventSource::Row(row));
        }
        for part in parts_of_row(row, &mut scopes)? {
            if let broken @ ControlFlow::Break(_) = visit(EventSource::Part(part))? {
                return Ok(broken);
            }
        }
        Ok(ControlFlow::Continue(()))
    };
    // The row that contains the number is the last one that begins at it or before.
    let row_number: Option<i64> = db
        .prepare_cached(
            "SELECT number FROM session_events WHERE session = ?1 AND number <= ?2 ORDER BY number DESC LIMIT 1",
        )?
        .query_row([session.0, from], |row| row.get(0))
        .optional()?;
    let indexed_from = row_number.unwrap_or(from);
    if let broken @ ControlFlow::Break(_) = visit_indexed_rows(db, session, indexed_from, visit_indexed)? {
        return Ok(broken);
    }
    let newest = format!(
        "SELECT {COLUMNS} FROM events e WHERE e.gid > {INDEXED_THROUGH_SQL} AND e.session = ?1 AND e.number >= ?2 ORDER BY e.gid"
    );
    visit_rows(db, &newest, params![session.0, from], |row| visit(EventSource::Row(row)))
}

/// Passes a session's rows from a number on to `visit`, as far as they are indexed.
pub(crate) fn visit_indexed_rows<B>(
    db: &Connection,
    session: SessionKey,
    from: i64,
    visit: impl FnMut(&Row<'_>) -> Result<ControlFlow<B>, JournalReadError>,
) -> Result<ControlFlow<B>, JournalReadError> {
    let indexed = format!(
        "SELECT {COLUMNS} FROM session_events i CROSS JOIN events e ON e.gid = i.gid
         WHERE i.session = ?1 AND i.number >= ?2 ORDER BY i.number"
    );
    visit_rows(db, &indexed, params![session.0, from], visit)
}

/// The number of a session's first event after a seq. Within a session the seqs ascend with the numbers, so a binary
/// search finds it and no index by seq is needed.
pub(crate) fn first_number_after(
    db: &Connection,
    session: SessionKey,
    after: Seq,
) -> Result<Option<i64>, JournalReadError> {
    let edge = |order: &str| {
        db.prepare_cached(&format!(
            "SELECT number, gid FROM session_events WHERE session = ?1 ORDER BY number {order} LIMIT 1"
        ))?
        .query_row([session.0], |row| Ok((row.get(0)?, from_sql_int(row.get(1)?))))
        .optional()
    };
    if let Some((high, gid)) = edge("DESC")?
        && gid > after.0
        && let Some((mut low, _)) = edge("ASC")?
    {
        // The result is in low..=end.
        let mut end: i64 = high;
        let mut seek = db.prepare_cached(
            "SELECT number, gid FROM session_events WHERE session = ?1 AND number >= ?2 ORDER BY number LIMIT 1",
        )?;
        while low < end {
            let middle = low + (end - low) / 2;
            let (number, gid): (i64, i64) =
                seek.query_row([session.0, middle], |row| Ok((row.get(0)?, row.get(1)?)))?;
            if from_sql_int(gid) > after.0 {
                end = middle;
            } else {
                low = number + 1;
            }
        }
        return Ok(Some(low));
    }
    let newest = format!(
        "SELECT number FROM events WHERE gid > max(?2, {INDEXED_THROUGH_SQL}) AND session = ?1 ORDER BY gid LIMIT 1"
    );
    let mut statement = db.prepare_cached(&newest)?;
    Ok(statement.query_row([session.0, to_sql_int(after.0)], |row| row.get(0)).optional()?)
}

/// A session's last snapshot and the events after it.
pub(crate) fn load_session(db: &Connection, session: SessionKey) -> Result<SessionHistory, JournalReadError> {
    let snapshot = db
        .prepare_cached("SELECT number, state FROM snapshots WHERE session = ?1")?
        .query_row([session.0], |row| Ok((EventNumber(from_sql_int(row.get(0)?)), row.get(1)?)))
        .optional()?;
    let from = snapshot.as_ref().map_or(0, |(number, _)| to_sql_int(number.0) + 1);
    let mut scopes = ScopeCache::new(db);
    let mut events = Vec::new();
    let _: ControlFlow<()> = visit_session_events(db, session, from, |event| {
        if event.number()?.is_some_and(|number| to_sql_int(number.0) >= from) {
            events.push(event.stored(&mut scopes)?);
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(SessionHistory { snapshot, events })
}

/// A page of a session's events. With a run, the scan starts at the event that accepted the run.
pub(crate) fn session_events(
    db: &Connection,
    session: SessionKey,
    run: Option<&RunId>,
    kinds: &[String],
    after: EventNumber,
    limit: usize,
) -> Result<SessionEventPage, JournalReadError> {
    let mut from = to_sql_int(after.0) + 1;
    if let Some(run) = run {
        let accepted: Option<i64> = db
            .prepare_cached("SELECT seq FROM runs WHERE id = ?1 AND session = ?2")?
            .query_row(params![run.as_str(), session.0], |row| row.get(0))
            .optional()?;
        if let Some(seq) = accepted {
            let first = first_number_after(db, session, Seq(from_sql_int(seq - 1)))?;
            from = from.max(first.unwrap_or(0));
        }
    }
    let mut scopes = ScopeCache::new(db);
    let mut page = SessionEventPage {
        events: Vec::new(),
        scanned_through: EventNumber(from_sql_int(from - 1)),
        end: true,
    };
    let (mut scanned, mut taken) = (0, 0);
    let outcome = visit_session_events(db, session, from, |event| {
        let number = event.number()?.unwrap_or_default();
        if to_sql_int(number.0) < from {
            return Ok(ControlFlow::Continue(()));
        }
        let kind = event.kind()?;
        let of_kind = kinds.is_empty() || kinds.iter().any(|wanted| wanted == kind);
        let of_run = match run {
            Some(run) => event.run()? == Some(run.as_str()),
            None => true,
        };
        if of_kind && of_run {
            let size = event.data()?.len();
            if page.events.len() == limit || (taken + size > PAGE_BYTES && !page.events.is_empty()) {
                return Ok(ControlFlow::Break(()));
            }
            taken += size;
            page.events.push(event.stored(&mut scopes)?);
        }
        page.scanned_through = number;
        scanned += 1;
        Ok(if scanned == SCAN_MAX { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    page.end = outcome.is_continue();
    Ok(page)
}

/// Passes every event in the journal to `visit`, in order.
pub(crate) fn for_each_event<E: From<JournalReadError>>(
    db: &Connection,
    mut visit: impl FnMut(StoredEvent) -> Result<(), E>,
) -> Result<(), E> {
    let mut scopes = ScopeCache::new(db);
    let _: ControlFlow<()> = visit_all_events(db, Seq(0), |event| {
        visit(event.stored(&mut scopes)?)?;
        Ok::<_, E>(ControlFlow::Continue(()))
    })?;
    Ok(())
}

/// Whether a row has the text of several events.
pub(crate) fn is_merged(row: &Row<'_>) -> Result<bool, JournalReadError> {
    Ok(row.get_ref(PARTS_COLUMN)? != rusqlite::types::ValueRef::Null)
}

/// The events of a merged row, as they were before.
fn parts_of_row(row: &Row<'_>, scopes: &mut ScopeCache<'_>) -> Result<Vec<StoredEvent>, JournalReadError> {
    let first = stored_event(row, scopes)?;
    let parts = merged_parts(row)?;
    let number = first.number.unwrap_or_default();
    let event = |MergedPart { seq, number, ts, update_number, data }| StoredEvent {
        seq,
        number: Some(number),
        // Events that are merged are output, and no limit is counted from them.
        ts: ClockReading { wall: ts, uptime: None },
        update_number,
        data,
        scope: first.scope.clone(),
        run: first.run.clone(),
        kind: first.kind.clone(),
    };
    Ok(parts.expand(&first.data, number).into_iter().map(event).collect())
}

/// Which events a merged row stands for.
pub(crate) fn merged_parts(row: &Row<'_>) -> Result<MergedParts, JournalReadError> {
    let parts = MergedParts::decode(blob_column(row, PARTS_COLUMN)?, blob_column(row, 8)?);
    parts.ok_or_else(|| damage_error("the parts of merged events do not fit their text"))
}

fn event_draft(row: &Row<'_>, scopes: &mut ScopeCache<'_>) -> Result<EventDraft, JournalReadError> {
    Ok(EventDraft::new(
        scopes.scope(row)?,
        number_column(row)?,
        Millis(from_sql_int(row.get(4)?)).into(),
        run_column(row)?,
        intern_kind(text_column(row, 5)?),
        blob_column(row, 8)?,
        update_number_column(row)?,
    ))
}

fn stored_event(row: &Row<'_>, scopes: &mut ScopeCache<'_>) -> Result<StoredEvent, JournalReadError> {
    Ok(StoredEvent {
        seq: Seq(from_sql_int(row.get(0)?)),
        number: number_column(row)?,
        ts: ClockReading { wall: Millis(from_sql_int(row.get(4)?)), uptime: uptime_column(row)? },
        scope: scopes.scope(row)?,
        run: run_column(row)?,
        kind: intern_kind(text_column(row, 5)?),
        data: blob_column(row, 8)?.to_vec(),
        update_number: update_number_column(row)?,
    })
}

pub(crate) fn number_column(row: &Row<'_>) -> Result<Option<EventNumber>, JournalReadError> {
    Ok(row.get::<_, Option<i64>>(2)?.map(|number| EventNumber(from_sql_int(number))))
}

pub(crate) fn update_number_column(row: &Row<'_>) -> Result<Option<UpdateNumber>, JournalReadError> {
    Ok(row.get::<_, Option<i64>>(7)?.map(|up| UpdateNumber(from_sql_int(up))))
}

fn uptime_column(row: &Row<'_>) -> Result<Option<MachineUptime>, JournalReadError> {
    match row.get_ref(9)?.as_str_or_null() {
        Ok(Some(uptime)) => uptime.parse().map(Some).map_err(damage_error),
        Ok(None) => Ok(None),
        Err(error) => Err(damage_error(error)),
    }
}

fn run_column(row: &Row<'_>) -> Result<Option<RunId>, JournalReadError> {
    match row.get_ref(6)?.as_str_or_null() {
        Ok(Some(id)) => RunId::parse(id).map(Some).map_err(damage_error),
        Ok(None) => Ok(None),
        Err(error) => Err(damage_error(error)),
    }
}

/// A text column, borrowed from the row.
pub(crate) fn text_column<'r>(row: &'r Row<'_>, column: usize) -> Result<&'r str, JournalReadError> {
    row.get_ref(column)?.as_str().map_err(damage_error)
}

/// A blob column, borrowed from the row.
pub(crate) fn blob_column<'r>(row: &'r Row<'_>, column: usize) -> Result<&'r [u8], JournalReadError> {
    row.get_ref(column)?.as_blob().map_err(damage_error)
}

/// An error for stored data that we could not have written.
pub(crate) fn damage_error(detail: impl std::fmt::Display) -> JournalReadError {
    JournalReadError::Io(format!("the journal is damaged: {detail}"))
}

/// A cache of the scopes that events' keys stand for, for the duration of one read.
struct ScopeCache<'c> {
    db: &'c Connection,
    scopes: HashMap<(Option<i64>, Option<i64>), Arc<EventScope>>,
}

impl<'c> ScopeCache<'c> {
    fn new(db: &'c Connection) -> Self {
        Self { db, scopes: HashMap::new() }
    }

    fn scope(&mut self, row: &Row<'_>) -> Result<Arc<EventScope>, JournalReadError> {
        let keys: (Option<i64>, Option<i64>) = (row.get(3)?, row.get(1)?);
        if let Some(scope) = self.scopes.get(&keys) {
            return Ok(scope.clone());
        }
        let workspace = keys.0.map(|key| self.workspace(key)).transpose()?;
        let stream = keys.1.map(|key| self.stream(key)).transpose()?;
        let scope = Arc::new(EventScope { workspace, ..stream.unwrap_or_default() });
        self.scopes.insert(keys, scope.clone());
        Ok(scope)
    }

    fn workspace(&self, key: i64) -> Result<(WorkspaceKey, WorkspaceId), JournalReadError> {
        let id = self.lookup("SELECT id FROM workspace_names WHERE key = ?1", key)?;
        Ok((WorkspaceKey(key), WorkspaceId::parse(&id).map_err(damage_error)?))
    }

    fn stream(&self, key: i64) -> Result<EventScope, JournalReadError> {
        let id = self.lookup("SELECT id FROM session_names WHERE key = ?1", key)?;
        let key = SessionKey(key);
        // Session and fleet ids have different prefixes.
        Ok(match id.starts_with(FleetId::PREFIX) {
            true => EventScope {
                fleet: Some((key, FleetId::parse(&id).map_err(damage_error)?)),
                ..EventScope::default()
            },
            false => EventScope {
                session: Some((key, SessionId::parse(&id).map_err(damage_error)?)),
                ..EventScope::default()
            },
        })
    }

    fn lookup(&self, sql: &str, key: i64) -> Result<String, JournalReadError> {
        self.db
            .prepare_cached(sql)?
            .query_row([key], |row| row.get(0))
            .optional()?
            .ok_or_else(|| damage_error(format_args!("no id is recorded for the key {key}")))
    }
}
