//! The way of one request: past the guard, to the router, and back in our shape. A panic in a handler ends here as a
//! 500, and whatever made an error, a client finds the contract's JSON.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

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
use tokio::sync::Notify;
use tower::ServiceExt;

use super::body::{LimitedBody, UnreadBody, body_too_large};
use super::error::HttpError;
use super::guard::{BearerIdentity, BearerSession, ConnectionPeer, RequestGuard};
use super::serve::{ConnectionPermit, EdgeLimits};

/// The version that every answer carries.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How much of another layer's error text is taken over.
const ERROR_TEXT_MAX: u64 = 1024;

/// What stands between the connections and the router.
#[derive(Debug)]
pub(super) struct GuardedRouter {
    guard: RequestGuard,
    router: Router,
    pub(super) limits: EdgeLimits,
}

impl GuardedRouter {
    pub(super) fn new(guard: RequestGuard, router: Router, limits: EdgeLimits) -> Self {
        // Our own limit counts; axum's is smaller and answers in another shape.
        Self { guard, router: router.layer(DefaultBodyLimit::disable()), limits }
    }

    pub(super) async fn handle_request(
        self: Arc<Self>,
        peer: ConnectionPeer,
        activity: Arc<ConnectionActivity>,
        seat: Arc<ConnectionPermit>,
        request: hyper::Request<Incoming>,
    ) -> Result<Response, Infallible> {
        let turn = ActiveRequest::begin(activity);
        let (mut head, incoming) = request.into_parts();
        let (method, path) = (head.method.clone(), head.uri.path().to_owned());
        let leftover = UnreadBody::default();
        let held_back = head.headers.contains_key(header::EXPECT);
        let body = LimitedBody::new(incoming, held_back, &self.limits, leftover.clone());
        let response = match self.admit(&peer, &head, &body) {
            Ok(bearer) => {
                head.extensions.insert(peer);
                head.extensions.insert(seat);
                match bearer {
                    Some(BearerIdentity::Worker(token)) => drop(head.extensions.insert(token)),
                    Some(BearerIdentity::Session(session)) => {
                        drop(head.extensions.insert(BearerSession(session)))
                    }
                    None => {}
                }
                self.route(head, body).await
            }
            Err(error) => {
                tracing::info!(%method, path, ?peer, code = error.code.as_str(), "refused at the edge");
                drop(body);
                HttpError(error).into_response()
            }
        };
        leftover.drain(&self.limits).await;
        let mut response = normalize_error_response(response, &method, &path).await;
        response.headers_mut().insert(VERSION_HEADER, HeaderValue::from_static(VERSION));
        tracing::debug!(%method, path, ?peer, status = response.status().as_u16(), "answered");
        Ok(response.map(|body| Body::new(TrackedBody { body, _active_request: turn })))
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
                let said = panic.downcast_ref::<&str>().copied().map(str::to_owned);
                let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                tracing::error!(panic = said, "a handler panicked");
                HttpError(internal_error()).into_response()
            }
        }
    }
}

/// Turns an error that did not come from us (no such route, a bad query, a wrong method) into ours.
async fn normalize_error_response(response: Response, method: &Method, path: &str) -> Response {
    let ours = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if ours || !response.status().is_client_error() && !response.status().is_server_error() {
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
    text.filter(|text| !text.is_empty()).unwrap_or_else(|| "the request cannot be understood".to_owned())
}

fn internal_error() -> ApiError {
    ApiError::new(ErrorCode::Internal, "a fault of the daemon, not of the request; its log says more")
}

/// Whether a connection has a request on its way. It tells a shutdown which connections to wait for: one that has
/// merely begun to send its headers is not waited for.
#[derive(Debug, Default)]
pub(super) struct ConnectionActivity {
    busy: AtomicBool,
    changed: Notify,
}

impl ConnectionActivity {
    /// Ends when there has been no request on its way for so long.
    pub(super) async fn wait_until_idle(&self, while_: Duration) {
        loop {
            // Made before the look, so that no change between the two is missed.
            let changed = self.changed.notified();
            if self.busy.load(Ordering::Acquire) {
                changed.await;
            } else if tokio::time::timeout(while_, changed).await.is_err() {
                return;
            }
        }
    }
}

/// One request's time between its headers and the last byte of its answer. A connection has one at a time.
#[derive(Debug)]
struct ActiveRequest(Arc<ConnectionActivity>);

impl ActiveRequest {
    fn begin(activity: Arc<ConnectionActivity>) -> Self {
        activity.busy.store(true, Ordering::Release);
        activity.changed.notify_one();
        Self(activity)
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
        self.0.changed.notify_one();
    }
}

/// An answer's body that keeps its connection busy until it has been sent.
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
