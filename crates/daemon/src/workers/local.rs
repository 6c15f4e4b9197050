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

use qd_keeper::{Signal, proc};
use qd_link::record::{self, Files};
use qd_link::socket::{Socket, SocketError, Upgrade, Wire};
use qd_link::terminal::LookError;
use qd_link::{AgentLink, FileSpool, LinkOptions, Numbered, Route, Unreachable};
use qd_protocol::event::RunError;
use qd_protocol::frame::terminal;
use qd_protocol::frame::v1::SUBPROTOCOL;
use qd_protocol::link::UpNumber;
use qd_protocol::manifest::Driver;
use qd_protocol::worker::{AgentSpec, HostSpec};
use qd_protocol::{SessionId, WorkerId};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::watch;

use super::{Had, Keys, Waits, whereabouts};
use crate::home::Home;
use crate::random;

/// How long a new process may take until it listens.
const LISTEN: Duration = Duration::from_secs(10);
/// How often a process that does not listen yet is tried.
const TRY: Duration = Duration::from_millis(1);
/// How often a spool is read that cannot be, and how soon again: what is in it is lost otherwise.
const READS: u32 = 30;
const READ_AGAIN: Duration = Duration::from_secs(1);
/// How long what a lost agent started may take to end politely.
const GRACE: Duration = Duration::from_millis(200);

/// The worker processes of one home.
#[derive(Debug)]
pub(super) struct Hosts {
    dir: PathBuf,
    log: PathBuf,
    exe: PathBuf,
    keys: Keys,
    waits: Waits,
    /// The processes that we started and that have not ended.
    children: Arc<Mutex<HashMap<String, watch::Receiver<bool>>>>,
    /// The one that sessions share whose agents cost next to nothing.
    shared: tokio::sync::Mutex<Option<String>>,
}

impl Hosts {
    pub(super) fn new(home: &Home, exe: PathBuf, keys: Keys, waits: Waits) -> Self {
        let (dir, log) = (home.workers(), home.log());
        let (children, shared) = Default::default();
        Self { dir, log, exe, keys, waits, children, shared }
    }

    /// Starts a worker with this agent, or puts the agent into the shared one.
    pub(super) async fn launch(&self, spec: AgentSpec, options: LinkOptions) -> Result<AgentLink, RunError> {
        let worker = spec.worker.clone();
        // It needs no process of its own, and starts none.
        let shares = spec.manifest.as_ref().is_some_and(|manifest| manifest.driver() == Driver::Echo);
        let launched = match shares {
            true => self.share().await.map(|host| (host, Some(Box::new(spec)))),
            false => {
                let host = worker.to_string();
                self.spawn(&host, vec![spec]).await.map(|()| (host, None))
            }
        };
        let (host, start) = launched.map_err(|error| {
            let message = format!("a worker could not be started: {error}; see `qd doctor` and the log");
            RunError::new("worker_not_started", message)
        })?;
        Ok(self.open(&worker, host, LinkOptions { start, ..options }))
    }

    /// The link to a worker that there was.
    pub(super) fn attach(&self, had: &Had, options: LinkOptions) -> AgentLink {
        self.open(&had.worker, self.host_of(&had.worker), options)
    }

    /// A connection to the terminal of a worker's agent.
    pub(super) async fn look(
        &self,
        session: &SessionId,
        worker: &WorkerId,
    ) -> Result<Socket<Box<dyn Wire>>, LookError> {
        let host = self.host_of(worker);
        let stream: Box<dyn Wire> =
            Box::new(record::connect(&self.dir, &host).await.map_err(SocketError::from)?);
        let (mut socket, _) = Socket::client(stream, &upgrade(terminal::SUBPROTOCOL)).await?;
        let secret = self.keys.secret(&host);
        qd_link::terminal::look(&mut socket, session.clone(), worker.clone(), &secret).await?;
        Ok(socket)
    }

    /// The process that holds a worker, which most often is its own.
    fn host_of(&self, worker: &WorkerId) -> String {
        fs::read_to_string(whereabouts(&self.dir, worker)).unwrap_or_else(|_| worker.to_string())
    }

    /// Forgets the files of a worker that is no more.
    pub(super) fn clean_up(&self, worker: &WorkerId) {
        // What is not there need not be removed, and what cannot be is found by the next look for strays.
        let _absent = fs::remove_file(whereabouts(&self.dir, worker));
        let _absent = FileSpool::remove(&FileSpool::folder(&self.dir, worker));
        if !record::alive(&self.dir, worker.as_str())
            && let Some(files) = Files::of(&self.dir, worker.as_str())
        {
            let _absent = files.remove();
        }
    }

    /// Ends a worker's process, whatever it does. Its keeper then ends the rest. A shared one is left alone: it holds
    /// the agents of others.
    pub(super) fn kill(&self, worker: &WorkerId) {
        self.signal(|id| id == worker.as_str(), Signal::KILL);
    }

    /// Ends the shared processes, of which nobody needs anything any more.
    pub(super) fn end_shared(&self) {
        self.signal(|id| id.starts_with(SHARED), Signal::TERM);
    }

    /// Signals the processes of these names, if they are what their records say.
    fn signal(&self, which: impl Fn(&str) -> bool, signal: Signal) {
        for record in record::records(&self.dir) {
            let process = proc::Process::find(record.pid);
            let same = |found: &proc::Process| record.start_ticks == Some(found.start_ticks);
            if which(&record.agent_id)
                && let Some(process) = process.filter(same)
                && record::is_held_by(&self.dir, &record.agent_id, process.pid)
            {
                proc::signal(&process, signal);
            }
        }
    }

    /// Ends workers that no session knows: of a daemon that died between starting one and hearing of it. What a dead
    /// one left is removed.
    pub(super) async fn end_strays(&self, is_stray: impl Fn(&WorkerId) -> bool) {
        for found in record::records(&self.dir) {
            let Ok(worker) = WorkerId::parse(&found.agent_id) else { continue };
            let is_needed = match found.agent_id.starts_with(SHARED) {
                true => record::alive(&self.dir, &found.agent_id),
                false => !is_stray(&worker),
            };
            if is_needed {
                continue;
            }
            tracing::info!(%worker, pid = found.pid, "a worker that no session knows is ended");
            self.kill(&worker);
            let mark = self.keys.mark(&worker);
            let ended = tokio::task::spawn_blocking(move || proc::end_marked(&mark, GRACE)).await;
            tracing::debug!(%worker, ?ended, "what it had started is ended");
            self.clean_up(&worker);
        }
    }

    /// The process that cheap agents share, started if there is none.
    async fn share(&self) -> io::Result<String> {
        let mut shared = self.shared.lock().await;
        if let Some(host) = &*shared
            && (self.children().contains_key(host) || record::alive(&self.dir, host))
        {
            return Ok(host.clone());
        }
        let host =
            WorkerId::from_random(&random::bytes::<16>()).as_str().replacen(WorkerId::PREFIX, SHARED, 1);
        self.spawn(&host, Vec::new()).await?;
        *shared = Some(host.clone());
        Ok(host)
    }

    fn open(&self, worker: &WorkerId, host: String, options: LinkOptions) -> AgentLink {
        let route = Local {
            dir: self.dir.clone(),
            child: self.children().get(&host).cloned(),
            mark: self.keys.mark(worker),
            worker: worker.clone(),
            host: host.clone(),
        };
        if host != worker.as_str()
            && let Err(error) = write_private(&whereabouts(&self.dir, worker), &host)
        {
            tracing::warn!(%worker, %error, "a later daemon will not find this agent");
        }
        AgentLink::open(LinkOptions { secret: self.keys.secret(&host), ..options }, route)
    }

    async fn spawn(&self, host: &str, agents: Vec<AgentSpec>) -> io::Result<()> {
        let spec = HostSpec {
            id: host.to_owned(),
            dir: self.dir.clone(),
            secret: self.keys.secret(host),
            orphan_busy_ms: milliseconds(self.waits.orphan_busy),
            orphan_idle_ms: milliseconds(self.waits.orphan_idle),
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
const SHARED: &str = "shared-";

/// The way to one worker.
struct Local {
    dir: PathBuf,
    host: String,
    worker: WorkerId,
    mark: String,
    /// Turns true when the process ends, if we are the ones who started it.
    child: Option<watch::Receiver<bool>>,
}

/// How a worker's own socket is asked.
fn upgrade(subprotocol: &str) -> Upgrade {
    Upgrade {
        host: "worker".to_owned(),
        path: "/".to_owned(),
        subprotocol: Some(subprotocol.to_owned()),
        token: None,
    }
}

impl Local {
    /// Whether there is a process, as far as can be told: ours that has not ended, or one that holds its lock.
    fn is_alive(&self) -> bool {
        self.child.as_ref().is_some_and(|ended| !*ended.borrow()) || record::alive(&self.dir, &self.host)
    }
}

impl Route for Local {
    async fn dial(&mut self) -> Result<Socket<Box<dyn Wire>>, Unreachable> {
        let began = tokio::time::Instant::now();
        loop {
            match record::connect(&self.dir, &self.host).await {
                Ok(stream) => {
                    let wire: Box<dyn Wire> = Box::new(stream);
                    return match Socket::client(wire, &upgrade(SUBPROTOCOL)).await {
                        Ok((socket, true)) => Ok(socket),
                        Ok((_, false)) | Err(_) => Err(Unreachable::Later),
                    };
                }
                Err(_) if !self.is_alive() => return Err(Unreachable::Dead),
                Err(_) if began.elapsed() > LISTEN => return Err(Unreachable::Later),
                Err(_) => tokio::time::sleep(TRY).await,
            }
        }
    }

    async fn remains(&mut self, after: UpNumber) -> Vec<Numbered> {
        for _ in 0..READS {
            let (dir, worker, mark) = (self.dir.clone(), self.worker.clone(), self.mark.clone());
            let read = move || {
                // What its agent had started first: nothing may come from it any more.
                let ended = proc::end_marked(&mark, GRACE);
                tracing::warn!(%worker, ?ended, "a worker is lost");
                FileSpool::remains(&FileSpool::folder(&dir, &worker), after)
            };
            match tokio::task::spawn_blocking(read).await.map_err(io::Error::other).flatten() {
                Ok(remains) => return remains,
                Err(error) => {
                    tracing::error!(worker = %self.worker, %error, "a lost worker's spool cannot be read");
                    tokio::time::sleep(READ_AGAIN).await;
                }
            }
        }
        Vec::new()
    }
}
