//! Fleets: starting, listing, showing and cancelling them. What a file may say is read in `qd-fleetfile`; what follows
//! on what is the fleet's own business.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request, State};
use axum::http::{StatusCode, header};
use qd_core::fleet::Command;
use qd_fleetfile::Problem;
use qd_journal::{FleetFilter, FleetRow};
use qd_protocol::api::{Cancelled, NewFleet};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::Empty;
use qd_protocol::fleet::Fleet;
use qd_protocol::{ApiError, Code, FleetId, WorkspaceId};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::describe::{BadBody, BadQuery, Guarded, InWorkspace, KeyHeader, Missing};
use super::extract::{Ids, Keyed, Query};
use super::fault;
use super::list::{List, ListQuery, after, limit};
use super::once::{Kept, once};
use crate::daemon::{Daemon, read_failed};
use crate::edge::{Json, OptionalJson, Refusal, read_whole};
use crate::fleets::Answer;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list_fleets, start_fleet))
        .routes(routes!(get_fleet))
        .routes(routes!(cancel_fleet))
}

/// A fleet's file, or JSON with it.
#[derive(Debug)]
struct File(NewFleet);

impl<S: Send + Sync> FromRequest<S> for File {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        if kind.is_some_and(|kind| kind.trim().to_ascii_lowercase().starts_with("application/json")) {
            let Json(new) = Json::<NewFleet>::from_request(request, state).await?;
            return Ok(Self(new));
        }
        let body: Bytes = read_whole(request.into_body()).await?;
        let text = String::from_utf8(body.into())
            .map_err(|_| ApiError::new(Code::InvalidRequest, "a fleet's file is text in UTF-8"))?;
        Ok(Self(NewFleet { spec: text.into(), task: None, env: BTreeMap::new() }))
    }
}

/// Starts a fleet: everything is checked before anything starts.
#[utoipa::path(post, path = "/v1/workspaces/{w}/fleets", tag = "fleets", params(InWorkspace, KeyHeader),
    request_body(content(("application/yaml"), (NewFleet = "application/json"))),
    responses(
        (status = 201, description = "The fleet", body = Fleet),
        BadBody, Missing, Guarded,
        (status = 400, description = "`invalid_fleet` (with `line`, `column`, `key` and `nearest` in the details), \
            `unknown_agent`, `unsupported_setting`, `invalid_request` or `invalid_value`", body = ErrorBody),
        (status = 409, description = "`agent_unavailable` (with how to install it) or `idempotency_conflict`",
            body = ErrorBody),
    )
)]
async fn start_fleet(
    State(daemon): State<Arc<Daemon>>,
    Ids(workspace): Ids<WorkspaceId>,
    Keyed(key, File(new)): Keyed<File>,
) -> Result<(StatusCode, Json<Fleet>), Refusal> {
    let place = daemon.places.get(&workspace)?;
    let NewFleet { spec, task, env } = new;
    let text = match spec {
        serde_json::Value::String(text) => text,
        object => object.to_string(),
    };
    let spec = qd_fleetfile::read(&text, task.as_deref()).map_err(refused)?;
    let deed = |key| async {
        let started = Box::pin(daemon.start_fleet(&place, spec, &env, key)).await?;
        Ok((started, Kept::WithEffect))
    };
    Ok((StatusCode::CREATED, Json(once(&daemon, key, deed).await?)))
}

fn refused(problem: Problem) -> ApiError {
    let message = problem.to_string();
    let Problem { place, key, nearest, .. } = problem;
    ApiError::new(Code::InvalidFleet, message)
        .with("line", place.line)
        .with("column", place.column)
        .with("key", key)
        .with("nearest", nearest)
}

/// The fleets of a workspace, the oldest first.
#[utoipa::path(get, path = "/v1/workspaces/{w}/fleets", tag = "fleets", params(InWorkspace, ListQuery),
    responses((status = 200, description = "A page of them", body = [Fleet]), BadQuery, Missing, Guarded)
)]
async fn list_fleets(
    State(daemon): State<Arc<Daemon>>,
    Ids(workspace): Ids<WorkspaceId>,
    Query(query): Query<ListQuery>,
) -> Result<List<Fleet>, Refusal> {
    let place = daemon.places.get(&workspace)?;
    let (limit, after) = (limit(query.limit)?, after(query.after.as_deref(), FleetId::parse)?);
    let filter = FleetFilter { workspace: Some(place.key), live_only: false };
    // One more than asked for tells whether there are others.
    let rows = daemon.journal.fleets(filter, after.as_ref(), limit + 1).await.map_err(read_failed)?;
    let mut found = Vec::with_capacity(rows.len());
    for row in &rows {
        found.push(daemon.view_fleet(row).await?);
    }
    Ok(List::cut(found, limit, |fleet| fleet.id.as_str()))
}

/// One fleet.
#[utoipa::path(get, path = "/v1/workspaces/{w}/fleets/{f}", tag = "fleets",
    params(("w" = String, Path, description = "The workspace"), ("f" = String, Path, description = "The fleet")),
    responses((status = 200, description = "It", body = Fleet), Missing, Guarded)
)]
async fn get_fleet(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, FleetId)>,
) -> Result<Json<Fleet>, Refusal> {
    Ok(Json(daemon.view_fleet(&find(&daemon, &workspace, &id).await?).await?))
}

async fn find(daemon: &Daemon, workspace: &WorkspaceId, id: &FleetId) -> Result<FleetRow, ApiError> {
    let place = daemon.places.get(workspace)?;
    let row = daemon.journal.fleet(id).await.map_err(read_failed)?;
    row.filter(|row| row.workspace == place.key).ok_or_else(|| ApiError::not_found("fleet", id))
}

/// Cancels a fleet: nothing is routed any more, and what runs is stopped.
#[utoipa::path(post, path = "/v1/workspaces/{w}/fleets/{f}/cancel", tag = "fleets",
    params(
        ("w" = String, Path, description = "The workspace"),
        ("f" = String, Path, description = "The fleet"),
        KeyHeader,
    ),
    responses(
        (status = 200, description = "What it hit, once journalled", body = Cancelled),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
        BadBody, Missing, Guarded,
    )
)]
async fn cancel_fleet(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, FleetId)>,
    Keyed(key, OptionalJson(Empty {})): Keyed<OptionalJson<Empty>>,
) -> Result<Json<Cancelled>, Refusal> {
    let fleet = daemon.fleet(&workspace, &id).await?;
    let deed = |_| async {
        match daemon.command_fleet(&fleet, Command::Cancel).await? {
            Answer::Cancelled(hit) => Ok((Cancelled { idle: hit.is_empty(), cancelled: hit }, Kept::NotYet)),
            Answer::Answered(_) => Err(fault()),
        }
    };
    Ok(Json(once(&daemon, key, deed).await?))
}
