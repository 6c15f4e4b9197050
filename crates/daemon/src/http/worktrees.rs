//! Git worktrees of sessions: listed, shown, merged, removed. What each does is in `crate::worktrees`.

use std::sync::Arc;

use axum::extract::State;
use qd_protocol::error::ErrorBody;
use qd_protocol::worktree::{MergeRequest, MergeResult, RemovedWorktree, Worktree, WorktreeDiff};
use qd_protocol::{SessionId, WorkspaceId};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse, SessionPath,
};
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, ListQuery};
use super::sessions::{find_session, session_view};
use crate::daemon::Daemon;
use crate::edge::{HttpError, Json, OptionalJson};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list_worktrees))
        .routes(routes!(remove_any_worktree))
        .routes(routes!(show_diff))
        .routes(routes!(merge))
        .routes(routes!(remove_worktree))
}

/// The worktrees that there are, with their sizes, how they stand, and which of them changed the same lines.
#[utoipa::path(get, path = "/v1/worktrees", tag = "worktrees", params(ListQuery),
    responses((status = 200, description = "A page of them", body = [Worktree]), BadQueryResponse, GuardResponses)
)]
async fn list_worktrees(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<Worktree>, HttpError> {
    let all = Box::pin(daemon.worktrees()).await?;
    Ok(ListPage::from_complete(all, &query, |one| one.session_id.as_str())?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DiffQuery {
    /// Whether only the files are wanted, without the changes themselves.
    #[serde(default)]
    stat: bool,
}

/// What a session changed, committed or not, since where its worktree began.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/diff", tag = "worktrees", params(SessionPath, DiffQuery),
    responses(
        (status = 200, description = "The changes", body = WorktreeDiff),
        (status = 409, description = "`no_worktree` or `git_refused`", body = ErrorBody),
        BadQueryResponse, NotFoundResponse, GuardResponses,
    )
)]
async fn show_diff(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Query(query): Query<DiffQuery>,
) -> Result<Json<WorktreeDiff>, HttpError> {
    let session = session_view(&daemon, &find_session(&daemon, &workspace, &id).await?)?;
    Ok(Json(daemon.worktree_diff(&session, !query.stat).await?))
}

/// Merges what a session did into a branch: all of it, or nothing. What it had not committed is committed first.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/merge", tag = "worktrees",
    params(SessionPath, IdempotencyKeyHeader), request_body = Option<MergeRequest>,
    responses(
        (status = 200, description = "What was done", body = MergeResult),
        (status = 409, description = "`merge_conflict` (with the `conflicts`: files and their hunks), `busy`, \
            `no_worktree`, `git_refused` or `idempotency_conflict`; nothing was changed", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn merge(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    KeyedBody(key, OptionalJson(request)): KeyedBody<OptionalJson<Option<MergeRequest>>>,
) -> Result<Json<MergeResult>, HttpError> {
    let session = session_view(&daemon, &find_session(&daemon, &workspace, &id).await?)?;
    let deed = |_| async {
        let merged = Box::pin(daemon.merge_worktree(&session, request.unwrap_or_default())).await?;
        Ok((merged, ResponseRecording::NotWritten))
    };
    Ok(Json(run_once(&daemon, key, deed).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RemoveWorktreeQuery {
    /// Whether it goes also with work that is not merged. What is committed stays on its branch.
    #[serde(default)]
    force: bool,
}

/// Removes the worktree of a closed session, if everything in it is merged.
#[utoipa::path(delete, path = "/v1/workspaces/{w}/sessions/{s}/worktree", tag = "worktrees",
    params(SessionPath, RemoveWorktreeQuery),
    responses(
        (status = 200, description = "It is gone", body = RemovedWorktree),
        (status = 409, description = "`unmerged_work`, `busy`, `no_worktree` or `git_refused`", body = ErrorBody),
        BadQueryResponse, NotFoundResponse, GuardResponses,
    )
)]
async fn remove_worktree(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Query(query): Query<RemoveWorktreeQuery>,
) -> Result<Json<RemovedWorktree>, HttpError> {
    find_session(&daemon, &workspace, &id).await?;
    Ok(Json(daemon.remove_worktree(&id, query.force).await?))
}

/// The same by its name alone, for one whose session is purged.
#[utoipa::path(delete, path = "/v1/worktrees/{s}", tag = "worktrees",
    params(("s" = String, Path, description = "The session that it was made for"), RemoveWorktreeQuery),
    responses(
        (status = 200, description = "It is gone", body = RemovedWorktree),
        (status = 409, description = "`unmerged_work`, `busy`, `no_worktree` or `git_refused`", body = ErrorBody),
        BadQueryResponse, NotFoundResponse, GuardResponses,
    )
)]
async fn remove_any_worktree(
    State(daemon): State<Arc<Daemon>>,
    PathIds(id): PathIds<SessionId>,
    Query(query): Query<RemoveWorktreeQuery>,
) -> Result<Json<RemovedWorktree>, HttpError> {
    Ok(Json(daemon.remove_worktree(&id, query.force).await?))
}
