//! Worker processes of both kinds, from nothing to an agent that is ready, and the end of what an agent started. This
//! binary stands in for `qd`: executed again it is the worker, the keeper and the scripted agent, by the same code.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bamboo_subagent::executor::EchoExecutor;
use bamboo_subagent::provision::ProvisionSpec;
use bamboo_subagent::{WsServer, discovery::Fabric, spawn_worker};
use qd_link::record::connect_to_worker;
use qd_link::socket::{ByteStream, ClientUpgrade, Socket};
use qd_link::{AgentLink, LinkEvent, LinkOptions, NumberedUpdate, WorkerConnector, WorkerUnreachable};
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret, WorkerHostSpec};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::process::Child;

/// What the argument of a process of their kind is.
const THEIRS: &str = "their-worker";
/// What ignores SIGTERM and has left its session, ten times.
pub(crate) const STUBBORN: u32 = 10;
/// How often a worker's socket is tried that is not there yet.
const TRY: Duration = Duration::from_millis(1);

/// What this process is, if it was executed again as one of these.
pub(crate) fn part() -> Option<ExitCode> {
    match std::env::args().nth(1)?.as_str() {
        "__worker" => Some(qd_worker::host::main()),
        "__keeper" => Some(qd_keeper::keeper_process::main()),
        "__script" => Some(qd_worker::script::main()),
        THEIRS => {
            crate::run(&mut tokio::runtime::Builder::new_current_thread(), their_worker());
            Some(ExitCode::SUCCESS)
        }
        _ => None,
    }
}

/// As their own demonstration does it: provisioned over stdin, bound, published.
async fn their_worker() {
    let spec = ProvisionSpec::read_from_stdin().await.expect("a specification");
    let server = WsServer::bind_loopback().await.expect("a free port");
    let record = json!({
        "agent_id": spec.identity.child_id, "role": spec.identity.role, "endpoint": server.ws_endpoint(),
        "pid": std::process::id(), "started_at": "2026-01-01T00:00:00Z",
        "lease_expires_at": "2100-01-01T00:00:00Z",
    });
    let record = serde_json::from_value(record).expect("one of their records");
    Fabric::at(&spec.fabric_dir).publish(&record).await.expect("a folder to publish in");
    server.serve(Arc::new(EchoExecutor)).await.expect("it serves");
}

/// From nothing to a worker of theirs that has published where it listens.
pub(crate) async fn start_theirs() -> Duration {
    let dir = tempfile::tempdir().expect("a folder");
    let spec = json!({
        "version": 1, "identity": { "child_id": "one" }, "executor": { "kind": "echo" }, "fabric_dir": dir.path(),
    });
    let spec = serde_json::from_value(spec).expect("one of their specifications");
    let begun = Instant::now();
    let wait = Duration::from_secs(30);
    let spawned = spawn_worker(&this_program(), &[THEIRS.to_owned()], &spec, wait).await.expect("it starts");
    let took = begun.elapsed();
    spawned.kill().await;
    took
}

/// From nothing to an agent of ours that is ready.
pub(crate) async fn start_ours(agent: &str) -> Duration {
    let begun = Instant::now();
    let started = Ours::start(agent).await;
    let took = begun.elapsed();
    started.end().await;
    took
}

/// From the order to kill a turn, which started processes that ignore SIGTERM in sessions of their own, to its end,
/// after which none of them is left.
pub(crate) async fn kill_ours() -> Duration {
    let mut ours = Ours::start("script").await;
    let argv = ["sh", "-c", "trap '' TERM; sleep 1000 & wait"];
    let spawn = json!({ "spawn": { "argv": argv, "setsid": true, "double_fork": true } });
    let mut steps = vec![spawn; STUBBORN as usize];
    steps.extend([json!({ "say": "all" }), json!({ "ignore_cancel": true }), json!({ "sleep_ms": 600_000 })]);
    let run = RunId::parse("run_1").expect("a good id");
    let prompt = serde_json::Value::from(steps).to_string();
    let (files, messages, limits) = (Vec::new(), Vec::new(), TurnLimits::default());
    ours.link.send(AgentCommand::Prompt {
        number: EventNumber(1),
        run: run.clone(),
        prompt,
        files,
        messages,
        limits,
    });
    ours.until(|up| format!("{up:?}").contains("all\"").then_some(())).await;
    ours.link.send(AgentCommand::Cancel { number: EventNumber(2), run: run.clone() });
    let begun = Instant::now();
    ours.link.send(AgentCommand::Kill { number: EventNumber(2), run });
    let processes = ours.until(|up| match up {
        AgentUpdate::Terminal { outcome, .. } => Some(outcome.processes),
        _ => None,
    });
    let processes = processes.await;
    let took = begun.elapsed();
    assert!(processes.killed >= STUBBORN && processes.survivors == 0, "{processes:?}");
    ours.end().await;
    took
}

/// What the kernel itself takes for as many children.
pub(crate) fn kill_and_reap() -> Duration {
    let start = |_| Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().expect("it starts");
    let mut children: Vec<_> = (0..STUBBORN).map(start).collect();
    let begun = Instant::now();
    for child in &mut children {
        child.kill().expect("it is ours");
    }
    for child in &mut children {
        child.wait().expect("it is ours");
    }
    begun.elapsed()
}

fn this_program() -> PathBuf {
    std::env::current_exe().expect("this binary has a path")
}

/// A worker process of ours with one agent, and the daemon's side of it.
struct Ours {
    dir: tempfile::TempDir,
    child: Child,
    link: AgentLink,
}

impl Ours {
    async fn start(agent: &str) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let (session, worker) = (SessionId::from_random(&[1; 16]), WorkerId::from_random(&[2; 16]));
        let secret = Secret("between us".to_owned());
        let spec = AgentSpec {
            mark: "bench".to_owned(),
            ..AgentSpec::new(session.clone(), worker.clone(), agent, dir.path())
        };
        let host = WorkerHostSpec {
            id: worker.to_string(),
            dir: dir.path().to_owned(),
            secret: secret.clone(),
            orphan_busy_ms: 60_000,
            orphan_idle_ms: 60_000,
            agents: vec![spec],
        };
        let mut command = tokio::process::Command::new(this_program());
        let mut child =
            command.arg("__worker").stdin(Stdio::piped()).spawn().expect("this binary starts again");
        let json = serde_json::to_vec(&host).expect("a specification has a JSON form");
        child.stdin.take().expect("it is piped").write_all(&json).await.expect("it listens");
        let route = Socketed { dir: dir.path().to_owned(), id: worker.to_string() };
        let software = "bench".to_owned();
        let options =
            LinkOptions { session, worker, secret, journalled: UpdateNumber(0), software, start: None };
        let mut started = Self { dir, child, link: AgentLink::open(options, route) };
        started.until(|up| matches!(up, AgentUpdate::Ready { .. }).then_some(())).await;
        started
    }

    async fn until<T>(&mut self, wanted: impl Fn(&AgentUpdate) -> Option<T>) -> T {
        loop {
            match self.link.next_event().await {
                LinkEvent::Updates(said) => {
                    if let Some(last) = said.last() {
                        self.link.ack(last.number);
                    }
                    if let Some(found) = said.iter().find_map(|thing| wanted(&thing.update)) {
                        return found;
                    }
                }
                LinkEvent::Attached { .. } => {}
                other => panic!("the worker is gone: {other:?}"),
            }
        }
    }

    async fn end(mut self) {
        self.link.close();
        // One whose turn was killed has said its last word already.
        while let LinkEvent::Updates(said) = self.link.next_event().await {
            if let Some(last) = said.last() {
                self.link.ack(last.number);
            }
        }
        // One for echo would wait a little for more sessions.
        self.child.kill().await.expect("it was ours to end");
        self.dir.close().expect("it was ours to remove");
    }
}

struct Socketed {
    dir: PathBuf,
    id: String,
}

impl WorkerConnector for Socketed {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        // As the daemon does it: there is no socket yet when the process has just been started.
        let stream = loop {
            match connect_to_worker(&self.dir, &self.id).await {
                Ok(stream) => break stream,
                Err(_) => tokio::time::sleep(TRY).await,
            }
        };
        let upgrade = ClientUpgrade {
            host: "worker".to_owned(),
            path: "/".to_owned(),
            subprotocol: Some(v1::SUBPROTOCOL.to_owned()),
            token: None,
        };
        let wire: Box<dyn ByteStream> = Box::new(stream);
        let upgraded = Socket::connect(wire, &upgrade).await;
        upgraded.map(|(socket, _)| socket).map_err(|_| WorkerUnreachable::RetryLater)
    }

    async fn read_undelivered(&mut self, _: UpdateNumber) -> Vec<NumberedUpdate> {
        Vec::new()
    }
}
