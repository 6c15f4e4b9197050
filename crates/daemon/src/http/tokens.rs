//! The tokens of clients over TCP: create, list and revoke them. Only an admin may, and never an agent.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use qd_home::HomeError;
use qd_protocol::api::{ClientToken, CreatedClientToken, NewClientToken};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::{EventBody, TokenCreated, TokenRevoked};
use qd_protocol::{ApiError, ErrorCode, Millis, TokenId};
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
use crate::client_tokens::{ClientTokenStore, NAME_CHARS_MAX};
use crate::daemon::Daemon;
use crate::edge::{HttpError, Json, internal_error};
use crate::invalid_value;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(list_tokens, create_token)).routes(routes!(revoke_token))
}

/// Lists the tokens of clients. The tokens themselves are never shown again.
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens", params(ListQuery), responses(
    (status = 200, description = "All tokens, oldest first", body = [ClientToken]), BadQueryResponse, GuardResponses,
))]
async fn list_tokens(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<ClientToken>, HttpError> {
    Ok(ListPage::from_complete(daemon.client_tokens.list(), &query, |token| token.id.as_str())?)
}

/// Creates a token with which a client may use the API over TCP as its role allows.
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", params(IdempotencyKeyHeader), request_body = NewClientToken,
    responses(
        (status = 201, description = "The token, which is shown only once", body = CreatedClientToken),
        (status = 404, description = "`not_found`: there is no such workspace", body = ErrorBody),
        (status = 409, description = "`token_name_taken` or `idempotency_conflict`", body = ErrorBody),
        BadBodyResponses, GuardResponses,
    )
)]
async fn create_token(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    KeyedBody(key, Json(new)): KeyedBody<Json<NewClientToken>>,
) -> Result<(StatusCode, Json<CreatedClientToken>), HttpError> {
    // The response stored under the key leaves out the token, which must not be in the journal.
    let create = |key: Option<IdempotencyKey>| async {
        check_new_token(&daemon, &new)?;
        // One at a time, because a name is used once.
        let _one_at_a_time = daemon.key_locks.lock("tokens".to_owned()).await;
        let (name, request) = (new.name.clone(), key.as_ref().map(IdempotencyKey::digest));
        let created = with_tokens(&daemon, move |tokens| tokens.create(new, request)).await?;
        let token = created.ok_or_else(|| {
            let message = format!("another token is named {name}; revoke it first, or choose another name");
            ApiError::new(ErrorCode::TokenNameTaken, message)
        })?;
        let ClientToken { id, name, role, workspace_id, expires_at, .. } = token.clone();
        let created = TokenCreated::new(id, Some(name));
        let body =
            EventBody::TokenCreated(TokenCreated { role: Some(role), workspace_id, expires_at, ..created });
        let record = key.map(|key| key.into_record(&token)).transpose()?;
        daemon.append_daemon_event(&body, &caller.actor, Millis::now(), Vec::new(), record).await?;
        Ok((token, ResponseRecording::WrittenWithEffect))
    };
    let ClientToken { id, name, role, workspace_id, created_at, expires_at, .. } =
        run_once(&daemon, key, create).await?;
    let token = daemon.client_tokens.derive_token(&id, &name);
    let created = CreatedClientToken { id, name, role, workspace_id, created_at, expires_at, token };
    Ok((StatusCode::CREATED, Json(created)))
}

fn check_new_token(daemon: &Daemon, new: &NewClientToken) -> Result<(), ApiError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    if !(1..=NAME_CHARS_MAX).contains(&new.name.len()) || !new.name.chars().all(is_allowed) {
        return Err(invalid_value(format!("`name` must be 1 to {NAME_CHARS_MAX} characters of A-Za-z0-9.-")));
    }
    if new.expires_at.is_some_and(|end| end <= Millis::now()) {
        return Err(invalid_value("`expires_at` must be in the future"));
    }
    new.workspace_id.as_ref().map_or(Ok(()), |workspace| daemon.workspaces.get(workspace).map(drop))
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `PathIds` takes")]
struct ClientTokenPath {
    /// The token's id.
    id: String,
}

/// Revokes a token: its bearer is refused from now on, and streams that were opened with it end.
#[utoipa::path(delete, path = "/v1/tokens/{id}", tag = "tokens", operation_id = "revoke_client_token",
    params(ClientTokenPath),
    responses((status = 204, description = "The token is revoked"), NotFoundResponse, GuardResponses)
)]
async fn revoke_token(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(id): PathIds<TokenId>,
) -> Result<StatusCode, HttpError> {
    let name = id.clone();
    let revoked = with_tokens(&daemon, move |tokens| tokens.revoke(&name)).await?;
    let revoked = revoked.ok_or_else(|| ApiError::not_found("token", &id))?;
    let body = EventBody::TokenRevoked(TokenRevoked { token_id: id, name: Some(revoked.name) });
    daemon.append_daemon_event(&body, &caller.actor, Millis::now(), Vec::new(), None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs an operation on the tokens on a blocking thread, because it waits for the disk.
async fn with_tokens<T: Send + 'static>(
    daemon: &Daemon,
    operation: impl FnOnce(&ClientTokenStore) -> Result<T, HomeError> + Send + 'static,
) -> Result<T, ApiError> {
    let tokens = Arc::clone(&daemon.client_tokens);
    let result =
        tokio::task::spawn_blocking(move || operation(&tokens)).await.map_err(|_| internal_error())?;
    result.map_err(|error| ApiError::caused_by(ErrorCode::StorageFailed, error))
}
