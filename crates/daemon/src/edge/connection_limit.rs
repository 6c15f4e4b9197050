//! The limit on open connections, and on those that are used for a long time. Event streams, waits and terminals may
//! use most connections but not all, so a command always finds one. If all are open, an idle one is closed to make way.
//! One TCP address may use only a part of them, and fewer before it has shown a token; beyond that its own oldest
//! connection without a token makes way, so that a flood from one address locks out no other.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::header::{self, HeaderValue};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use parking_lot::{Mutex, MutexGuard};
use qd_protocol::limits::{ADDRESS_CONNECTIONS_MAX, ADDRESS_UNPROVEN_MAX};
use qd_protocol::{ApiError, ErrorCode};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::error::HttpError;
use super::serve::EdgeLimits;

/// One in this many connections is reserved for unix sockets, so that a flood over TCP cannot lock the owner out.
const UNIX_SOCKET_SHARE: usize = 16;
/// One in this many TCP connections is for other addresses than the one that uses most.
const OTHER_ADDRESSES_SHARE: usize = 4;
/// One address may hold one in this many TCP connections without a valid token.
const UNPROVEN_SHARE: usize = 8;
/// Between two lines in the log about addresses that have reached their limits.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
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
    per_address: AddressLimits,
}

/// How many connections one TCP address may have.
#[derive(Debug, Clone, Copy)]
struct AddressLimits {
    all: usize,
    /// Without a valid token.
    unproven: usize,
}

impl AddressLimits {
    fn of_share(tcp: usize) -> Self {
        Self {
            all: ADDRESS_CONNECTIONS_MAX.min(tcp - tcp / OTHER_ADDRESSES_SHARE).max(1),
            unproven: ADDRESS_UNPROVEN_MAX.min(tcp / UNPROVEN_SHARE).max(1),
        }
    }
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
        let tcp = connections - connections / UNIX_SOCKET_SHARE;
        Self {
            all: Arc::new(Semaphore::new(connections)),
            tcp: Arc::new(Semaphore::new(tcp)),
            streams: Arc::new(Semaphore::new(streams)),
            rejections: Arc::new(Semaphore::new(rejections)),
            open: Arc::default(),
            per_address: AddressLimits::of_share(tcp),
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

    /// Makes way for one more connection from a TCP address: beyond the limit on connections without a token, the
    /// oldest of them is closed. False if the address has as many connections as it may have, all with a token.
    pub(super) fn admit_address(&self, address: IpAddr) -> bool {
        let mut open = self.open.lock();
        let (mut all, mut unproven, mut oldest) = (0, 0, None);
        for (number, activity) in open.by_number.iter().filter(|(_, open)| open.address == Some(address)) {
            all += 1;
            if activity.is_unproven() {
                unproven += 1;
                oldest = oldest.into_iter().chain([(*number, activity)]).min_by_key(|(number, _)| *number);
            }
        }
        let AddressLimits { all: all_max, unproven: unproven_max } = self.per_address;
        let makes_way = oldest.filter(|_| unproven >= unproven_max || all >= all_max);
        if let Some((_, oldest)) = makes_way {
            oldest.request_close();
        }
        let is_admitted = all < all_max || makes_way.is_some();
        if makes_way.is_some() || !is_admitted {
            open.warn_of_flood(address);
        }
        is_admitted
    }

    /// Registers a connection while it is served, so that it can be closed when it is idle and others need its place.
    /// `address` is that of a TCP client.
    pub(super) fn register(&self, address: Option<IpAddr>) -> RegisteredConnection {
        let activity = Arc::new(ConnectionActivity::new(address));
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
        let candidates = open.by_number.values().filter(|activity| activity.address.is_some() || !tcp_only);
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
    warned_at: Option<Instant>,
}

impl OpenConnectionTable {
    fn warn_of_flood(&mut self, address: IpAddr) {
        if self.warned_at.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL) {
            self.warned_at = Some(Instant::now());
            tracing::warn!(%address, "an address has as many connections as it may have; its oldest ones are closed");
        }
    }
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
    /// The address of a TCP client, and nothing for a unix socket.
    address: Option<IpAddr>,
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
    /// Whether a request has shown a valid token.
    is_proven: bool,
    is_closing: bool,
}

impl ConnectionActivity {
    fn new(address: Option<IpAddr>) -> Self {
        let state = ActivityState {
            busy: false,
            since: Instant::now(),
            had_request: false,
            is_proven: false,
            is_closing: false,
        };
        Self { address, state: Mutex::new(state), changed: Notify::new(), close: Notify::new() }
    }

    /// Marks the connection as busy until the result is dropped.
    pub(super) fn begin_request(self: Arc<Self>) -> ActiveRequest {
        self.set_busy(true);
        ActiveRequest(self)
    }

    /// Records that a request on the connection has shown a valid token.
    pub(super) fn mark_proven(&self) {
        self.lock().is_proven = true;
    }

    /// Whether the connection has shown no valid token and is not being closed.
    fn is_unproven(&self) -> bool {
        let state = self.lock();
        !state.is_proven && !state.is_closing
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

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2));

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

    #[tokio::test]
    async fn an_address_without_a_token_closes_only_its_own_connections() {
        let limit = limit(1024);
        let unproven = limit.per_address.unproven;
        let other = limit.register(Some(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)));
        let proven = limit.register(Some(ADDRESS));
        proven.activity.mark_proven();
        let flood: Vec<_> = (0..unproven).map(|_| limit.register(Some(ADDRESS))).collect();
        assert!(limit.admit_address(ADDRESS));
        flood[0].activity.wait_for_close_request().await;
        let closing = |connection: &RegisteredConnection| connection.activity.lock().is_closing;
        assert_eq!(flood.iter().filter(|connection| closing(connection)).count(), 1);
        assert!(!closing(&other) && !closing(&proven));
    }

    #[test]
    fn an_address_with_a_token_has_no_more_than_its_share() {
        let limit = limit(1024);
        let connections: Vec<_> = (0..limit.per_address.all)
            .map(|_| {
                assert!(limit.admit_address(ADDRESS));
                let connection = limit.register(Some(ADDRESS));
                connection.activity.mark_proven();
                connection
            })
            .collect();
        assert!(!limit.admit_address(ADDRESS));
        assert!(limit.admit_address(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)));
        drop(connections);
        assert!(limit.admit_address(ADDRESS));
    }

    #[tokio::test(start_paused = true)]
    async fn the_connection_that_has_been_idle_longest_makes_way_and_a_busy_one_does_not() {
        let limit = limit(4);
        let [first, second, busy] = [(); 3].map(|()| limit.register(None));
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
        let (socket, tcp) = (limit.register(None), limit.register(Some(ADDRESS)));
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
