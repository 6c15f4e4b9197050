//! `GET /openapi.json` is complete and true: every documented route is in it, and every route in it answers.

use hyper::Method;
use qd_testkit::{TestClient, TestDaemon};
use serde_json::Value;

/// The documented routes except those of fleets; a parameter is `{}`.
const ROUTES: &[&str] = &[
    "GET /healthz",
    "GET /v1/version",
    "GET /metrics",
    "POST /v1/workspaces",
    "GET /v1/workspaces",
    "GET /v1/workspaces/{}",
    "DELETE /v1/workspaces/{}",
    "GET /v1/workspaces/{}/events",
    "GET /v1/events",
    "POST /v1/workspaces/{}/sessions",
    "GET /v1/workspaces/{}/sessions",
    "GET /v1/workspaces/{}/sessions/{}",
    "PATCH /v1/workspaces/{}/sessions/{}",
    "DELETE /v1/workspaces/{}/sessions/{}",
    "GET /v1/workspaces/{}/sessions/{}/messages",
    "GET /v1/workspaces/{}/sessions/{}/events",
    "POST /v1/workspaces/{}/agent",
    "POST /v1/workspaces/{}/agent/sessions/{}/cancel",
    "POST /v1/workspaces/{}/agent/sessions/{}/steer",
    "GET /v1/workspaces/{}/agent/sessions/{}/queue",
    "DELETE /v1/workspaces/{}/agent/sessions/{}/queue",
    "DELETE /v1/workspaces/{}/agent/sessions/{}/queue/{}",
    "GET /v1/workspaces/{}/runs",
    "GET /v1/workspaces/{}/runs/{}",
    "GET /v1/workspaces/{}/runs/{}/wait",
    "GET /v1/asks",
    "GET /v1/asks/{}",
    "POST /v1/asks/{}/answer",
    "GET /v1/halt",
    "POST /v1/halt",
    "DELETE /v1/halt",
    "GET /v1/agents",
    "GET /v1/workers",
    "GET /openapi.json",
];

/// Method and path of every operation in the document.
pub(crate) async fn operations(client: &TestClient) -> Vec<(Method, String)> {
    let document = client.get("/openapi.json").await.expect(200);
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().expect("an OpenAPI document has paths") {
        for method in ["get", "post", "put", "patch", "delete"] {
            if item.get(method).is_some() {
                found.push((Method::from_bytes(method.to_uppercase().as_bytes()).unwrap(), path.clone()));
            }
        }
    }
    found
}

/// The path with `with` in place of each parameter.
pub(crate) fn filled(path: &str, with: &str) -> String {
    let part = |part: &str| if part.starts_with('{') { with.to_owned() } else { part.to_owned() };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

#[tokio::test]
async fn the_document_lists_every_route_of_the_contract() {
    let daemon = TestDaemon::start().await;
    let listed: Vec<_> = operations(&daemon.client())
        .await
        .iter()
        .map(|(method, path)| format!("{method} {}", filled(path, "{}")))
        .collect();
    let missing: Vec<_> = ROUTES.iter().filter(|route| !listed.contains(&(**route).to_owned())).collect();
    assert!(missing.is_empty(), "missing: {missing:#?}");
}

#[tokio::test]
async fn every_route_that_the_document_lists_answers() {
    let daemon = TestDaemon::start().await;
    let mut operations = operations(&daemon.client()).await;
    operations.retain(|(_, path)| !path.ends_with("/shutdown"));
    for (method, path) in operations {
        let path = filled(&path, "nobody");
        let status = daemon.client().status(method.clone(), &path, None).await;
        assert!(!matches!(status, 405 | 500..), "{method} {path} gives {status}");
        if status == 404 {
            let answer = daemon.client().request(method, &path, None).await;
            answer.expect_refusal(404, "not_found");
            let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.contains("nobody"), "it is the id that is unknown and not the route: {answer}");
        }
    }
}

#[tokio::test]
async fn the_document_says_what_each_route_answers() {
    let daemon = TestDaemon::start().await;
    let document = daemon.client().get("/openapi.json").await.expect(200);
    assert!(document["openapi"].as_str().unwrap().starts_with("3."));
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let Some(responses) = operation["responses"].as_object() else { continue };
            assert!(!responses.is_empty(), "{method} {path}");
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            let named: Vec<_> = parameters.iter().filter(|p| p["in"] == "path").map(|p| &p["name"]).collect();
            for part in path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')) {
                assert!(named.contains(&&Value::from(part)), "{method} {path} does not describe {part}");
            }
        }
    }
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1) {
        let pointer = reference.split('"').next().unwrap();
        assert!(document.pointer(pointer).is_some(), "{pointer} leads nowhere");
    }
}
