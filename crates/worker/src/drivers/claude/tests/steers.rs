//! Words on the way: every steer is taken into its turn once, or missed once.

use qd_protocol::EventNumber;
use qd_protocol::link::{AgentUpdate, TurnStopReason};
use serde_json::json;
use tokio::sync::mpsc;

use super::start_fake_agent;
use crate::drivers::harness::{FinishedTurn, assert_ended_well};

/// What became of the steers, in order.
fn steer_outcomes(ended: &FinishedTurn) -> Vec<(EventNumber, bool)> {
    let fate = |up: &AgentUpdate| match up {
        AgentUpdate::SteerTaken { steer } => Some((*steer, true)),
        AgentUpdate::SteerMissed { steer } => Some((*steer, false)),
        _ => None,
    };
    ended.updates.iter().filter_map(fate).collect()
}

#[tokio::test(start_paused = true)]
async fn a_steer_during_a_tool_is_taken_into_the_turn_with_one_result() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        hand.send_text("working").await;
        let (steer, text) = hand.expect_user_message().await;
        assert_eq!(text, "left, please");
        hand.send_lifecycle(&steer, "queued").await;
        hand.send_lifecycle(&steer, "started").await;
        hand.send_text("to the left").await;
        hand.send_lifecycle(&steer, "completed").await;
        hand.send_result(&[&prompt, &steer], json!({"result": "to the left"})).await;
        hand.send_lifecycle(&prompt, "completed").await;
        let prompt = hand.start_prompt().await;
        hand.end_turn(&prompt, "next").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_text("working").await;
    let steer = agent.steer("a", "left, please");
    let ended = agent.wait_for_end("a").await;
    assert_ended_well(&ended);
    assert_eq!(steer_outcomes(&ended), [(steer, true)]);
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("to the left", Some("to the left")));
    assert_eq!(agent.run_turn("b", "x").await.outcome.text.as_deref(), Some("next"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_while_the_model_speaks_follows_in_the_same_turn_whose_answer_is_the_last() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        hand.send_text("one").await;
        let (steer, _) = hand.expect_user_message().await;
        hand.send_lifecycle(&steer, "queued").await;
        hand.end_turn(&prompt, "one").await;
        hand.send_lifecycle(&steer, "started").await;
        hand.send_text("two").await;
        hand.end_turn(&steer, "two").await;
        let prompt = hand.start_prompt().await;
        hand.end_turn(&prompt, "next").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_text("one").await;
    let steer = agent.steer("a", "and then?");
    let ended = agent.wait_for_end("a").await;
    assert_eq!(steer_outcomes(&ended), [(steer, true)]);
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("two", Some("two")));
    assert_eq!(agent.run_turn("b", "x").await.outcome.text.as_deref(), Some("next"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_that_the_agent_drops_is_missed_once() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        hand.send_text("one").await;
        let (steer, _) = hand.expect_user_message().await;
        hand.send_lifecycle(&steer, "queued").await;
        seen.send(()).await.expect("the test listens");
        hand.expect_interrupt().await;
        hand.abort_turn(&prompt).await;
        hand.send_lifecycle(&steer, "cancelled").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_text("one").await;
    let steer = agent.steer("a", "and then?");
    sees.recv().await.expect("it was passed on");
    agent.cancel("a");
    let ended = agent.wait_for_end("a").await;
    assert_eq!(ended.outcome.stop, TurnStopReason::Cancelled);
    assert_eq!(steer_outcomes(&ended), [(steer, false)]);
}

#[tokio::test(start_paused = true)]
async fn a_steer_of_a_turn_that_failed_is_called_back_and_the_failure_stays() {
    let mut agent = start_fake_agent(|mut hand| async move {
        for dropped in [true, false] {
            let prompt = hand.start_prompt().await;
            hand.send_text("one").await;
            let (steer, _) = hand.expect_user_message().await;
            hand.send_lifecycle(&steer, "queued").await;
            hand.send_result(
                &[&prompt],
                json!({"is_error": true, "result": "API Error", "terminal_reason": "api_error"}),
            )
            .await;
            let id = hand.expect_control_request("cancel_async_message").await;
            if dropped {
                hand.send_lifecycle(&steer, "cancelled").await;
                hand.answer_request(&id, json!({"cancelled": true})).await;
            } else {
                // Too late: it had begun with that.
                hand.send_lifecycle(&steer, "started").await;
                hand.answer_request(&id, json!({"cancelled": false})).await;
                hand.end_turn(&steer, "two").await;
            }
        }
        hand.wait_for_hang_up().await;
    })
    .await;
    for (name, taken) in [("a", false), ("b", true)] {
        agent.prompt(name, "x");
        agent.wait_for_text("one").await;
        let steer = agent.steer(name, "and then?");
        let ended = agent.wait_for_end(name).await;
        assert_eq!(
            (ended.outcome.stop, steer_outcomes(&ended)),
            (TurnStopReason::Error, vec![(steer, taken)])
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_steer_waits_until_the_turn_has_begun_and_none_is_passed_on_after_a_cancel() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let (prompt, _) = hand.expect_user_message().await;
        hand.send_lifecycle(&prompt, "queued").await;
        // Nothing is to be heard before this.
        hand.send_lifecycle(&prompt, "started").await;
        let (steer, text) = hand.expect_user_message().await;
        assert_eq!(text, "early");
        hand.send_lifecycle(&steer, "started").await;
        hand.send_text("now").await;
        hand.expect_interrupt().await;
        hand.send_result(
            &[&prompt, &steer],
            json!({"is_error": true, "terminal_reason": "aborted_streaming"}),
        )
        .await;
        // The steer that came after the cancel is not the next thing heard.
        let prompt = hand.start_prompt().await;
        hand.end_turn(&prompt, "next").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    let early = agent.steer("a", "early");
    agent.wait_for_text("now").await;
    agent.cancel("a");
    let late = agent.steer("a", "late");
    let ended = agent.wait_for_end("a").await;
    assert_eq!(
        (ended.outcome.stop, steer_outcomes(&ended)),
        (TurnStopReason::Cancelled, vec![(late, false)])
    );
    assert_ne!(early, late);
    assert_eq!(agent.run_turn("b", "x").await.outcome.text.as_deref(), Some("next"));
}
