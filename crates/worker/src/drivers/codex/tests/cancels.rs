//! Cancels, at every edge at which the server could miss one.

use std::time::Duration;

use qd_protocol::link::{Said, Stop};
use serde_json::json;

use super::hand::command;
use super::{begun, ready, text};
use crate::drivers::stage::rest;

#[tokio::test(start_paused = true)]
async fn a_cancel_before_the_turn_has_a_name_is_said_with_its_name_and_again_when_it_begins() {
    let (mut stage, mut hand) = ready().await;
    stage.prompt("a", "x");
    let (start, _) = hand.expect("turn/start").await;
    stage.cancel("a");
    rest().await;
    hand.name(start, "u").await;
    let (too_early, _) = hand.expect_interrupt("u").await;
    hand.refuse(too_early, "no active turn to interrupt").await;
    hand.started("u").await;
    hand.expect_interrupt("u").await;
    hand.stop("u").await;
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
    hand.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancel_between_name_and_beginning_is_said_again_at_each_edge_and_not_more_often() {
    let (mut stage, mut hand) = ready().await;
    stage.prompt("a", "x");
    hand.take("u").await;
    rest().await;
    stage.cancel("a");
    let (too_early, _) = hand.expect_interrupt("u").await;
    hand.refuse(too_early, "no active turn to interrupt").await;
    hand.started("u").await;
    let (again, _) = hand.expect_interrupt("u").await;
    hand.answer(again, json!({})).await;
    hand.item("item/started", "u", json!({"type": "userMessage", "id": "m"})).await;
    hand.expect_interrupt("u").await;
    hand.item("item/started", "u", json!({"type": "agentMessage", "id": "n", "text": ""})).await;
    hand.say("u", "n", "words").await;
    hand.expect_silence().await;
    hand.stop("u").await;
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_is_refused_in_the_middle_of_a_turn_is_said_again_at_its_next_item() {
    let (mut stage, mut hand) = begun().await;
    hand.item("item/started", "u", json!({"type": "userMessage", "id": "m"})).await;
    rest().await;
    stage.cancel("a");
    let (refused, _) = hand.expect_interrupt("u").await;
    hand.refuse(refused, "not now").await;
    hand.expect_silence().await;
    hand.item("item/started", "u", json!({"type": "agentMessage", "id": "n", "text": ""})).await;
    hand.expect_interrupt("u").await;
    hand.stop("u").await;
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn the_end_may_come_before_the_answer_to_the_cancel_and_the_next_turn_is_not_harmed_by_that() {
    let (mut stage, mut hand) = begun().await;
    stage.cancel("a");
    let (withheld, _) = hand.expect_interrupt("u").await;
    hand.stop("u").await;
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);

    stage.prompt("b", "y");
    hand.take("v").await;
    hand.started("v").await;
    hand.answer(withheld, json!({})).await;
    hand.say("v", "m", "fine").await;
    hand.completed("v", "completed").await;
    let ended = stage.ended("b").await;
    assert_eq!((ended.stop(), ended.text().as_str()), (Stop::EndTurn, "fine"));
    hand.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_cancelled_before_it_was_given_is_never_given() {
    let (mut stage, mut hand) = ready().await;
    stage.prompt("a", "x");
    stage.cancel("a");
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
    hand.expect_silence().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_turn_waits_a_little_for_its_commands_to_end_and_no_longer() {
    let (mut stage, mut hand) = begun().await;
    hand.item("item/started", "u", command("c", "inProgress")).await;
    rest().await;
    stage.cancel("a");
    hand.expect_interrupt("u").await;
    hand.stop("u").await;
    hand.item("item/completed", "u", command("c", "failed")).await;
    let ended = stage.ended("a").await;
    assert!(
        matches!(&ended.words()[1], Said::ToolFinished { call_id, is_error: true, .. } if call_id == "c")
    );

    stage.prompt("b", "y");
    hand.take("v").await;
    hand.started("v").await;
    hand.item("item/started", "v", command("d", "inProgress")).await;
    rest().await;
    stage.cancel("b");
    hand.expect_interrupt("v").await;
    hand.completed("v", "interrupted").await;
    let before = tokio::time::Instant::now();
    assert_eq!(stage.ended("b").await.stop(), Stop::Cancelled);
    assert!(before.elapsed() <= Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_stops_the_agents_that_the_turn_started_and_waits_for_them() {
    let (mut stage, mut hand) = begun().await;
    hand.turned("turn/started", "child", "cu", "inProgress").await;
    rest().await;
    stage.cancel("a");
    let (_, params) = hand.expect("turn/interrupt").await;
    assert_eq!(params, json!({"threadId": "child", "turnId": "cu"}));
    let (_, params) = hand.expect("turn/interrupt").await;
    assert_eq!(params["turnId"], "u");
    for thread in ["child", "t"] {
        let (_, params) = hand.expect("thread/backgroundTerminals/clean").await;
        assert_eq!(params["threadId"], thread);
    }
    // One that begins now is too late.
    hand.turned("turn/started", "late", "lu", "inProgress").await;
    let (_, params) = hand.expect("turn/interrupt").await;
    assert_eq!(params, json!({"threadId": "late", "turnId": "lu"}));
    hand.completed("u", "interrupted").await;
    for _ in 0..3 {
        let (clean, _) = hand.expect("thread/backgroundTerminals/clean").await;
        hand.answer(clean, json!({})).await;
    }
    hand.turned("turn/completed", "child", "cu", "interrupted").await;
    let early = tokio::time::timeout(Duration::from_secs(60), stage.ended("a")).await;
    assert!(early.is_err(), "{early:?}");
    hand.turned("turn/completed", "late", "lu", "interrupted").await;
    assert_eq!(stage.ended("a").await.stop(), Stop::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_comes_too_late_leaves_the_end_as_the_server_says_it() {
    let (mut stage, mut hand) = begun().await;
    stage.cancel("a");
    hand.expect_interrupt("u").await;
    hand.say("u", "m", "done").await;
    hand.completed("u", "completed").await;
    let clean = hand.expect_clean().await;
    hand.answer(clean, json!({})).await;
    let ended = stage.ended("a").await;
    assert_eq!((ended.stop(), ended.words()), (Stop::EndTurn, vec![text("done")]));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_ends_the_commands_of_its_turn_and_none_that_an_earlier_one_left_on_purpose() {
    let (mut stage, mut hand) = begun().await;
    hand.item("item/started", "u", command("server", "inProgress")).await;
    hand.completed("u", "completed").await;
    stage.ended("a").await;

    stage.prompt("b", "y");
    hand.take("v").await;
    hand.started("v").await;
    hand.item("item/started", "v", command("mine", "inProgress")).await;
    rest().await;
    stage.cancel("b");
    hand.expect("turn/interrupt").await;
    let (first, _) = hand.expect("thread/backgroundTerminals/list").await;
    let running = json!({"data": [{"itemId": "server", "processId": "1"}, {"itemId": "mine", "processId": "2"},
        {"itemId": "never told", "processId": "3"}], "nextCursor": null});
    hand.answer(first, running.clone()).await;
    for process in ["2", "3"] {
        let (_, params) = hand.expect("thread/backgroundTerminals/terminate").await;
        assert_eq!(params, json!({"threadId": "t", "processId": process}));
    }
    hand.completed("v", "interrupted").await;
    let (second, _) = hand.expect("thread/backgroundTerminals/list").await;
    hand.item("item/completed", "v", command("mine", "failed")).await;
    hand.answer(second, json!({"data": [{"itemId": "server", "processId": "1"}], "nextCursor": null})).await;
    assert_eq!(stage.ended("b").await.stop(), Stop::Cancelled);
    hand.expect_silence().await;
}
