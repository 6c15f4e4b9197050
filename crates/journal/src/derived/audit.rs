//! Reads back who did what. Each entry is a document of the caller, in the order of the events.

use qd_protocol::{Millis, Seq};
use rusqlite::{Connection, params_from_iter};

use super::{DerivedDataError, DerivedStore};
use crate::event::{SessionKey, WorkspaceKey};
use crate::rows::{from_sql_int, to_sql_int};

/// Selects entries and their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AuditFilter {
    pub workspace: Option<WorkspaceKey>,
    pub session: Option<SessionKey>,
    /// Only entries from this time or later.
    pub since: Option<Millis>,
    /// Only entries after this event.
    pub after: Option<Seq>,
    /// Only entries before this event.
    pub before: Option<Seq>,
    pub newest_first: bool,
}

/// The documents of entries, each with the seq of its event, and the seq up to which they are complete.
pub type AuditDocuments = (Vec<(Seq, Vec<u8>)>, Seq);

impl DerivedStore {
    /// A page of entries. Its cost does not depend on how many entries there are.
    pub fn audit(&self, filter: AuditFilter, limit: usize) -> Result<AuditDocuments, DerivedDataError> {
        self.read(|db, seq| Ok((list_audit(db, filter, limit)?, seq)))
    }
}

fn list_audit(
    db: &Connection,
    filter: AuditFilter,
    limit: usize,
) -> Result<Vec<(Seq, Vec<u8>)>, DerivedDataError> {
    let index = match filter {
        AuditFilter { session: Some(_), .. } => "INDEXED BY audit_by_session",
        AuditFilter { workspace: Some(_), .. } => "INDEXED BY audit_by_workspace",
        _ => "NOT INDEXED",
    };
    let mut sql = format!("SELECT seq, entry FROM audit {index} WHERE TRUE");
    let mut values = Vec::new();
    let mut add = |condition: &str, value: Option<i64>| {
        if let Some(value) = value {
            values.push(value);
            sql.push_str(&format!(" AND {condition}").replace('?', &format!("?{}", values.len())));
        }
    };
    add("session = ?", filter.session.map(|key| key.0));
    add("workspace = ?", filter.workspace.map(|key| key.0));
    add("seq > ?", filter.after.map(|seq| to_sql_int(seq.0)));
    add("seq < ?", filter.before.map(|seq| to_sql_int(seq.0)));
    add("ts >= ?", filter.since.map(|since| to_sql_int(since.0)));
    if let Some(since) = filter.since {
        // Where to begin, so that older entries are not looked at.
        let first: Option<i64> = db
            .prepare_cached("SELECT min(seq) FROM (SELECT seq FROM audit INDEXED BY audit_by_time WHERE ts >= ?1 ORDER BY ts, seq LIMIT 1)")?
            .query_row([to_sql_int(since.0)], |row| row.get(0))?;
        add("seq >= ?", Some(first.unwrap_or(i64::MAX)));
    }
    let order = if filter.newest_first { "DESC" } else { "ASC" };
    sql.push_str(&format!(" ORDER BY seq {order} LIMIT {limit}"));
    let mut statement = db.prepare_cached(&sql)?;
    let rows = statement.query_map(params_from_iter(values), |row| {
        Ok((Seq(from_sql_int(row.get(0)?)), row.get::<_, String>(1)?.into_bytes()))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}
