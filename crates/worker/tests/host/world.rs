//! A worker process and a daemon's side of it: what the suites start, attach, kill and look at.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use qd_keeper::proc;
use qd_link::record::{self, alive};
use qd_link::socket::{Socket, Upgrade, Wire};
use qd_link::{AgentLink, FileSpool, Heard, LinkOptions, Numbered, Route, Unreachable};
use qd_protocol::frame::v1;
use qd_protocol::link::{Down, Gone, Outcome, Said, TurnLimits, Up, UpNumber};
use qd_protocol::worker::{AgentSpec, HostSpec, Secret};
use qd_protocol::{Number, RunId, SessionId, WorkerId};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

/// Nothing here takes so long unless it never happens.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often something is looked at that nobody tells us about.
const LOOK: Duration = Duration::from_millis(5);

/// A worker process in a home of its own.
pub(crate) struct Worker {
    pub(crate) home: TempDir,
    pub(crate) child: Child,
    id: String,
}

/// What a worker is started with, to be changed by a test.
pub(crate) fn host_spec(home: &TempDir, id: &str, agents: Vec<AgentSpec>) -> HostSpec {
    HostSpec {
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

impl Worker {
    /// Starts a process of this description.
    pub(crate) async fn start(home: TempDir, spec: &HostSpec) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_worker-under-test"))
            .arg("__worker")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&serde_json::to_vec(spec).unwrap()).await.unwrap();
        let worker = Self { home, child, id: spec.id.clone() };
        eventually(|| !record::records(worker.home.path()).is_empty()).await;
        worker
    }

    /// Starts a process with one agent, as a test changes its descriptions.
    pub(crate) async fn with(agent: &str, change: impl FnOnce(&mut HostSpec)) -> (Self, AgentSpec) {
        let home = tempfile::tempdir().unwrap();
        let spec = agent_spec(&home, agent, "one");
        let mut host = host_spec(&home, "wrk_one", vec![spec]);
        change(&mut host);
        let spec = host.agents[0].clone();
        (Self::start(home, &host).await, spec)
    }

    /// Starts a process with one agent and attaches to it.
    pub(crate) async fn attached(agent: &str, change: impl FnOnce(&mut HostSpec)) -> (Self, Daemon) {
        let (worker, spec) = Self::with(agent, change).await;
        let mut daemon = worker.attach(&spec, 0, None);
        daemon.until(|up| matches!(up, Up::Ready { .. })).await;
        (worker, daemon)
    }

    /// A daemon that has journalled everything up to `taken`.
    pub(crate) fn attach(&self, spec: &AgentSpec, taken: u64, start: Option<Box<AgentSpec>>) -> Daemon {
        Daemon { link: self.link(spec, taken, start), taken, number: taken, heard: Vec::new() }
    }

    /// The same daemon after a crash: what it has journalled it knows, all else is to be said again.
    pub(crate) fn attach_again(&self, spec: &AgentSpec, daemon: Daemon) -> Daemon {
        let Daemon { link, taken, .. } = daemon;
        drop(link);
        Daemon { link: self.link(spec, taken, None), ..daemon }
    }

    fn link(&self, spec: &AgentSpec, taken: u64, start: Option<Box<AgentSpec>>) -> AgentLink {
        let route =
            Local { dir: self.home.path().to_owned(), id: self.id.clone(), worker: spec.worker.clone() };
        let options = LinkOptions {
            session: spec.session.clone(),
            worker: spec.worker.clone(),
            secret: secret(),
            taken: UpNumber(taken),
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
    pub(crate) fn remains(&self, spec: &AgentSpec, after: u64) -> Vec<Up> {
        let remains = FileSpool::remains(&self.spool(spec), UpNumber(after)).unwrap();
        remains.into_iter().map(|thing| thing.up).collect()
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
    eventually(|| proc::marked(&spec.mark).is_empty()).await;
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
struct Local {
    dir: PathBuf,
    id: String,
    worker: WorkerId,
}

impl Route for Local {
    async fn dial(&mut self) -> Result<Socket<Box<dyn Wire>>, Unreachable> {
        let stream = match record::connect(&self.dir, &self.id).await {
            Ok(stream) => stream,
            Err(_) if alive(&self.dir, &self.id) => return Err(Unreachable::Later),
            Err(_) => return Err(Unreachable::Dead),
        };
        let upgrade = Upgrade {
            host: "worker".to_owned(),
            path: "/".to_owned(),
            subprotocol: Some(v1::SUBPROTOCOL.to_owned()),
            token: None,
        };
        let wire: Box<dyn Wire> = Box::new(stream);
        match Socket::client(wire, &upgrade).await {
            Ok((socket, true)) => Ok(socket),
            _ => Err(Unreachable::Later),
        }
    }

    async fn remains(&mut self, after: UpNumber) -> Vec<Numbered> {
        FileSpool::remains(&FileSpool::folder(&self.dir, &self.worker), after).unwrap()
    }
}

/// A daemon's side of one session: journals what it hears in memory, and acknowledges it.
pub(crate) struct Daemon {
    pub(crate) link: AgentLink,
    /// The last number that is in the journal.
    pub(crate) taken: u64,
    number: u64,
    /// Heard and not looked at yet, in reverse.
    heard: Vec<Up>,
}

/// The answer of a turn, and how it ended.
pub(crate) struct Ended {
    pub(crate) text: String,
    pub(crate) outcome: Outcome,
}

pub(crate) fn run(name: &str) -> RunId {
    RunId::parse(name).unwrap()
}

impl Daemon {
    fn next(&mut self) -> Number {
        self.number += 1;
        Number(self.number)
    }

    pub(crate) fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_within(name, prompt, TurnLimits::default());
    }

    pub(crate) fn prompt_within(&mut self, name: &str, prompt: &str, limits: TurnLimits) {
        let number = self.next();
        let (files, messages) = (Vec::new(), Vec::new());
        let prompt = prompt.to_owned();
        self.link.send(Down::Prompt { number, run: run(name), prompt, files, messages, limits });
    }

    pub(crate) fn cancel(&mut self, name: &str) {
        let number = self.next();
        self.link.send(Down::Cancel { number, run: run(name) });
    }

    pub(crate) fn kill(&mut self, name: &str) {
        self.link.send(Down::Kill { number: Number(self.number), run: run(name) });
    }

    pub(crate) async fn hear(&mut self) -> Up {
        loop {
            if let Some(up) = self.heard.pop() {
                return up;
            }
            match tokio::time::timeout(PATIENCE, self.link.hear()).await.expect("nothing is heard") {
                Heard::Said(said) => self.take(said),
                Heard::Attached { .. } | Heard::Lost => {}
                Heard::Gone(gone) => panic!("the worker is gone: {gone:?}"),
            }
        }
    }

    /// Everything up to what is waited for, and that.
    pub(crate) async fn until(&mut self, is_it: impl Fn(&Up) -> bool) -> Vec<Up> {
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
            if let Up::Said { what: Said::Text { text: piece }, .. } = self.hear().await {
                text.push_str(&piece);
            }
        }
        text
    }

    /// Hears everything until the terminal of this run.
    pub(crate) async fn ended(&mut self, name: &str) -> Ended {
        let mut text = String::new();
        loop {
            match self.hear().await {
                Up::Terminal { run: ended, outcome } if ended == run(name) => return Ended { text, outcome },
                Up::Said { what: Said::Text { text: piece }, .. } => text.push_str(&piece),
                _ => {}
            }
        }
    }

    /// The agent's last word.
    pub(crate) async fn gone(&mut self) -> Gone {
        match self.until(|up| matches!(up, Up::Gone(_))).await.pop() {
            Some(Up::Gone(gone)) => gone,
            other => panic!("heard {other:?}"),
        }
    }

    /// What the link itself finds out, and what was heard before it.
    pub(crate) async fn lost(&mut self) -> (Vec<Up>, Gone) {
        let mut ups: Vec<Up> = std::mem::take(&mut self.heard).into_iter().rev().collect();
        loop {
            match tokio::time::timeout(PATIENCE, self.link.hear()).await.expect("nothing is heard") {
                Heard::Said(said) => {
                    self.take(said);
                    ups.extend(std::mem::take(&mut self.heard).into_iter().rev());
                }
                Heard::Attached { .. } | Heard::Lost => {}
                Heard::Gone(gone) => return (ups, gone),
            }
        }
    }

    /// Numbers have no hole and no repeat; what was heard is acknowledged at once.
    fn take(&mut self, said: Vec<Numbered>) {
        for thing in &said {
            self.taken += 1;
            assert_eq!(thing.number.0, self.taken, "{:?}", thing.up);
        }
        self.link.ack(UpNumber(self.taken));
        self.heard = said.into_iter().rev().map(|thing| thing.up).collect();
    }
}
