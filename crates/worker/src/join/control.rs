//! One control connection to the daemon, from dialling to its end: hello, welcome, then orders. What an order does is
//! in the parent module.

use std::time::Duration;

use qd_link::socket::{ByteStream, IncomingFrame, STEP_TIMEOUT, Socket, SocketError};
use qd_protocol::frame::join::{DaemonJoinFrame, JoinHello, SessionWorker, WorkerJoinFrame};
use qd_protocol::frame::v1::ProtocolVersions;
use qd_protocol::limits::PING_S;
use tokio::time::{Instant, timeout};

use super::{
    DaemonConnectError, DaemonDialError, DaemonDialer, WorkerJoinClient, WorkerJoinError, open_socket,
};
use crate::agent_sandbox::sandbox_support;
use crate::host::SOFTWARE_VERSION;

/// Silence after which a ping is sent, and after which the connection counts as dead.
const PING_INTERVAL: Duration = Duration::from_secs(PING_S);
const SILENCE_MAX: Duration = Duration::from_secs(3 * PING_S);

/// How a control connection ended.
pub(super) enum ControlConnectionEnd {
    /// The connection broke, or could not be opened.
    Broken(String),
    /// The server that answers is not the daemon we look for. After a successful join this may be temporary.
    WrongDaemon(WorkerJoinError),
    /// The daemon does not want this worker, now or later.
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
    /// Serves one control connection to its end. `welcomed` is called with the name that the daemon gives this worker.
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
        let mut last_received = Instant::now();
        let mut next_ping = last_received + PING_INTERVAL;
        loop {
            tokio::select! {
                incoming = socket.next() => {
                    last_received = Instant::now();
                    next_ping = last_received + PING_INTERVAL;
                    if let IncomingFrame::Text(text) = incoming?
                        && let Some(answer) = self.handle_order(text.as_str())
                    {
                        socket.feed(&answer).await?;
                    }
                    flush_in_time(socket.flush()).await?;
                }
                () = tokio::time::sleep_until(next_ping) => {
                    if last_received.elapsed() >= SILENCE_MAX {
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
        let workers = self
            .host
            .hosted_sessions()
            .into_iter()
            .map(|(session, worker)| SessionWorker { session, worker });
        JoinHello {
            versions: ProtocolVersions::SUPPORTED,
            software: SOFTWARE_VERSION.to_owned(),
            process_id: self.host_name.clone(),
            name: self.options.name.clone(),
            labels: self.options.labels.clone(),
            agents: self.options.offers.iter().map(|offer| offer.agent.clone()).collect(),
            workers: workers.collect(),
            sandbox: sandbox_support().clone(),
        }
    }

    /// Carries out one order and returns the reply, if there is one. An order that cannot be parsed is ignored.
    fn handle_order(&mut self, text: &str) -> Option<WorkerJoinFrame> {
        match serde_json::from_str(text) {
            Ok(DaemonJoinFrame::Open { spec, secret }) => self.open_session(spec, secret),
            Ok(DaemonJoinFrame::Dial(id)) => self.dial_for_session(id),
            Ok(DaemonJoinFrame::Close(id)) => {
                self.host.close_session(&id.worker);
                None
            }
            Ok(DaemonJoinFrame::Welcome { .. } | DaemonJoinFrame::Refused { .. }) | Err(_) => None,
        }
    }
}

/// Waits for the daemon's welcome and returns the name it gives this worker.
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
            // Nothing else is expected before the welcome, but a newer daemon may send it.
            Ok(_) | Err(_) => {}
        }
    }
}

/// Flushes within [`SILENCE_MAX`]. A peer that does not read counts as silent.
async fn flush_in_time(step: impl Future<Output = Result<(), SocketError>>) -> Result<(), SocketError> {
    timeout(SILENCE_MAX, step).await.map_err(|_| SocketError::TimedOut)?
}

/// The message inside the daemon's error body, or the whole text if another server answered.
fn refusal_message(reason: &str) -> String {
    let body: Option<qd_protocol::error::ErrorBody> = serde_json::from_str(reason).ok();
    body.map_or_else(|| reason.trim().to_owned(), |body| body.error.message)
}
