//! The route to one session's worker on another machine: the process that holds the worker is asked to dial, and the
//! connection it opens becomes the link's. Each wait here is for another machine, so each has a time limit.

use std::fs;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use qd_link::socket::{ByteStream, Role, Socket};
use qd_link::{NumberedUpdate, WorkerConnector, WorkerEnding, WorkerUnreachable};
use qd_protocol::event::RunError;
use qd_protocol::frame::join::{DaemonJoinFrame, SessionWorker};
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{ApiError, TokenId};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::{JOINED_PREFIX, JoinedWorkers, host_file};
use crate::edge::UpgradedConnection;

/// How long one attempt waits for the process to connect or to dial, before the link gets control back.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// How a link reaches a worker on another machine.
pub(super) struct JoinedWorkerConnector {
    joined: Arc<JoinedWorkers>,
    worker: SessionWorker,
    /// What to start there. Kept until the process has dialled, because the first request may not have arrived.
    spec: Option<Box<AgentSpec>>,
    started: Instant,
}

/// The result of asking a process to dial.
pub(super) enum DialAttempt {
    /// The process was asked.
    Requested(oneshot::Receiver<UpgradedConnection>, CancellationToken),
    /// The process is not connected.
    HostAway,
    /// The worker is lost or can never start.
    Impossible,
}

impl JoinedWorkerConnector {
    pub(super) fn new(
        joined: Arc<JoinedWorkers>,
        worker: SessionWorker,
        spec: Option<Box<AgentSpec>>,
    ) -> Self {
        Self { joined, worker, spec, started: Instant::now() }
    }
}

impl WorkerConnector for JoinedWorkerConnector {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let until = Instant::now() + DIAL_TIMEOUT;
        let mut changed = self.joined.hosts_changed.subscribe();
        loop {
            changed.mark_unchanged();
            match self.joined.request_dial(&self.worker, self.spec.as_deref(), self.started) {
                DialAttempt::Impossible => return Err(WorkerUnreachable::Dead),
                DialAttempt::HostAway => {
                    let wait_until = until.min(self.joined.lease_deadline(&self.worker, self.started));
                    if timeout_at(wait_until, changed.changed()).await.is_err() && wait_until == until {
                        return Err(WorkerUnreachable::MachineAway);
                    }
                }
                DialAttempt::Requested(dialled, disconnect) => match timeout_at(until, dialled).await {
                    Ok(Ok(connection)) => {
                        self.spec = None;
                        let wire: Box<dyn ByteStream> = Box::new(CancellableConnection {
                            connection,
                            cancelled: Box::pin(disconnect.cancelled_owned()),
                        });
                        return Ok(Socket::from_upgraded(wire, Role::Server).await);
                    }
                    // The process has disconnected, or has refused.
                    Ok(Err(_)) => {}
                    Err(_) => {
                        let reason =
                            format!("its machine opened no connection within {} s", DIAL_TIMEOUT.as_secs());
                        return Err(WorkerUnreachable::RetryLater(reason));
                    }
                },
            }
        }
    }

    /// The other machine ends the worker. If it is away, it is told when it comes back.
    async fn end_worker(&mut self) -> WorkerEnding {
        self.joined.abandon(&self.worker.worker);
        WorkerEnding::Requested
    }

    /// The spool is on the other machine and cannot be read. If the worker never started, the reason is known here
    /// and is its last update.
    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        let error = self.joined.failure_reason(&self.worker);
        let last = |error| NumberedUpdate {
            number: UpdateNumber(after.0 + 1),
            update: AgentUpdate::Gone(AgentExitReason::Failed(error)),
        };
        error.into_iter().map(last).collect()
    }
}

impl JoinedWorkers {
    /// Asks the process that holds a worker to dial. If no process holds it yet, one is chosen.
    pub(super) fn request_dial(
        &self,
        worker: &SessionWorker,
        open: Option<&AgentSpec>,
        began: Instant,
    ) -> DialAttempt {
        let mut state = self.lock();
        let Some(placement) = state.placements.get(&worker.worker) else { return DialAttempt::Impossible };
        if placement.ended.is_some() {
            return DialAttempt::Impossible;
        }
        let host = match (&placement.host, open) {
            (Some(host), _) => Some(host.clone()),
            (None, Some(spec)) => state.choose_host(&placement.remote_agent, spec.sandbox.as_deref()),
            // No process was ever asked to hold it, and the spec it was to start with is gone.
            (None, None) => return DialAttempt::Impossible,
        };
        let is_connected =
            host.as_ref().and_then(|host| state.hosts.get(host)).is_some_and(|host| host.control.is_some());
        let remaining = state.remaining_wait(host.as_deref(), began, self.lease);
        let Some(placement) = state.placements.get_mut(&worker.worker) else {
            return DialAttempt::Impossible;
        };
        let Some(host) = host.filter(|_| is_connected) else {
            if !remaining.is_zero() {
                return DialAttempt::HostAway;
            }
            let error = open.map(|_| {
                worker_away(&placement.remote_agent.agent, &placement.remote_agent.label, self.lease)
            });
            placement.mark_ended(error);
            return DialAttempt::Impossible;
        };
        if placement.host.is_none() {
            let written = fs::write(host_file(&self.dir, &worker.worker), format!("{JOINED_PREFIX}{host}"));
            if let Err(error) = written {
                tracing::warn!(worker = %worker.worker, %error, "a later daemon cannot reattach to this agent");
            }
            placement.host = Some(host.clone());
        }
        let (waiter, dialled) = oneshot::channel();
        placement.dial_waiter = Some(waiter);
        let disconnect = placement.disconnect.clone();
        let frame = match open {
            Some(spec) => DaemonJoinFrame::Open {
                spec: Box::new(spec.clone()),
                secret: self.keys.secret(worker.worker.as_str()),
            },
            None => DaemonJoinFrame::Dial(worker.clone()),
        };
        if state.send_frame(&host, frame) {
            DialAttempt::Requested(dialled, disconnect)
        } else {
            DialAttempt::HostAway
        }
    }

    /// Until when the daemon waits for a process that is away.
    fn lease_deadline(&self, worker: &SessionWorker, began: Instant) -> Instant {
        let state = self.lock();
        let host = state.placements.get(&worker.worker).and_then(|placement| placement.host.as_deref());
        Instant::now() + state.remaining_wait(host, began, self.lease)
    }

    /// Why a worker never started.
    pub(super) fn failure_reason(&self, worker: &SessionWorker) -> Option<RunError> {
        self.lock().placements.get(&worker.worker)?.ended.clone()?
    }

    /// Checks that a process with this token was asked to dial for this worker.
    pub(crate) fn check_expected(&self, worker: &SessionWorker, token: &TokenId) -> Result<(), ApiError> {
        let state = self.lock();
        let placement =
            state.placements.get(&worker.worker).filter(|placement| placement.session == worker.session);
        let host = placement.and_then(|placement| state.hosts.get(placement.host.as_ref()?));
        let assigned = host.and_then(|host| host.info.as_ref()).is_some_and(|info| info.token == *token);
        let dial_expected = placement
            .and_then(|placement| placement.dial_waiter.as_ref())
            .is_some_and(|waiter| !waiter.is_closed());
        match assigned && dial_expected {
            true => Ok(()),
            false => Err(ApiError::not_found("expected worker", &worker.worker)),
        }
    }

    /// Hands the connection that the process dialled to the route that waits for it.
    pub(crate) fn accept_dial(&self, worker: &SessionWorker, connection: UpgradedConnection) {
        let mut state = self.lock();
        let Some(placement) = state.placements.get_mut(&worker.worker) else { return };
        if let Some(waiter) = placement.dial_waiter.take() {
            placement.has_dialled = true;
            // If the route no longer waits, the connection ends here, and the process will be asked again.
            let _gone = waiter.send(connection);
        }
    }
}

impl super::JoinedWorkersState {
    /// How much longer the daemon waits for the process that holds a worker, or for one that could.
    fn remaining_wait(&self, host: Option<&str>, began: Instant, lease: Duration) -> Duration {
        match host.map(|host| self.hosts.get(host)) {
            Some(Some(host)) => host.remaining_lease(lease),
            Some(None) => Duration::ZERO,
            None => lease.saturating_sub(began.elapsed()),
        }
    }
}

fn worker_away(agent: &str, label: &str, lease: Duration) -> RunError {
    let message = format!(
        "no joined worker with the label `{label}` offered {agent} within {} s; `qd workers` lists the joined \
             workers, `qd workers token` prints the command that joins one",
        lease.as_secs()
    );
    RunError::new("worker_away", message)
}

/// A connection that can be closed by a part of the daemon that does not own it.
struct CancellableConnection {
    connection: UpgradedConnection,
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl CancellableConnection {
    fn is_cancelled(&mut self, cx: &mut Context<'_>) -> bool {
        self.cancelled.as_mut().poll(cx).is_ready()
    }
}

impl AsyncRead for CancellableConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_cancelled(cx) {
            Poll::Ready(Ok(()))
        } else {
            Pin::new(&mut self.connection).poll_read(cx, buffer)
        }
    }
}

impl AsyncWrite for CancellableConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_cancelled(cx) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        Pin::new(&mut self.connection).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }
}
