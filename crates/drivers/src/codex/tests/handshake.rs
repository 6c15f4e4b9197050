//! Opening threads: their settings, resuming old ones, and old ones that are gone.

use qd_protocol::event::TokenUsage;
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use serde_json::json;

use super::fake_agent::thread_response;
use super::start_with;

#[tokio::test(start_paused = true)]
async fn a_thread_has_an_id_before_its_first_prompt_and_the_settings_of_the_session() {
    let (mut harness, mut fake) = start_with(|spec| {
        spec.model = Some("big".to_owned());
        spec.system_prompt = Some("be brief".to_owned());
    });
    let params = fake.handshake().await;
    // Whatever the user's own settings allow, the agent may only read and asks for the rest.
    let expected = json!({"cwd": "/w", "model": "big", "developerInstructions": "be brief",
        "approvalPolicy": "on-request", "approvalsReviewer": "user", "sandbox": "read-only"});
    assert_eq!(params, expected);
    let AgentUpdate::Ready { agent_session_id, steers } = harness.next_update().await else { panic!() };
    assert_eq!((agent_session_id.as_deref(), steers), (Some("t"), true));
}

#[tokio::test(start_paused = true)]
async fn a_stricter_approval_policy_of_the_user_is_kept_and_never_is_overridden() {
    for (policy, expected) in [
        (json!(null), Some("on-request")),
        (json!("on-request"), Some("on-request")),
        (json!("never"), Some("on-request")),
        (json!("untrusted"), None),
        (json!({"granular": {"sandbox_approval": false, "rules": true, "mcp_elicitations": true}}), None),
    ] {
        let (mut harness, mut fake) = start_with(|_| {});
        fake.initialize(json!({"approval_policy": policy})).await;
        let (id, params) = fake.expect_method("thread/start").await;
        assert_eq!(params.get("approvalPolicy").and_then(|policy| policy.as_str()), expected, "{policy}");
        fake.send_response(id, thread_response("t")).await;
        harness.next_update().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_take_the_read_only_sandbox_is_refused() {
    let (mut harness, mut fake) = start_with(|_| {});
    fake.initialize(json!({})).await;
    let (id, params) = fake.expect_method("thread/start").await;
    assert_eq!(params["sandbox"], "read-only");
    let mut response = thread_response("t");
    response["sandbox"] = json!({"type": "dangerFullAccess"});
    fake.send_response(id, response).await;
    let error = harness.wait_for_failure().await;
    assert!(error.message.contains("`dangerFullAccess`"), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn an_old_thread_is_resumed_and_only_new_usage_is_counted() {
    let (mut harness, mut fake) = start_with(|spec| spec.agent_session_id = Some("t".to_owned()));
    fake.initialize(json!({})).await;
    let (id, params) = fake.expect_method("thread/resume").await;
    assert_eq!((&params["threadId"], &params["excludeTurns"]), (&json!("t"), &json!(true)));
    assert_eq!(params["approvalPolicy"], "on-request");
    fake.send_response(id, thread_response("t")).await;
    harness.next_update().await;
    // The server reports the total of the past after its response, and even after the next prompt.
    harness.prompt("a", "x");
    let (start, _) = fake.expect_method("turn/start").await;
    fake.send_usage("t", "old", (1000, 100), (400, 40)).await;
    fake.name_turn(start, "u").await;
    fake.start_turn("u").await;
    fake.send_usage("t", "u", (1100, 107), (100, 7)).await;
    fake.complete_turn("u", "completed").await;
    let ended = harness.wait_for_end("a").await;
    let usage = TokenUsage { input_tokens: 100, output_tokens: 7, cost_usd: 0.0 };
    assert_eq!(
        (ended.stop(), ended.updates_without_model_calls()),
        (TurnStopReason::EndTurn, vec![TurnUpdate::usage(usage)])
    );
}

#[tokio::test(start_paused = true)]
async fn a_thread_that_cannot_be_resumed_is_replaced_and_the_first_turn_reports_it() {
    let (mut harness, mut fake) = start_with(|spec| spec.agent_session_id = Some("old".to_owned()));
    fake.initialize(json!({})).await;
    let (id, _) = fake.expect_method("thread/resume").await;
    fake.send_error(id, "no rollout found for thread id old").await;
    let (id, _) = fake.expect_method("thread/start").await;
    fake.send_response(id, thread_response("t")).await;
    let AgentUpdate::Ready { agent_session_id, .. } = harness.next_update().await else { panic!() };
    assert_eq!(agent_session_id.as_deref(), Some("t"));
    for (name, notices) in [("a", 1), ("b", 0)] {
        harness.prompt(name, "x");
        fake.accept_prompt(name).await;
        fake.start_turn(name).await;
        fake.complete_turn(name, "completed").await;
        let updates = harness.wait_for_end(name).await.updates_without_model_calls();
        assert_eq!(updates.len(), notices, "{updates:?}");
        assert!(
            updates.iter().all(
                |update| matches!(update, TurnUpdate::Notice { text, .. } if text.contains("no rollout"))
            )
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_thread_is_reported_with_its_reason_and_early_requests_are_refused() {
    let (mut harness, mut fake) = start_with(|_| {});
    let (id, _) = fake.expect_method("initialize").await;
    fake.send_request(json!(0), "account/chatgptAuthTokens/refresh", json!({})).await;
    assert_eq!(fake.expect_answer(json!(0)).await, json!({"error": -32601}));
    fake.send_response(id, json!({})).await;
    fake.expect_method("initialized").await;
    let (id, _) = fake.expect_method("config/read").await;
    // Older servers may not know this method.
    fake.send_error(id, "unknown method").await;
    let (id, params) = fake.expect_method("thread/start").await;
    assert_eq!(params["approvalPolicy"], "on-request");
    fake.send_error(id, "not signed in").await;
    assert_eq!(harness.wait_for_failure().await.message, "not signed in");
}
