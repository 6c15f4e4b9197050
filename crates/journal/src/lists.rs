//! Reading rows: one by its id, lists in order, trees of sessions, and what a shortened id may mean. Each list names
//! the index it walks, so that it stays fast whatever SQLite's planner believes about the data.

use qd_protocol::api::{Match, MatchKind};
use qd_protocol::limits::{DEPTH_MAX, IDEMPOTENCY_S};
use qd_protocol::{AskId, FleetId, MailId, Millis, RunId, Seq, SessionId, WorkspaceId};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};

use crate::error::ReadError;
use crate::event::{SessionKey, WorkspaceKey};
use crate::read::{damaged, text};
use crate::rows::{AskRow, FleetRow, MailRow, RunRow, SessionRow, WorkspaceRow, count, int};

/// Which sessions a list has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SessionFilter {
    /// Of this project.
    pub workspace: Option<WorkspaceKey>,
    /// Not the closed ones.
    pub open_only: bool,
    /// Those with unfinished runs.
    pub live_only: bool,
    /// Those that owe something to another.
    pub owes_only: bool,
    /// Those right below this one.
    pub parent: Option<SessionKey>,
}

/// Which fleets a list has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FleetFilter {
    /// Of this project.
    pub workspace: Option<WorkspaceKey>,
    /// Those that have not ended.
    pub live_only: bool,
}

/// Which runs a list has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunFilter {
    /// Of this project.
    pub workspace: Option<WorkspaceKey>,
    /// Of this conversation.
    pub session: Option<SessionKey>,
    /// Not those that have ended.
    pub unfinished_only: bool,
}

/// Which asks a list has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AskFilter {
    /// Of this project.
    pub workspace: Option<WorkspaceKey>,
    /// Of this conversation.
    pub session: Option<SessionKey>,
    /// Not those that are resolved.
    pub pending_only: bool,
    /// The newest first.
    pub newest_first: bool,
}

/// Which messages a list has. Those of purged sessions are in none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MailFilter {
    /// In this mailbox.
    pub session: Option<SessionKey>,
    /// Not those that nothing becomes of any more.
    pub open_only: bool,
}

/// How much there is of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Sessions that are not closed.
    pub open_sessions: u64,
    /// Sessions with unfinished runs.
    pub live_sessions: u64,
    /// Runs that have not ended.
    pub unfinished_runs: u64,
    /// Asks that nobody has answered.
    pub pending_asks: u64,
}

const WORKSPACE: &str = "key, id, path, name, removed, created_at, doc";
const SESSION: &str =
    "key, id, workspace, parent, title, closed_at, live, owes, cost_usd, budget_usd, updated_at, doc";
const FLEET: &str = "key, id, workspace, live, budget_usd, born, doc";
const RUN: &str = "seq, id, session, workspace, finished, fingerprint, prompt, doc";
const ASK: &str = "id, session, pending, doc";
const MAIL: &str = "seq, id, session, open, fingerprint, sent, doc";

pub(crate) fn workspace(db: &Connection, id: &str) -> Result<Option<WorkspaceRow>, ReadError> {
    one(db, &format!("SELECT {WORKSPACE} FROM workspaces WHERE id = ?1"), id, workspace_row)
}

pub(crate) fn workspace_by_path(db: &Connection, path: &str) -> Result<Option<WorkspaceRow>, ReadError> {
    let sql = format!("SELECT {WORKSPACE} FROM workspaces WHERE path = ?1 AND removed = 0");
    one(db, &sql, path, workspace_row)
}

pub(crate) fn session(db: &Connection, id: &str) -> Result<Option<SessionRow>, ReadError> {
    one(db, &format!("SELECT {SESSION} FROM sessions WHERE id = ?1"), id, session_row)
}

pub(crate) fn run(db: &Connection, id: &str) -> Result<Option<RunRow>, ReadError> {
    one(db, &format!("SELECT {RUN} FROM runs WHERE id = ?1"), id, run_row)
}

pub(crate) fn ask(db: &Connection, id: &str) -> Result<Option<AskRow>, ReadError> {
    one(db, &format!("SELECT {ASK} FROM asks WHERE id = ?1"), id, ask_row)
}

pub(crate) fn mail(db: &Connection, id: &str) -> Result<Option<MailRow>, ReadError> {
    one(db, &format!("SELECT {MAIL} FROM mail WHERE id = ?1"), id, mail_row)
}

/// In the order of arrival.
pub(crate) fn mails(
    db: &Connection,
    filter: MailFilter,
    after: Option<&MailId>,
    limit: usize,
) -> Result<Vec<MailRow>, ReadError> {
    let mut list = List::new("mail", MAIL, "seq");
    list.after(db, after.map(MailId::as_str))?;
    list.index = match filter {
        MailFilter { session: Some(_), .. } => "mail_by_session",
        MailFilter { open_only: true, .. } => "mail_open",
        MailFilter { .. } => "",
    };
    list.equals("session", filter.session.map(|session| session.0));
    list.clauses.push("session IS NOT NULL".to_owned());
    list.only(filter.open_only, "open = 1");
    list.rows(db, limit, mail_row)
}

pub(crate) fn workspace_by_key(
    db: &Connection,
    key: WorkspaceKey,
) -> Result<Option<WorkspaceRow>, ReadError> {
    one(db, &format!("SELECT {WORKSPACE} FROM workspaces WHERE key = ?1"), key.0, workspace_row)
}

pub(crate) fn session_by_key(db: &Connection, key: SessionKey) -> Result<Option<SessionRow>, ReadError> {
    one(db, &format!("SELECT {SESSION} FROM sessions WHERE key = ?1"), key.0, session_row)
}

/// Those that are not removed, in the order of creation.
pub(crate) fn workspaces(
    db: &Connection,
    after: Option<&WorkspaceId>,
    limit: usize,
) -> Result<Vec<WorkspaceRow>, ReadError> {
    let mut list = List::new("workspaces", WORKSPACE, "key");
    list.after(db, after.map(WorkspaceId::as_str))?;
    list.clauses.push("removed = 0".to_owned());
    list.rows(db, limit, workspace_row)
}

/// In the order of creation.
pub(crate) fn sessions(
    db: &Connection,
    filter: SessionFilter,
    after: Option<&SessionId>,
    limit: usize,
) -> Result<Vec<SessionRow>, ReadError> {
    let mut list = List::new("sessions", SESSION, "key");
    list.after(db, after.map(SessionId::as_str))?;
    list.index = match filter {
        SessionFilter { parent: Some(_), .. } => "sessions_by_parent",
        SessionFilter { live_only: true, .. } => "sessions_live",
        SessionFilter { owes_only: true, .. } => "sessions_owing",
        SessionFilter { workspace: Some(_), open_only: true, .. } => "sessions_open_by_workspace",
        SessionFilter { workspace: Some(_), .. } => "sessions_by_workspace",
        SessionFilter { open_only: true, .. } => "sessions_open",
        _ => "",
    };
    list.equals("parent", filter.parent.map(|parent| parent.0));
    list.equals("workspace", filter.workspace.map(|workspace| workspace.0));
    list.only(filter.open_only, "closed_at IS NULL");
    list.only(filter.live_only, "live = 1");
    list.only(filter.owes_only, "owes = 1");
    list.rows(db, limit, session_row)
}

pub(crate) fn fleet(db: &Connection, id: &FleetId) -> Result<Option<FleetRow>, ReadError> {
    one(db, &format!("SELECT {FLEET} FROM fleets WHERE id = ?1"), id.as_str(), fleet_row)
}

pub(crate) fn fleet_by_key(db: &Connection, key: SessionKey) -> Result<Option<FleetRow>, ReadError> {
    one(db, &format!("SELECT {FLEET} FROM fleets WHERE key = ?1"), key.0, fleet_row)
}

/// In the order of creation.
pub(crate) fn fleets(
    db: &Connection,
    filter: FleetFilter,
    after: Option<&FleetId>,
    limit: usize,
) -> Result<Vec<FleetRow>, ReadError> {
    let mut list = List::new("fleets", FLEET, "key");
    list.after(db, after.map(FleetId::as_str))?;
    list.index = match filter {
        FleetFilter { live_only: true, .. } => "fleets_live",
        FleetFilter { workspace: Some(_), .. } => "fleets_by_workspace",
        FleetFilter { .. } => "",
    };
    list.equals("workspace", filter.workspace.map(|workspace| workspace.0));
    list.only(filter.live_only, "live = 1");
    list.rows(db, limit, fleet_row)
}

/// In the order of acceptance.
pub(crate) fn runs(
    db: &Connection,
    filter: RunFilter,
    after: Option<&RunId>,
    limit: usize,
) -> Result<Vec<RunRow>, ReadError> {
    let mut list = List::new("runs", RUN, "seq");
    list.after(db, after.map(RunId::as_str))?;
    list.index = match filter {
        RunFilter { unfinished_only: true, .. } => "runs_unfinished",
        RunFilter { session: Some(_), .. } => "runs_by_session",
        RunFilter { workspace: Some(_), .. } => "runs_by_workspace",
        _ => "",
    };
    list.equals("session", filter.session.map(|session| session.0));
    list.equals("workspace", filter.workspace.map(|workspace| workspace.0));
    list.only(filter.unfinished_only, "finished = 0");
    list.rows(db, limit, run_row)
}

/// An ask is a session's or a fleet's.
const ASK_WORKSPACE: &str = "coalesce((SELECT workspace FROM sessions WHERE key = session),
    (SELECT workspace FROM fleets WHERE key = session))";

/// The oldest first, unless the filter says otherwise.
pub(crate) fn asks(
    db: &Connection,
    filter: AskFilter,
    after: Option<&AskId>,
    limit: usize,
) -> Result<Vec<AskRow>, ReadError> {
    let mut list = List { descends: filter.newest_first, ..List::new("asks", ASK, "n") };
    list.after(db, after.map(AskId::as_str))?;
    list.index = match filter {
        AskFilter { pending_only: true, .. } => "asks_pending",
        AskFilter { session: Some(_), .. } => "asks_by_session",
        _ => "",
    };
    list.equals("session", filter.session.map(|session| session.0));
    list.equals(ASK_WORKSPACE, filter.workspace.map(|key| key.0));
    list.only(filter.pending_only, "pending = 1");
    list.rows(db, limit, ask_row)
}

/// What a session and all below it have cost.
pub(crate) fn tree_cost(db: &Connection, root: SessionKey) -> Result<f64, ReadError> {
    // UNION, not UNION ALL: a circle of parents, which nobody should make, would otherwise never end.
    let cost = db
        .prepare_cached(
            "WITH RECURSIVE tree(key) AS (VALUES(?1) UNION SELECT sessions.key FROM tree JOIN sessions INDEXED BY
             sessions_by_parent ON sessions.parent = tree.key)
             SELECT total(cost_usd) FROM tree JOIN sessions USING(key)",
        )?
        .query_row([root.0], |row| row.get(0))?;
    Ok(cost)
}

/// How many sessions of a tree are open, its root included.
pub(crate) fn tree_size(db: &Connection, root: SessionKey) -> Result<usize, ReadError> {
    let open: u64 = count(
        db.prepare_cached(
            "WITH RECURSIVE tree(key) AS (VALUES(?1) UNION SELECT sessions.key FROM tree JOIN sessions INDEXED BY
             sessions_by_parent ON sessions.parent = tree.key)
             SELECT count(*) FROM tree JOIN sessions USING(key) WHERE closed_at IS NULL",
        )?
        .query_row([root.0], |row| row.get(0))?,
    );
    Ok(usize::try_from(open).unwrap_or(usize::MAX))
}

/// A session and those above it, the nearest first.
pub(crate) fn line(db: &Connection, session: SessionKey) -> Result<Vec<SessionRow>, ReadError> {
    let mut line = Vec::new();
    let mut next = Some(session);
    while let Some(key) = next
        && line.len() <= DEPTH_MAX
    {
        let Some(row) = session_by_key(db, key)? else { break };
        next = row.parent;
        line.push(row);
    }
    Ok(line)
}

pub(crate) fn counts(db: &Connection) -> Result<Counts, ReadError> {
    let count = |sql| -> Result<u64, ReadError> {
        Ok(count(db.prepare_cached(sql)?.query_row([], |row| row.get(0))?))
    };
    Ok(Counts {
        open_sessions: count(
            "SELECT count(*) FROM sessions INDEXED BY sessions_open WHERE closed_at IS NULL",
        )?,
        live_sessions: count("SELECT count(*) FROM sessions INDEXED BY sessions_live WHERE live = 1")?,
        unfinished_runs: count("SELECT count(*) FROM runs INDEXED BY runs_unfinished WHERE finished = 0")?,
        pending_asks: count("SELECT count(*) FROM asks INDEXED BY asks_pending WHERE pending = 1")?,
    })
}

/// What tells the request apart, and the answer it got.
pub type Remembered = ([u8; 32], Vec<u8>);

/// An answer under an `Idempotency-Key`, while it is remembered.
pub(crate) fn remembered(db: &Connection, key: &str, now: Millis) -> Result<Option<Remembered>, ReadError> {
    let found = db
        .prepare_cached("SELECT fingerprint, answer FROM remembered WHERE key = ?1 AND at >= ?2")?
        .query_row(params![key, oldest_remembered(now)], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    Ok(found)
}

/// What was remembered before this is forgotten.
pub(crate) fn oldest_remembered(now: Millis) -> i64 {
    int(now.0.saturating_sub(IDEMPOTENCY_S * 1000))
}

pub(crate) fn meta(db: &Connection, key: &str) -> Result<Option<Vec<u8>>, ReadError> {
    Ok(db
        .prepare_cached("SELECT value FROM meta WHERE key = ?1")?
        .query_row([key], |row| row.get(0))
        .optional()?)
}

/// The five tables that a reference can point into: what they hold, how their ids begin, and what a match says.
const KINDS: [(MatchKind, &str, &str); 5] = [
    (
        MatchKind::Session,
        SessionId::PREFIX,
        "SELECT s.id, w.id, s.id FROM sessions s JOIN workspace_names w ON w.key = s.workspace WHERE 1",
    ),
    (
        MatchKind::Run,
        RunId::PREFIX,
        "SELECT s.id, w.id, n.id FROM runs s JOIN workspace_names w ON w.key = s.workspace
         JOIN session_names n ON n.key = s.session WHERE 1",
    ),
    (
        MatchKind::Ask,
        AskId::PREFIX,
        "SELECT s.id, w.id, t.id FROM asks s LEFT JOIN sessions t ON t.key = s.session
         LEFT JOIN fleets f ON f.key = s.session
         JOIN workspace_names w ON w.key = coalesce(t.workspace, f.workspace) WHERE 1",
    ),
    (
        MatchKind::Fleet,
        FleetId::PREFIX,
        "SELECT s.id, w.id, NULL FROM fleets s JOIN workspace_names w ON w.key = s.workspace WHERE 1",
    ),
    (
        MatchKind::Workspace,
        WorkspaceId::PREFIX,
        "SELECT s.id, s.id, NULL FROM workspaces s WHERE s.removed = 0",
    ),
];

/// What a text may mean: an id, a session's title, or the beginning of an id with or without its prefix. Whatever it
/// is exactly comes first.
pub(crate) fn resolve(db: &Connection, reference: &str, limit: usize) -> Result<Vec<Match>, ReadError> {
    let mut found: Vec<Match> = Vec::new();
    // Adds what a query finds, and says how much there is by then.
    let mut add = |kind: MatchKind, sql: &str, low: &str, high: &str| -> Result<usize, ReadError> {
        if found.len() >= limit {
            return Ok(found.len());
        }
        let mut statement = db.prepare_cached(sql)?;
        let mut rows = statement.query(params![low, high, i64::try_from(limit).unwrap_or(i64::MAX)])?;
        while let Some(row) = rows.next()? {
            let id = text(row, 0)?.to_owned();
            if found.len() < limit && !found.iter().any(|known| known.kind == kind && known.id == id) {
                let workspace_id = WorkspaceId::parse(text(row, 1)?).map_err(damaged)?;
                let session: Option<String> = row.get(2)?;
                let session_id = session.map(|id| SessionId::parse(&id).map_err(damaged)).transpose()?;
                found.push(Match { kind, id, workspace_id, session_id });
            }
        }
        Ok(found.len())
    };
    for (kind, _, select) in KINDS {
        add(kind, &format!("{select} AND s.id = ?1 AND ?2 = '' ORDER BY s.id LIMIT ?3"), reference, "")?;
    }
    let (kind, _, select) = KINDS[0];
    let by_title = format!("{select} AND s.title = ?1 AND ?2 = '' ORDER BY s.key DESC LIMIT ?3");
    let exact = add(kind, &by_title, reference, "")?;
    // Whoever says the whole of something means it, whatever else begins like that.
    // Ids are of these characters, all of which sort before DEL; so a prefix is a range.
    if exact > 0
        || reference.is_empty()
        || !reference.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.:-".contains(&b))
    {
        return Ok(found);
    }
    for (kind, prefix, select) in KINDS {
        let sql = format!("{select} AND s.id >= ?1 AND s.id < ?2 ORDER BY s.id LIMIT ?3");
        for low in [reference.to_owned(), format!("{prefix}{reference}")] {
            add(kind, &sql, &low, &format!("{low}\u{7f}"))?;
        }
    }
    Ok(found)
}

fn one<T>(
    db: &Connection,
    sql: &str,
    by: impl rusqlite::ToSql,
    read: fn(&Row<'_>) -> Result<T, ReadError>,
) -> Result<Option<T>, ReadError> {
    let mut statement = db.prepare_cached(sql)?;
    let mut rows = statement.query([by])?;
    rows.next()?.map(read).transpose()
}

/// A list that is being put together.
struct List {
    table: &'static str,
    columns: &'static str,
    order: &'static str,
    index: &'static str,
    /// Whether the last comes first.
    descends: bool,
    clauses: Vec<String>,
    values: Vec<Value>,
}

impl List {
    fn new(table: &'static str, columns: &'static str, order: &'static str) -> Self {
        Self { table, columns, order, index: "", descends: false, clauses: Vec::new(), values: Vec::new() }
    }

    /// Goes on after the row of this id.
    fn after(&mut self, db: &Connection, id: Option<&str>) -> Result<(), ReadError> {
        let Some(id) = id else { return Ok(()) };
        let (table, order) = (self.table, self.order);
        let place: Option<i64> = db
            .prepare_cached(&format!("SELECT {order} FROM {table} WHERE id = ?1"))?
            .query_row([id], |row| row.get(0))
            .optional()?;
        let place = place.ok_or_else(|| ReadError::Cursor(id.to_owned()))?;
        self.clauses.push(format!("{order} {} ?", if self.descends { "<" } else { ">" }));
        self.values.push(place.into());
        Ok(())
    }

    fn equals(&mut self, column: &str, value: Option<i64>) {
        if let Some(value) = value {
            self.clauses.push(format!("{column} = ?"));
            self.values.push(value.into());
        }
    }

    fn only(&mut self, only: bool, clause: &str) {
        if only {
            self.clauses.push(clause.to_owned());
        }
    }

    fn rows<T>(
        mut self,
        db: &Connection,
        limit: usize,
        read: fn(&Row<'_>) -> Result<T, ReadError>,
    ) -> Result<Vec<T>, ReadError> {
        let Self { table, columns, order, index, descends, ref clauses, .. } = self;
        let way = if descends { " DESC" } else { "" };
        let indexed = if index.is_empty() { String::new() } else { format!(" INDEXED BY {index}") };
        let filter =
            if clauses.is_empty() { String::new() } else { format!(" WHERE {}", clauses.join(" AND ")) };
        let sql = format!("SELECT {columns} FROM {table}{indexed}{filter} ORDER BY {order}{way} LIMIT ?");
        self.values.push(i64::try_from(limit).unwrap_or(i64::MAX).into());
        let mut statement = db.prepare_cached(&sql)?;
        let mut rows = statement.query(params_from_iter(self.values))?;
        let mut list = Vec::new();
        while let Some(row) = rows.next()? {
            list.push(read(row)?);
        }
        Ok(list)
    }
}

fn millis(value: i64) -> Millis {
    Millis(count(value))
}

fn workspace_row(row: &Row<'_>) -> Result<WorkspaceRow, ReadError> {
    Ok(WorkspaceRow {
        key: WorkspaceKey(row.get(0)?),
        id: WorkspaceId::parse(text(row, 1)?).map_err(damaged)?,
        path: row.get(2)?,
        name: row.get(3)?,
        removed: row.get(4)?,
        created_at: millis(row.get(5)?),
        doc: row.get(6)?,
    })
}

fn session_row(row: &Row<'_>) -> Result<SessionRow, ReadError> {
    Ok(SessionRow {
        key: SessionKey(row.get(0)?),
        id: SessionId::parse(text(row, 1)?).map_err(damaged)?,
        workspace: WorkspaceKey(row.get(2)?),
        parent: row.get::<_, Option<i64>>(3)?.map(SessionKey),
        title: row.get(4)?,
        closed_at: row.get::<_, Option<i64>>(5)?.map(millis),
        live: row.get(6)?,
        owes: row.get(7)?,
        cost_usd: row.get(8)?,
        budget_usd: row.get(9)?,
        updated_at: millis(row.get(10)?),
        doc: row.get(11)?,
    })
}

fn fleet_row(row: &Row<'_>) -> Result<FleetRow, ReadError> {
    Ok(FleetRow {
        key: SessionKey(row.get(0)?),
        id: FleetId::parse(text(row, 1)?).map_err(damaged)?,
        workspace: WorkspaceKey(row.get(2)?),
        live: row.get(3)?,
        budget_usd: row.get(4)?,
        born: row.get(5)?,
        doc: row.get(6)?,
    })
}

fn run_row(row: &Row<'_>) -> Result<RunRow, ReadError> {
    Ok(RunRow {
        seq: Seq(count(row.get(0)?)),
        id: RunId::parse(text(row, 1)?).map_err(damaged)?,
        session: SessionKey(row.get(2)?),
        workspace: WorkspaceKey(row.get(3)?),
        accepted: None,
        finished: row.get(4)?,
        fingerprint: row.get(5)?,
        prompt: row.get(6)?,
        doc: row.get(7)?,
    })
}

fn mail_row(row: &Row<'_>) -> Result<MailRow, ReadError> {
    Ok(MailRow {
        seq: Seq(count(row.get(0)?)),
        id: MailId::parse(text(row, 1)?).map_err(damaged)?,
        session: row.get::<_, Option<i64>>(2)?.map(SessionKey),
        sent_by: None,
        open: row.get(3)?,
        fingerprint: row.get(4)?,
        sent: row.get(5)?,
        doc: row.get::<_, Option<Vec<u8>>>(6)?.unwrap_or_default(),
    })
}

fn ask_row(row: &Row<'_>) -> Result<AskRow, ReadError> {
    Ok(AskRow {
        id: AskId::parse(text(row, 0)?).map_err(damaged)?,
        session: SessionKey(row.get(1)?),
        pending: row.get(2)?,
        doc: row.get(3)?,
    })
}
