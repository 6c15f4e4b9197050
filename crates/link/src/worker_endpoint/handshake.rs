//! The first frames of a connection, from the worker's side: who asks, whether both know the secret, and what there is
//! for the session. Nothing of the session is said before the daemon has proven itself.

use std::time::Duration;

use qd_protocol::EventNumber;
use qd_protocol::frame::v1::{
    self, DaemonHello, DaemonLinkFrame, ProtocolVersions, WorkerHello, WorkerLinkFrame,
};
use qd_protocol::link::UpdateNumber;
use qd_protocol::worker::{AgentSpec, Secret};

use crate::link_connection::read_frame;
use crate::proof;
use crate::socket::{ByteStream, Socket, SocketError};

/// Reads the first frame of an upgraded connection, and refuses versions that do not meet ours. Whom it is for is for
/// the caller to find: [`Seat::serve`](crate::Seat::serve) if there is a seat, else [`offer_empty`].
pub async fn read_hello<W: ByteStream>(socket: &mut Socket<W>) -> Result<DaemonHello, SocketError> {
    let hello: DaemonHello = loop {
        if let DaemonLinkFrame::Hello(hello) = read_frame(socket).await? {
            break hello;
        }
    };
    match ProtocolVersions::SUPPORTED.newest_common(hello.versions) {
        Some(_) => Ok(hello),
        None => Err(refuse_daemon(socket, HandshakeRefusal::unsupported_versions(hello.versions)).await),
    }
}

/// A connection on which a session was started that the worker did not have. It goes on in the seat that is made for
/// it: [`Seat::serve_started`](crate::Seat::serve_started).
#[derive(Debug)]
pub struct StartedConnection<W> {
    /// What to start.
    pub spec: Box<AgentSpec>,
    pub(super) socket: Socket<W>,
    pub(super) journalled: UpdateNumber,
}

/// For a session that the worker does not have: proves itself, says that the seat is empty, and waits for what to start
/// in it. A daemon that expected an agent here ends the connection instead.
pub async fn receive_agent_start<W: ByteStream>(
    mut socket: Socket<W>,
    hello: DaemonHello,
    secret: &Secret,
    software: &str,
) -> Result<StartedConnection<W>, SocketError> {
    let nothing = EndpointSummary {
        presence: v1::AgentPresence::Empty,
        last: hello.journalled,
        applied: EventNumber::default(),
        run_time: None,
        model: None,
    };
    complete_handshake(&mut socket, &hello, secret, software, nothing).await?;
    let spec = loop {
        if let DaemonLinkFrame::Start(spec) = read_frame(&mut socket).await? {
            break spec;
        }
    };
    if spec.session != hello.session || spec.worker != hello.worker {
        return Err(refuse_daemon(&mut socket, HandshakeRefusal::wrong_worker(&hello)).await);
    }
    Ok(StartedConnection { spec, socket, journalled: hello.journalled })
}

/// What a worker has for a session.
#[derive(Debug)]
pub(super) struct EndpointSummary {
    pub(super) presence: v1::AgentPresence,
    pub(super) last: UpdateNumber,
    pub(super) applied: EventNumber,
    pub(super) run_time: Option<Duration>,
    pub(super) model: Option<String>,
}

/// Answers a hello with ours, and returns when the daemon has proven itself.
pub(super) async fn complete_handshake<W: ByteStream>(
    socket: &mut Socket<W>,
    theirs: &DaemonHello,
    secret: &Secret,
    software: &str,
    having: EndpointSummary,
) -> Result<(), SocketError> {
    let nonce = proof::fresh_nonce();
    let EndpointSummary { presence: seat, last, applied, run_time, model } = having;
    let ours = WorkerHello {
        version: ProtocolVersions::SUPPORTED.newest_common(theirs.versions).unwrap_or(v1::VERSION_MAX),
        software: software.to_owned(),
        capabilities: Vec::new(),
        proof: proof::worker_proof(secret, &theirs.nonce, &nonce),
        nonce,
        presence: seat,
        last,
        applied,
        pid: std::process::id(),
        run_time_ms: run_time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        model,
    };
    let right = proof::daemon_proof(secret, &ours.nonce, &theirs.nonce);
    socket.send(&WorkerLinkFrame::Hello(ours)).await?;
    let given = loop {
        if let DaemonLinkFrame::Proof(given) = read_frame(socket).await? {
            break given;
        }
    };
    if proof::verify_proof(secret, &right, &given) {
        Ok(())
    } else {
        Err(refuse_daemon(socket, HandshakeRefusal::unauthorized()).await)
    }
}

/// Why a daemon is sent away.
#[derive(Debug)]
pub(super) struct HandshakeRefusal {
    code: &'static str,
    message: String,
}

impl HandshakeRefusal {
    fn unsupported_versions(theirs: ProtocolVersions) -> Self {
        let ProtocolVersions { min, max } = ProtocolVersions::SUPPORTED;
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

    pub(super) fn bad_number(taken: UpdateNumber) -> Self {
        let message =
            format!("what comes after {} is no longer or not yet here; the journal is another one", taken.0);
        Self { code: "bad_number", message }
    }
}

/// Sends a daemon away. Gives what the caller ends with.
pub(super) async fn refuse_daemon<W: ByteStream>(
    socket: &mut Socket<W>,
    refusal: HandshakeRefusal,
) -> SocketError {
    let HandshakeRefusal { code, message } = refusal;
    let frame = WorkerLinkFrame::Refused { code: code.to_owned(), message: message.clone() };
    // A daemon that does not wait to hear it is gone as well.
    if socket.send(&frame).await.is_ok() {
        socket.close().await;
    }
    SocketError::PeerRefused(message)
}
