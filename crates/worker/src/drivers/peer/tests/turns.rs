//! Turns: what is said in them, how they end, and what reaches them on their way.

use qd_protocol::event::{PlanEntry, Usage};
use qd_protocol::limits::LINK_WINDOW;
use qd_protocol::link::{Down, File, Said, Stop, Up};
use serde_json::json;

use super::{begun, ready};
use crate::drivers::stage::{assert_well, run};

#[tokio::test]
async fn a_prompt_is_a_run_and_its_tokens_are_the_text() {
    let (mut stage, mut hand, _) = ready().await;
    for (name, prompt) in [("a", "one two"), ("b", "three")] {
        stage.prompt(name, prompt);
        assert_eq!(hand.run().await, json!({ "kind": "run", "assignment": prompt }));
        hand.say(prompt).await;
        hand.done("fine").await;
        let ended = stage.ended(name).await;
        assert_well(&ended);
        assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), (prompt, Some("fine")));
    }
}

#[tokio::test]
async fn a_result_without_text_is_the_text() {
    let (mut stage, mut hand, _) = begun().await;
    hand.done("42").await;
    let ended = stage.ended("a").await;
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("42", Some("42")));
}

#[tokio::test]
async fn thoughts_tools_plans_and_usage_are_what_they_are() {
    let (mut stage, mut hand, _) = begun().await;
    for event in [
        json!({"type": "thought", "content": "hm"}),
        json!({"type": "turn"}),
        json!({"type": "tool_started", "call_id": "1", "name": "ls", "input": {"path": "."}}),
        json!({"type": "tool_output", "call_id": "1", "content": "a\n"}),
        json!({"type": "tool_finished", "call_id": "1", "output": "a\n", "is_error": false}),
        json!({"type": "plan", "entries": [{"content": "do", "status": "pending"}]}),
        json!({"type": "usage", "input_tokens": 1, "output_tokens": 2, "cost_usd": 0.5}),
        json!({"type": "news", "message": "all is well"}),
    ] {
        hand.event(event).await;
    }
    hand.done("").await;
    let call_id = "1".to_owned();
    let said = stage.ended("a").await.said();
    let expected = [
        Said::Thought { text: "hm".to_owned() },
        Said::Turn,
        Said::ToolStarted { call_id: call_id.clone(), name: "ls".to_owned(), input: json!({"path": "."}) },
        Said::ToolOutput { call_id: call_id.clone(), text: "a\n".to_owned() },
        Said::ToolFinished { call_id, name: "ls".to_owned(), output: json!("a\n"), is_error: false },
        Said::Plan { entries: vec![PlanEntry { content: "do".to_owned(), status: "pending".to_owned() }] },
        Said::Usage { usage: Usage { input_tokens: 1, output_tokens: 2, cost_usd: 0.5 } },
        Said::Notice { text: "news: all is well".to_owned() },
    ];
    assert_eq!(said, expected);
}

#[tokio::test]
async fn an_error_ends_the_run_with_its_words() {
    let (mut stage, mut hand, _) = begun().await;
    hand.send(json!({"kind": "terminal", "status": "error", "error": "the model is on fire"})).await;
    let error = stage.ended("a").await.outcome.error.unwrap();
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "the model is on fire"));
    stage.prompt("b", "again");
    hand.run().await;
    hand.terminal("error").await;
    let error = stage.ended("b").await.outcome.error.unwrap();
    assert!(error.message.contains("did not say why"), "{error:?}");
}

#[tokio::test]
async fn what_a_worker_may_not_say_means_nothing() {
    let (mut stage, mut hand, _) = begun().await;
    for frame in [
        json!({"kind": "event"}),
        json!({"kind": "news"}),
        json!([]),
        json!({"kind": "terminal", "status": "odd"}),
    ] {
        hand.send(frame).await;
    }
    hand.done("fine").await;
    assert_well(&stage.ended("a").await);
}

#[tokio::test]
async fn words_between_two_runs_belong_to_neither() {
    let (mut stage, mut hand, _) = begun().await;
    hand.send_at_once(&[
        json!({"kind": "terminal", "status": "completed", "result": "one"}),
        json!({"kind": "event", "event": {"type": "token", "content": "stray"}}),
        json!({"kind": "terminal", "status": "error", "error": "stray"}),
    ])
    .await;
    assert_eq!(stage.ended("a").await.text(), "one");
    stage.prompt("b", "x");
    hand.run().await;
    hand.done("two").await;
    let ended = stage.ended("b").await;
    assert_well(&ended);
    assert_eq!(ended.text(), "two");
}

#[tokio::test]
async fn files_are_left_out_and_named() {
    let (mut stage, mut hand, _) = ready().await;
    let file = File { name: "a.png".to_owned(), mime: "image/png".to_owned(), data: String::new() };
    stage.prompt_with("a", "look", vec![file], vec![]);
    hand.run().await;
    hand.done("fine").await;
    let notices = stage.ended("a").await.notices();
    assert_eq!(notices, ["the worker cannot take the file a.png, which was left out"]);
}

#[tokio::test]
async fn a_steer_is_a_message_and_counts_as_taken_once_it_was_read() {
    let (mut stage, mut hand, _) = begun().await;
    let steer = stage.steer("a", "to the left");
    assert_eq!(hand.hear().await, json!({"kind": "message", "text": "to the left"}));
    // The next read answers the sign of life; there is nothing else to read until the cancel.
    let taken = tokio::spawn(async move {
        let cancel = hand.hear().await;
        (hand, cancel)
    });
    assert_eq!(stage.hear().await, Up::SteerTaken { steer });
    stage.cancel("a");
    let (mut hand, cancel) = taken.await.unwrap();
    assert_eq!(cancel, json!({"kind": "cancel"}));
    hand.terminal("cancelled").await;
    stage.ended("a").await;
}

#[tokio::test]
async fn a_steer_that_the_run_may_not_have_read_is_missed() {
    let (mut stage, mut hand, _) = begun().await;
    let steer = stage.steer("a", "too late");
    assert_eq!(hand.hear().await["text"], "too late");
    hand.done("fine").await;
    let ended = stage.ended("a").await;
    assert_well(&ended);
    assert!(ended.ups.contains(&Up::SteerMissed { steer }), "{:?}", ended.ups);
}

#[tokio::test]
async fn a_cancel_is_passed_on_and_the_next_run_is_on_the_same_connection() {
    let (mut stage, mut hand, _) = begun().await;
    hand.say("begun").await;
    stage.until_text("begun").await;
    stage.cancel("a");
    assert_eq!(hand.hear().await, json!({"kind": "cancel"}));
    hand.terminal("cancelled").await;
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
    stage.prompt("b", "again");
    hand.run().await;
    hand.done("fine").await;
    assert_well(&stage.ended("b").await);
}

#[tokio::test]
async fn a_cancel_reaches_a_worker_whose_words_nobody_takes() {
    let (mut stage, mut hand, _) = begun().await;
    // More than a session leaves untaken, and less than a wire holds.
    for _ in 0..4 * LINK_WINDOW {
        hand.say("x").await;
        hand.event(json!({"type": "thought", "content": "y"})).await;
    }
    stage.cancel("a");
    assert_eq!(hand.hear().await, json!({"kind": "cancel"}));
    hand.terminal("cancelled").await;
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), ended.text().len()), (Stop::Cancelled, 4 * LINK_WINDOW));
}

#[tokio::test]
async fn a_cancel_reaches_a_worker_that_never_stops_talking() {
    let (mut stage, mut hand, _) = begun().await;
    let told = tokio::spawn(async move { (hand.talk_until_told().await, hand) });
    stage.until_text("x").await;
    stage.cancel("a");
    let ended = tokio::spawn(async move { stage.ended("a").await });
    let (frame, mut hand) = told.await.unwrap();
    assert_eq!(frame, json!({"kind": "cancel"}));
    hand.terminal("cancelled").await;
    assert_eq!(ended.await.unwrap().stop(), Stop::Cancelled);
}

#[tokio::test]
async fn a_turn_that_is_given_no_more_time_takes_its_connection_with_it() {
    let (mut stage, mut hand, _) = begun().await;
    stage.cancel("a");
    assert_eq!(hand.hear().await, json!({"kind": "cancel"}));
    let number = stage.next();
    stage.end.send(Down::Kill { number, run: run("a") });
    hand.hung_up().await;
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), ended.outcome.agent_ends), (Stop::Cancelled, true));
}

#[tokio::test]
async fn a_suspended_run_gives_its_transcript_and_is_resumed_with_what_its_session_says() {
    let (mut stage, mut hand, _) = begun().await;
    let transcript = vec![json!({"role": "user", "content": "x"})];
    hand.send(json!({"kind": "terminal", "status": "suspended", "transcript": transcript})).await;
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), &ended.outcome.transcript), (Stop::Suspended, &transcript));
    let messages = vec![transcript[0].clone(), json!({"role": "user", "content": "the child is done"})];
    stage.prompt_with("a", "x", vec![], messages.clone());
    assert_eq!(hand.run().await["messages"], json!(messages));
    hand.done("fine").await;
    assert_well(&stage.ended("a").await);
}
