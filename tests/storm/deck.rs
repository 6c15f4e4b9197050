//! Everything that a storm runs: the daemon behind a proxy and a faulty libc, a joined machine, a worker with a URL,
//! two workspaces. Clients and faults share it. It starts, breaks and heals; it decides nothing.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hyper::Method;
use parking_lot::Mutex;
use qd_testkit::git::make_repository;
use qd_testkit::home::signal;
use qd_testkit::stream::summarize_events;
use qd_testkit::{
    FaultyLibc, ObservedProcess, TestClient, TestCommand, TestDaemon, TestEvent, TestHome, TestProxy,
};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::readers::StormReaderKind;
use super::record::{StormRecord, StormReport, StormSession, StormViolation};
use super::{StormFaultLevel, StormOptions};

/// How long one request may take before the client gives up, as a person would. A stopped daemon answers nothing.
const REQUEST_LIMIT: Duration = Duration::from_secs(20);
/// How long it may take if nothing is broken. A busy machine may need a while for a merge; longer means never.
const CALM_REQUEST_LIMIT: Duration = Duration::from_secs(120);
/// The label of the joined machine: sessions of the agent `script@box` run there.
pub(crate) const LABEL: &str = "box";

/// A process on another machine, and how it is started again.
#[derive(Debug)]
pub(crate) struct OtherMachine {
    home: TestHome,
    args: Vec<String>,
    /// What it prints when it is ready.
    ready: &'static str,
    worker: Option<TestCommand>,
}

impl OtherMachine {
    async fn start(args: &[&str], ready: &'static str) -> Self {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut machine = Self { home: TestHome::new(), args, ready, worker: None };
        machine.start_again().await;
        machine
    }

    /// Starts the worker if it does not run.
    async fn start_again(&mut self) {
        let alive = self.pid().and_then(ObservedProcess::find).is_some_and(|process| process.is_alive());
        if !alive {
            let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
            let mut worker = self.home.start(&args);
            worker.wait_for_stdout(self.ready).await;
            self.worker = Some(worker);
        }
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.worker.as_ref().map(TestCommand::pid)
    }
}

/// What this machine can confine agents with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SandboxSupport {
    pub(crate) deck: bool,
    pub(crate) workspace: bool,
    pub(crate) network_off: bool,
}

impl SandboxSupport {
    /// Finds out by sessions that ask for it.
    async fn find(client: &TestClient, workspace: &str) -> Self {
        let can = async |settings: Value| {
            let path = format!("/v1/workspaces/{workspace}/sessions");
            let response = client.post(&path, &settings).await;
            let id = response.json()["id"].as_str().unwrap_or_default().to_owned();
            if response.status == 201 {
                client.delete(&format!("{path}/{id}")).await.expect(200);
            }
            response.status == 201
        };
        Self {
            deck: can(json!({ "agent": "script", "sandbox": "deck" })).await,
            workspace: can(json!({ "agent": "script", "sandbox": "workspace" })).await,
            network_off: can(json!({ "agent": "script", "sandbox": "deck", "network": "off" })).await,
        }
    }
}

#[derive(Debug)]
pub(crate) struct StormDeck {
    pub(crate) options: StormOptions,
    /// Set at the end: clients start nothing new, and nothing breaks any more.
    pub(crate) ending: AtomicBool,
    pub(crate) record: Mutex<StormRecord>,
    pub(crate) sessions: Mutex<Vec<StormSession>>,
    pub(crate) daemon: tokio::sync::Mutex<TestDaemon>,
    is_up: AtomicBool,
    pub(crate) machines: tokio::sync::Mutex<Vec<OtherMachine>>,
    pub(crate) libc: FaultyLibc,
    pub(crate) proxy: TestProxy,
    pub(crate) unix: TestClient,
    pub(crate) tcp: TestClient,
    /// The agent of sessions that run on the worker with a URL.
    pub(crate) url_agent: Option<String>,
    pub(crate) support: SandboxSupport,
    pub(crate) home: PathBuf,
    /// A workspace outside git, and one that is a repository.
    pub(crate) plain_workspace: String,
    pub(crate) git_workspace: String,
    next_number: AtomicU64,
    /// The highest seq that anybody was told.
    pub(crate) last_seq: AtomicU64,
    /// Set at the end: the last seq of each reader's stream. `None` is the watcher.
    pub(crate) end_seqs: OnceLock<Vec<(Option<StormReaderKind>, u64)>>,
    /// Set when the checker no longer waits for readers.
    pub(crate) is_over: AtomicBool,
}

impl StormDeck {
    pub(crate) async fn start(options: StormOptions) -> Self {
        let home = TestHome::new();
        let (max_agents, idle_s) = if options.features.little_room { (4, 1) } else { (64, 30) };
        home.configure(&format!(
            "max_agents = {max_agents}\nidle_s = {idle_s}\nmin_free_mb = 0\nremote_lease_s = 5\n\
             log = \"info\"\n"
        ));
        let repository = home.sibling_path("repo");
        make_repository(&repository);
        let libc = FaultyLibc::below(&home.path());
        let daemon = TestDaemon::start_in(home, |daemon_options| {
            daemon_options.tcp();
            if options.faults == StormFaultLevel::All {
                daemon_options.faulty_libc(&libc);
            }
        })
        .await;
        let proxy = TestProxy::start(tcp_address(&daemon)).await;
        let unix = daemon.client();
        let tcp =
            TestClient::tcp(proxy.address()).with_header("host", "localhost").with_token(&daemon.token());
        let plain_workspace = daemon.workspace().await.id;
        let git_workspace = unix.workspace(&repository).await.id;
        let support = SandboxSupport::find(&unix, &plain_workspace).await;
        let (mut machines, mut url_agent) = (Vec::new(), None);
        if options.features.other_machines {
            let token = daemon.qd(&["workers", "token", LABEL, "--json"]).await.json();
            let url = format!("http://{}", proxy.address());
            let token = token["token"].as_str().expect("a token has a text");
            let join = ["worker", "join", &url, "--token", token, "--label", LABEL];
            machines.push(OtherMachine::start(&join, "joined ").await);
            let port = free_port();
            let address = format!("127.0.0.1:{port}");
            let listen = ["worker", "--listen", &address, "--agent", "script"];
            machines.push(OtherMachine::start(&listen, "listening on ").await);
            url_agent = Some(format!("worker:ws://{address}"));
        }
        Self {
            options,
            ending: AtomicBool::new(false),
            record: Mutex::default(),
            sessions: Mutex::default(),
            home: daemon.home.path(),
            daemon: tokio::sync::Mutex::new(daemon),
            is_up: AtomicBool::new(true),
            machines: tokio::sync::Mutex::new(machines),
            libc,
            proxy,
            unix,
            tcp,
            url_agent,
            support,
            plain_workspace,
            git_workspace,
            next_number: AtomicU64::new(1),
            last_seq: AtomicU64::new(0),
            end_seqs: OnceLock::new(),
            is_over: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    /// A number that nobody else has.
    pub(crate) fn number(&self) -> u64 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn record<T>(&self, change: impl FnOnce(&mut StormRecord) -> T) -> T {
        change(&mut self.record.lock())
    }

    pub(crate) fn violation(&self, session: Option<&str>, what: String) {
        self.record(|record| {
            record.violations.push(StormViolation { session: session.map(str::to_owned), what });
        });
    }

    /// Remembers when something was broken or healed.
    pub(crate) fn note_fault(&self, what: String) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let (second, ms) = (now.as_secs() % 86_400, now.subsec_millis());
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let line = format!("{hour:02}:{minute:02}:{second:02}.{ms:03} {what}");
        self.record(|record| record.faults.push(line));
    }

    pub(crate) fn add_session(&self, session: StormSession) {
        self.sessions.lock().push(session);
    }

    pub(crate) fn remove_session(&self, id: &str) {
        self.sessions.lock().retain(|session| session.id != id);
    }

    pub(crate) fn open_sessions(&self) -> Vec<StormSession> {
        self.sessions.lock().clone()
    }

    /// One request. `None` if there was no complete response, because the daemon or the network was broken. A status
    /// that is not `allowed` is a violation, unless a fault explains it.
    pub(crate) async fn request(
        &self,
        client: &TestClient,
        method: Method,
        path: &str,
        body: Option<&Value>,
        allowed: &[u16],
    ) -> Option<(u16, Value)> {
        let body = body.map(|body| match body {
            // A fleet's file.
            Value::String(text) => text.clone().into(),
            body => body.to_string().into(),
        });
        let limit = match self.options.faults {
            StormFaultLevel::None => CALM_REQUEST_LIMIT,
            StormFaultLevel::Daemon | StormFaultLevel::All => REQUEST_LIMIT,
        };
        let sent = tokio::time::timeout(limit, client.send(method.clone(), path, body)).await;
        let Ok(response) = sent else {
            if self.options.faults == StormFaultLevel::None {
                self.violation(session_in(path), format!("{method} {path} was not answered"));
            }
            self.record(|record| record.count("unanswered"));
            return None;
        };
        let Ok(response) = response else {
            if self.options.faults == StormFaultLevel::None {
                self.violation(session_in(path), format!("{method} {path} broke"));
            }
            return None;
        };
        let answer: Value = serde_json::from_slice(&response.body).unwrap_or(Value::Null);
        let is_explained = match response.status {
            429 => true,
            503 => self.options.faults != StormFaultLevel::None,
            status => allowed.contains(&status),
        };
        if !is_explained {
            self.violation(session_in(path), format!("{response}"));
        }
        Some((response.status, answer))
    }

    /// Kills or stops the daemon, waits, and starts the next.
    pub(crate) async fn restart(&self, with: Signal, pause: Duration) {
        let mut daemon = self.daemon.lock().await;
        self.note_unexpected_exit(&mut daemon);
        if self.is_up.swap(false, Ordering::Relaxed) {
            if with == Signal::KILL {
                daemon.kill9().await;
            } else if let Some(code) = daemon.terminate().await.filter(|code| *code != 0) {
                self.violation(None, format!("the daemon exits with {code} after SIGTERM"));
            }
        }
        tokio::time::sleep(pause).await;
        self.libc.heal();
        self.start_daemon(&mut daemon).await;
        self.note_fault("the next daemon is up".to_owned());
    }

    async fn start_daemon(&self, daemon: &mut TestDaemon) {
        if !self.is_up.load(Ordering::Relaxed) {
            daemon.start_again().await;
            self.proxy.set_target(tcp_address(daemon));
            self.is_up.store(true, Ordering::Relaxed);
        }
    }

    /// A daemon that ended without being asked to is a violation.
    fn note_unexpected_exit(&self, daemon: &mut TestDaemon) {
        if !self.is_up.load(Ordering::Relaxed) {
            return;
        }
        if let Some(status) = daemon.exit_status() {
            self.violation(None, format!("the daemon ended by itself: {status}"));
            self.is_up.store(false, Ordering::Relaxed);
        }
    }

    /// Ends every fault: disk, network, stopped processes, dead machines, a dead daemon.
    pub(crate) async fn heal(&self) {
        self.note_fault("everything is healed".to_owned());
        self.libc.heal();
        self.proxy.pass();
        let mut daemon = self.daemon.lock().await;
        let ours = daemon.home.processes().into_iter().filter(|process| process.state == 'T');
        ours.for_each(|process| signal(process.pid, Signal::CONT));
        self.note_unexpected_exit(&mut daemon);
        self.start_daemon(&mut daemon).await;
        for pid in self.machines.lock().await.iter().filter_map(OtherMachine::pid) {
            signal(pid, Signal::CONT);
        }
        self.restart_machines().await;
    }

    /// Starts the other machines that are dead.
    pub(crate) async fn restart_machines(&self) {
        for machine in self.machines.lock().await.iter_mut() {
            machine.start_again().await;
        }
    }

    /// The report. If something was violated, the home is kept.
    pub(crate) async fn report(&self) -> StormReport {
        let daemon = self.daemon.lock().await;
        let record = self.record.lock();
        let kept = (!record.violations.is_empty()).then(|| {
            let kept = format!("/tmp/q-storm-{}", self.options.seed);
            let _old = std::fs::remove_dir_all(&kept);
            let _copied =
                Command::new("cp").args(["-a"]).arg(daemon.home.sibling_path("")).arg(&kept).status();
            let _written = std::fs::write(format!("{kept}/faults.log"), record.faults.join("\n"));
            kept
        });
        let mut traces = BTreeMap::new();
        for session in record.violations.iter().filter_map(|violation| violation.session.clone()) {
            let own = record.watched.iter().filter(|event| concerns(event, &session)).cloned();
            let own: Vec<TestEvent> = own.collect();
            traces.entry(session).or_insert_with(|| summarize_events(&own));
        }
        StormReport {
            seed: self.options.seed,
            runs: record.runs.len(),
            events: record.watched.len(),
            counts: record.counts.clone(),
            violations: record.violations.clone(),
            traces,
            kept,
        }
    }
}

fn concerns(event: &TestEvent, id: &str) -> bool {
    event.session_id.as_deref() == Some(id) || event.data["fleet_id"] == id
}

/// The session that a path is about.
fn session_in(path: &str) -> Option<&str> {
    path.split(['/', '?']).find(|part| part.starts_with("ses_"))
}

fn tcp_address(daemon: &TestDaemon) -> SocketAddr {
    let line = daemon.listening().iter().find_map(|line| line.strip_prefix("listening on http://"));
    line.expect("it listens on TCP").parse().expect("an address and a port")
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    listener.local_addr().expect("it is bound").port()
}

/// A body for a request that needs none.
pub(crate) fn empty() -> Value {
    json!({})
}
