//! Worker processes on this machine: started as our own binary, reached by unix socket, told alive by the lock that
//! each holds for life. Their spools outlive them, and so may what their agents started: both are seen to here before a
//! session hears that its worker is lost.

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

use super::{WorkerAttachment, WorkerKeys, WorkerTimeouts, holder_file};
use crate::home::DaemonHome;
use crate::random;

/// How long a new process may take until it listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a process that does not listen yet is tried.
const CONNECT_RETRY: Duration = Duration::from_millis(1);
/// How often a spool is read that cannot be, and how soon again: what is in it is lost otherwise.
const SPOOL_READ_TRIES: u32 = 30;
const SPOOL_READ_RETRY: Duration = Duration::from_secs(1);
/// How long what a lost agent started may take to end politely.
const KILL_GRACE: Duration = Duration::from_millis(200);

/// The worker processes of one home.
#[derive(Debug)]
pub(super) struct LocalHosts {
    dir: PathBuf,
    log: PathBuf,
    exe: PathBuf,
    keys: WorkerKeys,
    timeouts: WorkerTimeouts,
    /// The processes that we started and that have not ended.
    children: Arc<Mutex<HashMap<String, watch::Receiver<bool>>>>,
    /// The one that sessions share whose agents cost next to nothing.
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
        // It needs no process of its own, and starts none.
        let shares = spec.manifest.as_ref().is_some_and(|manifest| manifest.driver() == DriverKind::Echo);
        let launched = match shares {
            true => self.shared_host().await.map(|host| (host, Some(Box::new(spec)))),
            false => {
                let host = worker.to_string();
                self.spawn_host(&host, vec![spec]).await.map(|()| (host, None))
            }
        };
        let (host, start) = launched.map_err(|error| {
            let message = format!("a worker could not be started: {error}; see `qd doctor` and the log");
            RunError::new("worker_not_started", message)
        })?;
        Ok(self.open_link(&worker, host, LinkOptions { start, ..options }))
    }

    /// The link to a worker that there was.
    pub(super) fn attach(&self, had: &WorkerAttachment, options: LinkOptions) -> AgentLink {
        self.open_link(&had.worker, self.host_of(&had.worker), options)
    }

    /// A connection to the terminal of a worker's agent.
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

    /// The process that holds a worker, which most often is its own.
    fn host_of(&self, worker: &WorkerId) -> String {
        fs::read_to_string(holder_file(&self.dir, worker)).unwrap_or_else(|_| worker.to_string())
    }

    /// Forgets the files of a worker that is no more.
    pub(super) fn remove_files(&self, worker: &WorkerId) {
        // What is not there need not be removed, and what cannot be is found by the next look for strays.
        let _absent = fs::remove_file(holder_file(&self.dir, worker));
        let _absent = FileSpool::remove(&FileSpool::folder(&self.dir, worker));
        if !record::is_worker_alive(&self.dir, worker.as_str())
            && let Some(files) = WorkerFiles::of(&self.dir, worker.as_str())
        {
            let _absent = files.remove();
        }
    }

    /// Ends a worker's process, whatever it does. Its keeper then ends the rest. A shared one is left alone: it holds
    /// the agents of others.
    pub(super) fn kill(&self, worker: &WorkerId) {
        self.signal_hosts(|id| id == worker.as_str(), Signal::KILL);
    }

    /// Ends the shared processes, of which nobody needs anything any more.
    pub(super) fn end_shared(&self) {
        self.signal_hosts(|id| id.starts_with(SHARED_PREFIX), Signal::TERM);
    }

    /// Signals the processes of these names, if they are what their records say.
    fn signal_hosts(&self, which: impl Fn(&str) -> bool, signal: Signal) {
        for record in record::read_records(&self.dir) {
            let process = procfs::ProcessIdentity::find(record.pid);
            let same = |found: &procfs::ProcessIdentity| record.start_ticks == Some(found.start_ticks);
            if which(&record.agent_id)
                && let Some(process) = process.filter(same)
                && record::is_lock_held_by(&self.dir, &record.agent_id, process.pid)
            {
                procfs::send_signal(&process, signal);
            }
        }
    }

    /// Ends workers that no session knows: of a daemon that died between starting one and hearing of it. What a dead
    /// one left is removed.
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
            tracing::info!(%worker, pid = found.pid, "a worker that no session knows is ended");
            self.kill(&worker);
            let mark = self.keys.mark(&worker);
            let ended = tokio::task::spawn_blocking(move || procfs::end_marked(&mark, KILL_GRACE)).await;
            tracing::debug!(%worker, ?ended, "what it had started is ended");
            self.remove_files(&worker);
        }
    }

    /// The process that cheap agents share, started if there is none.
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
        let route = LocalHostRoute {
            dir: self.dir.clone(),
            child: self.children().get(&host).cloned(),
            mark: self.keys.mark(worker),
            worker: worker.clone(),
            host: host.clone(),
        };
        if host != worker.as_str()
            && let Err(error) = write_private(&holder_file(&self.dir, worker), &host)
        {
            tracing::warn!(%worker, %error, "a later daemon will not find this agent");
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
        let (ended, ends) = watch::channel(false);
        self.children().insert(host.to_owned(), ends);
        let (children, host) = (Arc::clone(&self.children), host.to_owned());
        // Owned by the runtime and not by us: it only waits, so that the process leaves no zombie.
        tokio::spawn(async move {
            let status = child.wait().await;
            tracing::debug!(%host, ?status, "a worker has ended");
            children.lock().unwrap_or_else(PoisonError::into_inner).remove(&host);
            ended.send_replace(true);
        });
        if let Some(mut stdin) = stdin {
            let spec = serde_json::to_vec(&spec).map_err(io::Error::other)?;
            stdin.write_all(&spec).await?;
        }
        Ok(())
    }

    /// Every change under the lock is one call: a panic elsewhere leaves it whole.
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

/// What the name of a shared process begins with; it is no worker's own.
const SHARED_PREFIX: &str = "shared-";

/// The way to one worker.
struct LocalHostRoute {
    dir: PathBuf,
    host: String,
    worker: WorkerId,
    mark: String,
    /// Turns true when the process ends, if we are the ones who started it.
    child: Option<watch::Receiver<bool>>,
}

/// How a worker's own socket is asked.
fn upgrade_request(subprotocol: &str) -> ClientUpgrade {
    ClientUpgrade {
        host: "worker".to_owned(),
        path: "/".to_owned(),
        subprotocol: Some(subprotocol.to_owned()),
        token: None,
    }
}

impl LocalHostRoute {
    /// Whether there is a process, as far as can be told: ours that has not ended, or one that holds its lock.
    fn is_alive(&self) -> bool {
        self.child.as_ref().is_some_and(|ended| !*ended.borrow())
            || record::is_worker_alive(&self.dir, &self.host)
    }
}

impl WorkerConnector for LocalHostRoute {
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
                // What its agent had started first: nothing may come from it any more.
                let ended = procfs::end_marked(&mark, KILL_GRACE);
                tracing::warn!(%worker, ?ended, "a worker is lost");
                FileSpool::read_undelivered(&FileSpool::folder(&dir, &worker), after)
            };
            match tokio::task::spawn_blocking(read).await.map_err(io::Error::other).flatten() {
                Ok(remains) => return remains,
                Err(error) => {
                    tracing::error!(worker = %self.worker, %error, "a lost worker's spool cannot be read");
                    tokio::time::sleep(SPOOL_READ_RETRY).await;
                }
            }
        }
        Vec::new()
    }
}
