//! Who did what. Every event that a command caused says who sent it, `qd audit` lists them, and nothing that an agent
//! streams says anything.

use qd_testkit::{TestDaemon, TestEvent, poll_until, script::*};
use serde_json::{Value, json};

/// The actor of the only event of this kind.
fn actor<'a>(events: &'a [TestEvent], kind: &str) -> &'a Value {
    let mut of_kind = events.iter().filter(|event| event.kind == kind);
    let event = of_kind.next().unwrap_or_else(|| panic!("no {kind} in {events:#?}"));
    &event.data["actor"]
}

/// The entries of the audit, oldest first.
async fn entries(daemon: &TestDaemon, query: &str) -> Vec<Value> {
    let page = daemon.client().get(&format!("/v1/audit?{query}")).await.expect(200);
    assert_eq!(page["complete"], true, "{page}");
    page["entries"].as_array().unwrap().clone()
}

#[tokio::test]
async fn an_event_says_which_process_or_token_caused_it_and_streamed_text_says_nothing() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("hi"), ask_bash("make")]).await;
    let ask = session.wait_for_ask(&run).await;
    daemon.qd(&["allow", &ask]).await.ok();
    session.wait(&run).await;
    let remote = session.with_client(daemon.tcp());
    let second = remote.prompt_script(&[say("hi")]).await;
    session.wait(&second).await;
    let events = session.events().await;

    let created = actor(&events, "session.created");
    assert_eq!((&created["kind"], &created["pid"]), (&json!("user"), &json!(std::process::id())));
    let resolved = actor(&events, "ask.resolved");
    assert_eq!(resolved["kind"], "user");
    assert_eq!(resolved["uid"], rustix::process::geteuid().as_raw());
    let command = resolved["command"].as_str().unwrap();
    assert!(command.contains("qd allow ask_"), "{command}");
    let accepted = events.iter().find(|event| event.is_of_run(&second, "run.accepted")).unwrap();
    let token = &accepted.data["actor"];
    assert_eq!(
        (&token["kind"], &token["name"], &token["role"]),
        (&json!("token"), &json!("file"), &json!("admin"))
    );
    assert!(token["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{token}");
    for event in events.iter().filter(|event| event.kind == "text.delta" || event.kind == "run.finished") {
        assert!(event.data.get("actor").is_none(), "{event:?}");
    }
}

#[tokio::test]
async fn policies_limits_agents_fleets_and_parents_are_named_as_such() {
    let daemon = TestDaemon::start().await;
    let rules = json!([{ "tool": "Bash", "match": "make*", "decision": "allow" }]);
    let session = daemon.session_with(json!({ "agent": "script", "policy": rules })).await;
    session.run_script(&[ask_bash("make")]).await;
    let decided = json!({ "kind": "policy", "rule": "allow Bash make*" });
    assert_eq!(*actor(&session.events().await, "ask.resolved"), decided);
    let limited = daemon.session_with(json!({ "agent": "script", "run_timeout_s": 0.5 })).await;
    let late = limited.prompt_script(&[sleep_forever()]).await;
    assert_eq!(limited.wait(&late).await["finish_reason"], "timeout");
    assert_eq!(*actor(&limited.events().await, "run.cancel_requested"), json!({ "kind": "daemon" }));

    let parent = daemon.session("script").await;
    let child = parent.create_child(json!({ "agent": "script" })).await;
    let run = child.prompt_script(&[say("hi"), sleep_forever()]).await;
    child.wait_for_run_event(&run, "text.delta").await;
    parent.cancel().await;
    child.wait(&run).await;
    let passed_on = json!({ "kind": "daemon", "session_id": parent.id });
    assert_eq!(*actor(&child.events().await, "run.cancel_requested"), passed_on);

    let agent = daemon.session_with(json!({ "agent": "script", "policy": "allow" })).await;
    let spawn = json!({ "agent": "echo", "prompt": "hello" });
    agent.run_script(&[mcp("spawn_agent", spawn)]).await;
    let own = json!({ "kind": "agent", "session_id": agent.id });
    let listed = poll_until("the child", async || {
        let entries = entries(&daemon, "").await;
        let created =
            entries.iter().find(|entry| entry["actor"] == own && entry["action"] == "create_session");
        created.cloned()
    })
    .await;
    assert_eq!(listed["detail"], "echo");

    let workspace = daemon.workspace().await;
    let spec = "fleet:\n  task: go\n  sessions: { a: { agent: echo }, b: { agent: echo } }\n  start: a\n  routes:\n    - { when: a.done, route_to: b }\n";
    let fleet = daemon.client().post(&workspace.path("/fleets"), &json!({ "spec": spec })).await.expect(201);
    let b = fleet["sessions"]["b"]["session_id"].as_str().unwrap();
    let routed = poll_until("the route", async || {
        let entries = entries(&daemon, &format!("session={b}")).await;
        entries.into_iter().find(|entry| entry["action"] == "prompt")
    })
    .await;
    assert_eq!(routed["actor"], json!({ "kind": "fleet", "fleet_id": fleet["id"] }));
}

#[tokio::test]
async fn the_audit_has_every_command_in_order_and_can_be_paged_and_filtered() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("hi")]).await;
    session
        .client
        .patch(&session.path(""), &json!({ "title": "parser", "policy": "allow" }))
        .await
        .expect(200);
    daemon.qd(&["halt", "lunch"]).await.ok();
    daemon.qd(&["unhalt"]).await.ok();
    let other = daemon.session("echo").await;
    session.close().await;

    let all = entries(&daemon, "").await;
    let actions: Vec<&str> = all.iter().map(|entry| entry["action"].as_str().unwrap()).collect();
    assert_eq!(
        actions,
        [
            "add_workspace",
            "create_session",
            "prompt",
            "change_session",
            "halt",
            "lift_halt",
            "create_session",
            "close_session"
        ]
    );
    assert_eq!(all[3]["detail"], "title, policy");
    assert_eq!(all[4]["detail"], "lunch");
    let own = entries(&daemon, &format!("session={}", session.id)).await;
    assert_eq!(own.len(), 4, "{own:?}");
    assert!(own.iter().all(|entry| entry["session_id"] == json!(session.id)));

    for direction in ["after", "before"] {
        let (mut paged, mut position) = (Vec::new(), String::new());
        loop {
            let from: &str = if position.is_empty() && direction == "after" { "0" } else { &position };
            let path = format!("/v1/audit?limit=3&{direction}={from}");
            let page = daemon.client().get(&path).await.expect(200);
            paged.extend(page["entries"].as_array().unwrap().clone());
            match page["next"].as_str() {
                Some(next) => position = next.to_owned(),
                None => break,
            }
        }
        if direction == "before" {
            paged.reverse();
        }
        assert_eq!(paged, all, "{direction}");
    }
    let later = all[4]["at"].as_str().unwrap().replace(':', "%3A");
    assert!(entries(&daemon, &format!("since={later}")).await.len() >= 4);
    assert!(entries(&daemon, "since=2100-01-01T00%3A00%3A00Z").await.is_empty());
    daemon.client().get("/v1/audit?after=x").await.expect_refusal(400, "bad_cursor");
    daemon.client().get("/v1/audit?after=1&before=2").await.expect_refusal(400, "invalid_value");
    daemon.client().get("/v1/audit?session=ses_none").await.expect_refusal(404, "not_found");

    let shown = daemon.qd(&["audit", "--session", "parser"]).await.ok();
    assert!(shown.contains("close session") && shown.contains("change session"), "{shown}");
    assert!(!shown.contains(&other.id), "{shown}");
    let page = daemon.qd(&["audit", "--since", "1h", "--json"]).await.json();
    assert_eq!(page["entries"].as_array().unwrap().len(), all.len());
    daemon.restart().await;
    assert_eq!(entries(&daemon, "").await, all, "the next daemon has the same");
}
