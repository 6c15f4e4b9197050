//! What all HTTP routes have in common: the form of errors, bad bodies, unknown ids, wrong methods and sizes.

use hyper::Method;
use qd_testkit::{TestDaemon, TestResponse, script::*};
use serde_json::{Value, json};

/// Every route with an id in its path, with unknown ids.
const UNKNOWN: &[(&str, &str)] = &[
    ("GET", "/v1/workspaces/ws_no"),
    ("DELETE", "/v1/workspaces/ws_no"),
    ("GET", "/v1/workspaces/ws_no/events"),
    ("GET", "/v1/workspaces/ws_no/sessions"),
    ("GET", "/v1/workspaces/ws_no/runs"),
    ("GET", "/v1/workspaces/{w}/sessions/ses_no"),
    ("PATCH", "/v1/workspaces/{w}/sessions/ses_no"),
    ("DELETE", "/v1/workspaces/{w}/sessions/ses_no"),
    ("GET", "/v1/workspaces/{w}/sessions/ses_no/messages"),
    ("GET", "/v1/workspaces/{w}/sessions/ses_no/events"),
    ("POST", "/v1/workspaces/{w}/agent/sessions/ses_no/cancel"),
    ("GET", "/v1/workspaces/{w}/agent/sessions/ses_no/queue"),
    ("DELETE", "/v1/workspaces/{w}/agent/sessions/ses_no/queue"),
    ("DELETE", "/v1/workspaces/{w}/agent/sessions/ses_no/queue/run_no"),
    ("GET", "/v1/workspaces/{w}/runs/run_no"),
    ("GET", "/v1/workspaces/{w}/runs/run_no/wait?timeout_s=1"),
    ("GET", "/v1/asks/ask_no"),
    ("GET", "/v1/nothing/here"),
    ("GET", "/v2/sessions"),
];

async fn request(daemon: &TestDaemon, method: &str, path: &str, body: Option<&[u8]>) -> TestResponse {
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    daemon.client().request(method, path, body.map(|body| body.to_vec().into())).await
}

#[tokio::test]
async fn healthz_version_and_metrics_answer() {
    let daemon = TestDaemon::start().await;
    assert_eq!(daemon.client().get("/healthz").await.expect(200), json!({ "status": "ok" }));
    let version = daemon.client().get("/v1/version").await.expect(200);
    assert_eq!((&version["pid"], version["version"].is_string()), (&json!(daemon.pid()), true), "{version}");
    let session = daemon.session("echo").await;
    let run = session.prompt("x").await;
    session.wait(&run).await;
    let metrics = daemon.client().get("/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    assert_eq!(metrics.status, 200);
    assert!(metrics.header("content-type").is_some_and(|kind| kind.starts_with("text/plain")), "{metrics:?}");
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let number = line.rsplit(' ').next().unwrap().parse::<f64>();
        assert!(number.is_ok(), "{line:?} is no sample");
    }
    for word in ["accepted", "queued", "active", "commit", "streams", "asks", "events"] {
        assert!(text.contains(word), "nothing about {word} in {text}");
    }
}

#[tokio::test]
async fn what_agents_used_is_told_for_each_run_session_and_tree_and_in_metrics() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let child = session.create_child(json!({ "agent": "script" })).await;
    let run = session.run_script(&[usage(100, 20, 0.5), usage(10, 2, 0.25)]).await;
    assert_eq!(run["usage"], json!({ "input_tokens": 110, "output_tokens": 22, "cost_usd": 0.75 }));
    child.run_script(&[usage(1, 1, 0.25)]).await;
    let shown = session.show().await;
    assert_eq!(shown["usage"]["cost_usd"], 0.75);
    let whole = daemon.client().get(&session.path("?tree=true")).await.expect(200);
    assert_eq!(whole["tree_cost_usd"], 1.0, "with the sessions below");
    let metrics = daemon.client().get("/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    for line in [
        "quarterdeck_tokens_total{agent=\"script\",direction=\"input\"} 111",
        "quarterdeck_tokens_total{agent=\"script\",direction=\"output\"} 23",
        "quarterdeck_cost_usd_total{agent=\"script\"} 1",
    ] {
        assert!(text.lines().any(|one| one == line), "{line} is not in {text}");
    }
    let logs = daemon.qd(&["logs", &session.id]).await.ok();
    assert!(logs.contains("used 110 tokens in, 22 out, $0.75"), "{logs}");
}

#[tokio::test]
async fn an_unknown_id_or_path_is_404_in_the_shape_of_every_refusal() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for (method, path) in UNKNOWN {
        let path = path.replace("{w}", &workspace.id);
        let body = (*method == "PATCH").then_some(&b"{}"[..]);
        request(&daemon, method, &path, body).await.expect_refusal(404, "not_found");
    }
    let session = daemon.session("script").await;
    for (path, body) in [
        ("/v1/workspaces/ws_no/sessions".to_owned(), json!({ "agent": "echo" })),
        ("/v1/workspaces/ws_no/agent".to_owned(), json!({ "session_id": session.id, "prompt": "x" })),
        (workspace.path("/agent"), json!({ "session_id": "ses_no", "prompt": "x" })),
        (workspace.path("/agent/sessions/ses_no/steer"), json!({ "text": "x" })),
        ("/v1/asks/ask_no/answer".to_owned(), json!({ "decision": "deny" })),
    ] {
        daemon.client().post(&path, &body).await.expect_refusal(404, "not_found");
    }
}

#[tokio::test]
async fn what_is_in_another_workspace_is_not_found_in_this_one() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.run_script(&[say("x")]).await["id"].as_str().unwrap().to_owned();
    let other = daemon.client().workspace(std::path::Path::new("/usr")).await;
    for path in [
        format!("/sessions/{}", session.id),
        format!("/sessions/{}/messages", session.id),
        format!("/sessions/{}/events", session.id),
        format!("/agent/sessions/{}/queue", session.id),
        format!("/runs/{run}"),
    ] {
        daemon.client().get(&other.path(&path)).await.expect_refusal(404, "not_found");
    }
    let body = json!({ "session_id": session.id, "prompt": "x" });
    daemon.client().post(&other.path("/agent"), &body).await.expect_refusal(404, "not_found");
    daemon
        .client()
        .post_empty(&other.path(&format!("/agent/sessions/{}/cancel", session.id)))
        .await
        .expect_refusal(404, "not_found");
    daemon
        .client()
        .delete(&other.path(&format!("/sessions/{}", session.id)))
        .await
        .expect_refusal(404, "not_found");
    assert_eq!(session.show().await["state"], "idle");
}

#[tokio::test]
async fn a_wrong_method_is_405_in_the_shape_of_every_refusal() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    for (method, path) in [
        ("POST", "/healthz".to_owned()),
        ("PUT", "/v1/workspaces".to_owned()),
        ("DELETE", "/v1/agents".to_owned()),
        ("POST", session.path("")),
        ("GET", session.workspace_path("/agent")),
        ("GET", session.agent_path("/cancel")),
        ("PATCH", "/v1/halt".to_owned()),
    ] {
        request(&daemon, method, &path, None).await.expect_refusal(405, "method_not_allowed");
    }
}

#[tokio::test]
async fn a_body_that_is_not_the_json_of_its_route_is_400() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_bash("make")]).await;
    let ask = session.wait_for_ask(&run).await;
    let known = session.id.clone();
    let routes: Vec<(&str, String, Value)> = vec![
        ("POST", "/v1/workspaces".into(), json!({ "path": "/usr" })),
        ("POST", session.workspace_path("/sessions"), json!({ "agent": "echo" })),
        ("POST", session.workspace_path("/agent"), json!({ "session_id": known, "prompt": "x" })),
        ("POST", session.agent_path("/cancel"), json!({})),
        ("POST", session.agent_path("/steer"), json!({ "text": "x" })),
        ("POST", format!("/v1/asks/{ask}/answer"), json!({ "decision": "deny" })),
        ("POST", "/v1/halt".into(), json!({})),
        ("PATCH", session.path(""), json!({})),
    ];
    for (method, path, good) in &routes {
        let mut unknown = good.clone();
        unknown["surprise"] = json!(1);
        let unknown = unknown.to_string();
        for bad in
            [&b"{"[..], b"nul", b"[1]", b"\"text\"", b"7", b"{\"a\":\xff}", b"{} {}", unknown.as_bytes()]
        {
            let answer = request(&daemon, method, path, Some(bad)).await;
            assert_eq!(answer.status, 400, "{} with {}", answer, String::from_utf8_lossy(bad));
            answer.expect_refusal(400, "invalid_request");
        }
    }
    for (path, bad) in [
        ("/v1/workspaces".to_owned(), json!({})),
        ("/v1/workspaces".to_owned(), json!({ "path": 7 })),
        (session.workspace_path("/sessions"), json!({})),
        (session.workspace_path("/sessions"), json!({ "agent": null })),
        (session.workspace_path("/agent"), json!({ "session_id": session.id })),
        (session.workspace_path("/agent"), json!({ "prompt": "x" })),
        (session.workspace_path("/agent"), json!({ "session_id": session.id, "prompt": ["x"] })),
        (session.agent_path("/steer"), json!({})),
        ("/v1/halt".to_owned(), json!({ "cancel": "yes" })),
    ] {
        let answer = daemon.client().post(&path, &bad).await;
        assert_eq!(answer.status, 400, "{answer}");
    }
    assert_eq!(daemon.client().get("/v1/halt").await.expect(200)["halted"], false);
    assert_eq!(session.run(&run).await["state"], "waiting", "none of the requests had an effect");
}

#[tokio::test]
async fn a_query_that_makes_no_sense_is_400() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let run = session.prompt("x").await;
    for path in [
        session.workspace_path("/sessions?limit=many"),
        session.workspace_path("/runs?limit=-1"),
        session.path("/events?after=soon"),
        session.workspace_path(&format!("/runs/{run}/wait?timeout_s=soon")),
        "/v1/asks?state=unheard_of".to_owned(),
    ] {
        let answer = daemon.client().get(&path).await;
        assert_eq!(answer.status, 400, "{answer}");
        assert!(answer.json()["error"]["code"].is_string());
    }
}

#[tokio::test]
async fn a_body_over_8_mib_is_413_whether_it_says_its_length_or_not() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n",
        session.workspace_path("/agent")
    );
    let big = vec![b' '; (8 << 20) + 1];
    let with_length = [format!("{head}content-length: {}\r\n\r\n", big.len()).as_bytes(), &big].concat();
    let chunk = format!("{:x}\r\n", big.len());
    let chunked =
        [format!("{head}transfer-encoding: chunked\r\n\r\n{chunk}").as_bytes(), &big, b"\r\n0\r\n\r\n"]
            .concat();
    for request in [with_length, chunked] {
        let answer = daemon.client().exchange_raw(&request).await;
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
        assert!(answer.contains("\"body_too_large\""), "{answer}");
    }
    assert!(session.runs().await.is_empty());
    let fits = json!({ "session_id": session.id, "prompt": "x".repeat((8 << 20) - 200) });
    daemon.client().post(&session.workspace_path("/agent"), &fits).await.expect(202);
}

#[tokio::test]
async fn no_mistake_of_a_caller_is_a_500() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let odd = ["..", "%00", "%2e%2e%2f", "%ff", "ä", "a%20b", "'", "\"", "x;y", &"x".repeat(500)];
    for id in odd {
        let id = id.replace('ä', "%C3%A4").replace('"', "%22");
        for path in [
            format!("/v1/workspaces/{id}"),
            session.workspace_path(&format!("/sessions/{id}")),
            session.workspace_path(&format!("/runs/{id}")),
            format!("/v1/asks/{id}"),
            format!("/v1/blobs/{id}"),
            format!("/v1/resolve?ref={id}"),
            session.workspace_path(&format!("/runs?session={id}")),
        ] {
            let answer = daemon.client().get(&path).await;
            assert!(answer.status < 500, "{answer}");
        }
    }
    for header in ["idempotency-key", "last-event-id", "content-type", "accept"] {
        let answer = daemon.client().with_header(header, "~ ,;=\"").get("/v1/agents").await;
        assert!(answer.status < 500, "{answer}");
    }
    for request in [
        "GET /healthz\r\n\r\n",
        "GET  / HTTP/9.9\r\n\r\n",
        "\0\0\0\r\n\r\n",
        "POST /v1/halt HTTP/1.1\r\nconnection: close\r\n\r\n",
    ] {
        let answer = daemon.client().exchange_raw(request.as_bytes()).await;
        assert!(!answer.starts_with("HTTP/1.1 5"), "{request:?}: {answer}");
    }
    assert_eq!(daemon.client().get("/healthz").await.status, 200, "the daemon still works");
}

#[tokio::test]
async fn wait_answers_when_the_run_has_ended_and_408_if_it_has_not() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[question("end?", &[])]).await;
    let path = session.workspace_path(&format!("/runs/{run}/wait"));
    daemon.client().get(&format!("{path}?timeout_s=1")).await.expect_refusal(408, "wait_timeout");
    let ask = session.wait_for_ask(&run).await;
    let yes = json!({ "value": "yes" });
    let (waited, answered) = tokio::join!(session.wait(&run), session.client.answer_ask(&ask, &yes));
    answered.expect(200);
    assert_eq!((&waited["state"], &waited["text"]), (&json!("finished"), &json!("yes")));
    assert_eq!(daemon.client().get(&path).await.expect(200), waited, "a finished run is returned at once");
}

#[tokio::test]
async fn agents_says_which_can_start_here_and_workers_lists_none_yet() {
    let daemon = TestDaemon::start().await;
    let agents = daemon.client().get("/v1/agents").await.list();
    for (name, steers) in [("echo", false), ("script", true)] {
        let agent = agents.iter().find(|agent| agent["name"] == name).unwrap_or_else(|| panic!("{agents:?}"));
        assert_eq!((&agent["available"], &agent["steers"]), (&json!(true), &json!(steers)), "{agent}");
    }
    assert_eq!(daemon.client().get("/v1/workers").await.list(), Vec::<Value>::new());
}

#[tokio::test]
async fn resolve_finds_by_prefix_and_by_title() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "title": "the big one" })).await;
    let run = session.prompt_script(&[ask_bash("make")]).await;
    let ask = session.wait_for_ask(&run).await;
    let find = async |text: &str| {
        let text = text.replace(' ', "%20");
        daemon.client().get(&format!("/v1/resolve?ref={text}")).await.list()
    };
    for (text, kind, id) in [
        (session.id.as_str(), "session", &session.id),
        (&session.id[..8], "session", &session.id),
        ("the big one", "session", &session.id),
        (&run[..10], "run", &run),
        (&ask[..10], "ask", &ask),
        (&session.workspace[..6], "workspace", &session.workspace),
    ] {
        let found = find(text).await;
        assert!(found.iter().any(|found| found["kind"] == kind && found["id"] == **id), "{text}: {found:?}");
    }
    assert!(find("nobody-has-this-name").await.is_empty());
}

#[tokio::test]
async fn shutdown_answers_and_then_the_daemon_ends_well() {
    let mut daemon = TestDaemon::start().await;
    let answer = daemon.client().post_empty("/v1/shutdown").await;
    assert!(answer.status < 300, "{answer}");
    assert_eq!(daemon.wait_for_exit().await, Some(0));
}
