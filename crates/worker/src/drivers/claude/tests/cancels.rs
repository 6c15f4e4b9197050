//! Cancels, wherever they meet the agent.

use qd_protocol::link::{Stop, Up};
use serde_json::json;
use tokio::sync::mpsc;

use super::with;
use crate::drivers::stage::assert_well;

#[tokio::test(start_paused = true)]
async fn a_cancel_in_the_middle_ends_the_turn_and_the_next_gets_its_own_answer() {
    let mut agent = with(|mut hand| async move {
        for _ in 0..3 {
            let prompt = hand.begin().await;
            hand.say("half of").await;
            hand.interrupted().await;
            hand.abort(&prompt).await;
            let prompt = hand.begin().await;
            hand.say("fine").await;
            hand.end(&prompt, "fine").await;
        }
        hand.idle().await;
    })
    .await;
    for at in 0..3 {
        let (name, after) = (format!("r{at}"), format!("after{at}"));
        agent.prompt(&name, "x");
        agent.until_text("half of").await;
        agent.cancel(&name);
        assert_eq!(agent.ended(&name).await.outcome.stop, Stop::Cancelled);
        assert_eq!(agent.play(&after, "x").await.outcome.text.as_deref(), Some("fine"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_was_cancelled_while_it_waited_has_no_result_and_its_turn_ends_all_the_same() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = with(|mut hand| async move {
        for _ in 0..20 {
            let (prompt, _) = hand.told().await;
            hand.fate(&prompt, "queued").await;
            seen.send(()).await.expect("the test listens");
            hand.wanted("interrupt").await;
            hand.fate(&prompt, "cancelled").await;
            let prompt = hand.begin().await;
            hand.say("fine").await;
            hand.end(&prompt, "fine").await;
        }
        hand.idle().await;
    })
    .await;
    for at in 0..20 {
        let name = format!("r{at}");
        agent.prompt(&name, "x");
        sees.recv().await.expect("it was prompted");
        agent.cancel(&name);
        assert_eq!(agent.ended(&name).await.outcome.stop, Stop::Cancelled);
        assert_eq!(agent.play(&format!("after{at}"), "x").await.outcome.text.as_deref(), Some("fine"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_receipt_alone_is_enough_where_it_names_the_prompt() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = with(|mut hand| async move {
        let (prompt, _) = hand.told().await;
        seen.send(()).await.expect("the test listens");
        let id = hand.wanted("interrupt").await;
        hand.grant(&id, json!({"still_queued": [], "cancelled": [prompt]})).await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    sees.recv().await.expect("it was prompted");
    agent.cancel("a");
    assert_eq!(agent.ended("a").await.outcome.stop, Stop::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_the_agent_missed_is_said_again_when_it_begins() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = with(|mut hand| async move {
        let (prompt, _) = hand.told().await;
        seen.send(()).await.expect("the test listens");
        hand.interrupted().await;
        // It has missed that.
        hand.fate(&prompt, "queued").await;
        hand.fate(&prompt, "started").await;
        hand.interrupted().await;
        hand.abort(&prompt).await;
        // No third: the next thing that it hears is a prompt.
        let prompt = hand.begin().await;
        hand.end(&prompt, "fine").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    sees.recv().await.expect("it was prompted");
    agent.cancel("a");
    assert_eq!(agent.ended("a").await.outcome.stop, Stop::Cancelled);
    assert_well(&agent.play("b", "x").await);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_with_an_ask_open_answers_it_after_the_interrupt() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        hand.ask("q", "Bash", json!({"command": "ls"})).await;
        hand.interrupted().await;
        assert_eq!(hand.answered("q").await["response"]["behavior"], "deny");
        hand.send(json!({"type": "control_cancel_request", "request_id": "q"})).await;
        // One more, which it had in the pipe.
        hand.ask("late", "Bash", json!({"command": "ls"})).await;
        assert_eq!(hand.answered("late").await["response"]["behavior"], "deny");
        hand.abort(&prompt).await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.until_ask().await;
    agent.cancel("a");
    let ended = agent.ended("a").await;
    assert_eq!(ended.outcome.stop, Stop::Cancelled);
    assert!(!ended.ups.iter().any(|up| matches!(up, Up::Ask { .. })), "nobody is asked any more: {ended:?}");
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_done_when_the_cancel_came_keeps_its_result() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        hand.say("all of").await;
        hand.interrupted().await;
        hand.end(&prompt, "all of it").await;
        let prompt = hand.begin().await;
        hand.end(&prompt, "next").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.until_text("all of").await;
    agent.cancel("a");
    let ended = agent.ended("a").await;
    assert_eq!((ended.outcome.stop, ended.outcome.text.as_deref()), (Stop::EndTurn, Some("all of it")));
    assert_eq!(agent.play("b", "x").await.outcome.text.as_deref(), Some("next"));
}
