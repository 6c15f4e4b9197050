//! The rows that lists are made of, and the SQL that changes them. A change is applied in the transaction of the
//! events that caused it; what the documents in the rows say is the caller's business.

use qd_protocol::{AskId, EventNumber, FleetId, MailId, Millis, RunId, Seq, SessionId, WorkspaceId};
use rusqlite::{Connection, params};

use crate::error::AppendError;
use crate::event::{SessionKey, WorkspaceKey};
use crate::schema::INDEXED_THROUGH_SQL;

/// A project directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkspaceRow {
    /// Inside this journal.
    pub key: WorkspaceKey,
    /// Outside.
    pub id: WorkspaceId,
    /// Resolved. Of the workspaces that are not removed, no two have the same.
    pub path: String,
    /// For people.
    pub name: Option<String>,
    /// Whether it was forgotten.
    pub removed: bool,
    /// Since when.
    pub created_at: Millis,
    /// The rest, as the caller likes it.
    pub doc: Vec<u8>,
}

/// A conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionRow {
    /// Inside this journal.
    pub key: SessionKey,
    /// Outside.
    pub id: SessionId,
    /// Its project.
    pub workspace: WorkspaceKey,
    /// The session above, or the fleet that it belongs to.
    pub parent: Option<SessionKey>,
    /// For people.
    pub title: Option<String>,
    /// When it was closed, if it is.
    pub closed_at: Option<Millis>,
    /// Whether it has runs that have not finished.
    pub live: bool,
    /// Whether it owes something to another session.
    pub has_obligations: bool,
    /// What its own runs have cost.
    pub cost_usd: f64,
    /// What it and those below may cost.
    pub budget_usd: Option<f64>,
    /// The last change.
    pub updated_at: Millis,
    /// The rest, as the caller likes it.
    pub doc: Vec<u8>,
}

/// Several sessions that work together. They are right below its key.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetRow {
    /// Inside this journal.
    pub key: SessionKey,
    /// Outside.
    pub id: FleetId,
    /// Its project.
    pub workspace: WorkspaceKey,
    /// Whether it has not ended.
    pub live: bool,
    /// What all of its sessions may cost together.
    pub budget_usd: Option<f64>,
    /// What it was made with, which may be much: given once, left out by later changes, always there when it is read.
    pub created_with: Option<Vec<u8>>,
    /// The rest, as the caller likes it.
    pub doc: Vec<u8>,
}

/// An accepted prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRow {
    /// The run.
    pub id: RunId,
    /// Whose.
    pub session: SessionKey,
    /// Where.
    pub workspace: WorkspaceKey,
    /// Which of the append's events accepts it; absent in a change of a run that is already known.
    pub accepted_event: Option<usize>,
    /// The seq of that event. Written by the journal and only there when the row is read.
    pub seq: Seq,
    /// Whether it has ended.
    pub finished: bool,
    /// What tells it apart from another prompt under the same id.
    pub fingerprint: String,
    /// What was asked, as the caller likes it. It never changes, so a change of a run need not bring it again.
    pub prompt: Option<Vec<u8>>,
    /// The rest, as the caller likes it.
    pub doc: Vec<u8>,
}

/// Something an agent waits for, or waited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskRow {
    /// The ask.
    pub id: AskId,
    /// Whose.
    pub session: SessionKey,
    /// Whether nobody has answered yet.
    pub pending: bool,
    /// The rest, as the caller likes it.
    pub doc: Vec<u8>,
}

/// A message between sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MailRow {
    /// The message.
    pub id: MailId,
    /// Whose mailbox; absent only where that was purged, of which nothing but the id is known.
    pub session: Option<SessionKey>,
    /// Which of the append's events sends it; absent in a change of one that is already known.
    pub sent_event: Option<usize>,
    /// The seq of that event. Written by the journal and only there when the row is read.
    pub seq: Seq,
    /// Whether something may still become of it.
    pub open: bool,
    /// What tells it apart from another message under the same id. It never changes.
    pub fingerprint: String,
    /// What was sent, as the caller likes it. It never changes, so a change need not bring it again.
    pub sent: Option<Vec<u8>>,
    /// The rest, as the caller likes it.
    pub doc: Vec<u8>,
}

/// One change of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum RowChange {
    /// A new one, or a change of the one with its key.
    Workspace(WorkspaceRow),
    /// A new one, or a change of the one with its key.
    Session(SessionRow),
    /// A new one, or a change of the one with its key.
    Fleet(FleetRow),
    /// A new one if it is being accepted, else a change of the one with its id.
    Run(RunRow),
    /// A new one, or a change of the one with its id.
    Ask(AskRow),
    /// A new one if it is being sent, else a change of the one with its id.
    Mail(MailRow),
    /// The machine's state after the event of that number; the session's earlier one is forgotten.
    Snapshot {
        /// Whose.
        session: SessionKey,
        /// The last event in it.
        number: EventNumber,
        /// As the caller likes it.
        state: Vec<u8>,
    },
    /// Something of the whole daemon. What begins with `keep.` survives a rebuild, the rest is made anew by it.
    Meta {
        /// Its name.
        key: &'static str,
        /// What it is now; absent: nothing.
        value: Option<Vec<u8>>,
    },
    /// Deletes a session with all its events, runs, asks, mail and its snapshot; of its mail the ids stay.
    Purge {
        /// Which.
        session: SessionKey,
    },
}

impl RowChange {
    /// How much it weighs in a queue.
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

    /// Makes the change. `first` and `events` are the seqs of the append it belongs to, `head` the last seq given out.
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
                    .execute(params![key, value])?;
                Ok(())
            }
            Self::Meta { key, value: None } => {
                db.prepare_cached("DELETE FROM meta WHERE key = ?1")?.execute([key])?;
                Ok(())
            }
            Self::Purge { session } => purge(db, *session, head),
        }
    }
}

/// SQLite's integers are signed; nothing we count comes near the sign.
pub(crate) fn to_sql_int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The way back. What we wrote is never negative.
pub(crate) fn from_sql_int(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Remembers which id a key stands for: events carry keys, and their frames need the id even after the rows were
/// emptied for a rebuild.
pub(crate) fn record_session_id(db: &Connection, key: SessionKey, id: &str) -> Result<(), AppendError> {
    db.prepare_cached("INSERT OR IGNORE INTO session_names(key, id) VALUES (?1, ?2)")?
        .execute(params![key.0, id])?;
    Ok(())
}

/// The same for a workspace.
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
    // Most changes are of a row that is there, and only what differs touches an index.
    let changed = db
        .prepare_cached(
            "UPDATE sessions SET workspace = ?2, parent = ?3, title = ?4, closed_at = ?5, live = ?6, owes = ?7,
             cost_usd = ?8, budget_usd = ?9, updated_at = ?10, doc = ?11 WHERE key = ?1",
        )?
        .execute(params![
            row.key.0,
            row.workspace.0,
            row.parent.map(|parent| parent.0),
            row.title,
            row.closed_at.map(|at| to_sql_int(at.0)),
            row.live,
            row.has_obligations,
            row.cost_usd,
            row.budget_usd,
            to_sql_int(row.updated_at.0),
            row.doc,
        ])?;
    if changed > 0 {
        return Ok(());
    }
    db.prepare_cached(
        "INSERT INTO sessions(key, id, workspace, parent, title, closed_at, live, owes, cost_usd, budget_usd,
         updated_at, doc) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
    )?
    .execute(params![
        row.key.0,
        row.id.as_str(),
        row.workspace.0,
        row.parent.map(|parent| parent.0),
        row.title,
        row.closed_at.map(|at| to_sql_int(at.0)),
        row.live,
        row.has_obligations,
        row.cost_usd,
        row.budget_usd,
        to_sql_int(row.updated_at.0),
        row.doc,
    ])?;
    record_session_id(db, row.key, row.id.as_str())
}

fn put_fleet(db: &Connection, row: &FleetRow) -> Result<(), AppendError> {
    let FleetRow { key, id, workspace, live, budget_usd, created_with: born, doc } = row;
    let Some(born) = born else {
        let mut change =
            db.prepare_cached("UPDATE fleets SET live = ?2, budget_usd = ?3, doc = ?4 WHERE key = ?1")?;
        change.execute(params![key.0, live, budget_usd, doc])?;
        return Ok(());
    };
    db.prepare_cached(
        "INSERT INTO fleets(key, id, workspace, live, budget_usd, born, doc) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?
    .execute(params![key.0, id.as_str(), workspace.0, live, budget_usd, born, doc])?;
    record_session_id(db, *key, id.as_str())
}

/// A run id is one run of the whole daemon: two sessions that accept the same one at once meet here, and the second
/// is refused. Two changes of a run in the append that accepts it are one.
fn put_run(db: &Connection, row: &RunRow, first: Seq, events: usize) -> Result<(), AppendError> {
    let RunRow {
        id,
        session,
        workspace,
        accepted_event: accepted,
        seq: _,
        finished,
        fingerprint,
        prompt,
        doc,
    } = row;
    let changed = match accepted {
        Some(index) if *index >= events => {
            return Err(AppendError::Violation(format!(
                "run {id} is accepted by an event that is not there"
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
    match (changed, accepted) {
        (0, Some(_)) => Err(AppendError::Violation(format!("there is a run {id} already"))),
        (0, None) => Err(AppendError::Violation(format!("there is no run {id} to change"))),
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

/// A mail id is one message of the whole daemon, like a run's.
fn put_mail(db: &Connection, row: &MailRow, first: Seq, events: usize) -> Result<(), AppendError> {
    let MailRow { id, session, sent_event: sent_by, seq: _, open, fingerprint, sent, doc } = row;
    let changed = match sent_by {
        Some(index) if *index >= events => {
            return Err(AppendError::Violation(format!("mail {id} is sent by an event that is not there")));
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
        None => db.prepare_cached("UPDATE mail SET open = ?2, doc = ?3 WHERE id = ?1")?.execute(params![
            id.as_str(),
            open,
            doc
        ])?,
    };
    match (changed, sent_by) {
        (0, Some(_)) => Err(AppendError::Violation(format!("there is mail {id} already"))),
        (0, None) => Err(AppendError::Violation(format!("there is no mail {id} to change"))),
        _ => Ok(()),
    }
}

fn purge(db: &Connection, session: SessionKey, head: Seq) -> Result<(), AppendError> {
    // The highest numbers may be about to vanish from the tables; they must not be given out again.
    let mut floor = db.prepare_cached(
        "INSERT INTO counters(name, value) VALUES (?1, ?2)
         ON CONFLICT(name) DO UPDATE SET value = max(value, ?2)",
    )?;
    floor.execute(params![SEQ_COUNTER, to_sql_int(head.0)])?;
    floor.execute(params![SESSION_COUNTER, session.0])?;
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
    ] {
        db.prepare_cached(sql)?.execute([session.0])?;
    }
    Ok(())
}

/// The highest seq at the last purge.
pub(crate) const SEQ_COUNTER: &str = "seq";
/// The highest session key that was purged.
pub(crate) const SESSION_COUNTER: &str = "session";
