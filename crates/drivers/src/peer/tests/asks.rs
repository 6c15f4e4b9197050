//! Approval requests.

use qd_protocol::event::{AskKind, PermissionDecision};
use qd_protocol::link::{AgentUpdate, AskResolution};
use serde_json::json;

use super::worker_in_run;
use crate::harness::{assert_ended_well, decision_reply};

#[tokio::test]
async fn an_approval_is_asked_and_the_answer_is_the_reply() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    for (id, decision, approved) in [
        ("1", PermissionDecision::AllowOnce, true),
        ("2", PermissionDecision::AllowAlways, true),
        ("3", PermissionDecision::Deny, false),
    ] {
        worker.request_approval(id, "Bash", "make").await;
        let ask = harness.wait_for_ask().await;
        assert_eq!((ask.kind, ask.tool.as_deref()), (AskKind::Permission, Some("Bash")));
        assert_eq!((ask.input.clone(), ask.prompt.as_str()), (json!({"command": "make"}), "May I?"));
        assert_ne!(ask.id.as_str(), id, "the worker's name could be guessed");
        harness.answer(&ask, decision_reply(decision, None));
        assert_eq!(
            worker.next_frame().await,
            json!({"kind": "approval_reply", "id": id, "approved": approved})
        );
        assert_eq!(harness.next_update().await, AgentUpdate::AskDelivered { ask: ask.id });
    }
    worker.complete_run("fine").await;
    assert_ended_well(&harness.wait_for_end("a").await);
}

#[tokio::test]
async fn the_reason_of_a_denial_is_sent_before_it() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.request_approval("1", "Bash", "make").await;
    let ask = harness.wait_for_ask().await;
    harness.answer(&ask, decision_reply(PermissionDecision::Deny, Some("it is Sunday")));
    let text = "This was refused, for the reason: it is Sunday";
    assert_eq!(worker.next_frame().await, json!({"kind": "message", "text": text}));
    assert_eq!(worker.next_frame().await, json!({"kind": "approval_reply", "id": "1", "approved": false}));
}

#[tokio::test]
async fn several_wait_at_once_and_each_gets_its_own_answer() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.request_approval("1", "Bash", "one").await;
    worker.request_approval("1", "Bash", "one, again").await;
    worker.request_approval("2", "Bash", "two").await;
    let (first, second) = (harness.wait_for_ask().await, harness.wait_for_ask().await);
    assert_eq!((&first.input["command"], &second.input["command"]), (&json!("one"), &json!("two")));
    harness.answer(&second, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(worker.next_frame().await, json!({"kind": "approval_reply", "id": "2", "approved": true}));
    harness.answer(&first, decision_reply(PermissionDecision::Deny, None));
    assert_eq!(worker.next_frame().await, json!({"kind": "approval_reply", "id": "1", "approved": false}));
}

#[tokio::test]
async fn a_withdrawn_ask_is_denied() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.request_approval("1", "Bash", "make").await;
    let ask = harness.wait_for_ask().await;
    harness.answer(&ask, AskResolution::Withdrawn);
    assert_eq!(worker.next_frame().await, json!({"kind": "approval_reply", "id": "1", "approved": false}));
}

#[tokio::test]
async fn a_cancelled_run_gets_no_approval_and_asks_nobody() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.request_approval("1", "Bash", "make").await;
    let ask = harness.wait_for_ask().await;
    harness.cancel("a");
    assert_eq!(worker.next_frame().await, json!({"kind": "cancel"}));
    harness.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    worker.request_approval("2", "Bash", "make").await;
    worker.send_terminal("cancelled").await;
    assert!(harness.wait_for_end("a").await.asks().is_empty());
    harness.prompt("b", "x");
    assert_eq!(worker.next_frame().await["kind"], "run", "and it was told nothing else");
}

#[tokio::test]
async fn a_run_that_ends_leaves_no_ask_behind() {
    let (mut harness, mut worker, _) = worker_in_run().await;
    worker.request_approval("1", "Bash", "make").await;
    let ask = harness.wait_for_ask().await;
    worker.complete_run("never mind").await;
    assert_ended_well(&harness.wait_for_end("a").await);
    harness.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    harness.prompt("b", "x");
    assert_eq!(worker.next_frame().await["kind"], "run", "nobody waits for the answer");
}
