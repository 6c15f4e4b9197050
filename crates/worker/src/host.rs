//! The workers of one host process, and the way from a connection to the session it is for. The host does not care
//! where connections come from: the worker process listens, a joined worker dials, and both pass them on to it.
//!
//! Design: docs/design/one-connection-per-session.md

pub(crate) mod process;
mod session_host;

use qd_drivers::ScreenViewer;
use qd_drivers::terminal_window::TerminalWindow;
use std::collections::{HashMap, HashSet};
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::{Mutex, MutexGuard};
use qd_link::socket::{ByteStream, Socket, SocketError};
use qd_link::{FileSpool, WorkerEndpoint, WorkerEndpointOptions, read_hello, receive_agent_start};
use qd_protocol::frame::terminal::TerminalRequest;
use qd_protocol::frame::v1;
use qd_protocol::limits::SPOOL_MAX;
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{SessionId, WorkerId};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::session_host::SessionHost;
use crate::terminal_viewer;

pub use process::main;

/// Our name and version, shown to people.
pub(crate) const SOFTWARE_VERSION: &str = concat!("quarterdeck ", env!("CARGO_PKG_VERSION"));

#[derive(Debug, Clone)]
pub struct WorkerHostOptions {
    /// The folder that holds one spool per session.
    pub spool_dir: PathBuf,
    /// Both sides of a connection prove that they know this secret.
    pub secret: Secret,
    /// How long to keep an agent that is in a turn while no daemon is attached.
    pub orphan_busy: Duration,
    /// How long to keep an idle agent while no daemon is attached.
    pub orphan_idle: Duration,
}

/// Why a session cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenSessionError {
    #[error("this process already hosts the worker `{0}`")]
    AlreadyHosted(WorkerId),
    #[error("failed to create the spool of `{0}`: {1}")]
    Spool(WorkerId, io::Error),
    #[error("the worker is shutting down")]
    HostStopping,
}

/// The sessions of one worker process. Cheap to clone; all clones are the same host.
#[derive(Debug, Clone)]
pub struct WorkerHost {
    shared: Arc<WorkerHostState>,
}

impl WorkerHost {
    /// A host without sessions.
    pub fn new(options: WorkerHostOptions) -> Self {
        let shared = WorkerHostState {
            options,
            sessions: Mutex::default(),
            session_count: watch::Sender::new(0),
            keepers: tokio::sync::Mutex::default(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Opens a session and starts its agent. The session stays until the agent has exited and the daemon has
    /// acknowledged everything it reported. Must be called within a runtime.
    pub fn open_session(&self, spec: Box<AgentSpec>) -> Result<WorkerEndpoint, OpenSessionError> {
        self.open_session_with_secret(spec, self.shared.options.secret.clone())
    }

    /// Like [`Self::open_session`], with a secret for this session alone.
    pub fn open_session_with_secret(
        &self,
        spec: Box<AgentSpec>,
        secret: Secret,
    ) -> Result<WorkerEndpoint, OpenSessionError> {
        let shared = &self.shared;
        if shared.stopping.is_cancelled() {
            return Err(OpenSessionError::HostStopping);
        }
        let mut sessions = shared.lock_sessions();
        if sessions.contains_key(&spec.worker) {
            return Err(OpenSessionError::AlreadyHosted(spec.worker.clone()));
        }
        let folder = FileSpool::folder(&shared.options.spool_dir, &spec.worker);
        let spool = FileSpool::create(&folder)
            .map_err(|error| OpenSessionError::Spool(spec.worker.clone(), error))?;
        let options = WorkerEndpointOptions {
            session: spec.session.clone(),
            worker: spec.worker.clone(),
            secret,
            numbered_after: spec.after,
            spool_max: SPOOL_MAX,
            software: SOFTWARE_VERSION.to_owned(),
        };
        let endpoint = WorkerEndpoint::new(options, Box::new(spool));
        let shutdown = shared.stopping.child_token();
        let hosted = HostedSession {
            session: spec.session.clone(),
            endpoint: endpoint.clone(),
            window: Arc::default(),
            shutdown: shutdown.clone(),
            disconnect: CancellationToken::new(),
        };
        let window = Arc::clone(&hosted.window);
        sessions.insert(spec.worker.clone(), hosted);
        drop(sessions);
        shared.publish_session_count();
        let (host, worker) = (Arc::clone(shared), spec.worker.clone());
        let session_host =
            SessionHost::new(Arc::clone(shared), endpoint.clone(), spec, folder, window, shutdown);
        shared.tasks.spawn(async move {
            if AssertUnwindSafe(session_host.run()).catch_unwind().await.is_err() {
                // Without its session the process ends, or refuses the daemon that asks for it. Either way the daemon
                // learns that the worker is lost.
                host.remove_session(&worker);
            }
        });
        Ok(endpoint)
    }

    /// Serves one connection until it ends: finds its session, or opens one if the daemon asks to start an agent.
    pub async fn serve_connection<W: ByteStream>(&self, mut socket: Socket<W>) -> Result<(), SocketError> {
        let hello = read_hello(&mut socket).await?;
        let shared = &self.shared;
        let (endpoint, disconnect, started) = match shared.find_session(&hello) {
            Some((endpoint, disconnect)) => (endpoint, disconnect, Err((socket, hello))),
            None => {
                let started =
                    receive_agent_start(socket, hello, &shared.options.secret, SOFTWARE_VERSION).await?;
                let endpoint = self.open_session(started.spec.clone()).map_err(|error| {
                    tracing::warn!(session = %started.spec.session, %error, "a session could not be started");
                    SocketError::Closed
                })?;
                let disconnect = shared.disconnect_token(&started.spec.worker).unwrap_or_default();
                (endpoint, disconnect, Ok(started))
            }
        };
        let serve = async {
            match started {
                Ok(started) => endpoint.serve_started(started).await,
                Err((socket, hello)) => endpoint.serve(socket, hello).await,
            }
        };
        tokio::select! {
            served = serve => served,
            // The session is over and the daemon has acknowledged all of it.
            () = disconnect.cancelled() => Ok(()),
        }
    }

    /// Serves one connection of a person who watches a session's terminal, until it ends.
    pub async fn serve_viewer<W: ByteStream>(&self, mut socket: Socket<W>) -> Result<(), SocketError> {
        let request =
            qd_link::terminal_handshake::read_terminal_request(&mut socket, &self.shared.options.secret)
                .await?;
        let Some(viewer) = self.shared.open_viewer(&request) else {
            let message = "the session's agent has no terminal";
            return Err(
                qd_link::terminal_handshake::refuse_terminal(&mut socket, "no_terminal", message).await
            );
        };
        qd_link::terminal_handshake::confirm_terminal(&mut socket).await?;
        terminal_viewer::serve_viewer(socket, viewer).await
    }

    /// The sessions hosted here, each with the id of its worker.
    pub fn hosted_sessions(&self) -> Vec<(SessionId, WorkerId)> {
        self.shared
            .lock_sessions()
            .iter()
            .map(|(worker, hosted)| (hosted.session.clone(), worker.clone()))
            .collect()
    }

    /// Ends an agent that the daemon no longer wants, with its processes and its spool.
    pub fn close_session(&self, worker: &WorkerId) {
        if let Some(hosted) = self.shared.lock_sessions().get(worker) {
            hosted.shutdown.cancel();
        }
    }

    /// The number of sessions; the receiver is notified when it changes.
    pub fn session_count(&self) -> watch::Receiver<usize> {
        self.shared.session_count.subscribe()
    }

    /// Ends every agent with all its processes, and returns when that is done. Updates that the daemon has not
    /// acknowledged stay in the spools.
    pub async fn stop(&self) {
        self.shared.stopping.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

/// State shared by the sessions of a host.
#[derive(Debug)]
struct WorkerHostState {
    options: WorkerHostOptions,
    sessions: Mutex<HashMap<WorkerId, HostedSession>>,
    session_count: watch::Sender<usize>,
    /// The pids of the keepers. The lock is also held while a keeper is started or lost: a child that belongs to no
    /// keeper must not be confused with a keeper that is not in the set yet.
    keepers: tokio::sync::Mutex<HashSet<u32>>,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

/// A session that this host holds.
#[derive(Debug)]
struct HostedSession {
    session: SessionId,
    endpoint: WorkerEndpoint,
    /// Serves people who watch its terminal.
    window: Arc<TerminalWindow>,
    /// Ends its agent. Cancelled with the host's own shutdown as well.
    shutdown: CancellationToken,
    /// Ends the connections that serve it.
    disconnect: CancellationToken,
}

impl WorkerHostState {
    fn lock_sessions(&self) -> MutexGuard<'_, HashMap<WorkerId, HostedSession>> {
        self.sessions.lock()
    }

    /// Finds the session that a connection is for. A session that is held for another worker id is returned as well,
    /// so that its endpoint refuses the connection. If that session's agent has exited, it is not returned: only its
    /// unacknowledged updates remain, and they do not conflict with a new session.
    fn find_session(&self, hello: &v1::DaemonHello) -> Option<(WorkerEndpoint, CancellationToken)> {
        let sessions = self.lock_sessions();
        let rival = |hosted: &&HostedSession| {
            hosted.session == hello.session
                && hosted.endpoint.watch_status().borrow().presence != v1::AgentPresence::Gone
        };
        let found = sessions.get(&hello.worker).or_else(|| sessions.values().find(rival))?;
        Some((found.endpoint.clone(), found.disconnect.clone()))
    }

    fn open_viewer(&self, request: &TerminalRequest) -> Option<ScreenViewer> {
        let window = {
            let sessions = self.lock_sessions();
            let hosted = sessions.get(&request.worker).filter(|hosted| hosted.session == request.session)?;
            Arc::clone(&hosted.window)
        };
        window.open_viewer()
    }

    fn disconnect_token(&self, worker: &WorkerId) -> Option<CancellationToken> {
        self.lock_sessions().get(worker).map(|hosted| hosted.disconnect.clone())
    }

    fn remove_session(&self, worker: &WorkerId) {
        let hosted = self.lock_sessions().remove(worker);
        if let Some(hosted) = hosted {
            hosted.disconnect.cancel();
        }
        self.publish_session_count();
    }

    fn publish_session_count(&self) {
        self.session_count.send_replace(self.lock_sessions().len());
    }
}
