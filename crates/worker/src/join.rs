//! A worker on another machine: dials a daemon, offers its agents, and hosts the sessions that the daemon gives it.
//! When a connection breaks, the agents go on and the worker dials again until it is told to stop. The caller opens the
//! stream to the daemon and checks its certificate.

mod control;
mod directories;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qd_core::sandbox::SandboxRequests;
use qd_link::socket::{ClientUpgrade, Socket, SocketError};
use qd_protocol::WorkerId;
use qd_protocol::api::Agent;
use qd_protocol::frame::join::{SessionWorker, WorkerJoinFrame};
use qd_protocol::frame::v1::SUBPROTOCOL;
use qd_protocol::limits::{ORPHAN_BUSY_S, ORPHAN_IDLE_S};
use qd_protocol::manifest::{Manifest, SandboxRules};
use qd_protocol::sandbox_spec::SandboxSpec;
use qd_protocol::worker::{AgentSpec, Secret};
use tokio::task::{AbortHandle, JoinSet};

use crate::host::{OpenSessionError, WorkerHost, WorkerHostOptions};
use control::ControlConnectionEnd;
use directories::{SpoolFolder, resolve_directory};

pub use qd_link::socket::ByteStream;

/// The first and the longest pause before the worker dials again.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How many times a session's connection is tried. If the daemon still wants it after that, it asks again.
const LINK_TRIES: u32 = 6;

#[derive(Debug, Clone)]
pub struct WorkerJoinOptions {
    pub token: Secret,
    /// The name that people know this machine by.
    pub name: String,
    /// Labels that sessions select workers by.
    pub labels: Vec<String>,
    pub offers: Vec<AgentOffer>,
    /// Where to look for a session's directory if its path does not exist on this machine.
    pub workspace_root: Option<PathBuf>,
    /// The parent folder of the spools; each process uses its own folder below it.
    pub spool_dir: PathBuf,
}

/// An agent that a joined worker offers.
#[derive(Debug, Clone)]
pub struct AgentOffer {
    /// The description sent to the daemon.
    pub agent: Agent,
    /// How the agent is started on this machine.
    pub manifest: Manifest,
    /// The variables of this machine that its manifest lists. The session's own come first.
    pub env: BTreeMap<String, String>,
}

/// Opens streams to the daemon.
pub trait DaemonDialer: Clone + Send + Sync + 'static {
    /// The value of the `Host` header.
    fn host_header(&self) -> String;
    /// A stream to the daemon, over TLS if the address asks for it.
    fn open_stream(&self) -> impl Future<Output = Result<Box<dyn ByteStream>, DaemonDialError>> + Send;
}

/// Why no stream to the daemon could be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DaemonDialError {
    /// The daemon cannot be reached now; it may be reachable later.
    #[error("{0}")]
    Unreachable(String),
    /// The server that answers is not the daemon we trust.
    #[error("{0}")]
    Untrusted(String),
}

/// A change of the connection that a person may want to know about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinStatus {
    /// The daemon accepted the worker under this name.
    Joined(String),
    /// The connection is lost, for this reason; the worker dials again.
    Disconnected(String),
}

/// Why a worker cannot join the daemon, or has to leave it.
#[derive(Debug, thiserror::Error)]
pub enum WorkerJoinError {
    /// The token is wrong or was revoked.
    #[error("the daemon did not accept the token: {0}")]
    Unauthorized(String),
    /// The daemon refused the worker for another reason.
    #[error("the daemon refused this worker: {0}")]
    Refused(String),
    /// Another server answers at the daemon's address.
    #[error("{0}")]
    Untrusted(String),
    /// The folder for the spools cannot be created.
    #[error("failed to create the spool folder in {0}: {1}")]
    SpoolFolder(PathBuf, io::Error),
    /// The kernel does not make this process a subreaper, so it could not find the processes that agents start.
    #[error("failed to become the subreaper of the agents' processes: {0}")]
    Subreaper(io::Error),
}

/// Works for a daemon until `stop` resolves, then ends its agents. Must be called within a runtime.
pub async fn join_daemon<D: DaemonDialer>(
    options: WorkerJoinOptions,
    dialer: D,
    stop: impl Future<Output = ()>,
    report: impl FnMut(JoinStatus),
) -> Result<(), WorkerJoinError> {
    qd_keeper::become_subreaper().map_err(WorkerJoinError::Subreaper)?;
    let dir = options.spool_dir.clone();
    let folder = SpoolFolder::create(&dir).map_err(|error| WorkerJoinError::SpoolFolder(dir, error))?;
    let host = WorkerHost::new(WorkerHostOptions {
        spool_dir: folder.path().to_owned(),
        // Never used: each session brings its own secret, and only the control connection starts sessions here.
        secret: Secret(random_secret()),
        orphan_busy: Duration::from_secs(ORPHAN_BUSY_S),
        orphan_idle: Duration::from_secs(ORPHAN_IDLE_S),
    });
    let name = folder.name().to_owned();
    let mut worker = WorkerJoinClient {
        options,
        dialer,
        host: host.clone(),
        host_name: name,
        links: LinkTasks::default(),
    };
    let stop_host = async {
        stop.await;
        host.stop().await;
    };
    let ended = tokio::select! {
        // Connections are served to the very end, so that the daemon gets the last updates.
        () = stop_host => Ok(()),
        error = worker.stay_joined(report) => Err(error),
    };
    if ended.is_err() {
        host.stop().await;
    }
    ended
}

/// A process that has joined a daemon, or is trying to.
struct WorkerJoinClient<D> {
    options: WorkerJoinOptions,
    dialer: D,
    host: WorkerHost,
    /// Random and fixed for the life of the process, so that the daemon recognises it after a reconnect.
    host_name: String,
    links: LinkTasks,
}

impl<D: DaemonDialer> WorkerJoinClient<D> {
    /// Dials the daemon again and again. Returns only when another attempt makes no sense.
    async fn stay_joined(&mut self, mut report: impl FnMut(JoinStatus)) -> WorkerJoinError {
        let mut pause = ReconnectBackoff::default();
        let (mut joined_before, mut reported) = (false, false);
        loop {
            let mut joined = false;
            let ended = self.serve_control(|name| {
                joined = true;
                report(JoinStatus::Joined(name));
            });
            let reason = match Box::pin(ended).await {
                ControlConnectionEnd::Refused(error) => return error,
                ControlConnectionEnd::WrongDaemon(error) if !joined_before => return error,
                ControlConnectionEnd::WrongDaemon(error) => error.to_string(),
                ControlConnectionEnd::Broken(reason) => reason,
            };
            // Report each disconnection once, not every attempt.
            if joined || !reported {
                report(JoinStatus::Disconnected(reason));
                reported = true;
            }
            joined_before |= joined;
            if joined {
                pause = ReconnectBackoff::default();
            }
            tokio::time::sleep(pause.next()).await;
        }
    }

    /// Opens a session and its connection. Returns the refusal if that is not possible.
    fn open_session(&mut self, mut spec: Box<AgentSpec>, secret: Secret) -> Option<WorkerJoinFrame> {
        let id = SessionWorker { session: spec.session.clone(), worker: spec.worker.clone() };
        let Some(offer) = self.options.offers.iter().find(|offer| offer.agent.name == spec.agent) else {
            let message = format!("this worker does not offer the agent {}", spec.agent);
            return Some(session_refused(id, "unknown_agent", message));
        };
        // Never the daemon's manifest: each machine decides for itself which program it starts.
        spec.manifest = Some(Box::new(offer.manifest.clone()));
        for (name, value) in &offer.env {
            spec.env.entry(name.clone()).or_insert_with(|| value.clone());
        }
        match resolve_directory(&spec.cwd, self.options.workspace_root.as_deref()) {
            Ok(here) => spec.cwd = here,
            Err(message) => return Some(session_refused(id, "path_not_found", message)),
        }
        if let Some(sandbox) = &mut spec.sandbox {
            let home = self.options.spool_dir.parent().unwrap_or(&self.options.spool_dir);
            localize_sandbox(sandbox, &offer.manifest.sandbox, home, &spec.cwd);
        }
        match self.host.open_session_with_secret(spec, secret) {
            // The daemon repeats the order if our connection did not arrive.
            Ok(_) | Err(OpenSessionError::AlreadyHosted(_)) => {}
            Err(error) => return Some(session_refused(id, "agent_not_started", error.to_string())),
        }
        self.start_link(id);
        None
    }

    /// Dials for a session that is already hosted here.
    fn dial_for_session(&mut self, id: SessionWorker) -> Option<WorkerJoinFrame> {
        if !self.host.hosted_sessions().contains(&(id.session.clone(), id.worker.clone())) {
            return Some(session_refused(
                id,
                "unknown_session",
                "this worker no longer hosts the session".to_owned(),
            ));
        }
        self.start_link(id);
        None
    }

    fn start_link(&mut self, id: SessionWorker) {
        let path = format!("/v1/workers/link?session={}&worker={}", id.session, id.worker);
        let (dialer, token, host) = (self.dialer.clone(), self.options.token.clone(), self.host.clone());
        self.links.replace(id.worker, async move {
            let mut pause = ReconnectBackoff::default();
            for _ in 0..LINK_TRIES {
                match open_socket(&dialer, &token, path.clone()).await {
                    Ok(socket) => {
                        let served = host.serve_connection(socket).await;
                        tracing::debug!(?served, "a session's connection has ended");
                        return;
                    }
                    // The daemon no longer waits for this connection.
                    Err(DaemonConnectError::Socket(SocketError::Refused { .. })) => return,
                    Err(_) => tokio::time::sleep(pause.next()).await,
                }
            }
        });
    }
}

/// Puts the paths of this machine in place of the daemon's. A manifest of this machine can make the confinement stricter,
/// because each machine decides for itself what it starts and how.
fn localize_sandbox(spec: &mut SandboxSpec, rules: &SandboxRules, home: &Path, workspace: &Path) {
    let level = SandboxRequests { session: Some(spec.asked), project: rules.level, ..Default::default() };
    let network =
        SandboxRequests { session: Some(spec.network), project: rules.network, ..Default::default() };
    *spec = SandboxSpec {
        asked: level.setting(),
        network: network.setting(),
        daemon_selection: Some(spec.selection_by_daemon()),
        support: None,
        home: home.to_owned(),
        workspace: workspace.to_owned(),
        worktree: None,
        mail_folder: None,
        tool_directory: None,
        daemon_socket: None,
        state_paths: rules.writable.clone(),
        readable_paths: Vec::new(),
        credential_paths: std::mem::take(&mut spec.credential_paths),
        model_hosts: [rules.hosts.as_slice(), &spec.model_hosts].concat(),
    };
}

/// The connections of the sessions, at most one each: a newer connection ends the older one.
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

/// Why no WebSocket connection to the daemon could be opened.
#[derive(Debug, thiserror::Error)]
enum DaemonConnectError {
    #[error(transparent)]
    Dial(#[from] DaemonDialError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("the server at this address is not a daemon that accepts workers")]
    NotADaemon,
}

async fn open_socket<D: DaemonDialer>(
    dialer: &D,
    token: &Secret,
    path: String,
) -> Result<Socket<Box<dyn ByteStream>>, DaemonConnectError> {
    let stream = dialer.open_stream().await?;
    let upgrade = ClientUpgrade {
        host: dialer.host_header(),
        path,
        subprotocol: Some(SUBPROTOCOL.to_owned()),
        token: Some(token.0.clone()),
    };
    match Socket::connect(stream, &upgrade).await? {
        (socket, true) => Ok(socket),
        (_, false) => Err(DaemonConnectError::NotADaemon),
    }
}

fn session_refused(id: SessionWorker, code: &str, message: String) -> WorkerJoinFrame {
    let SessionWorker { session, worker } = id;
    WorkerJoinFrame::Refused { session, worker, code: code.to_owned(), message }
}

/// Pauses that double up to [`PAUSE_MAX`]. Each is shortened at random, so that workers that lost the same daemon do
/// not all return at once.
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

/// A string that cannot be guessed.
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
