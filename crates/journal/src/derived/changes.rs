//! Writes derived data: applies changes in the order of their events, and removes purged sessions. The caller has begun
//! the transaction.

use std::collections::HashSet;

use qd_protocol::limits::SEARCH_TEXT_MAX;
use qd_protocol::search::SearchHitKind;
use qd_protocol::{MessageId, Millis, RunId, Seq, SessionId, TokenUsage, WorkspaceId};
use rusqlite::{Connection, params};

use super::DerivedDataError;
use super::search::{ENTRIES_PER_EVENT, is_mark};
use crate::event::{SessionKey, WorkspaceKey};
use crate::rows::to_sql_int;

/// What one event changes in the derived data.
#[derive(Debug, Clone, PartialEq)]
pub enum DerivedChange {
    /// A workspace was created.
    Workspace { key: WorkspaceKey, id: WorkspaceId, path: String },
    /// A session was created.
    Session {
        key: SessionKey,
        id: SessionId,
        workspace: Option<WorkspaceKey>,
        agent: String,
        title: Option<String>,
        model: Option<String>,
    },
    /// The title of a session or its model changed. `None` stays as it is.
    SessionSettings { key: SessionKey, title: Option<String>, model: Option<String> },
    /// A text that can be found.
    Text { place: DerivedText, text: String },
    /// A piece of a message that is not finished.
    MessagePiece { seq: Seq, session: SessionKey, message: MessageId, text: String },
    /// A message is finished: all its pieces are one text, which can be found now.
    MessageFinished { place: DerivedText, message: MessageId },
    /// Somebody did something.
    Audit {
        seq: Seq,
        session: Option<SessionKey>,
        workspace: Option<WorkspaceKey>,
        at: Millis,
        /// The caller's document about it, as JSON.
        entry: String,
    },
    /// Usage was reported.
    Usage { seq: Seq, session: SessionKey, at: Millis, run: Option<RunId>, usage: TokenUsage },
}

/// Where a text belongs. An event may give one text of each kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DerivedText {
    pub seq: Seq,
    pub session: SessionKey,
    pub kind: SearchHitKind,
    pub at: Millis,
    pub run: Option<RunId>,
}

pub(super) fn apply(
    db: &Connection,
    changes: &[DerivedChange],
    through: Seq,
) -> Result<(), DerivedDataError> {
    for change in changes {
        apply_one(db, change)?;
    }
    db.prepare_cached("UPDATE progress SET seq = max(seq, ?1)")?.execute([to_sql_int(through.0)])?;
    Ok(())
}

fn apply_one(db: &Connection, change: &DerivedChange) -> Result<(), DerivedDataError> {
    match change {
        DerivedChange::Workspace { key, id, path } => {
            db.prepare_cached("INSERT OR REPLACE INTO workspaces(key, id, path) VALUES (?1, ?2, ?3)")?
                .execute(params![key.0, id.as_str(), path])?;
        }
        DerivedChange::Session { key, id, workspace, agent, title, model } => {
            db.prepare_cached(
                "INSERT OR REPLACE INTO sessions(key, id, workspace, agent, title, model)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )?
            .execute(params![
                key.0,
                id.as_str(),
                workspace.map(|key| key.0),
                agent,
                title,
                model
            ])?;
        }
        DerivedChange::SessionSettings { key, title, model } => {
            db.prepare_cached(
                "UPDATE sessions SET title = coalesce(?2, title), model = coalesce(?3, model) WHERE key = ?1",
            )?
            .execute(params![key.0, title, model])?;
        }
        DerivedChange::Text { place, text } => insert_text(db, place, text)?,
        DerivedChange::MessagePiece { seq, session, message, text } => {
            db.prepare_cached("INSERT INTO open_texts(message, seq, session, text) VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![message.as_str(), to_sql_int(seq.0), session.0, text])?;
        }
        DerivedChange::MessageFinished { place, message } => finish_message(db, place, message)?,
        DerivedChange::Audit { seq, session, workspace, at, entry } => {
            db.prepare_cached(
                "INSERT INTO audit(seq, session, workspace, ts, entry) VALUES (?1, ?2, ?3, ?4, ?5)",
            )?
            .execute(params![
                to_sql_int(seq.0),
                session.map(|key| key.0),
                workspace.map(|key| key.0),
                to_sql_int(at.0),
                entry
            ])?;
        }
        DerivedChange::Usage { seq, session, at, run, usage } => {
            db.prepare_cached(
                "INSERT INTO usage(seq, session, ts, run, model, input_tokens, output_tokens, cost_usd)
                 SELECT ?1, ?2, ?3, ?4, model, ?5, ?6, ?7 FROM sessions WHERE key = ?2",
            )?
            .execute(params![
                to_sql_int(seq.0),
                session.0,
                to_sql_int(at.0),
                run.as_ref().map(RunId::as_str),
                to_sql_int(usage.input_tokens),
                to_sql_int(usage.output_tokens),
                usage.cost_usd
            ])?;
        }
    }
    Ok(())
}

/// Joins the pieces of a message to one text.
fn finish_message(db: &Connection, place: &DerivedText, message: &MessageId) -> Result<(), DerivedDataError> {
    let mut whole = String::new();
    {
        let mut pieces = db.prepare_cached("SELECT text FROM open_texts WHERE message = ?1 ORDER BY seq")?;
        let mut rows = pieces.query([message.as_str()])?;
        while let Some(row) = rows.next()?
            && whole.len() < SEARCH_TEXT_MAX
        {
            whole.push_str(row.get_ref(0)?.as_str().map_err(DerivedDataError::unreadable)?);
        }
    }
    db.prepare_cached("DELETE FROM open_texts WHERE message = ?1")?.execute([message.as_str()])?;
    insert_text(db, place, &whole)
}

fn insert_text(db: &Connection, place: &DerivedText, text: &str) -> Result<(), DerivedDataError> {
    let text = searchable(text);
    if text.trim().is_empty() {
        return Ok(());
    }
    let id = entry_id(place);
    db.prepare_cached(
        "INSERT INTO entries(id, session, ts, kind, run, text) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute(params![
        id,
        place.session.0,
        to_sql_int(place.at.0),
        place.kind.as_str(),
        place.run.as_ref().map(RunId::as_str),
        text
    ])?;
    db.prepare_cached("INSERT INTO entry_words(rowid, text) VALUES (?1, ?2)")?.execute(params![id, text])?;
    Ok(())
}

/// The id of a text. Later events have higher ids, and an event has room for one text of each kind.
fn entry_id(place: &DerivedText) -> i64 {
    let nth = SearchHitKind::ALL.iter().position(|kind| *kind == place.kind).unwrap_or_default();
    let nth = i64::try_from(nth).unwrap_or_default();
    to_sql_int(place.seq.0).saturating_mul(ENTRIES_PER_EVENT).saturating_add(nth)
}

/// At most [`SEARCH_TEXT_MAX`] bytes of a text, without the characters that mark matches in snippets.
fn searchable(text: &str) -> String {
    let mut end = text.len().min(SEARCH_TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].replace(is_mark, " ")
}

/// Removes every session that is not in `existing`. Returns how many there were.
pub(super) fn remove_other_sessions(
    db: &Connection,
    existing: &[SessionKey],
) -> Result<usize, DerivedDataError> {
    let existing: HashSet<i64> = existing.iter().map(|key| key.0).collect();
    let mut known = HashSet::new();
    for sql in ["SELECT key FROM sessions", "SELECT DISTINCT session FROM entries"] {
        let mut statement = db.prepare_cached(sql)?;
        for key in statement.query_map([], |row| row.get::<_, i64>(0))? {
            known.insert(key?);
        }
    }
    let gone: Vec<i64> = known.difference(&existing).copied().collect();
    for session in &gone {
        for sql in [
            // The full-text index must be told the texts that it forgets.
            "INSERT INTO entry_words(entry_words, rowid, text)
             SELECT 'delete', id, text FROM entries WHERE session = ?1",
            "DELETE FROM entries WHERE session = ?1",
            "DELETE FROM open_texts WHERE session = ?1",
            "DELETE FROM usage WHERE session = ?1",
            "DELETE FROM audit WHERE session = ?1",
            "DELETE FROM sessions WHERE key = ?1",
        ] {
            db.prepare_cached(sql)?.execute([session])?;
        }
    }
    Ok(gone.len())
}
