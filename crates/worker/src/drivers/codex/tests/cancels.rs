//! Cancels, at every edge at which the server could miss one.

use std::time::Duration;

use qd_protocol::link::{TurnStopReason, TurnUpdate};
use serde_json::json;

use super::fake_agent::command_item;
use super::{agent_in_turn, ready_agent, text};
use crate::drivers::harness::let_all_wait;

#[tokio::test(start_paused = true)]
async fn a_cancel_before_the_turn_has_a_name_is_said_with_its_name_and_again_when_it_begins() {
    let (mut stage, mut hand) = ready_agent().await;
    stage.prompt("a", "x");
    let (start, _) = hand.expect_method("turn/start").await;
    stage.cancel("a");
    let_all_wait().await;
    hand.name_turn(start, "u").await;
    let (too_early, _) = hand.expect_interrupt("u").await;
    hand.send_error(too_early, "no active turn to interrupt").await;
    hand.start_turn("u").await;
    hand.expect_interrupt("u").await;
    hand.stop_turn("u").await;
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    hand.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancel_between_name_and_beginning_is_said_again_at_each_edge_and_not_more_often() {
    let (mut stage, mut hand) = ready_agent().await;
    stage.prompt("a", "x");
    hand.accept_prompt("u").await;
    let_all_wait().await;
    stage.cancel("a");
    let (too_early, _) = hand.expect_interrupt("u").await;
    hand.send_error(too_early, "no active turn to interrupt").await;
    hand.start_turn("u").await;
    let (again, _) = hand.expect_interrupt("u").await;
    hand.send_response(again, json!({})).await;
    hand.send_item("item/started", "u", json!({"type": "userMessage", "id": "m"})).await;
    hand.expect_interrupt("u").await;
    hand.send_item("item/started", "u", json!({"type": "agentMessage", "id": "n", "text": ""})).await;
    hand.send_text("u", "n", "words").await;
    hand.expect_silence().await;
    hand.stop_turn("u").await;
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_is_refused_in_the_middle_of_a_turn_is_said_again_at_its_next_item() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_item("item/started", "u", json!({"type": "userMessage", "id": "m"})).await;
    let_all_wait().await;
    stage.cancel("a");
    let (refused, _) = hand.expect_interrupt("u").await;
    hand.send_error(refused, "not now").await;
    hand.expect_silence().await;
    hand.send_item("item/started", "u", json!({"type": "agentMessage", "id": "n", "text": ""})).await;
    hand.expect_interrupt("u").await;
    hand.stop_turn("u").await;
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn the_end_may_come_before_the_answer_to_the_cancel_and_the_next_turn_is_not_harmed_by_that() {
    let (mut stage, mut hand) = agent_in_turn().await;
    stage.cancel("a");
    let (withheld, _) = hand.expect_interrupt("u").await;
    hand.stop_turn("u").await;
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);

    stage.prompt("b", "y");
    hand.accept_prompt("v").await;
    hand.start_turn("v").await;
    hand.send_response(withheld, json!({})).await;
    hand.send_text("v", "m", "fine").await;
    hand.complete_turn("v", "completed").await;
    let ended = stage.wait_for_end("b").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (TurnStopReason::EndTurn, "fine"));
    hand.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_cancelled_before_it_was_given_is_never_given() {
    let (mut stage, mut hand) = ready_agent().await;
    stage.prompt("a", "x");
    stage.cancel("a");
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    hand.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_turn_waits_a_little_for_its_commands_to_end_and_no_longer() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_item("item/started", "u", command_item("c", "inProgress")).await;
    let_all_wait().await;
    stage.cancel("a");
    hand.expect_interrupt("u").await;
    hand.stop_turn("u").await;
    hand.send_item("item/completed", "u", command_item("c", "failed")).await;
    let ended = stage.wait_for_end("a").await;
    assert!(
        matches!(&ended.updates_without_model_calls()[1], TurnUpdate::ToolFinished { call_id, is_error: true, .. } if call_id == "c")
    );

    stage.prompt("b", "y");
    hand.accept_prompt("v").await;
    hand.start_turn("v").await;
    hand.send_item("item/started", "v", command_item("d", "inProgress")).await;
    let_all_wait().await;
    stage.cancel("b");
    hand.expect_interrupt("v").await;
    hand.complete_turn("v", "interrupted").await;
    let before = tokio::time::Instant::now();
    assert_eq!(stage.wait_for_end("b").await.stop(), TurnStopReason::Cancelled);
    assert!(before.elapsed() <= Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_stops_the_agents_that_the_turn_started_and_waits_for_them() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_turn_event("turn/started", "child", "cu", "inProgress").await;
    let_all_wait().await;
    stage.cancel("a");
    let (_, params) = hand.expect_method("turn/interrupt").await;
    assert_eq!(params, json!({"threadId": "child", "turnId": "cu"}));
    let (_, params) = hand.expect_method("turn/interrupt").await;
    assert_eq!(params["turnId"], "u");
    for thread in ["child", "t"] {
        let (_, params) = hand.expect_method("thread/backgroundTerminals/clean").await;
        assert_eq!(params["threadId"], thread);
    }
    // One that begins now is too late.
    hand.send_turn_event("turn/started", "late", "lu", "inProgress").await;
    let (_, params) = hand.expect_method("turn/interrupt").await;
    assert_eq!(params, json!({"threadId": "late", "turnId": "lu"}));
    hand.complete_turn("u", "interrupted").await;
    for _ in 0..3 {
        let (clean, _) = hand.expect_method("thread/backgroundTerminals/clean").await;
        hand.send_response(clean, json!({})).await;
    }
    hand.send_turn_event("turn/completed", "child", "cu", "interrupted").await;
    let early = tokio::time::timeout(Duration::from_secs(60), stage.wait_for_end("a")).await;
    assert!(early.is_err(), "{early:?}");
    hand.send_turn_event("turn/completed", "late", "lu", "interrupted").await;
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_comes_too_late_leaves_the_end_as_the_server_says_it() {
    let (mut stage, mut hand) = agent_in_turn().await;
    stage.cancel("a");
    hand.expect_interrupt("u").await;
    hand.send_text("u", "m", "done").await;
    hand.complete_turn("u", "completed").await;
    let clean = hand.expect_clean().await;
    hand.send_response(clean, json!({})).await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!(
        (ended.stop(), ended.updates_without_model_calls()),
        (TurnStopReason::EndTurn, vec![text("done")])
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancel_ends_the_commands_of_its_turn_and_none_that_an_earlier_one_left_on_purpose() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_item("item/started", "u", command_item("server", "inProgress")).await;
    hand.complete_turn("u", "completed").await;
    stage.wait_for_end("a").await;

    stage.prompt("b", "y");
    hand.accept_prompt("v").await;
    hand.start_turn("v").await;
    hand.send_item("item/started", "v", command_item("mine", "inProgress")).await;
    let_all_wait().await;
    stage.cancel("b");
    hand.expect_method("turn/interrupt").await;
    let (first, _) = hand.expect_method("thread/backgroundTerminals/list").await;
    let running = json!({"data": [{"itemId": "server", "processId": "1"}, {"itemId": "mine", "processId": "2"},
        {"itemId": "never told", "processId": "3"}], "nextCursor": null});
    hand.send_response(first, running.clone()).await;
    for process in ["2", "3"] {
        let (_, params) = hand.expect_method("thread/backgroundTerminals/terminate").await;
        assert_eq!(params, json!({"threadId": "t", "processId": process}));
    }
    hand.complete_turn("v", "interrupted").await;
    let (second, _) = hand.expect_method("thread/backgroundTerminals/list").await;
    hand.send_item("item/completed", "v", command_item("mine", "failed")).await;
    hand.send_response(second, json!({"data": [{"itemId": "server", "processId": "1"}], "nextCursor": null}))
        .await;
    assert_eq!(stage.wait_for_end("b").await.stop(), TurnStopReason::Cancelled);
    hand.expect_silence().await;
}
