//! Queries for rows: by id, filtered lists, trees of sessions, and resolving shortened ids. Each list names the index
//! it uses, so its speed does not depend on what SQLite's planner estimates.

use std::collections::BTreeMap;

use qd_protocol::api::{ReferenceKind, ReferenceMatch};
use qd_protocol::limits::{DEPTH_MAX, IDEMPOTENCY_S, SHORT_ID_MIN};
use qd_protocol::{AskId, FleetId, MailId, Millis, RunId, Seq, SessionId, WorkspaceId};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};

use crate::error::JournalReadError;
use crate::event::{SessionKey, WorkspaceKey};
use crate::read::{damage_error, text_column};
use crate::rows::{AskRow, FleetRow, MailRow, RunRow, SessionRow, WorkspaceRow, from_sql_int, to_sql_int};

/// Selects the sessions of a list. All conditions must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SessionFilter {
    pub workspace: Option<WorkspaceKey>,
    /// Skips closed sessions.
    pub open_only: bool,
    /// Only sessions with unfinished runs.
    pub live_only: bool,
    /// Only sessions with open work; see [`SessionRow::has_open_work`].
    pub open_work_only: bool,
    /// Only direct children of this session or fleet.
    pub parent: Option<SessionKey>,
}

/// Selects the fleets of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FleetFilter {
    pub workspace: Option<WorkspaceKey>,
    /// Only fleets that have not ended.
    pub live_only: bool,
}

/// Selects the runs of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunFilter {
    pub workspace: Option<WorkspaceKey>,
    pub session: Option<SessionKey>,
    pub unfinished_only: bool,
}

/// Selects the asks of a list and their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AskFilter {
    pub workspace: Option<WorkspaceKey>,
    pub session: Option<SessionKey>,
    pub pending_only: bool,
    pub newest_first: bool,
}

/// Selects the messages of a list. Messages of purged sessions are in no list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MailFilter {
    /// The session whose mailbox is listed.
    pub session: Option<SessionKey>,
    /// Only messages that are not settled yet.
    pub open_only: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalCounts {
    pub open_sessions: u64,
    /// Sessions with unfinished runs.
    pub live_sessions: u64,
    pub unfinished_runs: u64,
    pub pending_asks: u64,
}

const WORKSPACE: &str = "key, id, path, name, removed, created_at, doc";
const SESSION: &str =
    "key, id, workspace, parent, title, closed_at, live, owes, cost_usd, budget_usd, updated_at, doc";
const FLEET: &str = "key, id, workspace, live, budget_usd, born, doc";
const RUN: &str = "seq, id, session, workspace, finished, fingerprint, prompt, doc";
const ASK: &str = "id, session, pending, doc";
const MAIL: &str = "seq, id, session, open, fingerprint, sent, doc";

pub(crate) fn workspace(db: &Connection, id: &str) -> Result<Option<WorkspaceRow>, JournalReadError> {
    query_one(db, &format!("SELECT {WORKSPACE} FROM workspaces WHERE id = ?1"), id, workspace_row)
}

pub(crate) fn workspace_by_path(
    db: &Connection,
    path: &str,
) -> Result<Option<WorkspaceRow>, JournalReadError> {
    let sql = format!("SELECT {WORKSPACE} FROM workspaces WHERE path = ?1 AND removed = 0");
    query_one(db, &sql, path, workspace_row)
}

pub(crate) fn session(db: &Connection, id: &str) -> Result<Option<SessionRow>, JournalReadError> {
    query_one(db, &format!("SELECT {SESSION} FROM sessions WHERE id = ?1"), id, session_row)
}

pub(crate) fn run(db: &Connection, id: &str) -> Result<Option<RunRow>, JournalReadError> {
    query_one(db, &format!("SELECT {RUN} FROM runs WHERE id = ?1"), id, run_row)
}

pub(crate) fn ask(db: &Connection, id: &str) -> Result<Option<AskRow>, JournalReadError> {
    query_one(db, &format!("SELECT {ASK} FROM asks WHERE id = ?1"), id, ask_row)
}

pub(crate) fn mail(db: &Connection, id: &str) -> Result<Option<MailRow>, JournalReadError> {
    query_one(db, &format!("SELECT {MAIL} FROM mail WHERE id = ?1"), id, mail_row)
}

/// In the order of arrival.
pub(crate) fn list_mail(
    db: &Connection,
    filter: MailFilter,
    after: Option<&MailId>,
    limit: usize,
) -> Result<Vec<MailRow>, JournalReadError> {
    let mut list = RowQuery::new("mail", MAIL, "seq");
    list.after(db, after.map(MailId::as_str))?;
    list.index = match filter {
        MailFilter { session: Some(_), .. } => "mail_by_session",
        MailFilter { open_only: true, .. } => "mail_open",
        MailFilter { .. } => "",
    };
    list.filter_equals("session", filter.session.map(|session| session.0));
    list.clauses.push("session IS NOT NULL".to_owned());
    list.filter_if(filter.open_only, "open = 1");
    list.fetch(db, limit, mail_row)
}

pub(crate) fn workspace_by_key(
    db: &Connection,
    key: WorkspaceKey,
) -> Result<Option<WorkspaceRow>, JournalReadError> {
    query_one(db, &format!("SELECT {WORKSPACE} FROM workspaces WHERE key = ?1"), key.0, workspace_row)
}

pub(crate) fn session_by_key(
    db: &Connection,
    key: SessionKey,
) -> Result<Option<SessionRow>, JournalReadError> {
    query_one(db, &format!("SELECT {SESSION} FROM sessions WHERE key = ?1"), key.0, session_row)
}

/// Workspaces that are not removed, in the order of creation.
pub(crate) fn workspaces(
    db: &Connection,
    after: Option<&WorkspaceId>,
    limit: usize,
) -> Result<Vec<WorkspaceRow>, JournalReadError> {
    let mut list = RowQuery::new("workspaces", WORKSPACE, "key");
    list.after(db, after.map(WorkspaceId::as_str))?;
    list.clauses.push("removed = 0".to_owned());
    list.fetch(db, limit, workspace_row)
}

/// In the order of creation.
pub(crate) fn sessions(
    db: &Connection,
    filter: SessionFilter,
    after: Option<&SessionId>,
    limit: usize,
) -> Result<Vec<SessionRow>, JournalReadError> {
    let mut list = RowQuery::new("sessions", SESSION, "key");
    list.after(db, after.map(SessionId::as_str))?;
    list.index = match filter {
        SessionFilter { parent: Some(_), .. } => "sessions_by_parent",
        SessionFilter { live_only: true, .. } => "sessions_live",
        SessionFilter { open_work_only: true, .. } => "sessions_owing",
        SessionFilter { workspace: Some(_), open_only: true, .. } => "sessions_open_by_workspace",
        SessionFilter { workspace: Some(_), .. } => "sessions_by_workspace",
        SessionFilter { open_only: true, .. } => "sessions_open",
        _ => "",
    };
    list.filter_equals("parent", filter.parent.map(|parent| parent.0));
    list.filter_equals("workspace", filter.workspace.map(|workspace| workspace.0));
    list.filter_if(filter.open_only, "closed_at IS NULL");
    list.filter_if(filter.live_only, "live = 1");
    list.filter_if(filter.open_work_only, "owes = 1");
    list.fetch(db, limit, session_row)
}

pub(crate) fn fleet(db: &Connection, id: &FleetId) -> Result<Option<FleetRow>, JournalReadError> {
    query_one(db, &format!("SELECT {FLEET} FROM fleets WHERE id = ?1"), id.as_str(), fleet_row)
}

pub(crate) fn fleet_by_key(db: &Connection, key: SessionKey) -> Result<Option<FleetRow>, JournalReadError> {
    query_one(db, &format!("SELECT {FLEET} FROM fleets WHERE key = ?1"), key.0, fleet_row)
}

/// In the order of creation.
pub(crate) fn fleets(
    db: &Connection,
    filter: FleetFilter,
    after: Option<&FleetId>,
    limit: usize,
) -> Result<Vec<FleetRow>, JournalReadError> {
    let mut list = RowQuery::new("fleets", FLEET, "key");
    list.after(db, after.map(FleetId::as_str))?;
    list.index = match filter {
        FleetFilter { live_only: true, .. } => "fleets_live",
        FleetFilter { workspace: Some(_), .. } => "fleets_by_workspace",
        FleetFilter { .. } => "",
    };
    list.filter_equals("workspace", filter.workspace.map(|workspace| workspace.0));
    list.filter_if(filter.live_only, "live = 1");
    list.fetch(db, limit, fleet_row)
}

/// In the order of acceptance.
pub(crate) fn runs(
    db: &Connection,
    filter: RunFilter,
    after: Option<&RunId>,
    limit: usize,
) -> Result<Vec<RunRow>, JournalReadError> {
    let mut list = RowQuery::new("runs", RUN, "seq");
    list.after(db, after.map(RunId::as_str))?;
    list.index = match filter {
        RunFilter { unfinished_only: true, .. } => "runs_unfinished",
        RunFilter { session: Some(_), .. } => "runs_by_session",
        RunFilter { workspace: Some(_), .. } => "runs_by_workspace",
        _ => "",
    };
    list.filter_equals("session", filter.session.map(|session| session.0));
    list.filter_equals("workspace", filter.workspace.map(|workspace| workspace.0));
    list.filter_if(filter.unfinished_only, "finished = 0");
    list.fetch(db, limit, run_row)
}

/// SQL for the workspace of an ask, which belongs to a session or to a fleet.
const ASK_WORKSPACE: &str = "coalesce((SELECT workspace FROM sessions WHERE key = session),
    (SELECT workspace FROM fleets WHERE key = session))";

/// The oldest first, unless the filter says otherwise.
pub(crate) fn asks(
    db: &Connection,
    filter: AskFilter,
    after: Option<&AskId>,
    limit: usize,
) -> Result<Vec<AskRow>, JournalReadError> {
    let mut list = RowQuery { descending: filter.newest_first, ..RowQuery::new("asks", ASK, "n") };
    list.after(db, after.map(AskId::as_str))?;
    list.index = match filter {
        AskFilter { pending_only: true, .. } => "asks_pending",
        AskFilter { session: Some(_), .. } => "asks_by_session",
        _ => "",
    };
    list.filter_equals("session", filter.session.map(|session| session.0));
    list.filter_equals(ASK_WORKSPACE, filter.workspace.map(|key| key.0));
    list.filter_if(filter.pending_only, "pending = 1");
    list.fetch(db, limit, ask_row)
}

/// The cost in USD of a session and all sessions below it.
pub(crate) fn tree_cost(db: &Connection, root: SessionKey) -> Result<f64, JournalReadError> {
    // UNION instead of UNION ALL, so that a cycle of parents, which should never exist, cannot loop for ever.
    let cost = db
        .prepare_cached(
            "WITH RECURSIVE tree(key) AS (VALUES(?1) UNION SELECT sessions.key FROM tree JOIN sessions INDEXED BY
             sessions_by_parent ON sessions.parent = tree.key)
             SELECT total(cost_usd) FROM tree JOIN sessions USING(key)",
        )?
        .query_row([root.0], |row| row.get(0))?;
    Ok(cost)
}

/// The number of open sessions in a tree, including its root.
pub(crate) fn tree_size(db: &Connection, root: SessionKey) -> Result<usize, JournalReadError> {
    let open: u64 = from_sql_int(
        db.prepare_cached(
            "WITH RECURSIVE tree(key) AS (VALUES(?1) UNION SELECT sessions.key FROM tree JOIN sessions INDEXED BY
             sessions_by_parent ON sessions.parent = tree.key)
             SELECT count(*) FROM tree JOIN sessions USING(key) WHERE closed_at IS NULL",
        )?
        .query_row([root.0], |row| row.get(0))?,
    );
    Ok(usize::try_from(open).unwrap_or(usize::MAX))
}

/// A session and its ancestors, the session itself first.
pub(crate) fn lineage(db: &Connection, session: SessionKey) -> Result<Vec<SessionRow>, JournalReadError> {
    let mut lineage = Vec::new();
    let mut next = Some(session);
    while let Some(key) = next
        && lineage.len() <= DEPTH_MAX
    {
        let Some(row) = session_by_key(db, key)? else { break };
        next = row.parent;
        lineage.push(row);
    }
    Ok(lineage)
}

pub(crate) fn counts(db: &Connection) -> Result<JournalCounts, JournalReadError> {
    let count = |sql| -> Result<u64, JournalReadError> {
        Ok(from_sql_int(db.prepare_cached(sql)?.query_row([], |row| row.get(0))?))
    };
    Ok(JournalCounts {
        open_sessions: count(
            "SELECT count(*) FROM sessions INDEXED BY sessions_open WHERE closed_at IS NULL",
        )?,
        live_sessions: count("SELECT count(*) FROM sessions INDEXED BY sessions_live WHERE live = 1")?,
        unfinished_runs: count("SELECT count(*) FROM runs INDEXED BY runs_unfinished WHERE finished = 0")?,
        pending_asks: count("SELECT count(*) FROM asks INDEXED BY asks_pending WHERE pending = 1")?,
    })
}

/// The fingerprint of the request and the response it got.
pub type StoredResponse = ([u8; 32], Vec<u8>);

/// The response stored under an `Idempotency-Key`, unless it has expired.
pub(crate) fn idempotent_response(
    db: &Connection,
    key: &str,
    now: Millis,
) -> Result<Option<StoredResponse>, JournalReadError> {
    let found = db
        .prepare_cached("SELECT fingerprint, answer FROM remembered WHERE key = ?1 AND at >= ?2")?
        .query_row(params![key, idempotency_cutoff(now)], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    Ok(found)
}

/// Idempotency keys stored before this time (in milliseconds) have expired.
pub(crate) fn idempotency_cutoff(now: Millis) -> i64 {
    to_sql_int(now.0.saturating_sub(IDEMPOTENCY_S * 1000))
}

pub(crate) fn meta(db: &Connection, key: &str) -> Result<Option<Vec<u8>>, JournalReadError> {
    Ok(db
        .prepare_cached("SELECT value FROM meta WHERE key = ?1")?
        .query_row([key], |row| row.get(0))
        .optional()?)
}

/// The values whose keys begin with `prefix`.
pub(crate) fn meta_values(db: &Connection, prefix: &str) -> Result<Vec<Vec<u8>>, JournalReadError> {
    let mut statement =
        db.prepare_cached("SELECT value FROM meta WHERE substr(key, 1, length(?1)) = ?1 ORDER BY key")?;
    let values = statement.query_map([prefix], |row| row.get(0))?.collect::<Result<_, _>>()?;
    Ok(values)
}

/// The tables that a reference can point into: the kind, the prefix of its ids, and the query that finds a match's id,
/// workspace and session.
const REFERENCE_TABLES: [(ReferenceKind, &str, &str); 5] = [
    (
        ReferenceKind::Session,
        SessionId::PREFIX,
        "SELECT s.id, w.id, s.id FROM sessions s JOIN workspace_names w ON w.key = s.workspace WHERE 1",
    ),
    (
        ReferenceKind::Run,
        RunId::PREFIX,
        "SELECT s.id, w.id, n.id FROM runs s JOIN workspace_names w ON w.key = s.workspace
         JOIN session_names n ON n.key = s.session WHERE 1",
    ),
    (
        ReferenceKind::Ask,
        AskId::PREFIX,
        "SELECT s.id, w.id, t.id FROM asks s LEFT JOIN sessions t ON t.key = s.session
         LEFT JOIN fleets f ON f.key = s.session
         JOIN workspace_names w ON w.key = coalesce(t.workspace, f.workspace) WHERE 1",
    ),
    (
        ReferenceKind::Fleet,
        FleetId::PREFIX,
        "SELECT s.id, w.id, NULL FROM fleets s JOIN workspace_names w ON w.key = s.workspace WHERE 1",
    ),
    (
        ReferenceKind::Workspace,
        WorkspaceId::PREFIX,
        "SELECT s.id, s.id, NULL FROM workspaces s WHERE s.removed = 0",
    ),
];

/// Resolves a reference: an id, a session's title, or the beginning of an id with or without its prefix. If an id or
/// title matches exactly, only exact matches are returned.
pub(crate) fn resolve(
    db: &Connection,
    reference: &str,
    limit: usize,
) -> Result<Vec<ReferenceMatch>, JournalReadError> {
    let mut found: Vec<ReferenceMatch> = Vec::new();
    // Adds the matches of a query and returns the number of matches so far.
    let mut add =
        |kind: ReferenceKind, sql: &str, low: &str, high: &str| -> Result<usize, JournalReadError> {
            if found.len() >= limit {
                return Ok(found.len());
            }
            let mut statement = db.prepare_cached(sql)?;
            let mut rows = statement.query(params![low, high, i64::try_from(limit).unwrap_or(i64::MAX)])?;
            while let Some(row) = rows.next()? {
                let id = text_column(row, 0)?.to_owned();
                if found.len() < limit && !found.iter().any(|known| known.kind == kind && known.id == id) {
                    let workspace_id = WorkspaceId::parse(text_column(row, 1)?).map_err(damage_error)?;
                    let session: Option<String> = row.get(2)?;
                    let session_id =
                        session.map(|id| SessionId::parse(&id).map_err(damage_error)).transpose()?;
                    found.push(ReferenceMatch { kind, id, workspace_id, session_id });
                }
            }
            Ok(found.len())
        };
    for (kind, _, select) in REFERENCE_TABLES {
        add(kind, &format!("{select} AND s.id = ?1 AND ?2 = '' ORDER BY s.id LIMIT ?3"), reference, "")?;
    }
    let (kind, _, select) = REFERENCE_TABLES[0];
    let by_title = format!("{select} AND s.title = ?1 AND ?2 = '' ORDER BY s.key DESC LIMIT ?3");
    let exact = add(kind, &by_title, reference, "")?;
    // An exact match wins over anything that merely starts the same. All characters of an id sort before DEL, so a
    // prefix search is a range.
    if exact > 0
        || reference.is_empty()
        || !reference.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.:-".contains(&b))
    {
        return Ok(found);
    }
    for (kind, prefix, select) in REFERENCE_TABLES {
        let sql = format!("{select} AND s.id >= ?1 AND s.id < ?2 ORDER BY s.id LIMIT ?3");
        for low in [reference.to_owned(), format!("{prefix}{reference}")] {
            add(kind, &sql, &low, &format!("{low}\u{7f}"))?;
        }
    }
    Ok(found)
}

/// For each id, the shortest reference that [`resolve`] takes for it and for nothing else of these kinds. An id that has
/// none is returned whole.
pub(crate) fn short_ids(
    db: &Connection,
    ids: Vec<String>,
    kinds: &[ReferenceKind],
) -> Result<BTreeMap<String, String>, JournalReadError> {
    let mut short = BTreeMap::new();
    for id in ids {
        let prefix =
            REFERENCE_TABLES.iter().map(|(_, prefix, _)| *prefix).find(|prefix| id.starts_with(prefix));
        let bare = &id[prefix.map_or(0, str::len)..];
        let mut found = None;
        for length in SHORT_ID_MIN..bare.len() {
            let Some(reference) = bare.get(..length) else { break };
            let matches = resolve(db, reference, SHORT_ID_MATCHES)?;
            if matches.is_empty() {
                // Nothing has this id.
                break;
            }
            let mut of_kind = matches.iter().filter(|found| kinds.contains(&found.kind));
            let is_only = of_kind.next().is_some_and(|only| only.id == id) && of_kind.next().is_none();
            if is_only && matches.len() < SHORT_ID_MATCHES {
                found = Some(reference.to_owned());
                break;
            }
        }
        let reference = found.unwrap_or_else(|| id.clone());
        short.insert(id, reference);
    }
    Ok(short)
}

/// How many matches of a short id are looked at. If there are more, it is too short.
const SHORT_ID_MATCHES: usize = 64;

fn query_one<T>(
    db: &Connection,
    sql: &str,
    by: impl rusqlite::ToSql,
    read: fn(&Row<'_>) -> Result<T, JournalReadError>,
) -> Result<Option<T>, JournalReadError> {
    let mut statement = db.prepare_cached(sql)?;
    let mut rows = statement.query([by])?;
    rows.next()?.map(read).transpose()
}

/// A list query under construction.
struct RowQuery {
    table: &'static str,
    columns: &'static str,
    order: &'static str,
    index: &'static str,
    descending: bool,
    clauses: Vec<String>,
    values: Vec<Value>,
}

impl RowQuery {
    fn new(table: &'static str, columns: &'static str, order: &'static str) -> Self {
        Self { table, columns, order, index: "", descending: false, clauses: Vec::new(), values: Vec::new() }
    }

    /// Continues after the row with this id.
    fn after(&mut self, db: &Connection, id: Option<&str>) -> Result<(), JournalReadError> {
        let Some(id) = id else { return Ok(()) };
        let (table, order) = (self.table, self.order);
        let position: Option<i64> = db
            .prepare_cached(&format!("SELECT {order} FROM {table} WHERE id = ?1"))?
            .query_row([id], |row| row.get(0))
            .optional()?;
        let position = position.ok_or_else(|| JournalReadError::Cursor(id.to_owned()))?;
        self.clauses.push(format!("{order} {} ?", if self.descending { "<" } else { ">" }));
        self.values.push(position.into());
        Ok(())
    }

    fn filter_equals(&mut self, column: &str, value: Option<i64>) {
        if let Some(value) = value {
            self.clauses.push(format!("{column} = ?"));
            self.values.push(value.into());
        }
    }

    fn filter_if(&mut self, condition: bool, clause: &str) {
        if condition {
            self.clauses.push(clause.to_owned());
        }
    }

    fn fetch<T>(
        mut self,
        db: &Connection,
        limit: usize,
        read: fn(&Row<'_>) -> Result<T, JournalReadError>,
    ) -> Result<Vec<T>, JournalReadError> {
        let Self { table, columns, order, index, descending, ref clauses, .. } = self;
        let direction = if descending { " DESC" } else { "" };
        let indexed = if index.is_empty() { String::new() } else { format!(" INDEXED BY {index}") };
        let filter =
            if clauses.is_empty() { String::new() } else { format!(" WHERE {}", clauses.join(" AND ")) };
        let sql =
            format!("SELECT {columns} FROM {table}{indexed}{filter} ORDER BY {order}{direction} LIMIT ?");
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
    Millis(from_sql_int(value))
}

fn workspace_row(row: &Row<'_>) -> Result<WorkspaceRow, JournalReadError> {
    Ok(WorkspaceRow {
        key: WorkspaceKey(row.get(0)?),
        id: WorkspaceId::parse(text_column(row, 1)?).map_err(damage_error)?,
        path: row.get(2)?,
        name: row.get(3)?,
        removed: row.get(4)?,
        created_at: millis(row.get(5)?),
        doc: row.get(6)?,
    })
}

fn session_row(row: &Row<'_>) -> Result<SessionRow, JournalReadError> {
    Ok(SessionRow {
        key: SessionKey(row.get(0)?),
        id: SessionId::parse(text_column(row, 1)?).map_err(damage_error)?,
        workspace: WorkspaceKey(row.get(2)?),
        parent: row.get::<_, Option<i64>>(3)?.map(SessionKey),
        title: row.get(4)?,
        closed_at: row.get::<_, Option<i64>>(5)?.map(millis),
        live: row.get(6)?,
        has_open_work: row.get(7)?,
        cost_usd: row.get(8)?,
        budget_usd: row.get(9)?,
        updated_at: millis(row.get(10)?),
        doc: row.get(11)?,
    })
}

fn fleet_row(row: &Row<'_>) -> Result<FleetRow, JournalReadError> {
    Ok(FleetRow {
        key: SessionKey(row.get(0)?),
        id: FleetId::parse(text_column(row, 1)?).map_err(damage_error)?,
        workspace: WorkspaceKey(row.get(2)?),
        live: row.get(3)?,
        budget_usd: row.get(4)?,
        created_with: row.get(5)?,
        doc: row.get(6)?,
    })
}

fn run_row(row: &Row<'_>) -> Result<RunRow, JournalReadError> {
    Ok(RunRow {
        seq: Seq(from_sql_int(row.get(0)?)),
        id: RunId::parse(text_column(row, 1)?).map_err(damage_error)?,
        session: SessionKey(row.get(2)?),
        workspace: WorkspaceKey(row.get(3)?),
        accepted_event: None,
        finished: row.get(4)?,
        fingerprint: row.get(5)?,
        prompt: row.get(6)?,
        doc: row.get(7)?,
    })
}

fn mail_row(row: &Row<'_>) -> Result<MailRow, JournalReadError> {
    Ok(MailRow {
        seq: Seq(from_sql_int(row.get(0)?)),
        id: MailId::parse(text_column(row, 1)?).map_err(damage_error)?,
        session: row.get::<_, Option<i64>>(2)?.map(SessionKey),
        sent_event: None,
        open: row.get(3)?,
        fingerprint: row.get(4)?,
        sent: row.get(5)?,
        doc: row.get::<_, Option<Vec<u8>>>(6)?.unwrap_or_default(),
    })
}

fn ask_row(row: &Row<'_>) -> Result<AskRow, JournalReadError> {
    Ok(AskRow {
        id: AskId::parse(text_column(row, 0)?).map_err(damage_error)?,
        session: SessionKey(row.get(1)?),
        pending: row.get(2)?,
        doc: row.get(3)?,
    })
}
