//! The rows that lists are built from, and the SQL that changes them. A change is applied in the transaction of the
//! events that caused it. The content of the `doc` columns is up to the caller.

use std::borrow::Cow;

use qd_protocol::{AskId, EventNumber, FleetId, MailId, Millis, RunId, Seq, SessionId, WorkspaceId};
use rusqlite::{Connection, params};

use crate::error::AppendError;
use crate::event::{SessionKey, WorkspaceKey};
use crate::schema::INDEXED_THROUGH_SQL;

/// A project directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkspaceRow {
    pub key: WorkspaceKey,
    pub id: WorkspaceId,
    /// The resolved path. No two workspaces have the same one, except removed ones.
    pub path: String,
    /// A display name.
    pub name: Option<String>,
    pub removed: bool,
    pub created_at: Millis,
    /// All other data, in the caller's format.
    pub doc: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct SessionRow {
    pub key: SessionKey,
    pub id: SessionId,
    pub workspace: WorkspaceKey,
    /// The parent session, or the fleet that the session belongs to.
    pub parent: Option<SessionKey>,
    pub title: Option<String>,
    pub closed_at: Option<Millis>,
    /// Whether the session has unfinished runs.
    pub live: bool,
    /// Whether the session needs an actor after a restart even without unfinished runs: it has a worker, is closing,
    /// must cancel child sessions, or has a mail claim that will expire.
    pub has_open_work: bool,
    /// The cost of the session's own runs.
    pub cost_usd: f64,
    /// The budget for this session and all sessions below it.
    pub budget_usd: Option<f64>,
    pub updated_at: Millis,
    /// All other data, in the caller's format.
    pub doc: Vec<u8>,
}

/// A group of sessions that work together. Their `parent` is the fleet's key.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetRow {
    pub key: SessionKey,
    pub id: FleetId,
    pub workspace: WorkspaceKey,
    /// Whether the fleet has not ended yet.
    pub live: bool,
    /// The budget for all of its sessions together.
    pub budget_usd: Option<f64>,
    /// What the fleet was created with, which can be large. It is written once: later changes leave it absent, and it
    /// is always present in a row that is read.
    pub created_with: Option<Vec<u8>>,
    /// All other data, in the caller's format.
    pub doc: Vec<u8>,
}

/// An accepted prompt and its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRow {
    pub id: RunId,
    pub session: SessionKey,
    pub workspace: WorkspaceKey,
    /// The index of the append's event that accepts the run. Absent when a known run is changed.
    pub accepted_event: Option<usize>,
    /// The seq of the accepting event. The journal sets it; a caller's value is ignored.
    pub seq: Seq,
    pub finished: bool,
    /// Tells this prompt from another one sent under the same run id.
    pub fingerprint: String,
    /// The prompt, in the caller's format. It never changes, so later changes can omit it.
    pub prompt: Option<Vec<u8>>,
    /// All other data, in the caller's format.
    pub doc: Vec<u8>,
}

/// A permission request or question of an agent, pending or resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskRow {
    pub id: AskId,
    /// The session or fleet that asks.
    pub session: SessionKey,
    pub pending: bool,
    /// All other data, in the caller's format.
    pub doc: Vec<u8>,
}

/// A message in a session's mailbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MailRow {
    pub id: MailId,
    /// The session that owns the mailbox. Absent if that session was purged; then only id and fingerprint are left.
    pub session: Option<SessionKey>,
    /// The index of the append's event that sends the message. Absent when a known message is changed.
    pub sent_event: Option<usize>,
    /// The seq of the sending event. The journal sets it; a caller's value is ignored.
    pub seq: Seq,
    /// Whether the message is not settled yet.
    pub open: bool,
    /// Tells this message from another one sent under the same id. It never changes.
    pub fingerprint: String,
    /// The message as sent, in the caller's format. It never changes, so later changes can omit it.
    pub sent: Option<Vec<u8>>,
    /// All other data, in the caller's format.
    pub doc: Vec<u8>,
}

/// A change to one row.
#[derive(Debug, Clone, PartialEq)]
pub enum RowChange {
    /// Inserts the workspace, or updates the row with its key.
    Workspace(WorkspaceRow),
    /// Inserts the session, or updates the row with its key.
    Session(SessionRow),
    /// Inserts the fleet if `created_with` is present, else updates the row with its key.
    Fleet(FleetRow),
    /// Inserts the run if `accepted_event` is present, else updates the row with its id.
    Run(RunRow),
    /// Inserts the ask, or updates the row with its id.
    Ask(AskRow),
    /// Inserts the message if `sent_event` is present, else updates the row with its id.
    Mail(MailRow),
    /// Stores the state of a session's machine after the event of that number, and replaces the previous snapshot.
    Snapshot {
        session: SessionKey,
        /// The last event included in the snapshot.
        number: EventNumber,
        /// In the caller's format.
        state: Vec<u8>,
    },
    /// Sets a value that belongs to the daemon as a whole. Keys that begin with `keep.` survive a rebuild; the others
    /// are rebuilt from events.
    Meta {
        key: Cow<'static, str>,
        /// Absent: deletes the key.
        value: Option<Vec<u8>>,
    },
    /// Deletes a session or fleet with all its events, runs, asks, mail and its snapshot. Only the ids and fingerprints
    /// of its mail remain.
    Purge { session: SessionKey },
}

impl RowChange {
    /// The size that counts towards the limits of the writer's queue.
    pub(crate) fn weight(&self) -> usize {
        const FIXED: usize = 128;
        FIXED
            + match self {
                Self::Workspace(row) => row.doc.len() + row.path.len(),
                Self::Session(row) => row.doc.len(),
                Self::Fleet(row) => row.doc.len() + row.created_with.as_ref().map_or(0, Vec::len),
                Self::Run(row) => row.doc.len() + row.prompt.as_ref().map_or(0, Vec::len),
                Self::Ask(row) => row.doc.len(),
                Self::Mail(row) => row.doc.len() + row.sent.as_ref().map_or(0, Vec::len),
                Self::Snapshot { state, .. } => state.len(),
                Self::Meta { value, .. } => value.as_ref().map_or(0, Vec::len),
                Self::Purge { .. } => 0,
            }
    }

    /// Applies the change. `first` is the first seq of the append it belongs to, `events` the number of its events, and
    /// `head` the last seq given out.
    pub(crate) fn apply(
        &self,
        db: &Connection,
        first: Seq,
        events: usize,
        head: Seq,
    ) -> Result<(), AppendError> {
        match self {
            Self::Workspace(row) => put_workspace(db, row),
            Self::Session(row) => put_session(db, row),
            Self::Fleet(row) => put_fleet(db, row),
            Self::Run(row) => put_run(db, row, first, events),
            Self::Ask(row) => put_ask(db, row),
            Self::Mail(row) => put_mail(db, row, first, events),
            Self::Snapshot { session, number, state } => {
                db.prepare_cached(
                    "INSERT OR REPLACE INTO snapshots(session, number, state) VALUES (?1, ?2, ?3)",
                )?
                .execute(params![session.0, to_sql_int(number.0), state])?;
                Ok(())
            }
            Self::Meta { key, value: Some(value) } => {
                db.prepare_cached("INSERT OR REPLACE INTO meta(key, value) VALUES (?1, ?2)")?
                    .execute(params![key.as_ref(), value])?;
                Ok(())
            }
            Self::Meta { key, value: None } => {
                db.prepare_cached("DELETE FROM meta WHERE key = ?1")?.execute([key.as_ref()])?;
                Ok(())
            }
            Self::Purge { session } => purge(db, *session, head),
        }
    }
}

/// Converts to SQLite's signed integers. No number here comes near the limit.
pub(crate) fn to_sql_int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Converts back. We never write negative numbers.
pub(crate) fn from_sql_int(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Records which id a key stands for. Events carry only keys, and their frames need the id even after a rebuild has
/// emptied the rows.
pub(crate) fn record_session_id(db: &Connection, key: SessionKey, id: &str) -> Result<(), AppendError> {
    db.prepare_cached("INSERT OR IGNORE INTO session_names(key, id) VALUES (?1, ?2)")?
        .execute(params![key.0, id])?;
    Ok(())
}

/// Like [`record_session_id`], for a workspace.
pub(crate) fn record_workspace_id(
    db: &Connection,
    key: WorkspaceKey,
    id: &WorkspaceId,
) -> Result<(), AppendError> {
    db.prepare_cached("INSERT OR IGNORE INTO workspace_names(key, id) VALUES (?1, ?2)")?
        .execute(params![key.0, id.as_str()])?;
    Ok(())
}

fn put_workspace(db: &Connection, row: &WorkspaceRow) -> Result<(), AppendError> {
    let WorkspaceRow { key, id, path, name, removed, created_at, doc } = row;
    db.prepare_cached(
        "INSERT INTO workspaces(key, id, path, name, removed, created_at, doc) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
         ON CONFLICT(key) DO UPDATE SET path = ?3, name = ?4, removed = ?5, created_at = ?6, doc = ?7",
    )?
    .execute(params![key.0, id.as_str(), path, name, removed, to_sql_int(created_at.0), doc])?;
    record_workspace_id(db, *key, id)
}

fn put_session(db: &Connection, row: &SessionRow) -> Result<(), AppendError> {
    let values = params![
        row.key.0,
        row.id.as_str(),
        row.workspace.0,
        row.parent.map(|parent| parent.0),
        row.title,
        row.closed_at.map(|at| to_sql_int(at.0)),
        row.live,
        row.has_open_work,
        row.cost_usd,
        row.budget_usd,
        to_sql_int(row.updated_at.0),
        row.doc,
    ];
    // Try an UPDATE first: most changes are to existing rows, and SQLite then touches only the indexes that differ. The
    // id (?2) never changes.
    let changed = db
        .prepare_cached(
            "UPDATE sessions SET workspace = ?3, parent = ?4, title = ?5, closed_at = ?6, live = ?7, owes = ?8,
             cost_usd = ?9, budget_usd = ?10, updated_at = ?11, doc = ?12 WHERE key = ?1",
        )?
        .execute(values)?;
    if changed > 0 {
        return Ok(());
    }
    db.prepare_cached(
        "INSERT INTO sessions(key, id, workspace, parent, title, closed_at, live, owes, cost_usd, budget_usd,
         updated_at, doc) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
    )?
    .execute(values)?;
    record_session_id(db, row.key, row.id.as_str())
}

fn put_fleet(db: &Connection, row: &FleetRow) -> Result<(), AppendError> {
    let FleetRow { key, id, workspace, live, budget_usd, created_with, doc } = row;
    let Some(created_with) = created_with else {
        let mut change =
            db.prepare_cached("UPDATE fleets SET live = ?2, budget_usd = ?3, doc = ?4 WHERE key = ?1")?;
        change.execute(params![key.0, live, budget_usd, doc])?;
        return Ok(());
    };
    db.prepare_cached(
        "INSERT INTO fleets(key, id, workspace, live, budget_usd, born, doc) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?
    .execute(params![key.0, id.as_str(), workspace.0, live, budget_usd, created_with, doc])?;
    record_session_id(db, *key, id.as_str())
}

/// Run ids are unique in the whole daemon. If two sessions accept the same id at the same time, the second append is
/// refused here. A second change to a run in the append that accepts it becomes an update.
fn put_run(db: &Connection, row: &RunRow, first: Seq, events: usize) -> Result<(), AppendError> {
    let RunRow { id, session, workspace, accepted_event, seq: _, finished, fingerprint, prompt, doc } = row;
    let changed = match accepted_event {
        Some(index) if *index >= events => {
            return Err(AppendError::Violation(format!(
                "run {id} refers to an accepting event that its append does not have"
            )));
        }
        Some(index) => {
            let seq = to_sql_int(first.0) + i64::try_from(*index).unwrap_or(i64::MAX);
            db.prepare_cached(
                "INSERT INTO runs(seq, id, session, workspace, finished, fingerprint, doc, prompt)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
                 ON CONFLICT(id) DO UPDATE SET finished = ?5, fingerprint = ?6, doc = ?7 WHERE runs.seq = ?1",
            )?
            .execute(params![
                seq,
                id.as_str(),
                session.0,
                workspace.0,
                finished,
                fingerprint,
                doc,
                prompt
            ])?
        }
        None => db
            .prepare_cached("UPDATE runs SET finished = ?2, fingerprint = ?3, doc = ?4 WHERE id = ?1")?
            .execute(params![id.as_str(), finished, fingerprint, doc])?,
    };
    match (changed, accepted_event) {
        (0, Some(_)) => Err(AppendError::Violation(format!("run {id} already exists"))),
        (0, None) => Err(AppendError::Violation(format!("run {id} does not exist"))),
        _ => Ok(()),
    }
}

fn put_ask(db: &Connection, row: &AskRow) -> Result<(), AppendError> {
    let AskRow { id, session, pending, doc } = row;
    db.prepare_cached(
        "INSERT INTO asks(id, session, pending, doc) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT(id) DO UPDATE SET pending = ?3, doc = ?4",
    )?
    .execute(params![id.as_str(), session.0, pending, doc])?;
    Ok(())
}

/// Mail ids are unique in the whole daemon, like run ids.
fn put_mail(db: &Connection, row: &MailRow, first: Seq, events: usize) -> Result<(), AppendError> {
    let MailRow { id, session, sent_event, seq: _, open, fingerprint, sent, doc } = row;
    let changed =
        match sent_event {
            Some(index) if *index >= events => {
                return Err(AppendError::Violation(format!(
                    "mail {id} refers to a sending event that its append does not have"
                )));
            }
            Some(index) => {
                let seq = to_sql_int(first.0) + i64::try_from(*index).unwrap_or(i64::MAX);
                db.prepare_cached(
                    "INSERT INTO mail(seq, id, session, open, fingerprint, sent, doc)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
                 ON CONFLICT(id) DO UPDATE SET open = ?4, doc = ?7 WHERE mail.seq = ?1",
                )?
                .execute(params![
                    seq,
                    id.as_str(),
                    session.map(|session| session.0),
                    open,
                    fingerprint,
                    sent,
                    doc
                ])?
            }
            None => db
                .prepare_cached("UPDATE mail SET open = ?2, doc = ?3 WHERE id = ?1")?
                .execute(params![id.as_str(), open, doc])?,
        };
    match (changed, sent_event) {
        (0, Some(_)) => Err(AppendError::Violation(format!("mail {id} already exists"))),
        (0, None) => Err(AppendError::Violation(format!("mail {id} does not exist"))),
        _ => Ok(()),
    }
}

fn purge(db: &Connection, session: SessionKey, head: Seq) -> Result<(), AppendError> {
    // The highest seq and key may be about to disappear from the tables. They must not be allocated again.
    let mut raise_counter = db.prepare_cached(
        "INSERT INTO counters(name, value) VALUES (?1, ?2)
         ON CONFLICT(name) DO UPDATE SET value = max(value, ?2)",
    )?;
    raise_counter.execute(params![SEQ_COUNTER, to_sql_int(head.0)])?;
    raise_counter.execute(params![SESSION_COUNTER, session.0])?;
    let newest = format!("DELETE FROM events WHERE gid > {INDEXED_THROUGH_SQL} AND session = ?1");
    for sql in [
        "DELETE FROM events WHERE gid IN (SELECT gid FROM session_events WHERE session = ?1)",
        &newest,
        "DELETE FROM session_events WHERE session = ?1",
        "DELETE FROM sessions WHERE key = ?1",
        "DELETE FROM fleets WHERE key = ?1",
        "DELETE FROM session_names WHERE key = ?1",
        "DELETE FROM runs WHERE session = ?1",
        "DELETE FROM asks WHERE session = ?1",
        "UPDATE mail SET session = NULL, open = 0, sent = NULL, doc = NULL WHERE session = ?1",
        "DELETE FROM snapshots WHERE session = ?1",
        "DELETE FROM merged_through WHERE session = ?1",
    ] {
        db.prepare_cached(sql)?.execute([session.0])?;
    }
    Ok(())
}

/// The counter of the highest seq at the last purge.
pub(crate) const SEQ_COUNTER: &str = "seq";
/// The counter of the highest purged session key.
pub(crate) const SESSION_COUNTER: &str = "session";
