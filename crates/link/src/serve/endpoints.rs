//! The sessions of a worker that is nothing but an executor: one seat each, kept in memory, which can be left and
//! attached to again while its run goes on. No secret is asked for; the door has asked for a token already.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_protocol::frame::v1::WorkerLinkFrame;
use qd_protocol::limits::{CONNECTIONS_MAX, ORPHAN_BUSY_S, ORPHAN_IDLE_S, SPOOL_MAX};
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{SessionId, WorkerId};
use tokio::task::JoinHandle;

use crate::executor::{Executor, linked_agent};
use crate::local::host_agent;
use crate::socket::{ByteStream, Socket, SocketError};
use crate::spool::MemorySpool;
use crate::worker_endpoint::{
    LifecycleRequest, WorkerEndpoint, WorkerEndpointOptions, WorkerEndpointStatus, read_hello,
    receive_agent_start,
};

/// Our version, for people.
const SOFTWARE: &str = concat!("qd-link ", env!("CARGO_PKG_VERSION"));

/// See the module. Dropping it ends all runs.
#[derive(Debug)]
pub(super) struct EndpointRegistry<E> {
    executor: Arc<E>,
    endpoints: Arc<Mutex<HashMap<EndpointKey, RegisteredEndpoint>>>,
}

type EndpointKey = (SessionId, WorkerId);

#[derive(Debug)]
struct RegisteredEndpoint {
    endpoint: WorkerEndpoint,
    /// Sees to the seat until it is given up.
    task: JoinHandle<()>,
}

impl Drop for RegisteredEndpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<E: Executor> EndpointRegistry<E> {
    pub(super) fn new(executor: Arc<E>) -> Self {
        Self { executor, endpoints: Arc::default() }
    }

    /// Serves one connection for the session that it names. A session that is new here is started if the peer wants.
    pub(super) async fn serve<W: ByteStream>(&self, mut socket: Socket<W>) -> Result<(), SocketError> {
        let hello = read_hello(&mut socket).await?;
        let key = (hello.session.clone(), hello.worker.clone());
        let known = lock(&self.endpoints).get(&key).map(|held| held.endpoint.clone());
        if let Some(seat) = known {
            return seat.serve(socket, hello).await;
        }
        if lock(&self.endpoints).len() >= CONNECTIONS_MAX {
            let message =
                format!("this worker holds {CONNECTIONS_MAX} sessions already; close some, or ask another");
            socket
                .send(&WorkerLinkFrame::Refused { code: "busy".to_owned(), message: message.clone() })
                .await?;
            return Err(SocketError::PeerRefused(message));
        }
        let started = receive_agent_start(socket, hello, &Secret::default(), SOFTWARE).await?;
        self.create_endpoint(key, &started.spec).serve_started(started).await
    }

    /// Whether a run goes on, attached or not.
    pub(super) fn is_busy(&self) -> bool {
        lock(&self.endpoints).values().any(|held| held.endpoint.watch_status().borrow().run.is_some())
    }

    /// A seat for a new session.
    fn create_endpoint(&self, key: EndpointKey, spec: &AgentSpec) -> WorkerEndpoint {
        let options = WorkerEndpointOptions {
            session: key.0.clone(),
            worker: key.1.clone(),
            secret: Secret::default(),
            numbered_after: spec.after,
            spool_max: SPOOL_MAX,
            software: SOFTWARE.to_owned(),
        };
        let seat = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
        seat.set_model(spec.model.clone());
        let (seated, executor) = (seat.clone(), Arc::clone(&self.executor));
        let (all, name) = (Arc::clone(&self.endpoints), key.clone());
        let task = tokio::spawn(async move {
            run_endpoint(&seated, executor).await;
            lock(&all).remove(&name);
        });
        lock(&self.endpoints).insert(key, RegisteredEndpoint { endpoint: seat.clone(), task });
        seat
    }
}

/// The life of a seat: its agent is started, does what the daemon wants, and is given up when nobody comes for it.
async fn run_endpoint<E: Executor>(seat: &WorkerEndpoint, executor: Arc<E>) {
    // The seat numbers what is said; the link inside begins anywhere.
    let start = || {
        seat.set_agent(host_agent(UpdateNumber(0), |end| {
            linked_agent::run_linked_agent(Arc::clone(&executor), end)
        }))
    };
    start();
    loop {
        let wanted = tokio::select! {
            wanted = seat.next_request() => wanted,
            () = wait_until_abandoned(seat) => return,
        };
        match wanted {
            LifecycleRequest::Start(_) => start(),
            // Nothing is left by an executor that could rest.
            LifecycleRequest::Rest | LifecycleRequest::Close => break,
        }
    }
    seat.remove_agent().await;
    seat.send(AgentUpdate::Gone(AgentExitReason::Stopped)).await;
    tokio::select! {
        _heard = async { seat.watch_status().wait_for(|state| !state.has_unacked).await.is_ok() } => {}
        () = wait_until_abandoned(seat) => {}
    }
}

/// Waits until no daemon has been attached for so long that none will come.
async fn wait_until_abandoned(seat: &WorkerEndpoint) {
    let mut changes = seat.watch_status();
    loop {
        let patience = time_until_abandoned(&changes.borrow_and_update());
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

fn time_until_abandoned(state: &WorkerEndpointStatus) -> Option<Duration> {
    let seconds = if state.run.is_some() { ORPHAN_BUSY_S } else { ORPHAN_IDLE_S };
    (!state.attached)
        .then(|| Duration::from_secs(seconds).saturating_sub(state.attachment_changed_at.elapsed()))
}

fn lock<T>(held: &Mutex<T>) -> MutexGuard<'_, T> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}
