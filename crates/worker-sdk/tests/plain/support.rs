//! Shared by the tests: a server around a function, a client that reads whole runs, and a limit on every wait.

use std::time::Duration;

use qd_protocol::frame::plain::{PlainRunStatus, PlainWorkerFrame};
use qd_worker_sdk::{Executor, PlainClient, RunAssignment, ServeMode, WorkerServeError, WorkerServer};
use serde_json::Value;
use tokio::task::JoinHandle;

/// A safety net: a test that reaches it has failed.
const LIMIT: Duration = Duration::from_secs(30);

pub(crate) type ServerTask = JoinHandle<Result<(), WorkerServeError>>;

/// Any free port.
pub(crate) const ANY: &str = "127.0.0.1:0";

/// Serves on a port of its own. Returns the address and the server's task.
pub(crate) async fn serve(executor: impl Executor, mode: ServeMode) -> (String, ServerTask) {
    let server = WorkerServer::bind(ANY).await.unwrap();
    let endpoint = server.endpoint();
    (endpoint, tokio::spawn(server.serve(executor, mode)))
}

/// A client of a new server that serves any number of connections.
pub(crate) async fn connect_to_new_server(executor: impl Executor) -> PlainClient {
    let (endpoint, _) = serve(executor, ServeMode::Many).await;
    PlainClient::connect(&endpoint, None).await.unwrap()
}

pub(crate) async fn within<F: Future>(wait: F) -> F::Output {
    tokio::time::timeout(LIMIT, wait).await.expect("the wait ends in time")
}

/// What a client received of a run, up to its terminal.
#[derive(Debug, Default)]
pub(crate) struct ObservedPlainRun {
    pub(crate) events: Vec<Value>,
    pub(crate) status: Option<PlainRunStatus>,
    pub(crate) result: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) transcript: Vec<Value>,
}

impl ObservedPlainRun {
    /// The contents of the token events.
    pub(crate) fn tokens(&self) -> Vec<&str> {
        let tokens = self.events.iter().filter(|event| event["type"] == "token");
        tokens.map(|event| event["content"].as_str().unwrap()).collect()
    }
}

/// Reads one run to its end. The run must not ask for approval.
pub(crate) async fn read_run(client: &mut PlainClient) -> ObservedPlainRun {
    let mut run = ObservedPlainRun::default();
    loop {
        match within(client.next_frame()).await.unwrap() {
            PlainWorkerFrame::Event { event } => run.events.push(Value::Object(event)),
            PlainWorkerFrame::ApprovalRequest { .. } => panic!("unexpected approval request"),
            PlainWorkerFrame::Terminal { status, result, error, transcript } => {
                return ObservedPlainRun { status: Some(status), result, error, transcript, ..run };
            }
        }
    }
}

/// Starts a run and reads it to its end.
pub(crate) async fn run(client: &mut PlainClient, assignment: &str) -> ObservedPlainRun {
    client.start_run(RunAssignment::from(assignment)).await.unwrap();
    read_run(client).await
}

/// Waits for the next token and returns its content.
pub(crate) async fn token(client: &mut PlainClient) -> String {
    match within(client.next_frame()).await.unwrap() {
        PlainWorkerFrame::Event { event } => event["content"].as_str().unwrap().to_owned(),
        other => panic!("not a token: {other:?}"),
    }
}
