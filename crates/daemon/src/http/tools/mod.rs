//! The tools: what an agent can do in the name of its session, and an editor in its user's. One request does one thing
//! and does not last; what a call of a tool is made of, and how a model is told of it, is in `qd-mcp`.
//!
//! - `caller`: who calls, and which sessions are within reach.
//! - `spawn`: new sessions. `message`: words to one. `look`: what became of them. `ask`: questions to people.

mod ask;
mod caller;
mod look;
mod message;
mod spawn;

use std::sync::Arc;

use axum::extract::State;
use axum::http::Extensions;
use qd_mcp::ToolName;
use qd_protocol::error::ErrorBody;
use qd_protocol::{ApiError, Code};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::caller::Caller;
use super::describe::{BadBody, Guarded, KeyHeader, Missing};
use super::extract::{Ids, Keyed};
use crate::actor::IdempotencyKey;
use crate::daemon::Daemon;
use crate::edge::{Holder, OptionalJson, Refusal};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(use_tool))
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `Ids` takes")]
struct OfTool {
    /// `spawn_agent`, `send_message`, `wait`, `status`, `cancel`, `ask_human` or `list`.
    tool: String,
}

/// Uses a tool: with a session's token in the name of that session, else in the user's. A wait answers within 20 s.
#[utoipa::path(post, path = "/v1/tools/{tool}", tag = "tools", params(OfTool, KeyHeader),
    request_body(content = Object, description = "What the tool takes; see docs/mcp.md"),
    responses(
        (status = 200, description = "What came of it", body = Object),
        (status = 409, description = "`agent_unavailable`, `session_closed`, `not_running`, `steer_unsupported`, \
            `withdrawn` or `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`too_many_sessions`, `queue_full` or `overloaded`", body = ErrorBody),
        BadBody, Missing, Guarded,
    )
)]
async fn use_tool(
    State(daemon): State<Arc<Daemon>>,
    Ids(tool): Ids<String>,
    Keyed(key, WithExtensions(extensions, OptionalJson(arguments))): Keyed<WithExtensions>,
) -> Result<crate::edge::Json<Map<String, Value>>, Refusal> {
    let tool = ToolName::parse(&tool).ok_or_else(|| ApiError::not_found("tool", &tool))?;
    let done = perform(&daemon, extensions.get::<Holder>(), tool, arguments, key).await?;
    Ok(crate::edge::Json(done))
}

/// A body that may be absent, and what came with the request besides.
struct WithExtensions(Extensions, OptionalJson<Map<String, Value>>);

impl<S: Send + Sync> axum::extract::FromRequest<S> for WithExtensions {
    type Rejection = Refusal;

    async fn from_request(request: axum::extract::Request, state: &S) -> Result<Self, Refusal> {
        let extensions = request.extensions().clone();
        Ok(Self(extensions, OptionalJson::from_request(request, state).await?))
    }
}

/// Does what a tool is for, once.
pub(super) async fn perform(
    daemon: &Arc<Daemon>,
    holder: Option<&Holder>,
    tool: ToolName,
    arguments: Map<String, Value>,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    let caller = Caller::of(daemon, holder).await?;
    // Two sessions may choose the same words for a key, and none hears the answer of another.
    let key = key.map(|IdempotencyKey { key, fingerprint }| IdempotencyKey {
        key: format!("{key} {}", caller.name()),
        fingerprint,
    });
    // Boxed, since every one of them has room for the largest of all.
    match tool {
        ToolName::SpawnAgent => Box::pin(spawn::spawn(daemon, &caller, understood(arguments)?, key)).await,
        ToolName::SendMessage => Box::pin(message::send(daemon, &caller, understood(arguments)?, key)).await,
        ToolName::Cancel => Box::pin(message::cancel(daemon, &caller, understood(arguments)?, key)).await,
        ToolName::Wait => Box::pin(look::wait(daemon, &caller, understood(arguments)?)).await,
        ToolName::Status => Box::pin(look::status(daemon, &caller, understood(arguments)?)).await,
        ToolName::List => Box::pin(look::list(daemon, &caller, understood(arguments)?)).await,
        ToolName::AskHuman => Box::pin(ask::ask(daemon, &caller, understood(arguments)?, key)).await,
    }
}

fn understood<T: DeserializeOwned>(arguments: Map<String, Value>) -> Result<T, ApiError> {
    serde_json::from_value(Value::Object(arguments)).map_err(|error| {
        ApiError::new(Code::InvalidRequest, format!("the arguments are not what this tool takes: {error}"))
    })
}

/// A JSON object out of its fields.
fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => Map::from_iter([("value".to_owned(), other)]),
    }
}
