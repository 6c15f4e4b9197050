//! Requests that ask for a WebSocket, and their connections afterwards. The guard has admitted them like any other
//! request. The handler that accepts one owns the connection, which counts towards the limit as long as it is held.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::header::{
    CONNECTION, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use qd_link::socket::accept_key;
use qd_protocol::{ApiError, ErrorCode};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;

use super::connection_limit::{ConnectionPermit, too_many_streams};
use super::error::HttpError;

/// A request for a WebSocket that has not been answered yet.
#[derive(Debug)]
pub(crate) struct WebSocketRequest {
    key: HeaderValue,
    subprotocols: Vec<String>,
    on_upgrade: OnUpgrade,
    permit: Option<Arc<ConnectionPermit>>,
    /// Taken if there is one: workers may also use the connections that are reserved for commands.
    stream_permit: Option<OwnedSemaphorePermit>,
}

impl WebSocketRequest {
    /// Returns the request if it offers this subprotocol, else an error.
    pub(crate) fn require_subprotocol(self, subprotocol: &str) -> Result<Self, ApiError> {
        match self.subprotocols.iter().any(|offer| offer.eq_ignore_ascii_case(subprotocol)) {
            true => Ok(self),
            false => Err(websocket_required(Some(subprotocol))),
        }
    }

    /// Returns the request unless too many connections are used for a long time.
    pub(crate) fn require_stream_permit(self) -> Result<Self, ApiError> {
        match self.stream_permit.is_some() || self.permit.is_none() {
            true => Ok(self),
            false => Err(too_many_streams()),
        }
    }

    /// The response, and the connection once the response is sent; `None` if the client disconnected before.
    pub(crate) fn accept(
        self,
        subprotocol: &'static str,
    ) -> (Response, impl Future<Output = Option<UpgradedConnection>> + Send + 'static) {
        let Self { key, subprotocols: _, on_upgrade, permit, stream_permit } = self;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(subprotocol));
        let accepted = HeaderValue::try_from(accept_key(key.as_bytes()));
        headers.insert(SEC_WEBSOCKET_ACCEPT, accepted.expect("base64 is plain ASCII"));
        let connection = async move {
            let io = TokioIo::new(on_upgrade.await.ok()?);
            Some(UpgradedConnection { io, _permit: permit, _stream_permit: stream_permit })
        };
        (response, connection)
    }
}

impl<S: Send + Sync> FromRequest<S> for WebSocketRequest {
    type Rejection = HttpError;

    async fn from_request(mut request: Request, _: &S) -> Result<Self, HttpError> {
        let headers = request.headers();
        let is_websocket = header_contains(headers, CONNECTION, "upgrade")
            && header_contains(headers, UPGRADE, "websocket")
            && header_contains(headers, SEC_WEBSOCKET_VERSION, "13");
        let key = headers.get(SEC_WEBSOCKET_KEY).filter(|_| is_websocket).cloned();
        let subprotocols = header_items(headers, SEC_WEBSOCKET_PROTOCOL).map(str::to_owned).collect();
        let on_upgrade = request.extensions_mut().remove::<OnUpgrade>();
        let (Some(key), Some(on_upgrade)) = (key, on_upgrade) else {
            return Err(HttpError(websocket_required(None)));
        };
        let permit: Option<Arc<ConnectionPermit>> = request.extensions().get().cloned();
        let stream_permit = permit.as_ref().and_then(|permit| permit.try_count_as_stream());
        Ok(Self { key, subprotocols, on_upgrade, permit, stream_permit })
    }
}

/// The error of a WebSocket route for any other request.
fn websocket_required(subprotocol: Option<&str>) -> ApiError {
    let which = subprotocol.map(|name| format!(" of the subprotocol `{name}`")).unwrap_or_default();
    ApiError::new(
        ErrorCode::InvalidRequest,
        format!("this route needs a WebSocket{which}; see `docs/workers.md`"),
    )
}

/// Whether a list header contains this item.
fn header_contains(headers: &HeaderMap, name: HeaderName, item: &str) -> bool {
    header_items(headers, name).any(|candidate| candidate.eq_ignore_ascii_case(item))
}

/// The items of a list header.
fn header_items(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// A connection after its upgrade.
#[derive(Debug)]
pub(crate) struct UpgradedConnection {
    io: TokioIo<Upgraded>,
    /// Its permit among the connections, released when this is dropped.
    _permit: Option<Arc<ConnectionPermit>>,
    _stream_permit: Option<OwnedSemaphorePermit>,
}

impl AsyncRead for UpgradedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl AsyncWrite for UpgradedConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
