//! One control connection to the daemon, from the dial to its end: hello, welcome, and then orders. What an order means
//! is the worker's business.

use std::time::Duration;

use qd_link::socket::{ByteStream, IncomingFrame, STEP_TIMEOUT, Socket, SocketError};
use qd_protocol::frame::join::{DaemonJoinFrame, JoinHello, SessionWorker, WorkerJoinFrame};
use qd_protocol::frame::v1::ProtocolVersions;
use qd_protocol::limits::PING_S;
use tokio::time::{Instant, timeout};

use super::{
    DaemonConnectError, DaemonDialError, DaemonDialer, WorkerJoinClient, WorkerJoinError, open_socket,
};
use crate::host::SOFTWARE_VERSION;

/// Silence before a sign of life is asked for, and after which there is nobody.
const PING_INTERVAL: Duration = Duration::from_secs(PING_S);
const SILENCE_MAX: Duration = Duration::from_secs(3 * PING_S);

/// How a control connection came to its end.
pub(super) enum ControlConnectionEnd {
    /// It broke, or there never was one.
    Broken(String),
    /// Who answers is not the daemon that we look for. If it ever was, it may be again.
    WrongDaemon(WorkerJoinError),
    /// The daemon does not want us, now or later.
    Refused(WorkerJoinError),
}

impl From<SocketError> for ControlConnectionEnd {
    fn from(error: SocketError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl From<DaemonConnectError> for ControlConnectionEnd {
    fn from(error: DaemonConnectError) -> Self {
        match error {
            DaemonConnectError::Dial(DaemonDialError::Untrusted(why)) => {
                Self::WrongDaemon(WorkerJoinError::Untrusted(why))
            }
            DaemonConnectError::Socket(SocketError::Refused { status: 401, reason }) => {
                Self::Refused(WorkerJoinError::Unauthorized(refusal_message(&reason)))
            }
            DaemonConnectError::Socket(SocketError::Refused { status: 400 | 403 | 404, reason }) => {
                Self::WrongDaemon(WorkerJoinError::Refused(refusal_message(&reason)))
            }
            DaemonConnectError::NotADaemon => Self::WrongDaemon(WorkerJoinError::Refused(error.to_string())),
            DaemonConnectError::Dial(_) | DaemonConnectError::Socket(_) => Self::Broken(error.to_string()),
        }
    }
}

impl<D: DaemonDialer> WorkerJoinClient<D> {
    /// Serves one control connection to its end; `welcomed` hears what the daemon calls us.
    pub(super) async fn serve_control(&mut self, welcomed: impl FnOnce(String)) -> ControlConnectionEnd {
        match self.run_control(welcomed).await {
            Ok(never) => match never {},
            Err(ended) => ended,
        }
    }

    async fn run_control(
        &mut self,
        welcomed: impl FnOnce(String),
    ) -> Result<std::convert::Infallible, ControlConnectionEnd> {
        let mut socket =
            open_socket(&self.dialer, &self.options.token, "/v1/workers/join".to_owned()).await?;
        socket.send(&WorkerJoinFrame::Hello(Box::new(self.hello_message()))).await?;
        let name = timeout(STEP_TIMEOUT, wait_for_welcome(&mut socket))
            .await
            .map_err(|_| SocketError::TimedOut)??;
        welcomed(name);
        let mut heard = Instant::now();
        let mut next_ping = heard + PING_INTERVAL;
        loop {
            tokio::select! {
                incoming = socket.next() => {
                    heard = Instant::now();
                    next_ping = heard + PING_INTERVAL;
                    if let IncomingFrame::Text(text) = incoming?
                        && let Some(answer) = self.handle_order(text.as_str())
                    {
                        socket.feed(&answer).await?;
                    }
                    flush_in_time(socket.flush()).await?;
                }
                () = tokio::time::sleep_until(next_ping) => {
                    if heard.elapsed() >= SILENCE_MAX {
                        return Err(SocketError::TimedOut.into());
                    }
                    next_ping += PING_INTERVAL;
                    socket.feed_ping().await?;
                    flush_in_time(socket.flush()).await?;
                }
            }
        }
    }

    fn hello_message(&self) -> JoinHello {
        let seats = self
            .host
            .hosted_sessions()
            .into_iter()
            .map(|(session, worker)| SessionWorker { session, worker });
        JoinHello {
            versions: ProtocolVersions::SUPPORTED,
            software: SOFTWARE_VERSION.to_owned(),
            host: self.host_name.clone(),
            name: self.options.name.clone(),
            labels: self.options.labels.clone(),
            agents: self.options.offers.iter().map(|offer| offer.agent.clone()).collect(),
            workers: seats.collect(),
        }
    }

    /// Does what an order says; gives what the daemon must know about that. An order that cannot be read is none.
    fn handle_order(&mut self, text: &str) -> Option<WorkerJoinFrame> {
        match serde_json::from_str(text) {
            Ok(DaemonJoinFrame::Open { spec, secret }) => self.open_session(spec, secret),
            Ok(DaemonJoinFrame::Dial(seat)) => self.dial_for_session(seat),
            Ok(DaemonJoinFrame::Close(seat)) => {
                self.host.close_session(&seat.worker);
                None
            }
            Ok(DaemonJoinFrame::Welcome { .. } | DaemonJoinFrame::Refused { .. }) | Err(_) => None,
        }
    }
}

/// What the daemon calls us.
async fn wait_for_welcome<W: ByteStream>(socket: &mut Socket<W>) -> Result<String, ControlConnectionEnd> {
    loop {
        let IncomingFrame::Text(text) = socket.next().await? else { continue };
        match serde_json::from_str(text.as_str()) {
            Ok(DaemonJoinFrame::Welcome { name }) => return Ok(name),
            Ok(DaemonJoinFrame::Refused { code, message }) if code == "unauthorized" => {
                return Err(ControlConnectionEnd::Refused(WorkerJoinError::Unauthorized(message)));
            }
            Ok(DaemonJoinFrame::Refused { message, .. }) => {
                return Err(ControlConnectionEnd::Refused(WorkerJoinError::Refused(message)));
            }
            // Nothing else makes sense before; a newer daemon may think otherwise.
            Ok(_) | Err(_) => {}
        }
    }
}

/// A peer that does not read is as good as silent.
async fn flush_in_time(step: impl Future<Output = Result<(), SocketError>>) -> Result<(), SocketError> {
    timeout(SILENCE_MAX, step).await.map_err(|_| SocketError::TimedOut)?
}

/// The message inside a refusal of the daemon's, or the whole of somebody else's.
fn refusal_message(reason: &str) -> String {
    let body: Option<qd_protocol::error::ErrorBody> = serde_json::from_str(reason).ok();
    body.map_or_else(|| reason.trim().to_owned(), |body| body.error.message)
}
