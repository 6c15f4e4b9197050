//! Tokens with roles: what each role may do, on which workspace and for how long, and that an agent can neither create
//! one nor start a daemon of its own.

use hyper::Method;
use qd_testkit::{TestClient, TestDaemon, poll_until, script::*};
use serde_json::{Value, json};

use crate::openapi::{filled, operations};

/// Creates a token, and returns a client that uses it.
async fn client(daemon: &TestDaemon, args: &[&str]) -> TestClient {
    let token = daemon.qd(&[&["tokens", "create"], args].concat()).await.ok();
    daemon.tcp_without_token().with_token(token.trim())
}

#[tokio::test]
async fn a_role_may_do_what_the_roles_below_it_may_and_no_more() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let viewer = client(&daemon, &["eye", "--role", "viewer"]).await;
    let approver = client(&daemon, &["phone", "--role", "approver"]).await;
    let operator = client(&daemon, &["ci", "--role", "operator"]).await;
    let admin = client(&daemon, &["root", "--role", "admin"]).await;
    let session = daemon.session("script").await;

    let refusal =
        session.with_client(viewer.clone()).try_prompt("x").await.expect_refusal(403, "role_not_allowed");
    assert_eq!(refusal["role"], "operator");
    let run = session.with_client(operator.clone()).prompt_script(&[ask_bash("make")]).await;
    let ask = session.wait_for_ask(&run).await;
    assert_eq!(viewer.get(&format!("/v1/asks/{ask}")).await.status, 200);
    let allow = json!({ "decision": "allow_once" });
    let refusal = viewer.answer_ask(&ask, &allow).await.expect_refusal(403, "role_not_allowed");
    assert_eq!(refusal["role"], "approver");
    approver.answer_ask(&ask, &allow).await.expect(200);
    session.wait(&run).await;
    let events = session.events().await;
    let resolved = events.iter().find(|event| event.kind == "ask.resolved").unwrap();
    assert_eq!(resolved.data["actor"]["name"], "phone");

    for client in [&viewer, &approver, &operator] {
        client.get("/v1/tokens").await.expect_refusal(403, "role_not_allowed");
        client.post_empty("/v1/shutdown").await.expect_refusal(403, "role_not_allowed");
        client.post("/v1/workers/tokens", &json!({})).await.expect_refusal(403, "role_not_allowed");
        client.get("/v1/nothing").await.expect_refusal(404, "not_found");
    }
    assert_eq!(admin.get("/v1/tokens").await.list().len(), 4);
    operator.post_empty("/v1/halt").await.expect(200);
    operator.delete("/v1/halt").await.expect(200);
}

/// No route forgets its role: whatever changes something is closed to a viewer.
#[tokio::test]
async fn a_viewer_can_change_nothing() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let viewer = client(&daemon, &["eye", "--role", "viewer"]).await;
    for (method, path) in operations(&daemon.client()).await {
        if method == Method::GET || path == "/v1/policy/test" {
            continue;
        }
        let path = filled(&path, "nobody");
        assert_eq!(viewer.status(method.clone(), &path, None).await, 403, "{method} {path}");
    }
}

#[tokio::test]
async fn a_token_for_one_workspace_sees_no_other() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let elsewhere = daemon.home.sibling_path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let (own, other) = (daemon.workspace().await, daemon.client().workspace(&elsewhere).await);
    let bound = client(&daemon, &["ci", "--role", "admin", "--workspace", &own.id]).await;
    let (mine, theirs) = (own.session("script").await, other.session("script").await);
    let asks =
        [mine.prompt_script(&[ask_bash("make")]).await, theirs.prompt_script(&[ask_bash("make")]).await];
    let (my_ask, their_ask) = (mine.wait_for_ask(&asks[0]).await, theirs.wait_for_ask(&asks[1]).await);

    let ids =
        |list: Vec<Value>| list.iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(ids(bound.get("/v1/workspaces").await.list()), std::slice::from_ref(&own.id));
    assert_eq!(ids(bound.get("/v1/sessions").await.list()), std::slice::from_ref(&mine.id));
    assert_eq!(ids(bound.get("/v1/asks").await.list()), std::slice::from_ref(&my_ask));
    assert_eq!(bound.get(&format!("/v1/sessions?ref={}", theirs.id)).await.list(), [] as [Value; 0]);
    assert_eq!(bound.get(&format!("/v1/resolve?ref={}", theirs.id)).await.json(), json!([]));
    let refused = |response: qd_testkit::TestResponse| drop(response.expect_refusal(403, "role_not_allowed"));
    refused(bound.get(&theirs.path("")).await);
    refused(bound.get(&format!("/v1/asks/{their_ask}")).await);
    refused(bound.answer_ask(&their_ask, &json!({ "decision": "deny" })).await);
    refused(bound.get(&format!("/v1/events?session={}", theirs.id)).await);
    refused(bound.get(&format!("/v1/audit?session={}", theirs.id)).await);
    for path in ["/v1/search?q=a", "/v1/usage", "/v1/mail", "/v1/workers", "/v1/tokens", "/metrics"] {
        refused(bound.get(path).await);
    }
    refused(bound.post_empty("/v1/halt").await);
    let path = |path: &std::path::Path| json!({ "path": path });
    refused(bound.post("/v1/workspaces", &path(&elsewhere)).await);
    bound.post("/v1/workspaces", &path(&daemon.home.project_dir())).await.expect(200);
    bound.post("/v1/workspaces", &path(&daemon.home.path())).await.expect_refusal(404, "not_found");

    let mut stream = bound.stream("/v1/events").await.wait_until_ready().await;
    theirs.with_client(daemon.client()).cancel().await;
    bound.answer_ask(&my_ask, &json!({ "decision": "deny" })).await.expect(200);
    let seen = stream.until("the end", |event| event.is_of_run(&asks[0], "run.finished")).await;
    assert!(seen.iter().all(|event| event.workspace_id.as_deref() == Some(own.id.as_str())), "{seen:?}");
    let audited = bound.get("/v1/audit").await.expect(200);
    let audited = audited["entries"].as_array().unwrap();
    assert!(!audited.is_empty() && audited.iter().all(|entry| entry["workspace_id"] == json!(own.id)));
}

#[tokio::test]
async fn a_revoked_token_ends_its_streams_and_waits_and_is_refused() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let eye = client(&daemon, &["eye", "--role", "viewer"]).await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("hi"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let mut stream = eye.stream("/v1/events").await.wait_until_ready().await;
    let wait = session.workspace_path(&format!("/runs/{run}/wait?timeout_s=600"));
    let waiting = tokio::spawn({
        let eye = eye.clone();
        async move { eye.get(&wait).await.status }
    });
    poll_until("the use of the token", async || {
        let tokens = daemon.client().get("/v1/tokens").await.list();
        tokens[0]["last_used_at"].is_string().then_some(())
    })
    .await;
    daemon.qd(&["tokens", "revoke", "eye"]).await.ok();
    stream.to_end().await;
    assert_eq!(waiting.await.unwrap(), 401);
    eye.get("/v1/sessions").await.expect_refusal(401, "unauthorized");
    daemon.qd(&["tokens", "revoke", "eye"]).await.expect_exit(3);
    let page = daemon.client().get("/v1/audit").await.expect(200);
    let actions: Vec<&Value> =
        page["entries"].as_array().unwrap().iter().map(|entry| &entry["action"]).collect();
    assert!(
        actions.contains(&&json!("create_token")) && actions.contains(&&json!("revoke_token")),
        "{actions:?}"
    );
}

#[tokio::test]
async fn a_token_expires_and_its_file_holds_no_secret() {
    let mut daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let soon = client(&daemon, &["soon", "--role", "viewer", "--expires", "5s"]).await;
    poll_until("the end of the token", async || {
        let response = soon.get("/v1/sessions").await;
        (response.status != 200).then(|| drop(response.expect_refusal(401, "token_expired")))
    })
    .await;
    let created =
        daemon.client().with_key("k").post("/v1/tokens", &json!({ "name": "ci", "role": "viewer" })).await;
    let created = created.expect(201);
    let again =
        daemon.client().with_key("k").post("/v1/tokens", &json!({ "name": "ci", "role": "viewer" })).await;
    assert_eq!(again.expect(201), created, "a repeated request makes one token");
    let token = created["token"].as_str().unwrap();
    assert!(token.starts_with("qdt_ci_"), "{token}");
    for (path, content) in daemon.home.files() {
        assert!(!String::from_utf8_lossy(&content).contains(token), "{} holds the token", path.display());
    }
    let named = |name: &str| json!({ "name": name, "role": "viewer" });
    daemon.client().post("/v1/tokens", &named("ci")).await.expect_refusal(409, "token_name_taken");
    daemon.client().post("/v1/tokens", &named("file")).await.expect_refusal(409, "token_name_taken");
    daemon.client().post("/v1/tokens", &named("a b")).await.expect_refusal(400, "invalid_value");
    daemon.restart().await;
    let reader = daemon.tcp_without_token().with_token(token);
    assert_eq!(reader.get("/v1/sessions").await.status, 200, "the next daemon knows it");
    let shown = daemon.qd(&["tokens"]).await.ok();
    assert!(shown.contains("ci") && shown.contains("expired") && !shown.contains(token), "{shown}");
    let socket = daemon.client().with_token(token);
    socket.post_empty("/v1/halt").await.expect_refusal(403, "role_not_allowed");
}

/// An agent that kills the daemon cannot put one of its own in its place.
#[tokio::test]
async fn nothing_below_an_agent_can_start_a_daemon_or_create_a_token() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let (work, qd) = (daemon.home.project_dir(), qd_testkit::home::binary());
    let (home, own) = (daemon.home.path(), daemon.home.sibling_path("own"));
    let script = format!(
        "QD_HOME={own} {qd} serve --listen 127.0.0.1:0 >serve.out 2>&1; echo serve $? >>done.new
         QD_HOME={own} {qd} ps >ps.out 2>&1; echo ps $? >>done.new
         QD_HOME={home} {qd} tokens create x --role admin >tokens.out 2>&1; echo tokens $? >>done.new
         QD_HOME={home} {qd} stop >stop.out 2>&1; echo stop $? >>done.new
         mv done.new done",
        own = own.display(),
        home = home.display(),
        qd = qd.display(),
    );
    std::fs::write(work.join("try.sh"), script).unwrap();
    for step in [spawn(&["bash", "try.sh"]), spawn_detached(&["env", "-i", "/bin/bash", "try.sh"])] {
        let run = session.prompt_script(&[step, sleep_forever()]).await;
        let done = poll_until("the attempts", async || std::fs::read_to_string(work.join("done")).ok()).await;
        assert_eq!(done, "serve 1\nps 4\ntokens 1\nstop 1\n");
        for (file, word) in
            [("serve.out", "agent"), ("ps.out", "agent"), ("tokens.out", "agent"), ("stop.out", "agent")]
        {
            let output = std::fs::read_to_string(work.join(file)).unwrap();
            assert!(output.contains(word), "{file}: {output}");
        }
        std::fs::remove_file(work.join("done")).unwrap();
        session.cancel().await;
        session.wait(&run).await;
    }
    assert_eq!(daemon.client().get("/v1/tokens").await.list().len(), 0);
    assert!(!own.join("qd.sock").exists());
}
