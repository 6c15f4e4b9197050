//! The first frames of a connection on which a worker shows a program's terminal: whose it is to be, and that both ends
//! know the same secret. What is shown and typed afterwards is not known here, and nothing of it is kept.

use qd_protocol::frame::terminal::{Look, ToDaemon, ToWorker};
use qd_protocol::worker::Secret;
use qd_protocol::{SessionId, WorkerId};

use crate::line::frame;
use crate::proof;
use crate::socket::{Socket, SocketError, Wire};

/// Why a worker does not show a terminal.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
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
    Unproven,
    /// The connection is of no use.
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// The daemon's side: asks for a session's terminal. After it the connection is the viewer's.
pub async fn look<W: Wire>(
    socket: &mut Socket<W>,
    session: SessionId,
    worker: WorkerId,
    secret: &Secret,
) -> Result<(), LookError> {
    let ours = proof::nonce();
    socket.send(&ToWorker::Look(Look { session, worker, nonce: ours.clone() })).await?;
    loop {
        match frame(socket).await? {
            ToDaemon::Hello { nonce, proof } => {
                if !proof::holds(secret, &proof::of_worker(secret, &ours, &nonce), &proof) {
                    return Err(LookError::Unproven);
                }
                socket.send(&ToWorker::Proof(proof::of_daemon(secret, &nonce, &ours))).await?;
            }
            ToDaemon::Here => return Ok(()),
            ToDaemon::Refused { code, message } => return Err(LookError::Refused { code, message }),
        }
    }
}

/// The worker's side: hears whose terminal is wanted, by somebody who has proven to know the secret. [`here`] or
/// [`refuse`] has to follow.
pub async fn asked<W: Wire>(socket: &mut Socket<W>, secret: &Secret) -> Result<Look, SocketError> {
    let look: Look = loop {
        if let ToWorker::Look(look) = frame(socket).await? {
            break look;
        }
    };
    let nonce = proof::nonce();
    let right = proof::of_daemon(secret, &nonce, &look.nonce);
    let proof = proof::of_worker(secret, &look.nonce, &nonce);
    socket.send(&ToDaemon::Hello { nonce, proof }).await?;
    let given = loop {
        if let ToWorker::Proof(given) = frame(socket).await? {
            break given;
        }
    };
    match proof::holds(secret, &right, &given) {
        true => Ok(look),
        false => Err(refuse(socket, "unauthorized", "the secret is not the right one").await),
    }
}

/// The worker's side: what was asked for follows.
pub async fn here<W: Wire>(socket: &mut Socket<W>) -> Result<(), SocketError> {
    socket.send(&ToDaemon::Here).await
}

/// The worker's side: what was asked for is not there. Gives the end of the connection.
pub async fn refuse<W: Wire>(socket: &mut Socket<W>, code: &str, message: &str) -> SocketError {
    let refused = ToDaemon::Refused { code: code.to_owned(), message: message.to_owned() };
    // Whether it is heard or not, the connection is over.
    let _heard = socket.send(&refused).await;
    socket.close().await;
    SocketError::Unwelcome(message.to_owned())
}

#[cfg(test)]
mod tests {
    use tokio::io::DuplexStream;

    use super::*;
    use crate::socket::Role;

    async fn ends() -> (Socket<DuplexStream>, Socket<DuplexStream>) {
        let (near, far) = tokio::io::duplex(64 << 10);
        (Socket::upgraded(near, Role::Client).await, Socket::upgraded(far, Role::Server).await)
    }

    fn names() -> (SessionId, WorkerId) {
        (SessionId::from_random(&[1]), WorkerId::from_random(&[2]))
    }

    #[tokio::test]
    async fn a_terminal_is_shown_to_who_knows_the_secret_and_to_nobody_else() {
        let secret = Secret("s".to_owned());
        for (known, fits) in [("s", true), ("t", false)] {
            let (mut daemon, mut worker) = ends().await;
            let (session, name) = names();
            let known = Secret(known.to_owned());
            let (looked, shown) = tokio::join!(look(&mut daemon, session, name.clone(), &known), async {
                let look = asked(&mut worker, &secret).await?;
                here(&mut worker).await?;
                Ok::<_, SocketError>(look)
            });
            assert_eq!(looked.is_ok(), fits, "{looked:?}");
            assert_eq!(shown.map(|look| look.worker).ok(), fits.then_some(name));
        }
    }

    #[tokio::test]
    async fn what_is_not_there_is_told() {
        let secret = Secret::default();
        let (mut daemon, mut worker) = ends().await;
        let (session, name) = names();
        let (looked, ()) = tokio::join!(look(&mut daemon, session, name, &secret), async {
            asked(&mut worker, &secret).await.unwrap();
            refuse(&mut worker, "no_terminal", "there is none").await;
        });
        assert!(matches!(looked, Err(LookError::Refused { code, .. }) if code == "no_terminal"));
    }
}
