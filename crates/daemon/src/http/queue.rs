//! The runs of a session that wait: looking at them, clearing them, removing one. Who waits is known by the session's
//! actor alone, since a halt changes it without an event.

use std::sync::Arc;

use axum::extract::State;
use qd_core::rows::RunDoc;
use qd_core::session::Command;
use qd_protocol::api::Queued;
use qd_protocol::error::ErrorBody;
use qd_protocol::limits::HEAD_MAX;
use qd_protocol::text::head;
use qd_protocol::{ApiError, Code, RunId, SessionId, WorkspaceId};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::describe::{BadQuery, Guarded, InSession, Missing};
use super::extract::{Ids, Query};
use super::list::{List, ListQuery};
use super::{fault, runs, sessions, unreadable};
use crate::actor::{Answer, Mail, Probe};
use crate::daemon::{Daemon, SessionRef, read_failed};
use crate::edge::{Json, Refusal};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(list_queue, clear_queue)).routes(routes!(remove_queued))
}

/// What left a queue.
#[derive(Debug, Serialize, ToSchema)]
struct Removed {
    /// These end as `cancelled`.
    removed: Vec<RunId>,
}

/// What waits, in its order.
#[utoipa::path(get, path = "/v1/workspaces/{w}/agent/sessions/{s}/queue", tag = "runs",
    params(InSession, ListQuery),
    responses(
        (status = 200, description = "All that waits", body = [Queued]),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadQuery, Missing, Guarded,
    )
)]
async fn list_queue(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, SessionId)>,
    Query(query): Query<ListQuery>,
) -> Result<List<Queued>, Refusal> {
    let row = sessions::find(&daemon, &workspace, &id).await?;
    let session = daemon.session_ref(&row)?;
    let probe = match daemon.probe(&id).await {
        Some(probe) => probe,
        None if row.live => awake(&daemon, &session).await?,
        None => Probe::default(),
    };
    let mut queue = Vec::with_capacity(probe.waiting.len());
    for (position, run) in probe.waiting {
        // One that has ended and was purged meanwhile no longer waits.
        let Some(row) = daemon.journal.run(&run).await.map_err(read_failed)? else { continue };
        let doc: RunDoc = serde_json::from_slice(&row.doc).map_err(unreadable("run", &run))?;
        let prompt = head(&runs::prompt(&row)?.prompt, HEAD_MAX).to_owned();
        queue.push(Queued { run_id: run, prompt, position, accepted_at: doc.accepted_at });
    }
    Ok(List::slice(queue, &query, |queued| queued.run_id.as_str())?)
}

/// Wakes a session that has unfinished runs and asks it again.
async fn awake(daemon: &Arc<Daemon>, session: &Arc<SessionRef>) -> Result<Probe, ApiError> {
    daemon.send(session, Mail::Wake)?;
    let message = "the session could not be asked what waits; retry in a moment";
    daemon.probe(&session.id).await.ok_or_else(|| ApiError::new(Code::Overloaded, message))
}

/// Ends everything that waits, as `cancelled`. What runs goes on.
#[utoipa::path(delete, path = "/v1/workspaces/{w}/agent/sessions/{s}/queue", tag = "runs", params(InSession),
    responses(
        (status = 200, description = "What left the queue", body = Removed),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        Missing, Guarded,
    )
)]
async fn clear_queue(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, SessionId)>,
) -> Result<Json<Removed>, Refusal> {
    let session = daemon.session(&workspace, &id).await?;
    Ok(Json(removed(daemon.command(&session, Command::Clear, None).await?.answer)?))
}

/// Ends one that waits, as `cancelled`.
#[utoipa::path(delete, path = "/v1/workspaces/{w}/agent/sessions/{s}/queue/{run}", tag = "runs",
    params(InSession, ("run" = String, Path, description = "The run")),
    responses(
        (status = 200, description = "What left the queue", body = Removed),
        (status = 409, description = "`not_queued`: it does not wait", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        Missing, Guarded,
    )
)]
async fn remove_queued(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id, run)): Ids<(WorkspaceId, SessionId, RunId)>,
) -> Result<Json<Removed>, Refusal> {
    let session = daemon.session(&workspace, &id).await?;
    runs::run_of(&daemon, &session, &run).await?;
    Ok(Json(removed(daemon.command(&session, Command::Remove { run }, None).await?.answer)?))
}

fn removed(answer: Answer) -> Result<Removed, ApiError> {
    match answer {
        Answer::Removed(removed) => Ok(Removed { removed }),
        _ => Err(fault()),
    }
}
