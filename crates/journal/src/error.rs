//! The journal's errors. Each has a stable code and says whether a retry can help. SQLite's own errors are interpreted
//! here and nowhere else.

use std::io;

use rusqlite::ErrorCode;

/// What to do if there is no usable journal. The whole home is moved, because what else is in it belongs to the journal.
const RESTORE: &str =
    "restore a backup of it, or move the whole home away to begin anew; nothing was changed";

/// Why a journal could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalOpenError {
    #[error("another daemon{} is using this home; stop it or choose another home", holder(*pid))]
    HomeLocked {
        /// The pid of the process that holds the lock, if it has already written it.
        pid: Option<u32>,
    },
    /// The database was written by a newer version.
    #[error(
        "the journal has schema version {found}, but this qd supports only up to {known}; use a newer qd"
    )]
    TooNew {
        /// The version stored in the file.
        found: i64,
        /// The newest version that this build can read.
        known: i64,
    },
    /// `journal.db` is a database of another application.
    #[error("journal.db in the home is a database, but not a Quarterdeck journal; {RESTORE}")]
    Foreign,
    /// `journal.db` has no content. No start of ours leaves such a file.
    #[error("journal.db in the home is empty (0 bytes); {RESTORE}")]
    Empty,
    /// `journal.db` does not begin as an SQLite file does.
    #[error("journal.db in the home is not an SQLite database, or its beginning is destroyed; {RESTORE}")]
    NotADatabase,
    /// Pages at the end of `journal.db` are missing.
    #[error("journal.db in the home is cut short: it has {found} bytes{}; {RESTORE}", expected_bytes(*.expected))]
    Truncated {
        /// The length of the file.
        found: u64,
        /// The length that it should have, if its header is there to say so.
        expected: Option<u64>,
    },
    /// There is no `journal.db`, although something in the home shows that there was one.
    #[error("journal.db is missing{}; {RESTORE}", because_of(.sign.as_deref()))]
    Missing {
        /// The file that only a daemon with a journal creates; absent if there was none to look for.
        sign: Option<String>,
    },
    /// SQLite found damage while it opened the journal.
    #[error("journal.db in the home is damaged: could not {doing}: {source}; {RESTORE}")]
    Damaged {
        /// The attempted action; fits after "could not".
        doing: &'static str,
        source: rusqlite::Error,
    },
    /// There is no disk space for the reserve, which keeps cancels and run ends possible on a full disk.
    #[error("the disk is too full: qd needs {needed} free bytes to hold in reserve")]
    DiskFull { needed: u64 },
    /// SQLite did not accept a setting that durability depends on.
    #[error("SQLite refused `{0}`, which the journal needs for durability; use another build of SQLite")]
    Refused(&'static str),
    /// The file system failed.
    #[error("could not {doing}: {source}")]
    Io {
        /// The attempted action; fits after "could not".
        doing: &'static str,
        source: io::Error,
    },
    /// The database failed.
    #[error("could not {doing}: {source}")]
    Database {
        /// The attempted action; fits after "could not".
        doing: &'static str,
        source: rusqlite::Error,
    },
}

impl JournalOpenError {
    pub(crate) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, source }
    }

    pub(crate) fn database(doing: &'static str) -> impl FnOnce(rusqlite::Error) -> Self {
        move |source| match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Damaged { doing, source },
            _ => Self::Database { doing, source },
        }
    }
}

fn expected_bytes(expected: Option<u64>) -> String {
    expected.map(|bytes| format!(" of {bytes}")).unwrap_or_default()
}

fn because_of(sign: Option<&str>) -> String {
    sign.map(|sign| format!(", but {sign} in the home shows that there was one")).unwrap_or_default()
}

fn holder(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

/// Why an append failed. The journal contains no part of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The disk is full, or only the reserve is left and this append may not use it.
    #[error("the disk is full and nothing was written; free some disk space and try again")]
    Full,
    /// The file system or the database is read-only.
    #[error("the journal is read-only; nothing was written")]
    ReadOnly,
    /// The storage failed. A later append may succeed.
    #[error("the storage failed and nothing was written: {0}")]
    Io(String),
    /// The append contradicts what is in the journal. A retry cannot help.
    #[error("the append contradicts the journal: {0}")]
    Violation(String),
    #[error("the journal is closed")]
    Stopped,
}

impl AppendError {
    /// A stable code for clients and metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Full => "storage_full",
            Self::ReadOnly => "storage_read_only",
            Self::Io(_) => "storage_failed",
            Self::Violation(_) => "violation",
            Self::Stopped => "stopped",
        }
    }

    /// Whether the same append may succeed later.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Full | Self::ReadOnly | Self::Io(_))
    }
}

/// SQLite could not enlarge the shared-memory index of the log. The cause is a full disk.
const IOERR_SHMSIZE: i32 = rusqlite::ffi::SQLITE_IOERR_SHMSIZE;

impl From<rusqlite::Error> for AppendError {
    fn from(error: rusqlite::Error) -> Self {
        let rusqlite::Error::SqliteFailure(cause, _) = &error else {
            return Self::Io(error.to_string());
        };
        match cause.code {
            ErrorCode::DiskFull => Self::Full,
            _ if cause.extended_code == IOERR_SHMSIZE => Self::Full,
            ErrorCode::ReadOnly => Self::ReadOnly,
            ErrorCode::ConstraintViolation | ErrorCode::TooBig => Self::Violation(error.to_string()),
            _ => Self::Io(error.to_string()),
        }
    }
}

/// Why a read failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JournalReadError {
    #[error("the journal is closed")]
    Stopped,
    /// A list was to continue after an id that does not exist.
    #[error("there is no {0} to continue after")]
    Cursor(String),
    /// The storage failed. A later read may succeed.
    #[error("the journal could not be read: {0}")]
    Io(String),
}

impl JournalReadError {
    /// A stable code for clients and metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Cursor(_) => "bad_cursor",
            Self::Io(_) => "storage_failed",
        }
    }

    /// Whether the same read may succeed later.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Io(_))
    }
}

impl From<rusqlite::Error> for JournalReadError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Io(error.to_string())
    }
}

/// Why a blob could not be written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    #[error("the disk is full; the file was not written")]
    Full,
    #[error("a file in `blobs` could not be written or read: {0}")]
    Io(String),
}

impl BlobError {
    /// A stable code for clients and metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Full => "storage_full",
            Self::Io(_) => "storage_failed",
        }
    }

    /// Always true: both errors are failures of the storage, not mistakes of the caller.
    pub fn retryable(&self) -> bool {
        true
    }
}

impl From<io::Error> for BlobError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            _ => Self::Io(error.to_string()),
        }
    }
}
