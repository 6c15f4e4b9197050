//! The path of one request: through the guard, to the router, and back as a response. A panic in a handler becomes a
//! 500, and every error is the contract's JSON, whichever layer made it.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::header::{self, HeaderValue};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use qd_protocol::api::VERSION_HEADER;
use qd_protocol::{ApiError, ErrorCode};
use tower::ServiceExt;

use super::body::{LimitedBody, UnreadBody, body_too_large};
use super::connection_limit::{ActiveRequest, ConnectionActivity, ConnectionPermit};
use super::error::{HttpError, internal_error};
use super::guard::{BearerIdentity, BearerSession, ConnectionPeer, RequestGuard, UNAUTHENTICATED_PATH};
use super::serve::EdgeLimits;

/// The version in the header of every response.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The most bytes that are taken over from another layer's error text.
const ERROR_TEXT_MAX: u64 = 1024;

/// The router behind the guard and the limits.
#[derive(Debug)]
pub(super) struct GuardedRouter {
    guard: RequestGuard,
    router: Router,
    pub(super) limits: EdgeLimits,
}

impl GuardedRouter {
    pub(super) fn new(guard: RequestGuard, router: Router, limits: EdgeLimits) -> Self {
        // Our own limit applies; axum's is smaller and answers in another format.
        Self { guard, router: router.layer(DefaultBodyLimit::disable()), limits }
    }

    pub(super) async fn handle_request(
        self: Arc<Self>,
        peer: ConnectionPeer,
        activity: Arc<ConnectionActivity>,
        permit: Arc<ConnectionPermit>,
        request: hyper::Request<Incoming>,
    ) -> Result<Response, Infallible> {
        let active_request = activity.clone().begin_request();
        let (mut head, incoming) = request.into_parts();
        let (method, path) = (head.method.clone(), head.uri.path().to_owned());
        let unread = UnreadBody::default();
        let awaits_continue = head.headers.contains_key(header::EXPECT);
        let body = LimitedBody::new(incoming, awaits_continue, &self.limits, unread.clone());
        let response = match self.admit(&peer, &head, &body) {
            Ok(bearer) => {
                if head.uri.path() != UNAUTHENTICATED_PATH {
                    activity.mark_proven();
                }
                head.extensions.insert(peer.clone());
                head.extensions.insert(permit);
                match bearer {
                    Some(BearerIdentity::Worker(token)) => drop(head.extensions.insert(token)),
                    Some(BearerIdentity::Session(session)) => {
                        drop(head.extensions.insert(BearerSession(session)))
                    }
                    Some(BearerIdentity::Client(client)) => drop(head.extensions.insert(client)),
                    None => {}
                }
                self.route(head, body).await
            }
            Err(error) => {
                tracing::info!(%method, path, ?peer, code = error.code.as_str(), "refused a request");
                drop(body);
                HttpError(error).into_response()
            }
        };
        unread.drain(&self.limits).await;
        let mut response = normalize_error_response(response, &method, &path).await;
        response.headers_mut().insert(VERSION_HEADER, HeaderValue::from_static(VERSION));
        tracing::debug!(%method, path, ?peer, status = response.status().as_u16(), "answered");
        Ok(response.map(|body| Body::new(TrackedBody { body, _active_request: active_request })))
    }

    fn admit(
        &self,
        peer: &ConnectionPeer,
        head: &Parts,
        body: &LimitedBody,
    ) -> Result<Option<BearerIdentity>, ApiError> {
        let bearer = self.guard.admit(peer, head)?;
        if body.is_too_large() { Err(body_too_large(self.limits.body_bytes)) } else { Ok(bearer) }
    }

    async fn route(&self, head: Parts, body: LimitedBody) -> Response {
        let body = if body.is_end_stream() { Body::empty() } else { Body::new(body) };
        let handled = self.router.clone().oneshot(Request::from_parts(head, body));
        match AssertUnwindSafe(handled).catch_unwind().await {
            Ok(Ok(response)) => response,
            Ok(Err(never)) => match never {},
            Err(panic) => {
                let message = panic.downcast_ref::<&str>().copied().map(str::to_owned);
                let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                tracing::error!(panic = message, "a handler panicked");
                HttpError(internal_error()).into_response()
            }
        }
    }
}

/// Converts an error that another layer made (unknown route, bad query, wrong method) into our format.
async fn normalize_error_response(response: Response, method: &Method, path: &str) -> Response {
    let is_ours = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if is_ours || !response.status().is_client_error() && !response.status().is_server_error() {
        return response;
    }
    let (head, body) = response.into_parts();
    let error = match head.status {
        StatusCode::NOT_FOUND => ApiError::new(ErrorCode::NotFound, format!("there is nothing at {path}")),
        StatusCode::METHOD_NOT_ALLOWED => ApiError::new(
            ErrorCode::MethodNotAllowed,
            format!("{path} does not take {method}; see the header Allow"),
        ),
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(ErrorCode::BodyTooLarge, "the body is too large"),
        StatusCode::BAD_REQUEST
        | StatusCode::URI_TOO_LONG
        | StatusCode::UNSUPPORTED_MEDIA_TYPE
        | StatusCode::UNPROCESSABLE_ENTITY => {
            ApiError::new(ErrorCode::InvalidRequest, error_text(body).await)
        }
        StatusCode::INTERNAL_SERVER_ERROR => internal_error(),
        _ => return Response::from_parts(head, body),
    };
    let mut response = HttpError(error).into_response();
    if let Some(allow) = head.headers.get(header::ALLOW) {
        response.headers_mut().insert(header::ALLOW, allow.clone());
    }
    response
}

async fn error_text(body: Body) -> String {
    let short = body.size_hint().upper().is_some_and(|length| length <= ERROR_TEXT_MAX);
    let text = if short { body.collect().await.ok() } else { None };
    let text = text.map(|text| String::from_utf8_lossy(&text.to_bytes()).trim().to_owned());
    text.filter(|text| !text.is_empty()).unwrap_or_else(|| "the request is not valid".to_owned())
}

/// A response body that keeps its connection busy until it has been sent.
struct TrackedBody {
    body: Body,
    _active_request: ActiveRequest,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
