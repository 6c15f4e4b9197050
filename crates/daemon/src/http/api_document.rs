//! The parts of the OpenAPI document that all routes share: its head, common error responses and path parameters.
//! Handlers describe themselves. Nothing here answers requests.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use qd_protocol::error::{ErrorBody, ErrorDoc};
use qd_protocol::policy::{PolicyRule, PolicyVerdict, Risk};
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr};
use utoipa::{IntoParams, IntoResponses, Modify};

/// The document as served, and as committed in `docs/openapi.json`.
pub(super) fn openapi_document() -> &'static str {
    static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
        let json = super::routes().into_openapi().to_pretty_json();
        json.expect("a document of plain maps and strings has a JSON form") + "\n"
    });
    &DOCUMENT
}

/// The document without any routes.
pub(super) fn base_document() -> OpenApi {
    <OpenApiBase as utoipa::OpenApi>::openapi()
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Quarterdeck",
        description = "A runtime and control plane for fleets of AI coding agents. Lists are arrays; while there is \
                       more, the header `Next-After` has the value for `?after=`. Every error response is an \
                       `ErrorBody`. A unix socket needs no token.",
    ),
    // Schemas that no handler names itself: errors, and the parts of a policy.
    components(schemas(ErrorBody, ErrorDoc, PolicyVerdict, PolicyRule, Risk)),
    security(("token" = [])),
    modifiers(&BearerTokenScheme),
    tags(
        (name = "daemon", description = "The daemon itself: health, version, metrics, agents, garbage collection"),
        (name = "workers", description = "Other machines: their tokens, and how they join"),
        (name = "workspaces", description = "Project directories"),
        (name = "sessions", description = "Conversations with one agent"),
        (name = "worktrees", description = "Git worktrees of sessions"),
        (name = "runs", description = "Accepted prompts"),
        (name = "asks", description = "Permission requests and questions of agents"),
        (name = "tools", description = "Tools for agents, with the token of their session, and for editors"),
        (name = "mail", description = "Messages to sessions"),
        (name = "search", description = "Finding text in all sessions, and adding up what they have used"),
        (name = "tokens", description = "Tokens of clients, with their roles"),
        (name = "halt", description = "Stop anything from starting"),
        (name = "quotas", description = "Accounts whose quota is exhausted"),
        (name = "events", description = "Event streams"),
    )
)]
struct OpenApiBase;

struct BearerTokenScheme;

impl Modify for BearerTokenScheme {
    fn modify(&self, openapi: &mut OpenApi) {
        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        openapi.components.get_or_insert_default().add_security_scheme("token", scheme);
    }
}

macro_rules! error_responses {
    ($($(#[$doc:meta])* $name:ident { $($status:literal: $description:literal,)* })*) => {$(
        $(#[$doc])*
        pub(super) struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                BTreeMap::from([$(($status.to_owned(), error_response($description)),)*])
            }
        }
    )*};
}

error_responses! {
    /// Responses of every route but `/healthz`.
    GuardResponses {
        "401": "`unauthorized`: the token is missing or wrong, over TCP",
        "403": "`host_not_allowed`, `origin_not_allowed`, `peer_not_allowed`, `agent_not_allowed`, `worker_not_allowed` or, of a tool, `tool_denied`",
        "503": "`stopping` or `storage_failed`: nothing was done, try again",
    }
    /// Response of a route with an id in its path or query.
    NotFoundResponse {
        "404": "`not_found`: there is nothing with this id",
    }
    /// Response of a route with a query.
    BadQueryResponse {
        "400": "`invalid_value` or `bad_cursor`: the query is not valid",
    }
    /// Response of a route that lasts: an event stream, a wait or a terminal.
    StreamLimitResponse {
        "429": "`overloaded`: too many streams and waiting requests are open; try again after `Retry-After`",
    }
    /// Responses of a route with a body.
    BadBodyResponses {
        "400": "`invalid_request` or `invalid_value`: the body is not valid for this route",
        "413": "`body_too_large`: over 8 MiB",
    }
}

fn error_response(description: &str) -> RefOr<Response> {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
    ResponseBuilder::new().description(description).content("application/json", content).build().into()
}

/// Path parameters below a workspace.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `PathIds` takes")]
pub(super) struct WorkspacePath {
    /// The workspace.
    w: String,
}

/// Path parameters below a session.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `PathIds` takes")]
pub(super) struct SessionPath {
    /// The workspace.
    w: String,
    /// The session.
    s: String,
}

/// Path parameters below a run.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `PathIds` takes")]
pub(super) struct RunPath {
    /// The workspace.
    w: String,
    /// The run.
    run: String,
}

/// The header that every POST takes.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "it only describes what `KeyedBody` takes")]
pub(super) struct IdempotencyKeyHeader {
    /// The client's own name for this request, 1 to 255 visible characters. Repeating the same request under the same
    /// key has its effect once and returns the first response, for a day; another request under the same key is 409
    /// `idempotency_conflict`.
    #[param(rename = "Idempotency-Key")]
    idempotency_key: Option<String>,
}
