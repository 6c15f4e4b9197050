//! The known agents, problems of manifests that cannot be used, and the projects trusted to bring their own agents. An
//! agent itself can neither trust nor distrust anything: see `route_access`.

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
use super::list::{ListPage, ListQuery};
use crate::daemon::Daemon;
use crate::edge::{HttpError, Json, internal_error};
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
    /// Include the agents of this project, if it is trusted.
    workspace: Option<WorkspaceId>,
    /// Ask each installed program for its version, which may take seconds.
    #[serde(default)]
    versions: bool,
    /// The most agents to return.
    limit: Option<usize>,
    /// Continue after this agent.
    after: Option<String>,
}

/// Lists the known agents, and whether each can start here.
#[utoipa::path(get, path = "/v1/agents", tag = "daemon", params(AgentsQuery), responses(
    (status = 200, description = "The known agents", body = [Agent]), BadQueryResponse, NotFoundResponse, GuardResponses,
))]
async fn agents(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<AgentsQuery>,
) -> Result<ListPage<Agent>, HttpError> {
    let AgentsQuery { workspace, versions, limit, after } = query;
    let project = workspace.map(|id| daemon.workspaces.get(&id)).transpose()?;
    // Blocking: it reads files, and may wait for programs.
    let list = move || {
        let (agents, project) =
            (daemon.workers.agents(), project.as_ref().map(|workspace| workspace.path.as_path()));
        if versions { agents.list_with_versions(project) } else { agents.list(project) }
    };
    let list = tokio::task::spawn_blocking(list).await.map_err(|_| internal_error())?;
    Ok(ListPage::from_complete(list, &ListQuery { limit, after }, |agent| &agent.name)?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ProblemsQuery {
    /// Include the manifests of this project.
    workspace: Option<WorkspaceId>,
}

/// Lists the manifests that cannot be used, and why.
#[utoipa::path(get, path = "/v1/agents/problems", tag = "daemon", params(ProblemsQuery), responses(
    (status = 200, description = "The problems", body = [ManifestProblem]), BadQueryResponse, NotFoundResponse, GuardResponses,
))]
async fn problems(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ProblemsQuery>,
) -> Result<Json<Vec<ManifestProblem>>, HttpError> {
    let project = query.workspace.map(|id| daemon.workspaces.get(&id)).transpose()?;
    let list = move || {
        let project = project.as_ref().map(|workspace| workspace.path.as_path());
        let problems = daemon.workers.agents().manifest_problems(project).into_iter();
        problems
            .map(|problem| ManifestProblem {
                path: problem.path.display().to_string(),
                message: problem.message,
            })
            .collect()
    };
    Ok(Json(tokio::task::spawn_blocking(list).await.map_err(|_| internal_error())?))
}

/// Lists the trusted projects. Each is trusted at the content it had when it was trusted.
#[utoipa::path(get, path = "/v1/trust", tag = "daemon", responses(
    (status = 200, description = "The trusted projects", body = [TrustedProject]), GuardResponses,
))]
async fn trusted(State(daemon): State<Arc<Daemon>>) -> Result<Json<Vec<TrustedProject>>, HttpError> {
    Ok(Json(run_blocking_trust(move || daemon.workers.agents().trusted_projects()).await?))
}

/// Trusts a project's agents and hooks at their current content. If they change, they must be trusted again.
#[utoipa::path(post, path = "/v1/trust", tag = "daemon", params(IdempotencyKeyHeader), request_body = TrustRequest, responses(
    (status = 200, description = "The trusted project, with the trusted files", body = TrustedProject),
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
    let daemon_for_task = Arc::clone(&daemon);
    let trust_project = |_| async {
        let trusted = run_blocking_trust(move || daemon_for_task.workers.agents().trust(&path)).await?;
        Ok((trusted, ResponseRecording::NotWritten))
    };
    Ok(Json(run_once(&daemon, key, trust_project).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DistrustQuery {
    /// The project's directory.
    path: String,
}

/// Stops trusting a project. Its agents that are running go on.
#[utoipa::path(delete, path = "/v1/trust", tag = "daemon", params(DistrustQuery), responses(
    (status = 200, description = "The projects that are still trusted", body = [TrustedProject]), BadQueryResponse, GuardResponses,
))]
async fn distrust(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<DistrustQuery>,
) -> Result<Json<Vec<TrustedProject>>, HttpError> {
    let path = PathBuf::from(query.path);
    Ok(Json(run_blocking_trust(move || daemon.workers.agents().distrust(&path)).await?))
}

async fn run_blocking_trust<T: Send + 'static>(
    operation: impl FnOnce() -> Result<T, TrustError> + Send + 'static,
) -> Result<T, ApiError> {
    let result = tokio::task::spawn_blocking(operation).await.map_err(|_| internal_error())?;
    result.map_err(|error| match error {
        TrustError::NothingToTrust(_) | TrustError::TooMuch(_) | TrustError::Unreadable(..) => {
            ApiError::new(ErrorCode::InvalidValue, error.to_string())
        }
        TrustError::Unwritable(..) | TrustError::Bad(..) => {
            ApiError::caused_by(ErrorCode::StorageFailed, error)
        }
    })
}
