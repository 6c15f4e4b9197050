//! The HTTP API of section 3: every route, and the document that describes them. A handler reads rows, or sends a
//! command to a session and waits until what came of it is journalled; it decides nothing itself, and no mistake of a
//! caller makes it panic or answer 500.
//!
//! In reading order:
//! - `extract`: what a handler takes: ids, queries, bodies with an `Idempotency-Key`.
//! - `once`: the same request under the same key has its effect once.
//! - `list`: pages. `describe`: what the document says of all routes alike. `words`: texts and files of a caller.
//! - `meta`, `agents`, `gc`, `join`, `workspaces`, `sessions`, `fleets`, `worktrees`, `terminal`, `runs`, `queue`, `asks`, `mail`, `policy`, `halt`, `events`: the
//!   families of routes.
//! - `tools`: what agents can do with a token of their own; `mcp`: the same by the Model Context Protocol.

mod agent_access;
mod agents;
mod api_document;
mod asks;
mod events;
mod extract;
mod fleets;
mod gc;
mod halt;
mod idempotency;
mod join;
mod list;
mod mail;
mod mcp;
mod meta;
mod policy;
mod queue;
mod runs;
mod sessions;
mod terminal;
mod tools;
mod workspaces;
mod worktrees;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use qd_protocol::{ApiError, ErrorCode};
use tokio::sync::oneshot;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use crate::daemon::{Daemon, stopping_error};
use crate::edge::{HttpError, read_whole_body};

/// All routes, and what `/openapi.json` says of them.
pub(crate) fn router(daemon: Arc<Daemon>) -> (Router, OpenApi) {
    let (router, document) = routes().split_for_parts();
    let router = router.layer(from_fn_with_state(Arc::clone(&daemon), handle_request)).with_state(daemon);
    (router, document)
}

/// Every route, with its description; what is not here does not exist.
fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::with_openapi(api_document::base_document())
        .merge(meta::routes())
        .merge(gc::routes())
        .merge(join::routes())
        .merge(workspaces::routes())
        .merge(sessions::routes())
        .merge(worktrees::routes())
        .merge(terminal::routes())
        .merge(runs::routes())
        .merge(queue::routes())
        .merge(asks::routes())
        .merge(mail::routes())
        .merge(policy::routes())
        .merge(agents::routes())
        .merge(fleets::routes())
        .merge(tools::routes())
        .merge(mcp::routes())
        .merge(halt::routes())
        .merge(events::routes())
}

/// Around every route: an agent does not get far, what changes something is carried out whole, and every answer is counted.
async fn handle_request(State(daemon): State<Arc<Daemon>>, request: Request, next: Next) -> Response {
    let only_reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let response = match agent_access::admit(&daemon, &request) {
        Err(error) => HttpError(error).into_response(),
        Ok(()) if only_reads => next.run(request).await,
        Ok(()) => run_to_completion(&daemon, request, next).await.unwrap_or_else(IntoResponse::into_response),
    };
    let class = usize::from(response.status().as_u16() / 100);
    if let Some(counter) = daemon.stats.responses.get(class) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
    response
}

/// Runs a request that may change something as a task of the daemon: a client that goes away in the middle leaves
/// nothing half done. Its body is read before, so that a slow client holds up nobody but itself.
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
    let (tell, answered) = oneshot::channel();
    daemon.spawn(async move {
        // Whoever has gone away does not need the answer.
        let _gone = tell.send(next.run(request).await);
    });
    answered
        .await
        .map_err(|_| HttpError(if daemon.is_stopping() { stopping_error() } else { internal_error() }))
}

/// Something that cannot be has happened; the log says what.
fn internal_error() -> ApiError {
    ApiError::new(ErrorCode::Internal, "a fault of the daemon, not of the request; its log says more")
}

/// What the journal holds is not what we wrote there.
fn unreadable_row(what: &str, id: impl std::fmt::Display) -> impl FnOnce(serde_json::Error) -> ApiError {
    move |error| {
        let message = format!("{what} {id} could not be read from the journal: {error}; see `qd doctor`");
        ApiError::new(ErrorCode::Internal, message)
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
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            kept == served,
            "docs/openapi.json is not what the handlers say; if the change is meant, run \
             `QD_UPDATE=1 cargo nextest run -p qd-daemon openapi` and commit the file"
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
                // A WebSocket's success is the switch to it.
                assert!(
                    responses.keys().any(|status| status.starts_with('2') || status == "101"),
                    "{method} {path}"
                );
                for (status, response) in
                    responses.iter().filter(|(status, _)| status.starts_with(['4', '5']))
                {
                    let schema = &response["content"]["application/json"]["schema"]["$ref"];
                    assert_eq!(schema, "#/components/schemas/ErrorBody", "{method} {path} {status}");
                }
                if method == "post" {
                    let parameters = operation["parameters"].as_array().unwrap();
                    assert!(parameters.iter().any(|one| one["name"] == "Idempotency-Key"), "{method} {path}");
                }
            }
        }
        for reference in api_document::openapi_document().split("\"$ref\": \"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer} leads nowhere");
        }
    }
}
