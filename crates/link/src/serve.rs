//! The door of a worker: listens, lets in who may come, and serves the connections one after another or all at once.
//! What is spoken on them is elsewhere; whether it is encrypted is decided by the [`Transport`] under it.

mod endpoints;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use qd_protocol::frame::v1;
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

use self::endpoints::EndpointRegistry;
use crate::executor::Executor;
use crate::plain;
use crate::socket::{ByteStream, STEP_TIMEOUT, Socket, SocketError};

/// Silence before the kernel asks a peer for a sign of life; it is given up after twice as long.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// How long to wait when the system has no connection to give, for instance for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Which connections are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServeMode {
    /// The first, and then no more.
    One {
        /// How long to wait for it. One who was let in has all the time in the world.
        accept_timeout: Option<Duration>,
    },
    /// One after another; who comes meanwhile waits before the upgrade.
    Reusable {
        /// How long to wait for the next, before it is the end.
        idle_timeout: Duration,
    },
    /// Any number at once.
    Many,
}

/// Why serving ended other than as planned.
#[derive(Debug, thiserror::Error)]
pub enum WorkerServeError {
    /// The address cannot be listened on.
    #[error("failed to listen: {0}")]
    Listen(#[from] io::Error),
    /// Anybody could come, or listen in.
    #[error("{0} can be reached by others: that needs a token and TLS")]
    Exposed(SocketAddr),
    /// See [`Serve::One`].
    #[error("nobody connected within {0:?}")]
    NoConnection(Duration),
}

/// What lies between TCP and the WebSocket.
pub trait ServerTransport: Send + Sync + 'static {
    /// What comes of a connection.
    type WrappedStream: ByteStream;
    /// Whether nobody on the way can read it.
    const ENCRYPTED: bool;
    /// Makes it of a fresh connection. The door gives it a few seconds.
    fn wrap(&self, stream: TcpStream) -> impl Future<Output = io::Result<Self::WrappedStream>> + Send;
}

/// Nothing lies between them.
#[derive(Debug, Clone, Copy, Default)]
pub struct UnencryptedTcp;

impl ServerTransport for UnencryptedTcp {
    type WrappedStream = TcpStream;
    const ENCRYPTED: bool = false;

    async fn wrap(&self, stream: TcpStream) -> io::Result<TcpStream> {
        Ok(stream)
    }
}

/// A worker's server, which listens already.
#[derive(Debug)]
pub struct WorkerServer<T = UnencryptedTcp> {
    listener: TcpListener,
    address: SocketAddr,
    transport: T,
    token: Option<Secret>,
    stop: CancellationToken,
}

impl WorkerServer {
    /// Listens; port 0 is any free one.
    pub async fn bind(address: impl ToSocketAddrs) -> Result<Self, WorkerServeError> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address, transport: UnencryptedTcp, token: None, stop: CancellationToken::new() })
    }
}

impl<T: ServerTransport> WorkerServer<T> {
    /// Asks everybody for `Authorization: Bearer TOKEN`.
    #[must_use]
    pub fn with_token(self, token: impl Into<String>) -> Self {
        Self { token: Some(Secret(token.into())), ..self }
    }

    /// Puts something under the WebSocket, TLS for instance.
    #[must_use]
    pub fn with_transport<U: ServerTransport>(self, transport: U) -> WorkerServer<U> {
        let Self { listener, address, token, stop, .. } = self;
        WorkerServer { listener, address, transport, token, stop }
    }

    /// Ends when this says so: nobody is let in any more, runs are cancelled and have their time to end.
    #[must_use]
    pub fn with_shutdown(self, stop: CancellationToken) -> Self {
        Self { stop, ..self }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens, as a URL.
    pub fn endpoint(&self) -> String {
        format!("{}://{}", if T::ENCRYPTED { "wss" } else { "ws" }, self.address)
    }

    /// Whether others than this machine could come or listen in: such a server does not serve.
    pub fn is_exposed(&self) -> bool {
        !self.address.ip().is_loopback() && (self.token.is_none() || !T::ENCRYPTED)
    }

    /// Serves. Dropping it ends all connections and runs at once.
    pub async fn serve<E: Executor>(self, executor: E, mode: ServeMode) -> Result<(), WorkerServeError> {
        if self.is_exposed() {
            return Err(WorkerServeError::Exposed(self.address));
        }
        let Self { listener, transport, token, stop, .. } = self;
        let executor = Arc::new(executor);
        let seats = EndpointRegistry::new(Arc::clone(&executor));
        let door = ConnectionAcceptor { transport, token, executor, endpoints: seats, stop };
        match mode {
            ServeMode::One { accept_timeout } => door.serve_one(listener, accept_timeout).await,
            ServeMode::Reusable { idle_timeout } => {
                door.serve_sequentially(&listener, idle_timeout).await;
                Ok(())
            }
            ServeMode::Many => {
                Arc::new(door).serve_many(&listener).await;
                Ok(())
            }
        }
    }
}

/// What every connection needs of the server.
struct ConnectionAcceptor<E, T> {
    transport: T,
    token: Option<Secret>,
    executor: Arc<E>,
    /// The sessions of those who speak `quarterdeck.v1`.
    endpoints: EndpointRegistry<E>,
    stop: CancellationToken,
}

impl<E: Executor, T: ServerTransport> ConnectionAcceptor<E, T> {
    async fn serve_one(self, listener: TcpListener, limit: Option<Duration>) -> Result<(), WorkerServeError> {
        let first = self.stop.run_until_cancelled(self.accept_next(&listener));
        let first = match limit {
            Some(limit) => {
                tokio::time::timeout(limit, first).await.map_err(|_| WorkerServeError::NoConnection(limit))?
            }
            None => first.await,
        };
        // Who comes now is refused at once instead of left waiting.
        drop(listener);
        if let Some(guest) = first {
            self.serve_accepted(guest).await;
        }
        Ok(())
    }

    async fn serve_sequentially(self, listener: &TcpListener, limit: Duration) {
        loop {
            let next = self.stop.run_until_cancelled(self.accept_next(listener));
            match tokio::time::timeout(limit, next).await {
                Ok(Some(guest)) => self.serve_accepted(guest).await,
                // A run that goes on without its daemon is not idle.
                Err(_) if self.endpoints.is_busy() => {}
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
                    let door = Arc::clone(&self);
                    connections.spawn(async move {
                        // Boxed, so that what only the beginning needs is not kept by a thousand idle connections.
                        match Box::pin(door.upgrade_connection(stream)).await {
                            Ok(guest) => door.serve_accepted(guest).await,
                            Err(error) => tracing::debug!("not let in: {error}"),
                        }
                    });
                }
            }
        }
        while let Some(ended) = connections.join_next().await {
            log_panic(ended);
        }
    }

    /// The next one who may come in. One who may not does not count.
    async fn accept_next(&self, listener: &TcpListener) -> AcceptedPeer<T::WrappedStream> {
        loop {
            match self.upgrade_connection(accept_tcp(listener).await).await {
                Ok(guest) => return guest,
                Err(error) => tracing::debug!("not let in: {error}"),
            }
        }
    }

    async fn upgrade_connection(
        &self,
        stream: TcpStream,
    ) -> Result<AcceptedPeer<T::WrappedStream>, SocketError> {
        // Without it every frame that follows another waits for the peer's delayed acknowledgement.
        stream.set_nodelay(true)?;
        let wrapped = tokio::time::timeout(STEP_TIMEOUT, self.transport.wrap(stream)).await;
        let wire = wrapped.map_err(|_| SocketError::TimedOut)??;
        let (socket, subprotocol) = Socket::accept(wire, |request| {
            if !self.has_valid_token(request) {
                return Err((StatusCode::UNAUTHORIZED, "a token is needed, and the right one".to_owned()));
            }
            Ok(offers_v1(request).then(|| v1::SUBPROTOCOL.to_owned()))
        })
        .await?;
        Ok(AcceptedPeer { socket, speaks_v1: subprotocol.is_some() })
    }

    fn has_valid_token(&self, request: &Request) -> bool {
        let Some(Secret(token)) = &self.token else { return true };
        let shown =
            request.headers().get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        shown.is_some_and(|shown| shown.ct_eq(token.as_bytes()).into())
    }

    async fn serve_accepted(&self, guest: AcceptedPeer<T::WrappedStream>) {
        if !guest.speaks_v1 {
            return plain::server::serve_connection(guest.socket, Arc::clone(&self.executor), &self.stop)
                .await;
        }
        // Boxed, since most connections are of the other kind, and smaller.
        let serving = Box::pin(self.endpoints.serve(guest.socket));
        if let Some(Err(error)) = self.stop.run_until_cancelled(serving).await {
            tracing::debug!("a daemon's connection ended: {error}");
        }
    }
}

/// Somebody who was let in.
struct AcceptedPeer<W> {
    socket: Socket<W>,
    /// Whether `quarterdeck.v1` is spoken.
    speaks_v1: bool,
}

async fn accept_tcp(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Err(error) = enable_keepalive(&stream) {
                    tracing::debug!("a silent peer will not be noticed: {error}");
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

/// A parent that vanishes without a word, with its network or its power, is noticed by the kernel: nothing in the
/// frames without a subprotocol asks for a sign of life.
fn enable_keepalive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_IDLE / 3)?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}

fn offers_v1(request: &Request) -> bool {
    let offers = request.headers().get_all(SEC_WEBSOCKET_PROTOCOL).into_iter();
    offers
        .filter_map(|offer| offer.to_str().ok())
        .flat_map(|offer| offer.split(','))
        .any(|name| name.trim() == v1::SUBPROTOCOL)
}

fn log_panic(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!("a connection ended badly: {error}");
    }
}
