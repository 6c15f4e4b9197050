//! The examples do what their headers say, and the README shows one of them. One test drives both larger workers, in Rust
//! and Python, with our own client.
#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use qd_protocol::frame::plain::{PlainRunStatus, PlainWorkerFrame};
use qd_protocol::link::TurnUpdate;
use qd_worker_sdk::{PlainClient, RunAssignment, ServeMode, WorkerServer, plain};

#[path = "../examples/worker.rs"]
#[expect(dead_code, reason = "its `main` is not needed here")]
mod worker;

#[path = "../examples/hello.rs"]
#[expect(dead_code, reason = "its `main` is not needed here")]
mod hello;

#[path = "../examples/parent.rs"]
#[expect(dead_code, reason = "its `main` is not needed here")]
mod parent;

#[tokio::test]
async fn the_parent_gets_the_answer_of_the_smallest_worker() {
    let server = WorkerServer::bind("127.0.0.1:0").await.unwrap();
    let endpoint = server.endpoint();
    let _served = tokio::spawn(server.serve(hello::greet, ServeMode::Many));
    let (status, answer) = parent::assign(&endpoint, "say hello").await.unwrap();
    assert_eq!((status, answer.as_str()), (PlainRunStatus::Completed, "Hello! You want me to say hello."));
}

#[tokio::test]
async fn the_parent_approves_nothing() {
    let server = WorkerServer::bind("127.0.0.1:0").await.unwrap();
    let endpoint = server.endpoint();
    let _served = tokio::spawn(server.serve(worker::shout, ServeMode::Many));
    let (status, answer) = parent::assign(&endpoint, "rm this").await.unwrap();
    assert_eq!((status, answer.as_str()), (PlainRunStatus::Error, ""));
}

#[test]
fn the_readme_shows_the_smallest_worker_as_it_is() {
    let readme = include_str!("../README.md");
    let shown = readme.split("```rust\n").nth(1).unwrap().split("```").next().unwrap();
    let example = include_str!("../examples/hello.rs");
    let code = &example[example.find("use ").unwrap()..];
    assert_eq!(shown, code, "the README (left) is not examples/hello.rs (right)");
}

#[tokio::test]
async fn the_rust_worker_does_what_it_says() {
    let server = WorkerServer::bind("127.0.0.1:0").await.unwrap();
    let endpoint = server.endpoint();
    let _served = tokio::spawn(server.serve(worker::shout, ServeMode::Many));
    drive(&endpoint).await;
}

#[tokio::test]
async fn the_python_worker_does_what_it_says() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/worker.py");
    let mut python = Command::new("python3");
    // `-B`: write no compiled files into the examples.
    let child = python.args(["-B", script]).stdout(Stdio::piped()).spawn().expect("this test needs python3");
    let mut child = ExampleProcess(child);
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let endpoint = line.trim_end().strip_prefix("listening on ").unwrap();
    drive(endpoint).await;
}

/// Kills the process when the test ends.
struct ExampleProcess(Child);

impl Drop for ExampleProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Checks everything that an example worker has to do.
async fn drive(endpoint: &str) {
    let mut client = PlainClient::connect(endpoint, None).await.unwrap();

    start(&mut client, "hello big world").await;
    let run = read_run(&mut client).await;
    assert_eq!(run.tokens, ["HELLO ", "BIG ", "WORLD "]);
    assert_eq!((run.status, run.result.as_deref()), (PlainRunStatus::Completed, Some("HELLO BIG WORLD")));
    assert!(run.complete);

    // Long enough that the run is still active when the message, the cancel or the next run arrives.
    let long = "word ".repeat(50);
    start(&mut client, &long).await;
    assert!(matches!(next_frame(&mut client).await, PlainWorkerFrame::Event { .. }));
    client.send_message("and more").await.unwrap();
    assert!(read_run(&mut client).await.result.unwrap().ends_with(" WORD AND MORE"));

    start(&mut client, &long).await;
    next_frame(&mut client).await;
    client.cancel().await.unwrap();
    assert_eq!(read_run(&mut client).await.status, PlainRunStatus::Cancelled);

    start(&mut client, &long).await;
    start(&mut client, "next").await;
    assert_eq!(read_run(&mut client).await.status, PlainRunStatus::Cancelled);
    assert_eq!(read_run(&mut client).await.tokens, ["NEXT "]);

    for (approved, status) in [(true, PlainRunStatus::Completed), (false, PlainRunStatus::Error)] {
        start(&mut client, "rm this").await;
        let PlainWorkerFrame::ApprovalRequest { id, body } = next_frame(&mut client).await else {
            panic!("it must ask for approval")
        };
        assert_eq!(body.resource, "rm this");
        client.reply_to_approval("wrong", !approved).await.unwrap();
        client.reply_to_approval(id, approved).await.unwrap();
        assert_eq!(read_run(&mut client).await.status, status);
    }
    client.close().await;
}

async fn start(client: &mut PlainClient, assignment: &str) {
    client.start_run(RunAssignment::from(assignment)).await.unwrap();
}

async fn next_frame(client: &mut PlainClient) -> PlainWorkerFrame {
    tokio::time::timeout(Duration::from_secs(30), client.next_frame())
        .await
        .expect("a frame comes in time")
        .unwrap()
}

struct ExampleRun {
    tokens: Vec<String>,
    complete: bool,
    status: PlainRunStatus,
    result: Option<String>,
}

async fn read_run(client: &mut PlainClient) -> ExampleRun {
    let (mut tokens, mut complete) = (Vec::new(), false);
    loop {
        match next_frame(client).await {
            PlainWorkerFrame::Event { event } => match plain::parse_event(event) {
                Some(TurnUpdate::Text { text }) => tokens.push(text),
                None => complete = true,
                Some(other) => panic!("{other:?}"),
            },
            PlainWorkerFrame::Terminal { status, result, .. } => {
                return ExampleRun { tokens, complete, status, result };
            }
            PlainWorkerFrame::ApprovalRequest { .. } => panic!("unexpected approval request"),
        }
    }
}
