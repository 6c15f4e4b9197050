//! Cancels at every point at which the server could miss one.

use std::time::Duration;

use qd_protocol::link::{TurnStopReason, TurnUpdate};
use serde_json::json;

use super::fake_agent::command_item;
use super::{agent_in_turn, ready_agent, text};
use crate::harness::let_all_wait;

#[tokio::test(start_paused = true)]
async fn a_cancel_before_the_turn_id_is_known_is_sent_with_the_id_and_again_when_it_begins() {
    let (mut harness, mut fake) = ready_agent().await;
    harness.prompt("a", "x");
    let (start, _) = fake.expect_method("turn/start").await;
    harness.cancel("a");
    let_all_wait().await;
    fake.name_turn(start, "u").await;
    let (too_early, _) = fake.expect_interrupt("u").await;
    fake.send_error(too_early, "no active turn to interrupt").await;
    fake.start_turn("u").await;
    fake.expect_interrupt("u").await;
    fake.stop_turn("u").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    fake.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancel_before_the_turn_begins_is_repeated_at_its_start_and_first_item_only() {
    let (mut harness, mut fake) = ready_agent().await;
    harness.prompt("a", "x");
    fake.accept_prompt("u").await;
    let_all_wait().await;
    harness.cancel("a");
    let (too_early, _) = fake.expect_interrupt("u").await;
    fake.send_error(too_early, "no active turn to interrupt").await;
    fake.start_turn("u").await;
    let (again, _) = fake.expect_interrupt("u").await;
    fake.send_response(again, json!({})).await;
    fake.send_item("item/started", "u", json!({"type": "userMessage", "id": "m"})).await;
    fake.expect_interrupt("u").await;
    fake.send_item("item/started", "u", json!({"type": "agentMessage", "id": "n", "text": ""})).await;
    fake.send_text("u", "n", "words").await;
    fake.expect_silence().await;
    fake.stop_turn("u").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_is_refused_during_a_turn_is_repeated_at_its_next_item() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_item("item/started", "u", json!({"type": "userMessage", "id": "m"})).await;
    let_all_wait().await;
    harness.cancel("a");
    let (refused, _) = fake.expect_interrupt("u").await;
    fake.send_error(refused, "not now").await;
    fake.expect_silence().await;
    fake.send_item("item/started", "u", json!({"type": "agentMessage", "id": "n", "text": ""})).await;
    fake.expect_interrupt("u").await;
    fake.stop_turn("u").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_late_response_to_a_cancel_does_not_affect_the_next_turn() {
    let (mut harness, mut fake) = agent_in_turn().await;
    harness.cancel("a");
    let (withheld, _) = fake.expect_interrupt("u").await;
    fake.stop_turn("u").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);

    harness.prompt("b", "y");
    fake.accept_prompt("v").await;
    fake.start_turn("v").await;
    fake.send_response(withheld, json!({})).await;
    fake.send_text("v", "m", "fine").await;
    fake.complete_turn("v", "completed").await;
    let ended = harness.wait_for_end("b").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "fine"));
    fake.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_cancelled_before_it_was_sent_is_never_sent() {
    let (mut harness, mut fake) = ready_agent().await;
    harness.prompt("a", "x");
    harness.cancel("a");
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    fake.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_turn_waits_a_little_for_its_commands_to_end_and_no_longer() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_item("item/started", "u", command_item("c", "inProgress")).await;
    let_all_wait().await;
    harness.cancel("a");
    fake.expect_interrupt("u").await;
    fake.stop_turn("u").await;
    fake.send_item("item/completed", "u", command_item("c", "failed")).await;
    let ended = harness.wait_for_end("a").await;
    assert!(
        matches!(&ended.updates_without_model_calls()[1], TurnUpdate::ToolFinished { call_id, is_error: true, .. } if call_id == "c")
    );

    harness.prompt("b", "y");
    fake.accept_prompt("v").await;
    fake.start_turn("v").await;
    fake.send_item("item/started", "v", command_item("d", "inProgress")).await;
    let_all_wait().await;
    harness.cancel("b");
    fake.expect_interrupt("v").await;
    fake.complete_turn("v", "interrupted").await;
    let before = tokio::time::Instant::now();
    assert_eq!(harness.wait_for_end("b").await.stop(), TurnStopReason::Cancelled);
    assert!(before.elapsed() <= Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_stops_the_agents_that_the_turn_started_and_waits_for_them() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_turn_event("turn/started", "child", "cu", "inProgress").await;
    let_all_wait().await;
    harness.cancel("a");
    let (_, params) = fake.expect_method("turn/interrupt").await;
    assert_eq!(params, json!({"threadId": "child", "turnId": "cu"}));
    let (_, params) = fake.expect_method("turn/interrupt").await;
    assert_eq!(params["turnId"], "u");
    for thread in ["child", "t"] {
        let (_, params) = fake.expect_method("thread/backgroundTerminals/clean").await;
        assert_eq!(params["threadId"], thread);
    }
    // An agent that starts now is interrupted at once.
    fake.send_turn_event("turn/started", "late", "lu", "inProgress").await;
    let (_, params) = fake.expect_method("turn/interrupt").await;
    assert_eq!(params, json!({"threadId": "late", "turnId": "lu"}));
    fake.complete_turn("u", "interrupted").await;
    for _ in 0..3 {
        let (clean, _) = fake.expect_method("thread/backgroundTerminals/clean").await;
        fake.send_response(clean, json!({})).await;
    }
    fake.send_turn_event("turn/completed", "child", "cu", "interrupted").await;
    let early = tokio::time::timeout(Duration::from_secs(60), harness.wait_for_end("a")).await;
    assert!(early.is_err(), "{early:?}");
    fake.send_turn_event("turn/completed", "late", "lu", "interrupted").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_comes_too_late_keeps_the_servers_outcome() {
    let (mut harness, mut fake) = agent_in_turn().await;
    harness.cancel("a");
    fake.expect_interrupt("u").await;
    fake.send_text("u", "m", "done").await;
    fake.complete_turn("u", "completed").await;
    let clean = fake.expect_clean().await;
    fake.send_response(clean, json!({})).await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!(
        (ended.stop(), ended.updates_without_model_calls()),
        (TurnStopReason::EndTurn, vec![text("done")])
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancel_ends_the_commands_of_its_turn_and_keeps_those_of_earlier_turns() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_item("item/started", "u", command_item("server", "inProgress")).await;
    fake.complete_turn("u", "completed").await;
    harness.wait_for_end("a").await;

    harness.prompt("b", "y");
    fake.accept_prompt("v").await;
    fake.start_turn("v").await;
    fake.send_item("item/started", "v", command_item("mine", "inProgress")).await;
    let_all_wait().await;
    harness.cancel("b");
    fake.expect_method("turn/interrupt").await;
    let (first, _) = fake.expect_method("thread/backgroundTerminals/list").await;
    let running = json!({"data": [{"itemId": "server", "processId": "1"}, {"itemId": "mine", "processId": "2"},
        {"itemId": "never told", "processId": "3"}], "nextCursor": null});
    fake.send_response(first, running.clone()).await;
    for process in ["2", "3"] {
        let (_, params) = fake.expect_method("thread/backgroundTerminals/terminate").await;
        assert_eq!(params, json!({"threadId": "t", "processId": process}));
    }
    fake.complete_turn("v", "interrupted").await;
    let (second, _) = fake.expect_method("thread/backgroundTerminals/list").await;
    fake.send_item("item/completed", "v", command_item("mine", "failed")).await;
    fake.send_response(second, json!({"data": [{"itemId": "server", "processId": "1"}], "nextCursor": null}))
        .await;
    assert_eq!(harness.wait_for_end("b").await.stop(), TurnStopReason::Cancelled);
    fake.expect_silence().await;
}
