//! The queued runs of a session: list them, clear them, remove or move one. Only the session's actor knows which runs wait,
//! because a halt changes that without an event.

use std::sync::Arc;

use axum::extract::State;
use qd_core::rows::RunDoc;
use qd_core::session::SessionCommand;
use qd_protocol::api::{QueueEntry, QueueMove, QueuePlace};
use qd_protocol::error::ErrorBody;
use qd_protocol::limits::HEAD_MAX;
use qd_protocol::text::escaped_head;
use qd_protocol::{ApiError, ErrorCode, RunId, SessionId, WorkspaceId};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse, SessionPath,
};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, ListQuery};
use super::{runs, sessions, unreadable_row};
use crate::actor::{ActorMessage, ActorReply, SessionActivity};
use crate::daemon::{Daemon, SessionAddress, read_failed};
use crate::edge::{HttpError, Json, internal_error};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(list_queue, clear_queue)).routes(routes!(remove_queued, move_queued))
}

/// The runs that left a queue.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Removed)]
struct RemovedRuns {
    /// These runs end as `cancelled`.
    removed: Vec<RunId>,
}

/// Lists the queued runs, in order.
#[utoipa::path(get, path = "/v1/workspaces/{w}/agent/sessions/{s}/queue", tag = "runs",
    params(SessionPath, ListQuery),
    responses(
        (status = 200, description = "The queued runs", body = [QueueEntry]),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadQueryResponse, NotFoundResponse, GuardResponses,
    )
)]
async fn list_queue(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<QueueEntry>, HttpError> {
    let row = sessions::find_session(&daemon, &workspace, &id).await?;
    let session = daemon.session_address(&row)?;
    let probe = match daemon.probe_session(&id).await {
        Some(probe) => probe,
        None if row.live => wake_and_probe(&daemon, &session).await?,
        None => SessionActivity::default(),
    };
    let mut queue = Vec::with_capacity(probe.queued.len());
    for (position, run) in probe.queued {
        // A run that has ended and was purged meanwhile no longer waits.
        let Some(row) = daemon.journal.run(&run).await.map_err(read_failed)? else { continue };
        let doc: RunDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("run", &run))?;
        let prompt = escaped_head(&runs::run_prompt(&row)?.prompt, HEAD_MAX).to_owned();
        queue.push(QueueEntry { run_id: run, prompt, position, accepted_at: doc.accepted_at });
    }
    Ok(ListPage::from_complete(queue, &query, |queued| queued.run_id.as_str())?)
}

/// Wakes a session that has unfinished runs, and probes it again.
async fn wake_and_probe(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
) -> Result<SessionActivity, ApiError> {
    daemon.send_message(session, ActorMessage::Wake)?;
    let message = "could not read the session's queue; retry in a moment";
    daemon.probe_session(&session.id).await.ok_or_else(|| ApiError::new(ErrorCode::Overloaded, message))
}

/// Clears the queue: all queued runs end as `cancelled`. The active run goes on.
#[utoipa::path(delete, path = "/v1/workspaces/{w}/agent/sessions/{s}/queue", tag = "runs", params(SessionPath),
    responses(
        (status = 200, description = "The runs that left the queue", body = RemovedRuns),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        NotFoundResponse, GuardResponses,
    )
)]
async fn clear_queue(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
) -> Result<Json<RemovedRuns>, HttpError> {
    let session = daemon.session_in_workspace(&workspace, &id).await?;
    let cleared = daemon.send_command(&session, &caller.actor, SessionCommand::ClearQueue, None).await?;
    Ok(Json(removed_runs(cleared.reply)?))
}

/// Removes one queued run, which ends as `cancelled`.
#[utoipa::path(delete, path = "/v1/workspaces/{w}/agent/sessions/{s}/queue/{run}", tag = "runs",
    params(SessionPath, ("run" = String, Path, description = "The run")),
    responses(
        (status = 200, description = "The runs that left the queue", body = RemovedRuns),
        (status = 409, description = "`not_queued`: the run is not queued", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        NotFoundResponse, GuardResponses,
    )
)]
async fn remove_queued(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id, run)): PathIds<(WorkspaceId, SessionId, RunId)>,
) -> Result<Json<RemovedRuns>, HttpError> {
    let session = daemon.session_in_workspace(&workspace, &id).await?;
    runs::find_session_run(&daemon, &session, &run).await?;
    let command = SessionCommand::RemoveQueued { run };
    Ok(Json(removed_runs(daemon.send_command(&session, &caller.actor, command, None).await?.reply)?))
}

/// Moves one queued run before another one, or to the end of the queue. The order of the others stays as it is.
#[utoipa::path(patch, path = "/v1/workspaces/{w}/agent/sessions/{s}/queue/{run}", tag = "runs",
    params(SessionPath, ("run" = String, Path, description = "The run"), IdempotencyKeyHeader),
    request_body = QueueMove,
    responses(
        (status = 200, description = "The run and its place in the queue", body = QueuePlace),
        (status = 409, description = "`not_queued`: one of the two runs is not queued; or `idempotency_conflict`",
            body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn move_queued(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id, run)): PathIds<(WorkspaceId, SessionId, RunId)>,
    KeyedBody(key, Json(request)): KeyedBody<Json<QueueMove>>,
) -> Result<Json<QueuePlace>, HttpError> {
    let session = daemon.session_in_workspace(&workspace, &id).await?;
    runs::find_session_run(&daemon, &session, &run).await?;
    if let Some(next) = &request.before {
        runs::find_session_run(&daemon, &session, next).await?;
    }
    let command = SessionCommand::MoveQueued { run: run.clone(), before: request.before };
    let send = |key| async {
        let reply = daemon.send_command(&session, &caller.actor, command, key).await?.reply;
        Ok((reply, ResponseRecording::WrittenWithEffect))
    };
    match run_once(&daemon, key, send).await? {
        ActorReply::Moved { position } => Ok(Json(QueuePlace { run_id: run, position })),
        _ => Err(internal_error().into()),
    }
}

fn removed_runs(reply: ActorReply) -> Result<RemovedRuns, ApiError> {
    match reply {
        ActorReply::Removed(removed) => Ok(RemovedRuns { removed }),
        _ => Err(internal_error()),
    }
}
