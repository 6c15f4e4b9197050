//! The first frames of a connection, from the worker's side: which daemon asks for which session, whether both know
//! the secret, and what the worker has. No update is sent before the daemon has proven that it knows the secret.

use std::time::Duration;

use qd_protocol::EventNumber;
use qd_protocol::frame::v1::{
    self, DaemonHello, DaemonLinkFrame, ProtocolVersions, WorkerHello, WorkerLinkFrame,
};
use qd_protocol::link::UpdateNumber;
use qd_protocol::sandbox_spec::SandboxSelection;
use qd_protocol::worker::{AgentSpec, Secret};
use qd_worker_sdk::socket::{ByteStream, Socket, SocketError};

use crate::link_connection::read_frame;
use crate::proof;

/// Reads the first frame of an upgraded connection and refuses unsupported versions. The caller then looks up the
/// session: [`WorkerEndpoint::serve`](crate::WorkerEndpoint::serve) if it has an endpoint, else
/// [`receive_agent_start`].
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

/// A connection on which the daemon started a session that the worker did not have. It continues in the new endpoint:
/// [`WorkerEndpoint::serve_started`](crate::WorkerEndpoint::serve_started).
#[derive(Debug)]
pub struct StartedConnection<W> {
    pub spec: Box<AgentSpec>,
    pub(super) socket: Socket<W>,
    pub(super) journalled: UpdateNumber,
}

/// Handles a session that the worker does not have: completes the handshake, reports that there is no agent, and waits
/// for a start request. A daemon that expected an agent here closes the connection instead.
pub async fn receive_agent_start<W: ByteStream>(
    mut socket: Socket<W>,
    hello: DaemonHello,
    secret: &Secret,
    software: &str,
) -> Result<StartedConnection<W>, SocketError> {
    let summary = EndpointSummary {
        presence: v1::AgentPresence::Empty,
        last: hello.journalled,
        applied: EventNumber::default(),
        run_time: None,
        model: None,
        sandbox: None,
    };
    complete_handshake(&mut socket, &hello, secret, software, summary).await?;
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
    pub(super) sandbox: Option<SandboxSelection>,
}

/// Answers a hello with ours, and returns once the daemon has proven that it knows the secret.
pub(super) async fn complete_handshake<W: ByteStream>(
    socket: &mut Socket<W>,
    hello: &DaemonHello,
    secret: &Secret,
    software: &str,
    summary: EndpointSummary,
) -> Result<(), SocketError> {
    let nonce = proof::fresh_nonce();
    let EndpointSummary { presence, last, applied, run_time, model, sandbox } = summary;
    let our_hello = WorkerHello {
        version: ProtocolVersions::SUPPORTED.newest_common(hello.versions).unwrap_or(v1::VERSION_MAX),
        software: software.to_owned(),
        capabilities: Vec::new(),
        proof: proof::worker_proof(secret, &hello.nonce, &nonce),
        nonce,
        presence,
        last,
        applied,
        pid: std::process::id(),
        run_time_ms: run_time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        model,
        sandbox,
    };
    let expected = proof::daemon_proof(secret, &our_hello.nonce, &hello.nonce);
    socket.send(&WorkerLinkFrame::Hello(our_hello)).await?;
    let given = loop {
        if let DaemonLinkFrame::Proof(given) = read_frame(socket).await? {
            break given;
        }
    };
    if proof::verify_proof(secret, &expected, &given) {
        Ok(())
    } else {
        Err(refuse_daemon(socket, HandshakeRefusal::unauthorized()).await)
    }
}

/// Why a daemon is refused.
#[derive(Debug)]
pub(super) struct HandshakeRefusal {
    code: &'static str,
    message: String,
}

impl HandshakeRefusal {
    fn unsupported_versions(daemon_versions: ProtocolVersions) -> Self {
        let ProtocolVersions { min, max } = ProtocolVersions::SUPPORTED;
        let message = format!(
            "this worker supports protocol versions {min} to {max}, the daemon {} to {}; update the older of the two",
            daemon_versions.min, daemon_versions.max
        );
        Self { code: "unsupported_version", message }
    }

    fn unauthorized() -> Self {
        let message =
            "the daemon does not know this worker's secret, so it is not the daemon that started it";
        Self { code: "unauthorized", message: message.to_owned() }
    }

    pub(super) fn wrong_worker(hello: &DaemonHello) -> Self {
        let message = format!("there is no worker {} for session {} here", hello.worker, hello.session);
        Self { code: "wrong_worker", message }
    }

    pub(super) fn bad_number(received: UpdateNumber) -> Self {
        let message = format!(
            "this worker cannot continue after update {}; the daemon uses a different journal",
            received.0
        );
        Self { code: "bad_number", message }
    }
}

/// Refuses a daemon and closes the connection. Returns the error for the caller to end with.
pub(super) async fn refuse_daemon<W: ByteStream>(
    socket: &mut Socket<W>,
    refusal: HandshakeRefusal,
) -> SocketError {
    let HandshakeRefusal { code, message } = refusal;
    let frame = WorkerLinkFrame::Refused { code: code.to_owned(), message: message.clone() };
    // If the refusal cannot be sent, the daemon is gone and there is nothing to close.
    if socket.send(&frame).await.is_ok() {
        socket.close().await;
    }
    SocketError::PeerRefused(message)
}
