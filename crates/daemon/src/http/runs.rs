//! Prompts and their runs: accept, cancel, steer, list, wait. The session decides the order of accepts and cancels;
//! here a prompt is only checked, its large parts are stored, and it is sent to its session.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use qd_core::rows::{RunDoc, RunPrompt};
use qd_core::session::{PromptSubmission, SessionCommand};
use qd_journal::{EventFilter, EventTopic, RunFilter, RunRow, SessionRow};
use qd_protocol::api::{
    CancelRequest, CancelResponse, NewRun, PromptReceipt, Run, RunStatus, SessionStatus, SteerReceipt,
    SteerRequest,
};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::{EventActor, RunStopCause};
use qd_protocol::limits::{HEAD_MAX, WAIT_MAX_S};
use qd_protocol::text::{BlobRef, escaped_head};
use qd_protocol::{ApiError, ErrorCode, RunId, SessionId, WorkspaceId};
use serde::Deserialize;
use tokio::time::Instant;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse, RunPath,
    SessionPath, StreamLimitResponse, WorkspacePath,
};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, page_limit, parse_after, read_filtered};
use super::{sessions, unreadable_row};
use crate::actor::{ActorReply, CommandCompletion, IdempotencyKey, run_id_conflict};
use crate::daemon::{Daemon, SessionAddress, blob_failed, read_failed, stopping_error};
use crate::edge::{HttpError, Json, OptionalJson, StreamPermit, internal_error};
use crate::invalid_value;
use crate::random;
use crate::user_content::{
    check_remark, decode_attachments, prompt_fingerprint, store_attachments, store_text,
};

/// The default of `timeout_s`.
const DEFAULT_WAIT_S: f64 = 60.0;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(send_prompt))
        .routes(routes!(cancel))
        .routes(routes!(steer))
        .routes(routes!(list_runs))
        .routes(routes!(get_run))
        .routes(routes!(wait_for_run))
}

/// Sends a prompt. 202 means that it is in the journal; its run goes on even if the client disconnects. Repeating a
/// `run_id` with the same session, prompt and attachments returns the first receipt.
#[utoipa::path(post, path = "/v1/workspaces/{w}/agent", tag = "runs", params(WorkspacePath, IdempotencyKeyHeader),
    request_body = NewRun,
    responses(
        (status = 202, description = "Position 0 if it starts at once, else its position in the queue", body = PromptReceipt),
        (status = 409,
            description = "`session_closed`, `journal_limit`, `run_id_conflict` or `idempotency_conflict`",
            body = ErrorBody),
        (status = 429, description = "`queue_full` over 100 waiting, or `overloaded`", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn send_prompt(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(workspace): PathIds<WorkspaceId>,
    KeyedBody(key, Json(mut new)): KeyedBody<Json<NewRun>>,
) -> Result<(StatusCode, Json<PromptReceipt>), HttpError> {
    daemon.workspaces.get(&workspace)?;
    let session = daemon.session_in_workspace(&workspace, &new.session_id).await?;
    if new.prompt.trim().is_empty() && new.attachments.is_empty() {
        return Err(invalid_value("`prompt` is empty; give a text or an attachment").into());
    }
    let given_id = new.run_id.take().or_else(|| key.as_ref().map(run_id_from_key));
    let run = given_id.clone().unwrap_or_else(|| RunId::from_random(&random::bytes::<16>()));
    let prompt = SubmittedPrompt { new, run: run.clone(), is_named: given_id.is_some() };
    let accept = |key| Box::pin(accept_prompt(&daemon, &session, &caller.actor, prompt, key));
    let receipt = match run_once(&daemon, key, accept).await? {
        ActorReply::Accepted(receipt) => receipt,
        ActorReply::AlreadyAccepted => {
            let row = daemon.journal.run(&run).await.map_err(read_failed)?;
            run_receipt(&row.ok_or_else(|| ApiError::not_found("run", &run))?)?
        }
        _ => return Err(internal_error().into()),
    };
    Ok((StatusCode::ACCEPTED, Json(receipt)))
}

/// The run id of a prompt that has an idempotency key and no id.
pub(super) fn run_id_from_key(key: &IdempotencyKey) -> RunId {
    RunId::from_random(&key.digest()[..16])
}

/// A prompt with the id of its run.
pub(super) struct SubmittedPrompt {
    pub(super) new: NewRun,
    pub(super) run: RunId,
    /// The id was chosen by the client, or follows from its idempotency key, so it may be known already.
    pub(super) is_named: bool,
}

/// Sends a prompt to its session, unless the session already has it.
pub(super) async fn accept_prompt(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    actor: &Arc<EventActor>,
    submitted: SubmittedPrompt,
    key: Option<IdempotencyKey>,
) -> Result<(ActorReply, ResponseRecording), ApiError> {
    let SubmittedPrompt { new: NewRun { prompt, attachments, .. }, run, is_named } = submitted;
    let contents = decode_attachments(&attachments)?;
    let fingerprint = prompt_fingerprint(&session.id, &prompt, &attachments);
    let mut _one_at_a_time = None;
    if is_named {
        _one_at_a_time = Some(daemon.key_locks.lock(format!("run {run}")).await);
        if let Some(row) = daemon.journal.run(&run).await.map_err(read_failed)? {
            if row.session != session.key || row.fingerprint != fingerprint {
                return Err(run_id_conflict());
            }
            return Ok((ActorReply::Accepted(run_receipt(&row)?), ResponseRecording::NotWritten));
        }
    }
    let prompt = store_text(&daemon.journal, prompt).await?;
    let attachments = store_attachments(&daemon.journal, &prompt, attachments, contents).await?;
    let command = SessionCommand::AcceptPrompt(PromptSubmission { run, prompt, attachments, fingerprint });
    let CommandCompletion { reply, .. } = daemon.send_command(session, actor, command, key).await?;
    Ok((reply, ResponseRecording::WrittenWithEffect))
}

/// The receipt that was returned when the run was accepted.
pub(super) fn run_receipt(row: &RunRow) -> Result<PromptReceipt, ApiError> {
    let doc: RunDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("run", &row.id))?;
    let state = if doc.position == 0 { RunStatus::Accepted } else { RunStatus::Queued };
    Ok(PromptReceipt { run_id: row.id.clone(), state, position: doc.position, seq: row.seq })
}

/// Cancels every run of the session and of its descendants that was accepted before this request, or one run alone.
#[utoipa::path(post, path = "/v1/workspaces/{w}/agent/sessions/{s}/cancel", tag = "runs",
    params(SessionPath, IdempotencyKeyHeader), request_body = Option<CancelRequest>,
    responses(
        (status = 200, description = "The cancelled runs, once journalled", body = CancelResponse),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn cancel(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    KeyedBody(key, OptionalJson(request)): KeyedBody<OptionalJson<CancelRequest>>,
) -> Result<Json<CancelResponse>, HttpError> {
    let session = daemon.session_in_workspace(&workspace, &id).await?;
    let CancelRequest { run_id, reason } = request;
    check_remark("reason", reason.as_deref())?;
    let cancel = |key| async {
        if let Some(run) = &run_id
            && find_session_run(&daemon, &session, run).await?.finished
        {
            return Ok((
                ActorReply::Cancelled(CancelResponse { cancelled: Vec::new(), idle: true }),
                ResponseRecording::NotWritten,
            ));
        }
        cancel_runs(&daemon, &session, &caller.actor, run_id, reason, key).await
    };
    match run_once(&daemon, key, cancel).await? {
        ActorReply::Cancelled(cancelled) => Ok(Json(cancelled)),
        _ => Err(internal_error().into()),
    }
}

/// Cancels the runs of a session and its descendants, and returns those that were stopped.
pub(super) async fn cancel_runs(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    actor: &Arc<EventActor>,
    run: Option<RunId>,
    reason: Option<String>,
    key: Option<IdempotencyKey>,
) -> Result<(ActorReply, ResponseRecording), ApiError> {
    let command = SessionCommand::Cancel { run, by: RunStopCause::User, reason };
    let CommandCompletion { mut reply, cancelled_in_children } =
        daemon.send_command(session, actor, command, key).await?;
    if let (ActorReply::Cancelled(response), Some(descendants)) = (&mut reply, cancelled_in_children) {
        // No list arrives if the daemon stops meanwhile; the cancel of the descendants is in the journal all the same.
        response.cancelled.extend(descendants.await.unwrap_or_default());
        response.idle = response.cancelled.is_empty();
    }
    Ok((reply, ResponseRecording::WrittenWithEffect))
}

pub(super) async fn find_session_run(
    daemon: &Daemon,
    session: &SessionAddress,
    run: &RunId,
) -> Result<RunRow, ApiError> {
    let row = daemon.journal.run(run).await.map_err(read_failed)?;
    row.filter(|row| row.session == session.key).ok_or_else(|| ApiError::not_found("run", run))
}

/// Sends a text to the running turn. If the run is still starting, the steer waits for the start; a steer that the
/// turn does not take becomes the next prompt.
#[utoipa::path(post, path = "/v1/workspaces/{w}/agent/sessions/{s}/steer", tag = "runs",
    params(SessionPath, IdempotencyKeyHeader), request_body = SteerRequest,
    responses(
        (status = 202, description = "The steer is in the journal", body = SteerReceipt),
        (status = 409, description = "`not_running`, `steer_unsupported`, `session_closed` or `idempotency_conflict`",
            body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn steer(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    KeyedBody(key, Json(request)): KeyedBody<Json<SteerRequest>>,
) -> Result<(StatusCode, Json<SteerReceipt>), HttpError> {
    let row = sessions::find_session(&daemon, &workspace, &id).await?;
    if request.text.trim().is_empty() {
        return Err(invalid_value("`text` is empty").into());
    }
    let steer = |key| steer_session(&daemon, &row, &caller.actor, request.text, key);
    match run_once(&daemon, key, steer).await? {
        ActorReply::Steered(steered) => Ok((StatusCode::ACCEPTED, Json(steered))),
        _ => Err(internal_error().into()),
    }
}

async fn steer_session(
    daemon: &Arc<Daemon>,
    row: &SessionRow,
    actor: &Arc<EventActor>,
    text: String,
    key: Option<IdempotencyKey>,
) -> Result<(ActorReply, ResponseRecording), ApiError> {
    let session = daemon.session_address(row)?;
    let view = sessions::session_view(daemon, row)?;
    let workspace = daemon.workspaces.get(&session.workspace)?;
    let steers = daemon.workers.agent(&view.agent, &workspace.path).map_or(true, |agent| agent.steers);
    // Refused even while the agent starts and has not reported it itself. If nothing runs, the session refuses.
    if !steers && view.state != SessionStatus::Idle && view.state != SessionStatus::Closed {
        let message = "this agent cannot be steered; send a prompt, which waits its turn";
        return Err(ApiError::new(ErrorCode::SteerUnsupported, message));
    }
    let text = store_text(&daemon.journal, text).await?;
    let CommandCompletion { reply, .. } =
        daemon.send_command(&session, actor, SessionCommand::Steer { text }, key).await?;
    Ok((reply, ResponseRecording::WrittenWithEffect))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RunsQuery {
    /// The most runs to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
    /// Continue after this run: the value of `Next-After`.
    after: Option<String>,
    /// Only runs of this session.
    session: Option<String>,
}

/// The runs of a workspace or of one session, in the order of acceptance. Long prompts and texts are cut to a head.
#[utoipa::path(get, path = "/v1/workspaces/{w}/runs", tag = "runs", params(WorkspacePath, RunsQuery), responses(
    (status = 200, description = "A page of runs", body = [Run]), BadQueryResponse, NotFoundResponse, GuardResponses,
))]
async fn list_runs(
    State(daemon): State<Arc<Daemon>>,
    PathIds(workspace): PathIds<WorkspaceId>,
    Query(query): Query<RunsQuery>,
) -> Result<ListPage<Run>, HttpError> {
    let entry = daemon.workspaces.get(&workspace)?;
    let (limit, after) = (page_limit(query.limit)?, parse_after(query.after.as_deref(), RunId::parse)?);
    let session = match &query.session {
        Some(text) => {
            let id = SessionId::parse(text).map_err(|_| ApiError::not_found("session", text))?;
            Some(sessions::find_session(&daemon, &workspace, &id).await?.key)
        }
        None => None,
    };
    let filter = RunFilter { workspace: Some(entry.key), session, ..RunFilter::default() };
    let journal = &daemon.journal;
    let read = |after: Option<RunId>, size| async move { journal.runs(filter, after.as_ref(), size).await };
    let take = |row: RunRow| run_view(&row).map(|run| Some(shorten_texts(run)));
    let runs = read_filtered(limit, after, read, |row| row.id.clone(), take).await?;
    Ok(ListPage::from_fetched(runs, limit, |run| run.id.as_str()))
}

/// The run of a row. Long texts are heads only.
fn run_view(row: &RunRow) -> Result<Run, ApiError> {
    let doc: RunDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("run", &row.id))?;
    Ok(doc.view(row.id.clone(), run_prompt(row)?))
}

/// The prompt of a run.
pub(super) fn run_prompt(row: &RunRow) -> Result<RunPrompt, ApiError> {
    match &row.prompt {
        Some(bytes) => serde_json::from_slice(bytes).map_err(unreadable_row("run", &row.id)),
        None => Ok(RunPrompt { prompt: String::new(), blob: None }),
    }
}

/// A run as lists show it.
fn shorten_texts(mut run: Run) -> Run {
    let shorten = |text: &mut String| text.truncate(escaped_head(text, HEAD_MAX).len());
    shorten(&mut run.prompt);
    if let Some(text) = &mut run.text {
        shorten(text);
    }
    run
}

/// One run, with its whole prompt and text.
#[utoipa::path(get, path = "/v1/workspaces/{w}/runs/{run}", tag = "runs", params(RunPath), responses(
    (status = 200, description = "The run", body = Run), NotFoundResponse, GuardResponses,
))]
async fn get_run(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, run)): PathIds<(WorkspaceId, RunId)>,
) -> Result<Json<Run>, HttpError> {
    let row = find_run(&daemon, &workspace, &run).await?;
    Ok(Json(load_full_run(&daemon, &row).await?))
}

async fn find_run(daemon: &Daemon, workspace: &WorkspaceId, run: &RunId) -> Result<RunRow, ApiError> {
    let workspace = daemon.workspaces.get(workspace)?;
    let row = daemon.journal.run(run).await.map_err(read_failed)?;
    row.filter(|row| row.workspace == workspace.key).ok_or_else(|| ApiError::not_found("run", run))
}

/// The run of a row, with long texts read from their blobs.
pub(super) async fn load_full_run(daemon: &Daemon, row: &RunRow) -> Result<Run, ApiError> {
    let mut run = run_view(row)?;
    if let Some(text) = read_blob_text(daemon, run.prompt_blob.as_ref()).await? {
        run.prompt = text;
    }
    if let Some(text) = read_blob_text(daemon, run.text_blob.as_ref()).await? {
        run.text = Some(text);
    }
    Ok(run)
}

async fn read_blob_text(daemon: &Daemon, blob: Option<&BlobRef>) -> Result<Option<String>, ApiError> {
    let Some(blob) = blob else { return Ok(None) };
    let bytes = daemon.journal.blobs().get(&blob.sha256).await.map_err(blob_failed)?;
    if bytes.is_none() {
        tracing::warn!(
            sha256 = blob.sha256,
            "a blob of a run is missing; only the head of its text is shown"
        );
    }
    Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WaitQuery {
    /// Seconds to wait, from 0 to 3600, fractions allowed. Default 60.
    timeout_s: Option<f64>,
}

/// Waits until the run has ended.
#[utoipa::path(get, path = "/v1/workspaces/{w}/runs/{run}/wait", tag = "runs", params(RunPath, WaitQuery), responses(
    (status = 200, description = "The run as it ended", body = Run),
    (status = 408, description = "`wait_timeout`: the run has not ended; ask again", body = ErrorBody),
    BadQueryResponse, NotFoundResponse, StreamLimitResponse, GuardResponses,
))]
async fn wait_for_run(
    State(daemon): State<Arc<Daemon>>,
    _permit: StreamPermit,
    PathIds((workspace, run)): PathIds<(WorkspaceId, RunId)>,
    Query(query): Query<WaitQuery>,
) -> Result<Json<Run>, HttpError> {
    let seconds = query.timeout_s.unwrap_or(DEFAULT_WAIT_S);
    if !(0.0..=WAIT_MAX_S as f64).contains(&seconds) {
        return Err(
            invalid_value(format!("`timeout_s` must be a number of seconds from 0 to {WAIT_MAX_S}")).into()
        );
    }
    let deadline = Instant::now() + Duration::from_secs_f64(seconds);
    let mut row = find_run(&daemon, &workspace, &run).await?;
    if !row.finished {
        let kinds: Arc<[String]> = Arc::from(["run.finished".to_owned()]);
        let filter = EventFilter { topic: EventTopic::Session(row.session), kinds: Some(kinds) };
        let mut events = daemon.journal.subscribe(filter, None);
        let mut stop = daemon.stop_signal();
        // The subscription comes before the query, so the end cannot fall between the two.
        row = find_run(&daemon, &workspace, &run).await?;
        while !row.finished {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Err(stopping_error().into()),
                event = events.next() => drop(event.map_err(read_failed)?),
                () = tokio::time::sleep_until(deadline) => {
                    let message = format!("run {run} has not ended within {seconds} s; ask again");
                    return Err(ApiError::new(ErrorCode::WaitTimeout, message).into());
                }
            }
            row = find_run(&daemon, &workspace, &run).await?;
        }
    }
    Ok(Json(load_full_run(&daemon, &row).await?))
}

#[cfg(test)]
mod tests {
    use qd_protocol::{Millis, TokenUsage};

    use super::*;

    #[test]
    fn a_key_names_the_same_run_for_the_same_request_and_no_other() {
        let key = |key: &str, byte| IdempotencyKey { key: key.to_owned(), fingerprint: [byte; 32] };
        let run = run_id_from_key(&key("k", 1));
        assert!(run.as_str().starts_with("run_"));
        assert_eq!(run, run_id_from_key(&key("k", 1)));
        assert_ne!(run, run_id_from_key(&key("l", 1)));
        assert_ne!(run, run_id_from_key(&key("k", 2)));
    }

    #[test]
    fn a_run_in_a_list_shows_the_heads_of_its_texts() {
        let doc = RunDoc {
            session_id: SessionId::parse("ses_1").unwrap(),
            state: RunStatus::Finished,
            position: 0,
            finish_reason: None,
            text: Some("\u{e4}".repeat(HEAD_MAX)),
            text_blob: None,
            error: None,
            usage: TokenUsage::default(),
            accepted_at: Millis(0),
            started_at: None,
            finished_at: None,
        };
        let prompt = RunPrompt { prompt: "short".to_owned(), blob: None };
        let run = shorten_texts(doc.view(RunId::parse("r").unwrap(), prompt));
        assert_eq!(run.prompt, "short");
        assert_eq!(run.text.as_deref(), Some("\u{e4}".repeat(HEAD_MAX / 2).as_str()));
    }
}
