//! The way to one session's worker on another machine: the process that holds it is asked to dial, and what it dials is
//! the connection. Who waits here waits for a machine, so every wait has an end.

use std::fs;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use qd_link::socket::{ByteStream, Role, Socket};
use qd_link::{NumberedUpdate, WorkerConnector, WorkerUnreachable};
use qd_protocol::event::RunError;
use qd_protocol::frame::join::{DaemonJoinFrame, SessionWorker};
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{ApiError, TokenId};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::{JOINED_PREFIX, JoinedWorkers, holder_file};
use crate::edge::UpgradedConnection;

/// How long one try may take, for a process to come or to dial. Then the link has a moment for other things.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The way to one worker.
pub(super) struct JoinedHostRoute {
    joined: Arc<JoinedWorkers>,
    seat: SessionWorker,
    /// What to start there, until it has dialled: it may not have heard us the first time.
    spec: Option<Box<AgentSpec>>,
    started: Instant,
}

/// How far a try has come.
pub(super) enum DialAttempt {
    /// The process was asked.
    Requested(oneshot::Receiver<UpgradedConnection>, CancellationToken),
    /// It is not there.
    HostAway,
    /// It will never be.
    Impossible,
}

impl JoinedHostRoute {
    pub(super) fn new(joined: Arc<JoinedWorkers>, seat: SessionWorker, spec: Option<Box<AgentSpec>>) -> Self {
        Self { joined, seat, spec, started: Instant::now() }
    }
}

impl WorkerConnector for JoinedHostRoute {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let until = Instant::now() + DIAL_TIMEOUT;
        let mut changed = self.joined.hosts_changed.subscribe();
        loop {
            changed.mark_unchanged();
            match self.joined.request_dial(&self.seat, self.spec.as_deref(), self.started) {
                DialAttempt::Impossible => return Err(WorkerUnreachable::Dead),
                DialAttempt::HostAway => {
                    let patience = until.min(self.joined.lease_deadline(&self.seat, self.started));
                    if timeout_at(patience, changed.changed()).await.is_err() && patience == until {
                        return Err(WorkerUnreachable::RetryLater);
                    }
                }
                DialAttempt::Requested(line, cut) => match timeout_at(until, line).await {
                    Ok(Ok(line)) => {
                        self.spec = None;
                        let wire: Box<dyn ByteStream> = Box::new(CancellableConnection {
                            line,
                            cancelled: Box::pin(cut.cancelled_owned()),
                        });
                        return Ok(Socket::from_upgraded(wire, Role::Server).await);
                    }
                    // It has gone, or has said no.
                    Ok(Err(_)) => {}
                    Err(_) => return Err(WorkerUnreachable::RetryLater),
                },
            }
        }
    }

    /// Its spool is on its own machine. But why it never came to be is known here, and is its last word.
    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        let error = self.joined.failure_reason(&self.seat);
        let last = |error| NumberedUpdate {
            number: UpdateNumber(after.0 + 1),
            update: AgentUpdate::Gone(AgentExitReason::Failed(error)),
        };
        error.into_iter().map(last).collect()
    }
}

impl JoinedWorkers {
    /// Asks the process that holds a worker, or that is to hold it, to dial.
    pub(super) fn request_dial(
        &self,
        seat: &SessionWorker,
        open: Option<&AgentSpec>,
        began: Instant,
    ) -> DialAttempt {
        let mut state = self.lock();
        let Some(placement) = state.placements.get(&seat.worker) else { return DialAttempt::Impossible };
        if placement.ended.is_some() {
            return DialAttempt::Impossible;
        }
        let host = match (&placement.host, open) {
            (Some(host), _) => Some(host.clone()),
            (None, Some(_)) => state.choose_host(&placement.remote_agent),
            // Nobody was ever asked to hold it, and nobody knows any more with what it was to start.
            (None, None) => return DialAttempt::Impossible,
        };
        let is_there =
            host.as_ref().and_then(|host| state.hosts.get(host)).is_some_and(|host| host.control.is_some());
        let patience = state.remaining_wait(host.as_deref(), began, self.lease);
        let Some(placement) = state.placements.get_mut(&seat.worker) else { return DialAttempt::Impossible };
        let Some(host) = host.filter(|_| is_there) else {
            if !patience.is_zero() {
                return DialAttempt::HostAway;
            }
            let error = open.map(|_| {
                worker_away(&placement.remote_agent.agent, &placement.remote_agent.label, self.lease)
            });
            placement.mark_ended(error);
            return DialAttempt::Impossible;
        };
        if placement.host.is_none() {
            let written = fs::write(holder_file(&self.dir, &seat.worker), format!("{JOINED_PREFIX}{host}"));
            if let Err(error) = written {
                tracing::warn!(worker = %seat.worker, %error, "a later daemon will not find this agent");
            }
            placement.host = Some(host.clone());
        }
        let (tell, line) = oneshot::channel();
        placement.dial_waiter = Some(tell);
        let cut = placement.disconnect.clone();
        let frame = match open {
            Some(spec) => DaemonJoinFrame::Open {
                spec: Box::new(spec.clone()),
                secret: self.keys.secret(seat.worker.as_str()),
            },
            None => DaemonJoinFrame::Dial(seat.clone()),
        };
        if state.send_frame(&host, frame) { DialAttempt::Requested(line, cut) } else { DialAttempt::HostAway }
    }

    /// When waiting for a process that is away comes to its end.
    fn lease_deadline(&self, seat: &SessionWorker, began: Instant) -> Instant {
        let state = self.lock();
        let host = state.placements.get(&seat.worker).and_then(|placement| placement.host.as_deref());
        Instant::now() + state.remaining_wait(host, began, self.lease)
    }

    /// Why a worker never came to be.
    pub(super) fn failure_reason(&self, seat: &SessionWorker) -> Option<RunError> {
        self.lock().placements.get(&seat.worker)?.ended.clone()?
    }

    /// Whether a process that bears this token was asked to dial for this.
    pub(crate) fn check_expected(&self, seat: &SessionWorker, token: &TokenId) -> Result<(), ApiError> {
        let state = self.lock();
        let placement =
            state.placements.get(&seat.worker).filter(|placement| placement.session == seat.session);
        let host = placement.and_then(|placement| state.hosts.get(placement.host.as_ref()?));
        let given = host.and_then(|host| host.info.as_ref()).is_some_and(|about| about.token == *token);
        let waits = placement
            .and_then(|placement| placement.dial_waiter.as_ref())
            .is_some_and(|wait| !wait.is_closed());
        match given && waits {
            true => Ok(()),
            false => Err(ApiError::not_found("worker that is waited for,", &seat.worker)),
        }
    }

    /// The process has dialled.
    pub(crate) fn accept_dial(&self, seat: &SessionWorker, line: UpgradedConnection) {
        let mut state = self.lock();
        let Some(placement) = state.placements.get_mut(&seat.worker) else { return };
        if let Some(expected) = placement.dial_waiter.take() {
            placement.has_dialled = true;
            // Whoever waited may have gone; then the connection ends here, and the worker will be asked again.
            let _gone = expected.send(line);
        }
    }
}

impl super::JoinedWorkersState {
    /// How long a process is waited for that holds a worker, or that could.
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
        "no worker with the label `{label}` that offers {agent} was there within {} s: `qd workers` shows who has \
         joined, `qd workers token` prints the line with which one joins",
        lease.as_secs()
    );
    RunError::new("worker_away", message)
}

/// A connection that can be ended by somebody who does not hold it.
struct CancellableConnection {
    line: UpgradedConnection,
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
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_cancelled(cx) { Poll::Ready(Ok(())) } else { Pin::new(&mut self.line).poll_read(cx, into) }
    }
}

impl AsyncWrite for CancellableConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_cancelled(cx) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        Pin::new(&mut self.line).poll_write(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_shutdown(cx)
    }
}
