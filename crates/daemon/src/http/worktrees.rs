//! Git worktrees of sessions: list, diff, merge, remove. The operations are in `crate::worktrees`.

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
use crate::worktrees::WorktreeInspection;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list_worktrees))
        .routes(routes!(remove_any_worktree))
        .routes(routes!(show_diff))
        .routes(routes!(merge))
        .routes(routes!(remove_worktree))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WorktreesQuery {
    /// The most items to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
    /// Continue after this item: the value of `Next-After`.
    after: Option<String>,
    /// Which worktrees changed the same lines. This takes long if there are many, so `false` leaves it out.
    #[serde(default = "included")]
    #[param(default = true)]
    overlaps: bool,
    /// The size of each worktree. This takes long if there are many files, so `false` leaves it out.
    #[serde(default = "included")]
    #[param(default = true)]
    sizes: bool,
    /// How many lines the unmerged work adds and removes.
    #[serde(default)]
    lines: bool,
}

fn included() -> bool {
    true
}

/// Lists the worktrees, with their sizes and states, and which of them changed the same lines.
#[utoipa::path(get, path = "/v1/worktrees", tag = "worktrees", params(WorktreesQuery),
    responses((status = 200, description = "A page of worktrees", body = [Worktree]), BadQueryResponse, GuardResponses)
)]
async fn list_worktrees(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<WorktreesQuery>,
) -> Result<ListPage<Worktree>, HttpError> {
    let WorktreesQuery { limit, after, overlaps, sizes, lines } = query;
    let all = Box::pin(daemon.worktrees(WorktreeInspection { sizes, overlaps, lines })).await?;
    let query = ListQuery { limit, after };
    Ok(ListPage::from_complete(all, &query, |worktree| worktree.session_id.as_str())?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DiffQuery {
    /// Only the list of files, without the changes themselves.
    #[serde(default)]
    stat: bool,
}

/// Shows what a session changed, committed or not, since its worktree was made.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/diff", tag = "worktrees", params(SessionPath, DiffQuery),
    responses(
        (status = 200, description = "The changes", body = WorktreeDiff),
        (status = 409, description = "`no_worktree`, `worktree_changed` or `git_refused`", body = ErrorBody),
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

/// Merges a session's work into a branch, completely or not at all. Uncommitted changes are committed first.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/merge", tag = "worktrees",
    params(SessionPath, IdempotencyKeyHeader), request_body = Option<MergeRequest>,
    responses(
        (status = 200, description = "The result of the merge", body = MergeResult),
        (status = 409, description = "`merge_conflict` (with the `conflicts`: files and their hunks), `busy`, \
            `no_worktree`, `worktree_changed`, `git_refused` or `idempotency_conflict`; nothing was changed", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn merge(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    KeyedBody(key, OptionalJson(request)): KeyedBody<OptionalJson<Option<MergeRequest>>>,
) -> Result<Json<MergeResult>, HttpError> {
    let session = session_view(&daemon, &find_session(&daemon, &workspace, &id).await?)?;
    let merge = |_| async {
        let merged = Box::pin(daemon.merge_worktree(&session, request.unwrap_or_default())).await?;
        Ok((merged, ResponseRecording::NotWritten))
    };
    Ok(Json(run_once(&daemon, key, merge).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RemoveWorktreeQuery {
    /// Remove the worktree even if it has unmerged work. Commits stay on its branch.
    #[serde(default)]
    force: bool,
}

/// Removes the worktree of a closed session, if all its work is merged.
#[utoipa::path(delete, path = "/v1/workspaces/{w}/sessions/{s}/worktree", tag = "worktrees",
    params(SessionPath, RemoveWorktreeQuery),
    responses(
        (status = 200, description = "The removed worktree", body = RemovedWorktree),
        (status = 409, description = "`unmerged_work`, `busy`, `no_worktree`, `worktree_changed` or `git_refused`", body = ErrorBody),
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

/// Removes a worktree by the id of its session, for a session that was purged.
#[utoipa::path(delete, path = "/v1/worktrees/{s}", tag = "worktrees",
    params(("s" = String, Path, description = "The session that the worktree was made for"), RemoveWorktreeQuery),
    responses(
        (status = 200, description = "The removed worktree", body = RemovedWorktree),
        (status = 409, description = "`unmerged_work`, `busy`, `no_worktree`, `worktree_changed` or `git_refused`", body = ErrorBody),
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
