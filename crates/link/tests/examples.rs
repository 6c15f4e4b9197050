//! The example workers, in Rust and in Python, do what their headers say: one test for both, by our own client.
#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use qd_link::{Job, PlainClient, Serve, Server, plain};
use qd_protocol::frame::plain::{FromWorker, Status};
use qd_protocol::link::Said;

#[path = "../examples/worker.rs"]
#[expect(dead_code, reason = "its `main` is not needed here")]
mod worker;

#[tokio::test]
async fn the_rust_worker_does_what_it_says() {
    let server = Server::bind("127.0.0.1:0").await.unwrap();
    let endpoint = server.endpoint();
    let _served = tokio::spawn(server.serve(worker::shout, Serve::Many));
    drive(&endpoint).await;
}

#[tokio::test]
async fn the_python_worker_does_what_it_says() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/worker.py");
    let mut python = Command::new("python3");
    // `-B`: no compiled files among the examples.
    let child = python.args(["-B", script]).stdout(Stdio::piped()).spawn().expect("this test needs python3");
    let mut child = Owned(child);
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let endpoint = line.trim_end().strip_prefix("listening on ").unwrap();
    drive(endpoint).await;
}

/// Ends with the test.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// All that a worker of this kind must do.
async fn drive(endpoint: &str) {
    let mut client = PlainClient::connect(endpoint, None).await.unwrap();

    start(&mut client, "hello big world").await;
    let run = rest(&mut client).await;
    assert_eq!(run.tokens, ["HELLO ", "BIG ", "WORLD "]);
    assert_eq!((run.status, run.result.as_deref()), (Status::Completed, Some("HELLO BIG WORLD")));
    assert!(run.complete);

    // Long enough that nobody is done before the message, the cancel or the next run is there.
    let long = "word ".repeat(50);
    start(&mut client, &long).await;
    assert!(matches!(next(&mut client).await, FromWorker::Event { .. }));
    client.message("and more").await.unwrap();
    assert!(rest(&mut client).await.result.unwrap().ends_with(" WORD AND MORE"));

    start(&mut client, &long).await;
    next(&mut client).await;
    client.cancel().await.unwrap();
    assert_eq!(rest(&mut client).await.status, Status::Cancelled);

    start(&mut client, &long).await;
    start(&mut client, "next").await;
    assert_eq!(rest(&mut client).await.status, Status::Cancelled);
    assert_eq!(rest(&mut client).await.tokens, ["NEXT "]);

    for (approved, status) in [(true, Status::Completed), (false, Status::Error)] {
        start(&mut client, "rm this").await;
        let FromWorker::ApprovalRequest { id, body } = next(&mut client).await else { panic!("it asks") };
        assert_eq!(body.resource, "rm this");
        client.approval_reply("wrong", !approved).await.unwrap();
        client.approval_reply(id, approved).await.unwrap();
        assert_eq!(rest(&mut client).await.status, status);
    }
    client.close().await;
}

async fn start(client: &mut PlainClient, assignment: &str) {
    client.run(Job::from(assignment)).await.unwrap();
}

async fn next(client: &mut PlainClient) -> FromWorker {
    tokio::time::timeout(Duration::from_secs(30), client.next()).await.expect("it comes").unwrap()
}

struct Run {
    tokens: Vec<String>,
    complete: bool,
    status: Status,
    result: Option<String>,
}

async fn rest(client: &mut PlainClient) -> Run {
    let (mut tokens, mut complete) = (Vec::new(), false);
    loop {
        match next(client).await {
            FromWorker::Event { event } => match plain::said(event) {
                Some(Said::Text { text }) => tokens.push(text),
                None => complete = true,
                Some(other) => panic!("{other:?}"),
            },
            FromWorker::Terminal { status, result, .. } => return Run { tokens, complete, status, result },
            FromWorker::ApprovalRequest { .. } => panic!("it asks"),
        }
    }
}
