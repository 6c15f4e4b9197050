//! Their parent with our worker.

use bamboo_subagent::{ChildClient, ChildFrame, ParentFrame, RunSpec, TerminalStatus};
use qd_worker_sdk::{PlainApproval, RunAssignment, RunHandle, ServeMode, TurnOutcome, WorkerServer};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::within;

/// Does what the first word of the assignment says: `steer` waits for a steer, `ask` requests an approval, `wait` waits
/// for the cancel, `suspend` suspends, and `say` outputs the rest.
async fn word_worker(job: RunAssignment, turn: RunHandle) -> TurnOutcome {
    let (verb, rest) = job.prompt.split_once(' ').unwrap_or((&job.prompt, ""));
    match verb {
        "steer" => {
            let text = turn.next_steer().await.unwrap();
            turn.send_text(text.as_str()).await.unwrap();
            TurnOutcome::completed(format!("steered: {text}"))
        }
        "ask" => {
            let approval = PlainApproval {
                tool_name: "Write".to_owned(),
                permission_type: "WriteFile".to_owned(),
                resource: rest.to_owned(),
                question: "may I?".to_owned(),
            };
            TurnOutcome::completed(format!("approved: {}", turn.request_approval(approval).await))
        }
        "wait" => {
            turn.send_text(rest).await.unwrap();
            turn.cancelled().await;
            TurnOutcome::cancelled()
        }
        "suspend" => TurnOutcome::suspended(job.messages),
        _ => {
            for word in rest.split_inclusive(' ') {
                turn.send_text(word).await.unwrap();
            }
            TurnOutcome::completed(rest)
        }
    }
}

async fn connect(worker: impl qd_worker_sdk::Executor) -> ChildClient {
    let server = WorkerServer::bind("127.0.0.1:0").await.unwrap();
    let endpoint = server.endpoint();
    tokio::spawn(server.serve(worker, ServeMode::Many));
    ChildClient::connect(&endpoint).await.unwrap()
}

async fn start(client: &mut ChildClient, assignment: &str) {
    let spec = RunSpec {
        assignment: assignment.to_owned(),
        reasoning_effort: None,
        messages: vec![json!({"a": 1})],
    };
    client.send(ParentFrame::Run(spec)).await.unwrap();
}

async fn next_frame(client: &mut ChildClient) -> ChildFrame {
    within(client.next_frame()).await.unwrap().unwrap()
}

/// Reads the rest of a run: its events, its status and its result.
async fn finish_run(client: &mut ChildClient) -> (Vec<Value>, TerminalStatus, Option<String>) {
    let mut events = Vec::new();
    loop {
        match next_frame(client).await {
            ChildFrame::Event { event } => events.push(event),
            ChildFrame::Terminal { status, result, .. } => return (events, status, result),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_run_streams_in_order_and_ends_with_its_result() {
    let mut client = connect(word_worker).await;
    start(&mut client, "say one two").await;
    let (events, status, result) = finish_run(&mut client).await;
    let expected = [
        json!({"type": "token", "content": "one "}),
        json!({"type": "token", "content": "two"}),
        json!({"type": "complete"}),
    ];
    assert_eq!(events, expected);
    assert_eq!((status, result.as_deref()), (TerminalStatus::Completed, Some("one two")));
}

#[tokio::test]
async fn ten_thousand_events_come_in_order() {
    let mut client = connect(word_worker).await;
    let words = (0..10_000).map(|number| number.to_string()).collect::<Vec<_>>().join(" ");
    start(&mut client, &format!("say {words}")).await;
    let (events, status, _) = finish_run(&mut client).await;
    let text: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!((text, status), (words, TerminalStatus::Completed));
}

#[tokio::test]
async fn a_message_steers_the_run() {
    let mut client = connect(word_worker).await;
    start(&mut client, "steer").await;
    client.send(ParentFrame::Message { text: "left".to_owned() }).await.unwrap();
    assert_eq!(finish_run(&mut client).await.2.as_deref(), Some("steered: left"));
}

#[tokio::test]
async fn an_approval_goes_there_and_back() {
    let mut client = connect(word_worker).await;
    for approved in [true, false] {
        start(&mut client, "ask /srv/x").await;
        let ChildFrame::ApprovalRequest { id, body } = next_frame(&mut client).await else {
            panic!("it asks")
        };
        let expected = json!({
            "tool_name": "Write", "permission_type": "WriteFile", "resource": "/srv/x", "question": "may I?",
        });
        assert_eq!(body, expected);
        client.send(ParentFrame::ApprovalReply { id: "sa-1".to_owned(), approved: !approved }).await.unwrap();
        client.send(ParentFrame::ApprovalReply { id, approved }).await.unwrap();
        assert_eq!(finish_run(&mut client).await.2, Some(format!("approved: {approved}")));
    }
}

#[tokio::test]
async fn a_cancel_stops_the_run_and_the_next_one_runs() {
    let mut client = connect(word_worker).await;
    start(&mut client, "wait here").await;
    next_frame(&mut client).await;
    client.send(ParentFrame::Cancel).await.unwrap();
    assert_eq!(finish_run(&mut client).await.1, TerminalStatus::Cancelled);
    client.send(ParentFrame::Cancel).await.unwrap();
    start(&mut client, "say again").await;
    assert_eq!(finish_run(&mut client).await.1, TerminalStatus::Completed);
}

#[tokio::test]
async fn the_terminal_of_a_superseded_run_comes_before_its_successor_says_anything() {
    let mut client = connect(word_worker).await;
    start(&mut client, "wait one").await;
    next_frame(&mut client).await;
    start(&mut client, "say two").await;
    let (events, status, _) = finish_run(&mut client).await;
    assert_eq!((events, status), (Vec::new(), TerminalStatus::Cancelled));
    let (events, status, _) = finish_run(&mut client).await;
    assert_eq!((&events[0]["content"], status), (&json!("two"), TerminalStatus::Completed));
}

#[tokio::test]
async fn a_suspended_run_gives_its_transcript() {
    let mut client = connect(word_worker).await;
    start(&mut client, "suspend").await;
    let ChildFrame::Terminal { status, transcript, .. } = next_frame(&mut client).await else {
        panic!("it ends")
    };
    assert_eq!((status, transcript), (TerminalStatus::Suspended, vec![json!({"a": 1})]));
}

#[tokio::test]
async fn a_parent_that_leaves_ends_its_run() {
    let (cancelled, mut cancelled_receiver) = mpsc::channel(1);
    let mut client = connect(move |_: RunAssignment, turn: RunHandle| {
        let cancelled = cancelled.clone();
        async move {
            turn.send_text("here").await.unwrap();
            turn.cancelled().await;
            cancelled.send(()).await.unwrap();
            TurnOutcome::cancelled()
        }
    })
    .await;
    start(&mut client, "").await;
    next_frame(&mut client).await;
    drop(client);
    within(cancelled_receiver.recv()).await.unwrap();
}
