//! Recreates the rows from the events, in case they are damaged or in doubt. It runs offline under the home's lock, in
//! one transaction: either all rows are replaced or none.

use std::path::Path;

use qd_protocol::Seq;

use crate::error::{AppendError, JournalOpenError, JournalReadError};
use crate::event::StoredEvent;
use crate::lock::HomeLock;
use crate::rows::RowChange;
use crate::{index, read, schema};

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
    let db = schema::open_writer(home)?;
    let failed = |seq| move |error: rusqlite::Error| RebuildError::Write { seq, error: error.into() };
    // Rolls back if it is dropped without a commit.
    let transaction = db.unchecked_transaction().map_err(failed(Seq(0)))?;
    transaction.execute_batch(schema::EMPTY_ROWS).map_err(failed(Seq(0)))?;
    transaction.execute_batch(schema::EMPTY_INDEX).map_err(failed(Seq(0)))?;
    let mut events = 0;
    let mut last = Seq(0);
    read::for_each_event(&db, |event| -> Result<(), RebuildError> {
        events += 1;
        last = event.seq;
        for change in fold(&event) {
            change
                .apply(&db, event.seq, 1, event.seq)
                .map_err(|error| RebuildError::Write { seq: event.seq, error })?;
        }
        Ok(())
    })?;
    index::index_events(&db, Seq(0), last).map_err(failed(last))?;
    transaction.commit().map_err(failed(last))?;
    Ok(events)
}
