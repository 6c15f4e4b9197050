//! A worker process and a daemon's side of it: what the suites start, attach, kill and look at.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use qd_keeper::procfs;
use qd_link::record::{self, is_worker_alive};
use qd_link::socket::{ByteStream, ClientUpgrade, Socket};
use qd_link::{
    AgentLink, FileSpool, LinkEvent, LinkOptions, NumberedUpdate, WorkerConnector, WorkerUnreachable,
};
use qd_protocol::frame::v1;
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, TurnLimits, TurnOutcome, TurnUpdate, UpdateNumber,
};
use qd_protocol::worker::{AgentSpec, Secret, WorkerHostSpec};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

/// Nothing here takes so long unless it never happens.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often something is looked at that nobody tells us about.
const LOOK: Duration = Duration::from_millis(5);

/// A worker process in a home of its own.
pub(crate) struct WorkerUnderTest {
    pub(crate) home: TempDir,
    pub(crate) child: Child,
    id: String,
}

/// What a worker is started with, to be changed by a test.
pub(crate) fn host_spec(home: &TempDir, id: &str, agents: Vec<AgentSpec>) -> WorkerHostSpec {
    WorkerHostSpec {
        id: id.to_owned(),
        dir: home.path().to_owned(),
        secret: secret(),
        orphan_busy_ms: 600_000,
        orphan_idle_ms: 600_000,
        agents,
    }
}

/// An agent of the worker `wrk_NAME`, whose mark is its own.
pub(crate) fn agent_spec(home: &TempDir, agent: &str, name: &str) -> AgentSpec {
    let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(home.path()).unwrap());
    AgentSpec {
        mark: format!("test-{}-{inode}-{name}", std::process::id()),
        ..AgentSpec::new(
            SessionId::parse(&format!("ses_{name}")).unwrap(),
            WorkerId::parse(&format!("wrk_{name}")).unwrap(),
            agent,
            home.path().to_owned(),
        )
    }
}

pub(crate) fn secret() -> Secret {
    Secret("a secret between the two of us".to_owned())
}

impl WorkerUnderTest {
    /// Starts a process of this description.
    pub(crate) async fn start(home: TempDir, spec: &WorkerHostSpec) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_worker-under-test"))
            .arg("__worker")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&serde_json::to_vec(spec).unwrap()).await.unwrap();
        let worker = Self { home, child, id: spec.id.clone() };
        eventually(|| !record::read_records(worker.home.path()).is_empty()).await;
        worker
    }

    /// Starts a process with one agent, as a test changes its descriptions.
    pub(crate) async fn with(agent: &str, change: impl FnOnce(&mut WorkerHostSpec)) -> (Self, AgentSpec) {
        let home = tempfile::tempdir().unwrap();
        let spec = agent_spec(&home, agent, "one");
        let mut host = host_spec(&home, "wrk_one", vec![spec]);
        change(&mut host);
        let spec = host.agents[0].clone();
        (Self::start(home, &host).await, spec)
    }

    /// Starts a process with one agent and attaches to it.
    pub(crate) async fn attached(
        agent: &str,
        change: impl FnOnce(&mut WorkerHostSpec),
    ) -> (Self, DaemonSide) {
        let (worker, spec) = Self::with(agent, change).await;
        let mut daemon = worker.attach(&spec, 0, None);
        daemon.until(|up| matches!(up, AgentUpdate::Ready { .. })).await;
        (worker, daemon)
    }

    /// A daemon that has journalled everything up to `taken`.
    pub(crate) fn attach(&self, spec: &AgentSpec, taken: u64, start: Option<Box<AgentSpec>>) -> DaemonSide {
        DaemonSide { link: self.link(spec, taken, start), taken, number: taken, heard: Vec::new() }
    }

    /// The same daemon after a crash: what it has journalled it knows, all else is to be said again.
    pub(crate) fn attach_again(&self, spec: &AgentSpec, daemon: DaemonSide) -> DaemonSide {
        let DaemonSide { link, taken, .. } = daemon;
        drop(link);
        DaemonSide { link: self.link(spec, taken, None), ..daemon }
    }

    fn link(&self, spec: &AgentSpec, taken: u64, start: Option<Box<AgentSpec>>) -> AgentLink {
        let route = TestWorkerRoute {
            dir: self.home.path().to_owned(),
            id: self.id.clone(),
            worker: spec.worker.clone(),
        };
        let options = LinkOptions {
            session: spec.session.clone(),
            worker: spec.worker.clone(),
            secret: secret(),
            journalled: UpdateNumber(taken),
            software: "test".to_owned(),
            start,
        };
        AgentLink::open(options, route)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().unwrap()
    }

    pub(crate) fn signal(&self, signal: qd_keeper::Signal) {
        kill(self.pid(), signal);
    }

    /// Waits for the end of the process.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        tokio::time::timeout(PATIENCE, self.child.wait()).await.unwrap().unwrap()
    }

    pub(crate) fn spool(&self, spec: &AgentSpec) -> PathBuf {
        FileSpool::folder(self.home.path(), &spec.worker)
    }

    /// What the spool holds, after this number.
    pub(crate) fn remains(&self, spec: &AgentSpec, after: u64) -> Vec<AgentUpdate> {
        let remains = FileSpool::read_undelivered(&self.spool(spec), UpdateNumber(after)).unwrap();
        remains.into_iter().map(|thing| thing.update).collect()
    }
}

pub(crate) fn kill(pid: u32, signal: qd_keeper::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Waits until it is so.
pub(crate) async fn eventually(mut is_so: impl FnMut() -> bool) {
    let look = async {
        while !is_so() {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::time::timeout(PATIENCE, look).await.expect("it never came to be so");
}

/// Waits until nothing lives that the agent started.
pub(crate) async fn nothing_left_of(spec: &AgentSpec) {
    eventually(|| procfs::find_marked(&spec.mark).is_empty()).await;
}

/// Everything below a folder, as one text.
pub(crate) fn all_text(folder: &Path) -> String {
    let mut text = String::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            text.push_str(&all_text(&entry.path()));
        } else if kind.is_file() {
            text.push_str(&String::from_utf8_lossy(&std::fs::read(entry.path()).unwrap()));
        }
    }
    text
}

/// The way to the worker.
struct TestWorkerRoute {
    dir: PathBuf,
    id: String,
    worker: WorkerId,
}

impl WorkerConnector for TestWorkerRoute {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let stream = match record::connect_to_worker(&self.dir, &self.id).await {
            Ok(stream) => stream,
            Err(_) if is_worker_alive(&self.dir, &self.id) => return Err(WorkerUnreachable::RetryLater),
            Err(_) => return Err(WorkerUnreachable::Dead),
        };
        let upgrade = ClientUpgrade {
            host: "worker".to_owned(),
            path: "/".to_owned(),
            subprotocol: Some(v1::SUBPROTOCOL.to_owned()),
            token: None,
        };
        let wire: Box<dyn ByteStream> = Box::new(stream);
        match Socket::connect(wire, &upgrade).await {
            Ok((socket, true)) => Ok(socket),
            _ => Err(WorkerUnreachable::RetryLater),
        }
    }

    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        FileSpool::read_undelivered(&FileSpool::folder(&self.dir, &self.worker), after).unwrap()
    }
}

/// A daemon's side of one session: journals what it hears in memory, and acknowledges it.
pub(crate) struct DaemonSide {
    pub(crate) link: AgentLink,
    /// The last number that is in the journal.
    pub(crate) taken: u64,
    number: u64,
    /// Heard and not looked at yet, in reverse.
    heard: Vec<AgentUpdate>,
}

/// The answer of a turn, and how it ended.
pub(crate) struct TurnEnd {
    pub(crate) text: String,
    pub(crate) outcome: TurnOutcome,
}

pub(crate) fn run(name: &str) -> RunId {
    RunId::parse(name).unwrap()
}

impl DaemonSide {
    fn next(&mut self) -> EventNumber {
        self.number += 1;
        EventNumber(self.number)
    }

    pub(crate) fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_within(name, prompt, TurnLimits::default());
    }

    pub(crate) fn prompt_within(&mut self, name: &str, prompt: &str, limits: TurnLimits) {
        let number = self.next();
        let (files, messages) = (Vec::new(), Vec::new());
        let prompt = prompt.to_owned();
        self.link.send(AgentCommand::Prompt { number, run: run(name), prompt, files, messages, limits });
    }

    pub(crate) fn cancel(&mut self, name: &str) {
        let number = self.next();
        self.link.send(AgentCommand::Cancel { number, run: run(name) });
    }

    pub(crate) fn kill(&mut self, name: &str) {
        self.link.send(AgentCommand::Kill { number: EventNumber(self.number), run: run(name) });
    }

    pub(crate) async fn hear(&mut self) -> AgentUpdate {
        loop {
            if let Some(up) = self.heard.pop() {
                return up;
            }
            match tokio::time::timeout(PATIENCE, self.link.next_event()).await.expect("nothing is heard") {
                LinkEvent::Updates(said) => self.take(said),
                LinkEvent::Attached { .. } | LinkEvent::Disconnected => {}
                LinkEvent::Gone(gone) => panic!("the worker is gone: {gone:?}"),
            }
        }
    }

    /// Everything up to what is waited for, and that.
    pub(crate) async fn until(&mut self, is_it: impl Fn(&AgentUpdate) -> bool) -> Vec<AgentUpdate> {
        let mut ups = Vec::new();
        loop {
            let up = self.hear().await;
            let found = is_it(&up);
            ups.push(up);
            if found {
                return ups;
            }
        }
    }

    /// Waits for these words of the answer.
    pub(crate) async fn until_text(&mut self, wanted: &str) -> String {
        let mut text = String::new();
        while !text.contains(wanted) {
            if let AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } = self.hear().await {
                text.push_str(&piece);
            }
        }
        text
    }

    /// Hears everything until the terminal of this run.
    pub(crate) async fn ended(&mut self, name: &str) -> TurnEnd {
        let mut text = String::new();
        loop {
            match self.hear().await {
                AgentUpdate::Terminal { run: ended, outcome } if ended == run(name) => {
                    return TurnEnd { text, outcome };
                }
                AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } => text.push_str(&piece),
                _ => {}
            }
        }
    }

    /// The agent's last word.
    pub(crate) async fn gone(&mut self) -> AgentExitReason {
        match self.until(|up| matches!(up, AgentUpdate::Gone(_))).await.pop() {
            Some(AgentUpdate::Gone(gone)) => gone,
            other => panic!("heard {other:?}"),
        }
    }

    /// What the link itself finds out, and what was heard before it.
    pub(crate) async fn lost(&mut self) -> (Vec<AgentUpdate>, AgentExitReason) {
        let mut ups: Vec<AgentUpdate> = std::mem::take(&mut self.heard).into_iter().rev().collect();
        loop {
            match tokio::time::timeout(PATIENCE, self.link.next_event()).await.expect("nothing is heard") {
                LinkEvent::Updates(said) => {
                    self.take(said);
                    ups.extend(std::mem::take(&mut self.heard).into_iter().rev());
                }
                LinkEvent::Attached { .. } | LinkEvent::Disconnected => {}
                LinkEvent::Gone(gone) => return (ups, gone),
            }
        }
    }

    /// Numbers have no hole and no repeat; what was heard is acknowledged at once.
    fn take(&mut self, said: Vec<NumberedUpdate>) {
        for thing in &said {
            self.taken += 1;
            assert_eq!(thing.number.0, self.taken, "{:?}", thing.update);
        }
        self.link.ack(UpdateNumber(self.taken));
        self.heard = said.into_iter().rev().map(|thing| thing.update).collect();
    }
}
