//! Fleets: start, list, show and cancel them. The fleet file is parsed in `qd-fleetfile`; the fleet's own machine
//! decides the routing.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Extension, FromRequest, Request, State};
use axum::http::{StatusCode, header};
use qd_core::fleet::FleetCommand;
use qd_fleetfile::FleetFileProblem;
use qd_journal::{FleetFilter, FleetRow};
use qd_protocol::api::{CancelResponse, NewFleet};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::EmptyEventData;
use qd_protocol::fleet::{Fleet, FleetSpec};
use qd_protocol::{ApiError, ErrorCode, FleetId, WorkspaceId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse, WorkspacePath,
};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, ListQuery, page_limit, parse_after};
use crate::daemon::{Daemon, read_failed};
use crate::edge::{ConnectionPeer, HttpError, Json, OptionalJson, internal_error, read_whole_body};
use crate::fleets::{FleetActorReply, FleetEnvironment};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list_fleets, start_fleet))
        .routes(routes!(check_fleet))
        .routes(routes!(get_fleet))
        .routes(routes!(cancel_fleet))
}

/// A fleet file, or JSON that contains one.
#[derive(Debug)]
struct FleetRequest(NewFleet);

impl<S: Send + Sync> FromRequest<S> for FleetRequest {
    type Rejection = HttpError;

    async fn from_request(request: Request, state: &S) -> Result<Self, HttpError> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        if kind.is_some_and(|kind| kind.trim().to_ascii_lowercase().starts_with("application/json")) {
            let Json(new) = Json::<NewFleet>::from_request(request, state).await?;
            return Ok(Self(new));
        }
        let body: Bytes = read_whole_body(request.into_body()).await?;
        let text = String::from_utf8(body.into())
            .map_err(|_| ApiError::new(ErrorCode::InvalidRequest, "a fleet file must be text in UTF-8"))?;
        let (env, programs) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self(NewFleet { spec: text.into(), task: None, env, programs }))
    }
}

/// Starts a fleet. Everything is checked before anything starts.
#[utoipa::path(post, path = "/v1/workspaces/{w}/fleets", tag = "fleets", params(WorkspacePath, IdempotencyKeyHeader),
    request_body(content(("application/yaml"), (NewFleet = "application/json"))),
    responses(
        (status = 201, description = "The fleet", body = Fleet),
        BadBodyResponses, NotFoundResponse, GuardResponses,
        (status = 400, description = "`invalid_fleet` (with `line`, `column`, `key` and `nearest` in the details), \
            `unknown_agent`, `unsupported_setting`, `invalid_request` or `invalid_value`", body = ErrorBody),
        (status = 409, description = "`agent_unavailable` (with how to install it), `sandbox_unavailable` (with what is \
            missing) or `idempotency_conflict`",
            body = ErrorBody),
    )
)]
async fn start_fleet(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(workspace): PathIds<WorkspaceId>,
    peer: Option<Extension<ConnectionPeer>>,
    KeyedBody(key, FleetRequest(new)): KeyedBody<FleetRequest>,
) -> Result<(StatusCode, Json<Fleet>), HttpError> {
    check_programs(&new, peer.as_ref())?;
    let entry = daemon.workspaces.get(&workspace)?;
    let (text, spec) = read_spec(&new)?;
    let start = |key| async {
        let given = FleetEnvironment { env: &new.env, programs: &new.programs };
        let started = Box::pin(daemon.start_fleet(&entry, spec, given, &caller.actor, key)).await;
        Ok((started.map_err(|error| locate(&text, error))?, ResponseRecording::WrittenWithEffect))
    };
    Ok((StatusCode::CREATED, Json(run_once(&daemon, key, start).await?)))
}

/// A fleet that could be started.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
struct FleetCheck {
    /// The names of its sessions.
    sessions: Vec<String>,
}

/// Checks a fleet as if it were started: its file, its agents and their settings, and the branch of its worktrees.
#[utoipa::path(post, path = "/v1/workspaces/{w}/fleets/check", tag = "fleets", params(WorkspacePath, IdempotencyKeyHeader),
    request_body(content(("application/yaml"), (NewFleet = "application/json"))),
    responses(
        (status = 200, description = "It could be started", body = FleetCheck),
        BadBodyResponses, NotFoundResponse, GuardResponses,
        (status = 400, description = "As for starting it", body = ErrorBody),
        (status = 409, description = "As for starting it", body = ErrorBody),
    )
)]
async fn check_fleet(
    State(daemon): State<Arc<Daemon>>,
    PathIds(workspace): PathIds<WorkspaceId>,
    peer: Option<Extension<ConnectionPeer>>,
    KeyedBody(key, FleetRequest(new)): KeyedBody<FleetRequest>,
) -> Result<Json<FleetCheck>, HttpError> {
    check_programs(&new, peer.as_ref())?;
    let entry = daemon.workspaces.get(&workspace)?;
    let (text, spec) = read_spec(&new)?;
    let check = |_| async {
        let given = FleetEnvironment { env: &new.env, programs: &new.programs };
        Box::pin(daemon.check_fleet(&entry, &spec, given)).await.map_err(|error| locate(&text, error))?;
        let sessions = spec.sessions.into_keys().collect();
        Ok((FleetCheck { sessions }, ResponseRecording::NotWritten))
    };
    Ok(Json(run_once(&daemon, key, check).await?))
}

/// Whoever may choose programs can run anything as this user. Over the socket that is the user anyway.
fn check_programs(new: &NewFleet, peer: Option<&Extension<ConnectionPeer>>) -> Result<(), ApiError> {
    if !new.programs.is_empty() && !matches!(peer, Some(Extension(ConnectionPeer::Unix { .. }))) {
        let message = "`programs` is only accepted over the daemon's socket; leave it out";
        return Err(ApiError::new(ErrorCode::InvalidValue, message));
    }
    Ok(())
}

/// The text of a fleet, and what it declares.
fn read_spec(new: &NewFleet) -> Result<(String, FleetSpec), ApiError> {
    let text = match &new.spec {
        serde_json::Value::String(text) => text.clone(),
        object => object.to_string(),
    };
    let spec = qd_fleetfile::parse_fleet_file(&text, new.task.as_deref()).map_err(invalid_fleet)?;
    Ok((text, spec))
}

/// Adds the line and column of the setting that a problem is about.
fn locate(text: &str, error: ApiError) -> ApiError {
    let detail = |name: &str| error.details.get(name).and_then(|value| value.as_str());
    let setting = detail("setting").unwrap_or("agent");
    let position =
        detail("session").and_then(|session| qd_fleetfile::position_of(text, Some(session), setting));
    match position {
        Some(at) => error.with_detail("line", at.line).with_detail("column", at.column),
        None => error,
    }
}

fn invalid_fleet(problem: FleetFileProblem) -> ApiError {
    let message = problem.to_string();
    let FleetFileProblem { position, key, suggestion, .. } = problem;
    ApiError::new(ErrorCode::InvalidFleet, message)
        .with_detail("line", position.line)
        .with_detail("column", position.column)
        .with_detail("key", key)
        .with_detail("nearest", suggestion)
}

/// Lists the fleets of a workspace, oldest first.
#[utoipa::path(get, path = "/v1/workspaces/{w}/fleets", tag = "fleets", params(WorkspacePath, ListQuery),
    responses((status = 200, description = "A page of fleets", body = [Fleet]), BadQueryResponse, NotFoundResponse, GuardResponses)
)]
async fn list_fleets(
    State(daemon): State<Arc<Daemon>>,
    PathIds(workspace): PathIds<WorkspaceId>,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<Fleet>, HttpError> {
    let entry = daemon.workspaces.get(&workspace)?;
    let (limit, after) = (page_limit(query.limit)?, parse_after(query.after.as_deref(), FleetId::parse)?);
    let filter = FleetFilter { workspace: Some(entry.key), live_only: false };
    // One row more than requested shows whether there are others.
    let rows = daemon.journal.fleets(filter, after.as_ref(), limit + 1).await.map_err(read_failed)?;
    let mut fleets = Vec::with_capacity(rows.len());
    for row in &rows {
        fleets.push(daemon.view_fleet(row).await?);
    }
    Ok(ListPage::from_fetched(fleets, limit, |fleet| fleet.id.as_str()))
}

/// Shows one fleet.
#[utoipa::path(get, path = "/v1/workspaces/{w}/fleets/{f}", tag = "fleets",
    params(("w" = String, Path, description = "The workspace"), ("f" = String, Path, description = "The fleet")),
    responses((status = 200, description = "The fleet", body = Fleet), NotFoundResponse, GuardResponses)
)]
async fn get_fleet(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, FleetId)>,
) -> Result<Json<Fleet>, HttpError> {
    Ok(Json(daemon.view_fleet(&find_fleet(&daemon, &workspace, &id).await?).await?))
}

async fn find_fleet(daemon: &Daemon, workspace: &WorkspaceId, id: &FleetId) -> Result<FleetRow, ApiError> {
    let entry = daemon.workspaces.get(workspace)?;
    let row = daemon.journal.fleet(id).await.map_err(read_failed)?;
    row.filter(|row| row.workspace == entry.key).ok_or_else(|| ApiError::not_found("fleet", id))
}

/// Cancels a fleet: nothing is routed any more, and its active runs are stopped.
#[utoipa::path(post, path = "/v1/workspaces/{w}/fleets/{f}/cancel", tag = "fleets",
    params(
        ("w" = String, Path, description = "The workspace"),
        ("f" = String, Path, description = "The fleet"),
        IdempotencyKeyHeader,
    ),
    responses(
        (status = 200, description = "The cancelled runs, once journalled", body = CancelResponse),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn cancel_fleet(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id)): PathIds<(WorkspaceId, FleetId)>,
    KeyedBody(key, OptionalJson(EmptyEventData {})): KeyedBody<OptionalJson<EmptyEventData>>,
) -> Result<Json<CancelResponse>, HttpError> {
    let fleet = daemon.fleet_in_workspace(&workspace, &id).await?;
    let cancel = |_| async {
        match daemon.send_fleet_command(&fleet, &caller.actor, FleetCommand::Cancel).await? {
            FleetActorReply::Cancelled(cancelled) => {
                Ok((CancelResponse { idle: cancelled.is_empty(), cancelled }, ResponseRecording::NotWritten))
            }
            FleetActorReply::Answered(_) => Err(internal_error()),
        }
    };
    Ok(Json(run_once(&daemon, key, cancel).await?))
}
