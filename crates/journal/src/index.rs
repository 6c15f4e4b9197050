//! Which events a session has: checked when one is appended, written down in one go after every few thousand. Belongs
//! to the writer alone; readers see only the table, and look themselves at what is not in it yet.

use std::collections::HashMap;

use qd_protocol::{Number, Seq};
use rusqlite::{Connection, OptionalExtension};

use crate::error::AppendError;
use crate::event::SessionKey;
use crate::rows::{count, int};
use crate::schema::INDEXED;

/// So many events may be missing from the table before it is caught up. What readers have to look at one by one,
/// against how many pages an event costs the writer.
const CATCH_UP: u64 = 2048;
/// Sessions whose last number is remembered beyond that.
const KNOWN_MAX: usize = 16 << 10;

/// The last number of every session that has events which are not in the table yet, and of some others.
#[derive(Debug)]
pub(crate) struct Index {
    last: HashMap<SessionKey, Option<Number>>,
    /// What to put back if the transaction, or one append in it, is undone.
    undo: Vec<(SessionKey, Option<Number>)>,
    /// The last event in the table.
    through: Seq,
    /// Where the table is to be caught up.
    due: Seq,
}

impl Index {
    /// Finds out what is not in the table.
    pub(crate) fn read(db: &Connection) -> rusqlite::Result<Self> {
        let through = Seq(count(db.query_row(&format!("SELECT {INDEXED}"), [], |row| row.get(0))?));
        let mut last = HashMap::new();
        let mut newest = db.prepare(
            "SELECT session, max(number) FROM events WHERE gid > ?1 AND session IS NOT NULL GROUP BY session",
        )?;
        let mut rows = newest.query([int(through.0)])?;
        while let Some(row) = rows.next()? {
            last.insert(SessionKey(row.get(0)?), Some(Number(count(row.get(1)?))));
        }
        Ok(Self { last, undo: Vec::new(), through, due: Seq(through.0 + CATCH_UP) })
    }

    /// Takes the next number of a session. One that is not higher than the last is a violation: nobody may write a
    /// session's history twice.
    pub(crate) fn take(
        &mut self,
        db: &Connection,
        session: SessionKey,
        number: Number,
    ) -> Result<(), AppendError> {
        let last = match self.last.get(&session) {
            Some(last) => *last,
            None => {
                let last: Option<i64> = db
                    .prepare_cached(
                        "SELECT number FROM session_events WHERE session = ?1 ORDER BY number DESC LIMIT 1",
                    )?
                    .query_row([session.0], |row| row.get(0))
                    .optional()?;
                last.map(|number| Number(count(number)))
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
        self.undo.push((session, last));
        self.last.insert(session, Some(number));
        Ok(())
    }

    /// A mark to come back to.
    pub(crate) fn mark(&self) -> usize {
        self.undo.len()
    }

    /// Undoes what was taken since a mark.
    pub(crate) fn undo(&mut self, mark: usize) {
        for (session, last) in self.undo.drain(mark..).rev() {
            self.last.insert(session, last);
        }
    }

    /// What was taken is committed.
    pub(crate) fn keep(&mut self) {
        self.undo.clear();
    }

    /// The session and all its events are gone.
    pub(crate) fn forget(&mut self, session: SessionKey) {
        self.last.remove(&session);
    }

    /// Whether the table should be caught up now.
    pub(crate) fn is_due(&self, head: Seq) -> bool {
        head >= self.due
    }

    /// Whether the table lacks anything.
    pub(crate) fn is_behind(&self, head: Seq) -> bool {
        head > self.through
    }

    /// Writes down what is missing, in a transaction of its own and in the order of the table, so that a session's
    /// events share their pages. If it fails, nothing is lost: it is tried again some events later.
    pub(crate) fn catch_up(&mut self, db: &Connection, head: Seq) -> rusqlite::Result<()> {
        self.due = Seq(head.0 + CATCH_UP / 4);
        let transaction = db.unchecked_transaction()?;
        fill(&transaction, self.through, head)?;
        transaction.commit()?;
        self.through = head;
        self.due = Seq(head.0 + CATCH_UP);
        if self.last.len() > KNOWN_MAX {
            self.last.clear();
        }
        Ok(())
    }
}

/// Writes down the events between two seqs.
pub(crate) fn fill(db: &Connection, after: Seq, through: Seq) -> rusqlite::Result<()> {
    db.prepare_cached(
        "INSERT INTO session_events(session, number, gid) SELECT session, number, gid FROM events
         WHERE gid > ?1 AND gid <= ?2 AND session IS NOT NULL ORDER BY session, number",
    )?
    .execute([int(after.0), int(through.0)])?;
    db.prepare_cached("INSERT OR REPLACE INTO counters(name, value) VALUES ('indexed', ?1)")?
        .execute([int(through.0)])?;
    Ok(())
}
