//! What the home stores, and what is damaged in it, as the API shows it.

use serde::{Deserialize, Serialize};

use crate::time::Millis;

/// Response of `GET /v1/gc`: what the home stores and what could be freed. Response of `POST /v1/gc`: the same, and how
/// much was freed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Gc)]
pub struct GcReport {
    /// Size of the journal with its write-ahead log, in bytes.
    pub journal_bytes: u64,
    /// Size of the texts and files stored beside the journal, in bytes.
    pub blob_bytes: u64,
    /// Size of `derived.db`, the index that searches and usage sums are answered from, in bytes.
    #[serde(default)]
    pub derived_bytes: u64,
    /// Unused space inside `derived.db`, in bytes. It is reused, or given back to the disk.
    #[serde(default)]
    pub derived_unused_bytes: u64,
    /// Size of the daemon's log file, in bytes.
    pub log_bytes: u64,
    /// Sessions that have been closed for at least `older_than_days`.
    pub closed_sessions: u64,
    /// Events of these sessions.
    pub closed_events: u64,
    /// Stored files that no event refers to, once these sessions are gone.
    pub loose_blobs: u64,
    /// Size of these files, in bytes.
    pub loose_blob_bytes: u64,
    /// Events of streamed text that become part of another one when they are merged. Readers see no difference.
    #[serde(default)]
    pub mergeable_events: u64,
    /// Size of these events, in bytes, about.
    #[serde(default)]
    pub mergeable_bytes: u64,
    /// Unused space inside the journal's file, in bytes. It is reused, or given back to the disk.
    #[serde(default)]
    pub unused_bytes: u64,
    /// Whether the space was freed. False if it was only counted.
    pub done: bool,
    /// Bytes that were freed.
    pub freed_bytes: u64,
}

/// Body of `POST /v1/gc` and query of `GET /v1/gc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GcRequest {
    /// Only sessions that have been closed for this many days are deleted.
    #[serde(default = "default_gc_days")]
    pub older_than_days: u32,
}

fn default_gc_days() -> u32 {
    30
}

/// What a check of the journal found. Returned by `GET /v1/journal/check`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = JournalCheck)]
pub struct JournalCheckReport {
    /// When the check ended.
    pub checked_at: Millis,
    /// Rows that were read.
    pub rows: u64,
    /// Bytes of these rows.
    pub bytes: u64,
    /// The damaged places; empty if the journal is sound.
    pub damage: Vec<JournalDamage>,
}

/// A place in the journal that cannot be read, or holds something that was never written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct JournalDamage {
    /// The table in `journal.db`. `events` are the source of truth.
    pub table: String,
    /// The first damaged key. For `events` it is a seq. Absent if it is unknown.
    pub first: Option<u64>,
    /// The last damaged key. Absent if it is unknown, or if everything from `first` on is damaged.
    pub last: Option<u64>,
    /// The sessions whose events are damaged, as far as they are known.
    pub sessions: Vec<String>,
    /// Whether `qd doctor --rebuild` recreates the table from the events.
    pub rebuildable: bool,
    /// What SQLite says about it.
    pub detail: String,
}

impl std::fmt::Display for JournalDamage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the table {} is damaged", self.table)?;
        let unit = if self.table == "events" { "seq" } else { "row" };
        match (self.first, self.last) {
            (Some(first), Some(last)) if first == last => write!(f, " at {unit} {first}")?,
            (Some(first), Some(last)) => write!(f, " from {unit} {first} to {last}")?,
            (Some(first), None) => write!(f, " from {unit} {first} on")?,
            (None, _) => {}
        }
        if !self.sessions.is_empty() {
            write!(f, ", in events of {}", self.sessions.join(", "))?;
        }
        write!(f, ": {}", self.detail)
    }
}
