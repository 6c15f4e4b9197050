//! One control connection to the daemon, from the dial to its end: hello, welcome, and then orders. What an order means
//! is the worker's business.

use std::time::Duration;

use qd_link::socket::{Incoming, STEP, Socket, SocketError, Wire};
use qd_protocol::frame::join::{Hello, SeatName, ToDaemon, ToWorker};
use qd_protocol::frame::v1::Versions;
use qd_protocol::limits::PING_S;
use tokio::time::{Instant, timeout};

use super::{ConnectError, Dial, DialError, JoinError, Worker, connect};
use crate::host::SOFTWARE;

/// Silence before a sign of life is asked for, and after which there is nobody.
const PING: Duration = Duration::from_secs(PING_S);
const SILENCE: Duration = Duration::from_secs(3 * PING_S);

/// How a control connection came to its end.
pub(super) enum Ended {
    /// It broke, or there never was one.
    Broken(String),
    /// Who answers is not the daemon that we look for. If it ever was, it may be again.
    Unfit(JoinError),
    /// The daemon does not want us, now or later.
    Refused(JoinError),
}

impl From<SocketError> for Ended {
    fn from(error: SocketError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl From<ConnectError> for Ended {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Dial(DialError::Untrusted(why)) => Self::Unfit(JoinError::Untrusted(why)),
            ConnectError::Socket(SocketError::Refused { status: 401, reason }) => {
                Self::Refused(JoinError::Unauthorized(in_words(&reason)))
            }
            ConnectError::Socket(SocketError::Refused { status: 400 | 403 | 404, reason }) => {
                Self::Unfit(JoinError::Refused(in_words(&reason)))
            }
            ConnectError::NoDaemon => Self::Unfit(JoinError::Refused(error.to_string())),
            ConnectError::Dial(_) | ConnectError::Socket(_) => Self::Broken(error.to_string()),
        }
    }
}

impl<D: Dial> Worker<D> {
    /// Serves one control connection to its end; `welcomed` hears what the daemon calls us.
    pub(super) async fn serve(&mut self, welcomed: impl FnOnce(String)) -> Ended {
        match self.converse(welcomed).await {
            Ok(never) => match never {},
            Err(ended) => ended,
        }
    }

    async fn converse(&mut self, welcomed: impl FnOnce(String)) -> Result<std::convert::Infallible, Ended> {
        let mut socket = connect(&self.dial, &self.options.token, "/v1/workers/join".to_owned()).await?;
        socket.send(&ToDaemon::Hello(Box::new(self.hello()))).await?;
        let name = timeout(STEP, welcome(&mut socket)).await.map_err(|_| SocketError::TimedOut)??;
        welcomed(name);
        let mut heard = Instant::now();
        let mut next_ping = heard + PING;
        loop {
            tokio::select! {
                incoming = socket.next() => {
                    heard = Instant::now();
                    next_ping = heard + PING;
                    if let Incoming::Text(text) = incoming?
                        && let Some(answer) = self.obey(text.as_str())
                    {
                        socket.feed(&answer).await?;
                    }
                    timed(socket.flush()).await?;
                }
                () = tokio::time::sleep_until(next_ping) => {
                    if heard.elapsed() >= SILENCE {
                        return Err(SocketError::TimedOut.into());
                    }
                    next_ping += PING;
                    socket.feed_ping().await?;
                    timed(socket.flush()).await?;
                }
            }
        }
    }

    fn hello(&self) -> Hello {
        let seats = self.host.taken().into_iter().map(|(session, worker)| SeatName { session, worker });
        Hello {
            versions: Versions::OURS,
            software: SOFTWARE.to_owned(),
            host: self.name.clone(),
            name: self.options.name.clone(),
            labels: self.options.labels.clone(),
            agents: self.options.offers.iter().map(|offer| offer.about.clone()).collect(),
            seats: seats.collect(),
        }
    }

    /// Does what an order says; gives what the daemon must know about that. An order that cannot be read is none.
    fn obey(&mut self, text: &str) -> Option<ToDaemon> {
        match serde_json::from_str(text) {
            Ok(ToWorker::Open { spec, secret }) => self.open(spec, secret),
            Ok(ToWorker::Dial(seat)) => self.dial(seat),
            Ok(ToWorker::Close(seat)) => {
                self.host.close(&seat.worker);
                None
            }
            Ok(ToWorker::Welcome { .. } | ToWorker::Refused { .. }) | Err(_) => None,
        }
    }
}

/// What the daemon calls us.
async fn welcome<W: Wire>(socket: &mut Socket<W>) -> Result<String, Ended> {
    loop {
        let Incoming::Text(text) = socket.next().await? else { continue };
        match serde_json::from_str(text.as_str()) {
            Ok(ToWorker::Welcome { name }) => return Ok(name),
            Ok(ToWorker::Refused { code, message }) if code == "unauthorized" => {
                return Err(Ended::Refused(JoinError::Unauthorized(message)));
            }
            Ok(ToWorker::Refused { message, .. }) => return Err(Ended::Refused(JoinError::Refused(message))),
            // Nothing else makes sense before; a newer daemon may think otherwise.
            Ok(_) | Err(_) => {}
        }
    }
}

/// A peer that does not read is as good as silent.
async fn timed(step: impl Future<Output = Result<(), SocketError>>) -> Result<(), SocketError> {
    timeout(SILENCE, step).await.map_err(|_| SocketError::TimedOut)?
}

/// The message inside a refusal of the daemon's, or the whole of somebody else's.
fn in_words(reason: &str) -> String {
    let body: Option<qd_protocol::error::ErrorBody> = serde_json::from_str(reason).ok();
    body.map_or_else(|| reason.trim().to_owned(), |body| body.error.message)
}
