//! The way to one session's worker on another machine: the process that holds it is asked to dial, and what it dials is
//! the connection. Who waits here waits for a machine, so every wait has an end.

use std::fs;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use qd_link::socket::{Role, Socket, Wire};
use qd_link::{Numbered, Route, Unreachable};
use qd_protocol::event::RunError;
use qd_protocol::frame::join::{SeatName, ToWorker};
use qd_protocol::link::{Gone, Up, UpNumber};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{ApiError, TokenId};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::{ELSEWHERE, Joined, whereabouts};
use crate::edge::Line;

/// How long one try may take, for a process to come or to dial. Then the link has a moment for other things.
const TRY: Duration = Duration::from_secs(10);

/// The way to one worker.
pub(super) struct Joint {
    joined: Arc<Joined>,
    seat: SeatName,
    /// What to start there, until it has dialled: it may not have heard us the first time.
    open: Option<Box<AgentSpec>>,
    began: Instant,
}

/// How far a try has come.
pub(super) enum Way {
    /// The process was asked.
    Asked(oneshot::Receiver<Line>, CancellationToken),
    /// It is not there.
    Away,
    /// It will never be.
    Never,
}

impl Joint {
    pub(super) fn new(joined: Arc<Joined>, seat: SeatName, open: Option<Box<AgentSpec>>) -> Self {
        Self { joined, seat, open, began: Instant::now() }
    }
}

impl Route for Joint {
    async fn dial(&mut self) -> Result<Socket<Box<dyn Wire>>, Unreachable> {
        let until = Instant::now() + TRY;
        let mut changed = self.joined.changed.subscribe();
        loop {
            changed.mark_unchanged();
            match self.joined.ask(&self.seat, self.open.as_deref(), self.began) {
                Way::Never => return Err(Unreachable::Dead),
                Way::Away => {
                    let patience = until.min(self.joined.last_moment(&self.seat, self.began));
                    if timeout_at(patience, changed.changed()).await.is_err() && patience == until {
                        return Err(Unreachable::Later);
                    }
                }
                Way::Asked(line, cut) => match timeout_at(until, line).await {
                    Ok(Ok(line)) => {
                        self.open = None;
                        let wire: Box<dyn Wire> =
                            Box::new(Leash { line, cut: Box::pin(cut.cancelled_owned()) });
                        return Ok(Socket::upgraded(wire, Role::Server).await);
                    }
                    // It has gone, or has said no.
                    Ok(Err(_)) => {}
                    Err(_) => return Err(Unreachable::Later),
                },
            }
        }
    }

    /// Its spool is on its own machine. But why it never came to be is known here, and is its last word.
    async fn remains(&mut self, after: UpNumber) -> Vec<Numbered> {
        let error = self.joined.reason(&self.seat);
        let last = |error| Numbered { number: UpNumber(after.0 + 1), up: Up::Gone(Gone::Failed(error)) };
        error.into_iter().map(last).collect()
    }
}

impl Joined {
    /// Asks the process that holds a worker, or that is to hold it, to dial.
    pub(super) fn ask(&self, seat: &SeatName, open: Option<&AgentSpec>, began: Instant) -> Way {
        let mut state = self.lock();
        let Some(placement) = state.placements.get(&seat.worker) else { return Way::Never };
        if placement.over.is_some() {
            return Way::Never;
        }
        let host = match (&placement.host, open) {
            (Some(host), _) => Some(host.clone()),
            (None, Some(_)) => state.choose(&placement.wanted),
            // Nobody was ever asked to hold it, and nobody knows any more with what it was to start.
            (None, None) => return Way::Never,
        };
        let is_there =
            host.as_ref().and_then(|host| state.hosts.get(host)).is_some_and(|host| host.control.is_some());
        let patience = state.patience(host.as_deref(), began, self.lease);
        let Some(placement) = state.placements.get_mut(&seat.worker) else { return Way::Never };
        let Some(host) = host.filter(|_| is_there) else {
            if !patience.is_zero() {
                return Way::Away;
            }
            let error = open.map(|_| away(&placement.wanted.agent, &placement.wanted.label, self.lease));
            placement.end(error);
            return Way::Never;
        };
        if placement.host.is_none() {
            let written = fs::write(whereabouts(&self.dir, &seat.worker), format!("{ELSEWHERE}{host}"));
            if let Err(error) = written {
                tracing::warn!(worker = %seat.worker, %error, "a later daemon will not find this agent");
            }
            placement.host = Some(host.clone());
        }
        let (tell, line) = oneshot::channel();
        placement.expected = Some(tell);
        let cut = placement.cut.clone();
        let frame = match open {
            Some(spec) => ToWorker::Open {
                spec: Box::new(spec.clone()),
                secret: self.keys.secret(seat.worker.as_str()),
            },
            None => ToWorker::Dial(seat.clone()),
        };
        if state.tell(&host, frame) { Way::Asked(line, cut) } else { Way::Away }
    }

    /// When waiting for a process that is away comes to its end.
    fn last_moment(&self, seat: &SeatName, began: Instant) -> Instant {
        let state = self.lock();
        let host = state.placements.get(&seat.worker).and_then(|placement| placement.host.as_deref());
        Instant::now() + state.patience(host, began, self.lease)
    }

    /// Why a worker never came to be.
    pub(super) fn reason(&self, seat: &SeatName) -> Option<RunError> {
        self.lock().placements.get(&seat.worker)?.over.clone()?
    }

    /// Whether a process that bears this token was asked to dial for this.
    pub(crate) fn expects(&self, seat: &SeatName, token: &TokenId) -> Result<(), ApiError> {
        let state = self.lock();
        let placement =
            state.placements.get(&seat.worker).filter(|placement| placement.session == seat.session);
        let host = placement.and_then(|placement| state.hosts.get(placement.host.as_ref()?));
        let given = host.and_then(|host| host.about.as_ref()).is_some_and(|about| about.token == *token);
        let waits =
            placement.and_then(|placement| placement.expected.as_ref()).is_some_and(|wait| !wait.is_closed());
        match given && waits {
            true => Ok(()),
            false => Err(ApiError::not_found("worker that is waited for,", &seat.worker)),
        }
    }

    /// The process has dialled.
    pub(crate) fn meet(&self, seat: &SeatName, line: Line) {
        let mut state = self.lock();
        let Some(placement) = state.placements.get_mut(&seat.worker) else { return };
        if let Some(expected) = placement.expected.take() {
            placement.met = true;
            // Whoever waited may have gone; then the connection ends here, and the worker will be asked again.
            let _gone = expected.send(line);
        }
    }
}

impl super::State {
    /// How long a process is waited for that holds a worker, or that could.
    fn patience(&self, host: Option<&str>, began: Instant, lease: Duration) -> Duration {
        match host.map(|host| self.hosts.get(host)) {
            Some(Some(host)) => host.patience(lease),
            Some(None) => Duration::ZERO,
            None => lease.saturating_sub(began.elapsed()),
        }
    }
}

fn away(agent: &str, label: &str, lease: Duration) -> RunError {
    let message = format!(
        "no worker with the label `{label}` that offers {agent} was there within {} s: `qd workers` shows who has \
         joined, `qd workers token` prints the line with which one joins",
        lease.as_secs()
    );
    RunError::new("worker_away", message)
}

/// A connection that can be ended by somebody who does not hold it.
struct Leash {
    line: Line,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Leash {
    fn is_cut(&mut self, cx: &mut Context<'_>) -> bool {
        self.cut.as_mut().poll(cx).is_ready()
    }
}

impl AsyncRead for Leash {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_cut(cx) { Poll::Ready(Ok(())) } else { Pin::new(&mut self.line).poll_read(cx, into) }
    }
}

impl AsyncWrite for Leash {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_cut(cx) {
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
