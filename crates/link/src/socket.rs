//! A WebSocket over any stream, with our limits and our few needs: text frames in, text frames out in batches, pings
//! answered, and a peer that has gone silent told from one that has nothing to say.

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

/// One frame may be so large: a prompt with its files, escaped.
pub const FRAME_MAX: usize = 64 << 20;
/// Read at once. Small, since most connections are idle and the buffer is allocated with them; a larger frame gets a
/// larger one for as long as it takes.
const READ_BUFFER: usize = 4 << 10;
/// Frames are gathered up to this before they are written without a flush.
const WRITE_BUFFER: usize = 64 << 10;
/// The handshake and every other single step may take so long.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Which side of an upgrade that somebody else has done.
pub use tokio_tungstenite::tungstenite::protocol::Role;

/// What a server answers to the `Sec-WebSocket-Key` of an upgrade that it does itself.
pub fn accept_key(key: &[u8]) -> String {
    tungstenite::handshake::derive_accept_key(key)
}

/// What a client asks with that does its upgrade itself.
pub fn request_key() -> String {
    generate_key()
}

/// What a socket can run over.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> ByteStream for T {}

/// Why a socket is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The peer ended it, or it broke.
    #[error("the connection is closed")]
    Closed,
    /// The other side refused the upgrade.
    #[error("the upgrade was refused: {status} {reason}")]
    Refused {
        /// With this status of HTTP.
        status: u16,
        /// And these words, as far as they came with it.
        reason: String,
    },
    /// What was dialled can be no host or path.
    #[error("not an address: {0}")]
    InvalidAddress(String),
    /// We refused the peer, and have told it why.
    #[error("the peer was refused: {0}")]
    PeerRefused(String),
    /// It took too long.
    #[error("the peer did not answer in time")]
    TimedOut,
    /// The peer broke the rules of WebSocket, or the stream failed.
    #[error("the connection failed: {0}")]
    Failed(Box<tungstenite::Error>),
}

impl From<tungstenite::Error> for SocketError {
    fn from(error: tungstenite::Error) -> Self {
        match error {
            tungstenite::Error::ConnectionClosed | tungstenite::Error::AlreadyClosed => Self::Closed,
            tungstenite::Error::Http(answer) => {
                let status = answer.status().as_u16();
                let words = answer.into_body().map(|body| String::from_utf8_lossy(&body).into_owned());
                Self::Refused { status, reason: words.unwrap_or_default() }
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

/// How a client asks for the upgrade.
#[derive(Debug, Clone, Default)]
pub struct ClientUpgrade {
    /// The `Host` header.
    pub host: String,
    /// Path and query.
    pub path: String,
    /// The subprotocol to offer.
    pub subprotocol: Option<String>,
    /// The token to show.
    pub token: Option<String>,
}

/// One text frame that came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextFrame(Utf8Bytes);

impl TextFrame {
    /// Its words.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

/// What came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IncomingFrame {
    /// A text frame.
    Text(TextFrame),
    /// A binary frame.
    Binary(tungstenite::Bytes),
    /// A sign of life and no more. Pings are answered with the next flush.
    Alive,
}

/// What has come of waiting in both directions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SocketProgress {
    /// All that was started is written.
    Written,
    /// Something came in.
    Read(IncomingFrame),
}

/// A WebSocket.
#[derive(Debug)]
pub struct Socket<W> {
    ws: WebSocketStream<W>,
}

impl<W: ByteStream> Socket<W> {
    /// Upgrades as the client; true if the server chose the subprotocol that was offered.
    pub async fn connect(wire: W, upgrade: &ClientUpgrade) -> Result<(Self, bool), SocketError> {
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
        let shake = tokio_tungstenite::client_async_with_config(request, wire, Some(websocket_config()));
        let (ws, answer) = with_step_timeout(shake).await??;
        Ok((Self { ws }, answer.headers().contains_key(SEC_WEBSOCKET_PROTOCOL)))
    }

    /// Upgrades as the server: `admit` sees the request and chooses the subprotocol to answer with, or refuses with a
    /// status and a reason. An upgrade with an `Origin` is refused here: no web page has business with a worker.
    pub async fn accept<A>(wire: W, admit: A) -> Result<(Self, Option<String>), SocketError>
    where
        A: FnOnce(&Request) -> Result<Option<String>, (StatusCode, String)> + Unpin,
    {
        let mut chosen = None;
        // The type is tungstenite's: a refusal is a whole answer.
        #[expect(clippy::result_large_err, reason = "the signature of the callback is not ours")]
        let callback = |request: &Request, mut answer: Response| -> Result<Response, ErrorResponse> {
            let verdict = match request.headers().contains_key(ORIGIN) {
                true => Err((StatusCode::FORBIDDEN, "a web page cannot talk to a worker".to_owned())),
                false => admit(request),
            };
            match verdict {
                Ok(subprotocol) => {
                    if let Some(name) = &subprotocol
                        && let Ok(name) = HeaderValue::from_str(name)
                    {
                        answer.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, name);
                    }
                    chosen = subprotocol;
                    Ok(answer)
                }
                Err((status, reason)) => {
                    let mut refusal = ErrorResponse::new(Some(reason));
                    *refusal.status_mut() = status;
                    Err(refusal)
                }
            }
        };
        let shake = tokio_tungstenite::accept_hdr_async_with_config(wire, callback, Some(websocket_config()));
        let ws = with_step_timeout(shake).await??;
        Ok((Self { ws }, chosen))
    }

    /// Takes over a stream whose upgrade is done.
    pub async fn from_upgraded(wire: W, role: Role) -> Self {
        Self { ws: WebSocketStream::from_raw_socket(wire, role, Some(websocket_config())).await }
    }

    /// Waits for a frame. Nothing is lost if the wait is given up. Only terminals use binary frames; to all others they
    /// are a sign of life.
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

    /// Puts a frame into the buffer and never waits: for those who write with [`Socket::poll_flush`] while they read, and
    /// feed no more before that is done.
    pub fn queue_text(&mut self, text: String) -> Result<(), SocketError> {
        Ok(Pin::new(&mut self.ws).start_send(Message::text(text))?)
    }

    /// See [`Socket::start`]; the frame is a piece of something larger.
    pub fn queue_text_bytes(&mut self, text: tungstenite::Bytes) -> Result<(), SocketError> {
        let text = Utf8Bytes::try_from(text).map_err(|error| tungstenite::Error::Utf8(error.to_string()))?;
        Ok(Pin::new(&mut self.ws).start_send(Message::Text(text))?)
    }

    /// See [`Socket::start`]; a binary frame.
    pub fn queue_binary(&mut self, bytes: tungstenite::Bytes) -> Result<(), SocketError> {
        Ok(Pin::new(&mut self.ws).start_send(Message::Binary(bytes))?)
    }

    /// See [`Socket::feed_ping`] and [`Socket::start`].
    pub fn queue_ping(&mut self) -> Result<(), SocketError> {
        Ok(Pin::new(&mut self.ws).start_send(Message::Ping(tungstenite::Bytes::new()))?)
    }

    /// See [`Socket::flush`].
    pub fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        Pin::new(&mut self.ws).poll_flush(context).map_err(SocketError::from)
    }

    /// Waits until a frame has come or all that was started is written, as far as either is wanted. Nothing is lost if
    /// the wait is given up.
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

    /// Puts a frame into the buffer. It is written with the next [`Socket::flush`], or when the buffer is full.
    pub async fn feed(&mut self, frame: &impl Serialize) -> Result<(), SocketError> {
        let text = serde_json::to_string(frame)
            .map_err(|error| SocketError::Failed(Box::new(tungstenite::Error::Io(error.into()))))?;
        self.feed_text(text).await
    }

    /// See [`Socket::feed`]; the frame is JSON already.
    pub async fn feed_text(&mut self, text: String) -> Result<(), SocketError> {
        Ok(self.ws.feed(Message::text(text)).await?)
    }

    /// Asks for a sign of life; goes out with the next flush.
    pub async fn feed_ping(&mut self) -> Result<(), SocketError> {
        Ok(self.ws.feed(Message::Ping(tungstenite::Bytes::new())).await?)
    }

    /// Writes all that was fed.
    pub async fn flush(&mut self) -> Result<(), SocketError> {
        Ok(self.ws.flush().await?)
    }

    /// One frame, at once.
    pub async fn send(&mut self, frame: &impl Serialize) -> Result<(), SocketError> {
        self.feed(frame).await?;
        self.flush().await
    }

    /// Says goodbye, and does not wait long for the answer.
    pub async fn close(&mut self) {
        // Whether the peer heard it changes nothing for us.
        let _heard = tokio::time::timeout(STEP_TIMEOUT, self.ws.close(None)).await;
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
