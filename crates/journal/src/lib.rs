//! Quarterdeck's durable store: events and rows in SQLite, written by one thread and read through cursors. Each append
//! is one transaction, and nothing is published or acknowledged before it is synced. The journal does not know what an
//! event means; only `merge` knows streamed text.
//!
//! Layout, in reading order:
//! - [`event`]: an event as it is appended, stored and published, and the SSE frame that clients see.
//! - [`rows`]: the rows that lists are built from, and the changes to them.
//! - `queue` and `writer`: how appends become transactions. `index`: how a session's events are found. `reserve`: the
//!   disk space held back for a full disk. `checkpoint`: how SQLite's log is moved into the database file.
//! - `ring` and [`subscription`]: how events reach subscribers.
//! - [`read`] and [`lists`]: how events and rows are read back.
//! - [`blobs`]: texts and files too large for an event. [`gc`]: finds what could be deleted. `check`: finds damage.
//!   `merge`: merges streamed text that is long finished.
//! - `database_file`: creates `journal.db`, and refuses one that is not whole. `schema`: the tables. `lock`: one daemon per home. `log_sync`: how
//!   SQLite syncs its log. [`rebuild`](mod@rebuild): recreates the rows from the events.
//! - [`derived`]: what search and usage reports are answered from, in a file of its own.
//! - `key_clock`: the clock by which idempotency keys expire.
//! - [`stats`]: counters for operators. [`error`]: all errors. [`faults`]: fault injection for tests.

pub mod blobs;
mod check;
mod checkpoint;
mod database_file;
pub mod derived;
pub mod error;
pub mod event;
pub mod faults;
pub mod gc;
mod index;
mod journal;
mod key_clock;
pub mod lists;
mod lock;
mod log_sync;
mod merge;
mod queue;
pub mod read;
pub mod rebuild;
mod reserve;
mod ring;
pub mod rows;
mod schema;
pub mod stats;
pub mod subscription;
mod writer;

pub use blobs::{BlobFile, BlobStore};
pub use check::JournalCheck;
pub use database_file::inspect_journal;
pub use derived::{DerivedChange, DerivedDataError, DerivedStore, DerivedText};
pub use error::{AppendError, BlobError, JournalOpenError, JournalReadError};
pub use event::{EventScope, NewEvent, PublishedEvent, SessionKey, StoredEvent, WorkspaceKey};
pub use journal::{AppendRequest, Journal, JournalOptions};
pub use key_clock::UptimeReader;
pub use lists::{
    AskFilter, FleetFilter, JournalCounts, MailFilter, RunFilter, SessionFilter, StoredResponse,
};
pub use merge::{MergePosition, MergeSavings};
pub use queue::{AppendReceipt, IdempotencyRecord};
pub use read::{JournalPage, SessionEventPage, SessionHistory, StoredEventPage};
pub use rebuild::{RebuildError, rebuild};
pub use ring::{EventFilter, EventTopic, JournalActivity};
pub use rows::{AskRow, FleetRow, MailRow, RowChange, RunRow, SessionRow, WorkspaceRow};
pub use stats::JournalStats;
pub use subscription::Subscription;
