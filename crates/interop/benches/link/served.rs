//! The workers, each a process of its own: what the assignment says is done by both in the same way, as far as their
//! interfaces let them.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use async_trait::async_trait;
use bamboo_subagent::{ChildExecutor, ChildOutcome, EventSink, RunSpec, SteerInbox, WsServer};
use qd_link::{RunAssignment, RunHandle, ServeMode, TurnOutcome, WorkerServer};
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// Which worker a process is, in its environment.
const ROLE: &str = "QD_BENCH_WORKER";
/// What is said again and again.
pub(crate) const WORD: &str = "word ";

/// Whose worker, and whose client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Theirs,
}

pub(crate) const OURS: Side = Side::Ours;
pub(crate) const THEIRS: Side = Side::Theirs;

/// What this process is, if it is a worker.
pub(crate) fn role() -> Option<Side> {
    match std::env::var(ROLE).ok()?.as_str() {
        "ours" => Some(Side::Ours),
        _ => Some(Side::Theirs),
    }
}

/// Serves until whoever started this process has closed its stdin.
pub(crate) async fn serve(side: Side) {
    let done = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let serving = async {
        match side {
            Side::Ours => {
                let server = WorkerServer::bind("127.0.0.1:0").await.expect("a free port");
                println!("{}", server.endpoint());
                server.serve(say, ServeMode::Many).await.expect("it serves");
            }
            Side::Theirs => {
                let server = WsServer::bind_loopback().await.expect("a free port");
                println!("{}", server.ws_endpoint());
                server.serve(Arc::new(Words)).await.expect("it serves");
            }
        }
    };
    tokio::select! {
        _closed = done => {}
        () = serving => {}
    }
    // The thread that read stdin has ended; nothing else is worth waiting for.
    std::process::exit(0);
}

/// Says a word as often as the assignment says.
async fn say(job: RunAssignment, turn: RunHandle) -> TurnOutcome {
    let times: u64 = job.prompt.parse().expect("a number");
    for _ in 0..times {
        if turn.send_text(WORD).await.is_err() {
            return TurnOutcome::cancelled();
        }
    }
    TurnOutcome::completed("")
}

struct Words;

#[async_trait]
impl ChildExecutor for Words {
    async fn run(
        &self,
        spec: RunSpec,
        events: EventSink,
        _: SteerInbox,
        cancel: CancellationToken,
    ) -> ChildOutcome {
        let times: u64 = spec.assignment.parse().expect("a number");
        for number in 0..times {
            events.emit(json!({"type": "token", "content": WORD}));
            // Their sink never waits, so this does, now and then.
            if number % 64 == 63 {
                if cancel.is_cancelled() {
                    return ChildOutcome::cancelled();
                }
                tokio::task::yield_now().await;
            }
        }
        events.emit(json!({"type": "complete"}));
        ChildOutcome::completed("")
    }
}

/// A worker's process, which ends with this.
pub(crate) struct Worker {
    child: Child,
    pub(crate) endpoint: String,
}

impl Worker {
    pub(crate) fn start(side: Side) -> Self {
        let role = if side == OURS { "ours" } else { "theirs" };
        let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
        command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this binary starts again");
        let mut endpoint = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut endpoint).expect("it tells where it listens");
        Self { child, endpoint: endpoint.trim_end().to_owned() }
    }

    /// KiB.
    pub(crate) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it lives");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has a size");
        line.trim().trim_end_matches(" kB").parse().expect("the kernel writes numbers")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().expect("it was ours to wait for");
    }
}
