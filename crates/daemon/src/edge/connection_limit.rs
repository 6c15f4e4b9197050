//! The limit on open connections, and on those that are used for a long time. Event streams, waits and terminals may
//! use most connections but not all, so a command always finds one. If all are open, an idle one is closed to make way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::header::{self, HeaderValue};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use parking_lot::{Mutex, MutexGuard};
use qd_protocol::{ApiError, ErrorCode};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::error::HttpError;
use super::serve::EdgeLimits;

/// One in this many connections is reserved for unix sockets, so that a flood over TCP cannot lock the owner out.
const UNIX_SOCKET_SHARE: usize = 16;
/// How long a connection may stay open without its first request while others need its place.
const FIRST_REQUEST_GRACE: Duration = Duration::from_secs(1);

/// The limit on open connections. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct ConnectionLimit {
    all: Arc<Semaphore>,
    tcp: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    /// Connections over the limit that are being answered.
    pub(super) rejections: Arc<Semaphore>,
    open: Arc<OpenConnections>,
}

/// The permit of an open connection. An upgraded connection keeps it.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    _all: OwnedSemaphorePermit,
    _tcp: Option<OwnedSemaphorePermit>,
    streams: Arc<Semaphore>,
}

impl ConnectionPermit {
    /// Counts the connection among those that last; `None` if there are too many of them.
    pub(super) fn try_count_as_stream(&self) -> Option<OwnedSemaphorePermit> {
        self.streams.clone().try_acquire_owned().ok()
    }
}

impl ConnectionLimit {
    pub(super) fn new(limits: &EdgeLimits) -> Self {
        let EdgeLimits { connections, streams, rejections, .. } = *limits;
        Self {
            all: Arc::new(Semaphore::new(connections)),
            tcp: Arc::new(Semaphore::new(connections - connections / UNIX_SOCKET_SHARE)),
            streams: Arc::new(Semaphore::new(streams)),
            rejections: Arc::new(Semaphore::new(rejections)),
            open: Arc::default(),
        }
    }

    pub(super) fn try_acquire(&self, is_tcp: bool) -> Option<ConnectionPermit> {
        let tcp = match is_tcp {
            false => None,
            true => Some(self.tcp.clone().try_acquire_owned().ok()?),
        };
        Some(ConnectionPermit {
            _all: self.all.clone().try_acquire_owned().ok()?,
            _tcp: tcp,
            streams: self.streams.clone(),
        })
    }

    /// Waits for a permit.
    pub(super) async fn acquire(&self, is_tcp: bool) -> Option<ConnectionPermit> {
        let tcp = match is_tcp {
            false => None,
            true => Some(self.tcp.clone().acquire_owned().await.ok()?),
        };
        Some(ConnectionPermit {
            _all: self.all.clone().acquire_owned().await.ok()?,
            _tcp: tcp,
            streams: self.streams.clone(),
        })
    }

    /// Registers a connection while it is served, so that it can be closed when it is idle and others need its place.
    pub(super) fn register(&self, is_tcp: bool) -> RegisteredConnection {
        let activity = Arc::new(ConnectionActivity::new(is_tcp));
        let mut open = self.open.lock();
        open.next += 1;
        let number = open.next;
        open.by_number.insert(number, activity.clone());
        drop(open);
        RegisteredConnection { number, activity, open: self.open.clone() }
    }

    /// Asks the connection that has been idle for the longest time to close, to make way for one over TCP or a unix
    /// socket. False if none is idle.
    pub(super) fn close_idle_connection(&self, for_tcp: bool) -> bool {
        // If TCP has used up its share, only another TCP connection makes way.
        let tcp_only = for_tcp && self.tcp.available_permits() == 0;
        let open = self.open.lock();
        let now = Instant::now();
        let candidates = open.by_number.values().filter(|activity| activity.is_tcp || !tcp_only);
        let idle = candidates.filter_map(|activity| Some((activity.idle_since(now)?, activity)));
        let longest = idle.min_by_key(|(since, _)| *since);
        longest.is_some_and(|(_, activity)| {
            activity.request_close();
            true
        })
    }
}

/// The connections that are being served.
#[derive(Debug, Default)]
struct OpenConnections(Mutex<OpenConnectionTable>);

#[derive(Debug, Default)]
struct OpenConnectionTable {
    next: u64,
    by_number: HashMap<u64, Arc<ConnectionActivity>>,
}

impl OpenConnections {
    /// Every change under the lock leaves the table whole, also if it panics.
    fn lock(&self) -> MutexGuard<'_, OpenConnectionTable> {
        self.0.lock()
    }
}

/// A connection in the table, until this is dropped.
#[derive(Debug)]
pub(super) struct RegisteredConnection {
    number: u64,
    pub(super) activity: Arc<ConnectionActivity>,
    open: Arc<OpenConnections>,
}

impl Drop for RegisteredConnection {
    fn drop(&mut self) {
        self.open.lock().by_number.remove(&self.number);
    }
}

/// Whether a connection has an open request. A shutdown waits for such connections only, not for one that has merely
/// begun to send its headers; and only a connection without one is closed to make way for another.
#[derive(Debug)]
pub(super) struct ConnectionActivity {
    is_tcp: bool,
    state: Mutex<ActivityState>,
    changed: Notify,
    close: Notify,
}

#[derive(Debug)]
struct ActivityState {
    busy: bool,
    /// Since when the connection has been busy or idle.
    since: Instant,
    had_request: bool,
    is_closing: bool,
}

impl ConnectionActivity {
    fn new(is_tcp: bool) -> Self {
        let state =
            ActivityState { busy: false, since: Instant::now(), had_request: false, is_closing: false };
        Self { is_tcp, state: Mutex::new(state), changed: Notify::new(), close: Notify::new() }
    }

    /// Marks the connection as busy until the result is dropped.
    pub(super) fn begin_request(self: Arc<Self>) -> ActiveRequest {
        self.set_busy(true);
        ActiveRequest(self)
    }

    /// Returns once there has been no open request for the given time.
    pub(super) async fn wait_until_idle(&self, duration: Duration) {
        loop {
            // Created before the check, so that no change in between is missed.
            let changed = self.changed.notified();
            if self.lock().busy {
                changed.await;
            } else if tokio::time::timeout(duration, changed).await.is_err() {
                return;
            }
        }
    }

    /// Returns once the connection should close because its place is needed.
    pub(super) async fn wait_for_close_request(&self) {
        self.close.notified().await;
    }

    /// Since when the connection is idle; `None` if it may not be closed to make way.
    fn idle_since(&self, now: Instant) -> Option<Instant> {
        let state = self.lock();
        let is_idle = !state.busy && !state.is_closing;
        // A client that has just connected is about to send its request.
        let is_new = !state.had_request && now.duration_since(state.since) < FIRST_REQUEST_GRACE;
        (is_idle && !is_new).then_some(state.since)
    }

    fn request_close(&self) {
        self.lock().is_closing = true;
        self.close.notify_one();
    }

    fn set_busy(&self, busy: bool) {
        let mut state = self.lock();
        state.busy = busy;
        state.since = Instant::now();
        state.had_request = true;
        drop(state);
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, ActivityState> {
        self.state.lock()
    }
}

/// A request, from its headers to the last byte of its response. A connection has one at a time.
#[derive(Debug)]
pub(super) struct ActiveRequest(Arc<ConnectionActivity>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.set_busy(false);
    }
}

/// Permission to use a connection for a long time. A handler that streams or waits takes it as an argument and holds it
/// until it has ended. Beyond the limit the request is refused at once.
#[derive(Debug)]
pub(crate) struct StreamPermit {
    /// `None` for a request that came over no connection, in a test.
    _permit: Option<OwnedSemaphorePermit>,
}

impl<S: Send + Sync> FromRequestParts<S> for StreamPermit {
    type Rejection = Response;

    async fn from_request_parts(head: &mut Parts, _: &S) -> Result<Self, Response> {
        let Some(connection) = head.extensions.get::<Arc<ConnectionPermit>>() else {
            return Ok(Self { _permit: None });
        };
        match connection.try_count_as_stream() {
            Some(permit) => Ok(Self { _permit: Some(permit) }),
            None => Err(refuse_stream()),
        }
    }
}

/// The error for a request that would last while too many others do.
pub(super) fn too_many_streams() -> ApiError {
    let message = "too many event streams and waiting requests are open; try again when some have ended";
    ApiError::new(ErrorCode::Overloaded, message)
}

fn refuse_stream() -> Response {
    let mut response = HttpError(too_many_streams()).into_response();
    // A client that may not stream would otherwise keep an idle connection that others need.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(connections: usize) -> ConnectionLimit {
        ConnectionLimit::new(&EdgeLimits { connections, ..EdgeLimits::default() })
    }

    #[test]
    fn a_part_of_the_connections_is_kept_for_sockets() {
        let limit = limit(32);
        let mut permits: Vec<_> = (0..30).map(|_| limit.try_acquire(true)).collect();
        assert!(permits.iter().all(Option::is_some));
        assert!(limit.try_acquire(true).is_none());
        for expected in [true, true, false] {
            permits.push(limit.try_acquire(false));
            assert_eq!(permits.last().unwrap().is_some(), expected);
        }
        permits.clear();
        assert!(limit.try_acquire(true).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_connection_that_has_been_idle_longest_makes_way_and_a_busy_one_does_not() {
        let limit = limit(4);
        let [first, second, busy] = [(); 3].map(|()| limit.register(false));
        let _request = busy.activity.clone().begin_request();
        assert!(
            !limit.close_idle_connection(false),
            "clients that have just connected are about to send requests"
        );
        tokio::time::advance(Duration::from_millis(1)).await;
        drop(second.activity.clone().begin_request());
        assert!(limit.close_idle_connection(false), "an answered client may reconnect");
        second.activity.wait_for_close_request().await;
        tokio::time::advance(FIRST_REQUEST_GRACE).await;
        assert!(limit.close_idle_connection(false));
        first.activity.wait_for_close_request().await;
        assert!(!limit.close_idle_connection(false), "each is asked once");
        drop((first, second));
        assert_eq!(limit.open.lock().by_number.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn only_tcp_makes_way_for_tcp_that_has_used_up_its_share() {
        let limit = limit(32);
        let (socket, tcp) = (limit.register(false), limit.register(true));
        tokio::time::advance(FIRST_REQUEST_GRACE).await;
        drop(tcp.activity.clone().begin_request());
        let permits: Vec<_> = (0..30).map(|_| limit.try_acquire(true)).collect();
        assert!(limit.close_idle_connection(true));
        tcp.activity.wait_for_close_request().await;
        assert!(!limit.close_idle_connection(true), "a socket would not help");
        drop(permits);
        assert!(limit.close_idle_connection(true));
        socket.activity.wait_for_close_request().await;
    }
}
