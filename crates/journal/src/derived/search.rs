//! Finds texts, newest first. The order is that of the entries' ids, in which the full-text index returns them by
//! itself, so a page costs the same however many texts match.

use qd_protocol::search::{SearchHit, SearchHitKind, SnippetPart};
use qd_protocol::{Millis, RunId, Seq, SessionId, WorkspaceId};
use rusqlite::{Connection, Row, params};

use super::{DerivedDataError, DerivedStore, SearchWords};
use crate::rows::{from_sql_int, to_sql_int};

/// The ids of one event's texts are this far from those of the next event.
pub(super) const ENTRIES_PER_EVENT: i64 = 8;
/// Words in a snippet.
const SNIPPET_WORDS: i64 = 24;
/// The characters before and after a match in a snippet. No text has them: they are replaced before.
const MARKS: [char; 2] = ['\u{2}', '\u{3}'];

/// Whether a character is one of those that mark matches.
pub(super) fn is_mark(c: char) -> bool {
    MARKS.contains(&c)
}

/// Selects the texts of a search. All conditions must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SearchFilter {
    /// Only sessions of this agent.
    pub agent: Option<String>,
    /// Only texts from this time or later.
    pub since: Option<Millis>,
}

/// A place between two texts, for pages: everything before it is older. It stays valid when texts are added, and when
/// the index is built anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SearchPosition(i64);

impl SearchPosition {
    /// Parses what [`Display`](std::fmt::Display) writes.
    pub fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|position| *position >= 0).map(Self)
    }
}

impl std::fmt::Display for SearchPosition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl DerivedStore {
    /// Finds at most `limit` texts before a position, the newest first. Returns them with their positions, and the seq
    /// up to which events were searched.
    pub fn search(
        &self,
        words: &SearchWords,
        filter: &SearchFilter,
        before: Option<SearchPosition>,
        limit: usize,
    ) -> Result<(Vec<(SearchPosition, SearchHit)>, Seq), DerivedDataError> {
        self.read(|db, seq| Ok((find(db, words, filter, before, limit)?, seq)))
    }
}

fn find(
    db: &Connection,
    words: &SearchWords,
    filter: &SearchFilter,
    before: Option<SearchPosition>,
    limit: usize,
) -> Result<Vec<(SearchPosition, SearchHit)>, DerivedDataError> {
    let [open, close] = MARKS;
    // CROSS JOIN keeps SQLite from beginning with another table, which would need a sort.
    let mut statement = db.prepare_cached(
        "SELECT e.id, s.id, w.id, s.agent, s.title, e.kind, e.ts, e.run,
                snippet(entry_words, 0, ?6, ?7, '…', ?8)
         FROM entry_words CROSS JOIN entries e ON e.id = entry_words.rowid
         CROSS JOIN sessions s ON s.key = e.session
         LEFT JOIN workspaces w ON w.key = s.workspace
         WHERE entry_words MATCH ?1 AND entry_words.rowid < ?2 AND (?3 IS NULL OR s.agent = ?3)
             AND (?4 IS NULL OR e.ts >= ?4)
         ORDER BY entry_words.rowid DESC LIMIT ?5",
    )?;
    let mut rows = statement.query(params![
        words.query(),
        before.map_or(i64::MAX, |position| position.0),
        filter.agent,
        filter.since.map(|since| to_sql_int(since.0)),
        i64::try_from(limit).unwrap_or(i64::MAX),
        open.to_string(),
        close.to_string(),
        SNIPPET_WORDS
    ])?;
    let mut hits = Vec::new();
    while let Some(row) = rows.next()? {
        hits.push(search_hit(row)?);
    }
    Ok(hits)
}

fn search_hit(row: &Row<'_>) -> Result<(SearchPosition, SearchHit), DerivedDataError> {
    let id: i64 = row.get(0)?;
    let (session, workspace): (String, Option<String>) = (row.get(1)?, row.get(2)?);
    let (kind, run): (String, Option<String>) = (row.get(5)?, row.get(7)?);
    let snippet: String = row.get(8)?;
    let session_id = SessionId::parse(&session).map_err(DerivedDataError::unreadable)?;
    let run_id = run.map(|id| RunId::parse(&id)).transpose().map_err(DerivedDataError::unreadable)?;
    let kind = SearchHitKind::ALL.into_iter().find(|known| known.as_str() == kind);
    let open = match &run_id {
        Some(run) => format!("qd logs {run}"),
        None => format!("qd logs {session_id}"),
    };
    let hit = SearchHit {
        session_id,
        workspace_id: workspace
            .map(|id| WorkspaceId::parse(&id))
            .transpose()
            .map_err(DerivedDataError::unreadable)?,
        agent: row.get(3)?,
        title: row.get(4)?,
        kind: kind.ok_or_else(|| DerivedDataError::unreadable("an unknown kind of text"))?,
        at: Millis(from_sql_int(row.get(6)?)),
        seq: Seq(from_sql_int(id / ENTRIES_PER_EVENT)),
        run_id,
        snippet: snippet_parts(&snippet),
        open,
    };
    Ok((SearchPosition(id), hit))
}

/// Cuts a snippet at its marks.
fn snippet_parts(snippet: &str) -> Vec<SnippetPart> {
    let [open, _] = MARKS;
    let mut parts = Vec::new();
    let mut is_match = false;
    let mut rest = snippet;
    loop {
        let end = rest.find(is_mark).unwrap_or(rest.len());
        let (text, after) = rest.split_at(end);
        if !text.is_empty() {
            parts.push(SnippetPart { text: text.to_owned(), is_match });
        }
        let mut marks = after.chars();
        match marks.next() {
            Some(mark) => is_match = mark == open,
            None => return parts,
        }
        rest = marks.as_str();
    }
}
