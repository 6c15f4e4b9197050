//! A session read from the journal: its last snapshot, and what came after it.

use std::path::Path;
use std::sync::Arc;

use qd_core::session::{PromptSubmission, SessionEvent, SessionState, evolve};
use qd_journal::{SessionKey, StoredEvent};
use qd_protocol::event::{ChildResult, EventBody, MessagePart};
use qd_protocol::text::BlobRef;
use qd_protocol::{ApiError, ErrorCode, EventNumber, LongText, RunId};
use serde_json::{Value, json};

use crate::daemon::{Daemon, SessionAddress, read_failed};

/// How many events are read at a time where a whole run is.
const PAGE: usize = 1000;

/// The session's state, and its own key with those of the sessions above it.
pub(super) async fn load(
    daemon: &Arc<Daemon>,
    session: &SessionAddress,
) -> Result<(Box<SessionState>, Vec<SessionKey>), ApiError> {
    let loaded = daemon.journal.load(session.key).await.map_err(read_failed)?;
    let snapshot =
        loaded.snapshot.map(|(_, bytes)| serde_json::from_slice::<SessionState>(&bytes)).transpose();
    let state = replay(session, snapshot.map_err(|error| decode_failed(session, error))?, &loaded.events)?;
    let is_below = state.settings.parent.is_some() || state.settings.fleet.is_some();
    let line = match is_below {
        true => daemon.session_lineage(session.key).await?,
        false => vec![session.key],
    };
    if is_below || state.settings.limits.budget_usd.is_some() {
        daemon.check_budgets(session.key).await.map_err(read_failed)?;
    }
    Ok((Box::new(state), line))
}

/// Applies events to a snapshot, or to the session's first event.
fn replay(
    session: &SessionAddress,
    snapshot: Option<SessionState>,
    events: &[StoredEvent],
) -> Result<SessionState, ApiError> {
    let mut state = snapshot;
    for stored in events {
        let body = decode(session, stored)?;
        match (&mut state, body) {
            (Some(state), Some(body)) => {
                let event = recorded_event(stored, body);
                evolve(state, &event);
            }
            // A kind that a later version writes still counts.
            (Some(state), None) => state.number = stored.number.unwrap_or(state.number),
            (None, Some(EventBody::SessionCreated(created))) => {
                state = Some(SessionState::new(
                    session.id.clone(),
                    session.workspace.clone(),
                    created,
                    stored.ts,
                ));
            }
            (None, _) => {}
        }
    }
    state.ok_or_else(|| ApiError::not_found("session", &session.id))
}

pub(crate) fn recorded_event(stored: &StoredEvent, body: EventBody) -> SessionEvent {
    let number = stored.number.unwrap_or_default();
    SessionEvent { number, ts: stored.ts, run: stored.run.clone(), link_number: stored.update_number, body }
}

fn decode(session: &SessionAddress, stored: &StoredEvent) -> Result<Option<EventBody>, ApiError> {
    EventBody::decode(&stored.kind, &stored.data).map_err(|error| decode_failed(session, error))
}

fn decode_failed(session: &SessionAddress, error: serde_json::Error) -> ApiError {
    let message =
        format!("session {} could not be read from the journal: {error}; see `qd doctor`", session.id);
    ApiError::new(ErrorCode::Internal, message)
}

/// A session's state as it is kept with each end of a run.
pub(crate) fn encode_snapshot(state: &SessionState) -> Option<(EventNumber, Vec<u8>)> {
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
pub(super) async fn run_text(
    daemon: &Daemon,
    session: &SessionAddress,
    run: &RunId,
) -> Result<String, ApiError> {
    let mut text = String::new();
    let mut after = EventNumber(0);
    loop {
        let kinds = &["text.delta"];
        let page = daemon.journal.session_events(session.key, Some(run), kinds, after, PAGE).await;
        let page = page.map_err(read_failed)?;
        for stored in &page.events {
            if let Some(EventBody::TextDelta(delta)) = decode(session, stored)? {
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
pub(super) async fn load_prompt(
    daemon: &Daemon,
    session: &SessionAddress,
    run: &RunId,
) -> Result<PromptSubmission, ApiError> {
    let mut after = EventNumber(0);
    loop {
        let kinds = &["message.created"];
        let page = daemon.journal.session_events(session.key, Some(run), kinds, after, PAGE).await;
        let page = page.map_err(read_failed)?;
        for stored in &page.events {
            if let Some(EventBody::MessageCreated(message)) = decode(session, stored)? {
                return Ok(accept_from_parts(run, message.parts));
            }
        }
        if page.end {
            return Err(ApiError::not_found("prompt of run", run));
        }
        after = page.scanned;
    }
}

fn accept_from_parts(run: &RunId, parts: Vec<MessagePart>) -> PromptSubmission {
    let mut accept = PromptSubmission {
        run: run.clone(),
        prompt: LongText::default(),
        attachments: Vec::new(),
        fingerprint: String::new(),
    };
    for part in parts {
        match part {
            MessagePart::Text { text, blob } => accept.prompt = LongText { head: text, blob },
            MessagePart::File { file } => accept.attachments.push(file),
            _ => {}
        }
    }
    accept
}

/// What a suspended run is resumed with by the `run.resumed` of this number: its transcript, and one message for each
/// session that it waited for.
pub(super) async fn resume_transcript(
    daemon: &Daemon,
    session: &SessionAddress,
    run: &RunId,
    number: EventNumber,
) -> Result<Vec<Value>, ApiError> {
    let (mut transcript, mut after) = (Vec::new(), EventNumber(0));
    loop {
        let kinds = &["run.suspended", "run.resumed"];
        let page = daemon.journal.session_events(session.key, Some(run), kinds, after, PAGE).await;
        let page = page.map_err(read_failed)?;
        for stored in &page.events {
            match decode(session, stored)? {
                Some(EventBody::RunSuspended(suspended)) => transcript = suspended.transcript,
                Some(EventBody::RunResumed(resumed)) if stored.number == Some(number) => {
                    transcript.extend(resumed.children.iter().map(child_result_message));
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
fn child_result_message(child: &ChildResult) -> Value {
    let content = json!({
        "session_id": child.session_id,
        "finish_reason": child.finish_reason,
        "text": child.text,
    });
    json!({ "role": "user", "content": content })
}

/// The whole of a text of which the journal may hold only the head.
pub(crate) async fn full_text(blobs: &Path, text: LongText) -> Result<String, ApiError> {
    let Some(file) = &text.blob else { return Ok(text.head) };
    String::from_utf8(read_blob(blobs, file).await?).map_err(|error| {
        ApiError::new(ErrorCode::StorageFailed, format!("the file {} is not text: {error}", file.sha256))
    })
}

/// The content of a file beside the journal.
pub(super) async fn read_blob(blobs: &Path, file: &BlobRef) -> Result<Vec<u8>, ApiError> {
    let path = blobs.join(&file.sha256);
    tokio::fs::read(&path).await.map_err(|error| {
        ApiError::new(ErrorCode::StorageFailed, format!("could not read {}: {error}", path.display()))
    })
}
