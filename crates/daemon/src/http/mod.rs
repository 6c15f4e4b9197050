//! The HTTP API: every route, and the OpenAPI document that describes them. A handler reads rows, or sends a command
//! to a session and waits until the result is journalled. Handlers decide nothing themselves, and no mistake of a
//! caller makes one panic or answer 500.
//!
//! In reading order:
//! - `extract`: ids, queries, and bodies with an `Idempotency-Key`.
//! - `idempotency`: a request repeated under the same key has its effect once.
//! - `list`: pages of lists. `api_document`: the parts of the document that all routes share.
//! - `route_access`: who may use which route. `caller`: who sent a request.
//! - `meta`, `agents`, `gc`, `journal`, `join`, `workspaces`, `sessions`, `fleets`, `worktrees`, `terminal`, `runs`,
//!   `queue`, `asks`, `mail`, `policy`, `search`, `audit`, `tokens`, `halt`, `quotas`, `events`: the families of routes.
//! - `tools`: the API for agents that hold a session token. `mcp`: the same over the Model Context Protocol.

mod agents;
mod api_document;
mod asks;
mod audit;
mod caller;
mod events;
mod extract;
mod fleets;
mod gc;
mod halt;
mod idempotency;
mod join;
mod journal;
mod list;
mod mail;
mod mcp;
mod meta;
mod policy;
mod queue;
mod quotas;
mod route_access;
mod runs;
mod search;
mod sessions;
mod terminal;
mod tokens;
mod tools;
mod workspaces;
mod worktrees;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use qd_protocol::{ApiError, ErrorCode};
use tokio::sync::oneshot;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use self::caller::Caller;
use crate::client_tokens::ClientBearer;
use crate::daemon::{Daemon, stopping_error};
use crate::edge::{HttpError, internal_error, read_whole_body};

/// The router, and the document that `/openapi.json` serves.
pub(crate) fn router(daemon: Arc<Daemon>) -> (Router, OpenApi) {
    let (router, document) = routes().split_for_parts();
    let router = router.layer(from_fn_with_state(Arc::clone(&daemon), handle_request)).with_state(daemon);
    (router, document)
}

/// Every route of the API, with its description.
fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::with_openapi(api_document::base_document())
        .merge(meta::routes())
        .merge(gc::routes())
        .merge(join::routes())
        .merge(journal::routes())
        .merge(workspaces::routes())
        .merge(sessions::routes())
        .merge(worktrees::routes())
        .merge(terminal::routes())
        .merge(runs::routes())
        .merge(queue::routes())
        .merge(asks::routes())
        .merge(mail::routes())
        .merge(policy::routes())
        .merge(search::routes())
        .merge(audit::routes())
        .merge(tokens::routes())
        .merge(agents::routes())
        .merge(fleets::routes())
        .merge(tools::routes())
        .merge(mcp::routes())
        .merge(halt::routes())
        .merge(quotas::routes())
        .merge(events::routes())
}

/// Wraps every route: refuses agents and clients where they may not go, runs changes to completion, and counts
/// responses.
async fn handle_request(State(daemon): State<Arc<Daemon>>, mut request: Request, next: Next) -> Response {
    let only_reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let admitted = route_access::admit(&daemon, &request).map(|agent| {
        let caller = Caller::of_request(&request, agent);
        request.extensions_mut().insert(caller.clone());
        caller.client.filter(|client| client.id.is_some())
    });
    let response = match admitted {
        Err(error) => HttpError(error).into_response(),
        Ok(Some(client)) if only_reads => {
            note_used(&daemon, &client);
            read_until_revoked(client, request, next).await
        }
        Ok(None) if only_reads => next.run(request).await,
        Ok(client) => {
            client.iter().for_each(|client| note_used(&daemon, client));
            run_to_completion(&daemon, request, next).await.unwrap_or_else(IntoResponse::into_response)
        }
    };
    let class = usize::from(response.status().as_u16() / 100);
    if let Some(counter) = daemon.metrics.responses.get(class) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
    response
}

fn note_used(daemon: &Daemon, client: &ClientBearer) {
    if let Some(id) = &client.id {
        daemon.client_tokens.note_used(id);
    }
}

/// Runs a request that only reads, and ends it together with the client's token: a wait is refused, and a stream ends.
async fn read_until_revoked(client: ClientBearer, request: Request, next: Next) -> Response {
    let response = tokio::select! {
        response = next.run(request) => response,
        () = client.clone().wait_for_end() => return HttpError(client.ended_error()).into_response(),
    };
    let is_stream = response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == "text/event-stream");
    match is_stream {
        true => response.map(|body| {
            Body::from_stream(body.into_data_stream().take_until(Box::pin(client.wait_for_end())))
        }),
        false => response,
    }
}

/// Runs a request that may change something as a task of the daemon, so that a client that disconnects leaves nothing
/// half done. The body is read first, so that a slow client delays only itself.
async fn run_to_completion(
    daemon: &Arc<Daemon>,
    request: Request,
    next: Next,
) -> Result<Response, HttpError> {
    if daemon.is_stopping() {
        return Err(stopping_error().into());
    }
    let (head, body) = request.into_parts();
    let body = read_whole_body(body).await?;
    let request = Request::from_parts(head, Body::from(body));
    let (sender, response) = oneshot::channel();
    daemon.spawn(async move {
        // A client that has disconnected does not need the answer.
        let _gone = sender.send(next.run(request).await);
    });
    response
        .await
        .map_err(|_| HttpError(if daemon.is_stopping() { stopping_error() } else { internal_error() }))
}

/// The error for a row that does not decode.
pub(crate) fn unreadable_row(
    what: &str,
    id: impl std::fmt::Display,
) -> impl FnOnce(serde_json::Error) -> ApiError {
    move |error| {
        let message = format!("{what} {id} could not be read from the journal: {error}; see `qd doctor`");
        ApiError::new(ErrorCode::Internal, message).with_source(error)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_openapi_file_in_docs_is_the_document_that_is_served() {
        let served = api_document::openapi_document();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        if std::env::var_os("QD_UPDATE").is_some() {
            std::fs::write(&path, served).unwrap();
            return;
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == served,
            "docs/openapi.json differs from what the handlers describe; if that is intended, run \
             `QD_UPDATE=1 cargo nextest run --cargo-profile suites -p qd-daemon openapi` and commit the file"
        );
    }

    #[test]
    fn every_operation_of_openapi_has_a_summary_a_tag_and_a_success() {
        let document: serde_json::Value = serde_json::from_str(api_document::openapi_document()).unwrap();
        let mut names = std::collections::HashSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                let name = operation["operationId"].as_str().unwrap();
                assert!(names.insert(name), "{name} names two operations");
                assert!(
                    operation["summary"].as_str().is_some_and(|text| !text.is_empty()),
                    "{method} {path}"
                );
                assert_eq!(operation["tags"].as_array().map(Vec::len), Some(1), "{method} {path}");
                let responses = operation["responses"].as_object().unwrap();
                // The success of a WebSocket route is the 101.
                assert!(
                    responses.keys().any(|status| status.starts_with('2') || status == "101"),
                    "{method} {path}"
                );
                for (status, response) in
                    responses.iter().filter(|(status, _)| status.starts_with(['4', '5']))
                {
                    if path == "/mcp" && status == "400" {
                        continue;
                    }
                    let schema = &response["content"]["application/json"]["schema"]["$ref"];
                    assert_eq!(schema, "#/components/schemas/ErrorBody", "{method} {path} {status}");
                }
                if method == "post" {
                    let parameters = operation["parameters"].as_array().unwrap();
                    assert!(
                        parameters.iter().any(|parameter| parameter["name"] == "Idempotency-Key"),
                        "{method} {path}"
                    );
                }
            }
        }
        for reference in api_document::openapi_document().split("\"$ref\": \"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer} does not resolve");
        }
    }
}
