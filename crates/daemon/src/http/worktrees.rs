//! Git worktrees of sessions: listed, shown, merged, removed. What each does is in `crate::worktrees`.

use std::sync::Arc;

use axum::extract::State;
use qd_protocol::error::ErrorBody;
use qd_protocol::worktree::{Diff, MergeRequest, Merged, RemovedWorktree, Worktree};
use qd_protocol::{SessionId, WorkspaceId};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::describe::{BadBody, BadQuery, Guarded, InSession, KeyHeader, Missing};
use super::extract::{Ids, Keyed, Query};
use super::list::{List, ListQuery};
use super::once::{Kept, once};
use super::sessions::{find, view};
use crate::daemon::Daemon;
use crate::edge::{Json, OptionalJson, Refusal};

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
    responses((status = 200, description = "A page of them", body = [Worktree]), BadQuery, Guarded)
)]
async fn list_worktrees(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ListQuery>,
) -> Result<List<Worktree>, Refusal> {
    let all = Box::pin(daemon.worktrees()).await?;
    Ok(List::slice(all, &query, |one| one.session_id.as_str())?)
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
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/diff", tag = "worktrees", params(InSession, DiffQuery),
    responses(
        (status = 200, description = "The changes", body = Diff),
        (status = 409, description = "`no_worktree` or `git_refused`", body = ErrorBody),
        BadQuery, Missing, Guarded,
    )
)]
async fn show_diff(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, SessionId)>,
    Query(query): Query<DiffQuery>,
) -> Result<Json<Diff>, Refusal> {
    let session = view(&daemon, &find(&daemon, &workspace, &id).await?)?;
    Ok(Json(daemon.worktree_diff(&session, !query.stat).await?))
}

/// Merges what a session did into a branch: all of it, or nothing. What it had not committed is committed first.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/merge", tag = "worktrees",
    params(InSession, KeyHeader), request_body = Option<MergeRequest>,
    responses(
        (status = 200, description = "What was done", body = Merged),
        (status = 409, description = "`merge_conflict` (with the `conflicts`: files and their hunks), `busy`, \
            `no_worktree`, `git_refused` or `idempotency_conflict`; nothing was changed", body = ErrorBody),
        BadBody, Missing, Guarded,
    )
)]
async fn merge(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, SessionId)>,
    Keyed(key, OptionalJson(request)): Keyed<OptionalJson<Option<MergeRequest>>>,
) -> Result<Json<Merged>, Refusal> {
    let session = view(&daemon, &find(&daemon, &workspace, &id).await?)?;
    let deed = |_| async {
        let merged = Box::pin(daemon.merge_worktree(&session, request.unwrap_or_default())).await?;
        Ok((merged, Kept::NotYet))
    };
    Ok(Json(once(&daemon, key, deed).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RemoveQuery {
    /// Whether it goes also with work that is not merged. What is committed stays on its branch.
    #[serde(default)]
    force: bool,
}

/// Removes the worktree of a closed session, if everything in it is merged.
#[utoipa::path(delete, path = "/v1/workspaces/{w}/sessions/{s}/worktree", tag = "worktrees",
    params(InSession, RemoveQuery),
    responses(
        (status = 200, description = "It is gone", body = RemovedWorktree),
        (status = 409, description = "`unmerged_work`, `busy`, `no_worktree` or `git_refused`", body = ErrorBody),
        BadQuery, Missing, Guarded,
    )
)]
async fn remove_worktree(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, SessionId)>,
    Query(query): Query<RemoveQuery>,
) -> Result<Json<RemovedWorktree>, Refusal> {
    find(&daemon, &workspace, &id).await?;
    Ok(Json(daemon.remove_worktree(&id, query.force).await?))
}

/// The same by its name alone, for one whose session is purged.
#[utoipa::path(delete, path = "/v1/worktrees/{s}", tag = "worktrees",
    params(("s" = String, Path, description = "The session that it was made for"), RemoveQuery),
    responses(
        (status = 200, description = "It is gone", body = RemovedWorktree),
        (status = 409, description = "`unmerged_work`, `busy`, `no_worktree` or `git_refused`", body = ErrorBody),
        BadQuery, Missing, Guarded,
    )
)]
async fn remove_any_worktree(
    State(daemon): State<Arc<Daemon>>,
    Ids(id): Ids<SessionId>,
    Query(query): Query<RemoveQuery>,
) -> Result<Json<RemovedWorktree>, Refusal> {
    Ok(Json(daemon.remove_worktree(&id, query.force).await?))
}
