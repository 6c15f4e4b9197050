//! Accept loops, limits and shutdown. Every task that is started here is owned by a set that ends with it, so that
//! dropping the future of [`serve`] ends everything. What a connection says is the business of the next room.

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

/// What one connection may hold in memory in each direction; past it a slow reader's answer waits where it is made.
const CONNECTION_BUFFER: usize = 64 << 10;
/// One of so many connections is kept free for sockets, so that no flood over TCP can lock the owner out.
const UNIX_SOCKET_SHARE: usize = 16;
/// Connections over the limit that are told so at the same time; any more are just closed.
const REJECTIONS_MAX: usize = 64;
/// How long one of those may take to hear it.
const REJECTION_TIMEOUT: Duration = Duration::from_secs(1);
/// After a shutdown, how long a connection without a request is kept to take the last bytes of its answer.
const LINGER: Duration = Duration::from_secs(1);
/// The first and the longest pause after the kernel could not give us a connection.
const ACCEPT_BACKOFF_MIN: Duration = Duration::from_millis(10);
const ACCEPT_BACKOFF_MAX: Duration = Duration::from_secs(1);

/// How much a client may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdgeLimits {
    /// Bytes of a request's line and headers.
    pub header_bytes: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// How long the headers may take, and then the body. An idle connection is closed after as long.
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

/// Serves until `shutdown` turns true or its sender is gone. Then nothing more is accepted, idle connections are
/// closed, and requests on their way are finished; it is the caller who limits how long that may take, by dropping
/// this future.
pub async fn serve(bound: BoundEdge, router: Router, shutdown: watch::Receiver<bool>) {
    let BoundEdge { listeners, guard, limits, .. } = bound;
    let room = ConnectionLimit::new(limits.connections);
    let front = Arc::new(GuardedRouter::new(guard, router, limits));
    let mut loops = JoinSet::new();
    for listener in listeners {
        loops.spawn(run_accept_loop(listener, front.clone(), room.clone(), shutdown.clone()));
    }
    while let Some(ended) = loops.join_next().await {
        log_panic(ended);
    }
}

/// One listener's loop. It owns the connections that came through it.
async fn run_accept_loop(
    listener: BoundListener,
    front: Arc<GuardedRouter>,
    room: ConnectionLimit,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    let mut pause = AcceptBackoff::default();
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
                pause = AcceptBackoff::default();
                if let Some(seat) = room.try_acquire(&caller) {
                    connections.spawn(serve_connection(caller, front.clone(), seat, shutdown.clone()));
                } else if let Ok(permit) = room.rejections.clone().try_acquire_owned() {
                    connections.spawn(reject_connection(caller, permit));
                }
            }
            Err(error) => {
                if let Some(length) = pause.delay_after(&error) {
                    tracing::warn!(%error, ?length, "cannot accept connections; trying again");
                    tokio::select! {
                        () = wait_for_shutdown(&mut shutdown) => break,
                        () = tokio::time::sleep(length) => {}
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
    // A panic outside a handler, such as in an answer's stream. It ends its own connection and nothing else.
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

/// The next connection; nothing, if the caller was gone before we could look at it.
async fn accept_next(listener: &BoundListener) -> io::Result<Option<AcceptedStream>> {
    match listener {
        BoundListener::Unix(door) => {
            let (stream, _) = door.socket.accept().await?;
            let who = stream.peer_cred().ok();
            Ok(who.map(|who| {
                // With its start, at once: later the pid alone may be somebody else's.
                let pid = who.pid().and_then(|pid| u32::try_from(pid).ok());
                let process = pid.and_then(|pid| Some((pid, procfs::start_ticks(pid)?)));
                AcceptedStream::Unix(stream, ConnectionPeer::Unix { process, uid: who.uid() })
            }))
        }
        BoundListener::Tcp(door) => {
            let (stream, addr) = door.socket.accept().await?;
            // Else small events would wait for the acknowledgement of the one before: 44 ms each.
            let ready = stream.set_nodelay(true).and_then(|()| stream.local_addr());
            let tls = door.tls.clone();
            Ok(ready.ok().map(|local| {
                AcceptedStream::Tcp(stream, ConnectionPeer::Tcp { addr, local, tls: tls.is_some() }, tls)
            }))
        }
    }
}

/// How many may be here at once.
#[derive(Clone)]
struct ConnectionLimit {
    all: Arc<Semaphore>,
    tcp: Arc<Semaphore>,
    rejections: Arc<Semaphore>,
}

/// The right to be here. A connection that is upgraded takes it along.
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

/// How long to wait after errors that come again at once, such as having no descriptor left.
#[derive(Default)]
struct AcceptBackoff(Option<Duration>);

impl AcceptBackoff {
    /// Nothing, if the error was the caller's: it hung up before we came to the door.
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
    front: Arc<GuardedRouter>,
    seat: ConnectionPermit,
    mut shutdown: watch::Receiver<bool>,
) {
    let seat = Arc::new(seat);
    match caller {
        AcceptedStream::Unix(stream, peer) => serve_http(stream, peer, front, seat, shutdown).await,
        AcceptedStream::Tcp(stream, peer, None) => serve_http(stream, peer, front, seat, shutdown).await,
        AcceptedStream::Tcp(stream, peer, Some(TlsAcceptorDebug(tls))) => {
            let greeted = tokio::select! {
                () = wait_for_shutdown(&mut shutdown) => return,
                greeted = tokio::time::timeout(front.limits.read_timeout, tls.accept(stream)) => greeted,
            };
            match greeted {
                Ok(Ok(stream)) => Box::pin(serve_http(stream, peer, front, seat, shutdown)).await,
                Ok(Err(error)) => tracing::debug!(?peer, %error, "a TLS handshake failed"),
                Err(_) => tracing::debug!(?peer, "a TLS handshake took too long"),
            }
        }
    }
}

/// HTTP over a stream, until one side has had enough or it becomes something else.
async fn serve_http<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    peer: ConnectionPeer,
    front: Arc<GuardedRouter>,
    seat: Arc<ConnectionPermit>,
    mut shutdown: watch::Receiver<bool>,
) {
    let activity = Arc::new(ConnectionActivity::default());
    let limits = front.limits;
    let service = {
        let activity = activity.clone();
        service_fn(move |request: hyper::Request<Incoming>| {
            front.clone().handle_request(peer, activity.clone(), seat.clone(), request)
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

/// A short answer for one too many. Over TLS it would cost a handshake, so there it is only closed.
async fn reject_connection(caller: AcceptedStream, _permit: OwnedSemaphorePermit) {
    let said = async {
        match caller {
            AcceptedStream::Unix(mut stream, _) => send_overloaded(&mut stream).await,
            AcceptedStream::Tcp(mut stream, _, None) => send_overloaded(&mut stream).await,
            AcceptedStream::Tcp(_, _, Some(_)) => Ok(()),
        }
    };
    drop(tokio::time::timeout(REJECTION_TIMEOUT, said).await);
}

async fn send_overloaded<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    stream.write_all(&overloaded_response().await).await?;
    stream.shutdown().await?;
    // To close with something unread would reset the connection, and the answer with it.
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
        let mut pause = AcceptBackoff::default();
        let full = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        let waits: Vec<u128> =
            (0..9).filter_map(|_| pause.delay_after(&full)).map(|wait| wait.as_millis()).collect();
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(pause.delay_after(&io::ErrorKind::ConnectionAborted.into()), None, "the caller hung up");
    }

    #[tokio::test]
    async fn a_part_of_the_connections_is_kept_for_sockets() {
        let room = ConnectionLimit::new(32);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local = listener.local_addr().unwrap();
        let mut seats = Vec::new();
        for _ in 0..30 {
            let stream = TcpStream::connect(local).await.unwrap();
            let caller =
                AcceptedStream::Tcp(stream, ConnectionPeer::Tcp { addr: local, local, tls: false }, None);
            seats.push(room.try_acquire(&caller));
            assert!(seats.last().unwrap().is_some());
        }
        let stream = TcpStream::connect(local).await.unwrap();
        assert!(
            room.try_acquire(&AcceptedStream::Tcp(
                stream,
                ConnectionPeer::Tcp { addr: local, local, tls: false },
                None
            ))
            .is_none()
        );
        for expected in [true, true, false] {
            let (stream, _other) = UnixStream::pair().unwrap();
            seats.push(
                room.try_acquire(&AcceptedStream::Unix(
                    stream,
                    ConnectionPeer::Unix { process: None, uid: 0 },
                )),
            );
            assert_eq!(seats.last().unwrap().is_some(), expected);
        }
        seats.clear();
        let stream = TcpStream::connect(local).await.unwrap();
        assert!(
            room.try_acquire(&AcceptedStream::Tcp(
                stream,
                ConnectionPeer::Tcp { addr: local, local, tls: false },
                None
            ))
            .is_some()
        );
    }
}
