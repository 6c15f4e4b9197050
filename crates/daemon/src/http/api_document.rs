//! What the OpenAPI document says of all routes alike: its head, the refusals that many share, the parameters in
//! their paths. The handlers describe themselves; nothing here answers a request but the document's own text.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use qd_protocol::error::{ErrorBody, ErrorDoc};
use qd_protocol::policy::{PolicyRule, PolicyVerdict, Risk};
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr};
use utoipa::{IntoParams, IntoResponses, Modify};

/// The document as it is served, and as it is kept in `docs/openapi.json`.
pub(super) fn openapi_document() -> &'static str {
    static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
        let json = super::routes().into_openapi().to_pretty_json();
        json.expect("a document of plain maps and strings has a JSON form") + "\n"
    });
    &DOCUMENT
}

/// The document before any route is in it.
pub(super) fn base_document() -> OpenApi {
    <OpenApiBase as utoipa::OpenApi>::openapi()
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Quarterdeck",
        description = "A runtime and control plane for fleets of AI coding agents. Lists are arrays; while there is \
                       more, the header `Next-After` says what `?after=` takes next. Every refusal has the shape of \
                       `ErrorBody`. On a unix socket no token is asked for.",
    ),
    // Those that no handler names itself: refusals, and what a policy is made of.
    components(schemas(ErrorBody, ErrorDoc, PolicyVerdict, PolicyRule, Risk)),
    security(("token" = [])),
    modifiers(&BearerTokenScheme),
    tags(
        (name = "daemon", description = "The daemon itself: health, version, numbers, agents, tidying up"),
        (name = "workers", description = "Other machines: their tokens, and how they join"),
        (name = "workspaces", description = "Project directories"),
        (name = "sessions", description = "Conversations with one agent"),
        (name = "worktrees", description = "Git worktrees of sessions"),
        (name = "runs", description = "Accepted prompts"),
        (name = "asks", description = "What agents wait for"),
        (name = "tools", description = "What agents can do with the token of their session, and editors"),
        (name = "mail", description = "Messages to sessions"),
        (name = "halt", description = "The brake for everything"),
        (name = "events", description = "Streams of what happens"),
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
    /// Every route but `/healthz` may answer these.
    GuardResponses {
        "401": "`unauthorized`: no token, or a wrong one, over TCP",
        "403": "`host_not_allowed`, `origin_not_allowed`, `peer_not_allowed`, `agent_not_allowed` or `worker_not_allowed`",
        "503": "`stopping` or `storage_failed`: nothing was done, try again",
    }
    /// A route with an id in its path, or in its query.
    NotFoundResponse {
        "404": "`not_found`: nothing has this id here",
    }
    /// A route with a query.
    BadQueryResponse {
        "400": "`invalid_value` or `bad_cursor`: what the query says makes no sense",
    }
    /// A route with a body.
    BadBodyResponses {
        "400": "`invalid_request` or `invalid_value`: the body is not what this route takes",
        "413": "`body_too_large`: over 8 MiB",
    }
}

fn error_response(description: &str) -> RefOr<Response> {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
    ResponseBuilder::new().description(description).content("application/json", content).build().into()
}

/// Below a workspace.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `Ids` takes")]
pub(super) struct WorkspacePath {
    /// The workspace.
    w: String,
}

/// Below a session.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `Ids` takes")]
pub(super) struct SessionPath {
    /// The workspace.
    w: String,
    /// The session.
    s: String,
}

/// Below a run.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it only describes what `Ids` takes")]
pub(super) struct RunPath {
    /// The workspace.
    w: String,
    /// The run.
    run: String,
}

/// On every POST.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "it only describes what `Keyed` takes")]
pub(super) struct IdempotencyKeyHeader {
    /// The client's own name for this request, 1 to 255 visible characters: the same request under the same key has
    /// its effect once and gets the first answer again, for a day; another one under it is 409
    /// `idempotency_conflict`.
    #[param(rename = "Idempotency-Key")]
    idempotency_key: Option<String>,
}
