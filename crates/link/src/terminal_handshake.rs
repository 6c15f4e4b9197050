//! The first frames of a connection on which a worker shows a program's terminal: which session it is for, and the
//! proof that both ends know the secret. The terminal traffic that follows is not known here.

use qd_protocol::frame::terminal::{DaemonTerminalFrame, TerminalRequest, WorkerTerminalFrame};
use qd_protocol::worker::Secret;
use qd_protocol::{SessionId, WorkerId};
use qd_worker_sdk::socket::{ByteStream, Socket, SocketError};

use crate::link_connection::read_frame;
use crate::proof;

/// Why a worker does not show a terminal.
#[derive(Debug, thiserror::Error)]
pub enum TerminalRequestError {
    /// The worker has no terminal to show, or refuses to.
    #[error("{message}")]
    Refused {
        /// A stable code, for programs.
        code: String,
        /// The reason, and what to do about it.
        message: String,
    },
    /// The peer is not the expected worker.
    #[error("the worker does not know its secret")]
    WrongSecret,
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// The daemon's side: requests a session's terminal. On success the connection belongs to the viewer.
pub async fn request_terminal<W: ByteStream>(
    socket: &mut Socket<W>,
    session: SessionId,
    worker: WorkerId,
    secret: &Secret,
) -> Result<(), TerminalRequestError> {
    let nonce = proof::fresh_nonce();
    socket
        .send(&DaemonTerminalFrame::Open(TerminalRequest { session, worker, nonce: nonce.clone() }))
        .await?;
    loop {
        match read_frame(socket).await? {
            WorkerTerminalFrame::Hello { nonce: worker_nonce, proof } => {
                if !proof::verify_proof(secret, &proof::worker_proof(secret, &nonce, &worker_nonce), &proof) {
                    return Err(TerminalRequestError::WrongSecret);
                }
                socket
                    .send(&DaemonTerminalFrame::Proof(proof::daemon_proof(secret, &worker_nonce, &nonce)))
                    .await?;
            }
            WorkerTerminalFrame::Ready => return Ok(()),
            WorkerTerminalFrame::Refused { code, message } => {
                return Err(TerminalRequestError::Refused { code, message });
            }
        }
    }
}

/// The worker's side: reads which terminal is requested, and checks that the daemon knows the secret. The caller must
/// then call [`confirm_terminal`] or [`refuse_terminal`].
pub async fn read_terminal_request<W: ByteStream>(
    socket: &mut Socket<W>,
    secret: &Secret,
) -> Result<TerminalRequest, SocketError> {
    let request: TerminalRequest = loop {
        if let DaemonTerminalFrame::Open(request) = read_frame(socket).await? {
            break request;
        }
    };
    let nonce = proof::fresh_nonce();
    let expected = proof::daemon_proof(secret, &nonce, &request.nonce);
    let proof = proof::worker_proof(secret, &request.nonce, &nonce);
    socket.send(&WorkerTerminalFrame::Hello { nonce, proof }).await?;
    let given = loop {
        if let DaemonTerminalFrame::Proof(given) = read_frame(socket).await? {
            break given;
        }
    };
    match proof::verify_proof(secret, &expected, &given) {
        true => Ok(request),
        false => Err(refuse_terminal(socket, "unauthorized", "wrong secret").await),
    }
}

/// The worker's side: the terminal's output follows.
pub async fn confirm_terminal<W: ByteStream>(socket: &mut Socket<W>) -> Result<(), SocketError> {
    socket.send(&WorkerTerminalFrame::Ready).await
}

/// The worker's side: refuses the request and closes the connection. Returns the error for the caller to end with.
pub async fn refuse_terminal<W: ByteStream>(
    socket: &mut Socket<W>,
    code: &str,
    message: &str,
) -> SocketError {
    let refused = WorkerTerminalFrame::Refused { code: code.to_owned(), message: message.to_owned() };
    // Whether the daemon receives it or not, the connection is over.
    let _sent = socket.send(&refused).await;
    socket.close().await;
    SocketError::PeerRefused(message.to_owned())
}

#[cfg(test)]
mod tests {
    use tokio::io::DuplexStream;

    use super::*;
    use qd_worker_sdk::socket::Role;

    async fn connected_sockets() -> (Socket<DuplexStream>, Socket<DuplexStream>) {
        let (client, server) = tokio::io::duplex(64 << 10);
        (Socket::from_upgraded(client, Role::Client).await, Socket::from_upgraded(server, Role::Server).await)
    }

    fn names() -> (SessionId, WorkerId) {
        (SessionId::from_random(&[1]), WorkerId::from_random(&[2]))
    }

    #[tokio::test]
    async fn a_terminal_is_shown_only_to_a_daemon_that_knows_the_secret() {
        let secret = Secret("s".to_owned());
        for (known, expected) in [("s", true), ("t", false)] {
            let (mut daemon, mut worker) = connected_sockets().await;
            let (session, worker_id) = names();
            let known = Secret(known.to_owned());
            let (requested, accepted) =
                tokio::join!(request_terminal(&mut daemon, session, worker_id.clone(), &known), async {
                    let request = read_terminal_request(&mut worker, &secret).await?;
                    confirm_terminal(&mut worker).await?;
                    Ok::<_, SocketError>(request)
                });
            assert_eq!(requested.is_ok(), expected, "{requested:?}");
            assert_eq!(accepted.map(|request| request.worker).ok(), expected.then_some(worker_id));
        }
    }

    #[tokio::test]
    async fn a_missing_terminal_is_refused_with_its_code() {
        let secret = Secret::default();
        let (mut daemon, mut worker) = connected_sockets().await;
        let (session, worker_id) = names();
        let (requested, ()) =
            tokio::join!(request_terminal(&mut daemon, session, worker_id, &secret), async {
                read_terminal_request(&mut worker, &secret).await.unwrap();
                refuse_terminal(&mut worker, "no_terminal", "there is none").await;
            });
        assert!(
            matches!(requested, Err(TerminalRequestError::Refused { code, .. }) if code == "no_terminal")
        );
    }
}
