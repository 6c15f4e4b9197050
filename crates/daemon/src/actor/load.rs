//! A session read from the journal: its last snapshot, and what came after it.

use std::path::Path;
use std::sync::Arc;

use qd_core::session::{Accept, Recorded, State, evolve};
use qd_journal::{SessionKey, StoredEvent};
use qd_protocol::event::{Body, ChildResult, Part};
use qd_protocol::text::Blob;
use qd_protocol::{ApiError, Code, Number, RunId, Text};
use serde_json::{Value, json};

use crate::daemon::{Daemon, SessionRef, read_failed};

/// How many events are read at a time where a whole run is.
const PAGE: usize = 1000;

/// The session's state, and its own key with those of the sessions above it.
pub(super) async fn load(
    daemon: &Arc<Daemon>,
    session: &SessionRef,
) -> Result<(Box<State>, Vec<SessionKey>), ApiError> {
    let loaded = daemon.journal.load(session.key).await.map_err(read_failed)?;
    let snapshot = loaded.snapshot.map(|(_, bytes)| serde_json::from_slice::<State>(&bytes)).transpose();
    let state = replay(session, snapshot.map_err(|error| unreadable(session, error))?, &loaded.events)?;
    let is_below = state.settings.parent.is_some() || state.settings.fleet.is_some();
    let line = match is_below {
        true => daemon.line(session.key).await?,
        false => vec![session.key],
    };
    if is_below || state.settings.limits.budget_usd.is_some() {
        daemon.check_budgets(session.key).await.map_err(read_failed)?;
    }
    Ok((Box::new(state), line))
}

/// Applies events to a snapshot, or to the session's first event.
fn replay(session: &SessionRef, snapshot: Option<State>, events: &[StoredEvent]) -> Result<State, ApiError> {
    let mut state = snapshot;
    for stored in events {
        let body = decode(session, stored)?;
        match (&mut state, body) {
            (Some(state), Some(body)) => {
                let event = recorded(stored, body);
                evolve(state, &event);
            }
            // A kind that a later version writes still counts.
            (Some(state), None) => state.number = stored.number.unwrap_or(state.number),
            (None, Some(Body::SessionCreated(created))) => {
                state = Some(State::new(session.id.clone(), session.workspace.clone(), created, stored.ts));
            }
            (None, _) => {}
        }
    }
    state.ok_or_else(|| ApiError::not_found("session", &session.id))
}

pub(crate) fn recorded(stored: &StoredEvent, body: Body) -> Recorded {
    let number = stored.number.unwrap_or_default();
    Recorded { number, ts: stored.ts, run: stored.run.clone(), up: stored.up, body }
}

fn decode(session: &SessionRef, stored: &StoredEvent) -> Result<Option<Body>, ApiError> {
    Body::decode(&stored.kind, &stored.data).map_err(|error| unreadable(session, error))
}

fn unreadable(session: &SessionRef, error: serde_json::Error) -> ApiError {
    let message =
        format!("session {} could not be read from the journal: {error}; see `qd doctor`", session.id);
    ApiError::new(Code::Internal, message)
}

/// A session's state as it is kept with each end of a run.
pub(crate) fn snapshot(state: &State) -> Option<(Number, Vec<u8>)> {
    match serde_json::to_vec(state) {
        Ok(bytes) => Some((state.number, bytes)),
        Err(error) => {
            // A snapshot only saves time: without one, more events are read.
            tracing::error!(%error, "a snapshot could not be written");
            None
        }
    }
}

/// All that a run has said, as far as it is in the journal.
pub(super) async fn said(daemon: &Daemon, session: &SessionRef, run: &RunId) -> Result<String, ApiError> {
    let mut text = String::new();
    let mut after = Number(0);
    loop {
        let kinds = &["text.delta"];
        let page = daemon.journal.session_events(session.key, Some(run), kinds, after, PAGE).await;
        let page = page.map_err(read_failed)?;
        for stored in &page.events {
            if let Some(Body::TextDelta(delta)) = decode(session, stored)? {
                text.push_str(&delta.text);
            }
        }
        if page.end {
            return Ok(text);
        }
        after = page.scanned;
    }
}

/// What was asked of a run, as the journal has it: its first message.
pub(super) async fn prompt(daemon: &Daemon, session: &SessionRef, run: &RunId) -> Result<Accept, ApiError> {
    let mut after = Number(0);
    loop {
        let kinds = &["message.created"];
        let page = daemon.journal.session_events(session.key, Some(run), kinds, after, PAGE).await;
        let page = page.map_err(read_failed)?;
        for stored in &page.events {
            if let Some(Body::MessageCreated(message)) = decode(session, stored)? {
                return Ok(accept(run, message.parts));
            }
        }
        if page.end {
            return Err(ApiError::not_found("prompt of run", run));
        }
        after = page.scanned;
    }
}

fn accept(run: &RunId, parts: Vec<Part>) -> Accept {
    let mut accept = Accept {
        run: run.clone(),
        prompt: Text::default(),
        attachments: Vec::new(),
        fingerprint: String::new(),
    };
    for part in parts {
        match part {
            Part::Text { text, blob } => accept.prompt = Text { head: text, blob },
            Part::File { file } => accept.attachments.push(file),
            _ => {}
        }
    }
    accept
}

/// What a suspended run is resumed with by the `run.resumed` of this number: its transcript, and one message for each
/// session that it waited for.
pub(super) async fn transcript(
    daemon: &Daemon,
    session: &SessionRef,
    run: &RunId,
    number: Number,
) -> Result<Vec<Value>, ApiError> {
    let (mut transcript, mut after) = (Vec::new(), Number(0));
    loop {
        let kinds = &["run.suspended", "run.resumed"];
        let page = daemon.journal.session_events(session.key, Some(run), kinds, after, PAGE).await;
        let page = page.map_err(read_failed)?;
        for stored in &page.events {
            match decode(session, stored)? {
                Some(Body::RunSuspended(suspended)) => transcript = suspended.transcript,
                Some(Body::RunResumed(resumed)) if stored.number == Some(number) => {
                    transcript.extend(resumed.children.iter().map(message));
                    return Ok(transcript);
                }
                _ => {}
            }
        }
        if page.end {
            return Ok(Vec::new());
        }
        after = page.scanned;
    }
}

/// What became of a session below, as its parent's agent is told.
fn message(child: &ChildResult) -> Value {
    let content = json!({
        "session_id": child.session_id,
        "finish_reason": child.finish_reason,
        "text": child.text,
    });
    json!({ "role": "user", "content": content })
}

/// The whole of a text of which the journal may hold only the head.
pub(crate) async fn whole(blobs: &Path, text: Text) -> Result<String, ApiError> {
    let Some(file) = &text.blob else { return Ok(text.head) };
    String::from_utf8(blob(blobs, file).await?).map_err(|error| {
        ApiError::new(Code::StorageFailed, format!("the file {} is not text: {error}", file.sha256))
    })
}

/// The content of a file beside the journal.
pub(super) async fn blob(blobs: &Path, file: &Blob) -> Result<Vec<u8>, ApiError> {
    let path = blobs.join(&file.sha256);
    tokio::fs::read(&path).await.map_err(|error| {
        ApiError::new(Code::StorageFailed, format!("could not read {}: {error}", path.display()))
    })
}
