//! The first frames of a connection on which a worker shows a program's terminal: whose it is to be, and that both ends
//! know the same secret. What is shown and typed afterwards is not known here, and nothing of it is kept.

use qd_protocol::frame::terminal::{DaemonTerminalFrame, TerminalRequest, WorkerTerminalFrame};
use qd_protocol::worker::Secret;
use qd_protocol::{SessionId, WorkerId};

use crate::link_connection::read_frame;
use crate::proof;
use crate::socket::{ByteStream, Socket, SocketError};

/// Why a worker does not show a terminal.
#[derive(Debug, thiserror::Error)]
pub enum TerminalRequestError {
    /// It has none to show, or will not.
    #[error("{message}")]
    Refused {
        /// Stable, for programs.
        code: String,
        /// What to do.
        message: String,
    },
    /// It is not the one that it should be.
    #[error("the worker does not know its secret")]
    WrongSecret,
    /// The connection is of no use.
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// The daemon's side: asks for a session's terminal. After it the connection is the viewer's.
pub async fn request_terminal<W: ByteStream>(
    socket: &mut Socket<W>,
    session: SessionId,
    worker: WorkerId,
    secret: &Secret,
) -> Result<(), TerminalRequestError> {
    let ours = proof::fresh_nonce();
    socket.send(&DaemonTerminalFrame::Open(TerminalRequest { session, worker, nonce: ours.clone() })).await?;
    loop {
        match read_frame(socket).await? {
            WorkerTerminalFrame::Hello { nonce, proof } => {
                if !proof::verify_proof(secret, &proof::worker_proof(secret, &ours, &nonce), &proof) {
                    return Err(TerminalRequestError::WrongSecret);
                }
                socket.send(&DaemonTerminalFrame::Proof(proof::daemon_proof(secret, &nonce, &ours))).await?;
            }
            WorkerTerminalFrame::Ready => return Ok(()),
            WorkerTerminalFrame::Refused { code, message } => {
                return Err(TerminalRequestError::Refused { code, message });
            }
        }
    }
}

/// The worker's side: hears whose terminal is wanted, by somebody who has proven to know the secret. [`here`] or
/// [`refuse`] has to follow.
pub async fn read_terminal_request<W: ByteStream>(
    socket: &mut Socket<W>,
    secret: &Secret,
) -> Result<TerminalRequest, SocketError> {
    let look: TerminalRequest = loop {
        if let DaemonTerminalFrame::Open(look) = read_frame(socket).await? {
            break look;
        }
    };
    let nonce = proof::fresh_nonce();
    let right = proof::daemon_proof(secret, &nonce, &look.nonce);
    let proof = proof::worker_proof(secret, &look.nonce, &nonce);
    socket.send(&WorkerTerminalFrame::Hello { nonce, proof }).await?;
    let given = loop {
        if let DaemonTerminalFrame::Proof(given) = read_frame(socket).await? {
            break given;
        }
    };
    match proof::verify_proof(secret, &right, &given) {
        true => Ok(look),
        false => Err(refuse_terminal(socket, "unauthorized", "the secret is not the right one").await),
    }
}

/// The worker's side: what was asked for follows.
pub async fn confirm_terminal<W: ByteStream>(socket: &mut Socket<W>) -> Result<(), SocketError> {
    socket.send(&WorkerTerminalFrame::Ready).await
}

/// The worker's side: what was asked for is not there. Gives the end of the connection.
pub async fn refuse_terminal<W: ByteStream>(
    socket: &mut Socket<W>,
    code: &str,
    message: &str,
) -> SocketError {
    let refused = WorkerTerminalFrame::Refused { code: code.to_owned(), message: message.to_owned() };
    // Whether it is heard or not, the connection is over.
    let _heard = socket.send(&refused).await;
    socket.close().await;
    SocketError::PeerRefused(message.to_owned())
}

#[cfg(test)]
mod tests {
    use tokio::io::DuplexStream;

    use super::*;
    use crate::socket::Role;

    async fn connected_sockets() -> (Socket<DuplexStream>, Socket<DuplexStream>) {
        let (near, far) = tokio::io::duplex(64 << 10);
        (Socket::from_upgraded(near, Role::Client).await, Socket::from_upgraded(far, Role::Server).await)
    }

    fn names() -> (SessionId, WorkerId) {
        (SessionId::from_random(&[1]), WorkerId::from_random(&[2]))
    }

    #[tokio::test]
    async fn a_terminal_is_shown_to_who_knows_the_secret_and_to_nobody_else() {
        let secret = Secret("s".to_owned());
        for (known, fits) in [("s", true), ("t", false)] {
            let (mut daemon, mut worker) = connected_sockets().await;
            let (session, name) = names();
            let known = Secret(known.to_owned());
            let (looked, shown) =
                tokio::join!(request_terminal(&mut daemon, session, name.clone(), &known), async {
                    let look = read_terminal_request(&mut worker, &secret).await?;
                    confirm_terminal(&mut worker).await?;
                    Ok::<_, SocketError>(look)
                });
            assert_eq!(looked.is_ok(), fits, "{looked:?}");
            assert_eq!(shown.map(|look| look.worker).ok(), fits.then_some(name));
        }
    }

    #[tokio::test]
    async fn what_is_not_there_is_told() {
        let secret = Secret::default();
        let (mut daemon, mut worker) = connected_sockets().await;
        let (session, name) = names();
        let (looked, ()) = tokio::join!(request_terminal(&mut daemon, session, name, &secret), async {
            read_terminal_request(&mut worker, &secret).await.unwrap();
            refuse_terminal(&mut worker, "no_terminal", "there is none").await;
        });
        assert!(matches!(looked, Err(TerminalRequestError::Refused { code, .. }) if code == "no_terminal"));
    }
}
