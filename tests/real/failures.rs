//! Failures of the model, and what a conversation costs after a restart.

use qd_testkit::RealAgent;
use serde_json::{Value, json};

use super::{RealAgentTest, assert_ended, ended, say};
use crate::workers_loss::process_of;

/// Copilot reports a failed call as text, after retries that it reports as text too.
pub(super) async fn errors_as_text() {
    let test = RealAgentTest::new(RealAgent::Copilot).await;
    let session = test.session(json!({})).await;
    assert_ended(&say(&session, "hello").await, "end_turn");
    for (prompt, reason) in [("ERR:401", "401"), ("GARBLED", "parse"), ("DROP", "unexpected EOF")] {
        let failed = say(&session, prompt).await;
        assert_ended(&failed, "error");
        let message = failed["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("Error: ") && message.contains(reason), "{failed:#}");
        let events = session.events_of(failed["id"].as_str().unwrap()).await;
        let is_retry = |text: &Value| text.as_str().is_some_and(|text| text.contains("Retrying"));
        let retry = events.iter().find(|event| is_retry(&event.data["text"])).unwrap();
        assert_eq!(retry.kind, "notice.shown", "{prompt}: retries are no part of the answer");
    }
    assert_ended(&say(&session, "well again").await, "end_turn");
}

/// The cost of a conversation is not billed again by another process of the agent. The agent tells its own prices.
pub(super) async fn cost_after_restart(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session(json!({})).await;
    let cost = async || session.show().await["usage"]["cost_usd"].as_f64().unwrap();
    assert_ended(&say(&session, "BURST:2000").await, "end_turn");
    let first = cost().await;
    assert!(first > 0.0, "it reports money");
    process_of(&session).await.kill9().await;
    session.wait_for_event("the loss of the worker", |event| event.kind == "worker.exited").await;
    assert_ended(&say(&session, "hello").await, "end_turn");
    let second = cost().await - first;
    assert!(second > 0.0 && second < first / 2.0, "the first turn is billed once: {first} and then {second}");
}

/// A prompt that only looks like a command reaches the model, and a turn that made no call repeats no usage.
pub(super) async fn opencode_prompts() {
    let test = RealAgentTest::new(RealAgent::Opencode).await;
    let session = test.session(json!({})).await;
    let path = say(&session, "/etc/hosts is a path").await;
    assert_ended(&path, "end_turn");
    assert!(path["text"].as_str().unwrap().contains("/etc/hosts is a path"), "{path:#}");
    let used = session.show().await["usage"].clone();
    let run = session.prompt("SLOW:60 cancelled at once").await;
    session.cancel().await;
    assert_ended(&ended(&session, &run).await, "cancelled");
    if test.requests_with("SLOW:60 cancelled at once").is_empty() {
        assert_eq!(session.show().await["usage"], used, "no call, no usage");
    }
}

/// A model that never answers: the silence is shown, and a setting ends it. No run that works follows, because on a busy
/// machine it could be as silent.
pub(super) async fn silence(cli: RealAgent) {
    let test = RealAgentTest::with(cli, "silence_notice_s = 1\nsilence_timeout_s = 4").await;
    let session = test.session(json!({})).await;
    let failed = say(&session, "HANG").await;
    assert_ended(&failed, "error");
    assert_eq!(failed["error"]["code"], "agent_silent", "{failed:#}");
    let events = session.events_of(failed["id"].as_str().unwrap()).await;
    let is_notice = |event: &&qd_testkit::TestEvent| {
        event.kind == "notice.shown"
            && event.data["text"].as_str().unwrap().starts_with("no word from the model")
    };
    assert!(events.iter().any(|event| is_notice(&event)), "{}", super::describe_events(&events));
}
