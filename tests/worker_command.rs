//! `qd worker` serves an agent to any parent that speaks the frames without a subprotocol. The frames themselves are
//! tested in `crates/link`; these tests cover the verb, its modes, its exit codes and its record.

use futures_util::{SinkExt, StreamExt};
use qd_testkit::{TestCommand, TestHome, poll_until, within};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

/// The connection of a parent to a worker.
struct ParentConnection(WebSocketStream<TcpStream>);

impl ParentConnection {
    async fn dial(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let (socket, _) = tokio_tungstenite::client_async(format!("ws://{address}/"), stream).await.unwrap();
        Self(socket)
    }

    async fn send(&mut self, frame: Value) {
        self.0.send(Message::text(frame.to_string())).await.unwrap();
    }

    async fn next(&mut self) -> Value {
        loop {
            let frame = within("a frame", self.0.next()).await.expect("the worker hangs up").unwrap();
            if let Message::Text(text) = frame {
                return serde_json::from_str(&text).unwrap();
            }
        }
    }

    /// All frames up to the terminal frame, which is the last.
    async fn until_terminal(&mut self) -> Vec<Value> {
        let mut frames = Vec::new();
        loop {
            frames.push(self.next().await);
            if frames.last().unwrap()["kind"] == "terminal" {
                return frames;
            }
        }
    }

    async fn close(mut self) {
        self.0.close(None).await.unwrap();
    }
}

/// Starts a worker and returns its address.
async fn worker(home: &TestHome, args: &[&str]) -> (TestCommand, String) {
    let mut running = home.start(&[&["worker", "--listen", "127.0.0.1:0"], args].concat());
    running.wait_for_stdout("\n").await;
    let address =
        running.stdout_so_far().trim().strip_prefix("listening on ws://").expect("it says where").to_owned();
    (running, address)
}

fn text(frames: &[Value]) -> String {
    let tokens = frames.iter().filter(|frame| frame["event"]["type"] == "token");
    tokens.map(|frame| frame["event"]["content"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn it_runs_an_assignment_and_says_so_in_the_frames_of_the_contract() {
    let home = TestHome::new();
    let (_worker, address) = worker(&home, &["--agent", "echo"]).await;
    let mut parent = ParentConnection::dial(&address).await;
    for words in ["one two three", "four"] {
        parent.send(json!({ "kind": "run", "assignment": words })).await;
        let frames = parent.until_terminal().await;
        assert_eq!(text(&frames).trim_end(), words);
        let [.., last, terminal] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!(last, &json!({ "kind": "event", "event": { "type": "complete" } }));
        assert_eq!(
            (&terminal["status"], &terminal["result"]),
            (&json!("completed"), &json!(format!("echo: {words}")))
        );
    }
    parent.send(json!({ "kind": "run", "assignment": "__sleep_ms:600000 never" })).await;
    parent.send(json!({ "kind": "cancel" })).await;
    assert_eq!(parent.until_terminal().await.last().unwrap()["status"], "cancelled");
}

#[tokio::test]
async fn it_serves_script_with_its_approvals() {
    let home = TestHome::new();
    let (_worker, address) = worker(&home, &["--agent", "script"]).await;
    let mut parent = ParentConnection::dial(&address).await;
    let script =
        qd_testkit::script::steps(&[qd_testkit::script::ask_bash("make"), qd_testkit::script::say(" done")]);
    for (approved, expected) in [(true, "allowed done"), (false, "denied")] {
        parent.send(json!({ "kind": "run", "assignment": script })).await;
        let request = loop {
            let frame = parent.next().await;
            if frame["kind"] == "approval_request" {
                break frame;
            }
        };
        assert_eq!(request["body"]["tool_name"], "Bash", "{request}");
        parent.send(json!({ "kind": "approval_reply", "id": request["id"], "approved": approved })).await;
        let frames = parent.until_terminal().await;
        assert!(text(&frames).starts_with(expected), "{frames:?}");
        assert_eq!(frames.last().unwrap()["status"], "completed");
    }
}

#[tokio::test]
async fn one_ends_with_its_connection() {
    let home = TestHome::new();
    let (worker, address) = worker(&home, &["--agent", "echo", "--serve", "one"]).await;
    let mut parent = ParentConnection::dial(&address).await;
    parent.send(json!({ "kind": "run", "assignment": "hello" })).await;
    parent.until_terminal().await;
    parent.close().await;
    worker.wait().await.ok();
}

#[tokio::test]
async fn one_that_nobody_calls_exits_124() {
    let home = TestHome::new();
    let (worker, _) = worker(&home, &["--agent", "echo", "--serve", "one", "--accept-timeout-s", "1"]).await;
    worker.wait().await.expect_exit(124);
}

#[tokio::test]
async fn reusable_takes_one_after_another_and_exits_0_when_it_is_idle_too_long() {
    let home = TestHome::new();
    let (worker, address) =
        worker(&home, &["--agent", "echo", "--serve", "reusable", "--idle-timeout-s", "1"]).await;
    for n in 0..3 {
        let mut parent = ParentConnection::dial(&address).await;
        parent.send(json!({ "kind": "run", "assignment": format!("n{n}") })).await;
        assert_eq!(parent.until_terminal().await.last().unwrap()["result"], format!("echo: n{n}"));
        parent.close().await;
    }
    worker.wait().await.ok();
}

#[tokio::test]
async fn many_serves_any_number_at_once_and_none_sees_another() {
    let home = TestHome::new();
    let (_worker, address) = worker(&home, &["--agent", "echo"]).await;
    let mut parents = Vec::new();
    for n in 0..10 {
        let mut parent = ParentConnection::dial(&address).await;
        parent.send(json!({ "kind": "run", "assignment": format!("__sleep_ms:100 n{n}") })).await;
        parents.push(parent);
    }
    for (n, mut parent) in parents.into_iter().enumerate() {
        let frames = parent.until_terminal().await;
        assert_eq!(text(&frames).trim_end(), format!("n{n}"));
    }
}

#[tokio::test]
async fn announce_keeps_a_record_while_it_serves_and_removes_it_at_the_end() {
    let home = TestHome::new();
    let dir = home.sibling_path("announced");
    std::fs::create_dir(&dir).unwrap();
    let flag = dir.to_str().unwrap();
    let (worker, address) = worker(&home, &["--agent", "echo", "--announce", flag]).await;
    let records =
        || -> Vec<_> { std::fs::read_dir(&dir).unwrap().flatten().map(|entry| entry.path()).collect() };
    let path = poll_until("its record", async || {
        records().into_iter().find(|path| path.extension().is_some_and(|e| e == "json"))
    })
    .await;
    let record: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(path.file_stem().unwrap().to_str(), record["agent_id"].as_str());
    assert_eq!(record["endpoint"], format!("ws://{address}"));
    assert_eq!(record["pid"], worker.pid());
    for field in ["role", "labels", "version", "started_at", "lease_expires_at"] {
        assert!(!record[field].is_null(), "{field}: {record}");
    }
    assert!(record["lease_expires_at"].as_str() > record["started_at"].as_str(), "{record}");
    worker.signal(rustix::process::Signal::TERM);
    worker.wait().await;
    assert_eq!(records(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test]
async fn what_is_no_address_is_wrong_usage() {
    let home = TestHome::new();
    for address in ["nonsense", "unix:/run/x.sock", "unix:", "127.0.0.1:99999", ":80"] {
        let output = home.qd(&["worker", "--listen", address, "--agent", "echo"]).await;
        assert_eq!(output.stderr.matches("HOST:PORT").count(), 1, "{output:?}");
        output.expect_exit(2);
    }
    // An address reserved for documentation, which no machine has.
    let output = home.qd(&["worker", "--listen", "192.0.2.1:80", "--agent", "echo"]).await;
    assert_eq!(output.stderr.matches("assign").count(), 1, "the cause is printed once: {output:?}");
    output.expect_exit(1);
}

#[tokio::test]
async fn an_unknown_agent_and_a_strange_origin_are_refused() {
    let home = TestHome::new();
    let output = home.qd(&["worker", "--listen", "127.0.0.1:0", "--agent", "nobody"]).await;
    assert!(output.stderr.contains("nobody"), "{output:?}");
    assert_ne!(output.code, Some(0));
    let (_worker, address) = worker(&home, &["--agent", "echo"]).await;
    let mut request = tokio_tungstenite::tungstenite::client::IntoClientRequest::into_client_request(
        format!("ws://{address}/"),
    )
    .unwrap();
    request.headers_mut().insert("origin", "https://evil.example".parse().unwrap());
    let stream = TcpStream::connect(&address).await.unwrap();
    assert!(tokio_tungstenite::client_async(request, stream).await.is_err());
}
