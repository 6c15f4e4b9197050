//! Requests that ask for a WebSocket, and what becomes of their connections. The guard has let them in like any other;
//! who takes one here owns it from then on, and it counts among the connections for as long as it is held.

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

use super::error::HttpError;
use super::serve::ConnectionPermit;

/// A request for a WebSocket, not answered yet.
#[derive(Debug)]
pub(crate) struct WebSocketRequest {
    key: HeaderValue,
    /// The subprotocols that it offers.
    subprotocols: Vec<String>,
    on_upgrade: OnUpgrade,
    permit: Option<Arc<ConnectionPermit>>,
}

impl WebSocketRequest {
    /// The same, if it offers this subprotocol.
    pub(crate) fn require_subprotocol(self, subprotocol: &str) -> Result<Self, ApiError> {
        match self.subprotocols.iter().any(|offer| offer.eq_ignore_ascii_case(subprotocol)) {
            true => Ok(self),
            false => Err(websocket_required(Some(subprotocol))),
        }
    }

    /// The answer, and the connection that there is once it has been sent; none if the peer went away before.
    pub(crate) fn accept(
        self,
        subprotocol: &'static str,
    ) -> (Response, impl Future<Output = Option<UpgradedConnection>> + Send + 'static) {
        let Self { key, subprotocols: _, on_upgrade: upgraded, permit: seat } = self;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(subprotocol));
        let accepted = HeaderValue::try_from(accept_key(key.as_bytes()));
        headers.insert(SEC_WEBSOCKET_ACCEPT, accepted.expect("base64 is plain ASCII"));
        let line = async move {
            let io = TokioIo::new(upgraded.await.ok()?);
            Some(UpgradedConnection { io, _permit: seat })
        };
        (response, line)
    }
}

impl<S: Send + Sync> FromRequest<S> for WebSocketRequest {
    type Rejection = HttpError;

    async fn from_request(mut request: Request, _: &S) -> Result<Self, HttpError> {
        let headers = request.headers();
        let asks = header_contains(headers, CONNECTION, "upgrade")
            && header_contains(headers, UPGRADE, "websocket")
            && header_contains(headers, SEC_WEBSOCKET_VERSION, "13");
        let key = headers.get(SEC_WEBSOCKET_KEY).filter(|_| asks).cloned();
        let offers = header_items(headers, SEC_WEBSOCKET_PROTOCOL).map(str::to_owned).collect();
        let upgraded = request.extensions_mut().remove::<OnUpgrade>();
        let (Some(key), Some(upgraded)) = (key, upgraded) else {
            return Err(HttpError(websocket_required(None)));
        };
        Ok(Self {
            key,
            subprotocols: offers,
            on_upgrade: upgraded,
            permit: request.extensions().get().cloned(),
        })
    }
}

/// What a route that takes only WebSockets says to anything else.
fn websocket_required(subprotocol: Option<&str>) -> ApiError {
    let of = subprotocol.map(|name| format!(" of the subprotocol `{name}`")).unwrap_or_default();
    ApiError::new(
        ErrorCode::InvalidRequest,
        format!("this route takes a WebSocket{of}; see `docs/workers.md`"),
    )
}

/// Whether a header that is a list has this among its words.
fn header_contains(headers: &HeaderMap, name: HeaderName, word: &str) -> bool {
    header_items(headers, name).any(|one| one.eq_ignore_ascii_case(word))
}

/// The words of a header that is a list.
fn header_items(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// A connection that is no longer HTTP.
#[derive(Debug)]
pub(crate) struct UpgradedConnection {
    io: TokioIo<Upgraded>,
    /// Its place among the connections; free again when it is dropped.
    _permit: Option<Arc<ConnectionPermit>>,
}

impl AsyncRead for UpgradedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, into)
    }
}

impl AsyncWrite for UpgradedConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
