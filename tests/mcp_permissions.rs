//! Calls of the MCP tools by an agent that uses such tools without asking: the session's policy judges each call, a
//! person decides where it says so, and the call waits for the decision, also across a restart of the daemon.

use qd_testkit::{TestDaemon, TestHome, TestSession, journal_rules, script::*};
use serde_json::{Value, json};

/// A daemon whose `script` agent counts as one that does not ask.
async fn daemon() -> TestDaemon {
    daemon_with("all").await
}

async fn daemon_with(unasked: &str) -> TestDaemon {
    let home = TestHome::new();
    std::fs::create_dir_all(home.path().join("agents")).unwrap();
    let manifest = format!("[agent]\nname = 'script'\n[turn]\nuses_mcp_unasked = '{unasked}'\n");
    std::fs::write(home.path().join("agents/script.toml"), manifest).unwrap();
    TestDaemon::start_in(home, |_| {}).await
}

fn spawn(title: &str) -> Value {
    mcp("spawn_agent", json!({ "agent": "echo", "prompt": "hi", "title": title, "wait": true }))
}

async fn titles(session: &TestSession) -> Vec<Value> {
    session.client.get("/v1/sessions").await.list().iter().map(|one| one["title"].clone()).collect()
}

#[tokio::test]
async fn a_call_waits_for_a_person_and_is_performed_once() {
    let mut daemon = daemon().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[spawn("wanted")]).await;
    let ask = session.wait_for_run_event(&run, "ask.opened").await.data;
    assert_eq!((&ask["kind"], &ask["tool"]), (&json!("permission"), &json!("mcp__quarterdeck__spawn_agent")));
    assert_eq!(ask["input"], json!({ "agent": "echo", "prompt": "hi", "title": "wanted" }));
    assert!(!titles(&session).await.contains(&json!("wanted")), "nothing is done before");
    daemon.restart().await;
    let session = session.with_client(daemon.client());
    let id = ask["id"].as_str().unwrap();
    session.client.answer_ask(id, &json!({ "decision": "allow_once" })).await.expect(200);
    let ended = session.wait(&run).await;
    assert!(
        ended["text"].as_str().unwrap().contains("echo: hi"),
        "the wait needs no other permission: {ended}"
    );
    assert_eq!(titles(&session).await.iter().filter(|title| **title == "wanted").count(), 1);
    let events = session.events().await;
    assert_eq!(events.iter().filter(|event| event.is_of_run(&run, "ask.opened")).count(), 1);
    assert_eq!(events.iter().filter(|event| event.is_of_run(&run, "ask.delivered")).count(), 1);
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_refused_call_fails_with_the_reason_and_does_nothing() {
    let daemon = daemon().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[spawn("refused")]).await;
    let ask = session.wait_for_ask(&run).await;
    let deny = json!({ "decision": "deny", "reason": "not on a Friday" });
    session.client.answer_ask(&ask, &deny).await.expect(200);
    let ended = session.wait(&run).await;
    assert!(ended["text"].as_str().unwrap().contains("was refused: not on a Friday"), "{ended}");
    assert!(!titles(&session).await.contains(&json!("refused")));
}

#[tokio::test]
async fn a_policy_allows_and_denies_calls_by_their_common_name() {
    let daemon = daemon().await;
    let rules = json!([
        { "tool": "mcp__quarterdeck__list", "decision": "allow" },
        { "tool": "mcp__quarterdeck__spawn_agent", "decision": "deny" },
    ]);
    let session = daemon.session_with(json!({ "agent": "script", "policy": rules })).await;
    let run = session.prompt_script(&[mcp("list", json!({})), spawn("denied")]).await;
    let ended = session.wait(&run).await;
    let text = ended["text"].as_str().unwrap();
    assert!(text.contains("\"agents\"") && text.contains("tool_denied"), "{text}");
    let events = session.events().await;
    assert!(events.iter().all(|event| event.kind != "ask.opened"), "nobody is asked");
    let by_policy =
        events.iter().filter(|event| event.kind == "ask.resolved" && event.data["by"] == "policy");
    assert_eq!(by_policy.count(), 2);
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_cancel_withdraws_the_permission_request_of_a_call() {
    let daemon = daemon().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[spawn("cancelled")]).await;
    session.wait_for_ask(&run).await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert!(session.client.pending_asks().await.is_empty());
    assert!(!titles(&session).await.contains(&json!("cancelled")));
}

#[tokio::test]
async fn an_agent_that_asks_for_all_but_reading_is_judged_for_reading_alone() {
    let daemon = daemon_with("read_only").await;
    let session = daemon.session("script").await;
    // A real agent would have asked for this, and waiting is part of it.
    let run = session.prompt_script(&[spawn("unjudged")]).await;
    assert!(session.wait(&run).await["text"].as_str().unwrap().contains("echo: hi"));
    let run = session.prompt_script(&[mcp("list", json!({}))]).await;
    let ask = session.wait_for_ask(&run).await;
    session.client.answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    assert!(session.wait(&run).await["text"].as_str().unwrap().contains("unjudged"));
}
