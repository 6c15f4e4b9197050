//! The sessions of a worker that consists of just an executor of the SDK, for peers that speak `quarterdeck.v1`. Each has
//! a worker endpoint in memory; a daemon can detach from it and reattach while its run continues. No secret is checked
//! here, because the SDK's server has already checked the token.

mod linked_agent;

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use qd_protocol::frame::v1::{self, WorkerLinkFrame};
use qd_protocol::limits::{CONNECTIONS_MAX, ORPHAN_BUSY_S, ORPHAN_IDLE_S, SPOOL_MAX};
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{SessionId, WorkerId};
use qd_worker_sdk::Executor;
use qd_worker_sdk::executor::panic_message;
use qd_worker_sdk::serve::Subprotocol;
use qd_worker_sdk::socket::{ByteStream, Socket, SocketError};
use tokio::task::JoinHandle;

use crate::local::host_agent;
use crate::spool::MemorySpool;
use crate::worker_endpoint::{
    LifecycleRequest, WorkerEndpoint, WorkerEndpointOptions, WorkerEndpointStatus, read_hello,
    receive_agent_start,
};

/// Our version, for logs.
const SOFTWARE: &str = concat!("qd-link ", env!("CARGO_PKG_VERSION"));

/// Lets a worker's server speak `quarterdeck.v1`, with which a run outlives its connection.
#[derive(Debug, Default)]
pub struct LinkSubprotocol {
    endpoints: Arc<Mutex<HashMap<EndpointKey, RegisteredEndpoint>>>,
}

type EndpointKey = (SessionId, WorkerId);

#[derive(Debug)]
struct RegisteredEndpoint {
    endpoint: WorkerEndpoint,
    /// Runs the endpoint until it is abandoned or closed.
    task: JoinHandle<()>,
}

impl Drop for RegisteredEndpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Subprotocol for LinkSubprotocol {
    const NAME: Option<&'static str> = Some(v1::SUBPROTOCOL);

    /// Serves one connection for the session that its hello names. A session that is unknown here is created if the
    /// peer sends a start.
    async fn serve<E: Executor, W: ByteStream>(
        &self,
        executor: &Arc<E>,
        mut socket: Socket<W>,
    ) -> Result<(), SocketError> {
        let hello = read_hello(&mut socket).await?;
        let key = (hello.session.clone(), hello.worker.clone());
        let known = self.endpoints.lock().get(&key).map(|registered| registered.endpoint.clone());
        if let Some(endpoint) = known {
            return endpoint.serve(socket, hello).await;
        }
        if self.endpoints.lock().len() >= CONNECTIONS_MAX {
            let message = format!(
                "this worker holds {CONNECTIONS_MAX} sessions already; close some, or use another worker"
            );
            socket
                .send(&WorkerLinkFrame::Refused { code: "busy".to_owned(), message: message.clone() })
                .await?;
            return Err(SocketError::PeerRefused(message));
        }
        let started = receive_agent_start(socket, hello, &Secret::default(), SOFTWARE).await?;
        self.create_endpoint(executor, key, &started.spec).serve_started(started).await
    }

    fn is_busy(&self) -> bool {
        self.endpoints
            .lock()
            .values()
            .any(|registered| registered.endpoint.watch_status().borrow().run.is_some())
    }
}

impl LinkSubprotocol {
    fn create_endpoint<E: Executor>(
        &self,
        executor: &Arc<E>,
        key: EndpointKey,
        spec: &AgentSpec,
    ) -> WorkerEndpoint {
        let options = WorkerEndpointOptions {
            session: key.0.clone(),
            worker: key.1.clone(),
            secret: Secret::default(),
            numbered_after: spec.after,
            spool_max: SPOOL_MAX,
            software: SOFTWARE.to_owned(),
        };
        let endpoint = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
        endpoint.set_start_settings(spec.model.clone(), None);
        let (task_endpoint, executor) = (endpoint.clone(), Arc::clone(executor));
        let (endpoints, task_key) = (Arc::clone(&self.endpoints), key.clone());
        let task = tokio::spawn(async move {
            let run = AssertUnwindSafe(run_endpoint(&task_endpoint, executor));
            if let Err(panic) = run.catch_unwind().await {
                tracing::error!(reason = panic_message(panic.as_ref()), "the task of a session panicked");
                // The daemon connects again and finds no session, so it knows that the worker is lost.
                task_endpoint.disconnect();
            }
            endpoints.lock().remove(&task_key);
        });
        self.endpoints.lock().insert(key, RegisteredEndpoint { endpoint: endpoint.clone(), task });
        endpoint
    }
}

/// Runs an endpoint: starts its agent, handles lifecycle requests, and gives up when no daemon comes back.
async fn run_endpoint<E: Executor>(endpoint: &WorkerEndpoint, executor: Arc<E>) {
    // The endpoint numbers the updates again, so the inner link may start at any number.
    let start = || {
        endpoint.set_agent(host_agent(UpdateNumber(0), |end| {
            linked_agent::run_linked_agent(Arc::clone(&executor), end)
        }))
    };
    let mut task_deaths = endpoint.watch_task_deaths();
    start();
    loop {
        let request = tokio::select! {
            request = endpoint.next_request() => request,
            _died = task_deaths.wait_for(Option::is_some) => break,
            () = wait_until_abandoned(endpoint) => return,
        };
        match request {
            LifecycleRequest::Start(_) => start(),
            // An executor leaves nothing running that would have to be kept, so stopping it is the same as closing it.
            LifecycleRequest::StopIdleAgent | LifecycleRequest::Close => break,
        }
    }
    endpoint.remove_agent().await;
    let task_death = task_deaths.borrow_and_update().clone();
    let gone = task_death.map_or(AgentExitReason::Stopped, AgentExitReason::Failed);
    endpoint.send(AgentUpdate::Gone(gone)).await;
    tokio::select! {
        _died = task_deaths.changed() => endpoint.disconnect(),
        _acked = async { endpoint.watch_status().wait_for(|status| !status.has_unacked).await.is_ok() } => {}
        () = wait_until_abandoned(endpoint) => {}
    }
}

/// Waits until no daemon has been attached for so long that none is expected any more.
async fn wait_until_abandoned(endpoint: &WorkerEndpoint) {
    let mut changes = endpoint.watch_status();
    loop {
        let time_left = time_until_abandoned(&changes.borrow_and_update());
        tokio::select! {
            changed = changes.changed() => if changed.is_err() {
                return;
            },
            () = async {
                match time_left {
                    Some(time_left) => tokio::time::sleep(time_left).await,
                    None => std::future::pending().await,
                }
            } => return,
        }
    }
}

fn time_until_abandoned(status: &WorkerEndpointStatus) -> Option<Duration> {
    let seconds = if status.run.is_some() { ORPHAN_BUSY_S } else { ORPHAN_IDLE_S };
    (!status.attached)
        .then(|| Duration::from_secs(seconds).saturating_sub(status.attachment_changed_at.elapsed()))
}
