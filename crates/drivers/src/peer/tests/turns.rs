//! Turns: their updates, how they end, and what reaches them while they run.

use qd_protocol::event::{PlanEntry, TokenUsage};
use qd_protocol::limits::LINK_WINDOW;
use qd_protocol::link::{AgentCommand, AgentUpdate, PromptFile, TurnStopReason, TurnUpdate};
use serde_json::json;

use super::{ready_worker, worker_in_run};
use crate::harness::{assert_ended_well, run_id};

#[tokio::test]
async fn a_prompt_is_a_run_and_its_tokens_are_the_text() {
    let (mut harness, mut worker, _) = ready_worker().await;
    for (name, prompt) in [("a", "one two"), ("b", "three")] {
        harness.prompt(name, prompt);
        assert_eq!(worker.expect_run().await, json!({ "kind": "run", "assignment": prompt }));
        worker.send_text(prompt).await;
        worker.complete_run("fine").await;
        let ended = harness.wait_for_end(name).await;
        assert_ended_well(&ended);
        assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), (prompt, Some("fine")));
    }
}

#[tokio::test]
async fn a_result_without_text_is_the_text() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.complete_run("42").await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("42", Some("42")));
}

#[tokio::test]
async fn thoughts_tools_plans_and_usage_are_what_they_are() {
    let (mut harness, mut worker, _) = worker_in_run().await;
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
        worker.send_event(event).await;
    }
    worker.complete_run("").await;
    let call_id = "1".to_owned();
    let updates = harness.wait_for_end("a").await.turn_updates();
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
        TurnUpdate::usage(TokenUsage { input_tokens: 1, output_tokens: 2, cost_usd: 0.5 }),
        TurnUpdate::notice("news: all is well".to_owned()),
    ];
    assert_eq!(updates, expected);
}

#[tokio::test]
async fn an_error_ends_the_run_with_its_message() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.send(json!({"kind": "terminal", "status": "error", "error": "the model is on fire"})).await;
    let error = harness.wait_for_end("a").await.outcome.error.unwrap();
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "the model is on fire"));
    harness.prompt("b", "again");
    worker.expect_run().await;
    worker.send_terminal("error").await;
    let error = harness.wait_for_end("b").await.outcome.error.unwrap();
    assert!(error.message.contains("did not say why"), "{error:?}");
}

#[tokio::test]
async fn invalid_frames_are_ignored() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    for frame in [
        json!({"kind": "event"}),
        json!({"kind": "news"}),
        json!([]),
        json!({"kind": "terminal", "status": "odd"}),
    ] {
        worker.send(frame).await;
    }
    worker.complete_run("fine").await;
    assert_ended_well(&harness.wait_for_end("a").await);
}

#[tokio::test]
async fn frames_between_two_runs_belong_to_neither() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker
        .send_at_once(&[
            json!({"kind": "terminal", "status": "completed", "result": "one"}),
            json!({"kind": "event", "event": {"type": "token", "content": "stray"}}),
            json!({"kind": "terminal", "status": "error", "error": "stray"}),
        ])
        .await;
    assert_eq!(harness.wait_for_end("a").await.text(), "one");
    harness.prompt("b", "x");
    worker.expect_run().await;
    worker.complete_run("two").await;
    let ended = harness.wait_for_end("b").await;
    assert_ended_well(&ended);
    assert_eq!(ended.text(), "two");
}

#[tokio::test]
async fn files_are_left_out_and_named() {
    let (mut harness, mut worker, _) = ready_worker().await;
    let file = PromptFile { name: "a.png".to_owned(), mime: "image/png".to_owned(), data: String::new() };
    harness.prompt_with("a", "look", vec![file], vec![]);
    worker.expect_run().await;
    worker.complete_run("fine").await;
    let notices = harness.wait_for_end("a").await.notices();
    assert_eq!(notices, ["the worker cannot take the file a.png, which was left out"]);
}

#[tokio::test]
async fn a_steer_is_a_message_and_counts_as_taken_once_it_was_read() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    let steer = harness.steer("a", "to the left");
    assert_eq!(worker.next_frame().await, json!({"kind": "message", "text": "to the left"}));
    // The next read answers the ping; there is nothing else to read until the cancel.
    let taken = tokio::spawn(async move {
        let cancel = worker.next_frame().await;
        (worker, cancel)
    });
    assert_eq!(harness.next_update().await, AgentUpdate::SteerTaken { steer });
    harness.cancel("a");
    let (mut worker, cancel) = taken.await.unwrap();
    assert_eq!(cancel, json!({"kind": "cancel"}));
    worker.send_terminal("cancelled").await;
    harness.wait_for_end("a").await;
}

#[tokio::test]
async fn a_steer_that_the_run_may_not_have_read_is_missed() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    let steer = harness.steer("a", "too late");
    assert_eq!(worker.next_frame().await["text"], "too late");
    worker.complete_run("fine").await;
    let ended = harness.wait_for_end("a").await;
    assert_ended_well(&ended);
    assert!(ended.updates.contains(&AgentUpdate::SteerMissed { steer }), "{:?}", ended.updates);
}

#[tokio::test]
async fn a_cancel_is_passed_on_and_the_next_run_is_on_the_same_connection() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.send_text("begun").await;
    harness.wait_for_text("begun").await;
    harness.cancel("a");
    assert_eq!(worker.next_frame().await, json!({"kind": "cancel"}));
    worker.send_terminal("cancelled").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    harness.prompt("b", "again");
    worker.expect_run().await;
    worker.complete_run("fine").await;
    assert_ended_well(&harness.wait_for_end("b").await);
}

#[tokio::test]
async fn a_cancel_reaches_a_worker_whose_updates_nobody_reads() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    // More than a session leaves unread, and less than the socket's buffers hold.
    for _ in 0..4 * LINK_WINDOW {
        worker.send_text("x").await;
        worker.send_event(json!({"type": "thought", "content": "y"})).await;
    }
    harness.cancel("a");
    assert_eq!(worker.next_frame().await, json!({"kind": "cancel"}));
    worker.send_terminal("cancelled").await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.text().len()), (TurnStopReason::Cancelled, 4 * LINK_WINDOW));
}

#[tokio::test]
async fn a_cancel_reaches_a_worker_that_never_stops_talking() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    let received = tokio::spawn(async move { (worker.send_until_frame().await, worker) });
    harness.wait_for_text("x").await;
    harness.cancel("a");
    let ended = tokio::spawn(async move { harness.wait_for_end("a").await });
    let (frame, mut worker) = received.await.unwrap();
    assert_eq!(frame, json!({"kind": "cancel"}));
    worker.send_terminal("cancelled").await;
    assert_eq!(ended.await.unwrap().stop(), TurnStopReason::Cancelled);
}

#[tokio::test]
async fn a_killed_turn_closes_its_connection() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    harness.cancel("a");
    assert_eq!(worker.next_frame().await, json!({"kind": "cancel"}));
    let number = harness.next_number();
    harness.link_end.send(AgentCommand::Kill { number, run: run_id("a") });
    worker.expect_hang_up().await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), ended.outcome.agent_ends), (TurnStopReason::Cancelled, true));
}

#[tokio::test]
async fn a_suspended_run_gives_its_transcript_and_is_resumed_with_what_its_session_says() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    let transcript = vec![json!({"role": "user", "content": "x"})];
    worker.send(json!({"kind": "terminal", "status": "suspended", "transcript": transcript})).await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!((ended.stop(), &ended.outcome.transcript), (TurnStopReason::Suspended, &transcript));
    let messages = vec![transcript[0].clone(), json!({"role": "user", "content": "the child is done"})];
    harness.prompt_with("a", "x", vec![], messages.clone());
    assert_eq!(worker.expect_run().await["messages"], json!(messages));
    worker.complete_run("fine").await;
    assert_ended_well(&harness.wait_for_end("a").await);
}
