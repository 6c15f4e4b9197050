//! The daemon itself: health, version, metrics, workers, resolving shortened ids, blobs, and shutdown. Changes no
//! session.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use qd_protocol::ApiError;
use qd_protocol::api::{DaemonVersion, Health, ReferenceKind, ReferenceMatch, ShortIds, Worker};
use qd_protocol::error::ErrorBody;
use qd_protocol::limits::SHORT_IDS_MAX;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    self, BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse,
};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, ListQuery, page_limit};
use crate::daemon::{Daemon, blob_failed, read_failed};
use crate::edge::{HttpError, Json, OptionalJson, internal_error};
use crate::invalid_value;
use crate::metrics;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(healthz))
        .routes(routes!(version))
        .routes(routes!(get_metrics))
        .routes(routes!(openapi))
        .routes(routes!(workers))
        .routes(routes!(resolve))
        .routes(routes!(short_ids))
        .routes(routes!(blob))
        .routes(routes!(shutdown))
}

/// Shows that the daemon is alive.
#[utoipa::path(get, path = "/healthz", tag = "daemon", security(()), responses(
    (status = 200, description = "The daemon is alive", body = Health),
    (status = 403, description = "`host_not_allowed` or `origin_not_allowed`", body = ErrorBody),
))]
async fn healthz() -> Json<Health> {
    Json(Health { status: "ok".to_owned() })
}

/// Shows which daemon this is.
#[utoipa::path(get, path = "/v1/version", tag = "daemon", responses(
    (status = 200, description = "Version, process and home", body = DaemonVersion), GuardResponses,
))]
async fn version(State(daemon): State<Arc<Daemon>>) -> Json<DaemonVersion> {
    Json(DaemonVersion {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: "v1".to_owned(),
        pid: std::process::id(),
        home: daemon.home.path().display().to_string(),
        started_at: daemon.started_at,
    })
}

/// Metrics, as Prometheus text.
#[utoipa::path(get, path = "/metrics", operation_id = "metrics", tag = "daemon", responses(
    (status = 200, description = "Counters, gauges and the commit latency", body = String, content_type = "text/plain"),
    GuardResponses,
))]
async fn get_metrics(State(daemon): State<Arc<Daemon>>) -> Result<impl IntoResponse, HttpError> {
    let page = metrics::render_metrics(&daemon).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page))
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "daemon", responses(
    (status = 200, description = "OpenAPI 3.1", body = Object), GuardResponses,
))]
async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], api_document::openapi_document())
}

/// Lists the live workers, with the processes below them.
#[utoipa::path(get, path = "/v1/workers", tag = "daemon", params(ListQuery), responses(
    (status = 200, description = "The live workers", body = [Worker]), BadQueryResponse, GuardResponses,
))]
async fn workers(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<Worker>, HttpError> {
    // Blocking: it reads `/proc` for each process.
    let list = move || daemon.workers.list();
    let workers = tokio::task::spawn_blocking(list).await.map_err(|_| internal_error())?;
    Ok(ListPage::from_complete(workers, &query, |worker: &Worker| &worker.id)?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ResolveQuery {
    /// An id, the beginning of one with or without its prefix, or the title of a session.
    r#ref: String,
    /// The most matches to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
}

/// Finds what a shortened id or a title may refer to. An exact match comes first.
#[utoipa::path(get, path = "/v1/resolve", tag = "daemon", params(ResolveQuery), responses(
    (status = 200, description = "All matches; empty if there are none", body = [ReferenceMatch]), BadQueryResponse, GuardResponses,
))]
async fn resolve(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<ResolveQuery>,
) -> Result<Json<Vec<ReferenceMatch>>, HttpError> {
    let limit = page_limit(query.limit)?;
    if query.r#ref.is_empty() {
        return Err(invalid_value("`ref` must be an id, the beginning of one, or a title").into());
    }
    let mut found = daemon.journal.resolve(&query.r#ref, limit).await.map_err(read_failed)?;
    // What belongs to a removed workspace cannot be reached, so it is not a match.
    found.retain(|found| {
        daemon.workspaces.get(&found.workspace_id).is_ok()
            && caller.workspace().is_none_or(|own| *own == found.workspace_id)
    });
    Ok(Json(found))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ShortIdsQuery {
    /// The ids to shorten, separated by commas; at most 100.
    ids: String,
    /// The kinds among which a short id must be unique, separated by commas: `session`, `run`, `ask`, `fleet` or
    /// `workspace`.
    kinds: String,
}

/// Shortens ids: the shortest beginning of each that `GET /v1/resolve` takes for this id and for nothing else.
#[utoipa::path(get, path = "/v1/short-ids", tag = "daemon", params(ShortIdsQuery), responses(
    (status = 200, description = "A short id for each id", body = ShortIds), BadQueryResponse, GuardResponses,
))]
async fn short_ids(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ShortIdsQuery>,
) -> Result<Json<ShortIds>, HttpError> {
    let parse = |word: &str| {
        serde_json::from_value(word.into()).map_err(|_| {
            invalid_value(
                "`kinds` must be some of session, run, ask, fleet and workspace, separated by commas",
            )
        })
    };
    let kinds = query.kinds.split(',').map(parse).collect::<Result<Vec<ReferenceKind>, ApiError>>()?;
    let ids: Vec<String> = query.ids.split(',').filter(|id| !id.is_empty()).map(str::to_owned).collect();
    if ids.len() > SHORT_IDS_MAX {
        return Err(invalid_value(format!("`ids` must be at most {SHORT_IDS_MAX} ids")).into());
    }
    Ok(Json(ShortIds { ids: daemon.journal.short_ids(ids, kinds).await.map_err(read_failed)? }))
}

/// A text or file that was too large for its event.
#[utoipa::path(get, path = "/v1/blobs/{sha256}", tag = "daemon",
    params(("sha256" = String, Path, description = "The hash from the event")),
    responses(
        (status = 200, description = "The whole content", body = Vec<u8>, content_type = "application/octet-stream"),
        NotFoundResponse, GuardResponses,
    )
)]
async fn blob(
    State(daemon): State<Arc<Daemon>>,
    PathIds(sha256): PathIds<String>,
) -> Result<impl IntoResponse, HttpError> {
    let found = daemon.journal.blobs().get(&sha256).await.map_err(blob_failed)?;
    let bytes = found.ok_or_else(|| ApiError::not_found("blob", &sha256))?;
    // The content comes from an agent or a client: a browser must not guess its type and show it as ours.
    let headers =
        [(header::CONTENT_TYPE, "application/octet-stream"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    Ok((headers, bytes))
}

/// `POST /v1/shutdown`; the body may be absent.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ShutdownRequest {
    /// Also end the workers, and with them the agents and everything they started.
    #[serde(default)]
    workers: bool,
}

/// The shutdown has begun.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Stopping)]
struct ShutdownResponse {
    /// Always true.
    stopping: bool,
}

/// Stops the daemon: no more work is accepted, streams end, and what was begun is journalled.
#[utoipa::path(post, path = "/v1/shutdown", tag = "daemon", params(IdempotencyKeyHeader),
    request_body = Option<ShutdownRequest>,
    responses(
        (status = 202, description = "The daemon is stopping", body = ShutdownResponse),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
        BadBodyResponses, GuardResponses,
    )
)]
async fn shutdown(
    State(daemon): State<Arc<Daemon>>,
    KeyedBody(key, OptionalJson(request)): KeyedBody<OptionalJson<ShutdownRequest>>,
) -> Result<(StatusCode, Json<ShutdownResponse>), HttpError> {
    if request.workers {
        daemon.end_workers().await;
    }
    let response = run_once(&daemon, key, |_| async {
        Ok((ShutdownResponse { stopping: true }, ResponseRecording::NotWritten))
    })
    .await?;
    daemon.stop();
    Ok((StatusCode::ACCEPTED, Json(response)))
}
