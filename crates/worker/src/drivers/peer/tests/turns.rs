//! Turns: what is said in them, how they end, and what reaches them on their way.

use qd_protocol::event::{PlanEntry, TokenUsage};
use qd_protocol::limits::LINK_WINDOW;
use qd_protocol::link::{AgentCommand, AgentUpdate, PromptFile, TurnStopReason, TurnUpdate};
use serde_json::json;

use super::{ready_worker, worker_in_run};
use crate::drivers::harness::{assert_ended_well, run_id};

#[tokio::test]
async fn a_prompt_is_a_run_and_its_tokens_are_the_text() {
    let (mut stage, mut hand, _) = ready_worker().await;
    for (name, prompt) in [("a", "one two"), ("b", "three")] {
        stage.prompt(name, prompt);
        assert_eq!(hand.expect_run().await, json!({ "kind": "run", "assignment": prompt }));
        hand.send_text(prompt).await;
        hand.complete_run("fine").await;
        let ended = stage.wait_for_end(name).await;
        assert_ended_well(&ended);
        assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), (prompt, Some("fine")));
    }
}

#[tokio::test]
async fn a_result_without_text_is_the_text() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    hand.complete_run("42").await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("42", Some("42")));
}

#[tokio::test]
async fn thoughts_tools_plans_and_usage_are_what_they_are() {
    let (mut stage, mut hand, _) = worker_in_run().await;
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
        hand.send_event(event).await;
    }
    hand.complete_run("").await;
    let call_id = "1".to_owned();
    let said = stage.wait_for_end("a").await.turn_updates();
    let expected = [
        TurnUpdate::Thought { text: "hm".to_owned() },
        TurnUpdate::ModelCall,
        TurnUpdate::ToolStarted {
            call_id: call_id.clone(),
            name: "ls".to_owned(),
            input: json!({"path": "."}),
        },
        TurnUpdate::ToolOutput { call_id: call_id.clone(), text: "a\n".to_owned() },
        TurnUpdate::ToolFinished { call_id, name: "ls".to_owned(), output: json!("a\n"), is_error: false },
        TurnUpdate::Plan {
            entries: vec![PlanEntry { content: "do".to_owned(), status: "pending".to_owned() }],
        },
        TurnUpdate::Usage { usage: TokenUsage { input_tokens: 1, output_tokens: 2, cost_usd: 0.5 } },
        TurnUpdate::Notice { text: "news: all is well".to_owned() },
    ];
    assert_eq!(said, expected);
}

#[tokio::test]
async fn an_error_ends_the_run_with_its_words() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    hand.send(json!({"kind": "terminal", "status": "error", "error": "the model is on fire"})).await;
    let error = stage.wait_for_end("a").await.outcome.error.unwrap();
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "the model is on fire"));
    stage.prompt("b", "again");
    hand.expect_run().await;
    hand.send_terminal("error").await;
    let error = stage.wait_for_end("b").await.outcome.error.unwrap();
    assert!(error.message.contains("did not say why"), "{error:?}");
}

#[tokio::test]
async fn what_a_worker_may_not_say_means_nothing() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    for frame in [
        json!({"kind": "event"}),
        json!({"kind": "news"}),
        json!([]),
        json!({"kind": "terminal", "status": "odd"}),
    ] {
        hand.send(frame).await;
    }
    hand.complete_run("fine").await;
    assert_ended_well(&stage.wait_for_end("a").await);
}

#[tokio::test]
async fn words_between_two_runs_belong_to_neither() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    hand.send_at_once(&[
        json!({"kind": "terminal", "status": "completed", "result": "one"}),
        json!({"kind": "event", "event": {"type": "token", "content": "stray"}}),
        json!({"kind": "terminal", "status": "error", "error": "stray"}),
    ])
    .await;
    assert_eq!(stage.wait_for_end("a").await.text(), "one");
    stage.prompt("b", "x");
    hand.expect_run().await;
    hand.complete_run("two").await;
    let ended = stage.wait_for_end("b").await;
    assert_ended_well(&ended);
    assert_eq!(ended.text(), "two");
}

#[tokio::test]
async fn files_are_left_out_and_named() {
    let (mut stage, mut hand, _) = ready_worker().await;
    let file = PromptFile { name: "a.png".to_owned(), mime: "image/png".to_owned(), data: String::new() };
    stage.prompt_with("a", "look", vec![file], vec![]);
    hand.expect_run().await;
    hand.complete_run("fine").await;
    let notices = stage.wait_for_end("a").await.notices();
    assert_eq!(notices, ["the worker cannot take the file a.png, which was left out"]);
}

#[tokio::test]
async fn a_steer_is_a_message_and_counts_as_taken_once_it_was_read() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    let steer = stage.steer("a", "to the left");
    assert_eq!(hand.next_frame().await, json!({"kind": "message", "text": "to the left"}));
    // The next read answers the sign of life; there is nothing else to read until the cancel.
    let taken = tokio::spawn(async move {
        let cancel = hand.next_frame().await;
        (hand, cancel)
    });
    assert_eq!(stage.next_update().await, AgentUpdate::SteerTaken { steer });
    stage.cancel("a");
    let (mut hand, cancel) = taken.await.unwrap();
    assert_eq!(cancel, json!({"kind": "cancel"}));
    hand.send_terminal("cancelled").await;
    stage.wait_for_end("a").await;
}

#[tokio::test]
async fn a_steer_that_the_run_may_not_have_read_is_missed() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    let steer = stage.steer("a", "too late");
    assert_eq!(hand.next_frame().await["text"], "too late");
    hand.complete_run("fine").await;
    let ended = stage.wait_for_end("a").await;
    assert_ended_well(&ended);
    assert!(ended.updates.contains(&AgentUpdate::SteerMissed { steer }), "{:?}", ended.updates);
}

#[tokio::test]
async fn a_cancel_is_passed_on_and_the_next_run_is_on_the_same_connection() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    hand.send_text("begun").await;
    stage.wait_for_text("begun").await;
    stage.cancel("a");
    assert_eq!(hand.next_frame().await, json!({"kind": "cancel"}));
    hand.send_terminal("cancelled").await;
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    stage.prompt("b", "again");
    hand.expect_run().await;
    hand.complete_run("fine").await;
    assert_ended_well(&stage.wait_for_end("b").await);
}

#[tokio::test]
async fn a_cancel_reaches_a_worker_whose_words_nobody_takes() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    // More than a session leaves untaken, and less than a wire holds.
    for _ in 0..4 * LINK_WINDOW {
        hand.send_text("x").await;
        hand.send_event(json!({"type": "thought", "content": "y"})).await;
    }
    stage.cancel("a");
    assert_eq!(hand.next_frame().await, json!({"kind": "cancel"}));
    hand.send_terminal("cancelled").await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.text().len()), (TurnStopReason::Cancelled, 4 * LINK_WINDOW));
}

#[tokio::test]
async fn a_cancel_reaches_a_worker_that_never_stops_talking() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    let told = tokio::spawn(async move { (hand.send_until_frame().await, hand) });
    stage.wait_for_text("x").await;
    stage.cancel("a");
    let ended = tokio::spawn(async move { stage.wait_for_end("a").await });
    let (frame, mut hand) = told.await.unwrap();
    assert_eq!(frame, json!({"kind": "cancel"}));
    hand.send_terminal("cancelled").await;
    assert_eq!(ended.await.unwrap().stop(), TurnStopReason::Cancelled);
}

#[tokio::test]
async fn a_turn_that_is_given_no_more_time_takes_its_connection_with_it() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    stage.cancel("a");
    assert_eq!(hand.next_frame().await, json!({"kind": "cancel"}));
    let number = stage.next_number();
    stage.link_end.send(AgentCommand::Kill { number, run: run_id("a") });
    hand.expect_hang_up().await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.outcome.agent_ends), (TurnStopReason::Cancelled, true));
}

#[tokio::test]
async fn a_suspended_run_gives_its_transcript_and_is_resumed_with_what_its_session_says() {
    let (mut stage, mut hand, _) = worker_in_run().await;
    let transcript = vec![json!({"role": "user", "content": "x"})];
    hand.send(json!({"kind": "terminal", "status": "suspended", "transcript": transcript})).await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!((ended.stop(), &ended.outcome.transcript), (TurnStopReason::Suspended, &transcript));
    let messages = vec![transcript[0].clone(), json!({"role": "user", "content": "the child is done"})];
    stage.prompt_with("a", "x", vec![], messages.clone());
    assert_eq!(hand.expect_run().await["messages"], json!(messages));
    hand.complete_run("fine").await;
    assert_ended_well(&stage.wait_for_end("a").await);
}
