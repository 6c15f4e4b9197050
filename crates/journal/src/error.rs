//! Everything that can go wrong in the journal, as errors with a stable code and a word on whether trying again can
//! help. SQLite's own errors are read here and nowhere else.

use std::io;

use rusqlite::ErrorCode;

/// Why a journal could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalOpenError {
    /// Another daemon owns this home.
    #[error("the home is held by another daemon{}; stop it or choose another home", holder(*pid))]
    HomeLocked {
        /// The process that holds it, if it has said so yet.
        pid: Option<u32>,
    },
    /// The file was written by a newer version.
    #[error("the journal has schema {found}, but this version knows only up to {known}; use a newer qd")]
    TooNew {
        /// What the file says.
        found: i64,
        /// What we can read.
        known: i64,
    },
    /// The file is a database, but somebody else's.
    #[error("journal.db in the home is not a journal of Quarterdeck; move it away")]
    Foreign,
    /// There is no room for the reserve that keeps cancels and ends possible on a full disk.
    #[error("the disk is too full: {needed} bytes must be free to be held in reserve")]
    DiskFull {
        /// How many.
        needed: u64,
    },
    /// The database does not do what was asked of it.
    #[error("the journal's database refused `{0}`; this build of SQLite cannot be trusted with it")]
    Refused(&'static str),
    /// The file system failed.
    #[error("could not {doing}: {source}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// The database failed.
    #[error("could not {doing}: {source}")]
    Database {
        /// What was tried.
        doing: &'static str,
        /// What it said.
        source: rusqlite::Error,
    },
}

impl JournalOpenError {
    pub(crate) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, source }
    }

    pub(crate) fn database(doing: &'static str) -> impl FnOnce(rusqlite::Error) -> Self {
        move |source| Self::Database { doing, source }
    }
}

fn holder(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

/// Why an append was not made. Nothing of it is in the journal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// No room, or only the reserve is left and this append may not use it.
    #[error("the disk is full; nothing was written, try again when there is room")]
    Full,
    /// The file system does not take writes.
    #[error("the journal is read-only; nothing was written")]
    ReadOnly,
    /// The storage failed; a later append may work.
    #[error("the storage failed and nothing was written: {0}")]
    Io(String),
    /// This append contradicts the journal. Trying it again cannot help.
    #[error("the append contradicts the journal: {0}")]
    Violation(String),
    /// The journal is closed.
    #[error("the journal is closed")]
    Stopped,
}

impl AppendError {
    /// A stable word for it.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Full => "storage_full",
            Self::ReadOnly => "storage_read_only",
            Self::Io(_) => "storage_failed",
            Self::Violation(_) => "violation",
            Self::Stopped => "stopped",
        }
    }

    /// Whether the same append may work later.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Full | Self::ReadOnly | Self::Io(_))
    }
}

/// A failed I/O while the shared-memory index of the log was made larger: in truth, a full disk.
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

/// Why something could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JournalReadError {
    /// The journal is closed.
    #[error("the journal is closed")]
    Stopped,
    /// A list was to go on after something that is not there.
    #[error("there is no {0} to go on after")]
    Cursor(String),
    /// The storage failed; a later read may work.
    #[error("the journal could not be read: {0}")]
    Io(String),
}

impl JournalReadError {
    /// A stable word for it.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Cursor(_) => "bad_cursor",
            Self::Io(_) => "storage_failed",
        }
    }

    /// Whether the same read may work later.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Io(_))
    }
}

impl From<rusqlite::Error> for JournalReadError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Io(error.to_string())
    }
}

/// Why a file beside the journal was not written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    /// No room.
    #[error("the disk is full; the file was not written")]
    Full,
    /// The storage failed.
    #[error("the file could not be kept beside the journal: {0}")]
    Io(String),
}

impl BlobError {
    /// A stable word for it.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Full => "storage_full",
            Self::Io(_) => "storage_failed",
        }
    }

    /// Always: both are the storage's fault, not the caller's.
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
