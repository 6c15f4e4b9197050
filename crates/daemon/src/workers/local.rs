//! Worker processes on this machine: started from our own binary, reached by unix socket, and alive as long as they
//! hold their file lock. Their spools outlive them, and so may processes that their agents started; both are handled
//! here before a session learns that its worker is lost.
//!
//! Design: docs/design/how-a-worker-is-known.md

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_keeper::{Signal, procfs};
use qd_link::record::{self, WorkerFiles};
use qd_link::socket::{ByteStream, ClientUpgrade, Socket, SocketError};
use qd_link::terminal_handshake::TerminalRequestError;
use qd_link::{AgentLink, FileSpool, LinkOptions, NumberedUpdate, WorkerConnector, WorkerUnreachable};
use qd_protocol::event::RunError;
use qd_protocol::frame::terminal;
use qd_protocol::frame::v1::SUBPROTOCOL;
use qd_protocol::link::UpdateNumber;
use qd_protocol::manifest::DriverKind;
use qd_protocol::worker::{AgentSpec, WorkerHostSpec};
use qd_protocol::{SessionId, WorkerId};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::watch;

use super::{RecordedWorker, WorkerKeys, WorkerTimeouts, host_file};
use crate::home::DaemonHome;
use crate::random;

/// How long a new process may take until it listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause between attempts to connect while the process does not listen yet.
const CONNECT_RETRY: Duration = Duration::from_millis(1);
/// How many times reading a spool is tried, and the pause between tries. If all fail, its updates are lost.
const SPOOL_READ_TRIES: u32 = 30;
const SPOOL_READ_RETRY: Duration = Duration::from_secs(1);
/// How long processes of a lost agent have between SIGTERM and SIGKILL.
const KILL_GRACE: Duration = Duration::from_millis(200);

/// The worker processes of one home.
#[derive(Debug)]
pub(super) struct LocalHosts {
    dir: PathBuf,
    log: PathBuf,
    exe: PathBuf,
    keys: WorkerKeys,
    timeouts: WorkerTimeouts,
    /// The processes that this daemon started and that have not exited; the value turns true when one does.
    children: Arc<Mutex<HashMap<String, watch::Receiver<bool>>>>,
    /// The id of the process that all echo agents share.
    shared: tokio::sync::Mutex<Option<String>>,
}

impl LocalHosts {
    pub(super) fn new(home: &DaemonHome, exe: PathBuf, keys: WorkerKeys, timeouts: WorkerTimeouts) -> Self {
        let (dir, log) = (home.workers(), home.log());
        let (children, shared) = Default::default();
        Self { dir, log, exe, keys, timeouts, children, shared }
    }

    /// Starts a worker with this agent, or puts the agent into the shared one.
    pub(super) async fn launch(&self, spec: AgentSpec, options: LinkOptions) -> Result<AgentLink, RunError> {
        let worker = spec.worker.clone();
        // An echo agent needs no process of its own, and starts none.
        let shares = spec.manifest.as_ref().is_some_and(|manifest| manifest.driver() == DriverKind::Echo);
        let launched = match shares {
            true => self.shared_host().await.map(|host| (host, Some(Box::new(spec)))),
            false => {
                let host = worker.to_string();
                self.spawn_host(&host, vec![spec]).await.map(|()| (host, None))
            }
        };
        let (host, start) = launched.map_err(|error| {
            let message = format!("could not start a worker: {error}; see `qd doctor` and the log");
            RunError::new("worker_not_started", message)
        })?;
        Ok(self.open_link(&worker, host, LinkOptions { start, ..options }))
    }

    /// Opens a link to a worker that already exists.
    pub(super) fn attach(&self, attachment: &RecordedWorker, options: LinkOptions) -> AgentLink {
        self.open_link(&attachment.worker, self.host_of(&attachment.worker), options)
    }

    /// Connects to the terminal of a worker's agent.
    pub(super) async fn connect_terminal(
        &self,
        session: &SessionId,
        worker: &WorkerId,
    ) -> Result<Socket<Box<dyn ByteStream>>, TerminalRequestError> {
        let host = self.host_of(worker);
        let stream: Box<dyn ByteStream> =
            Box::new(record::connect_to_worker(&self.dir, &host).await.map_err(SocketError::from)?);
        let (mut socket, _) = Socket::connect(stream, &upgrade_request(terminal::SUBPROTOCOL)).await?;
        let secret = self.keys.secret(&host);
        qd_link::terminal_handshake::request_terminal(&mut socket, session.clone(), worker.clone(), &secret)
            .await?;
        Ok(socket)
    }

    /// The id of the process that holds a worker; usually the worker's own id.
    fn host_of(&self, worker: &WorkerId) -> String {
        fs::read_to_string(host_file(&self.dir, worker)).unwrap_or_else(|_| worker.to_string())
    }

    /// Removes the files of a worker that is gone.
    pub(super) fn remove_files(&self, worker: &WorkerId) {
        // A missing file is fine, and files that cannot be removed are found by the next check for strays.
        let _absent = fs::remove_file(host_file(&self.dir, worker));
        let _absent = FileSpool::remove(&FileSpool::folder(&self.dir, worker));
        if !record::is_worker_alive(&self.dir, worker.as_str())
            && let Some(files) = WorkerFiles::of(&self.dir, worker.as_str())
        {
            let _absent = files.remove();
        }
    }

    /// Kills a worker's process; its keeper then ends the rest. A shared process is left alone, because it holds other
    /// agents too.
    pub(super) fn kill(&self, worker: &WorkerId) {
        self.signal_hosts(|id| id == worker.as_str(), Signal::KILL);
    }

    /// Lets a worker's process continue, in case somebody stopped it.
    pub(super) fn resume(&self, worker: &WorkerId) {
        let host = self.host_of(worker);
        self.signal_hosts(|id| id == host, Signal::CONT);
    }

    /// Ends the shared processes. Call it once no session needs them.
    pub(super) fn end_shared(&self) {
        self.signal_hosts(|id| id.starts_with(SHARED_PREFIX), Signal::TERM);
    }

    /// Signals the matching processes, if they are still the ones that their records describe.
    fn signal_hosts(&self, matches: impl Fn(&str) -> bool, signal: Signal) {
        for record in record::read_records(&self.dir) {
            let process = procfs::ProcessIdentity::find(record.pid);
            let same = |found: &procfs::ProcessIdentity| record.start_ticks == Some(found.start_ticks);
            if matches(&record.agent_id)
                && let Some(process) = process.filter(same)
                && record::is_lock_held_by(&self.dir, &record.agent_id, process.pid)
            {
                procfs::send_signal(&process, signal);
            }
        }
    }

    /// Ends workers that no session knows: those of a daemon that died after starting them and before journalling it.
    /// Files of dead workers are removed.
    pub(super) async fn end_strays(&self, is_stray: impl Fn(&WorkerId) -> bool) {
        for found in record::read_records(&self.dir) {
            let Ok(worker) = WorkerId::parse(&found.agent_id) else { continue };
            let is_needed = match found.agent_id.starts_with(SHARED_PREFIX) {
                true => record::is_worker_alive(&self.dir, &found.agent_id),
                false => !is_stray(&worker),
            };
            if is_needed {
                continue;
            }
            tracing::info!(%worker, pid = found.pid, "ending a worker that belongs to no session");
            self.kill(&worker);
            let mark = self.keys.mark(&worker);
            let ended = tokio::task::spawn_blocking(move || procfs::end_marked(&mark, KILL_GRACE)).await;
            tracing::debug!(%worker, ?ended, "ended the processes that it had started");
            self.remove_files(&worker);
        }
    }

    /// The process that all echo agents share, started if there is none.
    async fn shared_host(&self) -> io::Result<String> {
        let mut shared = self.shared.lock().await;
        if let Some(host) = &*shared
            && (self.children().contains_key(host) || record::is_worker_alive(&self.dir, host))
        {
            return Ok(host.clone());
        }
        let host = WorkerId::from_random(&random::bytes::<16>()).as_str().replacen(
            WorkerId::PREFIX,
            SHARED_PREFIX,
            1,
        );
        self.spawn_host(&host, Vec::new()).await?;
        *shared = Some(host.clone());
        Ok(host)
    }

    fn open_link(&self, worker: &WorkerId, host: String, options: LinkOptions) -> AgentLink {
        let route = LocalWorkerConnector {
            dir: self.dir.clone(),
            child: self.children().get(&host).cloned(),
            mark: self.keys.mark(worker),
            worker: worker.clone(),
            host: host.clone(),
        };
        if host != worker.as_str()
            && let Err(error) = write_private(&host_file(&self.dir, worker), &host)
        {
            tracing::warn!(%worker, %error, "a later daemon cannot reattach to this agent");
        }
        AgentLink::open(LinkOptions { secret: self.keys.secret(&host), ..options }, route)
    }

    async fn spawn_host(&self, host: &str, agents: Vec<AgentSpec>) -> io::Result<()> {
        let spec = WorkerHostSpec {
            id: host.to_owned(),
            dir: self.dir.clone(),
            secret: self.keys.secret(host),
            orphan_busy_ms: milliseconds(self.timeouts.orphan_busy),
            orphan_idle_ms: milliseconds(self.timeouts.orphan_idle),
            agents,
        };
        let log =
            OpenOptions::new().append(true).create(true).mode(0o600).open(self.log.join("workers.log"))?;
        let mut child = Command::new(&self.exe)
            .arg0("qd")
            .arg("__worker")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        let stdin = child.stdin.take();
        let (ended, ended_signal) = watch::channel(false);
        self.children().insert(host.to_owned(), ended_signal);
        let (children, host) = (Arc::clone(&self.children), host.to_owned());
        // The runtime owns this task, not the daemon: it only waits, so that the process leaves no zombie.
        tokio::spawn(async move {
            let status = child.wait().await;
            tracing::debug!(%host, ?status, "a worker has exited");
            children.lock().unwrap_or_else(PoisonError::into_inner).remove(&host);
            ended.send_replace(true);
        });
        if let Some(mut stdin) = stdin {
            let spec = serde_json::to_vec(&spec).map_err(io::Error::other)?;
            stdin.write_all(&spec).await?;
        }
        Ok(())
    }

    /// A poisoned lock is fine to use: every change under it is one call, so a panic leaves the map whole.
    fn children(&self) -> MutexGuard<'_, HashMap<String, watch::Receiver<bool>>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

/// The prefix of a shared process's id. No worker id begins with it.
const SHARED_PREFIX: &str = "shared-";

/// How a link reaches a worker on this machine.
struct LocalWorkerConnector {
    dir: PathBuf,
    host: String,
    worker: WorkerId,
    mark: String,
    /// Turns true when the process exits, if this daemon started it.
    child: Option<watch::Receiver<bool>>,
}

/// The WebSocket upgrade request for a worker's socket.
fn upgrade_request(subprotocol: &str) -> ClientUpgrade {
    ClientUpgrade {
        host: "worker".to_owned(),
        path: "/".to_owned(),
        subprotocol: Some(subprotocol.to_owned()),
        token: None,
    }
}

impl LocalWorkerConnector {
    /// Whether the process is alive, as far as can be told: our child that has not exited, or the holder of its lock.
    fn is_alive(&self) -> bool {
        self.child.as_ref().is_some_and(|ended| !*ended.borrow())
            || record::is_worker_alive(&self.dir, &self.host)
    }
}

impl WorkerConnector for LocalWorkerConnector {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let began = tokio::time::Instant::now();
        loop {
            match record::connect_to_worker(&self.dir, &self.host).await {
                Ok(stream) => {
                    let wire: Box<dyn ByteStream> = Box::new(stream);
                    return match Socket::connect(wire, &upgrade_request(SUBPROTOCOL)).await {
                        Ok((socket, true)) => Ok(socket),
                        Ok((_, false)) | Err(_) => Err(WorkerUnreachable::RetryLater),
                    };
                }
                Err(_) if !self.is_alive() => return Err(WorkerUnreachable::Dead),
                Err(_) if began.elapsed() > LISTEN_TIMEOUT => return Err(WorkerUnreachable::RetryLater),
                Err(_) => tokio::time::sleep(CONNECT_RETRY).await,
            }
        }
    }

    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        for _ in 0..SPOOL_READ_TRIES {
            let (dir, worker, mark) = (self.dir.clone(), self.worker.clone(), self.mark.clone());
            let read = move || {
                // The agent's processes are ended first, so that nothing more can come from them.
                let ended = procfs::end_marked(&mark, KILL_GRACE);
                tracing::warn!(%worker, ?ended, "a worker is lost; ended the processes of its agent");
                FileSpool::read_undelivered(&FileSpool::folder(&dir, &worker), after)
            };
            match tokio::task::spawn_blocking(read).await.map_err(io::Error::other).flatten() {
                Ok(undelivered) => return undelivered,
                Err(error) => {
                    tracing::error!(worker = %self.worker, %error, "could not read the spool of a lost worker");
                    tokio::time::sleep(SPOOL_READ_RETRY).await;
                }
            }
        }
        Vec::new()
    }
}
