//! Accept loops, limits and shutdown. Every task started here is owned by a set that ends with it, so dropping the
//! future of [`serve`] ends everything. Requests are handled in `guarded_router`.

use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use qd_keeper::procfs;
use qd_protocol::limits;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::{JoinError, JoinSet};

use super::BoundEdge;
use super::connection_limit::{ConnectionActivity, ConnectionLimit, ConnectionPermit, RegisteredConnection};
use super::guard::ConnectionPeer;
use super::guarded_router::GuardedRouter;
use super::listen::{BoundListener, TlsAcceptorDebug};
use super::rejection::{OverloadedResponse, SpareDescriptor};
use super::session_sockets::SessionListener;
use crate::descriptors::{DescriptorShares, streams_of};

/// The memory of one connection per direction. Beyond it, the response to a slow reader waits in its handler.
const CONNECTION_BUFFER: usize = 64 << 10;
/// The most connections over the limit that are answered at the same time, if there is no lower limit on descriptors.
const REJECTIONS: usize = 64;
/// How long a connection over the limit waits for an idle one to close.
const MAKE_WAY_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a connection that makes way may still begin a request, because one may have been on its way.
const MAKE_WAY_LINGER: Duration = Duration::from_millis(20);
/// How long a connection that is known to be waiting may take to be accepted.
const ACCEPT_TIMEOUT: Duration = Duration::from_millis(10);
/// How long, after a shutdown, a connection without a request stays open to send the rest of its response.
const LINGER: Duration = Duration::from_secs(1);
/// The first and the longest pause after the kernel failed to accept a connection.
const ACCEPT_BACKOFF_MIN: Duration = Duration::from_millis(10);
const ACCEPT_BACKOFF_MAX: Duration = Duration::from_secs(1);

/// How much a client may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdgeLimits {
    /// Bytes of the request line and headers.
    pub header_bytes: usize,
    pub body_bytes: usize,
    /// How long the headers may take to arrive, and then the body. An idle connection is closed after the same time.
    pub read_timeout: Duration,
    /// Connections at once, over all listeners.
    pub connections: usize,
    /// How many of them may be event streams, waiting requests and terminals.
    pub streams: usize,
    /// Connections over the limit that are answered at the same time.
    pub rejections: usize,
}

impl Default for EdgeLimits {
    fn default() -> Self {
        Self {
            header_bytes: limits::HEADERS_MAX,
            body_bytes: limits::BODY_MAX,
            read_timeout: Duration::from_secs(limits::REQUEST_READ_S),
            connections: limits::CONNECTIONS_MAX,
            streams: streams_of(limits::CONNECTIONS_MAX),
            rejections: REJECTIONS,
        }
    }
}

impl EdgeLimits {
    /// The default limits, with as many connections as there are descriptors for.
    pub(crate) fn with_shares(shares: DescriptorShares) -> Self {
        let DescriptorShares { connections, streams, rejections, .. } = shares;
        Self { connections, streams, rejections, ..Self::default() }
    }
}

/// Serves until `shutdown` turns true or its sender is dropped. Then nothing more is accepted, idle connections are
/// closed, and open requests are finished. The caller limits how long that may take by dropping this future.
pub async fn serve(bound: BoundEdge, router: Router, shutdown: watch::Receiver<bool>) {
    let BoundEdge { listeners, guard, limits, session_sockets, .. } = bound;
    let server = EdgeServer {
        router: Arc::new(GuardedRouter::new(guard, router, limits)),
        limit: ConnectionLimit::new(&limits),
        overloaded: OverloadedResponse::new().await,
        shutdown,
    };
    let mut loops = JoinSet::new();
    for listener in listeners {
        loops.spawn(run_accept_loop(ServedListener::Daemon(listener), server.clone()));
    }
    let mut stopping = server.shutdown.clone();
    loop {
        tokio::select! {
            biased;
            () = wait_for_shutdown(&mut stopping) => break,
            Some(ended) = loops.join_next() => log_panic(ended),
            listener = session_sockets.next_unserved() => {
                drop(loops.spawn(run_accept_loop(ServedListener::Session(listener), server.clone())));
            }
        }
    }
    while let Some(ended) = loops.join_next().await {
        log_panic(ended);
    }
}

/// What every connection needs. Clones share it.
#[derive(Clone)]
struct EdgeServer {
    router: Arc<GuardedRouter>,
    limit: ConnectionLimit,
    overloaded: OverloadedResponse,
    shutdown: watch::Receiver<bool>,
}

/// The accept loop of one listener. It owns the connections that it accepted.
async fn run_accept_loop(listener: ServedListener, mut server: EdgeServer) {
    let mut connections = JoinSet::new();
    let mut backoff = AcceptBackoff::default();
    let mut spare = SpareDescriptor::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = wait_for_shutdown(&mut server.shutdown) => break,
            () = listener.wait_until_closed() => break,
            Some(ended) = connections.join_next() => {
                log_panic(ended);
                continue;
            }
            accepted = accept_next(&listener) => accepted,
        };
        match accepted {
            Ok(None) => {}
            Ok(Some(caller)) => {
                backoff = AcceptBackoff::default();
                let is_admitted = caller.address().is_none_or(|address| server.limit.admit_address(address));
                if caller.lacks_descriptor() || !is_admitted {
                    server.overloaded.send_quickly(caller).await;
                } else if let Some(permit) = server.limit.try_acquire(caller.is_tcp()) {
                    // Registered at once, so that a flood is counted however late its tasks begin.
                    let registered = server.limit.register(caller.address());
                    connections.spawn(serve_connection(caller, permit, registered, server.clone()));
                } else if let Ok(permit) = server.limit.rejections.clone().try_acquire_owned() {
                    connections.spawn(make_way_or_reject(caller, permit, server.clone()));
                } else {
                    server.overloaded.send_quickly(caller).await;
                }
            }
            Err(error) if SpareDescriptor::is_needed(&error) && spare.release() => {
                server.limit.close_idle_connection(false);
                // Without a delay: each round answers one connection, if there is one, and then waits for the next.
                if let Ok(Ok(Some(caller))) =
                    tokio::time::timeout(ACCEPT_TIMEOUT, accept_next(&listener)).await
                {
                    tracing::warn!(%error, "a connection is refused because no descriptor is left");
                    server.overloaded.send_quickly(caller).await;
                }
                spare.renew();
            }
            Err(error) => {
                spare.renew();
                if let Some(delay) = backoff.delay_after(&error) {
                    tracing::warn!(%error, ?delay, "cannot accept connections; trying again");
                    tokio::select! {
                        () = wait_for_shutdown(&mut server.shutdown) => break,
                        () = tokio::time::sleep(delay) => {}
                    }
                }
            }
        }
    }
    drop(listener);
    while let Some(ended) = connections.join_next().await {
        log_panic(ended);
    }
}

async fn wait_for_shutdown(shutdown: &mut watch::Receiver<bool>) {
    drop(shutdown.wait_for(|stop| *stop).await);
}

fn log_panic(ended: Result<(), JoinError>) {
    // A panic outside a handler, such as in a response stream. It ends only its own connection.
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection's task panicked");
    }
}

/// A connection that was just accepted.
pub(super) enum AcceptedStream {
    Unix(UnixStream, ConnectionPeer),
    Tcp(TcpStream, ConnectionPeer, Option<TlsAcceptorDebug>),
}

impl AcceptedStream {
    fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp(..))
    }

    /// The address of a TCP client.
    pub(super) fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(_, ConnectionPeer::Tcp { addr, .. }, _) => Some(addr.ip().to_canonical()),
            _ => None,
        }
    }

    /// Whether the client's process could not be looked up because no descriptor was left. The guard would take it for
    /// the process of an unknown agent.
    fn lacks_descriptor(&self) -> bool {
        matches!(self, Self::Unix(_, ConnectionPeer::Unix { process: None, .. }))
            && SpareDescriptor::none_left()
    }
}

/// A socket whose connections are accepted.
enum ServedListener {
    /// An address of the daemon.
    Daemon(BoundListener),
    /// The socket of one session.
    Session(SessionListener),
}

impl ServedListener {
    /// Waits until the socket is to be closed before the daemon stops.
    async fn wait_until_closed(&self) {
        match self {
            Self::Daemon(_) => std::future::pending().await,
            Self::Session(listener) => listener.closed.cancelled().await,
        }
    }
}

/// The next connection; `None` if the client was gone before its credentials could be read.
async fn accept_next(listener: &ServedListener) -> io::Result<Option<AcceptedStream>> {
    match listener {
        ServedListener::Session(listener) => {
            let (stream, _) = listener.socket.accept().await?;
            let credentials = stream.peer_cred().ok();
            Ok(credentials.map(|credentials| {
                let peer =
                    ConnectionPeer::Session { session: listener.session.clone(), uid: credentials.uid() };
                AcceptedStream::Unix(stream, peer)
            }))
        }
        ServedListener::Daemon(BoundListener::Unix(listener)) => {
            let (stream, _) = listener.socket.accept().await?;
            let credentials = stream.peer_cred().ok();
            Ok(credentials.map(|credentials| {
                // The start time is read at once: later the pid may belong to another process.
                let pid = credentials.pid().and_then(|pid| u32::try_from(pid).ok());
                let process = pid.and_then(|pid| Some((pid, procfs::start_ticks(pid)?)));
                AcceptedStream::Unix(stream, ConnectionPeer::Unix { process, uid: credentials.uid() })
            }))
        }
        ServedListener::Daemon(BoundListener::Tcp(listener)) => {
            let (stream, addr) = listener.socket.accept().await?;
            // Without this, each small event would wait for the acknowledgement of the one before: 44 ms.
            let ready = stream.set_nodelay(true).and_then(|()| stream.local_addr());
            let tls = listener.tls.clone();
            Ok(ready.ok().map(|local| {
                AcceptedStream::Tcp(stream, ConnectionPeer::Tcp { addr, local, tls: tls.is_some() }, tls)
            }))
        }
    }
}

/// The delay after errors that would repeat at once, such as running out of descriptors.
#[derive(Default)]
struct AcceptBackoff(Option<Duration>);

impl AcceptBackoff {
    /// The delay before the next try; `None` if only this connection failed, because the client hung up.
    fn delay_after(&mut self, error: &io::Error) -> Option<Duration> {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
        if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) {
            return None;
        }
        self.0 = Some(self.0.map_or(ACCEPT_BACKOFF_MIN, |last| (last * 2).min(ACCEPT_BACKOFF_MAX)));
        self.0
    }
}

/// Serves a connection over the limit if an idle one can be closed for it. Otherwise the client is told to come back.
async fn make_way_or_reject(caller: AcceptedStream, permit: OwnedSemaphorePermit, server: EdgeServer) {
    if server.limit.close_idle_connection(caller.is_tcp())
        && let Ok(Some(place)) =
            tokio::time::timeout(MAKE_WAY_TIMEOUT, server.limit.acquire(caller.is_tcp())).await
    {
        drop(permit);
        let registered = server.limit.register(caller.address());
        return serve_connection(caller, place, registered, server).await;
    }
    server.overloaded.send(caller).await;
}

async fn serve_connection(
    caller: AcceptedStream,
    permit: ConnectionPermit,
    registered: RegisteredConnection,
    server: EdgeServer,
) {
    let EdgeServer { router, mut shutdown, .. } = server;
    let permit = Arc::new(permit);
    let activity = registered.activity.clone();
    match caller {
        AcceptedStream::Unix(stream, peer) => {
            serve_http(stream, peer, router, permit, activity, shutdown).await
        }
        AcceptedStream::Tcp(stream, peer, None) => {
            serve_http(stream, peer, router, permit, activity, shutdown).await
        }
        AcceptedStream::Tcp(stream, peer, Some(TlsAcceptorDebug(tls))) => {
            let handshake = tokio::select! {
                () = wait_for_shutdown(&mut shutdown) => return,
                () = activity.wait_for_close_request() => return,
                handshake = tokio::time::timeout(router.limits.read_timeout, tls.accept(stream)) => handshake,
            };
            match handshake {
                Ok(Ok(stream)) => {
                    Box::pin(serve_http(stream, peer, router, permit, activity, shutdown)).await
                }
                Ok(Err(error)) => tracing::debug!(?peer, %error, "a TLS handshake failed"),
                Err(_) => tracing::debug!(?peer, "a TLS handshake took too long"),
            }
        }
    }
}

/// Serves HTTP over a stream, until either side closes it or it is upgraded.
async fn serve_http<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    peer: ConnectionPeer,
    router: Arc<GuardedRouter>,
    permit: Arc<ConnectionPermit>,
    activity: Arc<ConnectionActivity>,
    mut shutdown: watch::Receiver<bool>,
) {
    let limits = router.limits;
    let service = {
        let (peer, activity) = (peer.clone(), activity.clone());
        service_fn(move |request: hyper::Request<Incoming>| {
            router.clone().handle_request(peer.clone(), activity.clone(), permit.clone(), request)
        })
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.read_timeout)
        .max_header_size(limits.header_bytes)
        .max_buf_size(CONNECTION_BUFFER.max(limits.header_bytes))
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => Ok(ended),
        () = wait_for_shutdown(&mut shutdown) => Err(LINGER),
        () = activity.wait_for_close_request() => Err(MAKE_WAY_LINGER),
    };
    let ended = match ended {
        Ok(ended) => Some(ended),
        Err(linger) => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection.as_mut() => Some(ended),
                () = activity.wait_until_idle(linger) => None,
            }
        }
    };
    if let Some(Err(error)) = ended {
        tracing::debug!(?peer, %error, "a connection ended badly");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_would_come_again_at_once_are_waited_out() {
        let mut backoff = AcceptBackoff::default();
        let full = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        let waits: Vec<u128> =
            (0..9).filter_map(|_| backoff.delay_after(&full)).map(|wait| wait.as_millis()).collect();
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(backoff.delay_after(&io::ErrorKind::ConnectionAborted.into()), None, "the caller hung up");
    }
}
