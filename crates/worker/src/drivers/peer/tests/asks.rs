//! What a worker wants leave for.

use qd_protocol::event::{AskKind, Decision};
use qd_protocol::link::{Reply, Up};
use serde_json::json;

use super::begun;
use crate::drivers::stage::{assert_well, decide};

#[tokio::test]
async fn an_approval_is_asked_and_the_answer_is_the_reply() {
    let (mut stage, mut hand, _) = begun().await;
    for (id, decision, approved) in
        [("1", Decision::AllowOnce, true), ("2", Decision::AllowAlways, true), ("3", Decision::Deny, false)]
    {
        hand.approval(id, "Bash", "make").await;
        let ask = stage.until_ask().await;
        assert_eq!((ask.kind, ask.tool.as_deref()), (AskKind::Permission, Some("Bash")));
        assert_eq!((ask.input.clone(), ask.prompt.as_str()), (json!({"command": "make"}), "May I?"));
        assert_ne!(ask.id.as_str(), id, "the worker's name could be guessed");
        stage.answer(&ask, decide(decision, None));
        assert_eq!(hand.hear().await, json!({"kind": "approval_reply", "id": id, "approved": approved}));
        assert_eq!(stage.hear().await, Up::AskDelivered { ask: ask.id });
    }
    hand.done("fine").await;
    assert_well(&stage.ended("a").await);
}

#[tokio::test]
async fn the_reason_of_a_no_goes_before_it() {
    let (mut stage, mut hand, _) = begun().await;
    hand.approval("1", "Bash", "make").await;
    let ask = stage.until_ask().await;
    stage.answer(&ask, decide(Decision::Deny, Some("it is Sunday")));
    let text = "This was refused, for the reason: it is Sunday";
    assert_eq!(hand.hear().await, json!({"kind": "message", "text": text}));
    assert_eq!(hand.hear().await, json!({"kind": "approval_reply", "id": "1", "approved": false}));
}

#[tokio::test]
async fn several_wait_at_once_and_each_gets_its_own_answer() {
    let (mut stage, mut hand, _) = begun().await;
    hand.approval("1", "Bash", "one").await;
    hand.approval("1", "Bash", "one, again").await;
    hand.approval("2", "Bash", "two").await;
    let (one, two) = (stage.until_ask().await, stage.until_ask().await);
    assert_eq!((&one.input["command"], &two.input["command"]), (&json!("one"), &json!("two")));
    stage.answer(&two, decide(Decision::AllowOnce, None));
    assert_eq!(hand.hear().await, json!({"kind": "approval_reply", "id": "2", "approved": true}));
    stage.answer(&one, decide(Decision::Deny, None));
    assert_eq!(hand.hear().await, json!({"kind": "approval_reply", "id": "1", "approved": false}));
}

#[tokio::test]
async fn a_withdrawn_ask_is_a_no() {
    let (mut stage, mut hand, _) = begun().await;
    hand.approval("1", "Bash", "make").await;
    let ask = stage.until_ask().await;
    stage.answer(&ask, Reply::Withdrawn);
    assert_eq!(hand.hear().await, json!({"kind": "approval_reply", "id": "1", "approved": false}));
}

#[tokio::test]
async fn a_cancelled_run_has_leave_for_nothing_and_asks_nobody() {
    let (mut stage, mut hand, _) = begun().await;
    hand.approval("1", "Bash", "make").await;
    let ask = stage.until_ask().await;
    stage.cancel("a");
    assert_eq!(hand.hear().await, json!({"kind": "cancel"}));
    stage.answer(&ask, decide(Decision::AllowOnce, None));
    hand.approval("2", "Bash", "make").await;
    hand.terminal("cancelled").await;
    assert!(stage.ended("a").await.asks().is_empty());
    stage.prompt("b", "x");
    assert_eq!(hand.hear().await["kind"], "run", "and it was told nothing else");
}

#[tokio::test]
async fn a_run_that_ends_leaves_no_ask_behind() {
    let (mut stage, mut hand, _) = begun().await;
    hand.approval("1", "Bash", "make").await;
    let ask = stage.until_ask().await;
    hand.done("never mind").await;
    assert_well(&stage.ended("a").await);
    stage.answer(&ask, decide(Decision::AllowOnce, None));
    stage.prompt("b", "x");
    assert_eq!(hand.hear().await["kind"], "run", "nobody waits for the answer");
}
