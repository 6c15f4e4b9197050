//! The tables, their version, and how an older file becomes a newer one; also how every connection is set up. What
//! the rows mean to clients is not known here: their documents are bytes.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use crate::error::JournalOpenError;

/// The journal's file in its home.
pub(crate) const DATABASE_FILE: &str = "journal.db";
/// SQLite's log beside it.
pub(crate) const LOG_FILE: &str = "journal.db-wal";

/// "qdjl", so that a foreign database is told from ours.
const APPLICATION_ID: i64 = 0x7164_6a6c;
/// The log is cut down to this when it is begun anew. Below it the file is written over in place, which costs the
/// file system less at every sync than a file that grows.
pub(crate) const LOG_SIZE_LIMIT: u64 = 16 << 20;
/// Pages that the writer keeps in memory, in KiB: the tails of the table and of the busiest sessions' index.
const WRITER_CACHE_KIB: i64 = 32 << 10;
/// The same for each reader.
const READER_CACHE_KIB: i64 = 4 << 10;
/// Statements that a connection keeps prepared.
const STATEMENT_CACHE_SIZE: usize = 64;
/// How long a connection waits for another one's lock. Only the moment in which a log is begun anew needs it.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Each brings the schema one version further; the version is how many have been applied.
const MIGRATIONS: &[&str] = &[INITIAL_SCHEMA, FLEETS, MAIL];

/// `events` and the names are the truth; `counters` never go back; `remembered` is its own truth; the rest can be
/// rebuilt from the events. A session's events are found through `session_events`, which is not an index of SQLite's
/// because that would touch a page per session in every commit, half of all that a commit costs: it is caught up in
/// one go after every few thousand events, and what came since is found by looking at those few.
const INITIAL_SCHEMA: &str = "
CREATE TABLE events(
    gid INTEGER PRIMARY KEY,
    session INTEGER,
    number INTEGER,
    workspace INTEGER,
    ts INTEGER NOT NULL,
    kind TEXT NOT NULL,
    run TEXT,
    up INTEGER,
    data BLOB NOT NULL
) STRICT;
CREATE TABLE session_events(
    session INTEGER NOT NULL,
    number INTEGER NOT NULL,
    gid INTEGER NOT NULL,
    PRIMARY KEY(session, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE session_names(key INTEGER PRIMARY KEY, id TEXT NOT NULL) STRICT;
CREATE TABLE workspace_names(key INTEGER PRIMARY KEY, id TEXT NOT NULL) STRICT;
CREATE TABLE counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE remembered(
    key TEXT PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    answer BLOB NOT NULL,
    at INTEGER NOT NULL
) STRICT;
CREATE INDEX remembered_by_age ON remembered(at);

CREATE TABLE workspaces(
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    path TEXT NOT NULL,
    name TEXT,
    removed INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    doc BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX workspaces_by_path ON workspaces(path) WHERE removed = 0;
CREATE TABLE sessions(
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    workspace INTEGER NOT NULL,
    parent INTEGER,
    title TEXT,
    closed_at INTEGER,
    live INTEGER NOT NULL,
    owes INTEGER NOT NULL,
    cost_usd REAL NOT NULL,
    budget_usd REAL,
    updated_at INTEGER NOT NULL,
    doc BLOB NOT NULL
) STRICT;
CREATE INDEX sessions_by_workspace ON sessions(workspace);
CREATE INDEX sessions_by_parent ON sessions(parent) WHERE parent IS NOT NULL;
CREATE INDEX sessions_by_title ON sessions(title) WHERE title IS NOT NULL;
CREATE INDEX sessions_open ON sessions(key) WHERE closed_at IS NULL;
CREATE INDEX sessions_open_by_workspace ON sessions(workspace) WHERE closed_at IS NULL;
CREATE INDEX sessions_closed ON sessions(closed_at) WHERE closed_at IS NOT NULL;
CREATE INDEX sessions_live ON sessions(key) WHERE live = 1;
CREATE INDEX sessions_owing ON sessions(key) WHERE owes = 1;
CREATE TABLE runs(
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    session INTEGER NOT NULL,
    workspace INTEGER NOT NULL,
    finished INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    prompt BLOB,
    doc BLOB NOT NULL
) STRICT;
CREATE INDEX runs_by_session ON runs(session);
CREATE INDEX runs_by_workspace ON runs(workspace);
CREATE INDEX runs_unfinished ON runs(seq) WHERE finished = 0;
CREATE TABLE asks(
    n INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    session INTEGER NOT NULL,
    pending INTEGER NOT NULL,
    doc BLOB NOT NULL
) STRICT;
CREATE INDEX asks_by_session ON asks(session);
CREATE INDEX asks_pending ON asks(n) WHERE pending = 1;
CREATE TABLE snapshots(session INTEGER PRIMARY KEY, number INTEGER NOT NULL, state BLOB NOT NULL) STRICT;
CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
";

/// A fleet has a key like a session, since its events are numbered like one's and its sessions are below it.
const FLEETS: &str = "
CREATE TABLE fleets(
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    workspace INTEGER NOT NULL,
    live INTEGER NOT NULL,
    budget_usd REAL,
    born BLOB NOT NULL,
    doc BLOB NOT NULL
) STRICT;
CREATE INDEX fleets_by_workspace ON fleets(workspace);
CREATE INDEX fleets_live ON fleets(key) WHERE live = 1;
";

/// Messages between sessions, in the order of arrival. An id is one message for ever, so of a purged session its messages'
/// ids stay, without session and content: such a row is the truth, and no rebuild empties it.
const MAIL: &str = "
CREATE TABLE mail(
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    session INTEGER,
    open INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    sent BLOB,
    doc BLOB
) STRICT;
CREATE INDEX mail_by_session ON mail(session) WHERE session IS NOT NULL;
CREATE INDEX mail_open ON mail(seq) WHERE open = 1;
";

/// What a rebuild empties before it refills it. Names, counters, remembered answers and `keep.` keys stay.
pub(crate) const EMPTY_ROWS: &str = "
DELETE FROM workspaces;
DELETE FROM sessions;
DELETE FROM fleets;
DELETE FROM runs;
DELETE FROM asks;
DELETE FROM mail WHERE session IS NOT NULL;
DELETE FROM snapshots;
DELETE FROM meta WHERE key NOT GLOB 'keep.*';
";

/// Makes `session_events` anew; part of a rebuild.
pub(crate) const EMPTY_INDEX: &str = "
DELETE FROM session_events;
DELETE FROM counters WHERE name = 'indexed';
";

/// The last event that `session_events` has.
pub(crate) const INDEXED_THROUGH_SQL: &str =
    "coalesce((SELECT value FROM counters WHERE name = 'indexed'), 0)";

/// The one connection that writes, on a file that has the newest schema and syncs every commit.
pub(crate) fn open_writer(home: &Path) -> Result<Connection, JournalOpenError> {
    let file = home.join(DATABASE_FILE);
    // Made here, so that it and what SQLite puts beside it are readable by the owner alone whatever the umask.
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&file)
        .map_err(JournalOpenError::io("make journal.db"))?;
    let mut writer = connect(&file, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    set_up_writer(&writer)?;
    migrate(&mut writer)?;
    Ok(writer)
}

/// A connection that moves the log into the file, on its own thread.
pub(crate) fn open_checkpointer(home: &Path) -> Result<Connection, JournalOpenError> {
    let connection = connect(&home.join(DATABASE_FILE), OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    connection
        .execute_batch("PRAGMA wal_autocheckpoint = 0; PRAGMA synchronous = FULL; PRAGMA cache_size = -256;")
        .map_err(JournalOpenError::database("set up the checkpoints"))?;
    Ok(connection)
}

/// A connection that cannot write.
pub(crate) fn open_reader(home: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(home.join(DATABASE_FILE), flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.set_prepared_statement_cache_capacity(STATEMENT_CACHE_SIZE);
    connection.execute_batch(&format!("PRAGMA query_only = 1; PRAGMA cache_size = -{READER_CACHE_KIB};"))?;
    Ok(connection)
}

fn connect(file: &Path, flags: OpenFlags) -> Result<Connection, JournalOpenError> {
    let doing = "open journal.db";
    let connection = Connection::open_with_flags(file, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)
        .map_err(JournalOpenError::database(doing))?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(JournalOpenError::database(doing))?;
    connection.set_prepared_statement_cache_capacity(STATEMENT_CACHE_SIZE);
    Ok(connection)
}

/// Asks for what durability needs and reads back that it was granted: SQLite ignores what it does not know.
fn set_up_writer(writer: &Connection) -> Result<(), JournalOpenError> {
    let doing = "set up journal.db";
    writer
        .execute_batch(&format!(
            "PRAGMA auto_vacuum = INCREMENTAL;
             PRAGMA foreign_keys = 0;
             PRAGMA temp_store = MEMORY;
             PRAGMA cache_size = -{WRITER_CACHE_KIB};
             PRAGMA synchronous = FULL;"
        ))
        .map_err(JournalOpenError::database(doing))?;
    let mode: String = writer
        .query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))
        .map_err(JournalOpenError::database(doing))?;
    if mode != "wal" {
        return Err(JournalOpenError::Refused("journal_mode = WAL"));
    }
    let synchronous: i64 = writer
        .query_row("PRAGMA synchronous", [], |row| row.get(0))
        .map_err(JournalOpenError::database(doing))?;
    if synchronous != 2 {
        return Err(JournalOpenError::Refused("synchronous = FULL"));
    }
    let pages: i64 = writer
        .query_row("PRAGMA wal_autocheckpoint = 0", [], |row| row.get(0))
        .map_err(JournalOpenError::database(doing))?;
    if pages != 0 {
        return Err(JournalOpenError::Refused("wal_autocheckpoint = 0"));
    }
    let _: i64 = writer
        .query_row(&format!("PRAGMA journal_size_limit = {LOG_SIZE_LIMIT}"), [], |row| row.get(0))
        .map_err(JournalOpenError::database(doing))?;
    Ok(())
}

fn migrate(writer: &mut Connection) -> Result<(), JournalOpenError> {
    let doing = "bring journal.db to the newest schema";
    let known = i64::try_from(MIGRATIONS.len()).expect("there are few migrations");
    let number = |pragma: &str, connection: &Connection| {
        connection
            .query_row(&format!("PRAGMA {pragma}"), [], |row| row.get::<_, i64>(0))
            .map_err(JournalOpenError::database(doing))
    };
    let found = number("user_version", writer)?;
    let application = number("application_id", writer)?;
    let tables: i64 = writer
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(JournalOpenError::database(doing))?;
    if application != APPLICATION_ID && (application != 0 || tables != 0) {
        return Err(JournalOpenError::Foreign);
    }
    if found > known {
        return Err(JournalOpenError::TooNew { found, known });
    }
    for (done, step) in (0i64..).zip(MIGRATIONS).skip(usize::try_from(found).unwrap_or(0)) {
        let transaction = writer.transaction().map_err(JournalOpenError::database(doing))?;
        transaction
            .execute_batch(step)
            .and_then(|()| transaction.pragma_update(None, "application_id", APPLICATION_ID))
            .and_then(|()| transaction.pragma_update(None, "user_version", done + 1))
            .map_err(JournalOpenError::database(doing))?;
        transaction.commit().map_err(JournalOpenError::database(doing))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_file_is_private_and_syncs_every_commit() {
        use std::os::unix::fs::PermissionsExt;
        let home = tempfile::tempdir().unwrap();
        let writer = open_writer(home.path()).unwrap();
        for file in [DATABASE_FILE, LOG_FILE] {
            let mode = home.path().join(file).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
        let vacuum: i64 = writer.query_row("PRAGMA auto_vacuum", [], |row| row.get(0)).unwrap();
        assert_eq!(vacuum, 2);
        drop(writer);
        open_writer(home.path()).unwrap();
    }

    #[test]
    fn a_journal_of_a_newer_schema_is_refused() {
        let home = tempfile::tempdir().unwrap();
        open_writer(home.path()).unwrap().pragma_update(None, "user_version", 99).unwrap();
        match open_writer(home.path()) {
            Err(JournalOpenError::TooNew { found: 99, known }) => assert_eq!(known, 3),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn somebody_elses_database_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let other = Connection::open(home.path().join(DATABASE_FILE)).unwrap();
        other.execute_batch("CREATE TABLE mine(a)").unwrap();
        assert!(matches!(open_writer(home.path()), Err(JournalOpenError::Foreign)));
    }

    #[test]
    fn the_sqlite_in_this_build_has_no_log_reset_race() {
        assert!(rusqlite::version_number() >= 3_051_003);
    }
}
