//! A worker's inside: the seats of its sessions, and the way from a connection to one of them. Where connections come
//! from is not its business: the worker process listens, a joined worker dials, and both give them here.

pub(crate) mod process;
mod session_host;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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
use crate::drivers::pty::shared_screen::ScreenViewer;
use crate::terminal_window::{self, TerminalWindow};

pub use process::main;

/// Our version, for people.
pub(crate) const SOFTWARE_VERSION: &str = concat!("quarterdeck ", env!("CARGO_PKG_VERSION"));

/// What a host is made with.
#[derive(Debug, Clone)]
pub struct WorkerHostOptions {
    /// Where the spools are.
    pub spool_dir: PathBuf,
    /// What both sides prove themselves with.
    pub secret: Secret,
    /// How long to keep an agent in mid-turn while no daemon comes.
    pub orphan_busy: Duration,
    /// How long to keep an agent without a turn while no daemon comes.
    pub orphan_idle: Duration,
}

/// Why a seat cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum OpenSessionError {
    /// There is one of this name.
    #[error("the worker `{0}` is here already")]
    AlreadyHosted(WorkerId),
    /// Its spool cannot be made.
    #[error("failed to make the spool of `{0}`: {1}")]
    Spool(WorkerId, io::Error),
    /// The host ends.
    #[error("the worker is about to end")]
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

    /// Starts an agent in a seat of its own. It stays until the agent is gone and the daemon knows all that it said.
    /// Has to be called within a runtime.
    pub fn open_session(&self, spec: Box<AgentSpec>) -> Result<WorkerEndpoint, OpenSessionError> {
        self.open_session_with_secret(spec, self.shared.options.secret.clone())
    }

    /// The same with a secret for this seat alone.
    pub fn open_session_with_secret(
        &self,
        spec: Box<AgentSpec>,
        secret: Secret,
    ) -> Result<WorkerEndpoint, OpenSessionError> {
        let shared = &self.shared;
        if shared.stopping.is_cancelled() {
            return Err(OpenSessionError::HostStopping);
        }
        let mut seats = shared.lock_sessions();
        if seats.contains_key(&spec.worker) {
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
        let seat = WorkerEndpoint::new(options, Box::new(spool));
        let ending = shared.stopping.child_token();
        let taken = HostedSession {
            session: spec.session.clone(),
            endpoint: seat.clone(),
            window: Arc::default(),
            shutdown: ending.clone(),
            disconnect: CancellationToken::new(),
        };
        let window = Arc::clone(&taken.window);
        seats.insert(spec.worker.clone(), taken);
        drop(seats);
        shared.publish_session_count();
        let place = SessionHost::new(Arc::clone(shared), seat.clone(), spec, folder, window, ending);
        shared.tasks.spawn(place.run());
        Ok(seat)
    }

    /// Serves one connection until it ends: finds the seat that it is for, or makes one of what it is told to start.
    pub async fn serve_connection<W: ByteStream>(&self, mut socket: Socket<W>) -> Result<(), SocketError> {
        let hello = read_hello(&mut socket).await?;
        let shared = &self.shared;
        let (seat, over, started) = match shared.find_session(&hello) {
            Some((seat, over)) => (seat, over, Err((socket, hello))),
            None => {
                let started =
                    receive_agent_start(socket, hello, &shared.options.secret, SOFTWARE_VERSION).await?;
                let seat = self.open_session(started.spec.clone()).map_err(|error| {
                    tracing::warn!(session = %started.spec.session, %error, "a session could not be started");
                    SocketError::Closed
                })?;
                let over = shared.disconnect_token(&started.spec.worker).unwrap_or_default();
                (seat, over, Ok(started))
            }
        };
        let serve = async {
            match started {
                Ok(started) => seat.serve_started(started).await,
                Err((socket, hello)) => seat.serve(socket, hello).await,
            }
        };
        tokio::select! {
            served = serve => served,
            // Nothing is left to be said, and the daemon knows it.
            () = over.cancelled() => Ok(()),
        }
    }

    /// Serves one connection of a person who looks at a session's terminal, until it ends.
    pub async fn serve_viewer<W: ByteStream>(&self, mut socket: Socket<W>) -> Result<(), SocketError> {
        let look =
            qd_link::terminal_handshake::read_terminal_request(&mut socket, &self.shared.options.secret)
                .await?;
        let Some(viewer) = self.shared.open_viewer(&look) else {
            let message = "the session's agent has no terminal";
            return Err(
                qd_link::terminal_handshake::refuse_terminal(&mut socket, "no_terminal", message).await
            );
        };
        qd_link::terminal_handshake::confirm_terminal(&mut socket).await?;
        terminal_window::serve_viewer(socket, viewer).await
    }

    /// The seats that are taken: whose, and by which worker of theirs.
    pub fn hosted_sessions(&self) -> Vec<(SessionId, WorkerId)> {
        self.shared
            .lock_sessions()
            .iter()
            .map(|(worker, taken)| (taken.session.clone(), worker.clone()))
            .collect()
    }

    /// Ends an agent that nobody wants any more, with all that it started and said.
    pub fn close_session(&self, worker: &WorkerId) {
        if let Some(taken) = self.shared.lock_sessions().get(worker) {
            taken.shutdown.cancel();
        }
    }

    /// How many sessions there are, now and from now on.
    pub fn session_count(&self) -> watch::Receiver<usize> {
        self.shared.session_count.subscribe()
    }

    /// Ends every agent with all that it started, and returns when that is done. What the daemon does not know yet
    /// stays in the spools.
    pub async fn stop(&self) {
        self.shared.stopping.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

/// What the places of a host have in common.
#[derive(Debug)]
struct WorkerHostState {
    options: WorkerHostOptions,
    sessions: Mutex<HashMap<WorkerId, HostedSession>>,
    session_count: watch::Sender<usize>,
    /// The keepers, by pid. Locked also while one is started or lost, since children that belong to no keeper are then
    /// told from a keeper that is not in here yet.
    keepers: tokio::sync::Mutex<HashSet<u32>>,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

/// A seat that is not free.
#[derive(Debug)]
struct HostedSession {
    session: SessionId,
    endpoint: WorkerEndpoint,
    /// Where people look at its terminal.
    window: Arc<TerminalWindow>,
    /// Ends its agent; the host's own end does as well.
    shutdown: CancellationToken,
    /// Ends the connections that serve it.
    disconnect: CancellationToken,
}

impl WorkerHostState {
    fn lock_sessions(&self) -> MutexGuard<'_, HashMap<WorkerId, HostedSession>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The seat that a connection is for. One of the same session and another worker is given as well, so that it
    /// refuses, unless its agent is gone: then only its last words are in nobody's way.
    fn find_session(&self, hello: &v1::DaemonHello) -> Option<(WorkerEndpoint, CancellationToken)> {
        let seats = self.lock_sessions();
        let rival = |taken: &&HostedSession| {
            taken.session == hello.session
                && taken.endpoint.watch_status().borrow().presence != v1::AgentPresence::Gone
        };
        let found = seats.get(&hello.worker).or_else(|| seats.values().find(rival))?;
        Some((found.endpoint.clone(), found.disconnect.clone()))
    }

    fn open_viewer(&self, look: &TerminalRequest) -> Option<ScreenViewer> {
        let window = {
            let seats = self.lock_sessions();
            let taken = seats.get(&look.worker).filter(|taken| taken.session == look.session)?;
            Arc::clone(&taken.window)
        };
        window.open_viewer()
    }

    fn disconnect_token(&self, worker: &WorkerId) -> Option<CancellationToken> {
        self.lock_sessions().get(worker).map(|taken| taken.disconnect.clone())
    }

    /// Frees a seat.
    fn remove_session(&self, worker: &WorkerId) {
        let taken = self.lock_sessions().remove(worker);
        if let Some(taken) = taken {
            taken.disconnect.cancel();
        }
        self.publish_session_count();
    }

    fn publish_session_count(&self) {
        self.session_count.send_replace(self.lock_sessions().len());
    }
}
