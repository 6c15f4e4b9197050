//! Reads every row of the journal in small steps and reports the rows that are damaged. Each step is a short read of
//! its own, so a check of any length neither delays the writer nor keeps SQLite's log from being moved. It uses a
//! connection of its own, because a page in the cache of another one would hide damage on the disk.

use std::collections::BTreeMap;
use std::path::Path;

use qd_protocol::api::{JournalCheckReport, JournalDamage};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, params};

use crate::error::JournalReadError;
use crate::rows::from_sql_int;
use crate::schema;

/// Rows that one step reads.
const STEP_ROWS: i64 = 256;
/// Bytes after which a step ends early.
const STEP_BYTES: u64 = 1 << 20;
/// Tables with at most this many rows and bytes are also checked with their indexes, by SQLite in one read.
const INDEXED_ROWS_MAX: u64 = 20_000;
const INDEXED_BYTES_MAX: u64 = 32 << 20;
/// Damaged places that are listed per table.
const DAMAGE_MAX: usize = 50;
/// Sessions that are listed per damaged place.
const SESSIONS_MAX: usize = 20;

/// A table and how it is read.
struct CheckedTable {
    name: &'static str,
    shape: TableShape,
    /// Whether a rebuild recreates the table from the events.
    derived: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TableShape {
    /// Rows with an integer key, read in pieces.
    Rows {
        /// The column that holds JSON.
        json: Option<&'static str>,
    },
    /// `session_events`, read in pieces by session and number.
    SessionIndex,
    /// A table of a few rows, read at once.
    Small,
}

/// In the order of the check: the events come before the index, which says whose events a damaged place holds.
const TABLES: [CheckedTable; 15] = [
    CheckedTable { name: "events", shape: TableShape::Rows { json: Some("data") }, derived: false },
    CheckedTable { name: "session_events", shape: TableShape::SessionIndex, derived: true },
    CheckedTable { name: "session_names", shape: TableShape::Rows { json: None }, derived: false },
    CheckedTable { name: "workspace_names", shape: TableShape::Rows { json: None }, derived: false },
    CheckedTable { name: "counters", shape: TableShape::Small, derived: false },
    CheckedTable { name: "remembered", shape: TableShape::Rows { json: None }, derived: false },
    CheckedTable { name: "meta", shape: TableShape::Small, derived: false },
    CheckedTable { name: "workspaces", shape: TableShape::Rows { json: Some("doc") }, derived: true },
    CheckedTable { name: "sessions", shape: TableShape::Rows { json: Some("doc") }, derived: true },
    CheckedTable { name: "runs", shape: TableShape::Rows { json: Some("doc") }, derived: true },
    CheckedTable { name: "asks", shape: TableShape::Rows { json: Some("doc") }, derived: true },
    CheckedTable { name: "fleets", shape: TableShape::Rows { json: Some("doc") }, derived: true },
    CheckedTable { name: "mail", shape: TableShape::Rows { json: None }, derived: true },
    CheckedTable { name: "merged_through", shape: TableShape::Rows { json: None }, derived: true },
    CheckedTable { name: "snapshots", shape: TableShape::Rows { json: Some("state") }, derived: true },
];

/// A check under way.
#[derive(Debug)]
pub struct JournalCheck {
    db: Connection,
    /// The table that is being read.
    table: usize,
    /// The key of the next row: session and number in the index, else the integer key and 0.
    next: (i64, i64),
    /// Rows and bytes of the current table so far.
    table_rows: u64,
    table_bytes: u64,
    report: JournalCheckReport,
    /// For each damaged range of seqs in the report: the sessions whose events are in it, by their keys.
    sessions: BTreeMap<usize, Vec<i64>>,
}

impl JournalCheck {
    pub(crate) fn open(home: &Path) -> Result<Self, JournalReadError> {
        let db = schema::open_reader(home)?;
        Ok(Self {
            db,
            table: 0,
            next: (i64::MIN, i64::MIN),
            table_rows: 0,
            table_bytes: 0,
            report: JournalCheckReport::default(),
            sessions: BTreeMap::new(),
        })
    }

    /// Reads the next piece. Returns false at the end. Blocks for a few milliseconds. Fails only if the storage fails
    /// in another way than by damage.
    pub fn step(&mut self) -> Result<bool, JournalReadError> {
        let Some(table) = TABLES.get(self.table) else { return Ok(false) };
        let before = (self.table_rows, self.table_bytes);
        let end = match table.shape {
            TableShape::Rows { json } => self.read_rows(table, json)?,
            TableShape::SessionIndex => self.read_session_index(table)?,
            TableShape::Small => self.read_small_table(table)?,
        };
        self.report.rows += self.table_rows - before.0;
        self.report.bytes += self.table_bytes - before.1;
        if end {
            self.check_indexes(table)?;
            self.table += 1;
            self.next = (i64::MIN, i64::MIN);
            (self.table_rows, self.table_bytes) = (0, 0);
        }
        Ok(self.table < TABLES.len())
    }

    /// What was found so far. The caller fills in the time.
    pub fn into_report(mut self) -> JournalCheckReport {
        for (at, keys) in std::mem::take(&mut self.sessions) {
            let names = keys.iter().map(|key| {
                let id = self.db.query_row("SELECT id FROM session_names WHERE key = ?1", [key], |row| {
                    row.get::<_, String>(0)
                });
                id.unwrap_or_else(|_| format!("session number {key}"))
            });
            if let Some(damage) = self.report.damage.get_mut(at) {
                damage.sessions = names.collect();
            }
        }
        self.report
    }

    /// Reads a piece of a table with an integer key. Returns true at the end of the table.
    fn read_rows(
        &mut self,
        table: &CheckedTable,
        json: Option<&'static str>,
    ) -> Result<bool, JournalReadError> {
        let piece = read_piece(&self.db, table.name, json, self.next.0)?;
        self.table_rows += piece.rows;
        self.table_bytes += piece.bytes;
        for (key, detail) in piece.broken {
            self.add_damage(table, Some((key, Some(key))), detail);
        }
        let Some(last) = piece.last else {
            return match piece.failure {
                None => Ok(true),
                Some(detail) => self.skip_rows(table, self.next.0, detail),
            };
        };
        self.next.0 = last.saturating_add(1);
        match piece.failure {
            None => Ok(false),
            Some(detail) => self.skip_rows(table, self.next.0, detail),
        }
    }

    /// Reports the rows from a key on that cannot be read, and continues after them. Returns true if none can.
    fn skip_rows(
        &mut self,
        table: &CheckedTable,
        from: i64,
        detail: String,
    ) -> Result<bool, JournalReadError> {
        let sql = format!("SELECT rowid FROM {} WHERE rowid >= ?1 ORDER BY rowid LIMIT 1", table.name);
        let probe = |key: i64| probe_key(&self.db, &sql, params![key]);
        // If only the content of a row is damaged, its key can still be read.
        if let ProbeResult::Key(key) = probe(from)? {
            self.add_damage(table, Some((key, Some(key))), detail);
            self.next.0 = key.saturating_add(1);
            return Ok(false);
        }
        let readable = first_readable(from.max(0), probe)?;
        self.add_damage(table, Some((from.max(0), readable.map(|key| key - 1))), detail);
        let Some(key) = readable.filter(|_| self.damage_in(table) < DAMAGE_MAX) else { return Ok(true) };
        self.next.0 = key;
        Ok(false)
    }

    /// Reads a piece of the index of the sessions' events. Returns true at its end.
    fn read_session_index(&mut self, table: &CheckedTable) -> Result<bool, JournalReadError> {
        let read = |db: &Connection, from: (i64, i64)| -> (Vec<(i64, i64, i64)>, Option<rusqlite::Error>) {
            let mut found = Vec::new();
            let read = (|| {
                let mut statement = db.prepare_cached(
                    "SELECT session, number, gid FROM session_events WHERE (session, number) >= (?1, ?2)
                     ORDER BY session, number LIMIT ?3",
                )?;
                let mut rows = statement.query(params![from.0, from.1, STEP_ROWS * 8])?;
                while let Some(row) = rows.next()? {
                    found.push((row.get(0)?, row.get(1)?, row.get(2)?));
                }
                Ok(())
            })();
            (found, read.err())
        };
        let (found, failure) = read(&self.db, self.next);
        self.table_rows += found.len() as u64;
        self.table_bytes += found.len() as u64 * 24;
        for (session, _, gid) in &found {
            self.note_session(*session, *gid);
        }
        if let Some((session, number, _)) = found.last() {
            self.next = (*session, number.saturating_add(1));
        }
        let Some(failure) = failure else { return Ok(found.is_empty()) };
        let detail = damage_detail(failure)?;
        let (session, number) = (self.next.0.max(0), self.next.1.max(0));
        let sql = "SELECT session FROM session_events WHERE (session, number) >= (?1, ?2) ORDER BY session, number LIMIT 1";
        let next_number =
            first_readable(number, |number| probe_key(&self.db, sql, params![session, number]))?;
        let next = match next_number {
            Some(number) => Some((session, number)),
            None => first_readable(session, |session| probe_key(&self.db, sql, params![session, 0]))?
                .map(|session| (session, 0)),
        };
        self.add_damage(table, None, format!("{detail}; from event {number} of session number {session} on"));
        match next.filter(|next| *next > self.next && self.damage_in(table) < DAMAGE_MAX) {
            Some(next) => self.next = next,
            None => return Ok(true),
        }
        Ok(false)
    }

    fn read_small_table(&mut self, table: &CheckedTable) -> Result<bool, JournalReadError> {
        let read = (|| {
            let mut statement = self.db.prepare(&format!("SELECT * FROM {}", table.name))?;
            let columns = statement.column_count();
            let mut rows = statement.query([])?;
            let (mut count, mut bytes) = (0, 0);
            while let Some(row) = rows.next()? {
                count += 1;
                for column in 0..columns {
                    bytes += value_len(row.get_ref(column)?);
                }
            }
            Ok((count, bytes))
        })();
        match read {
            Ok((rows, bytes)) => (self.table_rows, self.table_bytes) = (rows, bytes),
            Err(error) => {
                let detail = damage_detail(error)?;
                self.add_damage(table, None, detail);
            }
        }
        Ok(true)
    }

    /// Lets SQLite check a small table together with its indexes. The rows themselves are known to be readable.
    fn check_indexes(&mut self, table: &CheckedTable) -> Result<(), JournalReadError> {
        let is_small = self.table_rows <= INDEXED_ROWS_MAX && self.table_bytes <= INDEXED_BYTES_MAX;
        if !is_small || self.damage_in(table) > 0 {
            return Ok(());
        }
        let lines = (|| {
            let mut statement = self.db.prepare(&format!("PRAGMA quick_check('{}')", table.name))?;
            statement.query_map([], |row| row.get::<_, String>(0))?.collect::<Result<Vec<_>, _>>()
        })();
        match lines {
            Ok(lines) if lines == ["ok"] => {}
            Ok(lines) => self.add_damage(table, None, lines.join("; ")),
            Err(error) => {
                let detail = damage_detail(error)?;
                self.add_damage(table, None, detail);
            }
        }
        Ok(())
    }

    fn damage_in(&self, table: &CheckedTable) -> usize {
        self.report.damage.iter().filter(|damage| damage.table == table.name).count()
    }

    /// Adds a damaged place, or extends the last one if it is its neighbour.
    fn add_damage(&mut self, table: &CheckedTable, keys: Option<(i64, Option<i64>)>, detail: String) {
        let first = keys.map(|(first, _)| from_sql_int(first));
        let last = keys.and_then(|(_, last)| last).map(from_sql_int);
        if let Some(before) = self.report.damage.last_mut()
            && before.table == table.name
            && before.detail == detail
            && before.last.is_some_and(|end| Some(end + 1) == first)
        {
            before.last = last;
            return;
        }
        if self.damage_in(table) < DAMAGE_MAX {
            let (table, rebuildable) = (table.name.to_owned(), table.derived);
            self.report.damage.push(JournalDamage {
                table,
                first,
                last,
                sessions: Vec::new(),
                rebuildable,
                detail,
            });
        }
    }

    /// Remembers whose events a damaged range holds.
    fn note_session(&mut self, session: i64, gid: i64) {
        let seq = from_sql_int(gid);
        for (at, damage) in self.report.damage.iter().enumerate() {
            let contains = damage.table == "events"
                && damage.first.is_some_and(|first| first <= seq)
                && damage.last.is_none_or(|last| seq <= last);
            if contains {
                let sessions = self.sessions.entry(at).or_default();
                if sessions.len() < SESSIONS_MAX && !sessions.contains(&session) {
                    sessions.push(session);
                }
            }
        }
    }
}

/// The outcome of reading a piece of a table.
#[derive(Default)]
struct TablePiece {
    rows: u64,
    bytes: u64,
    /// The key of the last row that was read.
    last: Option<i64>,
    /// Rows that can be read but hold something that was never written.
    broken: Vec<(i64, String)>,
    /// Why the row after the last one could not be read.
    failure: Option<String>,
}

fn read_piece(
    db: &Connection,
    table: &str,
    json: Option<&str>,
    from: i64,
) -> Result<TablePiece, JournalReadError> {
    let mut piece = TablePiece::default();
    let read = (|| {
        let mut statement = db.prepare_cached(&format!(
            "SELECT rowid, * FROM {table} WHERE rowid >= ?1 ORDER BY rowid LIMIT {STEP_ROWS}"
        ))?;
        let json = json.map(|name| statement.column_index(name)).transpose()?;
        let columns = statement.column_count();
        let mut rows = statement.query([from])?;
        while let Some(row) = rows.next()? {
            let key = row.get(0)?;
            for column in 1..columns {
                let value = row.get_ref(column)?;
                piece.bytes += value_len(value);
                let is_json = |bytes: &[u8]| serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok();
                if Some(column) == json && !value.as_bytes_or_null()?.is_none_or(is_json) {
                    piece.broken.push((key, "the content is not what was written".to_owned()));
                }
            }
            piece.rows += 1;
            piece.last = Some(key);
            if piece.bytes >= STEP_BYTES {
                break;
            }
        }
        rusqlite::Result::Ok(())
    })();
    if let Err(error) = read {
        piece.failure = Some(damage_detail(error)?);
    }
    Ok(piece)
}

fn value_len(value: ValueRef<'_>) -> u64 {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes.len() as u64,
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => 8,
    }
}

/// Whether the rows from a key on can be reached.
enum ProbeResult {
    Key(i64),
    /// There are no more rows.
    End,
    Damaged,
}

fn probe_key(
    db: &Connection,
    sql: &str,
    values: impl rusqlite::Params,
) -> Result<ProbeResult, JournalReadError> {
    let key = db.prepare_cached(sql).and_then(|mut statement| {
        let mut rows = statement.query(values)?;
        rows.next()?.map(|row| row.get(0)).transpose()
    });
    match key {
        Ok(Some(key)) => Ok(ProbeResult::Key(key)),
        Ok(None) => Ok(ProbeResult::End),
        Err(error) => damage_detail(error).map(|_| ProbeResult::Damaged),
    }
}

/// The first key after `from` from which rows can be reached again; nothing if there are no more. Damage usually ends
/// with a page, so the distance is doubled until a row is reached and then halved.
fn first_readable(
    from: i64,
    probe: impl Fn(i64) -> Result<ProbeResult, JournalReadError>,
) -> Result<Option<i64>, JournalReadError> {
    let (mut damaged, mut distance) = (from, 1_i64);
    let mut readable = loop {
        let Some(key) = from.checked_add(distance) else { return Ok(None) };
        match probe(key)? {
            ProbeResult::Key(_) => break key,
            ProbeResult::End => {
                // The last row before the end may be reachable; look for it between here and the damage.
                break key;
            }
            ProbeResult::Damaged => damaged = key,
        }
        let Some(next) = distance.checked_mul(2) else { return Ok(None) };
        distance = next;
    };
    while readable - damaged > 1 {
        let middle = damaged + (readable - damaged) / 2;
        match probe(middle)? {
            ProbeResult::Damaged => damaged = middle,
            ProbeResult::Key(_) | ProbeResult::End => readable = middle,
        }
    }
    Ok(match probe(readable)? {
        ProbeResult::Key(_) => Some(readable),
        ProbeResult::End | ProbeResult::Damaged => None,
    })
}

/// The words for damage that SQLite has found. Any other failure is an error of the check.
fn damage_detail(error: rusqlite::Error) -> Result<String, JournalReadError> {
    let is_damage = match &error {
        rusqlite::Error::SqliteFailure(cause, _) => {
            matches!(cause.code, ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
        }
        // A value of a type that the column cannot have.
        rusqlite::Error::InvalidColumnType(..)
        | rusqlite::Error::IntegralValueOutOfRange(..)
        | rusqlite::Error::FromSqlConversionFailure(..)
        | rusqlite::Error::Utf8Error(..) => true,
        _ => false,
    };
    if is_damage { Ok(error.to_string()) } else { Err(error.into()) }
}
