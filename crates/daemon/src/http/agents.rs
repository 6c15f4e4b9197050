//! The agents that can be named, what is wrong with manifests that do not count, and the projects that may bring their
//! own. An agent can neither trust nor distrust anything: see `kin`.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::State;
use qd_catalog::trust::TrustError;
use qd_protocol::api::{Agent, ManifestProblem, TrustRequest, TrustedProject};
use qd_protocol::error::ErrorBody;
use qd_protocol::{ApiError, ErrorCode, WorkspaceId};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse,
};
use super::extract::{KeyedBody, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::internal_error;
use super::list::{ListPage, ListQuery};
use crate::daemon::Daemon;
use crate::edge::{HttpError, Json};
use crate::workspaces::path_not_found;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(agents))
        .routes(routes!(problems))
        .routes(routes!(trusted, trust, distrust))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AgentsQuery {
    /// Also those that this project brings and that the user trusts.
    workspace: Option<WorkspaceId>,
    /// Whether each program that is here is asked for its version, which may take seconds.
    #[serde(default)]
    versions: bool,
    /// How many at most.
    limit: Option<usize>,
    /// Those after this one.
    after: Option<String>,
}

/// The agents that are known, and whether each can start here.
#[utoipa::path(get, path = "/v1/agents", tag = "daemon", params(AgentsQuery), responses(
    (status = 200, description = "All of them", body = [Agent]), BadQueryResponse, NotFoundResponse, GuardResponses,
))]
async fn agents(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<AgentsQuery>,
) -> Result<ListPage<Agent>, HttpError> {
    let AgentsQuery { workspace, versions, limit, after } = query;
    let project = workspace.map(|id| daemon.workspaces.get(&id)).transpose()?;
    // It reads files, and may wait for programs.
    let list = move || {
        let (agents, project) = (daemon.workers.agents(), project.as_ref().map(|place| place.path.as_path()));
        if versions { agents.list_with_versions(project) } else { agents.list(project) }
    };
    let list = tokio::task::spawn_blocking(list).await.map_err(|_| internal_error())?;
    Ok(ListPage::from_complete(list, &ListQuery { limit, after }, |agent| &agent.name)?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ProblemsQuery {
    /// Also those of this project.
    workspace: Option<WorkspaceId>,
}

/// Manifests that do not count, and why.
#[utoipa::path(get, path = "/v1/agents/problems", tag = "daemon", params(ProblemsQuery), responses(
    (status = 200, description = "All of them", body = [ManifestProblem]), BadQueryResponse, NotFoundResponse, GuardResponses,
))]
async fn problems(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ProblemsQuery>,
) -> Result<Json<Vec<ManifestProblem>>, HttpError> {
    let project = query.workspace.map(|id| daemon.workspaces.get(&id)).transpose()?;
    let list = move || {
        let project = project.as_ref().map(|place| place.path.as_path());
        let told = daemon.workers.agents().manifest_problems(project).into_iter();
        told.map(|it| ManifestProblem { path: it.path.display().to_string(), message: it.message }).collect()
    };
    Ok(Json(tokio::task::spawn_blocking(list).await.map_err(|_| internal_error())?))
}

/// The projects whose own agents count, as they were when that was said.
#[utoipa::path(get, path = "/v1/trust", tag = "daemon", responses(
    (status = 200, description = "All of them", body = [TrustedProject]), GuardResponses,
))]
async fn trusted(State(daemon): State<Arc<Daemon>>) -> Result<Json<Vec<TrustedProject>>, HttpError> {
    Ok(Json(run_blocking_trust(move || daemon.workers.agents().trusted_projects()).await?))
}

/// Trusts what a project brings, as it is now. Once it has changed, that has to be said again.
#[utoipa::path(post, path = "/v1/trust", tag = "daemon", params(IdempotencyKeyHeader), request_body = TrustRequest, responses(
    (status = 200, description = "It is trusted, with these files", body = TrustedProject),
    (status = 400, description = "`path_not_found`, or `invalid_value` if there is nothing to trust", body = ErrorBody),
    (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
    BadBodyResponses, GuardResponses,
))]
async fn trust(
    State(daemon): State<Arc<Daemon>>,
    KeyedBody(key, Json(request)): KeyedBody<Json<TrustRequest>>,
) -> Result<Json<TrustedProject>, HttpError> {
    let path = PathBuf::from(request.path);
    if !path.is_absolute() || !path.is_dir() {
        return Err(path_not_found(&path).into());
    }
    let trusting = Arc::clone(&daemon);
    let deed = |_| async {
        let trusted = run_blocking_trust(move || trusting.workers.agents().trust(&path)).await?;
        Ok((trusted, ResponseRecording::NotWritten))
    };
    Ok(Json(run_once(&daemon, key, deed).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DistrustQuery {
    /// The project's directory.
    path: String,
}

/// Trusts a project no longer. Agents that it brought and that live go on.
#[utoipa::path(delete, path = "/v1/trust", tag = "daemon", params(DistrustQuery), responses(
    (status = 200, description = "Those that are still trusted", body = [TrustedProject]), BadQueryResponse, GuardResponses,
))]
async fn distrust(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<DistrustQuery>,
) -> Result<Json<Vec<TrustedProject>>, HttpError> {
    let path = PathBuf::from(query.path);
    Ok(Json(run_blocking_trust(move || daemon.workers.agents().distrust(&path)).await?))
}

async fn run_blocking_trust<T: Send + 'static>(
    deed: impl FnOnce() -> Result<T, TrustError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(deed).await.map_err(|_| internal_error())?;
    done.map_err(|error| match error {
        TrustError::NothingToTrust(_) | TrustError::TooMuch(_) | TrustError::Unreadable(..) => {
            ApiError::new(ErrorCode::InvalidValue, error.to_string())
        }
        TrustError::Unwritable(..) | TrustError::Bad(..) => {
            ApiError::new(ErrorCode::StorageFailed, error.to_string())
        }
    })
}
