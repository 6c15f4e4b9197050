//! The first frames of a connection, from the worker's side: who asks, whether both know the secret, and what there is
//! for the session. Nothing of the session is said before the daemon has proven itself.

use std::time::Duration;

use qd_protocol::Number;
use qd_protocol::frame::v1::{self, DaemonHello, ToDaemon, ToWorker, Versions, WorkerHello};
use qd_protocol::link::UpNumber;
use qd_protocol::worker::{AgentSpec, Secret};

use crate::line::frame;
use crate::proof;
use crate::socket::{Socket, SocketError, Wire};

/// Reads the first frame of an upgraded connection, and refuses versions that do not meet ours. Whom it is for is for
/// the caller to find: [`Seat::serve`](crate::Seat::serve) if there is a seat, else [`offer_empty`].
pub async fn greet<W: Wire>(socket: &mut Socket<W>) -> Result<DaemonHello, SocketError> {
    let hello: DaemonHello = loop {
        if let ToWorker::Hello(hello) = frame(socket).await? {
            break hello;
        }
    };
    match Versions::OURS.meet(hello.versions) {
        Some(_) => Ok(hello),
        None => Err(refuse(socket, Refusal::versions(hello.versions)).await),
    }
}

/// A connection on which a session was started that the worker did not have. It goes on in the seat that is made for
/// it: [`Seat::serve_started`](crate::Seat::serve_started).
#[derive(Debug)]
pub struct Started<W> {
    /// What to start.
    pub spec: Box<AgentSpec>,
    pub(super) socket: Socket<W>,
    pub(super) taken: UpNumber,
}

/// For a session that the worker does not have: proves itself, says that the seat is empty, and waits for what to start
/// in it. A daemon that expected an agent here ends the connection instead.
pub async fn offer_empty<W: Wire>(
    mut socket: Socket<W>,
    hello: DaemonHello,
    secret: &Secret,
    software: &str,
) -> Result<Started<W>, SocketError> {
    let nothing = Having {
        seat: v1::Seat::Empty,
        last: hello.taken,
        applied: Number::default(),
        run_time: None,
        model: None,
    };
    prove(&mut socket, &hello, secret, software, nothing).await?;
    let spec = loop {
        if let ToWorker::Start(spec) = frame(&mut socket).await? {
            break spec;
        }
    };
    if spec.session != hello.session || spec.worker != hello.worker {
        return Err(refuse(&mut socket, Refusal::wrong_worker(&hello)).await);
    }
    Ok(Started { spec, socket, taken: hello.taken })
}

/// What a worker has for a session.
#[derive(Debug)]
pub(super) struct Having {
    pub(super) seat: v1::Seat,
    pub(super) last: UpNumber,
    pub(super) applied: Number,
    pub(super) run_time: Option<Duration>,
    pub(super) model: Option<String>,
}

/// Answers a hello with ours, and returns when the daemon has proven itself.
pub(super) async fn prove<W: Wire>(
    socket: &mut Socket<W>,
    theirs: &DaemonHello,
    secret: &Secret,
    software: &str,
    having: Having,
) -> Result<(), SocketError> {
    let nonce = proof::nonce();
    let Having { seat, last, applied, run_time, model } = having;
    let ours = WorkerHello {
        version: Versions::OURS.meet(theirs.versions).unwrap_or(v1::VERSION_MAX),
        software: software.to_owned(),
        capabilities: Vec::new(),
        proof: proof::of_worker(secret, &theirs.nonce, &nonce),
        nonce,
        seat,
        last,
        applied,
        pid: std::process::id(),
        run_time_ms: run_time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        model,
    };
    let right = proof::of_daemon(secret, &ours.nonce, &theirs.nonce);
    socket.send(&ToDaemon::Hello(ours)).await?;
    let given = loop {
        if let ToWorker::Proof(given) = frame(socket).await? {
            break given;
        }
    };
    if proof::holds(secret, &right, &given) {
        Ok(())
    } else {
        Err(refuse(socket, Refusal::unauthorized()).await)
    }
}

/// Why a daemon is sent away.
#[derive(Debug)]
pub(super) struct Refusal {
    code: &'static str,
    message: String,
}

impl Refusal {
    fn versions(theirs: Versions) -> Self {
        let Versions { min, max } = Versions::OURS;
        let message = format!(
            "this worker speaks versions {min} to {max} of the frames and the daemon {} to {}; run releases that meet",
            theirs.min, theirs.max
        );
        Self { code: "unsupported_version", message }
    }

    fn unauthorized() -> Self {
        let message = "the daemon does not know this worker's secret; it is not the one that started it";
        Self { code: "unauthorized", message: message.to_owned() }
    }

    pub(super) fn wrong_worker(hello: &DaemonHello) -> Self {
        let message = format!("there is no worker {} of {} here", hello.worker, hello.session);
        Self { code: "wrong_worker", message }
    }

    pub(super) fn bad_number(taken: UpNumber) -> Self {
        let message =
            format!("what comes after {} is no longer or not yet here; the journal is another one", taken.0);
        Self { code: "bad_number", message }
    }
}

/// Sends a daemon away. Gives what the caller ends with.
pub(super) async fn refuse<W: Wire>(socket: &mut Socket<W>, refusal: Refusal) -> SocketError {
    let Refusal { code, message } = refusal;
    let frame = ToDaemon::Refused { code: code.to_owned(), message: message.clone() };
    // A daemon that does not wait to hear it is gone as well.
    if socket.send(&frame).await.is_ok() {
        socket.close().await;
    }
    SocketError::Unwelcome(message)
}
