//! The server against a client from the protocol's own crate, with a prepared backend: how calls are split into
//! requests, how long they last, and what a client gets.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use qd_mcp::server::McpToolRequest;
use qd_mcp::{McpToolServer, ToolBackend, ToolName};
use qd_protocol::error::ErrorDoc;
use rmcp::ServiceExt;
use rmcp::model::{CallToolRequestParams, CallToolResult};
use rmcp::service::{RoleClient, RunningService};
use serde_json::{Map, Value, json};

type PreparedAnswer = Result<Value, (&'static str, &'static str)>;

/// Returns the answers that a test has prepared, one after the other, and records the requests.
#[derive(Debug, Clone, Default)]
struct FakeBackend {
    answers: Arc<Mutex<VecDeque<PreparedAnswer>>>,
    requests: Arc<Mutex<Vec<(ToolName, Value, String)>>>,
}

impl FakeBackend {
    fn with(answers: impl IntoIterator<Item = PreparedAnswer>) -> Self {
        Self { answers: Arc::new(Mutex::new(answers.into_iter().collect())), ..Self::default() }
    }

    fn requests(&self) -> Vec<(ToolName, Value)> {
        self.requests.lock().iter().map(|(tool, arguments, _)| (*tool, arguments.clone())).collect()
    }
}

impl ToolBackend for FakeBackend {
    async fn call(&self, request: McpToolRequest<'_>) -> Result<Map<String, Value>, ErrorDoc> {
        let McpToolRequest { tool, arguments, key, .. } = request;
        // A wait takes as long as it may.
        let timeout = arguments.get("timeout_s").and_then(Value::as_f64).unwrap_or(0.0);
        tokio::time::sleep(Duration::from_secs_f64(timeout)).await;
        self.requests.lock().push((tool, Value::Object(arguments), key));
        let answer = self.answers.lock().pop_front();
        match answer.unwrap_or_else(|| Ok(json!({}))) {
            Ok(Value::Object(fields)) => Ok(fields),
            Ok(other) => panic!("an object: {other}"),
            Err((code, message)) => {
                Err(ErrorDoc { code: code.to_owned(), message: message.to_owned(), details: Map::new() })
            }
        }
    }
}

async fn client(backend: &FakeBackend) -> RunningService<RoleClient, ()> {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let server = McpToolServer::new(backend.clone());
    tokio::spawn(async move { server.serve(theirs).await.unwrap().waiting().await });
    ().serve(ours).await.unwrap()
}

async fn call(
    client: &RunningService<RoleClient, ()>,
    tool: &'static str,
    arguments: Value,
) -> CallToolResult {
    let Value::Object(arguments) = arguments else { panic!("an object") };
    client.call_tool(CallToolRequestParams::new(tool).with_arguments(arguments)).await.unwrap()
}

fn pending() -> PreparedAnswer {
    Ok(json!({ "ask_id": "ask_1", "state": "pending" }))
}

#[tokio::test]
async fn a_client_sees_all_tools_and_calls_one() {
    let backend = FakeBackend::with([Ok(json!({ "agents": [], "sessions": [] }))]);
    let client = client(&backend).await;
    let tools = client.list_all_tools().await.unwrap();
    assert_eq!(tools.len(), ToolName::ALL.len());
    let result = call(&client, "list", json!({})).await;
    assert_eq!(result.structured_content, Some(json!({ "agents": [], "sessions": [] })));
    assert_eq!(result.is_error, Some(false));
    assert_eq!(backend.requests(), [(ToolName::List, json!({}))]);
}

#[tokio::test]
async fn a_failing_tool_is_reported_to_the_model_and_not_as_a_protocol_error() {
    let backend = FakeBackend::with([Err(("not_found", "there is no session x"))]);
    let client = client(&backend).await;
    let result = call(&client, "cancel", json!({ "session": "x" })).await;
    assert_eq!(result.is_error, Some(true));
    let error = &result.structured_content.unwrap()["error"];
    assert_eq!((&error["code"], &error["message"]), (&json!("not_found"), &json!("there is no session x")));
    let unknown = client.call_tool(CallToolRequestParams::new("rm")).await;
    assert!(unknown.unwrap_err().to_string().contains("spawn_agent"));
}

#[tokio::test(start_paused = true)]
async fn a_wait_is_made_of_short_requests_until_all_have_finished() {
    let not_yet = || Ok(json!({ "finished": false, "sessions": [] }));
    let backend = FakeBackend::with([not_yet(), not_yet(), Ok(json!({ "finished": true, "sessions": [1] }))]);
    let client = client(&backend).await;
    let result = call(&client, "wait", json!({ "sessions": ["a"], "timeout_s": 3600 })).await;
    assert_eq!(result.structured_content.unwrap()["sessions"], json!([1]));
    let each = json!({ "sessions": ["a"], "timeout_s": 20.0 });
    assert_eq!(backend.requests(), vec![(ToolName::Wait, each); 3]);
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_with_its_timeout_and_returns_what_there_is() {
    let not_yet = || Ok(json!({ "finished": false, "sessions": [] }));
    let backend = FakeBackend::with([not_yet(), not_yet(), not_yet(), not_yet()]);
    let client = client(&backend).await;
    let result = call(&client, "wait", json!({ "sessions": ["a"] })).await;
    assert_eq!(result.structured_content.unwrap()["finished"], false);
    let waited: f64 =
        backend.requests().iter().map(|(_, requests)| requests["timeout_s"].as_f64().unwrap()).sum();
    assert!((44.0..46.0).contains(&waited), "45 s by default: {waited}");
    for wrong in [json!(-1), json!(3601), json!("soon")] {
        let result = call(&client, "wait", json!({ "sessions": ["a"], "timeout_s": wrong })).await;
        assert_eq!(result.structured_content.unwrap()["error"]["code"], "invalid_value", "{wrong}");
    }
}

#[tokio::test]
async fn spawn_agent_with_wait_starts_once_and_then_waits() {
    let backend = FakeBackend::with([
        Ok(json!({ "session": "ses_1", "run": "run_1" })),
        Ok(json!({ "finished": true, "sessions": [{ "session": "ses_1", "text": "done" }] })),
    ]);
    let client = client(&backend).await;
    let result = call(&client, "spawn_agent", json!({ "agent": "a", "prompt": "p", "wait": true })).await;
    let result = result.structured_content.unwrap();
    assert_eq!((&result["finished"], &result["result"]["text"]), (&json!(true), &json!("done")));
    let requests = backend.requests();
    assert_eq!(requests[0], (ToolName::SpawnAgent, json!({ "agent": "a", "prompt": "p" })));
    assert_eq!(requests[1].1["sessions"], json!(["ses_1"]));
    let keys: Vec<String> = backend.requests.lock().iter().map(|(_, _, key)| key.clone()).collect();
    assert!(keys[0].len() > 32 && keys[0] != keys[1], "{keys:?}");
    let call_of = |key: &str| key.split_once('#').unwrap().0.to_owned();
    assert_eq!(call_of(&keys[0]), call_of(&keys[1]), "they are requests of one call");
}

#[tokio::test]
async fn a_request_that_waits_for_permission_is_repeated_under_the_same_key() {
    let pending = || Err(("permission_pending", "wait"));
    let backend = FakeBackend::with([pending(), pending(), Err(("tool_denied", "refused: not now"))]);
    let client = client(&backend).await;
    let result = call(&client, "list", json!({})).await;
    assert_eq!(result.structured_content.unwrap()["error"]["message"], "refused: not now");
    let keys: Vec<String> = backend.requests.lock().iter().map(|(_, _, key)| key.clone()).collect();
    assert!(keys.len() == 3 && keys.iter().all(|key| *key == keys[0]), "{keys:?}");
}

#[tokio::test(start_paused = true)]
async fn a_question_is_asked_once_and_waited_for_by_its_id() {
    let answered = Ok(json!({ "ask_id": "ask_1", "state": "answered", "answer": "yes" }));
    let backend = FakeBackend::with([pending(), pending(), answered]);
    let client = client(&backend).await;
    let result = call(&client, "ask_human", json!({ "question": "?" })).await;
    assert_eq!(result.structured_content.unwrap()["answer"], "yes");
    let requests = backend.requests();
    assert_eq!(requests[0].1, json!({ "question": "?" }));
    for (_, more) in &requests[1..] {
        assert_eq!((&more["ask_id"], more.get("question")), (&json!("ask_1"), None));
    }
}
