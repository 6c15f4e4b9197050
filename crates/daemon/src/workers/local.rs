//! Worker processes on this machine: started from our own binary, reached by unix socket, and alive as long as they
//! hold their file lock. Their spools outlive them, and so may processes that their agents started; both are handled
//! here before a session learns that its worker is lost. `local_processes` finds and ends the processes.
//!
//! Design: docs/design/how-a-worker-is-known.md

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use qd_home::DaemonHome;
use qd_keeper::{Signal, procfs};
use qd_link::record::{self, WorkerFiles};
use qd_link::socket::{ByteStream, ClientUpgrade, Socket, SocketError};
use qd_link::terminal_handshake::TerminalRequestError;
use qd_link::{
    AgentLink, FileSpool, LinkOptions, NumberedUpdate, WorkerConnector, WorkerEnding, WorkerUnreachable,
};
use qd_protocol::event::RunError;
use qd_protocol::frame::terminal;
use qd_protocol::frame::v1::SUBPROTOCOL;
use qd_protocol::limits::START_S;
use qd_protocol::link::UpdateNumber;
use qd_protocol::manifest::DriverKind;
use qd_protocol::worker::{AgentSpec, WorkerHostSpec};
use qd_protocol::{SessionId, WorkerId};
use rustix::io::Errno;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::Instant;

use super::local_processes::{DoomedWorker, end_worker, find_host_processes};
use super::{RecordedWorker, WorkerKeys, WorkerTimeouts, host_file};
use crate::random;

/// How long a new process may take until it listens. It has nothing to do before, but the machine may be very busy.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(START_S);
/// The pause between attempts to connect while the process does not listen yet.
const CONNECT_RETRY: Duration = Duration::from_millis(1);
/// How many times reading a spool is tried, and the pause between tries. If all fail, its updates are lost.
const SPOOL_READ_TRIES: u32 = 30;
const SPOOL_READ_RETRY: Duration = Duration::from_secs(1);
/// How long a process that has released its lock, or removed its lock file, may take to exit by itself.
const EXIT_WAIT: Duration = Duration::from_secs(1);

/// The worker processes of one home.
#[derive(Debug)]
pub(super) struct LocalHosts {
    home: DaemonHome,
    dir: PathBuf,
    exe: PathBuf,
    keys: WorkerKeys,
    timeouts: WorkerTimeouts,
    /// The processes that this daemon started and that have not exited; the value turns true when one does.
    children: Arc<Mutex<HashMap<String, watch::Receiver<bool>>>>,
    /// The process that all echo agents share.
    shared: Arc<tokio::sync::Mutex<Option<SharedHost>>>,
    /// For each shared process, a value that the links to it hold: the last one to give the process up ends it.
    shared_links: Mutex<HashMap<String, Weak<()>>>,
}

/// The process into which new echo agents are put.
#[derive(Debug)]
struct SharedHost {
    id: String,
    /// Until when it may not listen yet.
    listens_by: Instant,
}

impl LocalHosts {
    pub(super) fn new(home: &DaemonHome, exe: PathBuf, keys: WorkerKeys, timeouts: WorkerTimeouts) -> Self {
        let (home, dir) = (home.clone(), home.workers());
        let (children, shared, shared_links) = Default::default();
        Self { home, dir, exe, keys, timeouts, children, shared, shared_links }
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
                self.end_namesake(&worker).await;
                self.spawn_host(&host, vec![spec]).await.map(|()| (host, None))
            }
        };
        let (host, start) = launched.map_err(start_failed)?;
        let listens_by = Some(Instant::now() + LISTEN_TIMEOUT);
        Ok(self.open_link(&worker, host, listens_by, LinkOptions { start, ..options }))
    }

    /// Opens a link to a worker that already exists.
    pub(super) fn attach(&self, attachment: &RecordedWorker, options: LinkOptions) -> AgentLink {
        self.open_link(&attachment.worker, self.host_of(&attachment.worker), None, options)
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
        if self.host_of(worker) == worker.as_str() {
            self.signal_hosts(|id| id == worker.as_str(), Signal::KILL);
        }
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

    /// Signals the matching processes. A record is not needed to find them, and is not believed.
    fn signal_hosts(&self, matches: impl Fn(&str) -> bool, signal: Signal) {
        for host in find_host_processes(&self.dir).iter().filter(|host| matches(&host.id)) {
            procfs::send_signal(&host.process, signal);
        }
    }

    /// Ends workers that no session knows: those of a daemon that died after starting them and before journalling it,
    /// and those that a restored journal does not know. Files of dead workers are removed.
    pub(super) async fn end_strays(&self, is_stray: impl Fn(&WorkerId) -> bool) {
        let dir = self.dir.clone();
        let processes = tokio::task::spawn_blocking(move || find_host_processes(&dir)).await;
        let processes = processes.unwrap_or_default().into_iter().map(|found| found.id);
        let recorded = record::read_records(&self.dir).into_iter().map(|found| found.agent_id);
        let hosts: BTreeSet<String> = processes.chain(recorded).collect();
        let shared_in_use = self.shared_in_use(&is_stray).await;
        for host in hosts {
            let Ok(worker) = WorkerId::parse(&host) else { continue };
            let is_needed = match host.starts_with(SHARED_PREFIX) {
                true => shared_in_use.contains(&host),
                false => !is_stray(&worker),
            };
            if is_needed {
                continue;
            }
            let ending = self.end_host(&worker).await;
            tracing::info!(%worker, ?ending, "ended a worker that belongs to no session");
            self.remove_files(&worker);
        }
        // A daemon that died just after it had journalled the end of a worker has not removed its spool.
        for worker in FileSpool::workers(&self.dir).iter().filter(|worker| is_stray(worker)) {
            self.remove_files(worker);
        }
    }

    /// The shared processes that new agents are put into, or that hold one of a session. What names a shared process
    /// for a worker that no session knows is removed.
    async fn shared_in_use(&self, is_stray: impl Fn(&WorkerId) -> bool) -> HashSet<String> {
        let mut in_use: HashSet<String> =
            self.shared.lock().await.iter().map(|host| host.id.clone()).collect();
        {
            let links = self.shared_links.lock();
            let linked = links.iter().filter(|(_, links)| links.strong_count() > 0);
            in_use.extend(linked.map(|(host, _)| host.clone()));
        }
        let Ok(entries) = fs::read_dir(&self.dir) else { return in_use };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".at"));
            let Some(worker) = name.and_then(|name| WorkerId::parse(name).ok()) else { continue };
            let host = self.host_of(&worker);
            match host.starts_with(SHARED_PREFIX) {
                true if is_stray(&worker) => self.remove_files(&worker),
                true => drop(in_use.insert(host)),
                false => {}
            }
        }
        in_use
    }

    /// Ends a worker process of the same id before another one is started. It can only be one that a newer journal
    /// started, before an older journal was restored: the new session would otherwise be connected to it.
    async fn end_namesake(&self, worker: &WorkerId) {
        if record::is_worker_alive(&self.dir, worker.as_str()) {
            let ending = self.end_host(worker).await;
            tracing::warn!(%worker, ?ending, "ended a worker whose id the journal does not know");
            self.remove_files(worker);
        }
    }

    /// Ends the process with this id, and everything that its agent has started.
    async fn end_host(&self, worker: &WorkerId) -> WorkerEnding {
        let doomed = DoomedWorker {
            dir: self.dir.clone(),
            host: worker.to_string(),
            worker: worker.clone(),
            mark: self.keys.mark(worker),
            exit_wait: Duration::ZERO,
        };
        tokio::task::spawn_blocking(move || end_worker(&doomed)).await.unwrap_or(WorkerEnding::NotFound)
    }

    /// The process that all echo agents share, started if there is none.
    async fn shared_host(&self) -> io::Result<String> {
        let mut shared = self.shared.lock().await;
        if let Some(SharedHost { id, listens_by }) = &*shared
            && (self.children().contains_key(id) || record::is_worker_alive(&self.dir, id))
            && (Instant::now() < *listens_by || self.has_socket(id))
        {
            return Ok(id.clone());
        }
        let host = WorkerId::from_random(&random::bytes::<16>()).as_str().replacen(
            WorkerId::PREFIX,
            SHARED_PREFIX,
            1,
        );
        self.spawn_host(&host, Vec::new()).await?;
        *shared = Some(SharedHost { id: host.clone(), listens_by: Instant::now() + LISTEN_TIMEOUT });
        Ok(host)
    }

    /// Whether the socket of a process is still in its place.
    fn has_socket(&self, host: &str) -> bool {
        WorkerFiles::of(&self.dir, host).is_some_and(|files| files.socket.exists())
    }

    /// `listens_by` says until when a process that was just started may not listen yet.
    fn open_link(
        &self,
        worker: &WorkerId,
        host: String,
        listens_by: Option<Instant>,
        options: LinkOptions,
    ) -> AgentLink {
        let route = LocalWorkerConnector {
            dir: self.dir.clone(),
            child: self.children().get(&host).cloned(),
            mark: self.keys.mark(worker),
            worker: worker.clone(),
            listens_by,
            found_dead: false,
            shared: host.starts_with(SHARED_PREFIX).then(|| SharedHostLink {
                current: Arc::clone(&self.shared),
                links: self.link_to_shared(&host),
            }),
            host: host.clone(),
        };
        if host != worker.as_str()
            && let Err(error) = write_private(&host_file(&self.dir, worker), &host)
        {
            tracing::warn!(%worker, %error, "a later daemon cannot reattach to this agent");
        }
        AgentLink::open(LinkOptions { secret: self.keys.secret(&host), ..options }, route)
    }

    /// The value that all links to a shared process hold.
    fn link_to_shared(&self, host: &str) -> Arc<()> {
        let mut links = self.shared_links.lock();
        let existing = links.get(host).and_then(Weak::upgrade);
        existing.unwrap_or_else(|| {
            let first = Arc::new(());
            links.retain(|_, links| links.strong_count() > 0);
            links.insert(host.to_owned(), Arc::downgrade(&first));
            first
        })
    }

    async fn spawn_host(&self, host: &str, agents: Vec<AgentSpec>) -> io::Result<()> {
        self.home.restore_worker_key(&self.keys.0).map_err(io::Error::other)?;
        let spec = WorkerHostSpec {
            id: host.to_owned(),
            dir: self.dir.clone(),
            secret: self.keys.secret(host),
            orphan_busy_ms: milliseconds(self.timeouts.orphan_busy),
            orphan_idle_ms: milliseconds(self.timeouts.orphan_idle),
            agents,
        };
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.home.log().join("workers.log"))?;
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
            children.lock().remove(&host);
            ended.send_replace(true);
        });
        if let Some(mut stdin) = stdin {
            let spec = serde_json::to_vec(&spec).map_err(io::Error::other)?;
            stdin.write_all(&spec).await?;
        }
        Ok(())
    }

    /// Every change under the lock is one call, so a panic leaves the map whole.
    fn children(&self) -> MutexGuard<'_, HashMap<String, watch::Receiver<bool>>> {
        self.children.lock()
    }
}

/// Why a worker could not be started. The run ends with this error, so that it can be sent again.
fn start_failed(error: io::Error) -> RunError {
    let out_of_descriptors = [Errno::MFILE, Errno::NFILE].map(|errno| Some(errno.raw_os_error()));
    let advice = match out_of_descriptors.contains(&error.raw_os_error()) {
        true => {
            "send the prompt again when fewer streams and agents are open, or raise the limit on open files"
        }
        false => "see `qd doctor` and the log",
    };
    RunError::new("worker_not_started", format!("could not start a worker: {error}; {advice}"))
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
    /// Until when the process may not listen yet, if this daemon started it and has not connected to it.
    listens_by: Option<Instant>,
    /// Whether the process counts as dead. It may still be exiting.
    found_dead: bool,
    /// Set if the process holds the agents of several sessions.
    shared: Option<SharedHostLink>,
}

/// One link's part in a shared process.
struct SharedHostLink {
    /// The process into which new agents are put.
    current: Arc<tokio::sync::Mutex<Option<SharedHost>>>,
    /// Held by every link to the process.
    links: Arc<()>,
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
        loop {
            match record::connect_to_worker(&self.dir, &self.host).await {
                Ok(stream) => {
                    self.listens_by = None;
                    let wire: Box<dyn ByteStream> = Box::new(stream);
                    let upgraded = Socket::connect(wire, &upgrade_request(SUBPROTOCOL)).await;
                    return match upgraded {
                        Ok((socket, true)) => Ok(socket),
                        Ok((_, false)) => {
                            let reason = "its socket belongs to another program";
                            Err(WorkerUnreachable::RetryLater(reason.to_owned()))
                        }
                        Err(error) => Err(WorkerUnreachable::RetryLater(format!("on its socket, {error}"))),
                    };
                }
                Err(_) if !self.is_alive() => {
                    self.found_dead = true;
                    return Err(WorkerUnreachable::Dead);
                }
                Err(_) if self.listens_by.is_some_and(|by| Instant::now() < by) => {
                    tokio::time::sleep(CONNECT_RETRY).await;
                }
                Err(error) => {
                    let reason = format!("connecting to its socket failed: {error}");
                    return Err(WorkerUnreachable::RetryLater(reason));
                }
            }
        }
    }

    async fn end_worker(&mut self) -> WorkerEnding {
        if let Some(SharedHostLink { current, links }) = self.shared.take() {
            // New agents get another process, which can be reached.
            current.lock().await.take_if(|shared| shared.id == self.host);
            if Arc::into_inner(links).is_none() {
                return WorkerEnding::LeftRunning;
            }
        }
        let doomed = DoomedWorker {
            dir: self.dir.clone(),
            host: self.host.clone(),
            worker: self.worker.clone(),
            mark: self.mark.clone(),
            exit_wait: if self.found_dead { EXIT_WAIT } else { Duration::ZERO },
        };
        let ending = tokio::task::spawn_blocking(move || end_worker(&doomed)).await;
        let ending = ending.unwrap_or(WorkerEnding::NotFound);
        tracing::warn!(worker = %self.worker, ?ending, "a worker is lost; ended the processes of its agent");
        ending
    }

    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        for _ in 0..SPOOL_READ_TRIES {
            let folder = FileSpool::folder(&self.dir, &self.worker);
            let read = move || FileSpool::read_undelivered(&folder, after);
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
