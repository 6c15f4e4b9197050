//! Cancels at every point of a turn.

use qd_protocol::link::{AgentUpdate, TurnStopReason};
use serde_json::json;
use tokio::sync::mpsc;

use super::start_fake_agent;
use crate::harness::assert_ended_well;

#[tokio::test(start_paused = true)]
async fn a_cancel_in_the_middle_ends_the_turn_and_the_next_gets_its_own_answer() {
    let mut agent = start_fake_agent(|mut fake| async move {
        for _ in 0..3 {
            let prompt = fake.start_prompt().await;
            fake.send_text("half of").await;
            fake.expect_interrupt().await;
            fake.abort_turn(&prompt).await;
            let prompt = fake.start_prompt().await;
            fake.send_text("fine").await;
            fake.end_turn(&prompt, "fine").await;
        }
        fake.wait_for_hang_up().await;
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
async fn a_turn_whose_prompt_was_cancelled_while_queued_ends_without_a_result() {
    let (prompted, mut on_prompt) = mpsc::channel(1);
    let mut agent = start_fake_agent(|mut fake| async move {
        for _ in 0..20 {
            let (prompt, _) = fake.expect_user_message().await;
            fake.send_lifecycle(&prompt, "queued").await;
            prompted.send(()).await.expect("the test listens");
            fake.expect_control_request("interrupt").await;
            fake.send_lifecycle(&prompt, "cancelled").await;
            let prompt = fake.start_prompt().await;
            fake.send_text("fine").await;
            fake.end_turn(&prompt, "fine").await;
        }
        fake.wait_for_hang_up().await;
    })
    .await;
    for at in 0..20 {
        let name = format!("r{at}");
        agent.prompt(&name, "x");
        on_prompt.recv().await.expect("it was prompted");
        agent.cancel(&name);
        assert_eq!(agent.wait_for_end(&name).await.outcome.stop, TurnStopReason::Cancelled);
        assert_eq!(agent.run_turn(&format!("after{at}"), "x").await.outcome.text.as_deref(), Some("fine"));
    }
}

#[tokio::test(start_paused = true)]
async fn an_interrupt_response_that_names_the_prompt_ends_the_turn() {
    let (prompted, mut on_prompt) = mpsc::channel(1);
    let mut agent = start_fake_agent(|mut fake| async move {
        let (prompt, _) = fake.expect_user_message().await;
        prompted.send(()).await.expect("the test listens");
        let id = fake.expect_control_request("interrupt").await;
        fake.answer_request(&id, json!({"still_queued": [], "cancelled": [prompt]})).await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    on_prompt.recv().await.expect("it was prompted");
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.outcome.stop, TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_the_agent_missed_is_repeated_when_it_starts() {
    let (prompted, mut on_prompt) = mpsc::channel(1);
    let mut agent = start_fake_agent(|mut fake| async move {
        let (prompt, _) = fake.expect_user_message().await;
        prompted.send(()).await.expect("the test listens");
        fake.expect_interrupt().await;
        // The agent missed the interrupt.
        fake.send_lifecycle(&prompt, "queued").await;
        fake.send_lifecycle(&prompt, "started").await;
        fake.expect_interrupt().await;
        fake.abort_turn(&prompt).await;
        // There is no third interrupt: the next message is a prompt.
        let prompt = fake.start_prompt().await;
        fake.end_turn(&prompt, "fine").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    on_prompt.recv().await.expect("it was prompted");
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.outcome.stop, TurnStopReason::Cancelled);
    assert_ended_well(&agent.run_turn("b", "x").await);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_with_an_ask_open_answers_it_after_the_interrupt() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        fake.request_permission("q", "Bash", json!({"command": "ls"})).await;
        fake.expect_interrupt().await;
        assert_eq!(fake.expect_answer("q").await["response"]["behavior"], "deny");
        fake.send(json!({"type": "control_cancel_request", "request_id": "q"})).await;
        // Another request was already on its way.
        fake.request_permission("late", "Bash", json!({"command": "ls"})).await;
        assert_eq!(fake.expect_answer("late").await["response"]["behavior"], "deny");
        fake.abort_turn(&prompt).await;
        fake.wait_for_hang_up().await;
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
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        fake.send_text("all of").await;
        fake.expect_interrupt().await;
        fake.end_turn(&prompt, "all of it").await;
        let prompt = fake.start_prompt().await;
        fake.end_turn(&prompt, "next").await;
        fake.wait_for_hang_up().await;
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
