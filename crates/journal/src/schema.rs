//! The tables, their version and migrations, and the settings of every connection. The meaning of the rows' documents
//! is not known here: they are bytes.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use crate::error::JournalOpenError;
use crate::log_sync::log_sync_vfs;

/// The database file in the home.
pub(crate) const DATABASE_FILE: &str = "journal.db";
/// SQLite's write-ahead log.
pub(crate) const LOG_FILE: &str = "journal.db-wal";

/// "qdjl". Tells our databases from those of other applications.
pub(crate) const APPLICATION_ID: i64 = 0x7164_6a6c;
/// The log file is truncated to this size when the log restarts. Up to this size it is overwritten in place, which
/// makes a sync cheaper for the file system than a growing file.
pub(crate) const LOG_SIZE_LIMIT: u64 = 16 << 20;
/// The writer's page cache in KiB. It holds the end of the events table and the index pages of the busiest sessions.
const WRITER_CACHE_KIB: i64 = 32 << 10;
/// The page cache of each reader in KiB.
const READER_CACHE_KIB: i64 = 4 << 10;
/// Prepared statements cached per connection.
const STATEMENT_CACHE_SIZE: usize = 64;
/// How long a connection waits for another one's lock. Connections only compete while the log restarts.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Each entry migrates the schema by one version. The version is the number of applied migrations.
const MIGRATIONS: &[&str] = &[INITIAL_SCHEMA, FLEETS, MAIL, UPTIMES, MERGED];

/// `events` and the `*_names` tables are the source of truth, `counters` never decrease, and `remembered` (responses by
/// idempotency key) stands on its own; everything else can be rebuilt from the events. `session_events` finds a
/// session's events. It is not an SQLite index, because that would touch one page per session in every commit, half of
/// a commit's cost. Instead it is updated in bulk every few thousand events, and readers scan the few newer ones.
///
/// Column names: `gid` is the seq, `up` the update number, and `owes` whether there is open work besides
/// unfinished runs.
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

/// A fleet has a session key, because its events are numbered like a session's and its sessions have it as parent.
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

/// Messages between sessions, in the order of arrival. A message's id stays used for ever, so when a session is purged
/// its messages keep id and fingerprint but lose session and content. Such rows cannot be rebuilt from events and
/// survive a rebuild.
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

/// The uptime of the machine at an event, as `MachineUptime` is written; absent where it decides nothing.
const UPTIMES: &str = "ALTER TABLE events ADD COLUMN uptime TEXT;";

/// `parts` of a merged row says which events it stands for; the index finds such rows near a cursor and has no entries for
/// others. `merged_through` is the number up to which each session was looked at.
const MERGED: &str = "
ALTER TABLE events ADD COLUMN parts BLOB;
CREATE INDEX events_merged ON events(gid) WHERE parts IS NOT NULL;
CREATE TABLE merged_through(session INTEGER PRIMARY KEY, number INTEGER NOT NULL) STRICT;
";

/// Empties what a rebuild refills. Names, counters, stored responses and `keep.` keys stay.
pub(crate) const EMPTY_ROWS: &str = "
DELETE FROM workspaces;
DELETE FROM sessions;
DELETE FROM fleets;
DELETE FROM runs;
DELETE FROM asks;
DELETE FROM mail WHERE session IS NOT NULL;
DELETE FROM snapshots;
DELETE FROM merged_through;
DELETE FROM meta WHERE key NOT GLOB 'keep.*';
";

/// Copies what no rebuild can refill from the database attached as `old`.
pub(crate) const COPY_TRUTH: &str = "
INSERT INTO events SELECT * FROM old.events ORDER BY gid;
INSERT INTO session_names SELECT * FROM old.session_names;
INSERT INTO workspace_names SELECT * FROM old.workspace_names;
INSERT INTO counters SELECT * FROM old.counters WHERE name <> 'indexed';
INSERT INTO remembered SELECT * FROM old.remembered;
INSERT INTO mail SELECT * FROM old.mail WHERE session IS NULL;
INSERT INTO meta SELECT * FROM old.meta WHERE key GLOB 'keep.*';
";

/// Empties `session_events`, which a rebuild refills.
pub(crate) const EMPTY_INDEX: &str = "
DELETE FROM session_events;
DELETE FROM counters WHERE name = 'indexed';
";

/// The seq of the last event in `session_events`.
pub(crate) const INDEXED_THROUGH_SQL: &str =
    "coalesce((SELECT value FROM counters WHERE name = 'indexed'), 0)";

/// Opens the only writing connection: migrates the file to the newest schema and makes every commit sync. Never creates
/// the file; [`ensure_journal`](crate::database_file::ensure_journal) does.
pub(crate) fn open_writer(home: &Path) -> Result<Connection, JournalOpenError> {
    let mut writer = connect(&home.join(DATABASE_FILE), OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    set_up_writer(&writer)?;
    migrate(&mut writer)?;
    Ok(writer)
}

/// Turns an empty file into a journal, which `fill` may fill. When this returns, the file is complete but not synced.
pub(crate) fn build<E: From<JournalOpenError>>(
    file: &Path,
    fill: impl FnOnce(&Connection) -> Result<(), E>,
) -> Result<(), E> {
    let doing = "create journal.db";
    let mut db = connect(file, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    set_up_writer(&db)?;
    // The caller syncs the file once, as a whole.
    db.execute_batch("PRAGMA synchronous = OFF").map_err(JournalOpenError::database(doing))?;
    apply_migrations(&mut db, 0)?;
    fill(&db)?;
    // The last connection moves the log into the file and removes it.
    db.close().map_err(|(_, error)| JournalOpenError::database(doing)(error))?;
    Ok(())
}

/// Opens the connection of the checkpoint thread.
pub(crate) fn open_checkpointer(home: &Path) -> Result<Connection, JournalOpenError> {
    let connection = connect(&home.join(DATABASE_FILE), OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    connection
        .execute_batch("PRAGMA wal_autocheckpoint = 0; PRAGMA synchronous = FULL; PRAGMA cache_size = -256;")
        .map_err(JournalOpenError::database("set up the connection for checkpoints"))?;
    Ok(connection)
}

/// Opens a read-only connection.
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
    let flags = flags | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags_and_vfs(file, flags, log_sync_vfs())
        .map_err(JournalOpenError::database(doing))?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(JournalOpenError::database(doing))?;
    connection.set_prepared_statement_cache_capacity(STATEMENT_CACHE_SIZE);
    Ok(connection)
}

/// Applies the settings that durability needs and reads them back, because SQLite silently ignores what it does not
/// know.
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

/// Refuses a journal that a newer release has written.
pub(crate) fn check_version(found: i64) -> Result<(), JournalOpenError> {
    let known = i64::try_from(MIGRATIONS.len()).expect("there are few migrations");
    match found > known {
        true => Err(JournalOpenError::TooNew { found, known }),
        false => Ok(()),
    }
}

fn migrate(writer: &mut Connection) -> Result<(), JournalOpenError> {
    let read_pragma = |pragma: &str, connection: &Connection| {
        connection
            .query_row(&format!("PRAGMA {pragma}"), [], |row| row.get::<_, i64>(0))
            .map_err(JournalOpenError::database("read the version of journal.db"))
    };
    let version = read_pragma("user_version", writer)?;
    if read_pragma("application_id", writer)? != APPLICATION_ID {
        return Err(JournalOpenError::Foreign);
    }
    check_version(version)?;
    apply_migrations(writer, version)
}

/// Applies the migrations after the first `version` ones, each in a transaction of its own.
fn apply_migrations(writer: &mut Connection, version: i64) -> Result<(), JournalOpenError> {
    let doing = "migrate journal.db to the newest schema";
    for (applied, migration) in (0i64..).zip(MIGRATIONS).skip(usize::try_from(version).unwrap_or(0)) {
        let transaction = writer.transaction().map_err(JournalOpenError::database(doing))?;
        transaction
            .execute_batch(migration)
            .and_then(|()| transaction.pragma_update(None, "application_id", APPLICATION_ID))
            .and_then(|()| transaction.pragma_update(None, "user_version", applied + 1))
            .map_err(JournalOpenError::database(doing))?;
        transaction.commit().map_err(JournalOpenError::database(doing))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens the journal of a home, and creates it if there is none.
    fn open(home: &Path) -> Connection {
        crate::database_file::ensure_journal(home).unwrap();
        open_writer(home).unwrap()
    }

    #[test]
    fn a_new_file_is_private_and_syncs_every_commit() {
        use std::os::unix::fs::PermissionsExt;
        let home = tempfile::tempdir().unwrap();
        let writer = open(home.path());
        writer.execute_batch("CREATE TABLE another(a)").unwrap();
        for file in [DATABASE_FILE, LOG_FILE] {
            let mode = home.path().join(file).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
        let vacuum: i64 = writer.query_row("PRAGMA auto_vacuum", [], |row| row.get(0)).unwrap();
        assert_eq!(vacuum, 2);
        let synchronous: i64 = writer.query_row("PRAGMA synchronous", [], |row| row.get(0)).unwrap();
        assert_eq!(synchronous, 2);
        drop(writer);
        open_writer(home.path()).unwrap();
    }

    #[test]
    fn a_journal_of_a_newer_schema_is_refused() {
        let home = tempfile::tempdir().unwrap();
        open(home.path()).pragma_update(None, "user_version", 99).unwrap();
        match open_writer(home.path()) {
            Err(JournalOpenError::TooNew { found: 99, known }) => {
                assert_eq!(known, i64::try_from(MIGRATIONS.len()).unwrap())
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn somebody_elses_database_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let other = Connection::open(home.path().join(DATABASE_FILE)).unwrap();
        other.execute_batch("CREATE TABLE mine(a)").unwrap();
        assert!(matches!(open_writer(home.path()), Err(JournalOpenError::Foreign)));
        let refused = crate::database_file::ensure_journal(home.path());
        assert!(matches!(refused, Err(JournalOpenError::Foreign)), "{refused:?}");
    }

    #[test]
    fn the_sqlite_in_this_build_has_no_log_reset_race() {
        assert!(rusqlite::version_number() >= 3_051_003);
    }
}
