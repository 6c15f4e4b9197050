//! Reads a session from the journal: its state from the last snapshot and the events after it, and single runs, prompts
//! and texts where an effect needs them. It writes nothing.
//!
//! Design: docs/design/snapshot-with-each-run-end.md

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use qd_core::session::{PromptSubmission, SessionEvent, SessionState, evolve};
use qd_journal::{SessionKey, StoredEvent};
use qd_protocol::event::{ChildResult, EventBody, MessagePart};
use qd_protocol::text::BlobRef;
use qd_protocol::{ApiError, ErrorCode, EventNumber, LongText, RunId};
use serde_json::{Value, json};

use crate::daemon::{Daemon, SessionAddress, read_failed};

/// How many events are read from the journal at a time.
const PAGE: usize = 1000;

/// Reads a session's state and its lineage: its own key, its ancestors', its fleet's. Also checks the budgets of the
/// lineage.
pub(super) async fn load(
    daemon: &Arc<Daemon>,
    session: &SessionAddress,
) -> Result<(Box<SessionState>, Vec<SessionKey>), ApiError> {
    let state = load_state(daemon, session).await?;
    let is_child = state.settings.parent.is_some() || state.settings.fleet.is_some();
    let lineage = match is_child {
        true => daemon.session_lineage(session.key).await?,
        false => vec![session.key],
    };
    if is_child || state.settings.limits.budget_usd.is_some() {
        daemon.check_budgets(session.key).await.map_err(read_failed)?;
    }
    Ok((Box::new(state), lineage))
}

/// Applies the events after the last snapshot to it. A snapshot only saves time: one that cannot be read, because
/// another release wrote it, is replaced by all events of the session.
async fn load_state(daemon: &Daemon, session: &SessionAddress) -> Result<SessionState, ApiError> {
    let stored = daemon.journal.load(session.key).await.map_err(read_failed)?;
    let mut state = None;
    if let Some((_, snapshot)) = stored.snapshot {
        match serde_json::from_slice(&snapshot) {
            Ok(snapshot) => state = Some(snapshot),
            Err(error) => {
                tracing::warn!(
                    session = %session.id, %error,
                    "the session's snapshot cannot be read; rebuilding the session from its events"
                );
                return rebuild_state(daemon, session).await;
            }
        }
    }
    apply_events(session, &mut state, &stored.events)?;
    state.ok_or_else(|| ApiError::not_found("session", &session.id))
}

/// Applies every event of a session, from the first one on.
async fn rebuild_state(daemon: &Daemon, session: &SessionAddress) -> Result<SessionState, ApiError> {
    let (mut state, mut after) = (None, EventNumber(0));
    loop {
        let page = daemon.journal.session_events(session.key, None, &[], after, PAGE).await;
        let page = page.map_err(read_failed)?;
        apply_events(session, &mut state, &page.events)?;
        if page.end {
            return state.ok_or_else(|| ApiError::not_found("session", &session.id));
        }
        after = page.scanned_through;
    }
}

/// Applies events to a state. Without a state, the session's first event creates it.
fn apply_events(
    session: &SessionAddress,
    state: &mut Option<SessionState>,
    events: &[StoredEvent],
) -> Result<(), ApiError> {
    for stored in events {
        match (&mut *state, decode(session, stored)?) {
            (Some(state), Some(body)) => evolve(state, &recorded_event(stored, body)),
            // An event of a kind that only later releases know still has a number.
            (Some(state), None) => state.number = stored.number.unwrap_or(state.number),
            (None, Some(EventBody::SessionCreated(created))) => {
                let (id, workspace) = (session.id.clone(), session.workspace.clone());
                *state = Some(SessionState::new(id, workspace, created, stored.ts));
            }
            (None, _) => {}
        }
    }
    Ok(())
}

pub(crate) fn recorded_event(stored: &StoredEvent, body: EventBody) -> SessionEvent {
    let number = stored.number.unwrap_or_default();
    SessionEvent {
        number,
        ts: stored.ts,
        run: stored.run.clone(),
        update_number: stored.update_number,
        // No state depends on it.
        actor: None,
        body,
    }
}

fn decode(session: &SessionAddress, stored: &StoredEvent) -> Result<Option<EventBody>, ApiError> {
    EventBody::decode(&stored.kind, &stored.data).map_err(|error| decode_failed(session, error))
}

fn decode_failed(session: &SessionAddress, error: serde_json::Error) -> ApiError {
    let message =
        format!("session {} could not be read from the journal: {error}; see `qd doctor`", session.id);
    ApiError::new(ErrorCode::Internal, message)
}

/// Encodes the snapshot that is written with each `run.finished`. Returns `None` if that fails.
pub(crate) fn encode_snapshot(state: &SessionState) -> Option<(EventNumber, Vec<u8>)> {
    match serde_json::to_vec(state) {
        Ok(bytes) => Some((state.number, bytes)),
        Err(error) => {
            // Not fatal: without a snapshot, the next load reads more events.
            tracing::error!(%error, "a snapshot could not be written");
            None
        }
    }
}

/// Joins all text deltas of a run that are in the journal.
pub(super) async fn run_text(
    daemon: &Daemon,
    session: &SessionAddress,
    run: &RunId,
) -> Result<String, ApiError> {
    let mut text = String::new();
    visit_run_events(daemon, session, run, "text.delta", |body| {
        if let EventBody::TextDelta(delta) = body {
            text.push_str(&delta.text);
        }
        ControlFlow::<()>::Continue(())
    })
    .await?;
    Ok(text)
}

/// Reads the prompt of a run from its first message.
pub(super) async fn load_prompt(
    daemon: &Daemon,
    session: &SessionAddress,
    run: &RunId,
) -> Result<PromptSubmission, ApiError> {
    let first = visit_run_events(daemon, session, run, "message.created", |body| match body {
        EventBody::MessageCreated(message) => ControlFlow::Break(message.parts),
        _ => ControlFlow::Continue(()),
    });
    let parts = first.await?.ok_or_else(|| ApiError::not_found("prompt of run", run))?;
    Ok(prompt_from_parts(run, parts))
}

/// Passes the events of a run that are of one kind to `visit`, in order, until it breaks, and returns what it broke
/// with.
async fn visit_run_events<B>(
    daemon: &Daemon,
    session: &SessionAddress,
    run: &RunId,
    kind: &str,
    mut visit: impl FnMut(EventBody) -> ControlFlow<B>,
) -> Result<Option<B>, ApiError> {
    let mut after = EventNumber(0);
    loop {
        let page = daemon.journal.session_events(session.key, Some(run), &[kind], after, PAGE).await;
        let page = page.map_err(read_failed)?;
        for stored in &page.events {
            if let Some(body) = decode(session, stored)?
                && let ControlFlow::Break(found) = visit(body)
            {
                return Ok(Some(found));
            }
        }
        if page.end {
            return Ok(None);
        }
        after = page.scanned_through;
    }
}

fn prompt_from_parts(run: &RunId, parts: Vec<MessagePart>) -> PromptSubmission {
    let mut prompt = PromptSubmission {
        run: run.clone(),
        prompt: LongText::default(),
        attachments: Vec::new(),
        fingerprint: String::new(),
    };
    for part in parts {
        match part {
            MessagePart::Text { text, blob } => prompt.prompt = LongText { head: text, blob },
            MessagePart::File { file } => prompt.attachments.push(file),
            _ => {}
        }
    }
    prompt
}

/// Reads the messages with which the `run.resumed` of this number continues a suspended run: its transcript, then one
/// message for each session that it waited for.
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
        after = page.scanned_through;
    }
}

/// The result of a child session as a message to its parent's agent.
fn child_result_message(child: &ChildResult) -> Value {
    let content = json!({
        "session_id": child.session_id,
        "finish_reason": child.finish_reason,
        "text": child.text,
    });
    json!({ "role": "user", "content": content })
}

/// Reads a whole text, of which the journal may hold only the head.
pub(crate) async fn full_text(blobs: &Path, text: LongText) -> Result<String, ApiError> {
    let Some(file) = &text.blob else { return Ok(text.head) };
    String::from_utf8(read_blob(blobs, file).await?).map_err(|error| {
        ApiError::new(ErrorCode::StorageFailed, format!("the file {} is not text: {error}", file.sha256))
    })
}

/// Reads a file from the folder of blobs.
pub(super) async fn read_blob(blobs: &Path, file: &BlobRef) -> Result<Vec<u8>, ApiError> {
    let path = blobs.join(&file.sha256);
    tokio::fs::read(&path).await.map_err(|error| {
        ApiError::new(ErrorCode::StorageFailed, format!("could not read {}: {error}", path.display()))
    })
}
