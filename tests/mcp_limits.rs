//! Limits on what an agent may start with the MCP tools: number, depth, budget and policy. Starting another agent does
//! not get around them.

use qd_testkit::{TestDaemon, TestMcpClient, TestSession, script::*};
use serde_json::json;

async fn at_work(daemon: &TestDaemon, settings: serde_json::Value) -> TestSession {
    let session = daemon.session_with(settings).await;
    let run = session.prompt_script(&[say("at work"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session
}

#[tokio::test]
async fn a_tree_is_sixteen_deep_at_most() {
    let daemon = TestDaemon::start().await;
    let mut session = daemon.session("script").await;
    for _ in 1..15 {
        session = session.create_child(json!({ "agent": "script" })).await;
    }
    let run = session.prompt_script(&[say("x"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    let made = mcp.call("spawn_agent", json!({ "agent": "echo", "prompt": "the last" })).await;
    let below = TestSession { id: made["session"].as_str().unwrap().to_owned(), ..session.clone() };
    assert_eq!(
        mcp.call("status", json!({ "session": below.id })).await["depth"],
        json!({ "now": 16, "most": 16 })
    );
    let workspace = daemon.workspace().await;
    workspace
        .try_session(json!({ "agent": "echo", "parent": below.id }))
        .await
        .expect_refusal(400, "invalid_value");
}

#[tokio::test]
async fn a_session_has_so_many_open_children_and_a_closed_one_makes_room() {
    let daemon = TestDaemon::start().await;
    let session = at_work(&daemon, json!({ "agent": "script" })).await;
    let mut last = None;
    for _ in 0..64 {
        last = Some(session.create_child(json!({ "agent": "echo" })).await);
    }
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    let one_more = json!({ "agent": "echo", "prompt": "one more", "wait": true });
    let message = mcp.call_refused("spawn_agent", one_more.clone(), "too_many_sessions").await;
    assert!(message.contains("64") && message.contains("send_message"), "{message}");
    let last = last.unwrap();
    last.close().await;
    last.wait_for_event("its end", |event| event.kind == "session.closed").await;
    assert_eq!(mcp.call("spawn_agent", one_more.clone()).await["finished"], true);
    mcp.call_refused("spawn_agent", one_more, "too_many_sessions").await;
}

#[tokio::test]
async fn a_tree_has_so_many_open_sessions_wherever_they_are_made() {
    let daemon = TestDaemon::start().await;
    let root = daemon.session("script").await;
    let session = root.create_child(json!({ "agent": "script" })).await;
    let run = session.prompt_script(&[say("at work"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    for _ in 0..4 {
        let branch = root.create_child(json!({ "agent": "echo" })).await;
        for _ in 0..62 {
            branch.create_child(json!({ "agent": "echo" })).await;
        }
    }
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    // The root, the caller and four times 63 sessions.
    for _ in 0..2 {
        mcp.call("spawn_agent", json!({ "agent": "echo", "prompt": "x" })).await;
    }
    let message =
        mcp.call_refused("spawn_agent", json!({ "agent": "echo", "prompt": "x" }), "too_many_sessions").await;
    assert!(message.contains("256"), "{message}");
}

#[tokio::test]
async fn what_children_cost_counts_against_the_budget_above_them() {
    let daemon = TestDaemon::start().await;
    let session = at_work(&daemon, json!({ "agent": "script", "budget_usd": 1.0 })).await;
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    let dear = steps(&[cost(2.0), sleep_forever()]);
    let made = mcp.call("spawn_agent", json!({ "agent": "script", "prompt": dear, "budget_usd": 50 })).await;
    let waited = mcp.call("wait", json!({ "sessions": [made["session"]], "timeout_s": 25 })).await;
    assert_eq!(waited["sessions"][0]["finish_reason"], "budget_exceeded", "{waited}");
    let runs = session.runs().await;
    assert_eq!(session.wait(runs[0]["id"].as_str().unwrap()).await["finish_reason"], "budget_exceeded");
    let again = mcp.call("spawn_agent", json!({ "agent": "echo", "prompt": "free", "wait": true })).await;
    assert_eq!(again["result"]["finish_reason"], "budget_exceeded", "the tree has nothing left");
    assert_eq!(mcp.call("status", json!({})).await["budget_left_usd"], 0.0);

    let own = at_work(&daemon, json!({ "agent": "script" })).await;
    let mut mcp = TestMcpClient::as_session(&daemon.home, &own).await;
    let made = mcp
        .call(
            "spawn_agent",
            json!({ "agent": "script", "prompt": dear, "budget_usd": 0.5, "wait": true, "timeout_s": 25 }),
        )
        .await;
    assert_eq!(made["result"]["finish_reason"], "budget_exceeded", "its own budget: {made}");
    assert_eq!(own.runs().await[0]["state"], "running");
}

#[tokio::test]
async fn what_an_agent_starts_is_in_its_project_and_may_do_no_more_than_itself() {
    let daemon = TestDaemon::start().await;
    let session =
        at_work(&daemon, json!({ "agent": "script", "policy": "ask", "env": { "GREETING": "hello-there" } }))
            .await;
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    let spawn = |with: serde_json::Value| {
        let mut arguments = json!({ "agent": "script", "prompt": steps(&[say("x")]) });
        for (name, value) in with.as_object().unwrap() {
            arguments[name] = value.clone();
        }
        arguments
    };
    mcp.call_refused("spawn_agent", spawn(json!({ "policy": "allow" })), "invalid_value").await;
    for agent in ["exec:touch /tmp/x", "acp:sh", "pty:sh", "a2a:http://127.0.0.1:1"] {
        mcp.call_refused("spawn_agent", spawn(json!({ "agent": agent })), "unknown_agent").await;
    }
    mcp.call_refused("spawn_agent", spawn(json!({ "directory": "/" })), "invalid_value").await;
    mcp.call_refused("spawn_agent", spawn(json!({ "parent": "ses_1" })), "invalid_request").await;
    mcp.call_refused("spawn_agent", spawn(json!({ "env": {} })), "invalid_request").await;
    let made = mcp.call("spawn_agent", spawn(json!({}))).await;
    let child = TestSession { id: made["session"].as_str().unwrap().to_owned(), ..session.clone() };
    let shown = child.show().await;
    assert_eq!((&shown["policy"], &shown["env"]), (&json!("ask"), &json!(["GREETING"])), "{shown}");
    let stricter = mcp.call("spawn_agent", spawn(json!({ "policy": "deny" }))).await;
    let stricter = TestSession { id: stricter["session"].as_str().unwrap().to_owned(), ..session.clone() };
    assert_eq!(stricter.show().await["policy"], "deny");
}
