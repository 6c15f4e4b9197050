//! A worker process, and the daemon's side of its connection.

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

/// Nothing here takes this long unless it never happens.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// The pause between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A worker process with a home of its own.
pub(crate) struct WorkerUnderTest {
    pub(crate) home: TempDir,
    pub(crate) child: Child,
    id: String,
}

/// The specification of a worker, for a test to change.
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

/// The specification of an agent of the worker `wrk_NAME`, with a mark of its own.
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
    /// Starts a worker with this specification.
    pub(crate) async fn start(home: TempDir, spec: &WorkerHostSpec) -> Self {
        Self::start_with_env(home, spec, []).await
    }

    /// The same, with more variables in its environment.
    pub(crate) async fn start_with_env<const N: usize>(
        home: TempDir,
        spec: &WorkerHostSpec,
        env: [(&str, &str); N],
    ) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_worker-under-test"))
            .arg("__worker")
            .envs(env)
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

    /// Starts a worker with one agent, after the test has changed the specification.
    pub(crate) async fn with(agent: &str, change: impl FnOnce(&mut WorkerHostSpec)) -> (Self, AgentSpec) {
        let home = tempfile::tempdir().unwrap();
        let spec = agent_spec(&home, agent, "one");
        let mut host = host_spec(&home, "wrk_one", vec![spec]);
        change(&mut host);
        let spec = host.agents[0].clone();
        (Self::start(home, &host).await, spec)
    }

    /// Starts a worker with one agent, attaches to it, and waits until the agent is ready.
    pub(crate) async fn attached(
        agent: &str,
        change: impl FnOnce(&mut WorkerHostSpec),
    ) -> (Self, DaemonSide) {
        let (worker, spec) = Self::with(agent, change).await;
        let mut daemon = worker.attach(&spec, 0, None);
        daemon.wait_for(|update| matches!(update, AgentUpdate::Ready { .. })).await;
        (worker, daemon)
    }

    /// Attaches a daemon that has journalled everything up to `journalled`.
    pub(crate) fn attach(
        &self,
        spec: &AgentSpec,
        journalled: u64,
        start: Option<Box<AgentSpec>>,
    ) -> DaemonSide {
        DaemonSide {
            link: self.link(spec, journalled, start),
            journalled,
            number: journalled,
            unread: Vec::new(),
        }
    }

    /// Attaches the same daemon after a crash: it knows what it has journalled, and gets everything after that again.
    pub(crate) fn attach_again(&self, spec: &AgentSpec, daemon: DaemonSide) -> DaemonSide {
        let DaemonSide { link, journalled, .. } = daemon;
        drop(link);
        DaemonSide { link: self.link(spec, journalled, None), ..daemon }
    }

    fn link(&self, spec: &AgentSpec, journalled: u64, start: Option<Box<AgentSpec>>) -> AgentLink {
        let route = TestWorkerRoute {
            dir: self.home.path().to_owned(),
            id: self.id.clone(),
            worker: spec.worker.clone(),
        };
        let options = LinkOptions {
            session: spec.session.clone(),
            worker: spec.worker.clone(),
            secret: secret(),
            journalled: UpdateNumber(journalled),
            reach_timeout: Duration::from_secs(60),
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

    pub(crate) async fn wait_for_exit(&mut self) -> ExitStatus {
        tokio::time::timeout(WAIT_MAX, self.child.wait()).await.unwrap().unwrap()
    }

    pub(crate) fn spool(&self, spec: &AgentSpec) -> PathBuf {
        FileSpool::folder(self.home.path(), &spec.worker)
    }

    /// The updates in the spool after this number.
    pub(crate) fn spooled_updates(&self, spec: &AgentSpec, after: u64) -> Vec<AgentUpdate> {
        let updates = FileSpool::read_undelivered(&self.spool(spec), UpdateNumber(after)).unwrap();
        updates.into_iter().map(|numbered| numbered.update).collect()
    }
}

pub(crate) fn kill(pid: u32, signal: qd_keeper::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Waits until a condition is true.
pub(crate) async fn eventually(mut condition: impl FnMut() -> bool) {
    let poll = async {
        while !condition() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::time::timeout(WAIT_MAX, poll).await.expect("the condition never became true");
}

/// Waits until no process of the agent is alive.
pub(crate) async fn wait_until_all_exited(spec: &AgentSpec) {
    eventually(|| procfs::find_marked(&spec.mark).is_empty()).await;
}

/// The content of all files below a folder, as one text.
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

/// Dials the worker.
struct TestWorkerRoute {
    dir: PathBuf,
    id: String,
    worker: WorkerId,
}

impl WorkerConnector for TestWorkerRoute {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let stream = match record::connect_to_worker(&self.dir, &self.id).await {
            Ok(stream) => stream,
            Err(error) if is_worker_alive(&self.dir, &self.id) => {
                return Err(WorkerUnreachable::RetryLater(error.to_string()));
            }
            Err(_) => return Err(WorkerUnreachable::Dead),
        };
        let upgrade = ClientUpgrade {
            host: "worker".to_owned(),
            path: "/".to_owned(),
            subprotocol: Some(v1::SUBPROTOCOL.to_owned()),
            token: None,
        };
        let stream: Box<dyn ByteStream> = Box::new(stream);
        match Socket::connect(stream, &upgrade).await {
            Ok((socket, true)) => Ok(socket),
            Ok((_, false)) => Err(WorkerUnreachable::RetryLater("another protocol".to_owned())),
            Err(error) => Err(WorkerUnreachable::RetryLater(error.to_string())),
        }
    }

    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        FileSpool::read_undelivered(&FileSpool::folder(&self.dir, &self.worker), after).unwrap()
    }
}

/// The daemon's side of one session: journals the updates in memory, and acknowledges them.
pub(crate) struct DaemonSide {
    pub(crate) link: AgentLink,
    /// The number of the last update in the journal.
    pub(crate) journalled: u64,
    number: u64,
    /// Updates received but not yet returned, in reverse order.
    unread: Vec<AgentUpdate>,
}

/// The text of a turn, and its outcome.
pub(crate) struct TurnEnd {
    pub(crate) text: String,
    pub(crate) outcome: TurnOutcome,
}

pub(crate) fn run_id(name: &str) -> RunId {
    RunId::parse(name).unwrap()
}

impl DaemonSide {
    fn next_number(&mut self) -> EventNumber {
        self.number += 1;
        EventNumber(self.number)
    }

    pub(crate) fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_within(name, prompt, TurnLimits::default());
    }

    pub(crate) fn prompt_within(&mut self, name: &str, prompt: &str, limits: TurnLimits) {
        let number = self.next_number();
        let (files, messages) = (Vec::new(), Vec::new());
        let prompt = prompt.to_owned();
        self.link.send(AgentCommand::Prompt {
            number,
            run: run_id(name),
            prompt,
            mode: None,
            files,
            messages,
            limits,
        });
    }

    pub(crate) fn cancel(&mut self, name: &str) {
        let number = self.next_number();
        self.link.send(AgentCommand::Cancel { number, run: run_id(name) });
    }

    pub(crate) fn kill(&mut self, name: &str) {
        self.link.send(AgentCommand::Kill { number: EventNumber(self.number), run: run_id(name) });
    }

    pub(crate) async fn next_update(&mut self) -> AgentUpdate {
        loop {
            if let Some(update) = self.unread.pop() {
                return update;
            }
            match tokio::time::timeout(WAIT_MAX, self.link.next_event()).await.expect("no update arrived") {
                LinkEvent::Updates(updates) => self.take(updates),
                LinkEvent::Attached { .. } | LinkEvent::Disconnected => {}
                LinkEvent::Gone(gone) => panic!("the worker is gone: {gone:?}"),
            }
        }
    }

    /// Collects all updates up to and including the first that matches.
    pub(crate) async fn wait_for(&mut self, matches: impl Fn(&AgentUpdate) -> bool) -> Vec<AgentUpdate> {
        let mut updates = Vec::new();
        loop {
            let update = self.next_update().await;
            let found = matches(&update);
            updates.push(update);
            if found {
                return updates;
            }
        }
    }

    /// Waits for this text in the answer.
    pub(crate) async fn wait_for_text(&mut self, expected: &str) -> String {
        let mut text = String::new();
        while !text.contains(expected) {
            if let AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } =
                self.next_update().await
            {
                text.push_str(&piece);
            }
        }
        text
    }

    /// Waits for the terminal of this run.
    pub(crate) async fn wait_for_end(&mut self, name: &str) -> TurnEnd {
        let mut text = String::new();
        loop {
            match self.next_update().await {
                AgentUpdate::TurnEnded { run: ended, outcome } if ended == run_id(name) => {
                    return TurnEnd { text, outcome };
                }
                AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } => text.push_str(&piece),
                _ => {}
            }
        }
    }

    /// Waits for the agent's `Gone`, and returns its reason.
    pub(crate) async fn wait_for_gone(&mut self) -> AgentExitReason {
        match self.wait_for(|update| matches!(update, AgentUpdate::Gone(_))).await.pop() {
            Some(AgentUpdate::Gone(gone)) => gone,
            other => panic!("unexpected update: {other:?}"),
        }
    }

    /// Waits until the link itself finds that the agent is gone. Also returns the updates before that.
    pub(crate) async fn wait_for_loss(&mut self) -> (Vec<AgentUpdate>, AgentExitReason) {
        let mut updates: Vec<AgentUpdate> = std::mem::take(&mut self.unread).into_iter().rev().collect();
        loop {
            match tokio::time::timeout(WAIT_MAX, self.link.next_event()).await.expect("no update arrived") {
                LinkEvent::Updates(received) => {
                    self.take(received);
                    updates.extend(std::mem::take(&mut self.unread).into_iter().rev());
                }
                LinkEvent::Attached { .. } | LinkEvent::Disconnected => {}
                LinkEvent::Gone(gone) => return (updates, gone),
            }
        }
    }

    /// Checks that numbers have no gap and no repeat, and acknowledges the updates at once.
    fn take(&mut self, updates: Vec<NumberedUpdate>) {
        for numbered in &updates {
            self.journalled += 1;
            assert_eq!(numbered.number.0, self.journalled, "{:?}", numbered.update);
        }
        self.link.ack(UpdateNumber(self.journalled));
        self.unread = updates.into_iter().rev().map(|numbered| numbered.update).collect();
    }
}
