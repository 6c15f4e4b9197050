//! Finds what could be deleted: disk usage, sessions closed long ago, blobs that nothing refers to; and checks the
//! database for damage. This module only reads. Sessions are deleted by an append, blobs by the blob store.

use std::collections::HashSet;
use std::path::Path;

use qd_protocol::{Millis, Seq};
use rusqlite::{Connection, params};

use crate::error::JournalReadError;
use crate::event::SessionKey;
use crate::read::blob_column;
use crate::rows::{from_sql_int, to_sql_int};
use crate::schema::{DATABASE_FILE, INDEXED_THROUGH_SQL, LOG_FILE};

/// Events searched for blob hashes in one read.
pub(crate) const SEARCH_EVENTS: usize = 8192;

/// Disk usage of the home, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalSizes {
    /// The database file.
    pub journal: u64,
    /// SQLite's log.
    pub log: u64,
    /// Free space inside the database file, which a vacuum returns to the file system.
    pub free: u64,
    pub blobs: u64,
}

/// Sessions that were closed long ago.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClosedSessions {
    pub sessions: Vec<SessionKey>,
    /// The number of their events.
    pub events: u64,
}

pub(crate) fn sizes(db: &Connection, home: &Path) -> Result<JournalSizes, JournalReadError> {
    let length = |file: &str| home.join(file).metadata().map_or(0, |metadata| metadata.len());
    let pragma = |sql: &str| -> Result<u64, JournalReadError> {
        Ok(from_sql_int(db.prepare_cached(sql)?.query_row([], |row| row.get(0))?))
    };
    let free = pragma("PRAGMA freelist_count")? * pragma("PRAGMA page_size")?;
    Ok(JournalSizes { journal: length(DATABASE_FILE), log: length(LOG_FILE), free, blobs: 0 })
}

/// Sessions closed before `before`, the longest closed first.
pub(crate) fn closed_sessions(
    db: &Connection,
    before: Millis,
    limit: usize,
) -> Result<ClosedSessions, JournalReadError> {
    let mut found = ClosedSessions::default();
    let mut statement = db.prepare_cached(&format!(
        "WITH newest AS MATERIALIZED
             (SELECT session, count(*) AS events FROM events WHERE gid > {INDEXED_THROUGH_SQL} GROUP BY session)
         SELECT key, (SELECT count(*) FROM session_events WHERE session = key)
             + coalesce((SELECT events FROM newest WHERE session = key), 0)
         FROM sessions INDEXED BY sessions_closed WHERE closed_at < ?1 ORDER BY closed_at, key LIMIT ?2"
    ))?;
    let mut rows =
        statement.query(params![to_sql_int(before.0), i64::try_from(limit).unwrap_or(i64::MAX)])?;
    while let Some(row) = rows.next()? {
        found.sessions.push(SessionKey(row.get(0)?));
        found.events += from_sql_int(row.get(1)?);
    }
    Ok(found)
}

/// Adds the hashes in a batch of events to `found`. Returns the seq to continue after, or nothing at the end.
pub(crate) fn hashes_in_events(
    db: &Connection,
    after: Seq,
    without: &HashSet<SessionKey>,
    found: &mut HashSet<String>,
) -> Result<Option<Seq>, JournalReadError> {
    let mut statement =
        db.prepare_cached("SELECT gid, session, data FROM events WHERE gid > ?1 ORDER BY gid LIMIT ?2")?;
    let mut rows =
        statement.query(params![to_sql_int(after.0), i64::try_from(SEARCH_EVENTS).unwrap_or(i64::MAX)])?;
    let mut last = None;
    while let Some(row) = rows.next()? {
        last = Some(Seq(from_sql_int(row.get(0)?)));
        let session = row.get::<_, Option<i64>>(1)?.map(SessionKey);
        if session.is_none_or(|session| !without.contains(&session)) {
            collect_hashes(blob_column(row, 2)?, found);
        }
    }
    Ok(last)
}

/// Adds the hashes in rows, snapshots, meta values and stored responses to `found`.
pub(crate) fn hashes_in_rows(
    db: &Connection,
    without: &HashSet<SessionKey>,
    found: &mut HashSet<String>,
) -> Result<(), JournalReadError> {
    for sql in [
        "SELECT NULL, doc FROM workspaces",
        "SELECT key, doc FROM sessions",
        "SELECT session, doc FROM runs",
        "SELECT session, prompt FROM runs WHERE prompt IS NOT NULL",
        "SELECT session, doc FROM asks",
        "SELECT session, sent FROM mail WHERE sent IS NOT NULL",
        "SELECT session, state FROM snapshots",
        "SELECT NULL, value FROM meta",
        "SELECT NULL, answer FROM remembered",
    ] {
        let mut statement = db.prepare_cached(sql)?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let session = row.get::<_, Option<i64>>(0)?.map(SessionKey);
            if session.is_none_or(|session| !without.contains(&session)) {
                collect_hashes(blob_column(row, 1)?, found);
            }
        }
    }
    Ok(())
}

/// Runs SQLite's quick check; empty if the file is sound.
pub(crate) fn quick_check(db: &Connection) -> Result<Vec<String>, JournalReadError> {
    let mut statement = db.prepare("PRAGMA quick_check")?;
    let lines = statement.query_map([], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
    Ok(if lines == ["ok"] { Vec::new() } else { lines })
}

/// Collects every run of exactly 64 hexadecimal digits. This may find more than real hashes but never fewer: an
/// unneeded file that is kept costs less than a needed one that is removed.
fn collect_hashes(bytes: &[u8], found: &mut HashSet<String>) {
    let is_digit = |b: &u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
    for run in bytes.split(|b| !is_digit(b)) {
        if run.len() == 64
            && let Ok(text) = std::str::from_utf8(run)
        {
            found.insert(text.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_a_file_is_found_in_a_document() {
        let (first, second) = ("a".repeat(64), "0123456789abcdef".repeat(4));
        let text =
            format!(r#"{{"blob":{{"sha256":"{first}","size":3}},"x":["{second}","{}"]}}"#, "b".repeat(65));
        let mut found = HashSet::new();
        collect_hashes(text.as_bytes(), &mut found);
        assert_eq!(found, HashSet::from([first, second]));
    }
}
