//! The MCP tools over streamable HTTP at `/mcp`, with the daemon's access rules, and as plain requests under
//! `/v1/tools`.

use qd_testkit::mcp::session_token;
use qd_testkit::{TestClient, TestDaemon, TestSession, script::*};
use serde_json::{Value, json};

/// Sends one MCP message and returns the response, which may arrive as JSON or as an event.
async fn rpc(client: &TestClient, method: &str, params: Value) -> Value {
    let client = client
        .with_header("content-type", "application/json")
        .with_header("accept", "application/json, text/event-stream");
    let message = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let answer = client.post("/mcp", &message).await;
    assert_eq!(answer.status, 200, "{answer}");
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    let data = text
        .lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .map(str::trim)
        .find(|data| !data.is_empty());
    serde_json::from_str(data.unwrap_or(&text)).unwrap_or_else(|error| panic!("{error}: {text}"))
}

pub(crate) async fn call(client: &TestClient, tool: &str, arguments: Value) -> Value {
    let answer = rpc(client, "tools/call", json!({ "name": tool, "arguments": arguments })).await;
    answer["result"]["structuredContent"].clone()
}

async fn at_work(daemon: &TestDaemon) -> TestSession {
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("at work"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session
}

#[tokio::test]
async fn the_tools_are_served_to_whoever_has_a_token_and_to_nobody_else() {
    let daemon = TestDaemon::start_with(|options| {
        options.tcp();
    })
    .await;
    let session = at_work(&daemon).await;
    let hello = json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": { "name": "t", "version": "1" } });
    let nobody = daemon.tcp_without_token();
    nobody.post("/mcp", &json!({})).await.expect_refusal(401, "unauthorized");
    nobody.with_token("wrong").post("/mcp", &json!({})).await.expect_refusal(401, "unauthorized");
    let forged = format!("{}.{}", session.id, "0".repeat(64));
    nobody.with_token(&forged).post("/mcp", &json!({})).await.expect_refusal(401, "unauthorized");
    let page = daemon.tcp().with_header("origin", "http://evil.test");
    page.post("/mcp", &json!({})).await.expect_refusal(403, "origin_not_allowed");
    daemon
        .tcp()
        .with_header("host", "evil.test")
        .post("/mcp", &json!({}))
        .await
        .expect_refusal(403, "host_not_allowed");
    daemon.tcp().get("/mcp").await.expect_refusal(405, "method_not_allowed");

    for client in
        [daemon.tcp(), daemon.client(), nobody.with_token(&session_token(&daemon.home, &session.id))]
    {
        let response = rpc(&client, "initialize", hello.clone()).await;
        assert_eq!(response["result"]["serverInfo"]["name"], "quarterdeck", "{response}");
        let tools = rpc(&client, "tools/list", json!({})).await;
        assert_eq!(tools["result"]["tools"].as_array().unwrap().len(), 7, "{tools}");
    }
}

#[tokio::test]
async fn a_session_over_http_has_its_own_rights_and_a_person_all() {
    let daemon = TestDaemon::start_with(|options| {
        options.tcp();
    })
    .await;
    let (session, stranger) = (at_work(&daemon).await, at_work(&daemon).await);
    let own = daemon.tcp_without_token().with_token(&session_token(&daemon.home, &session.id));
    let made = call(&own, "spawn_agent", json!({ "agent": "echo", "prompt": "by http", "wait": true })).await;
    assert_eq!(
        (&made["parent"], &made["result"]["text"]),
        (&json!(session.id), &json!("echo: by http")),
        "{made}"
    );
    let refused = call(&own, "cancel", json!({ "session": stranger.id })).await;
    assert_eq!(refused["error"]["code"], "not_found", "{refused}");
    own.get("/v1/sessions").await.expect_refusal(403, "agent_not_allowed");

    let listed = call(&daemon.tcp(), "list", json!({})).await;
    assert_eq!(listed["sessions"].as_array().unwrap().len(), 3, "{listed}");
    let nowhere = call(&daemon.tcp(), "spawn_agent", json!({ "agent": "echo", "prompt": "x" })).await;
    assert_eq!(nowhere["error"]["code"], "invalid_value", "{nowhere}");
    let work = daemon.home.project_dir();
    let here = json!({ "agent": "echo", "prompt": "x", "wait": true, "directory": work.to_str().unwrap() });
    assert_eq!(call(&daemon.tcp(), "spawn_agent", here).await["finished"], true);
}

#[tokio::test]
async fn the_same_request_under_one_key_starts_one_agent() {
    let daemon = TestDaemon::start().await;
    let session = at_work(&daemon).await;
    let own = daemon.client().with_token(&session_token(&daemon.home, &session.id)).with_key("k");
    let wanted = json!({ "agent": "echo", "prompt": "once" });
    let first = own.post("/v1/tools/spawn_agent", &wanted).await.expect(200);
    let again = own.post("/v1/tools/spawn_agent", &wanted).await.expect(200);
    assert_eq!(first, again);
    let other = json!({ "agent": "echo", "prompt": "another" });
    own.post("/v1/tools/spawn_agent", &other).await.expect_refusal(409, "idempotency_conflict");
    // The same key of another caller is a different key.
    let by_user = daemon.client().with_key("k");
    let mut wanted = wanted.clone();
    wanted["directory"] = json!(daemon.home.project_dir().to_str().unwrap());
    assert_ne!(by_user.post("/v1/tools/spawn_agent", &wanted).await.expect(200)["session"], first["session"]);
    own.post("/v1/tools/nothing", &json!({})).await.expect_refusal(404, "not_found");
    own.post("/v1/tools/wait", &json!({ "sessions": [first["session"]], "timeout_s": 60 }))
        .await
        .expect_refusal(400, "invalid_value");
}
