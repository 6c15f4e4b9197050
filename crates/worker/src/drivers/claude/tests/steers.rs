//! Words on the way: every steer is taken into its turn once, or missed once.

use qd_protocol::Number;
use qd_protocol::link::{Stop, Up};
use serde_json::json;
use tokio::sync::mpsc;

use super::with;
use crate::drivers::stage::{Ended, assert_well};

/// What became of the steers, in order.
fn fates(ended: &Ended) -> Vec<(Number, bool)> {
    let fate = |up: &Up| match up {
        Up::SteerTaken { steer } => Some((*steer, true)),
        Up::SteerMissed { steer } => Some((*steer, false)),
        _ => None,
    };
    ended.ups.iter().filter_map(fate).collect()
}

#[tokio::test(start_paused = true)]
async fn a_steer_during_a_tool_is_taken_into_the_turn_with_one_result() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        hand.say("working").await;
        let (steer, text) = hand.told().await;
        assert_eq!(text, "left, please");
        hand.fate(&steer, "queued").await;
        hand.fate(&steer, "started").await;
        hand.say("to the left").await;
        hand.fate(&steer, "completed").await;
        hand.result(&[&prompt, &steer], json!({"result": "to the left"})).await;
        hand.fate(&prompt, "completed").await;
        let prompt = hand.begin().await;
        hand.end(&prompt, "next").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.until_text("working").await;
    let steer = agent.steer("a", "left, please");
    let ended = agent.ended("a").await;
    assert_well(&ended);
    assert_eq!(fates(&ended), [(steer, true)]);
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("to the left", Some("to the left")));
    assert_eq!(agent.play("b", "x").await.outcome.text.as_deref(), Some("next"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_while_the_model_speaks_follows_in_the_same_turn_whose_answer_is_the_last() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        hand.say("one").await;
        let (steer, _) = hand.told().await;
        hand.fate(&steer, "queued").await;
        hand.end(&prompt, "one").await;
        hand.fate(&steer, "started").await;
        hand.say("two").await;
        hand.end(&steer, "two").await;
        let prompt = hand.begin().await;
        hand.end(&prompt, "next").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.until_text("one").await;
    let steer = agent.steer("a", "and then?");
    let ended = agent.ended("a").await;
    assert_eq!(fates(&ended), [(steer, true)]);
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("two", Some("two")));
    assert_eq!(agent.play("b", "x").await.outcome.text.as_deref(), Some("next"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_that_the_agent_drops_is_missed_once() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        hand.say("one").await;
        let (steer, _) = hand.told().await;
        hand.fate(&steer, "queued").await;
        seen.send(()).await.expect("the test listens");
        hand.interrupted().await;
        hand.abort(&prompt).await;
        hand.fate(&steer, "cancelled").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.until_text("one").await;
    let steer = agent.steer("a", "and then?");
    sees.recv().await.expect("it was passed on");
    agent.cancel("a");
    let ended = agent.ended("a").await;
    assert_eq!(ended.outcome.stop, Stop::Cancelled);
    assert_eq!(fates(&ended), [(steer, false)]);
}

#[tokio::test(start_paused = true)]
async fn a_steer_of_a_turn_that_failed_is_called_back_and_the_failure_stays() {
    let mut agent = with(|mut hand| async move {
        for dropped in [true, false] {
            let prompt = hand.begin().await;
            hand.say("one").await;
            let (steer, _) = hand.told().await;
            hand.fate(&steer, "queued").await;
            hand.result(
                &[&prompt],
                json!({"is_error": true, "result": "API Error", "terminal_reason": "api_error"}),
            )
            .await;
            let id = hand.wanted("cancel_async_message").await;
            if dropped {
                hand.fate(&steer, "cancelled").await;
                hand.grant(&id, json!({"cancelled": true})).await;
            } else {
                // Too late: it had begun with that.
                hand.fate(&steer, "started").await;
                hand.grant(&id, json!({"cancelled": false})).await;
                hand.end(&steer, "two").await;
            }
        }
        hand.idle().await;
    })
    .await;
    for (name, taken) in [("a", false), ("b", true)] {
        agent.prompt(name, "x");
        agent.until_text("one").await;
        let steer = agent.steer(name, "and then?");
        let ended = agent.ended(name).await;
        assert_eq!((ended.outcome.stop, fates(&ended)), (Stop::Error, vec![(steer, taken)]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_steer_waits_until_the_turn_has_begun_and_none_is_passed_on_after_a_cancel() {
    let mut agent = with(|mut hand| async move {
        let (prompt, _) = hand.told().await;
        hand.fate(&prompt, "queued").await;
        // Nothing is to be heard before this.
        hand.fate(&prompt, "started").await;
        let (steer, text) = hand.told().await;
        assert_eq!(text, "early");
        hand.fate(&steer, "started").await;
        hand.say("now").await;
        hand.interrupted().await;
        hand.result(&[&prompt, &steer], json!({"is_error": true, "terminal_reason": "aborted_streaming"}))
            .await;
        // The steer that came after the cancel is not the next thing heard.
        let prompt = hand.begin().await;
        hand.end(&prompt, "next").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    let early = agent.steer("a", "early");
    agent.until_text("now").await;
    agent.cancel("a");
    let late = agent.steer("a", "late");
    let ended = agent.ended("a").await;
    assert_eq!((ended.outcome.stop, fates(&ended)), (Stop::Cancelled, vec![(late, false)]));
    assert_ne!(early, late);
    assert_eq!(agent.play("b", "x").await.outcome.text.as_deref(), Some("next"));
}
