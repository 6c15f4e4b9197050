//! The mode of the agent, and its context.

use qd_protocol::event::ContextUsage;
use qd_protocol::link::{TurnStopReason, TurnUpdate};
use serde_json::json;

use super::{FakeClaudeAgent, start_fake_agent};
use crate::harness::assert_ended_well;

/// Expects a request for this mode and returns its id.
async fn expect_mode(fake: &mut FakeClaudeAgent, mode: &str) -> String {
    let line = fake.next_json().await;
    assert_eq!(line["request"], json!({"subtype": "set_permission_mode", "mode": mode}), "{line}");
    line["request_id"].as_str().expect("an id").to_owned()
}

async fn report_mode(fake: &mut FakeClaudeAgent, mode: &str) {
    fake.send(json!({"type": "system", "subtype": "status", "status": null, "permissionMode": mode})).await;
}

#[tokio::test(start_paused = true)]
async fn a_prompt_is_sent_when_the_agent_is_in_its_mode() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let id = expect_mode(&mut fake, "plan").await;
        fake.answer_request(&id, json!({"mode": "plan"})).await;
        let prompt = fake.start_prompt().await;
        report_mode(&mut fake, "plan").await;
        fake.end_turn(&prompt, "planned").await;
        // It is in that mode already.
        let prompt = fake.start_prompt().await;
        report_mode(&mut fake, "default").await;
        fake.end_turn(&prompt, "the plan was approved").await;
        let id = expect_mode(&mut fake, "plan").await;
        let refused = json!({"subtype": "error", "request_id": id, "error": "not now"});
        fake.send(json!({"type": "control_response", "response": refused})).await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.set_mode("plan");
    let ended = agent.run_turn("a", "x").await;
    assert_ended_well(&ended);
    assert_eq!(
        ended.turn_updates().iter().filter(|update| matches!(update, TurnUpdate::Mode { .. })).count(),
        0
    );
    let switched = agent.run_turn("b", "x").await.turn_updates();
    assert!(switched.contains(&TurnUpdate::Mode { mode: "default".to_owned() }), "{switched:?}");
    let refused = agent.run_turn("c", "x").await;
    let error = refused.outcome.error.expect("it was refused");
    assert_eq!((refused.outcome.stop, error.code.as_str()), (TurnStopReason::Error, "mode_unavailable"));
    assert!(error.message.contains("not now"), "{}", error.message);
}

#[tokio::test(start_paused = true)]
async fn an_agent_is_switched_back_from_a_mode_without_asking_or_stopped() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        report_mode(&mut fake, "acceptEdits").await;
        let id = expect_mode(&mut fake, "default").await;
        fake.answer_request(&id, json!({"mode": "default"})).await;
        fake.end_turn(&prompt, "well").await;
        let prompt = fake.start_prompt().await;
        report_mode(&mut fake, "bypassPermissions").await;
        let id = expect_mode(&mut fake, "default").await;
        let refused = json!({"subtype": "error", "request_id": id, "error": "no"});
        fake.send(json!({"type": "control_response", "response": refused})).await;
        fake.expect_interrupt().await;
        fake.abort_turn(&prompt).await;
        fake.wait_for_hang_up().await;
    })
    .await;
    let ended = agent.run_turn("a", "x").await;
    assert_ended_well(&ended);
    let is_notice = |update: &TurnUpdate| matches!(update, TurnUpdate::Notice { text, .. } if text.contains("acceptEdits"));
    assert!(ended.turn_updates().iter().any(is_notice));
    for name in ["b", "c"] {
        let stopped = agent.run_turn(name, "x").await;
        let error = stopped.outcome.error.expect("it was stopped, and no turn starts after that");
        assert_eq!(
            (stopped.outcome.stop, error.code.as_str()),
            (TurnStopReason::Error, "agent_overrides_policy")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn the_context_and_its_compaction_are_reported() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        fake.send_text("hello").await;
        let metadata = json!({"trigger": "auto", "pre_tokens": 900});
        fake.send(json!({"type": "system", "subtype": "compact_boundary", "compact_metadata": metadata}))
            .await;
        let usage = json!({"m": {"contextWindow": 1000}});
        fake.send_result(&[&prompt], json!({"result": "hello", "modelUsage": usage})).await;
        fake.wait_for_hang_up().await;
    })
    .await;
    let updates = agent.run_turn("a", "x").await.turn_updates();
    assert!(updates.contains(&TurnUpdate::Context(ContextUsage { used: 22, size: 1000 })), "{updates:?}");
    assert!(updates.contains(&TurnUpdate::Compacted { used_before: Some(900) }), "{updates:?}");
}
