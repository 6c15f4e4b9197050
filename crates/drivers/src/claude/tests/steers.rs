//! Steers: each is taken into its turn once, or missed once.

use qd_protocol::EventNumber;
use qd_protocol::link::{AgentUpdate, TurnStopReason};
use serde_json::json;
use tokio::sync::mpsc;

use super::start_fake_agent;
use crate::harness::{FinishedTurn, assert_ended_well};

/// The outcomes of the steers, in order. True if taken.
fn steer_outcomes(ended: &FinishedTurn) -> Vec<(EventNumber, bool)> {
    let outcome = |up: &AgentUpdate| match up {
        AgentUpdate::SteerTaken { steer } => Some((*steer, true)),
        AgentUpdate::SteerMissed { steer } => Some((*steer, false)),
        _ => None,
    };
    ended.updates.iter().filter_map(outcome).collect()
}

#[tokio::test(start_paused = true)]
async fn a_steer_during_a_tool_is_taken_into_the_turn_with_one_result() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        fake.send_text("working").await;
        let (steer, text) = fake.expect_user_message().await;
        assert_eq!(text, "left, please");
        fake.send_lifecycle(&steer, "queued").await;
        fake.send_lifecycle(&steer, "started").await;
        fake.send_text("to the left").await;
        fake.send_lifecycle(&steer, "completed").await;
        fake.send_result(&[&prompt, &steer], json!({"result": "to the left"})).await;
        fake.send_lifecycle(&prompt, "completed").await;
        let prompt = fake.start_prompt().await;
        fake.end_turn(&prompt, "next").await;
        fake.wait_for_hang_up().await;
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
async fn a_steer_while_the_model_writes_follows_in_the_same_turn_and_gives_its_answer() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        fake.send_text("one").await;
        let (steer, _) = fake.expect_user_message().await;
        fake.send_lifecycle(&steer, "queued").await;
        fake.end_turn(&prompt, "one").await;
        fake.send_lifecycle(&steer, "started").await;
        fake.send_text("two").await;
        fake.end_turn(&steer, "two").await;
        let prompt = fake.start_prompt().await;
        fake.end_turn(&prompt, "next").await;
        fake.wait_for_hang_up().await;
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
    let (steered, mut on_steer) = mpsc::channel(1);
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        fake.send_text("one").await;
        let (steer, _) = fake.expect_user_message().await;
        fake.send_lifecycle(&steer, "queued").await;
        steered.send(()).await.expect("the test listens");
        fake.expect_interrupt().await;
        fake.abort_turn(&prompt).await;
        fake.send_lifecycle(&steer, "cancelled").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_text("one").await;
    let steer = agent.steer("a", "and then?");
    on_steer.recv().await.expect("it was passed on");
    agent.cancel("a");
    let ended = agent.wait_for_end("a").await;
    assert_eq!(ended.outcome.stop, TurnStopReason::Cancelled);
    assert_eq!(steer_outcomes(&ended), [(steer, false)]);
}

#[tokio::test(start_paused = true)]
async fn a_steer_of_a_turn_that_failed_is_called_back_and_the_failure_stays() {
    let mut agent = start_fake_agent(|mut fake| async move {
        for dropped in [true, false] {
            let prompt = fake.start_prompt().await;
            fake.send_text("one").await;
            let (steer, _) = fake.expect_user_message().await;
            fake.send_lifecycle(&steer, "queued").await;
            fake.send_result(
                &[&prompt],
                json!({"is_error": true, "result": "API Error", "terminal_reason": "api_error"}),
            )
            .await;
            let id = fake.expect_control_request("cancel_async_message").await;
            if dropped {
                fake.send_lifecycle(&steer, "cancelled").await;
                fake.answer_request(&id, json!({"cancelled": true})).await;
            } else {
                // Too late: the agent had already started on it.
                fake.send_lifecycle(&steer, "started").await;
                fake.answer_request(&id, json!({"cancelled": false})).await;
                fake.end_turn(&steer, "two").await;
            }
        }
        fake.wait_for_hang_up().await;
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
    let mut agent = start_fake_agent(|mut fake| async move {
        let (prompt, _) = fake.expect_user_message().await;
        fake.send_lifecycle(&prompt, "queued").await;
        // No message may arrive before this.
        fake.send_lifecycle(&prompt, "started").await;
        let (steer, text) = fake.expect_user_message().await;
        assert_eq!(text, "early");
        fake.send_lifecycle(&steer, "started").await;
        fake.send_text("now").await;
        fake.expect_interrupt().await;
        fake.send_result(
            &[&prompt, &steer],
            json!({"is_error": true, "terminal_reason": "aborted_streaming"}),
        )
        .await;
        // The next message is not the steer that came after the cancel.
        let prompt = fake.start_prompt().await;
        fake.end_turn(&prompt, "next").await;
        fake.wait_for_hang_up().await;
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
