//! An exhausted quota, as each agent that names the reset tells it.

use std::path::Path;

use qd_testkit::{RealAgent, TestEvent};
use serde_json::{Value, json};

use super::shown::Behaviour;
use super::{RealAgentTest, assert_ended, ended};

/// Only a subscription has quotas that reset, so Claude is signed in with one.
fn sign_in(cli: RealAgent, _home: &Path, env: &mut Value) {
    if let (RealAgent::Claude | RealAgent::ClaudeAcp, Some(env)) = (cli, env.as_object_mut()) {
        env.remove("ANTHROPIC_API_KEY");
        env.insert("CLAUDE_CODE_OAUTH_TOKEN".to_owned(), json!("a-token-of-nobody"));
    }
}

/// The run that is told so fails and names the reset; the next one waits until somebody releases it, and its prompt does
/// not reach the model before.
pub(super) async fn scene(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session_with_own_settings(json!({}), sign_in).await;
    let told = session.prompt("QUOTA:7200").await;
    let next = session.prompt("hello again").await;
    let failed = ended(&session, &told).await;
    assert_ended(&failed, "error");
    let error = &failed["error"];
    assert_eq!(error["code"], "quota_exhausted", "{failed:#}");
    assert!(error["resets_at"].is_string(), "{failed:#}");
    let is_parked =
        |event: &TestEvent| event.is_of_run(&next, "run.queued") && event.data["reason"] == "quota";
    let parked = session.wait_for_event("the wait for the reset", is_parked).await;
    assert_eq!(parked.data["until"], error["resets_at"]);
    assert_eq!(test.requests_with("hello again").len(), 0, "the model is not called before the reset");
    let account = session.show().await["account"].as_str().unwrap().to_owned();
    test.daemon.client().delete(&format!("/v1/quotas/{account}")).await.expect(200);
    assert_ended(&ended(&session, &next).await, "end_turn");
    test.shows(Behaviour::Quota);
}

/// Why this agent does not play the scene.
pub(super) fn why_not_parked(cli: RealAgent) -> Option<&'static str> {
    let retries = matches!(cli, RealAgent::Opencode | RealAgent::Qwen);
    retries.then_some("it retries for a long time before it names the reset, if it does at all")
}
