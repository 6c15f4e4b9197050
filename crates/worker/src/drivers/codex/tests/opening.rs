//! How threads begin: with what settings, old ones again, and old ones that are no more.

use qd_protocol::event::Usage;
use qd_protocol::link::{Said, Stop, Up};
use serde_json::json;

use super::hand::thread;
use super::with;

#[tokio::test(start_paused = true)]
async fn a_thread_has_a_name_before_its_first_prompt_and_what_the_session_says_it_is_to_have() {
    let (mut stage, mut hand) = with(|spec| {
        spec.model = Some("big".to_owned());
        spec.system_prompt = Some("be brief".to_owned());
    });
    let params = hand.open().await;
    // The sandbox is the user's own business.
    let wanted = json!({"cwd": "/w", "model": "big", "developerInstructions": "be brief",
        "approvalPolicy": "on-request", "approvalsReviewer": "user"});
    assert_eq!(params, wanted);
    let Up::Ready { agent_session_id, steers } = stage.hear().await else { panic!() };
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
        let (mut stage, mut hand) = with(|_| {});
        hand.greet(json!({"approval_policy": policy})).await;
        let (id, params) = hand.expect("thread/start").await;
        assert_eq!(params.get("approvalPolicy").and_then(|policy| policy.as_str()), wanted, "{policy}");
        hand.answer(id, thread("t")).await;
        stage.hear().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_whose_settings_let_it_do_anything_unasked_is_pointed_out() {
    let (mut stage, mut hand) = with(|_| {});
    hand.greet(json!({})).await;
    let (id, _) = hand.expect("thread/start").await;
    let mut open = thread("t");
    open["sandbox"] = json!({"type": "dangerFullAccess"});
    hand.answer(id, open).await;
    stage.hear().await;
    stage.prompt("a", "x");
    hand.take("u").await;
    hand.started("u").await;
    hand.completed("u", "completed").await;
    let said = stage.ended("a").await.words();
    assert!(matches!(&said[..], [Said::Notice { text }] if text.contains("danger-full-access")), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn an_old_thread_goes_on_and_only_what_is_new_is_counted() {
    let (mut stage, mut hand) = with(|spec| spec.agent_session_id = Some("t".to_owned()));
    hand.greet(json!({})).await;
    let (id, params) = hand.expect("thread/resume").await;
    assert_eq!((&params["threadId"], &params["excludeTurns"]), (&json!("t"), &json!(true)));
    assert_eq!(params["approvalPolicy"], "on-request");
    hand.answer(id, thread("t")).await;
    stage.hear().await;
    // The total of the past, after the answer as the server does it, and even after the next prompt.
    stage.prompt("a", "x");
    let (start, _) = hand.expect("turn/start").await;
    hand.used("t", "old", (1000, 100), (400, 40)).await;
    hand.name(start, "u").await;
    hand.started("u").await;
    hand.used("t", "u", (1100, 107), (100, 7)).await;
    hand.completed("u", "completed").await;
    let ended = stage.ended("a").await;
    let usage = Usage { input_tokens: 100, output_tokens: 7, cost_usd: 0.0 };
    assert_eq!((ended.stop(), ended.words()), (Stop::EndTurn, vec![Said::Usage { usage }]));
}

#[tokio::test(start_paused = true)]
async fn a_thread_that_cannot_be_resumed_is_followed_by_a_new_one_and_the_first_turn_says_so() {
    let (mut stage, mut hand) = with(|spec| spec.agent_session_id = Some("old".to_owned()));
    hand.greet(json!({})).await;
    let (id, _) = hand.expect("thread/resume").await;
    hand.refuse(id, "no rollout found for thread id old").await;
    let (id, _) = hand.expect("thread/start").await;
    hand.answer(id, thread("t")).await;
    let Up::Ready { agent_session_id, .. } = stage.hear().await else { panic!() };
    assert_eq!(agent_session_id.as_deref(), Some("t"));
    for (name, notices) in [("a", 1), ("b", 0)] {
        stage.prompt(name, "x");
        hand.take(name).await;
        hand.started(name).await;
        hand.completed(name, "completed").await;
        let said = stage.ended(name).await.words();
        assert_eq!(said.len(), notices, "{said:?}");
        assert!(said.iter().all(|said| matches!(said, Said::Notice { text } if text.contains("no rollout"))));
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_opens_no_thread_says_why_and_one_that_asks_too_early_is_refused() {
    let (mut stage, mut hand) = with(|_| {});
    let (id, _) = hand.expect("initialize").await;
    hand.ask(json!(0), "account/chatgptAuthTokens/refresh", json!({})).await;
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"error": -32601}));
    hand.answer(id, json!({})).await;
    hand.expect("initialized").await;
    let (id, _) = hand.expect("config/read").await;
    // Older ones may not know it.
    hand.refuse(id, "unknown method").await;
    let (id, params) = hand.expect("thread/start").await;
    assert_eq!(params["approvalPolicy"], "on-request");
    hand.refuse(id, "not signed in").await;
    assert_eq!(stage.gone().await.message, "not signed in");
}
