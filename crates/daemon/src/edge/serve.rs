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
use qd_keeper::proc;
use qd_protocol::api::VERSION_HEADER;
use qd_protocol::{ApiError, Code, limits};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinError, JoinSet};

use super::Bound;
use super::answer::{Activity, Front, VERSION};
use super::error::Refusal;
use super::guard::Peer;
use super::listen::{Listener, TlsAcceptorDebug};

/// What one connection may hold in memory in each direction; past it a slow reader's answer waits where it is made.
const CONNECTION_BUFFER: usize = 64 << 10;
/// One of so many connections is kept free for sockets, so that no flood over TCP can lock the owner out.
const SOCKET_SHARE: usize = 16;
/// Connections over the limit that are told so at the same time; any more are just closed.
const TURNED_AWAY_MAX: usize = 64;
/// How long one of those may take to hear it.
const TURN_AWAY: Duration = Duration::from_secs(1);
/// After a shutdown, how long a connection without a request is kept to take the last bytes of its answer.
const LINGER: Duration = Duration::from_secs(1);
/// The first and the longest pause after the kernel could not give us a connection.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How much a client may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request's line and headers.
    pub headers: usize,
    /// Bytes of a request's body.
    pub body: usize,
    /// How long the headers may take, and then the body. An idle connection is closed after as long.
    pub read: Duration,
    /// Connections at once, over all listeners.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            headers: limits::HEADERS_MAX,
            body: limits::BODY_MAX,
            read: Duration::from_secs(limits::REQUEST_READ_S),
            connections: limits::CONNECTIONS_MAX,
        }
    }
}

/// Serves until `shutdown` turns true or its sender is gone. Then nothing more is accepted, idle connections are
/// closed, and requests on their way are finished; it is the caller who limits how long that may take, by dropping
/// this future.
pub async fn serve(bound: Bound, router: Router, shutdown: watch::Receiver<bool>) {
    let Bound { listeners, guard, limits, .. } = bound;
    let room = Room::new(limits.connections);
    let front = Arc::new(Front::new(guard, router, limits));
    let mut loops = JoinSet::new();
    for listener in listeners {
        loops.spawn(accept(listener, front.clone(), room.clone(), shutdown.clone()));
    }
    while let Some(ended) = loops.join_next().await {
        report(ended);
    }
}

/// One listener's loop. It owns the connections that came through it.
async fn accept(listener: Listener, front: Arc<Front>, room: Room, mut shutdown: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    let mut pause = Pause::default();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut shutdown) => break,
            Some(ended) = connections.join_next() => {
                report(ended);
                continue;
            }
            accepted = next(&listener) => accepted,
        };
        match accepted {
            Ok(None) => {}
            Ok(Some(caller)) => {
                pause = Pause::default();
                if let Some(seat) = room.seat(&caller) {
                    connections.spawn(converse(caller, front.clone(), seat, shutdown.clone()));
                } else if let Ok(permit) = room.doorstep.clone().try_acquire_owned() {
                    connections.spawn(turn_away(caller, permit));
                }
            }
            Err(error) => {
                if let Some(length) = pause.after(&error) {
                    tracing::warn!(%error, ?length, "cannot accept connections; trying again");
                    tokio::select! {
                        () = stopped(&mut shutdown) => break,
                        () = tokio::time::sleep(length) => {}
                    }
                }
            }
        }
    }
    drop(listener);
    while let Some(ended) = connections.join_next().await {
        report(ended);
    }
}

async fn stopped(shutdown: &mut watch::Receiver<bool>) {
    drop(shutdown.wait_for(|stop| *stop).await);
}

fn report(ended: Result<(), JoinError>) {
    // A panic outside a handler, such as in an answer's stream. It ends its own connection and nothing else.
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection's task panicked");
    }
}

/// A connection that was just accepted.
enum Caller {
    Unix(UnixStream, Peer),
    Tcp(TcpStream, Peer, Option<TlsAcceptorDebug>),
}

/// The next connection; nothing, if the caller was gone before we could look at it.
async fn next(listener: &Listener) -> io::Result<Option<Caller>> {
    match listener {
        Listener::Unix(door) => {
            let (stream, _) = door.socket.accept().await?;
            let who = stream.peer_cred().ok();
            Ok(who.map(|who| {
                // With its start, at once: later the pid alone may be somebody else's.
                let pid = who.pid().and_then(|pid| u32::try_from(pid).ok());
                let process = pid.and_then(|pid| Some((pid, proc::start_ticks(pid)?)));
                Caller::Unix(stream, Peer::Unix { process, uid: who.uid() })
            }))
        }
        Listener::Tcp(door) => {
            let (stream, addr) = door.socket.accept().await?;
            // Else small events would wait for the acknowledgement of the one before: 44 ms each.
            let ready = stream.set_nodelay(true).and_then(|()| stream.local_addr());
            let tls = door.tls.clone();
            Ok(ready
                .ok()
                .map(|local| Caller::Tcp(stream, Peer::Tcp { addr, local, tls: tls.is_some() }, tls)))
        }
    }
}

/// How many may be here at once.
#[derive(Clone)]
struct Room {
    all: Arc<Semaphore>,
    tcp: Arc<Semaphore>,
    doorstep: Arc<Semaphore>,
}

/// The right to be here. A connection that is upgraded takes it along.
#[derive(Debug)]
pub(super) struct Seat {
    _all: OwnedSemaphorePermit,
    _tcp: Option<OwnedSemaphorePermit>,
}

impl Room {
    fn new(connections: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(connections)),
            tcp: Arc::new(Semaphore::new(connections - connections / SOCKET_SHARE)),
            doorstep: Arc::new(Semaphore::new(TURNED_AWAY_MAX)),
        }
    }

    fn seat(&self, caller: &Caller) -> Option<Seat> {
        let tcp = match caller {
            Caller::Unix(..) => None,
            Caller::Tcp(..) => Some(self.tcp.clone().try_acquire_owned().ok()?),
        };
        Some(Seat { _all: self.all.clone().try_acquire_owned().ok()?, _tcp: tcp })
    }
}

/// How long to wait after errors that come again at once, such as having no descriptor left.
#[derive(Default)]
struct Pause(Option<Duration>);

impl Pause {
    /// Nothing, if the error was the caller's: it hung up before we came to the door.
    fn after(&mut self, error: &io::Error) -> Option<Duration> {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
        if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) {
            return None;
        }
        self.0 = Some(self.0.map_or(PAUSE_MIN, |last| (last * 2).min(PAUSE_MAX)));
        self.0
    }
}

async fn converse(caller: Caller, front: Arc<Front>, seat: Seat, mut shutdown: watch::Receiver<bool>) {
    let seat = Arc::new(seat);
    match caller {
        Caller::Unix(stream, peer) => speak(stream, peer, front, seat, shutdown).await,
        Caller::Tcp(stream, peer, None) => speak(stream, peer, front, seat, shutdown).await,
        Caller::Tcp(stream, peer, Some(TlsAcceptorDebug(tls))) => {
            let greeted = tokio::select! {
                () = stopped(&mut shutdown) => return,
                greeted = tokio::time::timeout(front.limits.read, tls.accept(stream)) => greeted,
            };
            match greeted {
                Ok(Ok(stream)) => Box::pin(speak(stream, peer, front, seat, shutdown)).await,
                Ok(Err(error)) => tracing::debug!(?peer, %error, "a TLS handshake failed"),
                Err(_) => tracing::debug!(?peer, "a TLS handshake took too long"),
            }
        }
    }
}

/// HTTP over a stream, until one side has had enough or it becomes something else.
async fn speak<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    peer: Peer,
    front: Arc<Front>,
    seat: Arc<Seat>,
    mut shutdown: watch::Receiver<bool>,
) {
    let activity = Arc::new(Activity::default());
    let limits = front.limits;
    let service = {
        let activity = activity.clone();
        service_fn(move |request: hyper::Request<Incoming>| {
            front.clone().answer(peer, activity.clone(), seat.clone(), request)
        })
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.read)
        .max_header_size(limits.headers)
        .max_buf_size(CONNECTION_BUFFER.max(limits.headers))
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let mut ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        () = stopped(&mut shutdown) => None,
    };
    if ended.is_none() {
        connection.as_mut().graceful_shutdown();
        ended = tokio::select! {
            ended = connection.as_mut() => Some(ended),
            () = activity.quiet_for(LINGER) => None,
        };
    }
    if let Some(Err(error)) = ended {
        tracing::debug!(?peer, %error, "a connection ended badly");
    }
}

/// A short answer for one too many. Over TLS it would cost a handshake, so there it is only closed.
async fn turn_away(caller: Caller, _permit: OwnedSemaphorePermit) {
    let said = async {
        match caller {
            Caller::Unix(mut stream, _) => say_full(&mut stream).await,
            Caller::Tcp(mut stream, _, None) => say_full(&mut stream).await,
            Caller::Tcp(_, _, Some(_)) => Ok(()),
        }
    };
    drop(tokio::time::timeout(TURN_AWAY, said).await);
}

async fn say_full<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    stream.write_all(&full().await).await?;
    stream.shutdown().await?;
    // To close with something unread would reset the connection, and the answer with it.
    let mut ignored = [0; 1024];
    while stream.read(&mut ignored).await? > 0 {}
    Ok(())
}

async fn full() -> Vec<u8> {
    let refusal = ApiError::new(Code::Overloaded, "too many connections are open; try again in a moment");
    let (head, body) = Refusal(refusal).into_response().into_parts();
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
        let mut pause = Pause::default();
        let full = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        let waits: Vec<u128> =
            (0..9).filter_map(|_| pause.after(&full)).map(|wait| wait.as_millis()).collect();
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(pause.after(&io::ErrorKind::ConnectionAborted.into()), None, "the caller hung up");
    }

    #[tokio::test]
    async fn a_part_of_the_connections_is_kept_for_sockets() {
        let room = Room::new(32);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local = listener.local_addr().unwrap();
        let mut seats = Vec::new();
        for _ in 0..30 {
            let stream = TcpStream::connect(local).await.unwrap();
            let caller = Caller::Tcp(stream, Peer::Tcp { addr: local, local, tls: false }, None);
            seats.push(room.seat(&caller));
            assert!(seats.last().unwrap().is_some());
        }
        let stream = TcpStream::connect(local).await.unwrap();
        assert!(
            room.seat(&Caller::Tcp(stream, Peer::Tcp { addr: local, local, tls: false }, None)).is_none()
        );
        for expected in [true, true, false] {
            let (stream, _other) = UnixStream::pair().unwrap();
            seats.push(room.seat(&Caller::Unix(stream, Peer::Unix { process: None, uid: 0 })));
            assert_eq!(seats.last().unwrap().is_some(), expected);
        }
        seats.clear();
        let stream = TcpStream::connect(local).await.unwrap();
        assert!(
            room.seat(&Caller::Tcp(stream, Peer::Tcp { addr: local, local, tls: false }, None)).is_some()
        );
    }
}
