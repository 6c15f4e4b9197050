//! Worker processes of both kinds: the time to start one with its agent, and the time to kill what an agent started.
//! This binary stands in for `qd`: executed again, it is the worker, the keeper or the scripted agent, with the same
//! code.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bamboo_subagent::executor::EchoExecutor;
use bamboo_subagent::provision::ProvisionSpec;
use bamboo_subagent::{WsServer, discovery::Fabric, spawn_worker};
use qd_link::record::connect_to_worker;
use qd_link::{AgentLink, LinkEvent, LinkOptions, NumberedUpdate, WorkerConnector, WorkerUnreachable};
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret, WorkerHostSpec};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use qd_worker_sdk::socket::{ByteStream, ClientUpgrade, Socket};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::process::Child;

/// Argument that makes this binary their worker.
const THEIRS: &str = "their-worker";
/// Number of processes in a killed turn. They ignore SIGTERM and have left their session.
pub(crate) const ESCAPEES: u32 = 10;
/// Interval at which a worker's socket is tried until it exists.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Runs this process as a worker, keeper, agent or their worker, if it was executed again as one.
pub(crate) fn run_child_role() -> Option<ExitCode> {
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

/// As in their own demonstration: read the specification from stdin, bind, publish the record.
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

/// Time from nothing to a worker of theirs that has published its address.
pub(crate) async fn start_theirs() -> Duration {
    let dir = tempfile::tempdir().expect("a folder");
    let spec = json!({
        "version": 1, "identity": { "child_id": "one" }, "executor": { "kind": "echo" }, "fabric_dir": dir.path(),
    });
    let spec = serde_json::from_value(spec).expect("one of their specifications");
    let started_at = Instant::now();
    let wait = Duration::from_secs(30);
    let spawned = spawn_worker(&this_program(), &[THEIRS.to_owned()], &spec, wait).await.expect("it starts");
    let elapsed = started_at.elapsed();
    spawned.kill().await;
    elapsed
}

/// Time from nothing to an agent of ours that is ready.
pub(crate) async fn start_ours(agent: &str) -> Duration {
    let started_at = Instant::now();
    let started = OurWorker::start(agent).await;
    let elapsed = started_at.elapsed();
    started.shut_down().await;
    elapsed
}

/// Time from the kill command to the terminal of a turn that started processes which ignore SIGTERM and run in their
/// own sessions. None of them is left at the terminal.
pub(crate) async fn kill_ours() -> Duration {
    let mut ours = OurWorker::start("script").await;
    let argv = ["sh", "-c", "trap '' TERM; sleep 1000 & wait"];
    let spawn = json!({ "spawn": { "argv": argv, "setsid": true, "double_fork": true } });
    let mut steps = vec![spawn; ESCAPEES as usize];
    steps.extend([json!({ "say": "all" }), json!({ "ignore_cancel": true }), json!({ "sleep_ms": 600_000 })]);
    let run = RunId::parse("run_1").expect("a good id");
    let prompt = serde_json::Value::from(steps).to_string();
    let (files, messages, limits) = (Vec::new(), Vec::new(), TurnLimits::default());
    ours.link.send(AgentCommand::Prompt {
        number: EventNumber(1),
        run: run.clone(),
        prompt,
        mode: None,
        files,
        messages,
        limits,
    });
    ours.wait_for_update(|update| format!("{update:?}").contains("all\"").then_some(())).await;
    ours.link.send(AgentCommand::Cancel { number: EventNumber(2), run: run.clone() });
    let started_at = Instant::now();
    ours.link.send(AgentCommand::Kill { number: EventNumber(2), run });
    let processes = ours.wait_for_update(|update| match update {
        AgentUpdate::TurnEnded { outcome, .. } => Some(outcome.processes.clone()),
        _ => None,
    });
    let processes = processes.await;
    let elapsed = started_at.elapsed();
    assert!(processes.killed >= ESCAPEES && processes.survivors == 0, "{processes:?}");
    ours.shut_down().await;
    elapsed
}

/// Time that the kernel itself takes to kill and reap as many children.
pub(crate) fn kill_and_reap() -> Duration {
    let start = |_| Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().expect("it starts");
    let mut children: Vec<_> = (0..ESCAPEES).map(start).collect();
    let started_at = Instant::now();
    for child in &mut children {
        child.kill().expect("it is ours");
    }
    for child in &mut children {
        child.wait().expect("it is ours");
    }
    started_at.elapsed()
}

fn this_program() -> PathBuf {
    std::env::current_exe().expect("this binary has a path")
}

/// A worker process of ours with one agent, and the daemon's side of its link.
struct OurWorker {
    dir: tempfile::TempDir,
    child: Child,
    link: AgentLink,
}

impl OurWorker {
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
        let connector = UnixConnector { dir: dir.path().to_owned(), id: worker.to_string() };
        let (software, reach_timeout) = ("bench".to_owned(), Duration::from_secs(60));
        let options = LinkOptions {
            session,
            worker,
            secret,
            journalled: UpdateNumber(0),
            reach_timeout,
            software,
            start: None,
        };
        let mut started = Self { dir, child, link: AgentLink::open(options, connector) };
        started.wait_for_update(|update| matches!(update, AgentUpdate::Ready { .. }).then_some(())).await;
        started
    }

    async fn wait_for_update<T>(&mut self, select: impl Fn(&AgentUpdate) -> Option<T>) -> T {
        loop {
            match self.link.next_event().await {
                LinkEvent::Updates(updates) => {
                    if let Some(last) = updates.last() {
                        self.link.ack(last.number);
                    }
                    if let Some(found) = updates.iter().find_map(|numbered| select(&numbered.update)) {
                        return found;
                    }
                }
                LinkEvent::Attached { .. } => {}
                other => panic!("the worker is gone: {other:?}"),
            }
        }
    }

    async fn shut_down(mut self) {
        self.link.close();
        // Acknowledge everything up to the end. After a killed turn the agent is already gone.
        while let LinkEvent::Updates(updates) = self.link.next_event().await {
            if let Some(last) = updates.last() {
                self.link.ack(last.number);
            }
        }
        // An echo worker stays alive for a moment to take more sessions, so it is killed.
        self.child.kill().await.expect("it was ours to end");
        self.dir.close().expect("it was ours to remove");
    }
}

struct UnixConnector {
    dir: PathBuf,
    id: String,
}

impl WorkerConnector for UnixConnector {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        // The daemon does the same: a process that was just started has no socket yet.
        let stream = loop {
            match connect_to_worker(&self.dir, &self.id).await {
                Ok(stream) => break stream,
                Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
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
        upgraded.map(|(socket, _)| socket).map_err(|error| WorkerUnreachable::RetryLater(error.to_string()))
    }

    async fn read_undelivered(&mut self, _: UpdateNumber) -> Vec<NumberedUpdate> {
        Vec::new()
    }
}
