//! The tools: what an agent can do in the name of its session, and an editor in its user's name. One request does one
//! thing and is short. `qd-mcp` turns tool calls into requests and describes the tools to models.
//!
//! - `caller`: the caller, and which sessions it can reach.
//! - `permission`: whether the session's policy allows a call. `ask_limit`: waits while too many asks are open;
//!   `resolved_asks`: for either.
//! - `spawn`: new sessions. `message`: messages and cancels. `inspect`: states and results. `ask`: questions to
//!   people.

mod ask;
mod ask_limit;
mod caller;
mod inspect;
mod message;
mod permission;
mod resolved_asks;
mod spawn;

use std::sync::Arc;

use axum::extract::State;
use axum::http::Extensions;
use qd_mcp::ToolName;
use qd_protocol::error::ErrorBody;
use qd_protocol::{ApiError, ErrorCode};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::caller::ToolCaller;
use super::api_document::{BadBodyResponses, GuardResponses, IdempotencyKeyHeader, NotFoundResponse};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds};
use crate::actor::IdempotencyKey;
use crate::daemon::Daemon;
use crate::edge::{HttpError, OptionalJson, internal_error};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(use_tool))
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `PathIds` takes")]
struct ToolPath {
    /// `spawn_agent`, `send_message`, `wait`, `status`, `cancel`, `ask_human` or `list`.
    tool: String,
}

/// Uses a tool: with a session token in the name of that session, otherwise in the user's. A wait answers within 20 s.
#[utoipa::path(post, path = "/v1/tools/{tool}", tag = "tools", params(ToolPath, IdempotencyKeyHeader),
    request_body(content = Object, description = "The tool's arguments; see docs/mcp.md"),
    responses(
        (status = 200, description = "The tool's result", body = Object),
        (status = 409, description = "`agent_unavailable`, `sandbox_unavailable`, `session_closed`, `not_running`, \
            `steer_unsupported`, `withdrawn`, `permission_pending` (with the `ask_id` in the details; repeat the request with the same \
            `Idempotency-Key`) or `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`too_many_sessions`, `too_many_asks`, `queue_full` or `overloaded`", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn use_tool(
    State(daemon): State<Arc<Daemon>>,
    PathIds(tool): PathIds<String>,
    KeyedBody(key, BodyWithExtensions(extensions, OptionalJson(arguments))): KeyedBody<BodyWithExtensions>,
) -> Result<crate::edge::Json<Map<String, Value>>, HttpError> {
    let tool = ToolName::parse(&tool).ok_or_else(|| ApiError::not_found("tool", &tool))?;
    let caller = extensions.get::<Caller>().ok_or_else(internal_error)?;
    let result = perform_tool(&daemon, caller, tool, arguments, key).await?;
    Ok(crate::edge::Json(result))
}

/// A body that may be absent, together with the request's extensions.
struct BodyWithExtensions(Extensions, OptionalJson<Map<String, Value>>);

impl<S: Send + Sync> axum::extract::FromRequest<S> for BodyWithExtensions {
    type Rejection = HttpError;

    async fn from_request(request: axum::extract::Request, state: &S) -> Result<Self, HttpError> {
        let extensions = request.extensions().clone();
        Ok(Self(extensions, OptionalJson::from_request(request, state).await?))
    }
}

/// Performs a tool call, once per idempotency key.
pub(super) async fn perform_tool(
    daemon: &Arc<Daemon>,
    caller: &Caller,
    tool: ToolName,
    arguments: Map<String, Value>,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    let caller = ToolCaller::from_caller(daemon, caller).await?;
    permission::require_permission(daemon, &caller, tool, &arguments, key.as_ref()).await?;
    // Two sessions may choose the same key, and neither may get the other's response.
    let key = key.map(|IdempotencyKey { key, fingerprint }| IdempotencyKey {
        key: format!("{key} {}", caller.name()),
        fingerprint,
    });
    // Boxed, because the future would otherwise be as large as the largest of them.
    match tool {
        ToolName::SpawnAgent => {
            Box::pin(spawn::spawn_agent(daemon, &caller, parse_arguments(arguments)?, key)).await
        }
        ToolName::SendMessage => {
            Box::pin(message::send_message(daemon, &caller, parse_arguments(arguments)?, key)).await
        }
        ToolName::Cancel => {
            Box::pin(message::cancel(daemon, &caller, parse_arguments(arguments)?, key)).await
        }
        ToolName::Wait => Box::pin(inspect::wait(daemon, &caller, parse_arguments(arguments)?)).await,
        ToolName::Status => Box::pin(inspect::status(daemon, &caller, parse_arguments(arguments)?)).await,
        ToolName::List => Box::pin(inspect::list(daemon, &caller, parse_arguments(arguments)?)).await,
        ToolName::AskHuman => {
            Box::pin(ask::ask_human(daemon, &caller, parse_arguments(arguments)?, key)).await
        }
    }
}

fn parse_arguments<T: DeserializeOwned>(arguments: Map<String, Value>) -> Result<T, ApiError> {
    serde_json::from_value(Value::Object(arguments)).map_err(|error| {
        ApiError::new(
            ErrorCode::InvalidRequest,
            format!("the arguments are not valid for this tool: {error}"),
        )
    })
}

/// The fields of a JSON object.
fn json_object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => Map::from_iter([("value".to_owned(), other)]),
    }
}
