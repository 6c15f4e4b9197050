//! A worker on another machine: it dials a daemon, offers its agents, and holds those of the sessions that it is given.
//! Connections may break as they like; the agents go on, and the worker dials again until it is told to end. How a
//! stream to the daemon is made, and whether its certificate is the right one, is the caller's business.

mod control;
mod directories;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use qd_link::socket::{ClientUpgrade, Socket, SocketError};
use qd_protocol::WorkerId;
use qd_protocol::api::Agent;
use qd_protocol::frame::join::{SessionWorker, WorkerJoinFrame};
use qd_protocol::frame::v1::SUBPROTOCOL;
use qd_protocol::limits::{ORPHAN_BUSY_S, ORPHAN_IDLE_S};
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::{AgentSpec, Secret};
use tokio::task::{AbortHandle, JoinSet};

use crate::host::{OpenSessionError, WorkerHost, WorkerHostOptions};
use control::ControlConnectionEnd;
use directories::{SpoolFolder, resolve_directory};

pub use qd_link::socket::ByteStream;

/// The first and the longest pause before the daemon is dialled again.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often a session's connection is tried. Then the daemon asks for it again, if it still wants it.
const LINK_TRIES: u32 = 6;

/// What a worker joins with.
#[derive(Debug, Clone)]
pub struct WorkerJoinOptions {
    /// The worker token.
    pub token: Secret,
    /// What people call this machine.
    pub name: String,
    /// What it can be chosen by.
    pub labels: Vec<String>,
    /// The agents that it offers.
    pub offers: Vec<AgentOffer>,
    /// Where sessions work whose directory is not here.
    pub workspace_root: Option<PathBuf>,
    /// Where spools are kept, below a folder of this process's own.
    pub spool_dir: PathBuf,
}

/// An agent that a worker offers.
#[derive(Debug, Clone)]
pub struct AgentOffer {
    /// What the daemon is told of it.
    pub agent: Agent,
    /// How it is started here.
    pub manifest: Manifest,
}

/// How the daemon is reached.
pub trait DaemonDialer: Clone + Send + Sync + 'static {
    /// The `Host` header.
    fn host_header(&self) -> String;
    /// A stream to it, over TLS if need be.
    fn open_stream(&self) -> impl Future<Output = Result<Box<dyn ByteStream>, DaemonDialError>> + Send;
}

/// Why there is no stream to a daemon.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DaemonDialError {
    /// It may be there later.
    #[error("{0}")]
    Unreachable(String),
    /// Who answers is somebody else.
    #[error("{0}")]
    Untrusted(String),
}

/// What a person may want to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinStatus {
    /// It works for the daemon, under this name.
    Joined(String),
    /// The daemon is not there; it is dialled again.
    Disconnected(String),
}

/// Why a worker does not work for the daemon any more, or never did.
#[derive(Debug, thiserror::Error)]
pub enum WorkerJoinError {
    /// The token is wrong or was revoked.
    #[error("the daemon does not take the token: {0}")]
    Unauthorized(String),
    /// The daemon will have nothing to do with us.
    #[error("the daemon refuses: {0}")]
    Refused(String),
    /// Somebody else answers in the daemon's place.
    #[error("{0}")]
    Untrusted(String),
    /// There is no room for the spools.
    #[error("failed to keep anything in {0}: {1}")]
    SpoolFolder(PathBuf, io::Error),
    /// The kernel does not let us look after what agents start.
    #[error("failed to become the keeper of what agents start: {0}")]
    Subreaper(io::Error),
}

/// Works for a daemon until `stop` resolves, then ends its agents. Has to be called within a runtime.
pub async fn join_daemon<D: DaemonDialer>(
    options: WorkerJoinOptions,
    dial: D,
    stop: impl Future<Output = ()>,
    tell: impl FnMut(JoinStatus),
) -> Result<(), WorkerJoinError> {
    qd_keeper::become_subreaper().map_err(WorkerJoinError::Subreaper)?;
    let dir = options.spool_dir.clone();
    let folder = SpoolFolder::create(&dir).map_err(|error| WorkerJoinError::SpoolFolder(dir, error))?;
    let host = WorkerHost::new(WorkerHostOptions {
        spool_dir: folder.path().to_owned(),
        // Each session brings its own; nobody can start one here who was not sent by the control connection.
        secret: Secret(random_secret()),
        orphan_busy: Duration::from_secs(ORPHAN_BUSY_S),
        orphan_idle: Duration::from_secs(ORPHAN_IDLE_S),
    });
    let name = folder.name().to_owned();
    let mut worker = WorkerJoinClient {
        options,
        dialer: dial,
        host: host.clone(),
        host_name: name,
        links: LinkTasks::default(),
    };
    let end = async {
        stop.await;
        host.stop().await;
    };
    let ended = tokio::select! {
        // The connections to the very end, so that the last words may be heard.
        () = end => Ok(()),
        error = worker.stay_joined(tell) => Err(error),
    };
    if ended.is_err() {
        host.stop().await;
    }
    ended
}

/// A process that works for a daemon.
struct WorkerJoinClient<D> {
    options: WorkerJoinOptions,
    dialer: D,
    host: WorkerHost,
    /// Made once, so that the daemon knows us again.
    host_name: String,
    links: LinkTasks,
}

impl<D: DaemonDialer> WorkerJoinClient<D> {
    /// Stays joined for as long as that is possible.
    async fn stay_joined(&mut self, mut tell: impl FnMut(JoinStatus)) -> WorkerJoinError {
        let mut pause = ReconnectBackoff::default();
        let (mut joined_before, mut is_told) = (false, false);
        loop {
            let mut joined = false;
            let ended = self.serve_control(|name| {
                joined = true;
                tell(JoinStatus::Joined(name));
            });
            let why = match Box::pin(ended).await {
                ControlConnectionEnd::Refused(error) => return error,
                ControlConnectionEnd::WrongDaemon(error) if !joined_before => return error,
                ControlConnectionEnd::WrongDaemon(error) => error.to_string(),
                ControlConnectionEnd::Broken(why) => why,
            };
            // Once for each time that it is away, and not for every try.
            if joined || !is_told {
                tell(JoinStatus::Disconnected(why));
                is_told = true;
            }
            joined_before |= joined;
            if joined {
                pause = ReconnectBackoff::default();
            }
            tokio::time::sleep(pause.next()).await;
        }
    }

    /// Holds an agent, or says why not.
    fn open_session(&mut self, mut spec: Box<AgentSpec>, secret: Secret) -> Option<WorkerJoinFrame> {
        let seat = SessionWorker { session: spec.session.clone(), worker: spec.worker.clone() };
        let Some(offer) = self.options.offers.iter().find(|offer| offer.agent.name == spec.agent) else {
            let message = format!("this worker does not offer the agent {}", spec.agent);
            return Some(session_refused(seat, "unknown_agent", message));
        };
        // Never another's: what is started on this machine is for this machine to say.
        spec.manifest = Some(Box::new(offer.manifest.clone()));
        match resolve_directory(&spec.cwd, self.options.workspace_root.as_deref()) {
            Ok(here) => spec.cwd = here,
            Err(message) => return Some(session_refused(seat, "path_not_found", message)),
        }
        match self.host.open_session_with_secret(spec, secret) {
            // It was asked for before, and the answer was lost.
            Ok(_) | Err(OpenSessionError::AlreadyHosted(_)) => {}
            Err(error) => return Some(session_refused(seat, "agent_not_started", error.to_string())),
        }
        self.start_link(seat);
        None
    }

    /// Dials for a session that is held here.
    fn dial_for_session(&mut self, seat: SessionWorker) -> Option<WorkerJoinFrame> {
        if !self.host.hosted_sessions().contains(&(seat.session.clone(), seat.worker.clone())) {
            return Some(session_refused(
                seat,
                "unknown_session",
                "this worker does not hold it any more".to_owned(),
            ));
        }
        self.start_link(seat);
        None
    }

    fn start_link(&mut self, seat: SessionWorker) {
        let path = format!("/v1/workers/link?session={}&worker={}", seat.session, seat.worker);
        let (dial, token, host) = (self.dialer.clone(), self.options.token.clone(), self.host.clone());
        self.links.replace(seat.worker, async move {
            let mut pause = ReconnectBackoff::default();
            for _ in 0..LINK_TRIES {
                match open_socket(&dial, &token, path.clone()).await {
                    Ok(socket) => {
                        let served = host.serve_connection(socket).await;
                        tracing::debug!(?served, "a session's connection has ended");
                        return;
                    }
                    // Nobody waits for it any more.
                    Err(DaemonConnectError::Socket(SocketError::Refused { .. })) => return,
                    Err(_) => tokio::time::sleep(pause.next()).await,
                }
            }
        });
    }
}

/// The connections of sessions, at most one of each: a newer one ends the older.
#[derive(Debug, Default)]
struct LinkTasks {
    tasks: JoinSet<()>,
    by_worker: HashMap<WorkerId, AbortHandle>,
}

impl LinkTasks {
    fn replace(&mut self, worker: WorkerId, link: impl Future<Output = ()> + Send + 'static) {
        while self.tasks.try_join_next().is_some() {}
        self.by_worker.retain(|_, link| !link.is_finished());
        let newer = self.tasks.spawn(link);
        if let Some(older) = self.by_worker.insert(worker, newer) {
            older.abort();
        }
    }
}

/// Why there is no WebSocket to a daemon.
#[derive(Debug, thiserror::Error)]
enum DaemonConnectError {
    #[error(transparent)]
    Dial(#[from] DaemonDialError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("who answers there is no daemon that takes workers")]
    NotADaemon,
}

/// A WebSocket to the daemon.
async fn open_socket<D: DaemonDialer>(
    dial: &D,
    token: &Secret,
    path: String,
) -> Result<Socket<Box<dyn ByteStream>>, DaemonConnectError> {
    let wire = dial.open_stream().await?;
    let upgrade = ClientUpgrade {
        host: dial.host_header(),
        path,
        subprotocol: Some(SUBPROTOCOL.to_owned()),
        token: Some(token.0.clone()),
    };
    match Socket::connect(wire, &upgrade).await? {
        (socket, true) => Ok(socket),
        (_, false) => Err(DaemonConnectError::NotADaemon),
    }
}

fn session_refused(seat: SessionWorker, code: &str, message: String) -> WorkerJoinFrame {
    let SessionWorker { session, worker } = seat;
    WorkerJoinFrame::Refused { session, worker, code: code.to_owned(), message }
}

/// Pauses that grow, each shortened by chance so that many who lost the same daemon do not come back at once.
#[derive(Debug)]
struct ReconnectBackoff(Duration);

impl Default for ReconnectBackoff {
    fn default() -> Self {
        Self(PAUSE_MIN)
    }
}

impl ReconnectBackoff {
    fn next(&mut self) -> Duration {
        let longest = self.0;
        self.0 = (self.0 * 2).min(PAUSE_MAX);
        longest.mul_f64(0.5 + f64::from(random_bytes::<1>()[0]) / 512.0)
    }
}

fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel has randomness once it has booted");
    bytes
}

/// A word that nobody can guess.
fn random_secret() -> String {
    WorkerId::from_random(&random_bytes::<26>()).as_str().trim_start_matches(WorkerId::PREFIX).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_no_two_workers_agree_on_them() {
        let mut pause = ReconnectBackoff::default();
        let pauses: Vec<Duration> = (0..10).map(|_| pause.next()).collect();
        assert!(pauses[0] >= PAUSE_MIN / 2 && pauses[0] < PAUSE_MIN, "{pauses:?}");
        assert!(pauses[9] >= PAUSE_MAX / 2 && pauses[9] < PAUSE_MAX, "{pauses:?}");
        assert_ne!(random_secret(), random_secret());
    }
}
