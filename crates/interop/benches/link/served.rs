//! The workers, each in its own process. Both do what the assignment says in the same way, as far as their APIs allow.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use async_trait::async_trait;
use bamboo_subagent::{ChildExecutor, ChildOutcome, EventSink, RunSpec, SteerInbox, WsServer};
use qd_catalog::Catalog;
use qd_link::LinkSubprotocol;
use qd_worker_sdk::serve::UnencryptedTcp;
use qd_worker_sdk::{RunAssignment, RunHandle, ServeMode, TurnOutcome, WorkerServer};
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// Environment variable that says which worker the process is.
const ROLE: &str = "QD_BENCH_WORKER";
/// The text that a run outputs repeatedly.
pub(crate) const WORD: &str = "word ";

/// Which implementation a worker or client comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Theirs,
    /// What `qd worker --agent echo` runs: our server with an agent of the product behind it. Its client is ours.
    Product,
}

pub(crate) const OURS: Side = Side::Ours;
pub(crate) const THEIRS: Side = Side::Theirs;
pub(crate) const PRODUCT: Side = Side::Product;

/// Which worker this process is, if it is one.
pub(crate) fn role() -> Option<Side> {
    match std::env::var(ROLE).ok()?.as_str() {
        "ours" => Some(Side::Ours),
        "product" => Some(Side::Product),
        _ => Some(Side::Theirs),
    }
}

/// Serves until the parent process closes our stdin.
pub(crate) async fn serve(side: Side) {
    let done = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let serving = async {
        match side {
            Side::Ours => {
                let server = bind_server().await;
                println!("{}", server.endpoint());
                server.serve(output_words, ServeMode::Many).await.expect("it serves");
            }
            Side::Product => {
                let server = bind_server().await;
                println!("{}", server.endpoint());
                let echo = Catalog::built_in().get("echo").expect("it is built in");
                server.serve(qd_worker::executor(echo), ServeMode::Many).await.expect("it serves");
            }
            Side::Theirs => {
                let server = WsServer::bind_loopback().await.expect("a free port");
                println!("{}", server.ws_endpoint());
                server.serve(Arc::new(WordExecutor)).await.expect("it serves");
            }
        }
    };
    tokio::select! {
        _closed = done => {}
        () = serving => {}
    }
    // The thread that read stdin has ended. Nothing else is worth waiting for.
    std::process::exit(0);
}

/// Our server, for peers with and without the subprotocol.
async fn bind_server() -> WorkerServer<UnencryptedTcp, LinkSubprotocol> {
    let server = WorkerServer::bind("127.0.0.1:0").await.expect("a free port");
    server.with_subprotocol(LinkSubprotocol::default())
}

/// Outputs the word as often as the assignment says.
async fn output_words(job: RunAssignment, turn: RunHandle) -> TurnOutcome {
    let times: u64 = job.prompt.parse().expect("a number");
    for _ in 0..times {
        if turn.send_text(WORD).await.is_err() {
            return TurnOutcome::cancelled();
        }
    }
    TurnOutcome::completed("")
}

struct WordExecutor;

#[async_trait]
impl ChildExecutor for WordExecutor {
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
            // Their sink never blocks, so this loop yields every 64 events.
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

/// A worker process. It ends when this value is dropped.
pub(crate) struct Worker {
    child: Child,
    pub(crate) endpoint: String,
}

impl Worker {
    pub(crate) fn start(side: Side) -> Self {
        let role = match side {
            Side::Ours => "ours",
            Side::Theirs => "theirs",
            Side::Product => "product",
        };
        let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
        command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this binary starts again");
        let mut endpoint = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut endpoint).expect("the worker prints its address");
        Self { child, endpoint: endpoint.trim_end().to_owned() }
    }

    /// Resident memory in KiB.
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
