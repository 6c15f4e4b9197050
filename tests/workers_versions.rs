//! A daemon is replaced by one of another version while agents work. There is only one version of the link so far, so a
//! proxy on the worker's socket rewrites the frames as an older or newer peer would send them. Both peers are real.

use std::path::{Path, PathBuf};

use futures_util::{SinkExt, StreamExt};
use qd_testkit::{TestDaemon, TestSession, journal_rules, poll_until, script::*};
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};
use tokio_tungstenite::{accept_hdr_async, client_async};

use crate::workers_loss::worker_of;

const CHUNKS: u64 = 150;
const PROTOCOL: (&str, &str) = ("sec-websocket-protocol", "quarterdeck.v1");

/// How the proxy rewrites the hello frames.
#[derive(Debug, Clone, Copy)]
struct VersionSkew {
    of_daemon: fn(&mut Value),
    of_worker: fn(&mut Value),
}

/// A proxy in the place of a worker's socket, until [`WorkerSocketProxy::restore`].
struct WorkerSocketProxy {
    socket: PathBuf,
    real: PathBuf,
    accepting: JoinHandle<()>,
}

impl WorkerSocketProxy {
    fn start(workers: &Path, id: &str, skew: VersionSkew) -> Self {
        let (socket, real) = (workers.join(format!("{id}.sock")), workers.join("real"));
        std::fs::rename(&socket, &real).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let target = real.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((daemon, _)) = listener.accept().await {
                tokio::spawn(forward(daemon, target.clone(), skew));
            }
        });
        Self { socket, real, accepting }
    }

    fn restore(self) {
        self.accepting.abort();
        std::fs::rename(&self.real, &self.socket).unwrap();
    }
}

/// Forwards one connection frame by frame.
async fn forward(daemon: UnixStream, worker: PathBuf, skew: VersionSkew) {
    #[expect(clippy::result_large_err, reason = "the callback's type is the library's")]
    let choose = |_: &Request, mut response: Response| {
        response.headers_mut().insert(PROTOCOL.0, PROTOCOL.1.parse().unwrap());
        Ok(response)
    };
    let mut request = "ws://worker/".into_client_request().unwrap();
    request.headers_mut().insert(PROTOCOL.0, PROTOCOL.1.parse().unwrap());
    let worker = UnixStream::connect(&worker).await.unwrap();
    let Ok((worker, _)) = client_async(request, worker).await else { return };
    let Ok(daemon) = accept_hdr_async(daemon, choose).await else { return };
    let (mut to_daemon, mut from_daemon) = daemon.split();
    let (mut to_worker, mut from_worker) = worker.split();
    let down = async {
        while let Some(Ok(frame)) = from_daemon.next().await {
            for frame in skewed(frame, skew.of_daemon) {
                to_worker.send(frame).await.ok()?;
            }
        }
        Some(())
    };
    let up = async {
        while let Some(Ok(frame)) = from_worker.next().await {
            for frame in skewed(frame, skew.of_worker) {
                to_daemon.send(frame).await.ok()?;
            }
        }
        Some(())
    };
    tokio::select! { _ = down => {}, _ = up => {} }
}

/// A hello as the other version would send it, followed by a frame that this version does not know.
fn skewed(frame: Message, skew: fn(&mut Value)) -> Vec<Message> {
    let Message::Text(text) = &frame else { return vec![frame] };
    let Ok(mut content) = serde_json::from_str::<Value>(text) else { return vec![frame] };
    match content.get_mut("hello") {
        None => vec![frame],
        Some(hello) => {
            skew(hello);
            [content, json!({ "weather": { "wind": "fair" } })]
                .map(|frame| Message::text(frame.to_string()))
                .into()
        }
    }
}

async fn worker_id(session: &TestSession) -> String {
    worker_of(session).await["id"].as_str().unwrap().to_owned()
}

/// Runs one turn under three daemons: the current version, a skewed one, and the current version again.
async fn nothing_is_lost_over(skew: VersionSkew) {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let turn = [count(CHUNKS, 20), vec![ask_bash("make"), say(" done")]].concat();
    let run = session.prompt_script(&turn).await;
    let next = session.prompt_script(&[say("next")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let (id, workers) = (worker_id(&session).await, daemon.home.path().join("workers"));
    daemon.kill9().await;

    let between = WorkerSocketProxy::start(&workers, &id, skew);
    daemon.start_again().await;
    session.wait_for_event("the skewed daemon", |event| event.kind == "worker.reattached").await;
    let last_seq = session.events().await.last().unwrap().seq;
    session
        .wait_for_event("words over the skewed link", |event| {
            event.seq > last_seq && event.is_of_run(&run, "text.delta")
        })
        .await;
    daemon.kill9().await;
    between.restore();

    daemon.start_again().await;
    let ask = session.wait_for_ask(&run).await;
    daemon.client().answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    assert_eq!(session.wait(&next).await["text"], "next");
    let events = session.events().await;
    journal_rules::check(&events);
    assert_eq!(journal_rules::run_text(&events, &run), format!("{}allowed done", counted_text(CHUNKS)));
    assert_eq!(events.iter().filter(|event| event.kind == "worker.reattached").count(), 2);
    assert_eq!(worker_id(&session).await, id, "it is still the same worker");
}

#[tokio::test]
async fn a_daemon_of_the_previous_version_is_replaced_in_mid_turn() {
    let of_daemon = |hello: &mut Value| {
        hello["versions"] = json!({ "min": 0, "max": 1 });
        hello["software"] = json!("quarterdeck 0.0.9");
        hello.as_object_mut().unwrap().remove("capabilities");
    };
    nothing_is_lost_over(VersionSkew { of_daemon, of_worker: |_| {} }).await;
}

#[tokio::test]
async fn a_daemon_of_a_later_version_is_replaced_in_mid_turn() {
    let of_daemon = |hello: &mut Value| {
        hello["versions"] = json!({ "min": 1, "max": 7 });
        hello["capabilities"] = json!(["flags", "bunting"]);
        hello["rank"] = json!({ "name": "commodore" });
    };
    nothing_is_lost_over(VersionSkew { of_daemon, of_worker: |_| {} }).await;
}

#[tokio::test]
async fn a_worker_of_a_later_version_is_understood() {
    let of_worker = |hello: &mut Value| {
        hello["capabilities"] = json!(["flags"]);
        hello["rigging"] = json!(["jib", "main"]);
    };
    nothing_is_lost_over(VersionSkew { of_daemon: |_| {}, of_worker }).await;
}

#[tokio::test]
async fn versions_that_do_not_meet_say_so_and_the_turn_waits_for_one_that_does() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&count(40, 10)).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let (id, workers) = (worker_id(&session).await, daemon.home.path().join("workers"));
    daemon.kill9().await;
    let of_daemon = |hello: &mut Value| hello["versions"] = json!({ "min": 8, "max": 9 });
    let between = WorkerSocketProxy::start(&workers, &id, VersionSkew { of_daemon, of_worker: |_| {} });
    daemon.start_again().await;
    let log = daemon.home.path().join("log/daemon.log");
    let complained = async || {
        std::fs::read_to_string(&log).is_ok_and(|log| log.contains("unsupported_version")).then_some(())
    };
    poll_until("a complaint", complained).await;
    assert_eq!(session.run(&run).await["state"], "running", "its spool is not deleted");
    daemon.kill9().await;
    between.restore();
    daemon.start_again().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    assert_eq!(journal_rules::run_text(&session.events().await, &run), counted_text(40));
}
