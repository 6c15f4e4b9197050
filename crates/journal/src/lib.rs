//! The durable truth of Quarterdeck: events and rows on SQLite, one writer, cursors for readers. It stores what it is
//! given in one transaction, and shows or acknowledges nothing that is not synced; what an event means it does not
//! know.
//!
//! Layout, in reading order:
//! - [`event`]: an event on its way in, out, and as it is stored; the frame that clients see.
//! - [`rows`]: the rows that lists are made of, and what changes them.
//! - `queue` and `writer`: how appends become transactions. `index`: how a session's events are found. `reserve`: how
//!   some still fit on a full disk. `checkpoint`: how SQLite's log becomes the file.
//! - `ring` and [`tail`]: how events reach those who watch.
//! - [`read`] and [`lists`]: how everything is read back.
//! - [`blobs`]: texts too large for an event. [`gc`]: what could go.
//! - `schema`, `lock`, [`rebuild`](mod@rebuild), [`stats`], [`error`], [`faults`]: the tables, one daemon per home,
//!   rows anew, numbers, refusals, and the seam for tests.

pub mod blobs;
mod checkpoint;
pub mod error;
pub mod event;
pub mod faults;
pub mod gc;
mod index;
mod journal;
pub mod lists;
mod lock;
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

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use blobs::{BlobFile, BlobStore};
pub use error::{AppendError, BlobError, JournalOpenError, JournalReadError};
pub use event::{EventScope, NewEvent, PublishedEvent, SessionKey, StoredEvent, WorkspaceKey};
pub use journal::{AppendRequest, Journal, JournalOptions};
pub use lists::{
    AskFilter, FleetFilter, JournalCounts, MailFilter, RunFilter, SessionFilter, StoredResponse,
};
pub use queue::{AppendReceipt, IdempotencyRecord};
pub use read::{JournalPage, SessionEventPage, SessionHistory};
pub use rebuild::{RebuildError, rebuild};
pub use ring::{EventFilter, EventTopic};
pub use rows::{AskRow, FleetRow, MailRow, RowChange, RunRow, SessionRow, WorkspaceRow};
pub use stats::JournalStats;
pub use subscription::Subscription;

/// Locks, also after a panic elsewhere: nothing under our locks can be left half-changed.
fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
