//! Makes the rows anew out of the events, for when they are doubted. Offline, under the home's lock, and in one
//! transaction: either all rows are new or none is.

use std::path::Path;

use qd_protocol::Seq;

use crate::error::{AppendError, JournalOpenError, JournalReadError};
use crate::event::StoredEvent;
use crate::lock::HomeLock;
use crate::rows::RowChange;
use crate::{index, read, schema};

/// Why the rows were not rebuilt. They are as they were.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// The journal could not be opened.
    #[error(transparent)]
    Open(#[from] JournalOpenError),
    /// The events could not be read.
    #[error(transparent)]
    Read(#[from] JournalReadError),
    /// The rows could not be written.
    #[error("could not write the rows of event {seq}: {error}")]
    Write {
        /// At which event.
        seq: Seq,
        /// Why.
        error: AppendError,
    },
}

/// Empties the rows and refills them with what `fold` makes of each event, in order; gives the number of events.
/// A run's `accepted` is then the index 0: each event stands alone.
pub fn rebuild(
    home: &Path,
    mut fold: impl FnMut(&StoredEvent) -> Vec<RowChange>,
) -> Result<u64, RebuildError> {
    let _lock = HomeLock::acquire(home)?;
    let db = schema::open_writer(home)?;
    let failed = |seq| move |error: rusqlite::Error| RebuildError::Write { seq, error: error.into() };
    // Dropped without a commit it rolls back.
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
