//! Accept loops, limits and shutdown. Every task started here is owned by a set that ends with it, so dropping the
//! future of [`serve`] ends everything. Requests are handled in `guarded_router`.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::response::IntoResponse;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use qd_keeper::procfs;
use qd_protocol::api::VERSION_HEADER;
use qd_protocol::{ApiError, ErrorCode, limits};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinError, JoinSet};

use super::BoundEdge;
use super::error::HttpError;
use super::guard::ConnectionPeer;
use super::guarded_router::{ConnectionActivity, GuardedRouter, VERSION};
use super::listen::{BoundListener, TlsAcceptorDebug};

/// The memory of one connection per direction. Beyond it, the response to a slow reader waits in its handler.
const CONNECTION_BUFFER: usize = 64 << 10;
/// One in this many connections is reserved for unix sockets, so that a flood over TCP cannot lock the owner out.
const UNIX_SOCKET_SHARE: usize = 16;
/// The most connections over the limit that get an error response at the same time; more are just closed.
const REJECTIONS_MAX: usize = 64;
/// How long sending such a response may take.
const REJECTION_TIMEOUT: Duration = Duration::from_secs(1);
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
}

impl Default for EdgeLimits {
    fn default() -> Self {
        Self {
            header_bytes: limits::HEADERS_MAX,
            body_bytes: limits::BODY_MAX,
            read_timeout: Duration::from_secs(limits::REQUEST_READ_S),
            connections: limits::CONNECTIONS_MAX,
        }
    }
}

/// Serves until `shutdown` turns true or its sender is dropped. Then nothing more is accepted, idle connections are
/// closed, and open requests are finished. The caller limits how long that may take by dropping this future.
pub async fn serve(bound: BoundEdge, router: Router, shutdown: watch::Receiver<bool>) {
    let BoundEdge { listeners, guard, limits, .. } = bound;
    let limit = ConnectionLimit::new(limits.connections);
    let router = Arc::new(GuardedRouter::new(guard, router, limits));
    let mut loops = JoinSet::new();
    for listener in listeners {
        loops.spawn(run_accept_loop(listener, router.clone(), limit.clone(), shutdown.clone()));
    }
    while let Some(ended) = loops.join_next().await {
        log_panic(ended);
    }
}

/// The accept loop of one listener. It owns the connections that it accepted.
async fn run_accept_loop(
    listener: BoundListener,
    router: Arc<GuardedRouter>,
    limit: ConnectionLimit,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    let mut backoff = AcceptBackoff::default();
    loop {
        let accepted = tokio::select! {
            biased;
            () = wait_for_shutdown(&mut shutdown) => break,
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
                if let Some(permit) = limit.try_acquire(&caller) {
                    connections.spawn(serve_connection(caller, router.clone(), permit, shutdown.clone()));
                } else if let Ok(permit) = limit.rejections.clone().try_acquire_owned() {
                    connections.spawn(reject_connection(caller, permit));
                }
            }
            Err(error) => {
                if let Some(delay) = backoff.delay_after(&error) {
                    tracing::warn!(%error, ?delay, "cannot accept connections; trying again");
                    tokio::select! {
                        () = wait_for_shutdown(&mut shutdown) => break,
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
enum AcceptedStream {
    Unix(UnixStream, ConnectionPeer),
    Tcp(TcpStream, ConnectionPeer, Option<TlsAcceptorDebug>),
}

/// The next connection; `None` if the client was gone before its credentials could be read.
async fn accept_next(listener: &BoundListener) -> io::Result<Option<AcceptedStream>> {
    match listener {
        BoundListener::Unix(listener) => {
            let (stream, _) = listener.socket.accept().await?;
            let credentials = stream.peer_cred().ok();
            Ok(credentials.map(|credentials| {
                // The start time is read at once: later the pid may belong to another process.
                let pid = credentials.pid().and_then(|pid| u32::try_from(pid).ok());
                let process = pid.and_then(|pid| Some((pid, procfs::start_ticks(pid)?)));
                AcceptedStream::Unix(stream, ConnectionPeer::Unix { process, uid: credentials.uid() })
            }))
        }
        BoundListener::Tcp(listener) => {
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

/// The limit on open connections.
#[derive(Clone)]
struct ConnectionLimit {
    all: Arc<Semaphore>,
    tcp: Arc<Semaphore>,
    rejections: Arc<Semaphore>,
}

/// The permit of an open connection. An upgraded connection keeps it.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    _all: OwnedSemaphorePermit,
    _tcp: Option<OwnedSemaphorePermit>,
}

impl ConnectionLimit {
    fn new(connections: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(connections)),
            tcp: Arc::new(Semaphore::new(connections - connections / UNIX_SOCKET_SHARE)),
            rejections: Arc::new(Semaphore::new(REJECTIONS_MAX)),
        }
    }

    fn try_acquire(&self, caller: &AcceptedStream) -> Option<ConnectionPermit> {
        let tcp = match caller {
            AcceptedStream::Unix(..) => None,
            AcceptedStream::Tcp(..) => Some(self.tcp.clone().try_acquire_owned().ok()?),
        };
        Some(ConnectionPermit { _all: self.all.clone().try_acquire_owned().ok()?, _tcp: tcp })
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

async fn serve_connection(
    caller: AcceptedStream,
    router: Arc<GuardedRouter>,
    permit: ConnectionPermit,
    mut shutdown: watch::Receiver<bool>,
) {
    let permit = Arc::new(permit);
    match caller {
        AcceptedStream::Unix(stream, peer) => serve_http(stream, peer, router, permit, shutdown).await,
        AcceptedStream::Tcp(stream, peer, None) => serve_http(stream, peer, router, permit, shutdown).await,
        AcceptedStream::Tcp(stream, peer, Some(TlsAcceptorDebug(tls))) => {
            let handshake = tokio::select! {
                () = wait_for_shutdown(&mut shutdown) => return,
                handshake = tokio::time::timeout(router.limits.read_timeout, tls.accept(stream)) => handshake,
            };
            match handshake {
                Ok(Ok(stream)) => Box::pin(serve_http(stream, peer, router, permit, shutdown)).await,
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
    mut shutdown: watch::Receiver<bool>,
) {
    let activity = Arc::new(ConnectionActivity::default());
    let limits = router.limits;
    let service = {
        let activity = activity.clone();
        service_fn(move |request: hyper::Request<Incoming>| {
            router.clone().handle_request(peer, activity.clone(), permit.clone(), request)
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
    let mut ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        () = wait_for_shutdown(&mut shutdown) => None,
    };
    if ended.is_none() {
        connection.as_mut().graceful_shutdown();
        ended = tokio::select! {
            ended = connection.as_mut() => Some(ended),
            () = activity.wait_until_idle(LINGER) => None,
        };
    }
    if let Some(Err(error)) = ended {
        tracing::debug!(?peer, %error, "a connection ended badly");
    }
}

/// Sends a short error to a connection over the limit. Over TLS that would cost a handshake, so it is only closed.
async fn reject_connection(caller: AcceptedStream, _permit: OwnedSemaphorePermit) {
    let rejection = async {
        match caller {
            AcceptedStream::Unix(mut stream, _) => send_overloaded(&mut stream).await,
            AcceptedStream::Tcp(mut stream, _, None) => send_overloaded(&mut stream).await,
            AcceptedStream::Tcp(_, _, Some(_)) => Ok(()),
        }
    };
    drop(tokio::time::timeout(REJECTION_TIMEOUT, rejection).await);
}

async fn send_overloaded<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    stream.write_all(&overloaded_response().await).await?;
    stream.shutdown().await?;
    // Closing with unread input would reset the connection, and the response would be lost.
    let mut ignored = [0; 1024];
    while stream.read(&mut ignored).await? > 0 {}
    Ok(())
}

async fn overloaded_response() -> Vec<u8> {
    let refusal =
        ApiError::new(ErrorCode::Overloaded, "too many connections are open; try again in a moment");
    let (head, body) = HttpError(refusal).into_response().into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let mut text = format!("HTTP/1.1 {}\r\n", head.status);
    for (name, value) in &head.headers {
        text.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap_or_default()));
    }
    text.push_str(&format!("{VERSION_HEADER}: {VERSION}\r\nconnection: close\r\n"));
    if !head.headers.contains_key("content-length") {
        text.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    text.push_str("\r\n");
    [text.as_bytes(), &body].concat()
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

    #[tokio::test]
    async fn a_part_of_the_connections_is_kept_for_sockets() {
        let limit = ConnectionLimit::new(32);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local = listener.local_addr().unwrap();
        let mut permits = Vec::new();
        for _ in 0..30 {
            let stream = TcpStream::connect(local).await.unwrap();
            let caller =
                AcceptedStream::Tcp(stream, ConnectionPeer::Tcp { addr: local, local, tls: false }, None);
            permits.push(limit.try_acquire(&caller));
            assert!(permits.last().unwrap().is_some());
        }
        let stream = TcpStream::connect(local).await.unwrap();
        assert!(
            limit
                .try_acquire(&AcceptedStream::Tcp(
                    stream,
                    ConnectionPeer::Tcp { addr: local, local, tls: false },
                    None
                ))
                .is_none()
        );
        for expected in [true, true, false] {
            let (stream, _other) = UnixStream::pair().unwrap();
            permits.push(
                limit.try_acquire(&AcceptedStream::Unix(
                    stream,
                    ConnectionPeer::Unix { process: None, uid: 0 },
                )),
            );
            assert_eq!(permits.last().unwrap().is_some(), expected);
        }
        permits.clear();
        let stream = TcpStream::connect(local).await.unwrap();
        assert!(
            limit
                .try_acquire(&AcceptedStream::Tcp(
                    stream,
                    ConnectionPeer::Tcp { addr: local, local, tls: false },
                    None
                ))
                .is_some()
        );
    }
}
