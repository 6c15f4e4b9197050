//! Failures: of model calls, of a model that hangs or cuts its answer off, of a missing key, of an unknown model.

use std::path::Path;

use qd_testkit::{RealAgent, TestEvent, TestSession};
use serde_json::{Value, json};

use super::shown::Behaviour;
use super::{RealAgentTest, agent, assert_ended, ended, say};

/// Copilot reports a failed call as text, after retries that it reports as text too.
pub(super) async fn errors_as_text() {
    let test = RealAgentTest::new(RealAgent::Copilot).await;
    let session = test.session(json!({})).await;
    assert_ended(&say(&session, "hello").await, "end_turn");
    for (prompt, reason) in [
        ("ERR:401", "401"),
        ("ERR:500", "500"),
        ("GARBLED", "parse"),
        ("EMPTY-BODY", "without sending any chunks"),
        ("DROP", "unexpected EOF"),
    ] {
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

/// A turn that made no model call repeats no usage of the turn before.
pub(super) async fn no_repeated_usage() {
    let test = RealAgentTest::new(RealAgent::Opencode).await;
    let session = test.session(json!({})).await;
    assert_ended(&say(&session, "hello").await, "end_turn");
    let used = session.show().await["usage"].clone();
    let run = session.prompt("SLOW:60 cancelled at once").await;
    session.cancel().await;
    assert_ended(&ended(&session, &run).await, "cancelled");
    if test.requests_with("SLOW:60 cancelled at once").is_empty() {
        assert_eq!(session.show().await["usage"], used, "no call, no usage");
    }
}

/// How the model fails while the agent says nothing: it hangs, or the agent calls it again and again.
fn silent_failures(cli: RealAgent) -> &'static [&'static str] {
    match cli {
        RealAgent::Gemini => &["HANG", "ERR:429", "ERR:500"],
        RealAgent::Qwen => &["HANG", "ERR:429"],
        RealAgent::Opencode => &["HANG", "EMPTY-BODY"],
        _ => &["HANG"],
    }
}

/// The silence is shown, a setting ends it, and the agent works again after it.
pub(super) async fn silence(cli: RealAgent) {
    let test = RealAgentTest::with(cli, "silence_notice_s = 1\nsilence_timeout_s = 4").await;
    let session = test.session(json!({})).await;
    for prompt in silent_failures(cli) {
        let failed = say(&session, prompt).await;
        assert_ended(&failed, "error");
        let events = session.events_of(failed["id"].as_str().unwrap()).await;
        let shown = super::describe_events(&events);
        assert_eq!(failed["error"]["code"], "agent_silent", "{prompt}: {shown}");
        let is_notice = |event: &TestEvent| {
            event.kind == "notice.shown"
                && event.data["text"].as_str().unwrap().starts_with("no word from the model")
        };
        assert!(events.iter().any(is_notice), "{prompt}: {shown}");
        // On a busy machine an agent that works is as silent, and gets another try.
        let mut tries = 0;
        while say(&session, "well again").await["finish_reason"] != "end_turn" {
            tries += 1;
            assert!(tries < 10, "{prompt}: {}", super::describe_events(&session.events().await));
        }
    }
    test.shows(Behaviour::Silence);
}

/// An answer that the model cuts off is not a cancelled turn, whatever the agent makes of it. Part of the conversation
/// that every agent has.
pub(super) async fn check_truncation(test: &RealAgentTest, session: &TestSession) {
    let cut = say(session, "OUT-OF-TOKENS").await;
    let reason = cut["finish_reason"].as_str().unwrap();
    assert!(["end_turn", "max_tokens", "error"].contains(&reason), "{cut:#}");
    let after = say(session, "well again").await;
    assert_ended(&after, "end_turn");
    assert!(after["text"].as_str().unwrap().contains("ECHO[well again]"), "{after:#}");
    test.shows(Behaviour::Truncated);
}

/// What an agent is told that it cannot work with is explained: a missing key in a fresh home, and an unknown model.
pub(super) async fn explanations(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session_with_own_settings(json!({}), sign_out).await;
    let failed = say(&session, "hello").await;
    assert_ended(&failed, "error");
    assert_eq!(failed["error"]["code"], "agent_not_signed_in", "{failed:#}");
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../manifests/{}.toml", agent(cli)));
    let manifest: toml::Table = toml::from_str(&std::fs::read_to_string(manifest).unwrap()).unwrap();
    let sign_in = manifest["agent"]["sign_in"].as_str().unwrap();
    assert!(failed["error"]["message"].as_str().unwrap().contains(sign_in), "{failed:#}");
    test.shows(Behaviour::NotSignedIn);

    let session = test.session(json!({ "model": "no-such-model" })).await;
    let failed = say(&session, "hello").await;
    assert_ended(&failed, "error");
    assert!(failed["error"]["message"].as_str().unwrap().contains("no-such-model"), "{failed:#}");
    test.shows(Behaviour::UnknownModel);
}

/// Removes every key from the agent's variables and settings.
fn sign_out(_: RealAgent, home: &Path, env: &mut Value) {
    env.as_object_mut().unwrap().retain(|name, _| !name.ends_with("_API_KEY"));
    let path = home.join(".config/opencode/opencode.json");
    if let Ok(settings) = std::fs::read_to_string(&path) {
        let mut settings: Value = serde_json::from_str(&settings).unwrap();
        settings["provider"]["scripted"]["options"].as_object_mut().unwrap().remove("apiKey");
        std::fs::write(&path, settings.to_string()).unwrap();
    }
}
