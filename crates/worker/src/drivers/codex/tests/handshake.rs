//! How threads begin: with what settings, old ones again, and old ones that are no more.

use qd_protocol::event::TokenUsage;
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use serde_json::json;

use super::fake_agent::thread_response;
use super::start_with;

#[tokio::test(start_paused = true)]
async fn a_thread_has_a_name_before_its_first_prompt_and_what_the_session_says_it_is_to_have() {
    let (mut stage, mut hand) = start_with(|spec| {
        spec.model = Some("big".to_owned());
        spec.system_prompt = Some("be brief".to_owned());
    });
    let params = hand.handshake().await;
    // The sandbox is the user's own business.
    let wanted = json!({"cwd": "/w", "model": "big", "developerInstructions": "be brief",
        "approvalPolicy": "on-request", "approvalsReviewer": "user"});
    assert_eq!(params, wanted);
    let AgentUpdate::Ready { agent_session_id, steers } = stage.next_update().await else { panic!() };
    assert_eq!((agent_session_id.as_deref(), steers), (Some("t"), true));
}

#[tokio::test(start_paused = true)]
async fn what_the_user_has_set_up_to_be_asked_is_not_weakened_and_never_asking_is_not_taken_over() {
    for (policy, wanted) in [
        (json!(null), Some("on-request")),
        (json!("on-request"), Some("on-request")),
        (json!("never"), Some("on-request")),
        (json!("untrusted"), None),
        (json!({"granular": {"sandbox_approval": false, "rules": true, "mcp_elicitations": true}}), None),
    ] {
        let (mut stage, mut hand) = start_with(|_| {});
        hand.initialize(json!({"approval_policy": policy})).await;
        let (id, params) = hand.expect_method("thread/start").await;
        assert_eq!(params.get("approvalPolicy").and_then(|policy| policy.as_str()), wanted, "{policy}");
        hand.send_response(id, thread_response("t")).await;
        stage.next_update().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_whose_settings_let_it_do_anything_unasked_is_pointed_out() {
    let (mut stage, mut hand) = start_with(|_| {});
    hand.initialize(json!({})).await;
    let (id, _) = hand.expect_method("thread/start").await;
    let mut open = thread_response("t");
    open["sandbox"] = json!({"type": "dangerFullAccess"});
    hand.send_response(id, open).await;
    stage.next_update().await;
    stage.prompt("a", "x");
    hand.accept_prompt("u").await;
    hand.start_turn("u").await;
    hand.complete_turn("u", "completed").await;
    let said = stage.wait_for_end("a").await.updates_without_model_calls();
    assert!(
        matches!(&said[..], [TurnUpdate::Notice { text }] if text.contains("danger-full-access")),
        "{said:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_old_thread_goes_on_and_only_what_is_new_is_counted() {
    let (mut stage, mut hand) = start_with(|spec| spec.agent_session_id = Some("t".to_owned()));
    hand.initialize(json!({})).await;
    let (id, params) = hand.expect_method("thread/resume").await;
    assert_eq!((&params["threadId"], &params["excludeTurns"]), (&json!("t"), &json!(true)));
    assert_eq!(params["approvalPolicy"], "on-request");
    hand.send_response(id, thread_response("t")).await;
    stage.next_update().await;
    // The total of the past, after the answer as the server does it, and even after the next prompt.
    stage.prompt("a", "x");
    let (start, _) = hand.expect_method("turn/start").await;
    hand.send_usage("t", "old", (1000, 100), (400, 40)).await;
    hand.name_turn(start, "u").await;
    hand.start_turn("u").await;
    hand.send_usage("t", "u", (1100, 107), (100, 7)).await;
    hand.complete_turn("u", "completed").await;
    let ended = stage.wait_for_end("a").await;
    let usage = TokenUsage { input_tokens: 100, output_tokens: 7, cost_usd: 0.0 };
    assert_eq!(
        (ended.stop(), ended.updates_without_model_calls()),
        (TurnStopReason::EndTurn, vec![TurnUpdate::Usage { usage }])
    );
}

#[tokio::test(start_paused = true)]
async fn a_thread_that_cannot_be_resumed_is_followed_by_a_new_one_and_the_first_turn_says_so() {
    let (mut stage, mut hand) = start_with(|spec| spec.agent_session_id = Some("old".to_owned()));
    hand.initialize(json!({})).await;
    let (id, _) = hand.expect_method("thread/resume").await;
    hand.send_error(id, "no rollout found for thread id old").await;
    let (id, _) = hand.expect_method("thread/start").await;
    hand.send_response(id, thread_response("t")).await;
    let AgentUpdate::Ready { agent_session_id, .. } = stage.next_update().await else { panic!() };
    assert_eq!(agent_session_id.as_deref(), Some("t"));
    for (name, notices) in [("a", 1), ("b", 0)] {
        stage.prompt(name, "x");
        hand.accept_prompt(name).await;
        hand.start_turn(name).await;
        hand.complete_turn(name, "completed").await;
        let said = stage.wait_for_end(name).await.updates_without_model_calls();
        assert_eq!(said.len(), notices, "{said:?}");
        assert!(
            said.iter()
                .all(|said| matches!(said, TurnUpdate::Notice { text } if text.contains("no rollout")))
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_opens_no_thread_says_why_and_one_that_asks_too_early_is_refused() {
    let (mut stage, mut hand) = start_with(|_| {});
    let (id, _) = hand.expect_method("initialize").await;
    hand.send_request(json!(0), "account/chatgptAuthTokens/refresh", json!({})).await;
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"error": -32601}));
    hand.send_response(id, json!({})).await;
    hand.expect_method("initialized").await;
    let (id, _) = hand.expect_method("config/read").await;
    // Older ones may not know it.
    hand.send_error(id, "unknown method").await;
    let (id, params) = hand.expect_method("thread/start").await;
    assert_eq!(params["approvalPolicy"], "on-request");
    hand.send_error(id, "not signed in").await;
    assert_eq!(stage.wait_for_failure().await.message, "not signed in");
}
