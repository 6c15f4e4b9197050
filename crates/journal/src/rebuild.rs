//! Recreates the rows from the events, in case they are damaged or in doubt. It runs offline under the home's lock, and
//! either all rows are replaced or none: in one transaction, or in a new file if the damage keeps the old rows from being
//! deleted.

use std::path::Path;

use qd_protocol::Seq;
use rusqlite::{Connection, ErrorCode};

use crate::checkpoint::checkpoint;
use crate::database_file::{inspect_journal, replace_journal};
use crate::error::{AppendError, JournalOpenError, JournalReadError};
use crate::event::StoredEvent;
use crate::lock::HomeLock;
use crate::rows::RowChange;
use crate::schema::{self, DATABASE_FILE};
use crate::{derived, index, read};

/// Why a rebuild failed. The rows are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    #[error(transparent)]
    Open(#[from] JournalOpenError),
    #[error(transparent)]
    Read(#[from] JournalReadError),
    #[error("could not write the rows of event {seq}: {error}")]
    Write {
        /// The event whose rows could not be written.
        seq: Seq,
        error: AppendError,
    },
}

/// Empties the rows and refills them with the changes that `fold` makes of each event, in order. Returns the number of
/// events. Each event is an append of its own here, so a run's `accepted_event` must be 0.
pub fn rebuild(
    home: &Path,
    mut fold: impl FnMut(&StoredEvent) -> Vec<RowChange>,
) -> Result<u64, RebuildError> {
    let _lock = HomeLock::acquire(home)?;
    inspect_journal(home)?;
    // It may have been derived from events that are damaged. The next daemon derives it again.
    if let Err(error) = derived::remove_files(home) {
        tracing::warn!(%error, "the derived data could not be deleted; delete derived.db by hand");
    }
    let db = schema::open_writer(home)?;
    // Rolls back if it is dropped without a commit.
    let transaction = db.unchecked_transaction().map_err(failed(Seq(0)))?;
    let emptied = transaction
        .execute_batch(schema::EMPTY_ROWS)
        .and_then(|()| transaction.execute_batch(schema::EMPTY_INDEX));
    match emptied {
        Ok(()) => {
            let events = refill(&transaction, &mut fold)?;
            transaction.commit().map_err(failed(Seq(0)))?;
            return Ok(events);
        }
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) => {
            tracing::warn!(%error, "the rows cannot be deleted; the journal is rebuilt in a new file");
        }
        Err(error) => return Err(failed(Seq(0))(error)),
    }
    drop(transaction);
    // The old log would be taken for one of the new file.
    checkpoint(&db, "TRUNCATE").map_err(failed(Seq(0)))?;
    db.close().map_err(|(_, error)| failed(Seq(0))(error))?;
    let mut events = 0;
    replace_journal(home, |db| {
        let old = home.join(DATABASE_FILE);
        db.execute("ATTACH ?1 AS old", [old.to_string_lossy()]).map_err(failed(Seq(0)))?;
        let transaction = db.unchecked_transaction().map_err(failed(Seq(0)))?;
        transaction.execute_batch(schema::COPY_TRUTH).map_err(failed(Seq(0)))?;
        events = refill(&transaction, &mut fold)?;
        transaction.commit().map_err(failed(Seq(0)))?;
        db.execute_batch("DETACH old").map_err(failed(Seq(0)))
    })?;
    Ok(events)
}

fn failed(seq: Seq) -> impl FnOnce(rusqlite::Error) -> RebuildError {
    move |error| RebuildError::Write { seq, error: error.into() }
}

/// Writes the rows of all events and their index. Returns the number of events.
fn refill(
    db: &Connection,
    fold: &mut impl FnMut(&StoredEvent) -> Vec<RowChange>,
) -> Result<u64, RebuildError> {
    let (mut events, mut last) = (0, Seq(0));
    read::for_each_event(db, |event| -> Result<(), RebuildError> {
        events += 1;
        last = event.seq;
        for change in fold(&event) {
            change
                .apply(db, event.seq, 1, event.seq)
                .map_err(|error| RebuildError::Write { seq: event.seq, error })?;
        }
        Ok(())
    })?;
    index::index_events(db, Seq(0), last).map_err(failed(last))?;
    Ok(events)
}
