//! The tools over the Model Context Protocol, by HTTP. Requests are stateless: there is no protocol session to lose,
//! and a client that is cut off by a restart just calls again.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use qd_mcp::server::McpToolRequest as Call;
use qd_mcp::{McpToolServer, ToolBackend};
use qd_protocol::error::{ErrorBody, ErrorDoc};
use qd_protocol::limits::BODY_MAX;
use qd_protocol::{ApiError, ErrorCode};
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{GuardResponses, IdempotencyKeyHeader};
use super::caller::Caller;
use super::tools::perform_tool;
use crate::actor::IdempotencyKey;
use crate::daemon::Daemon;
use crate::edge::{HttpError, internal_error};

/// The longest refusal of the MCP library that is passed on.
const REFUSAL_MAX: usize = 16 << 10;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(mcp))
}

/// Serves the Model Context Protocol by streamable HTTP, with the same tools as `qd mcp`.
#[utoipa::path(post, path = "/mcp", tag = "tools", params(IdempotencyKeyHeader),
    request_body(content = Object, description = "A JSON-RPC message"),
    responses(
        (status = 200, description = "The response, as JSON or as an event stream", body = Object),
        (status = 202, description = "A notification was accepted"),
        (status = 400, description = "`invalid_request`: the body is no JSON-RPC message; or an error of JSON-RPC", body = Object),
        (status = 406, description = "`not_acceptable`: the client must accept both JSON and event streams", body = ErrorBody),
        (status = 413, description = "`body_too_large`: over 8 MiB", body = ErrorBody),
        GuardResponses,
    )
)]
async fn mcp(State(daemon): State<Arc<Daemon>>, request: Request) -> Response {
    // The edge has already checked the caller, its origin and the size.
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        .disable_allowed_hosts()
        .with_max_request_body_bytes(BODY_MAX);
    let factory = move || Ok(McpToolServer::new(DaemonToolBackend { daemon: Arc::clone(&daemon) }));
    let service = StreamableHttpService::new(factory, Arc::new(NeverSessionManager::default()), config);
    describe_refusal(service.handle(request).await.map(Body::new)).await
}

/// Gives a refusal of the MCP library, which is plain text, the form of every other error.
async fn describe_refusal(response: Response) -> Response {
    let kind = response.headers().get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let code = match response.status() {
        // An error of JSON-RPC stays one.
        _ if kind.starts_with(b"application/json") => return response,
        StatusCode::NOT_ACCEPTABLE => ErrorCode::NotAcceptable,
        StatusCode::PAYLOAD_TOO_LARGE => ErrorCode::BodyTooLarge,
        status if status.is_client_error() => ErrorCode::InvalidRequest,
        _ => return response,
    };
    let text = to_bytes(response.into_body(), REFUSAL_MAX).await.unwrap_or_default();
    let message = String::from_utf8_lossy(&text).into_owned();
    HttpError(ApiError::new(code, message)).into_response()
}

/// Performs tool calls in the daemon itself.
#[derive(Debug, Clone)]
struct DaemonToolBackend {
    daemon: Arc<Daemon>,
}

impl ToolBackend for DaemonToolBackend {
    async fn call(&self, call: Call<'_>) -> Result<Map<String, Value>, ErrorDoc> {
        let head = call.extensions.get::<Parts>();
        let caller = head.and_then(|head| head.extensions.get::<Caller>());
        let caller = caller.ok_or_else(|| ErrorBody::from(internal_error()).error)?;
        let given =
            head.and_then(|head| head.headers.get("idempotency-key")).and_then(|key| key.to_str().ok());
        // The requests of a call are numbered, so that a repeat of the call repeats each of them.
        let number = call.key.rsplit_once('#').map_or("0", |(_, number)| number);
        let key = given.map_or_else(|| call.key.clone(), |given| format!("{given}#{number}"));
        let text = format!("mcp {} {key}", call.tool.as_str());
        let body = serde_json::to_vec(&call.arguments).unwrap_or_default();
        let key = IdempotencyKey { key: text, fingerprint: Sha256::digest(body).into() };
        perform_tool(&self.daemon, caller, call.tool, call.arguments, Some(key))
            .await
            .map_err(|error| ErrorBody::from(error).error)
    }
}
