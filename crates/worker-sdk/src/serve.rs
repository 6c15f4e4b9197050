//! The server of a worker: it listens, checks tokens, and serves connections one after another or all at once. The
//! frames are handled elsewhere; the [`ServerTransport`] decides whether the connection is encrypted, and the
//! [`Subprotocol`] serves peers that want more than the plain frames.

mod subprotocol;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use qd_protocol::limits::CONNECTIONS_MAX;
use qd_protocol::worker::Secret;
use rustix::net::sockopt;
use subtle::ConstantTimeEq;
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::handshake::server::Request;
use tokio_tungstenite::tungstenite::http::StatusCode;
use tokio_tungstenite::tungstenite::http::header::{AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL};
use tokio_util::sync::CancellationToken;

pub use self::subprotocol::{PlainFramesOnly, Subprotocol};
use crate::executor::Executor;
use crate::plain;
use crate::socket::{ByteStream, STEP_TIMEOUT, Socket, SocketError};

/// Silence before the kernel probes a peer. The peer is given up after twice as long.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// Pause after a failed accept, for example when no file descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Which connections a server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServeMode {
    /// The first connection only.
    One {
        /// How long to wait for the connection. Once accepted, it has no time limit.
        accept_timeout: Option<Duration>,
    },
    /// One connection after another. Further peers wait before the upgrade.
    Reusable {
        /// How long to wait for the next connection before the server ends.
        idle_timeout: Duration,
    },
    /// Any number of connections at once.
    Many,
}

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum WorkerServeError {
    /// The address cannot be listened on.
    #[error("failed to listen: {0}")]
    Listen(#[from] io::Error),
    /// The address is reachable from other machines, but token or encryption is missing.
    #[error("{0} is reachable from other machines: set a token and use TLS")]
    Exposed(SocketAddr),
    /// See [`ServeMode::One`].
    #[error("nobody connected within {0:?}")]
    NoConnection(Duration),
}

/// The layer between TCP and the WebSocket, such as TLS.
pub trait ServerTransport: Send + Sync + 'static {
    /// The stream that the WebSocket runs over.
    type WrappedStream: ByteStream;
    /// Whether the layer encrypts.
    const ENCRYPTED: bool;
    /// Wraps a new connection, within a few seconds.
    fn wrap(&self, stream: TcpStream) -> impl Future<Output = io::Result<Self::WrappedStream>> + Send;
}

/// Plain TCP.
#[derive(Debug, Clone, Copy, Default)]
pub struct UnencryptedTcp;

impl ServerTransport for UnencryptedTcp {
    type WrappedStream = TcpStream;
    const ENCRYPTED: bool = false;

    async fn wrap(&self, stream: TcpStream) -> io::Result<TcpStream> {
        Ok(stream)
    }
}

/// A worker's server that is already listening.
#[derive(Debug)]
pub struct WorkerServer<T = UnencryptedTcp, P = PlainFramesOnly> {
    listener: TcpListener,
    address: SocketAddr,
    transport: T,
    subprotocol: P,
    token: Option<Secret>,
    stop: CancellationToken,
}

impl WorkerServer {
    /// Starts listening. Port 0 picks a free port.
    pub async fn bind(address: impl ToSocketAddrs) -> Result<Self, WorkerServeError> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self {
            listener,
            address,
            transport: UnencryptedTcp,
            subprotocol: PlainFramesOnly,
            token: None,
            stop: CancellationToken::new(),
        })
    }
}

impl<T: ServerTransport, P: Subprotocol> WorkerServer<T, P> {
    /// Requires `Authorization: Bearer TOKEN` from every peer.
    #[must_use]
    pub fn with_token(self, token: impl Into<String>) -> Self {
        Self { token: Some(Secret(token.into())), ..self }
    }

    /// Puts a layer under the WebSocket, TLS for example.
    #[must_use]
    pub fn with_transport<U: ServerTransport>(self, transport: U) -> WorkerServer<U, P> {
        let Self { listener, address, subprotocol, token, stop, .. } = self;
        WorkerServer { listener, address, transport, subprotocol, token, stop }
    }

    /// Serves peers that offer this subprotocol with it. All others get the plain frames.
    #[must_use]
    pub fn with_subprotocol<S: Subprotocol>(self, subprotocol: S) -> WorkerServer<T, S> {
        let Self { listener, address, transport, token, stop, .. } = self;
        WorkerServer { listener, address, transport, subprotocol, token, stop }
    }

    /// Shuts down when this token is cancelled: no more connections are accepted, and runs are cancelled with their
    /// grace.
    #[must_use]
    pub fn with_shutdown(self, stop: CancellationToken) -> Self {
        Self { stop, ..self }
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address as a `ws://` or `wss://` URL.
    pub fn endpoint(&self) -> String {
        format!("{}://{}", if T::ENCRYPTED { "wss" } else { "ws" }, self.address)
    }

    /// Whether other machines could connect without a token, or read the traffic. [`WorkerServer::serve`] refuses to
    /// run then.
    pub fn is_exposed(&self) -> bool {
        !self.address.ip().is_loopback() && (self.token.is_none() || !T::ENCRYPTED)
    }

    /// Serves connections. Dropping the future ends all connections and runs at once.
    pub async fn serve<E: Executor>(self, executor: E, mode: ServeMode) -> Result<(), WorkerServeError> {
        if self.is_exposed() {
            return Err(WorkerServeError::Exposed(self.address));
        }
        let Self { listener, transport, subprotocol, token, stop, .. } = self;
        let executor = Arc::new(executor);
        let acceptor = ConnectionAcceptor { transport, subprotocol, token, executor, stop };
        match mode {
            ServeMode::One { accept_timeout } => acceptor.serve_one(listener, accept_timeout).await,
            ServeMode::Reusable { idle_timeout } => {
                acceptor.serve_sequentially(&listener, idle_timeout).await;
                Ok(())
            }
            ServeMode::Many => {
                Arc::new(acceptor).serve_many(&listener).await;
                Ok(())
            }
        }
    }
}

/// The parts of the server that every connection needs.
struct ConnectionAcceptor<E, T, P> {
    transport: T,
    subprotocol: P,
    token: Option<Secret>,
    executor: Arc<E>,
    stop: CancellationToken,
}

impl<E: Executor, T: ServerTransport, P: Subprotocol> ConnectionAcceptor<E, T, P> {
    async fn serve_one(self, listener: TcpListener, limit: Option<Duration>) -> Result<(), WorkerServeError> {
        let first = self.stop.run_until_cancelled(self.accept_next(&listener));
        let first = match limit {
            Some(limit) => {
                tokio::time::timeout(limit, first).await.map_err(|_| WorkerServeError::NoConnection(limit))?
            }
            None => first.await,
        };
        // Later peers are refused at once instead of left waiting.
        drop(listener);
        if let Some(peer) = first {
            self.serve_accepted(peer).await;
        }
        Ok(())
    }

    async fn serve_sequentially(self, listener: &TcpListener, limit: Duration) {
        loop {
            let next = self.stop.run_until_cancelled(self.accept_next(listener));
            match tokio::time::timeout(limit, next).await {
                Ok(Some(peer)) => self.serve_accepted(peer).await,
                // A run that continues without its connection is not idle.
                Err(_) if self.subprotocol.is_busy() => {}
                Ok(None) | Err(_) => return,
            }
        }
    }

    async fn serve_many(self: Arc<Self>, listener: &TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                () = self.stop.cancelled() => break,
                Some(ended) = connections.join_next() => log_panic(ended),
                stream = accept_tcp(listener), if connections.len() < CONNECTIONS_MAX => {
                    let acceptor = Arc::clone(&self);
                    connections.spawn(async move {
                        // Boxed, so that a thousand idle connections do not keep the memory that only the upgrade
                        // needs.
                        match Box::pin(acceptor.upgrade_connection(stream)).await {
                            Ok(peer) => acceptor.serve_accepted(peer).await,
                            Err(error) => tracing::debug!("refused a connection: {error}"),
                        }
                    });
                }
            }
        }
        while let Some(ended) = connections.join_next().await {
            log_panic(ended);
        }
    }

    /// The next peer that passes the checks. Refused peers do not count.
    async fn accept_next(&self, listener: &TcpListener) -> AcceptedPeer<T::WrappedStream> {
        loop {
            match self.upgrade_connection(accept_tcp(listener).await).await {
                Ok(peer) => return peer,
                Err(error) => tracing::debug!("refused a connection: {error}"),
            }
        }
    }

    async fn upgrade_connection(
        &self,
        stream: TcpStream,
    ) -> Result<AcceptedPeer<T::WrappedStream>, SocketError> {
        // Without this, every frame that follows another waits for the peer's delayed acknowledgement.
        stream.set_nodelay(true)?;
        let wrapped = tokio::time::timeout(STEP_TIMEOUT, self.transport.wrap(stream)).await;
        let stream = wrapped.map_err(|_| SocketError::TimedOut)??;
        let (socket, subprotocol) = Socket::accept(stream, |request| {
            if !self.has_valid_token(request) {
                return Err((StatusCode::UNAUTHORIZED, "missing or wrong token".to_owned()));
            }
            Ok(P::NAME.filter(|name| offers_subprotocol(request, name)).map(str::to_owned))
        })
        .await?;
        Ok(AcceptedPeer { socket, wants_subprotocol: subprotocol.is_some() })
    }

    fn has_valid_token(&self, request: &Request) -> bool {
        let Some(Secret(token)) = &self.token else { return true };
        let given =
            request.headers().get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        given.is_some_and(|given| given.ct_eq(token.as_bytes()).into())
    }

    async fn serve_accepted(&self, peer: AcceptedPeer<T::WrappedStream>) {
        if !peer.wants_subprotocol {
            return plain::server::serve_connection(peer.socket, Arc::clone(&self.executor), &self.stop)
                .await;
        }
        // Boxed, since most connections are of the other kind, whose future is smaller.
        let serving = Box::pin(self.subprotocol.serve(&self.executor, peer.socket));
        if let Some(Err(error)) = self.stop.run_until_cancelled(serving).await {
            tracing::debug!("a connection with a subprotocol ended: {error}");
        }
    }
}

struct AcceptedPeer<W> {
    socket: Socket<W>,
    /// Whether the peer has offered our subprotocol.
    wants_subprotocol: bool,
}

async fn accept_tcp(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Err(error) = enable_keepalive(&stream) {
                    tracing::debug!("failed to enable TCP keepalive: {error}");
                }
                return stream;
            }
            Err(error) => {
                tracing::warn!("failed to accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Lets the kernel notice a parent whose network or power has failed. The plain frames have no ping for this.
fn enable_keepalive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_IDLE / 3)?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}

fn offers_subprotocol(request: &Request, name: &str) -> bool {
    let offers = request.headers().get_all(SEC_WEBSOCKET_PROTOCOL).into_iter();
    offers
        .filter_map(|offer| offer.to_str().ok())
        .flat_map(|offer| offer.split(','))
        .any(|offer| offer.trim() == name)
}

fn log_panic(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!("a connection's task panicked: {error}");
    }
}
