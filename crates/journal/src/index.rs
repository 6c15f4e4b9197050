//! The index from sessions to their events. Each append's numbers are checked here at once, but the `session_events`
//! table is updated only every few thousand events. This state belongs to the writer; readers see only the table, and
//! scan the events that are not in it yet.

use std::collections::HashMap;

use qd_protocol::{EventNumber, Seq};
use rusqlite::{Connection, OptionalExtension};

use crate::error::AppendError;
use crate::event::SessionKey;
use crate::rows::{from_sql_int, to_sql_int};
use crate::schema::INDEXED_THROUGH_SQL;

/// How many events may be missing from the table before it is updated. More means more events that readers must scan;
/// fewer means more pages that the writer touches per event.
const CATCH_UP_EVENTS: u64 = 2048;
/// How many sessions' last numbers are cached. A larger cache is cleared when the table is updated.
const KNOWN_MAX: usize = 16 << 10;

/// The last number of every session with events that are not in the table yet, and of some others as a cache.
#[derive(Debug)]
pub(crate) struct SessionIndex {
    last_numbers: HashMap<SessionKey, Option<EventNumber>>,
    /// The previous numbers, to restore if the transaction or one append in it is rolled back.
    undo_log: Vec<(SessionKey, Option<EventNumber>)>,
    /// The last event in the table.
    indexed_through: Seq,
    /// The table is updated once the journal reaches this seq.
    catch_up_at: Seq,
}

impl SessionIndex {
    /// Loads the last numbers of the sessions with events that are not in the table.
    pub(crate) fn read(db: &Connection) -> rusqlite::Result<Self> {
        let indexed_through =
            Seq(from_sql_int(db.query_row(&format!("SELECT {INDEXED_THROUGH_SQL}"), [], |row| row.get(0))?));
        let mut last_numbers = HashMap::new();
        let mut newest = db.prepare(
            "SELECT session, max(number) FROM events WHERE gid > ?1 AND session IS NOT NULL GROUP BY session",
        )?;
        let mut rows = newest.query([to_sql_int(indexed_through.0)])?;
        while let Some(row) = rows.next()? {
            last_numbers.insert(SessionKey(row.get(0)?), Some(EventNumber(from_sql_int(row.get(1)?))));
        }
        Ok(Self {
            last_numbers,
            undo_log: Vec::new(),
            indexed_through,
            catch_up_at: Seq(indexed_through.0 + CATCH_UP_EVENTS),
        })
    }

    /// Claims the next number of a session. A number that is not higher than the last is a violation, because a
    /// session's history must not be written twice.
    pub(crate) fn claim_number(
        &mut self,
        db: &Connection,
        session: SessionKey,
        number: EventNumber,
    ) -> Result<(), AppendError> {
        let last = match self.last_numbers.get(&session) {
            Some(last) => *last,
            None => {
                let last: Option<i64> = db
                    .prepare_cached(
                        "SELECT number FROM session_events WHERE session = ?1 ORDER BY number DESC LIMIT 1",
                    )?
                    .query_row([session.0], |row| row.get(0))
                    .optional()?;
                last.map(|number| EventNumber(from_sql_int(number)))
            }
        };
        if let Some(last) = last
            && number <= last
        {
            let (number, last) = (number.0, last.0);
            return Err(AppendError::Violation(format!(
                "event {number} of a session whose last event is {last}"
            )));
        }
        self.undo_log.push((session, last));
        self.last_numbers.insert(session, Some(number));
        Ok(())
    }

    /// A point to roll back to.
    pub(crate) fn savepoint(&self) -> usize {
        self.undo_log.len()
    }

    /// Undoes the claims made since a savepoint.
    pub(crate) fn roll_back_to(&mut self, savepoint: usize) {
        for (session, last) in self.undo_log.drain(savepoint..).rev() {
            self.last_numbers.insert(session, last);
        }
    }

    /// The claims are committed and cannot be undone any more.
    pub(crate) fn commit(&mut self) {
        self.undo_log.clear();
    }

    /// Forgets a session that was purged.
    pub(crate) fn forget_session(&mut self, session: SessionKey) {
        self.last_numbers.remove(&session);
    }

    /// Whether the table should be updated now.
    pub(crate) fn is_due(&self, head: Seq) -> bool {
        head >= self.catch_up_at
    }

    /// Whether any events are missing from the table.
    pub(crate) fn is_behind(&self, head: Seq) -> bool {
        head > self.indexed_through
    }

    /// Adds the missing events to the table, in a transaction of its own and in the order of the table, so that the
    /// events of a session share pages. If it fails, nothing is lost and it is tried again some events later.
    pub(crate) fn catch_up(&mut self, db: &Connection, head: Seq) -> rusqlite::Result<()> {
        self.catch_up_at = Seq(head.0 + CATCH_UP_EVENTS / 4);
        let transaction = db.unchecked_transaction()?;
        index_events(&transaction, self.indexed_through, head)?;
        transaction.commit()?;
        self.indexed_through = head;
        self.catch_up_at = Seq(head.0 + CATCH_UP_EVENTS);
        if self.last_numbers.len() > KNOWN_MAX {
            self.last_numbers.clear();
        }
        Ok(())
    }
}

/// Adds the events after `after` up to `through` to the table.
pub(crate) fn index_events(db: &Connection, after: Seq, through: Seq) -> rusqlite::Result<()> {
    db.prepare_cached(
        "INSERT INTO session_events(session, number, gid) SELECT session, number, gid FROM events
         WHERE gid > ?1 AND gid <= ?2 AND session IS NOT NULL ORDER BY session, number",
    )?
    .execute([to_sql_int(after.0), to_sql_int(through.0)])?;
    db.prepare_cached("INSERT OR REPLACE INTO counters(name, value) VALUES ('indexed', ?1)")?
        .execute([to_sql_int(through.0)])?;
    Ok(())
}
