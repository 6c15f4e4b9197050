//! What happens to runs on a connection.

use std::sync::Arc;

use qd_link::{Approval, Executor, Job, Outcome, PlainClient, RunError, Said, Serve, Stopped, Turn};
use qd_protocol::frame::plain::{FromWorker, Status};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;

use crate::guest::{guest, read_run, run, serve, token, within};

/// Says its words, each with its trailing space, and gives them back.
async fn echo(job: Job, turn: Turn) -> Outcome {
    for word in job.assignment.split_inclusive(' ') {
        if turn.say(word).await.is_err() {
            return Outcome::cancelled();
        }
    }
    Outcome::completed(format!("echo: {}", job.assignment))
}

/// Says its name, waits to be cancelled, and says goodbye.
async fn wait(job: Job, turn: Turn) -> Outcome {
    let _said = turn.say(job.assignment.as_str()).await;
    turn.cancelled().await;
    let _said = turn.say(format!("bye {}", job.assignment)).await;
    Outcome::completed("too late")
}

/// Never stops saying things, and tells how many when it was stopped.
struct Flood(mpsc::Sender<usize>);

impl Executor for Flood {
    async fn run(&self, _: Job, turn: Turn) -> Outcome {
        let mut said = 0;
        while turn.say("x".repeat(1000)).await.is_ok() {
            said += 1;
        }
        let _heard = self.0.send(said).await;
        Outcome::cancelled()
    }
}

#[tokio::test]
async fn a_run_streams_its_words_then_complete_and_then_its_terminal() {
    let mut client = guest(echo).await;
    for words in ["one two three", "and again"] {
        let run = run(&mut client, words).await;
        assert_eq!(run.tokens(), words.split_inclusive(' ').collect::<Vec<_>>());
        assert_eq!(run.events.last().unwrap(), &json!({"type": "complete"}));
        assert_eq!((run.status, run.result), (Some(Status::Completed), Some(format!("echo: {words}"))));
    }
}

#[tokio::test]
async fn every_event_of_a_long_run_arrives_once_and_in_order() {
    const COUNT: usize = 200_000;
    let mut client = guest(async |_: Job, turn: Turn| {
        for number in 0..COUNT {
            turn.say(number.to_string()).await.unwrap();
        }
        Outcome::completed("")
    })
    .await;
    let run = run(&mut client, "").await;
    assert!(run.tokens().into_iter().eq((0..COUNT).map(|number| number.to_string())));
}

#[tokio::test]
async fn a_second_run_cancels_the_first_whose_terminal_comes_before_anything_of_the_second() {
    let mut client = guest(wait).await;
    client.run(Job::from("one")).await.unwrap();
    assert_eq!(token(&mut client).await, "one");
    client.run(Job::from("two")).await.unwrap();
    let first = read_run(&mut client).await;
    assert_eq!((first.tokens(), first.status), (vec!["bye one"], Some(Status::Cancelled)));
    assert_eq!(token(&mut client).await, "two");
    client.cancel().await.unwrap();
    let second = read_run(&mut client).await;
    assert_eq!((second.tokens(), second.status), (vec!["bye two"], Some(Status::Cancelled)));
}

#[tokio::test]
async fn every_run_has_its_terminal_however_fast_the_next_one_comes() {
    let mut client = guest(wait).await;
    for name in ["one", "two", "three", "four"] {
        client.run(Job::from(name)).await.unwrap();
    }
    client.message("for the last").await.unwrap();
    for _ in 0..3 {
        assert_eq!(read_run(&mut client).await.status, Some(Status::Cancelled));
    }
    assert_eq!(token(&mut client).await, "four");
    client.cancel().await.unwrap();
    assert_eq!(read_run(&mut client).await.status, Some(Status::Cancelled));
}

#[tokio::test]
async fn a_cancel_of_nothing_does_not_poison_the_next_run() {
    let mut client = guest(echo).await;
    client.cancel().await.unwrap();
    assert_eq!(run(&mut client, "a").await.status, Some(Status::Completed));
    client.cancel().await.unwrap();
    assert_eq!(run(&mut client, "b").await.status, Some(Status::Completed));
}

#[tokio::test]
async fn a_cancelled_run_ends_so_whatever_its_executor_says() {
    let mut client = guest(wait).await;
    client.run(Job::from("a")).await.unwrap();
    client.cancel().await.unwrap();
    let run = read_run(&mut client).await;
    assert_eq!((run.status, run.result), (Some(Status::Cancelled), None));
    assert!(!run.events.contains(&json!({"type": "complete"})));
}

#[tokio::test]
async fn a_peer_that_does_not_read_can_still_cancel_at_once() {
    let (stopped, mut was_stopped) = mpsc::channel(1);
    let mut client = guest(Flood(stopped)).await;
    client.run(Job::from("")).await.unwrap();
    // The first event is there, so the run is under way; nothing more is read until it has been stopped.
    token(&mut client).await;
    client.cancel().await.unwrap();
    let said = within(was_stopped.recv()).await.unwrap();
    let run = read_run(&mut client).await;
    assert_eq!(run.status, Some(Status::Cancelled));
    assert_eq!(run.events.len() + 1, said, "what was said before the cancel still comes");
    client.run(Job::from("")).await.unwrap();
    token(&mut client).await;
}

#[tokio::test]
async fn a_message_reaches_the_active_run_and_nobody_else() {
    let mut client = guest(async |_: Job, turn: Turn| {
        let text = turn.steer().await.unwrap();
        turn.say(text).await.unwrap();
        Outcome::completed("steered")
    })
    .await;
    client.message("nobody is there").await.unwrap();
    client.run(Job::from("")).await.unwrap();
    client.message("left").await.unwrap();
    assert_eq!(read_run(&mut client).await.tokens(), ["left"]);
    client.message("too late").await.unwrap();
    client.run(Job::from("")).await.unwrap();
    client.message("right").await.unwrap();
    assert_eq!(read_run(&mut client).await.tokens(), ["right"]);
}

#[tokio::test]
async fn an_approval_waits_for_its_own_id_and_takes_the_first_answer() {
    let mut client = guest(async |job: Job, turn: Turn| {
        let asked =
            Approval { tool_name: "Bash".to_owned(), resource: job.assignment, ..Approval::default() };
        Outcome::completed(turn.approve(asked).await.to_string())
    })
    .await;
    let mut ids = Vec::new();
    for (approved, resource) in [(true, "ls"), (false, "rm")] {
        client.run(Job::from(resource)).await.unwrap();
        let FromWorker::ApprovalRequest { id, body } = within(client.next()).await.unwrap() else {
            panic!("it asks first")
        };
        assert_eq!((body.tool_name.as_str(), body.resource.as_str()), ("Bash", resource));
        for wrong in ["", "1", "ask_1", "../x"].into_iter().chain(ids.iter().map(String::as_str)) {
            client.approval_reply(wrong, !approved).await.unwrap();
        }
        client.message("yes").await.unwrap();
        client.approval_reply(id.as_str(), approved).await.unwrap();
        client.approval_reply(id.as_str(), !approved).await.unwrap();
        assert_eq!(read_run(&mut client).await.result, Some(approved.to_string()));
        ids.push(id);
    }
    assert_ne!(ids[0], ids[1]);
    assert!(ids.iter().all(|id| id.len() >= 26), "128 bits take 26 characters of 32: {ids:?}");
}

#[tokio::test]
async fn a_cancel_ends_the_wait_for_an_approval_with_no() {
    let mut client = guest(async |_: Job, turn: Turn| {
        let allowed = turn.approve(Approval::default()).await;
        let _said = turn.say(allowed.to_string()).await;
        Outcome::completed("")
    })
    .await;
    client.run(Job::from("")).await.unwrap();
    let asked = within(client.next()).await.unwrap();
    assert!(matches!(asked, FromWorker::ApprovalRequest { .. }), "{asked:?}");
    client.cancel().await.unwrap();
    let run = read_run(&mut client).await;
    assert_eq!((run.tokens(), run.status), (vec!["false"], Some(Status::Cancelled)));
}

#[tokio::test]
async fn frames_that_mean_nothing_are_ignored() {
    let (endpoint, _server) = serve(echo, Serve::Many).await;
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
        move |job: Job, turn: Turn| {
            let stopped = Arc::clone(&stopped);
            async move {
                turn.say("here").await.unwrap();
                if job.assignment == "leave" {
                    turn.cancelled().await;
                    stopped.send(()).await.unwrap();
                    return Outcome::cancelled();
                }
                Outcome::completed(turn.steer().await.unwrap())
            }
        },
        Serve::Many,
    )
    .await;
    let mut stays = PlainClient::connect(&endpoint, None).await.unwrap();
    stays.run(Job::from("stay")).await.unwrap();
    token(&mut stays).await;
    let mut leaves = PlainClient::connect(&endpoint, None).await.unwrap();
    leaves.run(Job::from("leave")).await.unwrap();
    token(&mut leaves).await;
    drop(leaves);
    within(was_stopped.recv()).await.unwrap();
    stays.message("still here").await.unwrap();
    let run = read_run(&mut stays).await;
    assert_eq!((run.status, run.result.as_deref()), (Some(Status::Completed), Some("still here")));
}

#[tokio::test]
async fn connections_never_see_each_other() {
    let (endpoint, _server) = serve(echo, Serve::Many).await;
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
    let mut client = guest(async |job: Job, _: Turn| {
        assert_ne!(job.assignment, "bad", "no such luck");
        Outcome::completed("fine")
    })
    .await;
    let failed = run(&mut client, "bad").await;
    assert_eq!(failed.status, Some(Status::Error));
    assert!(failed.error.unwrap().contains("no such luck"));
    assert_eq!(run(&mut client, "good").await.status, Some(Status::Completed));
}

#[tokio::test]
async fn an_executor_that_ignores_its_cancel_is_dropped_when_the_grace_is_over() {
    let mut client = guest(async |_: Job, turn: Turn| {
        turn.say("here").await.unwrap();
        std::future::pending().await
    })
    .await;
    client.run(Job::from("")).await.unwrap();
    token(&mut client).await;
    // From here on the clock jumps to whatever is waited for: the grace.
    tokio::time::pause();
    let before = tokio::time::Instant::now();
    client.cancel().await.unwrap();
    let run = loop {
        if let FromWorker::Terminal { status, .. } = client.next().await.unwrap() {
            break status;
        }
    };
    assert_eq!(run, Status::Cancelled);
    assert!(before.elapsed() >= std::time::Duration::from_secs(5));
}

#[tokio::test]
async fn nothing_of_a_run_comes_after_its_terminal() {
    let (late, mut was_late) = mpsc::channel(1);
    let mut client = guest(move |job: Job, turn: Turn| {
        let late = late.clone();
        async move {
            if job.assignment == "leaves somebody behind" {
                tokio::spawn(async move {
                    // Until the run is over, which a voice that is left behind cannot be told otherwise.
                    while turn.say("still talking").await.is_ok() {}
                    late.send(turn.say("late").await).await.unwrap();
                });
            }
            Outcome::completed("")
        }
    })
    .await;
    run(&mut client, "leaves somebody behind").await;
    assert_eq!(within(was_late.recv()).await, Some(Err(Stopped)));
    assert_eq!(run(&mut client, "next").await.tokens(), [""; 0]);
}

#[tokio::test]
async fn every_end_has_its_terminal() {
    let mut client = guest(async |job: Job, _: Turn| match job.assignment.as_str() {
        "fail" => Outcome::failed(RunError::new("broken", "it broke")),
        "refuse" => Outcome::of(qd_protocol::link::Stop::Refused),
        "cancel" => Outcome::cancelled(),
        _ => Outcome::suspended(job.messages),
    })
    .await;
    let failed = run(&mut client, "fail").await;
    assert_eq!((failed.status, failed.error.as_deref()), (Some(Status::Error), Some("it broke")));
    let refused = run(&mut client, "refuse").await;
    assert_eq!((refused.status, refused.error.as_deref()), (Some(Status::Error), Some("the model refused")));
    assert_eq!(run(&mut client, "cancel").await.status, Some(Status::Cancelled));
    let messages = vec![json!({"role": "user", "content": "x"})];
    client.run(Job { messages: messages.clone(), ..Job::from("suspend") }).await.unwrap();
    let suspended = read_run(&mut client).await;
    assert_eq!((suspended.status, suspended.transcript), (Some(Status::Suspended), messages));
    assert!(suspended.events.is_empty());
}

#[tokio::test]
async fn what_is_not_text_travels_under_its_own_name() {
    let mut client = guest(async |_: Job, turn: Turn| {
        turn.event(Said::Thought { text: "hm".to_owned() }).await.unwrap();
        Outcome::completed("")
    })
    .await;
    let run = run(&mut client, "").await;
    assert_eq!(run.events[0], json!({"type": "thought", "content": "hm"}));
}
