//! Our client with their worker.

use std::sync::Arc;

use async_trait::async_trait;
use bamboo_subagent::{ChildExecutor, ChildOutcome, EventSink, RunSpec, SteerInbox, WsServer};
use qd_protocol::frame::plain::{PlainParentFrame, PlainRunStatus, PlainWorkerFrame};
use qd_worker_sdk::plain::client::PlainClientEvent;
use qd_worker_sdk::{PlainClient, RunAssignment, TurnUpdate, plain};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::within;

/// Does what the first word of the assignment says, like our worker in `our_worker.rs`.
struct BambooWorker {
    cancelled: mpsc::Sender<()>,
}

#[async_trait]
impl ChildExecutor for BambooWorker {
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
                let _sent = self.cancelled.try_send(());
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
    let (cancelled, cancelled_receiver) = mpsc::channel(1);
    let server = WsServer::bind_loopback().await.unwrap();
    let endpoint = server.ws_endpoint();
    tokio::spawn(server.serve(Arc::new(BambooWorker { cancelled })));
    (PlainClient::connect(&endpoint, None).await.unwrap(), cancelled_receiver)
}

async fn next_frame(client: &mut PlainClient) -> PlainWorkerFrame {
    within(client.next_frame()).await.unwrap()
}

/// Reads the rest of a run: its text, its status and its result.
async fn finish_run(client: &mut PlainClient) -> (String, PlainRunStatus, Option<String>) {
    let mut text = String::new();
    loop {
        match next_frame(client).await {
            PlainWorkerFrame::Event { event } => {
                if let Some(TurnUpdate::Text { text: more }) = plain::parse_event(event) {
                    text.push_str(&more);
                }
            }
            PlainWorkerFrame::Terminal { status, result, .. } => return (text, status, result),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_run_is_read_in_order_to_its_result() {
    let (mut client, _) = connect().await;
    let words = (0..10_000).map(|number| number.to_string()).collect::<Vec<_>>().join(" ");
    client.start_run(RunAssignment::from(format!("say {words}").as_str())).await.unwrap();
    let (text, status, result) = finish_run(&mut client).await;
    assert!(
        text == words && status == PlainRunStatus::Completed && result.as_deref() == Some(words.as_str())
    );
}

#[tokio::test]
async fn a_message_steers_the_run() {
    let (mut client, _) = connect().await;
    client.start_run(RunAssignment::from("steer")).await.unwrap();
    client.send_message("left").await.unwrap();
    assert_eq!(
        finish_run(&mut client).await,
        ("left".to_owned(), PlainRunStatus::Completed, Some("steered: left".to_owned()))
    );
}

#[tokio::test]
async fn a_pong_shows_that_the_frames_before_its_ping_were_read() {
    let (mut client, _) = connect().await;
    client.start_run(RunAssignment::from("wait here")).await.unwrap();
    next_frame(&mut client).await;
    client.queue_frame(&PlainParentFrame::Message { text: "left".to_owned() }).unwrap();
    client.queue_ping().unwrap();
    assert_eq!(within(client.next_event(true)).await.unwrap(), PlainClientEvent::Alive);
    client.queue_frame(&PlainParentFrame::Cancel).unwrap();
    let event = within(client.next_event(true)).await.unwrap();
    assert!(
        matches!(
            event,
            PlainClientEvent::Frame(PlainWorkerFrame::Terminal { status: PlainRunStatus::Cancelled, .. })
        ),
        "{event:?}"
    );
}

#[tokio::test]
async fn an_approval_goes_there_and_back() {
    let (mut client, _) = connect().await;
    for approved in [true, false] {
        client.start_run(RunAssignment::from("ask /srv/x")).await.unwrap();
        let PlainWorkerFrame::ApprovalRequest { id, body } = next_frame(&mut client).await else {
            panic!("it asks")
        };
        assert_eq!((body.tool_name.as_str(), body.resource.as_str()), ("Write", "/srv/x"));
        client.reply_to_approval(id, approved).await.unwrap();
        assert_eq!(finish_run(&mut client).await.2, Some(format!("approved: {approved}")));
    }
}

#[tokio::test]
async fn a_cancel_stops_the_run_and_the_next_one_runs() {
    let (mut client, _) = connect().await;
    client.start_run(RunAssignment::from("wait here")).await.unwrap();
    next_frame(&mut client).await;
    client.cancel().await.unwrap();
    assert_eq!(finish_run(&mut client).await.1, PlainRunStatus::Cancelled);
    client.start_run(RunAssignment::from("say again")).await.unwrap();
    assert_eq!(finish_run(&mut client).await.1, PlainRunStatus::Completed);
}

#[tokio::test]
async fn both_runs_end_when_one_supersedes_the_other() {
    let (mut client, _) = connect().await;
    client.start_run(RunAssignment::from("wait one")).await.unwrap();
    next_frame(&mut client).await;
    client.start_run(RunAssignment::from("steer")).await.unwrap();
    // This peer does not promise an order of terminals. The first one belongs to the first run, because the second run
    // waits for a steer.
    assert_eq!(finish_run(&mut client).await.1, PlainRunStatus::Cancelled);
    client.send_message("go").await.unwrap();
    assert_eq!(finish_run(&mut client).await.1, PlainRunStatus::Completed);
}

#[tokio::test]
async fn a_suspended_run_gives_its_transcript() {
    let (mut client, _) = connect().await;
    let messages = vec![json!({"role": "user"})];
    client
        .start_run(RunAssignment { messages: messages.clone(), ..RunAssignment::from("suspend") })
        .await
        .unwrap();
    let PlainWorkerFrame::Terminal { status, transcript, .. } = next_frame(&mut client).await else {
        panic!("it ends")
    };
    assert_eq!((status, transcript), (PlainRunStatus::Suspended, messages));
}

#[tokio::test]
async fn leaving_ends_the_run() {
    let (mut client, mut cancelled_receiver) = connect().await;
    client.start_run(RunAssignment::from("wait here")).await.unwrap();
    next_frame(&mut client).await;
    client.close().await;
    within(cancelled_receiver.recv()).await.unwrap();
}
