//! The sockets of sessions: each session with an agent on this machine has one in its tool directory. Whoever calls there
//! has the rights of that session and no more, so an agent can be shown this socket in a sandbox, and no other. They are
//! opened while the daemon runs, and bound anew by the next daemon: what a sandbox shows is the directory.
//!
//! Design: docs/design/agents-are-confined.md

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use qd_link::socket_path::short_socket_path;
use qd_protocol::SessionId;
use qd_protocol::sandbox_spec::SESSION_SOCKET_NAME;
use tokio::net::UnixListener;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::listen::listen_privately;

/// The open sockets of sessions. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct SessionSockets {
    shared: Arc<SharedSockets>,
}

#[derive(Debug, Default)]
struct SharedSockets {
    /// Dropping the guard closes the session's socket.
    open: Mutex<HashMap<SessionId, DropGuard>>,
    /// Bound sockets whose connections nobody accepts yet; the kernel queues them. There is at most one per session.
    unserved: Mutex<Vec<SessionListener>>,
    added: Notify,
}

/// The socket of a session, for an accept loop.
#[derive(Debug)]
pub(super) struct SessionListener {
    pub(super) session: SessionId,
    pub(super) socket: UnixListener,
    /// Cancelled when the socket is to be closed.
    pub(super) closed: CancellationToken,
}

impl SessionSockets {
    /// Opens the socket of a session in its tool directory, unless it is open. One that the last daemon left is replaced:
    /// the home belongs to one daemon at a time.
    pub(crate) fn open(&self, session: &SessionId, tool_directory: &Path) -> io::Result<()> {
        let mut open = self.shared.open.lock();
        let path = tool_directory.join(SESSION_SOCKET_NAME);
        if open.contains_key(session) && path.exists() {
            return Ok(());
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let (short, _folder) = short_socket_path(&path)?;
        let socket = listen_privately(&short)?;
        let closed = CancellationToken::new();
        open.insert(session.clone(), closed.clone().drop_guard());
        self.shared.unserved.lock().push(SessionListener { session: session.clone(), socket, closed });
        self.shared.added.notify_one();
        Ok(())
    }

    /// Closes the socket of a session that has no agent any more.
    pub(crate) fn close(&self, session: &SessionId) {
        drop(self.shared.open.lock().remove(session));
        self.shared.unserved.lock().retain(|listener| listener.session != *session);
    }

    /// The next socket that nobody serves yet.
    pub(super) async fn next_unserved(&self) -> SessionListener {
        loop {
            let added = self.shared.added.notified();
            if let Some(listener) = self.shared.unserved.lock().pop() {
                return listener;
            }
            added.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use qd_link::socket_path::connect_to_socket;

    use super::*;

    #[tokio::test]
    async fn a_socket_is_private_replaces_a_dead_one_and_ends_with_its_session() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("d".repeat(100));
        fs::create_dir(&deep).unwrap();
        let path = deep.join(SESSION_SOCKET_NAME);
        let session = SessionId::parse("ses_1").unwrap();
        let (first, second) = (SessionSockets::default(), SessionSockets::default());
        first.open(&session, &deep).unwrap();
        first.open(&session, &deep).unwrap();
        let listener = first.next_unserved().await;
        assert!(first.shared.unserved.lock().is_empty(), "it was open already");
        assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        drop(listener);
        assert!(connect_to_socket(&path).await.is_err(), "its daemon is dead");
        second.open(&session, &deep).unwrap();
        let listener = second.next_unserved().await;
        connect_to_socket(&path).await.unwrap();
        listener.socket.accept().await.unwrap();
        second.close(&session);
        assert!(listener.closed.is_cancelled());
    }
}
