//! Our client, their worker.

use std::sync::Arc;

use async_trait::async_trait;
use bamboo_subagent::{ChildExecutor, ChildOutcome, EventSink, RunSpec, SteerInbox, WsServer};
use qd_link::plain::client::Came;
use qd_link::{Job, PlainClient, Said, plain};
use qd_protocol::frame::plain::{FromParent, FromWorker, Status};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::within;

/// What the assignment's first word says, as in our own worker beside this.
struct Worker {
    left: mpsc::Sender<()>,
}

#[async_trait]
impl ChildExecutor for Worker {
    async fn run(
        &self,
        spec: RunSpec,
        events: EventSink,
        mut steer: SteerInbox,
        cancel: CancellationToken,
    ) -> ChildOutcome {
        let token = |text: &str| events.emit(json!({"type": "token", "content": text}));
        let (verb, rest) = spec.assignment.split_once(' ').unwrap_or((&spec.assignment, ""));
        match verb {
            "steer" => {
                let text = steer.recv().await.unwrap();
                token(&text);
                ChildOutcome::completed(format!("steered: {text}"))
            }
            "ask" => {
                let body = json!({
                    "tool_name": "Write", "permission_type": "WriteFile", "resource": rest, "question": "may I?",
                });
                let answer = events.host().unwrap().approval_call(body).await.unwrap();
                ChildOutcome::completed(format!("approved: {}", answer["approved"]))
            }
            "wait" => {
                token(rest);
                cancel.cancelled().await;
                let _heard = self.left.try_send(());
                ChildOutcome::cancelled()
            }
            "suspend" => ChildOutcome::suspended(spec.messages),
            _ => {
                rest.split_inclusive(' ').for_each(token);
                events.emit(json!({"type": "complete"}));
                ChildOutcome::completed(rest)
            }
        }
    }
}

async fn connect() -> (PlainClient, mpsc::Receiver<()>) {
    let (left, was_left) = mpsc::channel(1);
    let server = WsServer::bind_loopback().await.unwrap();
    let endpoint = server.ws_endpoint();
    tokio::spawn(server.serve(Arc::new(Worker { left })));
    (PlainClient::connect(&endpoint, None).await.unwrap(), was_left)
}

async fn frame(client: &mut PlainClient) -> FromWorker {
    within(client.next()).await.unwrap()
}

/// The rest of a run: its text, its status and its result.
async fn rest(client: &mut PlainClient) -> (String, Status, Option<String>) {
    let mut text = String::new();
    loop {
        match frame(client).await {
            FromWorker::Event { event } => {
                if let Some(Said::Text { text: more }) = plain::said(event) {
                    text.push_str(&more);
                }
            }
            FromWorker::Terminal { status, result, .. } => return (text, status, result),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_run_is_read_in_order_to_its_result() {
    let (mut client, _) = connect().await;
    let words = (0..10_000).map(|number| number.to_string()).collect::<Vec<_>>().join(" ");
    client.run(Job::from(format!("say {words}").as_str())).await.unwrap();
    let (text, status, result) = rest(&mut client).await;
    assert!(text == words && status == Status::Completed && result.as_deref() == Some(words.as_str()));
}

#[tokio::test]
async fn a_message_steers_the_run() {
    let (mut client, _) = connect().await;
    client.run(Job::from("steer")).await.unwrap();
    client.message("left").await.unwrap();
    assert_eq!(
        rest(&mut client).await,
        ("left".to_owned(), Status::Completed, Some("steered: left".to_owned()))
    );
}

#[tokio::test]
async fn a_sign_of_life_shows_that_what_was_posted_before_it_was_read() {
    let (mut client, _) = connect().await;
    client.run(Job::from("wait here")).await.unwrap();
    frame(&mut client).await;
    client.post(&FromParent::Message { text: "left".to_owned() }).unwrap();
    client.post_ping().unwrap();
    assert_eq!(within(client.came(true)).await.unwrap(), Came::Alive);
    client.post(&FromParent::Cancel).unwrap();
    let came = within(client.came(true)).await.unwrap();
    assert!(matches!(came, Came::Frame(FromWorker::Terminal { status: Status::Cancelled, .. })), "{came:?}");
}

#[tokio::test]
async fn an_approval_goes_there_and_back() {
    let (mut client, _) = connect().await;
    for approved in [true, false] {
        client.run(Job::from("ask /srv/x")).await.unwrap();
        let FromWorker::ApprovalRequest { id, body } = frame(&mut client).await else { panic!("it asks") };
        assert_eq!((body.tool_name.as_str(), body.resource.as_str()), ("Write", "/srv/x"));
        client.approval_reply(id, approved).await.unwrap();
        assert_eq!(rest(&mut client).await.2, Some(format!("approved: {approved}")));
    }
}

#[tokio::test]
async fn a_cancel_stops_the_run_and_the_next_one_runs() {
    let (mut client, _) = connect().await;
    client.run(Job::from("wait here")).await.unwrap();
    frame(&mut client).await;
    client.cancel().await.unwrap();
    assert_eq!(rest(&mut client).await.1, Status::Cancelled);
    client.run(Job::from("say again")).await.unwrap();
    assert_eq!(rest(&mut client).await.1, Status::Completed);
}

#[tokio::test]
async fn both_runs_end_when_one_supersedes_the_other() {
    let (mut client, _) = connect().await;
    client.run(Job::from("wait one")).await.unwrap();
    frame(&mut client).await;
    client.run(Job::from("steer")).await.unwrap();
    // This peer does not promise which comes first; the first terminal is the first run's because the second waits.
    assert_eq!(rest(&mut client).await.1, Status::Cancelled);
    client.message("go").await.unwrap();
    assert_eq!(rest(&mut client).await.1, Status::Completed);
}

#[tokio::test]
async fn a_suspended_run_gives_its_transcript() {
    let (mut client, _) = connect().await;
    let messages = vec![json!({"role": "user"})];
    client.run(Job { messages: messages.clone(), ..Job::from("suspend") }).await.unwrap();
    let FromWorker::Terminal { status, transcript, .. } = frame(&mut client).await else { panic!("it ends") };
    assert_eq!((status, transcript), (Status::Suspended, messages));
}

#[tokio::test]
async fn leaving_ends_the_run() {
    let (mut client, mut was_left) = connect().await;
    client.run(Job::from("wait here")).await.unwrap();
    frame(&mut client).await;
    client.close().await;
    within(was_left.recv()).await.unwrap();
}
