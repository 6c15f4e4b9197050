//! Data that is derived from the events, so that all sessions can be searched, their usage summed up, and what somebody
//! did listed. It is kept in a database file of its own, `derived.db`, which can be deleted at any time: a missing, damaged or foreign file is
//! created anew, and filled again from the first event. The caller turns events into [`DerivedChange`]s; nothing here
//! knows an event or reads the journal.
//!
//! In reading order: this file opens the database and keeps its connections; `changes` writes; `search`, `usage` and
//! `audit` read; `search_words` turns what a person typed into a query.
//!
//! Design: docs/design/derived-data-in-its-own-file.md

mod audit;
mod changes;
mod search;
mod search_words;
mod usage;

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use qd_protocol::Seq;
use rusqlite::{Connection, ErrorCode, OpenFlags};

pub use audit::{AuditDocuments, AuditFilter};
pub use changes::{DerivedChange, DerivedText};
pub use search::{SearchFilter, SearchPosition};
pub use search_words::{BadSearchWords, SearchWords};
pub use usage::{UsageEntries, UsageEntry};

use crate::event::SessionKey;
use crate::rows::from_sql_int;

/// The database file in the home.
const DERIVED_FILE: &str = "derived.db";
/// The database file, and SQLite's log and its index.
const DERIVED_FILES: [&str; 3] = [DERIVED_FILE, "derived.db-wal", "derived.db-shm"];
/// "qdix". Tells our databases from those of other applications.
const DERIVED_APPLICATION_ID: i64 = 0x7164_6978;
/// The version of the tables and of what is derived from each event. A file of another version is created anew, so a
/// change to either needs only a higher number.
const DERIVED_VERSION: i64 = 2;
/// Idle connections for reading that are kept open.
const IDLE_READERS: usize = 2;
/// Page cache of each connection in KiB.
const DERIVED_CACHE_KIB: i64 = 4 << 10;
/// How long a connection waits for another one's lock.
const DERIVED_BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// `progress` has one row: the seq up to which all events are in the tables. `entries` are the texts that can be found.
/// An entry's id is made of the seq of its event, so a higher id is newer and a rebuild gives the same ids. `open_texts`
/// are the pieces of messages that are not finished. `audit` has a document of the caller for each event that somebody
/// caused.
const DERIVED_SCHEMA: &str = "
CREATE TABLE progress(id INTEGER PRIMARY KEY CHECK(id = 1), seq INTEGER NOT NULL) STRICT;
INSERT INTO progress VALUES (1, 0);
CREATE TABLE workspaces(key INTEGER PRIMARY KEY, id TEXT NOT NULL, path TEXT NOT NULL) STRICT;
CREATE TABLE sessions(
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    workspace INTEGER,
    agent TEXT NOT NULL,
    title TEXT,
    model TEXT
) STRICT;
CREATE TABLE entries(
    id INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    ts INTEGER NOT NULL,
    kind TEXT NOT NULL,
    run TEXT,
    text TEXT NOT NULL
) STRICT;
CREATE INDEX entries_by_session ON entries(session);
CREATE VIRTUAL TABLE entry_words USING fts5(
    text, content = 'entries', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2'
);
INSERT INTO entry_words(entry_words, rank) VALUES ('secure-delete', 1);
CREATE TABLE open_texts(
    message TEXT NOT NULL,
    seq INTEGER NOT NULL,
    session INTEGER NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY(message, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX open_texts_by_session ON open_texts(session);
CREATE TABLE usage(
    seq INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    ts INTEGER NOT NULL,
    run TEXT,
    model TEXT,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    cost_usd REAL NOT NULL
) STRICT;
CREATE INDEX usage_by_session ON usage(session);
CREATE INDEX usage_by_time ON usage(ts);
CREATE TABLE audit(
    seq INTEGER PRIMARY KEY,
    session INTEGER,
    workspace INTEGER,
    ts INTEGER NOT NULL,
    entry TEXT NOT NULL
) STRICT;
CREATE INDEX audit_by_session ON audit(session, seq) WHERE session IS NOT NULL;
CREATE INDEX audit_by_workspace ON audit(workspace, seq) WHERE workspace IS NOT NULL;
CREATE INDEX audit_by_time ON audit(ts, seq);
";

/// Why the derived data could not be read or written. The journal is not affected.
#[derive(Debug, thiserror::Error)]
pub enum DerivedDataError {
    #[error("derived.db failed: {0}")]
    Database(#[from] rusqlite::Error),
    #[error("could not create derived.db: {0}")]
    Io(#[from] io::Error),
    /// Creating the file failed before, and was not tried again yet.
    #[error("derived.db is not open")]
    NotOpen,
    #[error("derived.db holds a value that we could not have written: {0}")]
    Unreadable(String),
}

impl DerivedDataError {
    /// Whether only a new file helps.
    pub fn needs_rebuild(&self) -> bool {
        match self {
            Self::Database(error) => matches!(
                error.sqlite_error_code(),
                // An event is applied once, so a row that is already there was not written by us.
                Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::ConstraintViolation)
            ),
            Self::Unreadable(_) => true,
            Self::Io(_) | Self::NotOpen => false,
        }
    }

    fn unreadable(error: impl std::fmt::Display) -> Self {
        Self::Unreadable(error.to_string())
    }
}

/// The disk space that the derived data takes up, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DerivedSizes {
    /// The database file with SQLite's log.
    pub files: u64,
    /// Free space inside the database file, which [`DerivedStore::shrink`] gives back.
    pub unused: u64,
}

/// The database of derived data of one home. All methods block. Only one store may write to a home, which the journal's
/// lock ensures.
#[derive(Debug)]
pub struct DerivedStore {
    home: PathBuf,
    /// Held for writing while the file is replaced, so that no connection to the old file is left then.
    connections: RwLock<Option<DerivedConnections>>,
}

#[derive(Debug)]
struct DerivedConnections {
    writer: Mutex<Connection>,
    idle_readers: Mutex<Vec<Connection>>,
}

impl DerivedStore {
    /// A store that is not open yet.
    pub fn new(home: &Path) -> Self {
        Self { home: home.to_owned(), connections: RwLock::new(None) }
    }

    /// Opens the file, or creates it anew if it is missing, damaged or of another version. Returns the seq of the last
    /// event that is in it.
    pub fn open(&self) -> Result<Seq, DerivedDataError> {
        let mut connections = self.connections.write();
        *connections = None;
        let opened = open_existing(&self.home).and_then(|writer| Ok((read_progress(&writer)?, writer)));
        let (seq, writer) = match opened {
            Ok((seq, Some(writer))) => (seq, writer),
            Ok((_, None)) => (Seq(0), create(&self.home)?),
            Err(error) if error.needs_rebuild() || lacks_tables(&error) => {
                tracing::warn!(%error, "derived.db cannot be used; it is built anew from the journal");
                (Seq(0), create(&self.home)?)
            }
            Err(error) => return Err(error),
        };
        *connections =
            Some(DerivedConnections { writer: Mutex::new(writer), idle_readers: Mutex::default() });
        Ok(seq)
    }

    /// Replaces the file with an empty one.
    pub fn clear(&self) -> Result<(), DerivedDataError> {
        let mut connections = self.connections.write();
        *connections = None;
        let writer = create(&self.home)?;
        *connections =
            Some(DerivedConnections { writer: Mutex::new(writer), idle_readers: Mutex::default() });
        Ok(())
    }

    /// Applies changes in one transaction and records that all events up to `through` are applied.
    pub fn apply(&self, changes: &[DerivedChange], through: Seq) -> Result<(), DerivedDataError> {
        self.write(|db| changes::apply(db, changes, through))
    }

    /// Removes everything of the sessions that are not in `existing`: they were purged.
    pub fn remove_other_sessions(&self, existing: &[SessionKey]) -> Result<usize, DerivedDataError> {
        self.write(|db| changes::remove_other_sessions(db, existing))
    }

    /// How large the file and its log are, and how much of the file is unused.
    pub fn sizes(&self) -> Result<DerivedSizes, DerivedDataError> {
        let unused = self.read(|db, _| {
            let pragma = |name: &str| db.query_row(&format!("PRAGMA {name}"), [], |row| row.get(0));
            Ok(from_sql_int(pragma("freelist_count")?) * from_sql_int(pragma("page_size")?))
        })?;
        let length = |file: &str| self.home.join(file).metadata().map_or(0, |metadata| metadata.len());
        Ok(DerivedSizes { files: DERIVED_FILES.into_iter().map(length).sum(), unused })
    }

    /// Gives the unused space of the file back to the file system. Searches go on meanwhile, changes wait. It needs as
    /// much space as the file has, beside the file and again for temporary files.
    pub fn shrink(&self) -> Result<(), DerivedDataError> {
        let connections = self.connections.read();
        let connections = connections.as_ref().ok_or(DerivedDataError::NotOpen)?;
        let writer = connections.writer.lock();
        // The copy would otherwise be made in memory, however large it is.
        writer.execute_batch("PRAGMA temp_store = FILE")?;
        let vacuumed = writer.execute_batch("VACUUM");
        writer.execute_batch("PRAGMA temp_store = MEMORY")?;
        vacuumed?;
        // The log has the whole file now. If a search still reads it, it is emptied later.
        writer.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
        Ok(())
    }

    fn write<T>(
        &self,
        write: impl FnOnce(&Connection) -> Result<T, DerivedDataError>,
    ) -> Result<T, DerivedDataError> {
        let connections = self.connections.read();
        let connections = connections.as_ref().ok_or(DerivedDataError::NotOpen)?;
        let writer = connections.writer.lock();
        // Rolls back if it is dropped without a commit.
        let transaction = writer.unchecked_transaction()?;
        let written = write(&transaction)?;
        transaction.commit()?;
        Ok(written)
    }

    /// Runs a read in one transaction, and passes it the seq up to which the data goes.
    fn read<T>(
        &self,
        read: impl FnOnce(&Connection, Seq) -> Result<T, DerivedDataError>,
    ) -> Result<T, DerivedDataError> {
        let connections = self.connections.read();
        let connections = connections.as_ref().ok_or(DerivedDataError::NotOpen)?;
        let idle = connections.idle_readers.lock().pop();
        let reader = match idle {
            Some(reader) => reader,
            None => connect(&self.home, OpenFlags::SQLITE_OPEN_READ_ONLY)?,
        };
        let transaction = reader.unchecked_transaction()?;
        let result = read_seq(&transaction).and_then(|seq| read(&transaction, seq));
        drop(transaction);
        let mut idle = connections.idle_readers.lock();
        if result.is_ok() && idle.len() < IDLE_READERS {
            idle.push(reader);
        }
        result
    }
}

/// Deletes the derived data of a home that no daemon holds. The next daemon creates it anew.
pub(crate) fn remove_files(home: &Path) -> io::Result<()> {
    for file in DERIVED_FILES {
        match fs::remove_file(home.join(file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Whether the file has our version but not our tables.
fn lacks_tables(error: &DerivedDataError) -> bool {
    matches!(error, DerivedDataError::Database(error) if error.sqlite_error_code() == Some(ErrorCode::Unknown))
}

fn read_progress(writer: &Option<Connection>) -> Result<Seq, DerivedDataError> {
    writer.as_ref().map_or(Ok(Seq(0)), read_seq)
}

fn read_seq(db: &Connection) -> Result<Seq, DerivedDataError> {
    let seq = db.prepare_cached("SELECT seq FROM progress")?.query_row([], |row| row.get(0))?;
    Ok(Seq(from_sql_int(seq)))
}

/// A connection for writing to the file, if there is one with today's tables.
fn open_existing(home: &Path) -> Result<Option<Connection>, DerivedDataError> {
    if !home.join(DERIVED_FILE).exists() {
        return Ok(None);
    }
    let writer = connect(home, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let pragma = |name: &str| writer.query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, i64>(0));
    let is_ours =
        pragma("application_id")? == DERIVED_APPLICATION_ID && pragma("user_version")? == DERIVED_VERSION;
    Ok(is_ours.then_some(writer))
}

/// Creates an empty database, in place of any other file of its name.
fn create(home: &Path) -> Result<Connection, DerivedDataError> {
    remove_files(home)?;
    // SQLite would make it readable for others. Its log gets the same mode.
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(home.join(DERIVED_FILE))?;
    let writer = connect(home, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let transaction = writer.unchecked_transaction()?;
    transaction.execute_batch(DERIVED_SCHEMA)?;
    transaction.pragma_update(None, "application_id", DERIVED_APPLICATION_ID)?;
    transaction.pragma_update(None, "user_version", DERIVED_VERSION)?;
    transaction.commit()?;
    Ok(writer)
}

fn connect(home: &Path, flags: OpenFlags) -> Result<Connection, DerivedDataError> {
    let flags = flags | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(home.join(DERIVED_FILE), flags)?;
    connection.busy_timeout(DERIVED_BUSY_TIMEOUT)?;
    if flags.contains(OpenFlags::SQLITE_OPEN_READ_WRITE) {
        // A power cut may undo the last transactions, which are then derived again, but damages nothing.
        let _: String = connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
        connection.execute_batch("PRAGMA synchronous = NORMAL; PRAGMA temp_store = MEMORY;")?;
    }
    connection.execute_batch(&format!("PRAGMA cache_size = -{DERIVED_CACHE_KIB};"))?;
    Ok(connection)
}

#[cfg(test)]
mod tests;
