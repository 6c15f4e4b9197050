//! A WebSocket over any stream, reduced to what we need: text frames in, text frames out in batches, pings answered,
//! and our size limits.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Sink, SinkExt, Stream};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::header::{
    AUTHORIZATION, CONNECTION, HOST, HeaderValue, ORIGIN, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use tokio_tungstenite::tungstenite::http::{Request as HttpRequest, StatusCode};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Message, Utf8Bytes};

/// The largest frame: a prompt with its files, escaped.
pub const FRAME_MAX: usize = 64 << 20;
/// Size of the read buffer. It is small, because most connections are idle and each allocates one; a larger frame gets
/// a larger buffer temporarily.
const READ_BUFFER: usize = 4 << 10;
/// Frames are collected up to this size before they are written without a flush.
const WRITE_BUFFER: usize = 64 << 10;
/// Time limit for the handshake and every other single step.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// The side that we have in an upgrade done by somebody else.
pub use tokio_tungstenite::tungstenite::protocol::Role;

/// The `Sec-WebSocket-Accept` for a `Sec-WebSocket-Key`, for a server that does the upgrade itself.
pub fn accept_key(key: &[u8]) -> String {
    tungstenite::handshake::derive_accept_key(key)
}

/// A fresh `Sec-WebSocket-Key`, for a client that does the upgrade itself.
pub fn request_key() -> String {
    generate_key()
}

/// A stream that a socket can run over.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> ByteStream for T {}

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The peer closed the connection, or it broke.
    #[error("the connection is closed")]
    Closed,
    /// The server refused the upgrade.
    #[error("the upgrade was refused: {status} {reason}")]
    Refused {
        /// The HTTP status of the refusal.
        status: u16,
        /// The body of the refusal, as far as it was received.
        reason: String,
    },
    /// The address is not a valid host or path.
    #[error("invalid address: {0}")]
    InvalidAddress(String),
    /// We refused the peer, and told it why.
    #[error("the peer was refused: {0}")]
    PeerRefused(String),
    /// A step took longer than [`STEP_TIMEOUT`].
    #[error("the peer did not answer in time")]
    TimedOut,
    /// The peer violated the WebSocket protocol, or the stream failed.
    #[error("the connection failed: {0}")]
    Failed(Box<tungstenite::Error>),
}

impl From<tungstenite::Error> for SocketError {
    fn from(error: tungstenite::Error) -> Self {
        match error {
            tungstenite::Error::ConnectionClosed | tungstenite::Error::AlreadyClosed => Self::Closed,
            tungstenite::Error::Http(response) => {
                let status = response.status().as_u16();
                let reason = response.into_body().map(|body| String::from_utf8_lossy(&body).into_owned());
                Self::Refused { status, reason: reason.unwrap_or_default() }
            }
            other => Self::Failed(Box::new(other)),
        }
    }
}

impl From<std::io::Error> for SocketError {
    fn from(error: std::io::Error) -> Self {
        tungstenite::Error::Io(error).into()
    }
}

/// What a client sends in its upgrade.
#[derive(Debug, Clone, Default)]
pub struct ClientUpgrade {
    /// The `Host` header.
    pub host: String,
    /// Path and query.
    pub path: String,
    /// The subprotocol to offer.
    pub subprotocol: Option<String>,
    /// The bearer token to send.
    pub token: Option<String>,
}

/// A text frame that was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextFrame(Utf8Bytes);

impl TextFrame {
    /// The text.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

/// A frame that was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IncomingFrame {
    /// A text frame.
    Text(TextFrame),
    /// A binary frame.
    Binary(tungstenite::Bytes),
    /// A ping or pong. The next flush answers a ping.
    Alive,
}

/// The result of waiting for reads and writes at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SocketProgress {
    /// Everything queued is written.
    Written,
    /// A frame has arrived.
    Read(IncomingFrame),
}

/// A WebSocket, as either side.
#[derive(Debug)]
pub struct Socket<W> {
    ws: WebSocketStream<W>,
}

impl<W: ByteStream> Socket<W> {
    /// Upgrades as the client. The bool is true if the server chose the offered subprotocol.
    pub async fn connect(stream: W, upgrade: &ClientUpgrade) -> Result<(Self, bool), SocketError> {
        let mut request = HttpRequest::builder()
            .uri(format!("ws://{}{}", upgrade.host, upgrade.path))
            .header(HOST, upgrade.host.as_str())
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, "websocket")
            .header(SEC_WEBSOCKET_VERSION, "13")
            .header(SEC_WEBSOCKET_KEY, generate_key());
        if let Some(subprotocol) = &upgrade.subprotocol {
            request = request.header(SEC_WEBSOCKET_PROTOCOL, subprotocol.as_str());
        }
        if let Some(token) = &upgrade.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(()).map_err(|error| SocketError::InvalidAddress(error.to_string()))?;
        let handshake =
            tokio_tungstenite::client_async_with_config(request, stream, Some(websocket_config()));
        let (ws, response) = with_step_timeout(handshake).await??;
        Ok((Self { ws }, response.headers().contains_key(SEC_WEBSOCKET_PROTOCOL)))
    }

    /// Upgrades as the server. `admit` sees the request and chooses the subprotocol to answer with, or refuses with a
    /// status and a reason. A request with an `Origin` is always refused: web pages have no business with a worker.
    pub async fn accept<A>(stream: W, admit: A) -> Result<(Self, Option<String>), SocketError>
    where
        A: FnOnce(&Request) -> Result<Option<String>, (StatusCode, String)> + Unpin,
    {
        let mut chosen = None;
        // The type is given by tungstenite, where a refusal is a whole response.
        #[expect(clippy::result_large_err, reason = "the signature of the callback is not ours")]
        let callback = |request: &Request, mut response: Response| -> Result<Response, ErrorResponse> {
            let verdict = match request.headers().contains_key(ORIGIN) {
                true => Err((StatusCode::FORBIDDEN, "web pages may not connect to a worker".to_owned())),
                false => admit(request),
            };
            match verdict {
                Ok(subprotocol) => {
                    if let Some(name) = &subprotocol
                        && let Ok(name) = HeaderValue::from_str(name)
                    {
                        response.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, name);
                    }
                    chosen = subprotocol;
                    Ok(response)
                }
                Err((status, reason)) => {
                    let mut refusal = ErrorResponse::new(Some(reason));
                    *refusal.status_mut() = status;
                    Err(refusal)
                }
            }
        };
        let handshake =
            tokio_tungstenite::accept_hdr_async_with_config(stream, callback, Some(websocket_config()));
        let ws = with_step_timeout(handshake).await??;
        Ok((Self { ws }, chosen))
    }

    /// Takes over a stream whose upgrade is already done.
    pub async fn from_upgraded(stream: W, role: Role) -> Self {
        Self { ws: WebSocketStream::from_raw_socket(stream, role, Some(websocket_config())).await }
    }

    /// Waits for a frame. Cancelling the wait loses nothing. Only terminals use binary frames; other callers treat
    /// them as a sign of life.
    pub async fn next(&mut self) -> Result<IncomingFrame, SocketError> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// See [`Socket::next`].
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<IncomingFrame, SocketError>> {
        match Pin::new(&mut self.ws).poll_next(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None | Some(Ok(Message::Close(_)))) => Poll::Ready(Err(SocketError::Closed)),
            Poll::Ready(Some(Ok(Message::Text(text)))) => {
                Poll::Ready(Ok(IncomingFrame::Text(TextFrame(text))))
            }
            Poll::Ready(Some(Ok(Message::Binary(bytes)))) => Poll::Ready(Ok(IncomingFrame::Binary(bytes))),
            Poll::Ready(Some(Ok(_))) => Poll::Ready(Ok(IncomingFrame::Alive)),
            Poll::Ready(Some(Err(error))) => Poll::Ready(Err(error.into())),
        }
    }

    /// Queues a frame without waiting. For callers that write with [`Socket::poll_flush`] while they read, and queue
    /// no more until the flush is done.
    pub fn queue_text(&mut self, text: String) -> Result<(), SocketError> {
        Ok(Pin::new(&mut self.ws).start_send(Message::text(text))?)
    }

    /// Like [`Socket::queue_text`], for a slice of a larger buffer.
    pub fn queue_text_bytes(&mut self, text: tungstenite::Bytes) -> Result<(), SocketError> {
        let text = Utf8Bytes::try_from(text).map_err(|error| tungstenite::Error::Utf8(error.to_string()))?;
        Ok(Pin::new(&mut self.ws).start_send(Message::Text(text))?)
    }

    /// Like [`Socket::queue_text`], for a binary frame.
    pub fn queue_binary(&mut self, bytes: tungstenite::Bytes) -> Result<(), SocketError> {
        Ok(Pin::new(&mut self.ws).start_send(Message::Binary(bytes))?)
    }

    /// Like [`Socket::queue_text`], for a ping.
    pub fn queue_ping(&mut self) -> Result<(), SocketError> {
        Ok(Pin::new(&mut self.ws).start_send(Message::Ping(tungstenite::Bytes::new()))?)
    }

    /// See [`Socket::flush`].
    pub fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        Pin::new(&mut self.ws).poll_flush(context).map_err(SocketError::from)
    }

    /// Waits until a frame arrives (if `reading`) or everything queued is written (if `writing`). Cancelling the wait
    /// loses nothing.
    pub async fn progress(&mut self, reading: bool, writing: bool) -> Result<SocketProgress, SocketError> {
        std::future::poll_fn(|context| {
            if reading && let Poll::Ready(frame) = self.poll_next(context) {
                return Poll::Ready(frame.map(SocketProgress::Read));
            }
            if writing && let Poll::Ready(written) = self.poll_flush(context) {
                return Poll::Ready(written.map(|()| SocketProgress::Written));
            }
            Poll::Pending
        })
        .await
    }

    /// Queues a frame. It is written by the next [`Socket::flush`], or when the buffer is full.
    pub async fn feed(&mut self, frame: &impl Serialize) -> Result<(), SocketError> {
        let text = serde_json::to_string(frame)
            .map_err(|error| SocketError::Failed(Box::new(tungstenite::Error::Io(error.into()))))?;
        self.feed_text(text).await
    }

    /// Like [`Socket::feed`], for a frame that is JSON already.
    pub async fn feed_text(&mut self, text: String) -> Result<(), SocketError> {
        Ok(self.ws.feed(Message::text(text)).await?)
    }

    /// Queues a ping; the next flush writes it.
    pub async fn feed_ping(&mut self) -> Result<(), SocketError> {
        Ok(self.ws.feed(Message::Ping(tungstenite::Bytes::new())).await?)
    }

    /// Writes everything queued.
    pub async fn flush(&mut self) -> Result<(), SocketError> {
        Ok(self.ws.flush().await?)
    }

    /// Queues a frame and flushes it.
    pub async fn send(&mut self, frame: &impl Serialize) -> Result<(), SocketError> {
        self.feed(frame).await?;
        self.flush().await
    }

    /// Sends a close frame and waits for the answer, for at most [`STEP_TIMEOUT`].
    pub async fn close(&mut self) {
        // Whether the peer received it makes no difference to us.
        let _closed = tokio::time::timeout(STEP_TIMEOUT, self.ws.close(None)).await;
    }
}

async fn with_step_timeout<F: Future>(step: F) -> Result<F::Output, SocketError> {
    tokio::time::timeout(STEP_TIMEOUT, step).await.map_err(|_| SocketError::TimedOut)
}

fn websocket_config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(WRITE_BUFFER)
        .max_message_size(Some(FRAME_MAX))
        .max_frame_size(Some(FRAME_MAX))
}
