//! Other machines: the tokens with which their processes join, the list of joined processes, and the two routes that
//! they connect to. The guard admits worker tokens here and nowhere else. The protocols of the connections are in
//! `crate::workers`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use qd_home::HomeError;
use qd_protocol::api::{CreatedWorkerToken, JoinedWorker, NewWorkerToken, WorkerToken};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::{EventBody, TokenCreated, TokenRevoked};
use qd_protocol::frame::join::SessionWorker;
use qd_protocol::frame::v1::SUBPROTOCOL;
use qd_protocol::limits::TITLE_MAX;
use qd_protocol::{ApiError, ErrorCode, Millis, SessionId, TokenId, WorkerId};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse,
};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, ListQuery};
use crate::actor::IdempotencyKey;
use crate::daemon::{Daemon, stopping_error};
use crate::edge::{HttpError, Json, OptionalJson, WebSocketRequest, internal_error};
use crate::invalid_value;
use crate::workers::{OFFERS_MAX, WorkerTokenStore, is_label};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list_worker_tokens, make_token))
        .routes(routes!(revoke_token))
        .routes(routes!(list_joined_workers))
        .routes(routes!(join))
        .routes(routes!(link))
}

/// Lists the worker tokens. The tokens themselves are never shown again.
#[utoipa::path(get, path = "/v1/workers/tokens", operation_id = "worker_tokens", tag = "workers", params(ListQuery),
    responses(
        (status = 200, description = "All worker tokens, oldest first", body = [WorkerToken]), BadQueryResponse, GuardResponses,
    )
)]
async fn list_worker_tokens(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<WorkerToken>, HttpError> {
    Ok(ListPage::from_complete(daemon.workers.worker_tokens().list(), &query, |token| token.id.as_str())?)
}

/// Creates a token with which a process on another machine can join, and do nothing else.
#[utoipa::path(post, path = "/v1/workers/tokens", operation_id = "make_worker_token", tag = "workers",
    params(IdempotencyKeyHeader), request_body = Option<NewWorkerToken>,
    responses(
        (status = 201, description = "The token, which is shown only once, and the address to join", body = CreatedWorkerToken),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
        BadBodyResponses, GuardResponses,
    )
)]
async fn make_token(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    KeyedBody(key, OptionalJson(new)): KeyedBody<OptionalJson<NewWorkerToken>>,
) -> Result<(StatusCode, Json<CreatedWorkerToken>), HttpError> {
    check_new_token(&new)?;
    // The response stored under the key leaves out the token, which must not be in the journal.
    let create = |key: Option<IdempotencyKey>| async {
        let request = key.as_ref().map(IdempotencyKey::digest);
        let token = with_tokens(&daemon, move |tokens| tokens.create(new, request)).await?;
        let WorkerToken { id, name, labels, agents, .. } = token.clone();
        let body = EventBody::TokenCreated(TokenCreated { labels, agents, ..TokenCreated::new(id, name) });
        let record = key.map(|key| key.into_record(&token)).transpose()?;
        daemon.append_daemon_event(&body, &caller.actor, Millis::now(), Vec::new(), record).await?;
        Ok((token, ResponseRecording::WrittenWithEffect))
    };
    let WorkerToken { id, name, created_at, labels, agents, .. } = run_once(&daemon, key, create).await?;
    let address = daemon.workers.join_address().cloned();
    let (url, fingerprint) = address.map_or((None, None), |address| (Some(address.url), address.fingerprint));
    let token = daemon.workers.worker_tokens().derive_token(&id);
    let created = CreatedWorkerToken { id, name, created_at, labels, agents, token, url, fingerprint };
    Ok((StatusCode::CREATED, Json(created)))
}

fn check_new_token(new: &NewWorkerToken) -> Result<(), ApiError> {
    let NewWorkerToken { name, labels, agents } = new;
    let is_line = |name: &str| (1..=TITLE_MAX).contains(&name.len()) && !name.chars().any(char::is_control);
    if name.as_deref().is_some_and(|name| !is_line(name)) {
        return Err(invalid_value(format!("`name` must be 1 to {TITLE_MAX} bytes on one line")));
    }
    if labels.len() > OFFERS_MAX || !labels.iter().all(|label| is_label(label)) {
        return Err(invalid_value(format!(
            "`labels` must be at most {OFFERS_MAX}, each of 1 to 64 characters of A-Za-z0-9_.-"
        )));
    }
    if agents.len() > OFFERS_MAX || !agents.iter().all(|agent| is_line(agent)) {
        return Err(invalid_value(format!("`agents` must be at most {OFFERS_MAX} names, each on one line")));
    }
    Ok(())
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `PathIds` takes")]
struct WorkerTokenPath {
    /// The token's id.
    id: String,
}

/// Revokes a token: processes that joined with it are disconnected at once, and the sessions they held are lost.
#[utoipa::path(delete, path = "/v1/workers/tokens/{id}", operation_id = "revoke_worker_token", tag = "workers",
    params(WorkerTokenPath), responses((status = 204, description = "The token is revoked"), NotFoundResponse, GuardResponses)
)]
async fn revoke_token(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(id): PathIds<TokenId>,
) -> Result<StatusCode, HttpError> {
    let name = id.clone();
    let revoked = with_tokens(&daemon, move |tokens| tokens.revoke(&name)).await?;
    let revoked = revoked.ok_or_else(|| ApiError::not_found("worker token", &id))?;
    daemon.workers.joined().expel(&id);
    let body = EventBody::TokenRevoked(TokenRevoked { token_id: id, name: revoked.name });
    daemon.append_daemon_event(&body, &caller.actor, Millis::now(), Vec::new(), None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists the processes on other machines that have joined, with or without sessions.
#[utoipa::path(get, path = "/v1/workers/joined", operation_id = "joined_workers", tag = "workers", params(ListQuery),
    responses(
        (status = 200, description = "All joined processes, by name", body = [JoinedWorker]), BadQueryResponse, GuardResponses,
    )
)]
async fn list_joined_workers(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<JoinedWorker>, HttpError> {
    Ok(ListPage::from_complete(daemon.workers.joined().list(), &query, |joined| &joined.name)?)
}

/// Joins a process on another machine. Takes a WebSocket of the subprotocol `quarterdeck.v1`, and a worker token.
#[utoipa::path(get, path = "/v1/workers/join", operation_id = "join", tag = "workers", responses(
    (status = 101, description = "The control connection of the process"),
    (status = 400, description = "`invalid_request`: not an upgrade, or not to this subprotocol", body = ErrorBody),
    GuardResponses,
))]
async fn join(
    State(daemon): State<Arc<Daemon>>,
    token: Option<Extension<TokenId>>,
    upgrade: WebSocketRequest,
) -> Result<Response, HttpError> {
    let token = require_worker_token(token)?;
    let upgrade = upgrade.require_subprotocol(SUBPROTOCOL)?;
    if daemon.is_stopping() {
        return Err(stopping_error().into());
    }
    let (response, connection) = upgrade.accept(SUBPROTOCOL);
    let task = Arc::clone(&daemon);
    daemon.spawn(async move {
        let Some(connection) = connection.await else { return };
        let used = token.clone();
        if let Err(error) = with_tokens(&task, move |tokens| tokens.mark_used(&used)).await {
            tracing::warn!(%error, "could not store when a worker token was last used");
        }
        task.workers.joined().serve_control(connection, token, task.stop_signal()).await;
    });
    Ok(response)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LinkQuery {
    /// The session.
    #[param(value_type = String)]
    session: SessionId,
    /// The session's worker, as the control connection named it.
    #[param(value_type = String)]
    worker: WorkerId,
}

/// Connects a joined process for one session, when the control connection has asked it to dial.
#[utoipa::path(get, path = "/v1/workers/link", operation_id = "link", tag = "workers", params(LinkQuery), responses(
    (status = 101, description = "The connection of this session's agent"),
    (status = 400, description = "`invalid_request`: not an upgrade, or not to this subprotocol", body = ErrorBody),
    (status = 404, description = "`not_found`: this process was not asked to dial for this worker", body = ErrorBody),
    GuardResponses,
))]
async fn link(
    State(daemon): State<Arc<Daemon>>,
    token: Option<Extension<TokenId>>,
    Query(query): Query<LinkQuery>,
    upgrade: WebSocketRequest,
) -> Result<Response, HttpError> {
    let token = require_worker_token(token)?;
    let upgrade = upgrade.require_subprotocol(SUBPROTOCOL)?;
    let worker = SessionWorker { session: query.session, worker: query.worker };
    daemon.workers.joined().check_expected(&worker, &token)?;
    let (response, connection) = upgrade.accept(SUBPROTOCOL);
    let task = Arc::clone(&daemon);
    daemon.spawn(async move {
        if let Some(connection) = connection.await {
            task.workers.joined().accept_dial(&worker, connection);
        }
    });
    Ok(response)
}

/// The daemon's own token is not enough here: a worker must be a client that can be revoked.
fn require_worker_token(token: Option<Extension<TokenId>>) -> Result<TokenId, ApiError> {
    let missing = || {
        let message = "joining needs a worker token, over TCP; `qd workers token` creates one";
        ApiError::new(ErrorCode::Unauthorized, message)
    };
    token.map(|Extension(token)| token).ok_or_else(missing)
}

/// Runs an operation on the worker tokens on a blocking thread, because it waits for the disk.
async fn with_tokens<T: Send + 'static>(
    daemon: &Daemon,
    operation: impl FnOnce(&WorkerTokenStore) -> Result<T, HomeError> + Send + 'static,
) -> Result<T, ApiError> {
    let tokens = Arc::clone(daemon.workers.worker_tokens());
    let result =
        tokio::task::spawn_blocking(move || operation(&tokens)).await.map_err(|_| internal_error())?;
    result.map_err(|error| ApiError::caused_by(ErrorCode::StorageFailed, error))
}
