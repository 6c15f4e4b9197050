//! The sessions of a worker that is nothing but an executor: one seat each, kept in memory, which can be left and
//! attached to again while its run goes on. No secret is asked for; the door has asked for a token already.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_protocol::frame::v1::ToDaemon;
use qd_protocol::limits::{CONNECTIONS_MAX, ORPHAN_BUSY_S, ORPHAN_IDLE_S, SPOOL_MAX};
use qd_protocol::link::{Gone, Up, UpNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{SessionId, WorkerId};
use tokio::task::JoinHandle;

use crate::executor::{Executor, linked};
use crate::local::host;
use crate::seat::{Seat, SeatOptions, SeatState, Wanted, greet, offer_empty};
use crate::socket::{Socket, SocketError, Wire};
use crate::spool::MemorySpool;

/// Our version, for people.
const SOFTWARE: &str = concat!("qd-link ", env!("CARGO_PKG_VERSION"));

/// See the module. Dropping it ends all runs.
#[derive(Debug)]
pub(super) struct Seats<E> {
    executor: Arc<E>,
    held: Arc<Mutex<HashMap<Key, Held>>>,
}

type Key = (SessionId, WorkerId);

#[derive(Debug)]
struct Held {
    seat: Seat,
    /// Sees to the seat until it is given up.
    task: JoinHandle<()>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<E: Executor> Seats<E> {
    pub(super) fn new(executor: Arc<E>) -> Self {
        Self { executor, held: Arc::default() }
    }

    /// Serves one connection for the session that it names. A session that is new here is started if the peer wants.
    pub(super) async fn serve<W: Wire>(&self, mut socket: Socket<W>) -> Result<(), SocketError> {
        let hello = greet(&mut socket).await?;
        let key = (hello.session.clone(), hello.worker.clone());
        let known = lock(&self.held).get(&key).map(|held| held.seat.clone());
        if let Some(seat) = known {
            return seat.serve(socket, hello).await;
        }
        if lock(&self.held).len() >= CONNECTIONS_MAX {
            let message =
                format!("this worker holds {CONNECTIONS_MAX} sessions already; close some, or ask another");
            socket.send(&ToDaemon::Refused { code: "busy".to_owned(), message: message.clone() }).await?;
            return Err(SocketError::Unwelcome(message));
        }
        let started = offer_empty(socket, hello, &Secret::default(), SOFTWARE).await?;
        self.open(key, &started.spec).serve_started(started).await
    }

    /// Whether a run goes on, attached or not.
    pub(super) fn is_busy(&self) -> bool {
        lock(&self.held).values().any(|held| held.seat.state().borrow().run.is_some())
    }

    /// A seat for a new session.
    fn open(&self, key: Key, spec: &AgentSpec) -> Seat {
        let options = SeatOptions {
            session: key.0.clone(),
            worker: key.1.clone(),
            secret: Secret::default(),
            after: spec.after,
            spool_max: SPOOL_MAX,
            software: SOFTWARE.to_owned(),
        };
        let seat = Seat::new(options, Box::new(MemorySpool::default()));
        seat.set_model(spec.model.clone());
        let (seated, executor) = (seat.clone(), Arc::clone(&self.executor));
        let (all, name) = (Arc::clone(&self.held), key.clone());
        let task = tokio::spawn(async move {
            attend(&seated, executor).await;
            lock(&all).remove(&name);
        });
        lock(&self.held).insert(key, Held { seat: seat.clone(), task });
        seat
    }
}

/// The life of a seat: its agent is started, does what the daemon wants, and is given up when nobody comes for it.
async fn attend<E: Executor>(seat: &Seat, executor: Arc<E>) {
    // The seat numbers what is said; the link inside begins anywhere.
    let start = || seat.seat(host(UpNumber(0), |end| linked::agent(Arc::clone(&executor), end)));
    start();
    loop {
        let wanted = tokio::select! {
            wanted = seat.wanted() => wanted,
            () = abandoned(seat) => return,
        };
        match wanted {
            Wanted::Start(_) => start(),
            // Nothing is left by an executor that could rest.
            Wanted::Rest | Wanted::Close => break,
        }
    }
    seat.unseat().await;
    seat.say(Up::Gone(Gone::Stopped)).await;
    tokio::select! {
        _heard = async { seat.state().wait_for(|state| !state.unacked).await.is_ok() } => {}
        () = abandoned(seat) => {}
    }
}

/// Waits until no daemon has been attached for so long that none will come.
async fn abandoned(seat: &Seat) {
    let mut changes = seat.state();
    loop {
        let patience = patience(&changes.borrow_and_update());
        tokio::select! {
            changed = changes.changed() => if changed.is_err() {
                return;
            },
            () = async {
                match patience {
                    Some(patience) => tokio::time::sleep(patience).await,
                    None => std::future::pending().await,
                }
            } => return,
        }
    }
}

fn patience(state: &SeatState) -> Option<Duration> {
    let seconds = if state.run.is_some() { ORPHAN_BUSY_S } else { ORPHAN_IDLE_S };
    (!state.attached).then(|| Duration::from_secs(seconds).saturating_sub(state.since.elapsed()))
}

fn lock<T>(held: &Mutex<T>) -> MutexGuard<'_, T> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}
