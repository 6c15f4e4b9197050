//! Which events a session has: checked when one is appended, written down in one go after every few thousand. Belongs
//! to the writer alone; readers see only the table, and look themselves at what is not in it yet.

use std::collections::HashMap;

use qd_protocol::{EventNumber, Seq};
use rusqlite::{Connection, OptionalExtension};

use crate::error::AppendError;
use crate::event::SessionKey;
use crate::rows::{from_sql_int, to_sql_int};
use crate::schema::INDEXED_THROUGH_SQL;

/// So many events may be missing from the table before it is caught up. What readers have to look at one by one,
/// against how many pages an event costs the writer.
const CATCH_UP_EVENTS: u64 = 2048;
/// Sessions whose last number is remembered beyond that.
const KNOWN_MAX: usize = 16 << 10;

/// The last number of every session that has events which are not in the table yet, and of some others.
#[derive(Debug)]
pub(crate) struct SessionIndex {
    last_numbers: HashMap<SessionKey, Option<EventNumber>>,
    /// What to put back if the transaction, or one append in it, is undone.
    undo_log: Vec<(SessionKey, Option<EventNumber>)>,
    /// The last event in the table.
    indexed_through: Seq,
    /// Where the table is to be caught up.
    catch_up_at: Seq,
}

impl SessionIndex {
    /// Finds out what is not in the table.
    pub(crate) fn read(db: &Connection) -> rusqlite::Result<Self> {
        let through =
            Seq(from_sql_int(db.query_row(&format!("SELECT {INDEXED_THROUGH_SQL}"), [], |row| row.get(0))?));
        let mut last = HashMap::new();
        let mut newest = db.prepare(
            "SELECT session, max(number) FROM events WHERE gid > ?1 AND session IS NOT NULL GROUP BY session",
        )?;
        let mut rows = newest.query([to_sql_int(through.0)])?;
        while let Some(row) = rows.next()? {
            last.insert(SessionKey(row.get(0)?), Some(EventNumber(from_sql_int(row.get(1)?))));
        }
        Ok(Self {
            last_numbers: last,
            undo_log: Vec::new(),
            indexed_through: through,
            catch_up_at: Seq(through.0 + CATCH_UP_EVENTS),
        })
    }

    /// Takes the next number of a session. One that is not higher than the last is a violation: nobody may write a
    /// session's history twice.
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
                "event {number} of a session that is at {last} already"
            )));
        }
        self.undo_log.push((session, last));
        self.last_numbers.insert(session, Some(number));
        Ok(())
    }

    /// A mark to come back to.
    pub(crate) fn savepoint(&self) -> usize {
        self.undo_log.len()
    }

    /// Undoes what was taken since a mark.
    pub(crate) fn roll_back_to(&mut self, mark: usize) {
        for (session, last) in self.undo_log.drain(mark..).rev() {
            self.last_numbers.insert(session, last);
        }
    }

    /// What was taken is committed.
    pub(crate) fn commit(&mut self) {
        self.undo_log.clear();
    }

    /// The session and all its events are gone.
    pub(crate) fn forget_session(&mut self, session: SessionKey) {
        self.last_numbers.remove(&session);
    }

    /// Whether the table should be caught up now.
    pub(crate) fn is_due(&self, head: Seq) -> bool {
        head >= self.catch_up_at
    }

    /// Whether the table lacks anything.
    pub(crate) fn is_behind(&self, head: Seq) -> bool {
        head > self.indexed_through
    }

    /// Writes down what is missing, in a transaction of its own and in the order of the table, so that a session's
    /// events share their pages. If it fails, nothing is lost: it is tried again some events later.
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

/// Writes down the events between two seqs.
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
