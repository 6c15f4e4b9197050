//! What happens to runs on a connection.

use std::sync::Arc;

use qd_protocol::frame::plain::{PlainRunStatus, PlainWorkerFrame};
use qd_worker_sdk::{
    Executor, PlainApproval, PlainClient, RunAssignment, RunError, RunHandle, RunStopped, ServeMode,
    TurnOutcome, TurnUpdate,
};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;

use crate::support::{connect_to_new_server, read_run, run, serve, token, within};

/// Sends the words of its prompt, each with its trailing space, and returns them.
async fn echo(assignment: RunAssignment, run_handle: RunHandle) -> TurnOutcome {
    for word in assignment.prompt.split_inclusive(' ') {
        if run_handle.send_text(word).await.is_err() {
            return TurnOutcome::cancelled();
        }
    }
    TurnOutcome::completed(format!("echo: {}", assignment.prompt))
}

/// Sends its prompt, waits to be cancelled, and says goodbye.
async fn wait(assignment: RunAssignment, run_handle: RunHandle) -> TurnOutcome {
    let _sent = run_handle.send_text(assignment.prompt.as_str()).await;
    run_handle.cancelled().await;
    let _sent = run_handle.send_text(format!("bye {}", assignment.prompt)).await;
    TurnOutcome::completed("too late")
}

/// Sends text until it is stopped, then reports how many pieces it sent.
struct EndlessExecutor(mpsc::Sender<usize>);

impl Executor for EndlessExecutor {
    async fn run(&self, _: RunAssignment, run_handle: RunHandle) -> TurnOutcome {
        let mut sent = 0;
        while run_handle.send_text("x".repeat(1000)).await.is_ok() {
            sent += 1;
        }
        let _reported = self.0.send(sent).await;
        TurnOutcome::cancelled()
    }
}

#[tokio::test]
async fn a_run_streams_its_words_then_complete_and_then_its_terminal() {
    let mut client = connect_to_new_server(echo).await;
    for words in ["one two three", "and again"] {
        let run = run(&mut client, words).await;
        assert_eq!(run.tokens(), words.split_inclusive(' ').collect::<Vec<_>>());
        assert_eq!(run.events.last().unwrap(), &json!({"type": "complete"}));
        assert_eq!(
            (run.status, run.result),
            (Some(PlainRunStatus::Completed), Some(format!("echo: {words}")))
        );
    }
}

#[tokio::test]
async fn every_event_of_a_long_run_arrives_once_and_in_order() {
    const COUNT: usize = 200_000;
    let mut client = connect_to_new_server(async |_: RunAssignment, run_handle: RunHandle| {
        for number in 0..COUNT {
            run_handle.send_text(number.to_string()).await.unwrap();
        }
        TurnOutcome::completed("")
    })
    .await;
    let run = run(&mut client, "").await;
    assert!(run.tokens().into_iter().eq((0..COUNT).map(|number| number.to_string())));
}

#[tokio::test]
async fn a_second_run_cancels_the_first_whose_terminal_comes_before_anything_of_the_second() {
    let mut client = connect_to_new_server(wait).await;
    client.start_run(RunAssignment::from("one")).await.unwrap();
    assert_eq!(token(&mut client).await, "one");
    client.start_run(RunAssignment::from("two")).await.unwrap();
    let first = read_run(&mut client).await;
    assert_eq!((first.tokens(), first.status), (vec!["bye one"], Some(PlainRunStatus::Cancelled)));
    assert_eq!(token(&mut client).await, "two");
    client.cancel().await.unwrap();
    let second = read_run(&mut client).await;
    assert_eq!((second.tokens(), second.status), (vec!["bye two"], Some(PlainRunStatus::Cancelled)));
}

#[tokio::test]
async fn every_run_has_its_terminal_however_fast_the_next_one_comes() {
    let mut client = connect_to_new_server(wait).await;
    for name in ["one", "two", "three", "four"] {
        client.start_run(RunAssignment::from(name)).await.unwrap();
    }
    client.send_message("for the last").await.unwrap();
    for _ in 0..3 {
        assert_eq!(read_run(&mut client).await.status, Some(PlainRunStatus::Cancelled));
    }
    assert_eq!(token(&mut client).await, "four");
    client.cancel().await.unwrap();
    assert_eq!(read_run(&mut client).await.status, Some(PlainRunStatus::Cancelled));
}

#[tokio::test]
async fn a_cancel_of_nothing_does_not_poison_the_next_run() {
    let mut client = connect_to_new_server(echo).await;
    client.cancel().await.unwrap();
    assert_eq!(run(&mut client, "a").await.status, Some(PlainRunStatus::Completed));
    client.cancel().await.unwrap();
    assert_eq!(run(&mut client, "b").await.status, Some(PlainRunStatus::Completed));
}

#[tokio::test]
async fn a_cancelled_run_ends_so_whatever_its_executor_says() {
    let mut client = connect_to_new_server(wait).await;
    client.start_run(RunAssignment::from("a")).await.unwrap();
    client.cancel().await.unwrap();
    let run = read_run(&mut client).await;
    assert_eq!((run.status, run.result), (Some(PlainRunStatus::Cancelled), None));
    assert!(!run.events.contains(&json!({"type": "complete"})));
}

#[tokio::test]
async fn a_peer_that_does_not_read_can_still_cancel_at_once() {
    let (stopped, mut was_stopped) = mpsc::channel(1);
    let mut client = connect_to_new_server(EndlessExecutor(stopped)).await;
    client.start_run(RunAssignment::from("")).await.unwrap();
    // The first event has arrived, so the run is active. Nothing more is read until the run has stopped.
    token(&mut client).await;
    client.cancel().await.unwrap();
    let sent = within(was_stopped.recv()).await.unwrap();
    let run = read_run(&mut client).await;
    assert_eq!(run.status, Some(PlainRunStatus::Cancelled));
    assert_eq!(run.events.len() + 1, sent, "what was sent before the cancel still arrives");
    client.start_run(RunAssignment::from("")).await.unwrap();
    token(&mut client).await;
}

#[tokio::test]
async fn a_message_reaches_the_active_run_and_nobody_else() {
    let mut client = connect_to_new_server(async |_: RunAssignment, run_handle: RunHandle| {
        let text = run_handle.next_steer().await.unwrap();
        run_handle.send_text(text).await.unwrap();
        TurnOutcome::completed("steered")
    })
    .await;
    client.send_message("nobody is there").await.unwrap();
    client.start_run(RunAssignment::from("")).await.unwrap();
    client.send_message("left").await.unwrap();
    assert_eq!(read_run(&mut client).await.tokens(), ["left"]);
    client.send_message("too late").await.unwrap();
    client.start_run(RunAssignment::from("")).await.unwrap();
    client.send_message("right").await.unwrap();
    assert_eq!(read_run(&mut client).await.tokens(), ["right"]);
}

#[tokio::test]
async fn an_approval_waits_for_its_own_id_and_takes_the_first_answer() {
    let mut client = connect_to_new_server(async |assignment: RunAssignment, run_handle: RunHandle| {
        let approval = PlainApproval {
            tool_name: "Bash".to_owned(),
            resource: assignment.prompt,
            ..PlainApproval::default()
        };
        TurnOutcome::completed(run_handle.request_approval(approval).await.to_string())
    })
    .await;
    let mut ids = Vec::new();
    for (approved, resource) in [(true, "ls"), (false, "rm")] {
        client.start_run(RunAssignment::from(resource)).await.unwrap();
        let PlainWorkerFrame::ApprovalRequest { id, body } = within(client.next_frame()).await.unwrap()
        else {
            panic!("it must ask for approval")
        };
        assert_eq!((body.tool_name.as_str(), body.resource.as_str()), ("Bash", resource));
        for wrong in ["", "1", "ask_1", "../x"].into_iter().chain(ids.iter().map(String::as_str)) {
            client.reply_to_approval(wrong, !approved).await.unwrap();
        }
        client.send_message("yes").await.unwrap();
        client.reply_to_approval(id.as_str(), approved).await.unwrap();
        client.reply_to_approval(id.as_str(), !approved).await.unwrap();
        assert_eq!(read_run(&mut client).await.result, Some(approved.to_string()));
        ids.push(id);
    }
    assert_ne!(ids[0], ids[1]);
    assert!(ids.iter().all(|id| id.len() >= 26), "128 bits take 26 characters of 32: {ids:?}");
}

#[tokio::test]
async fn a_cancel_ends_the_wait_for_an_approval_with_no() {
    let mut client = connect_to_new_server(async |_: RunAssignment, run_handle: RunHandle| {
        let allowed = run_handle.request_approval(PlainApproval::default()).await;
        let _sent = run_handle.send_text(allowed.to_string()).await;
        TurnOutcome::completed("")
    })
    .await;
    client.start_run(RunAssignment::from("")).await.unwrap();
    let frame = within(client.next_frame()).await.unwrap();
    assert!(matches!(frame, PlainWorkerFrame::ApprovalRequest { .. }), "{frame:?}");
    client.cancel().await.unwrap();
    let run = read_run(&mut client).await;
    assert_eq!((run.tokens(), run.status), (vec!["false"], Some(PlainRunStatus::Cancelled)));
}

#[tokio::test]
async fn frames_that_mean_nothing_are_ignored() {
    let (endpoint, _server) = serve(echo, ServeMode::Many).await;
    let host = endpoint.strip_prefix("ws://").unwrap();
    let stream = TcpStream::connect(host).await.unwrap();
    let (mut raw, _) = tokio_tungstenite::client_async(endpoint.as_str(), stream).await.unwrap();
    use futures_util::{SinkExt, StreamExt};
    for text in [
        "",
        "{",
        "[]",
        "7",
        "{}",
        r#"{"kind":"news"}"#,
        r#"{"kind":"run"}"#,
        r#"{"kind":"run","assignment":7}"#,
    ] {
        raw.feed(Message::text(text)).await.unwrap();
    }
    raw.feed(Message::binary(br#"{"kind":"run","assignment":"binary"}"#.to_vec())).await.unwrap();
    raw.feed(Message::Ping(vec![1].into())).await.unwrap();
    raw.send(Message::text(r#"{"kind":"run","assignment":"a","later":{"x":1}}"#)).await.unwrap();
    let mut frames = Vec::new();
    while frames.len() < 3 {
        if let Message::Text(text) = within(raw.next()).await.unwrap().unwrap() {
            frames.push(serde_json::from_str::<serde_json::Value>(&text).unwrap());
        }
    }
    assert_eq!(frames[0], json!({"kind": "event", "event": {"type": "token", "content": "a"}}));
    assert_eq!(frames[1], json!({"kind": "event", "event": {"type": "complete"}}));
    assert_eq!(frames[2], json!({"kind": "terminal", "status": "completed", "result": "echo: a"}));
}

#[tokio::test]
async fn a_closed_connection_cancels_its_run_and_no_other() {
    let (stopped, mut was_stopped) = mpsc::channel(1);
    let stopped = Arc::new(stopped);
    let (endpoint, _server) = serve(
        move |assignment: RunAssignment, run_handle: RunHandle| {
            let stopped = Arc::clone(&stopped);
            async move {
                run_handle.send_text("here").await.unwrap();
                if assignment.prompt == "leave" {
                    run_handle.cancelled().await;
                    stopped.send(()).await.unwrap();
                    return TurnOutcome::cancelled();
                }
                TurnOutcome::completed(run_handle.next_steer().await.unwrap())
            }
        },
        ServeMode::Many,
    )
    .await;
    let mut staying_client = PlainClient::connect(&endpoint, None).await.unwrap();
    staying_client.start_run(RunAssignment::from("stay")).await.unwrap();
    token(&mut staying_client).await;
    let mut leaving_client = PlainClient::connect(&endpoint, None).await.unwrap();
    leaving_client.start_run(RunAssignment::from("leave")).await.unwrap();
    token(&mut leaving_client).await;
    drop(leaving_client);
    within(was_stopped.recv()).await.unwrap();
    staying_client.send_message("still here").await.unwrap();
    let run = read_run(&mut staying_client).await;
    assert_eq!((run.status, run.result.as_deref()), (Some(PlainRunStatus::Completed), Some("still here")));
}

#[tokio::test]
async fn connections_never_see_each_other() {
    let (endpoint, _server) = serve(echo, ServeMode::Many).await;
    let clients = (0..8).map(async |number: usize| {
        let words = vec![number.to_string(); 2000].join(" ");
        let mut client = PlainClient::connect(&endpoint, None).await.unwrap();
        let run = run(&mut client, &words).await;
        assert_eq!(run.tokens().concat(), words);
    });
    futures_util::future::join_all(clients).await;
}

#[tokio::test]
async fn a_panic_in_an_executor_is_an_error_and_the_worker_goes_on() {
    let mut client = connect_to_new_server(async |assignment: RunAssignment, _: RunHandle| {
        assert_ne!(assignment.prompt, "bad", "no such luck");
        TurnOutcome::completed("fine")
    })
    .await;
    let failed = run(&mut client, "bad").await;
    assert_eq!(failed.status, Some(PlainRunStatus::Error));
    assert!(failed.error.unwrap().contains("no such luck"));
    assert_eq!(run(&mut client, "good").await.status, Some(PlainRunStatus::Completed));
}

#[tokio::test]
async fn an_executor_that_ignores_its_cancel_is_dropped_when_the_grace_is_over() {
    let mut client = connect_to_new_server(async |_: RunAssignment, run_handle: RunHandle| {
        run_handle.send_text("here").await.unwrap();
        std::future::pending().await
    })
    .await;
    client.start_run(RunAssignment::from("")).await.unwrap();
    token(&mut client).await;
    // From here on the clock jumps to the next deadline, which is the grace.
    tokio::time::pause();
    let before = tokio::time::Instant::now();
    client.cancel().await.unwrap();
    let run = loop {
        if let PlainWorkerFrame::Terminal { status, .. } = client.next_frame().await.unwrap() {
            break status;
        }
    };
    assert_eq!(run, PlainRunStatus::Cancelled);
    assert!(before.elapsed() >= std::time::Duration::from_secs(5));
}

#[tokio::test]
async fn nothing_of_a_run_comes_after_its_terminal() {
    let (late, mut was_late) = mpsc::channel(1);
    let mut client = connect_to_new_server(move |assignment: RunAssignment, run_handle: RunHandle| {
        let late = late.clone();
        async move {
            if assignment.prompt == "leaves somebody behind" {
                tokio::spawn(async move {
                    // Sends until the run is over; a handle that outlives its run cannot find out in another way.
                    while run_handle.send_text("still talking").await.is_ok() {}
                    late.send(run_handle.send_text("late").await).await.unwrap();
                });
            }
            TurnOutcome::completed("")
        }
    })
    .await;
    run(&mut client, "leaves somebody behind").await;
    assert_eq!(within(was_late.recv()).await, Some(Err(RunStopped)));
    assert_eq!(run(&mut client, "next").await.tokens(), [""; 0]);
}

#[tokio::test]
async fn every_end_has_its_terminal() {
    let mut client = connect_to_new_server(async |assignment: RunAssignment, _: RunHandle| match assignment
        .prompt
        .as_str()
    {
        "fail" => TurnOutcome::failed(RunError::new("broken", "it broke")),
        "refuse" => TurnOutcome::of(qd_protocol::link::TurnStopReason::Refused),
        "cancel" => TurnOutcome::cancelled(),
        _ => TurnOutcome::suspended(assignment.messages),
    })
    .await;
    let failed = run(&mut client, "fail").await;
    assert_eq!((failed.status, failed.error.as_deref()), (Some(PlainRunStatus::Error), Some("it broke")));
    let refused = run(&mut client, "refuse").await;
    assert_eq!(
        (refused.status, refused.error.as_deref()),
        (Some(PlainRunStatus::Error), Some("the model refused"))
    );
    assert_eq!(run(&mut client, "cancel").await.status, Some(PlainRunStatus::Cancelled));
    let messages = vec![json!({"role": "user", "content": "x"})];
    client
        .start_run(RunAssignment { messages: messages.clone(), ..RunAssignment::from("suspend") })
        .await
        .unwrap();
    let suspended = read_run(&mut client).await;
    assert_eq!((suspended.status, suspended.transcript), (Some(PlainRunStatus::Suspended), messages));
    assert!(suspended.events.is_empty());
}

#[tokio::test]
async fn what_is_not_text_travels_under_its_own_name() {
    let mut client = connect_to_new_server(async |_: RunAssignment, run_handle: RunHandle| {
        run_handle.send_update(TurnUpdate::Thought { text: "hm".to_owned() }).await.unwrap();
        TurnOutcome::completed("")
    })
    .await;
    let run = run(&mut client, "").await;
    assert_eq!(run.events[0], json!({"type": "thought", "content": "hm"}));
}
