//! Reads reported usage back, in the order of the reports. The caller groups and adds it up.

use std::collections::HashSet;

use qd_protocol::{Millis, Seq, TokenUsage};
use rusqlite::{Connection, Row};

use super::{DerivedDataError, DerivedStore};
use crate::rows::{from_sql_int, to_sql_int};

/// One report of usage, with what it can be grouped by.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageEntry {
    pub at: Millis,
    pub usage: TokenUsage,
    pub session_id: String,
    pub title: Option<String>,
    pub agent: String,
    /// The model that the session was set to at that time.
    pub model: Option<String>,
    pub workspace_id: Option<String>,
    pub workspace_path: Option<String>,
    /// Tells the runs of all sessions apart. Reports without a run count as one run of their session.
    pub run: (i64, Option<String>),
    /// Whether the run used tokens, but none of its reports has a cost.
    pub lacks_cost: bool,
}

/// Reported usage, and the seq up to which it is complete.
pub type UsageEntries = (Vec<UsageEntry>, Seq);

impl DerivedStore {
    /// All usage that was reported at a time or later, in the order of the reports.
    pub fn usage(&self, since: Option<Millis>) -> Result<UsageEntries, DerivedDataError> {
        self.read(|db, seq| Ok((list_usage(db, since)?, seq)))
    }
}

fn list_usage(db: &Connection, since: Option<Millis>) -> Result<Vec<UsageEntry>, DerivedDataError> {
    let lacking = runs_without_cost(db)?;
    let mut statement = db.prepare_cached(
        "SELECT u.ts, u.session, u.run, u.model, u.input_tokens, u.output_tokens, u.cost_usd,
                s.id, s.title, s.agent, w.id, w.path
         FROM usage u JOIN sessions s ON s.key = u.session LEFT JOIN workspaces w ON w.key = s.workspace
         WHERE u.ts >= ?1 ORDER BY u.seq",
    )?;
    let mut rows = statement.query([since.map_or(0, |since| to_sql_int(since.0))])?;
    let mut entries = Vec::new();
    while let Some(row) = rows.next()? {
        entries.push(usage_entry(row, &lacking)?);
    }
    Ok(entries)
}

/// The runs that used tokens without a cost. A run counts as a whole: many agents report tokens as they go and the cost
/// at the end.
fn runs_without_cost(db: &Connection) -> Result<HashSet<(i64, Option<String>)>, DerivedDataError> {
    let mut statement = db.prepare_cached(
        "SELECT session, run FROM usage GROUP BY session, run
         HAVING max(cost_usd) <= 0 AND (max(input_tokens) > 0 OR max(output_tokens) > 0)",
    )?;
    let runs = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(runs.collect::<Result<_, _>>()?)
}

fn usage_entry(
    row: &Row<'_>,
    lacking: &HashSet<(i64, Option<String>)>,
) -> Result<UsageEntry, DerivedDataError> {
    let run = (row.get(1)?, row.get(2)?);
    Ok(UsageEntry {
        at: Millis(from_sql_int(row.get(0)?)),
        usage: TokenUsage {
            input_tokens: from_sql_int(row.get(4)?),
            output_tokens: from_sql_int(row.get(5)?),
            cost_usd: row.get(6)?,
        },
        session_id: row.get(7)?,
        title: row.get(8)?,
        agent: row.get(9)?,
        model: row.get(3)?,
        workspace_id: row.get(10)?,
        workspace_path: row.get(11)?,
        lacks_cost: lacking.contains(&run),
        run,
    })
}
