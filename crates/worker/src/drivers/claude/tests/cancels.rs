//! Cancels, wherever they meet the agent.

use qd_protocol::link::{AgentUpdate, TurnStopReason};
use serde_json::json;
use tokio::sync::mpsc;

use super::start_fake_agent;
use crate::drivers::harness::assert_ended_well;

#[tokio::test(start_paused = true)]
async fn a_cancel_in_the_middle_ends_the_turn_and_the_next_gets_its_own_answer() {
    let mut agent = start_fake_agent(|mut hand| async move {
        for _ in 0..3 {
            let prompt = hand.start_prompt().await;
            hand.send_text("half of").await;
            hand.expect_interrupt().await;
            hand.abort_turn(&prompt).await;
            let prompt = hand.start_prompt().await;
            hand.send_text("fine").await;
            hand.end_turn(&prompt, "fine").await;
        }
        hand.wait_for_hang_up().await;
    })
    .await;
    for at in 0..3 {
        let (name, after) = (format!("r{at}"), format!("after{at}"));
        agent.prompt(&name, "x");
        agent.wait_for_text("half of").await;
        agent.cancel(&name);
        assert_eq!(agent.wait_for_end(&name).await.outcome.stop, TurnStopReason::Cancelled);
        assert_eq!(agent.run_turn(&after, "x").await.outcome.text.as_deref(), Some("fine"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_was_cancelled_while_it_waited_has_no_result_and_its_turn_ends_all_the_same() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = start_fake_agent(|mut hand| async move {
        for _ in 0..20 {
            let (prompt, _) = hand.expect_user_message().await;
            hand.send_lifecycle(&prompt, "queued").await;
            seen.send(()).await.expect("the test listens");
            hand.expect_control_request("interrupt").await;
            hand.send_lifecycle(&prompt, "cancelled").await;
            let prompt = hand.start_prompt().await;
            hand.send_text("fine").await;
            hand.end_turn(&prompt, "fine").await;
        }
        hand.wait_for_hang_up().await;
    })
    .await;
    for at in 0..20 {
        let name = format!("r{at}");
        agent.prompt(&name, "x");
        sees.recv().await.expect("it was prompted");
        agent.cancel(&name);
        assert_eq!(agent.wait_for_end(&name).await.outcome.stop, TurnStopReason::Cancelled);
        assert_eq!(agent.run_turn(&format!("after{at}"), "x").await.outcome.text.as_deref(), Some("fine"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_receipt_alone_is_enough_where_it_names_the_prompt() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = start_fake_agent(|mut hand| async move {
        let (prompt, _) = hand.expect_user_message().await;
        seen.send(()).await.expect("the test listens");
        let id = hand.expect_control_request("interrupt").await;
        hand.answer_request(&id, json!({"still_queued": [], "cancelled": [prompt]})).await;
        hand.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    sees.recv().await.expect("it was prompted");
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.outcome.stop, TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_the_agent_missed_is_said_again_when_it_begins() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = start_fake_agent(|mut hand| async move {
        let (prompt, _) = hand.expect_user_message().await;
        seen.send(()).await.expect("the test listens");
        hand.expect_interrupt().await;
        // It has missed that.
        hand.send_lifecycle(&prompt, "queued").await;
        hand.send_lifecycle(&prompt, "started").await;
        hand.expect_interrupt().await;
        hand.abort_turn(&prompt).await;
        // No third: the next thing that it hears is a prompt.
        let prompt = hand.start_prompt().await;
        hand.end_turn(&prompt, "fine").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    sees.recv().await.expect("it was prompted");
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.outcome.stop, TurnStopReason::Cancelled);
    assert_ended_well(&agent.run_turn("b", "x").await);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_with_an_ask_open_answers_it_after_the_interrupt() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        hand.request_permission("q", "Bash", json!({"command": "ls"})).await;
        hand.expect_interrupt().await;
        assert_eq!(hand.expect_answer("q").await["response"]["behavior"], "deny");
        hand.send(json!({"type": "control_cancel_request", "request_id": "q"})).await;
        // One more, which it had in the pipe.
        hand.request_permission("late", "Bash", json!({"command": "ls"})).await;
        assert_eq!(hand.expect_answer("late").await["response"]["behavior"], "deny");
        hand.abort_turn(&prompt).await;
        hand.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_ask().await;
    agent.cancel("a");
    let ended = agent.wait_for_end("a").await;
    assert_eq!(ended.outcome.stop, TurnStopReason::Cancelled);
    assert!(
        !ended.updates.iter().any(|up| matches!(up, AgentUpdate::Ask { .. })),
        "nobody is asked any more: {ended:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_done_when_the_cancel_came_keeps_its_result() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        hand.send_text("all of").await;
        hand.expect_interrupt().await;
        hand.end_turn(&prompt, "all of it").await;
        let prompt = hand.start_prompt().await;
        hand.end_turn(&prompt, "next").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_text("all of").await;
    agent.cancel("a");
    let ended = agent.wait_for_end("a").await;
    assert_eq!(
        (ended.outcome.stop, ended.outcome.text.as_deref()),
        (TurnStopReason::EndTurn, Some("all of it"))
    );
    assert_eq!(agent.run_turn("b", "x").await.outcome.text.as_deref(), Some("next"));
}
