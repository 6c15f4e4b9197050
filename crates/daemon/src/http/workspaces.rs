//! Workspaces: add, list, show and remove them. Their logic is in `crate::workspaces`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use qd_protocol::api::{NewWorkspace, Workspace};
use qd_protocol::error::ErrorBody;
use qd_protocol::limits::TITLE_MAX;
use qd_protocol::{ApiError, Millis, WorkspaceId};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse, WorkspacePath,
};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, ListQuery};
use crate::daemon::Daemon;
use crate::edge::{HttpError, Json};
use crate::invalid_value;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list_workspaces, create_workspace))
        .routes(routes!(get_workspace, remove_workspace))
}

/// Lists the workspaces, oldest first. Removed ones are left out.
#[utoipa::path(get, path = "/v1/workspaces", tag = "workspaces", params(ListQuery), responses(
    (status = 200, description = "A page of workspaces", body = [Workspace]), BadQueryResponse, GuardResponses,
))]
async fn list_workspaces(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<Workspace>, HttpError> {
    let all = daemon.workspaces.all();
    let reached = all.iter().filter(|entry| caller.workspace().is_none_or(|own| *own == entry.id));
    let all = reached.map(|entry| entry.doc.clone()).collect();
    Ok(ListPage::from_complete(all, &query, |workspace: &Workspace| workspace.id.as_str())?)
}

/// The response stored under an idempotency key. `known` decides between 200 and 201.
#[derive(Debug, Serialize, Deserialize)]
struct CreateWorkspaceOutcome {
    #[serde(default)]
    known: bool,
    id: WorkspaceId,
    path: String,
    name: String,
    created_at: Millis,
}

/// Returns the workspace of a directory, and creates it if it is new.
#[utoipa::path(post, path = "/v1/workspaces", tag = "workspaces", params(IdempotencyKeyHeader), request_body = NewWorkspace,
    responses(
        (status = 201, description = "The workspace is new", body = Workspace),
        (status = 200, description = "The workspace existed before", body = Workspace),
        BadBodyResponses, GuardResponses,
        (status = 400, description = "`path_not_found`, `invalid_request` or `invalid_value`", body = ErrorBody),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
    )
)]
async fn create_workspace(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    KeyedBody(key, Json(new)): KeyedBody<Json<NewWorkspace>>,
) -> Result<(StatusCode, Json<Workspace>), HttpError> {
    let is_invalid = |name: &str| name.len() > TITLE_MAX || name.chars().any(char::is_control);
    if new.name.as_deref().is_some_and(is_invalid) {
        return Err(invalid_value(format!("`name` must be at most {TITLE_MAX} bytes on one line")).into());
    }
    if caller.workspace().is_some() {
        // It may only find its own.
        let known = daemon.workspace_at(&new.path).await?;
        let entry = known.ok_or_else(|| ApiError::not_found("workspace", &new.path))?;
        caller.require_workspace(&entry.id)?;
    }
    let create = |key| async {
        let (workspace, is_new) = daemon.create_workspace(new, &caller.actor, key).await?;
        let Workspace { id, path, name, created_at } = workspace;
        let recording =
            if is_new { ResponseRecording::WrittenWithEffect } else { ResponseRecording::NotWritten };
        Ok((CreateWorkspaceOutcome { known: !is_new, id, path, name, created_at }, recording))
    };
    let CreateWorkspaceOutcome { known, id, path, name, created_at } = run_once(&daemon, key, create).await?;
    let status = if known { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(Workspace { id, path, name, created_at })))
}

/// Shows one workspace.
#[utoipa::path(get, path = "/v1/workspaces/{w}", tag = "workspaces", params(WorkspacePath), responses(
    (status = 200, description = "The workspace", body = Workspace), NotFoundResponse, GuardResponses,
))]
async fn get_workspace(
    State(daemon): State<Arc<Daemon>>,
    PathIds(workspace): PathIds<WorkspaceId>,
) -> Result<Json<Workspace>, HttpError> {
    Ok(Json(daemon.workspaces.get(&workspace)?.doc.clone()))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RemoveWorkspaceQuery {
    /// Remove it even if a run is active; the run is cancelled.
    #[serde(default)]
    force: bool,
}

/// Removes a workspace and closes its sessions. Adding the same path again creates a new workspace.
#[utoipa::path(delete, path = "/v1/workspaces/{w}", tag = "workspaces", params(WorkspacePath, RemoveWorkspaceQuery), responses(
    (status = 200, description = "The removed workspace", body = Workspace),
    (status = 409, description = "`busy`: a run is active", body = ErrorBody),
    BadQueryResponse, NotFoundResponse, GuardResponses,
))]
async fn remove_workspace(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(workspace): PathIds<WorkspaceId>,
    Query(query): Query<RemoveWorkspaceQuery>,
) -> Result<Json<Workspace>, HttpError> {
    let entry = daemon.workspaces.get(&workspace)?;
    daemon.remove_workspace(&workspace, query.force, &caller.actor).await?;
    Ok(Json(entry.doc.clone()))
}
