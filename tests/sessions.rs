//! Sessions: creating, changing, closing and purging them, session trees, and what they never reveal.

use qd_testkit::{TestDaemon, journal_rules, script::*};
use serde_json::{Value, json};

#[tokio::test]
async fn a_session_shows_all_that_the_contract_names() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let settings = json!({ "agent": "script", "title": "t", "model": "m", "system_prompt": "s", "policy": "allow",
        "budget_usd": 2.5, "max_turns": 7, "run_timeout_s": 60, "cancel_grace_s": 1 });
    let made = workspace.try_session(settings.clone()).await.expect(201);
    assert!(made["id"].as_str().unwrap().starts_with("ses_"));
    for (name, value) in [
        ("workspace_id", json!(workspace.id)),
        ("state", json!("idle")),
        ("busy", json!(false)),
        ("parent", json!(null)),
        ("queued", json!(0)),
        ("usage", json!({ "input_tokens": 0, "output_tokens": 0, "cost_usd": 0.0 })),
        ("worktree", json!(null)),
    ] {
        assert_eq!(made[name], value, "{name}");
    }
    for name in ["agent", "title", "model", "policy"] {
        assert_eq!(made[name], settings[name], "{name}");
    }
    for name in ["budget_usd", "max_turns", "run_timeout_s", "cancel_grace_s"] {
        assert_eq!(made[name].as_f64(), settings[name].as_f64(), "{name}");
    }
    assert!(made.get("agent_session_id").is_some());
    assert!(made["created_at"].is_string() && made["updated_at"].is_string());
    let path = workspace.path(&format!("/sessions/{}", made["id"].as_str().unwrap()));
    assert_eq!(daemon.client().get(&path).await.expect(200), made);
    assert_eq!(daemon.client().get(&workspace.path("/sessions")).await.list(), [made]);
}

#[tokio::test]
async fn an_agent_that_nobody_knows_is_refused() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for agent in ["nobody", "", "Echo", "../echo"] {
        workspace.try_session(json!({ "agent": agent })).await.expect_refusal(400, "unknown_agent");
    }
    assert!(daemon.client().get(&workspace.path("/sessions")).await.list().is_empty());
}

#[tokio::test]
async fn a_setting_that_the_agent_cannot_take_is_refused_and_never_ignored() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for (name, value) in [("model", json!("m")), ("system_prompt", json!("s"))] {
        let answer = workspace.try_session(json!({ "agent": "echo", name: value })).await;
        let details = answer.expect_refusal(400, "unsupported_setting");
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains(name), "{answer} {details}");
    }
    let echo = workspace.session("echo").await;
    daemon
        .client()
        .patch(&echo.path(""), &json!({ "model": "m" }))
        .await
        .expect_refusal(400, "unsupported_setting");
    assert_eq!(echo.show().await["model"], json!(null));
}

#[tokio::test]
async fn patch_changes_what_it_names_and_leaves_the_rest() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "title": "a", "max_turns": 3 })).await;
    let before = session.show().await;
    let mut expected = before.clone();
    for (change, value) in [
        ("title", json!("b")),
        ("policy", json!([{ "tool": "Bash", "decision": "deny" }])),
        ("model", json!("m2")),
        ("budget_usd", json!(1.5)),
        ("max_turns", json!(null)),
        ("run_timeout_s", json!(9.0)),
        ("cancel_grace_s", json!(2.0)),
    ] {
        expected[change] = value.clone();
        let mut answered = session.patch(json!({ change: value })).await;
        expected["updated_at"] = answered["updated_at"].take();
        answered["updated_at"] = expected["updated_at"].clone();
        assert_eq!(answered, expected);
        let updated = session.wait_for_event("session.updated", |e| e.kind == "session.updated").await;
        assert_eq!(updated.run_id, None);
    }
    assert_eq!(session.show().await, expected);
    for bad in [
        json!({ "agent": "echo" }),
        json!({ "parent": "ses_x" }),
        json!({ "env": {} }),
        json!({ "busy": true }),
    ] {
        let answer = daemon.client().patch(&session.path(""), &bad).await;
        assert_eq!(answer.status, 400, "{answer}");
    }
    assert_eq!(session.show().await, expected);
}

#[tokio::test]
async fn a_closed_session_takes_no_prompts_and_closes_after_its_last_run() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let runs =
        [session.prompt_script(&[sleep_forever()]).await, session.prompt_script(&[say("never")]).await];
    session.wait_for_start(&runs[0]).await;
    session.close().await;
    session.try_prompt("x").await.expect_refusal(409, "session_closed");
    let closed = session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    let events = session.events().await;
    journal_rules::check(&events);
    for run in &runs {
        assert_eq!(journal_rules::finish_reason(&events, run), "cancelled");
    }
    assert!(events.iter().filter(|event| event.kind == "run.finished").all(|event| event.seq < closed.seq));
    assert_eq!(events.last().unwrap().kind, "session.closed");
    let shown = session.show().await;
    assert_eq!((&shown["state"], &shown["busy"]), (&json!("closed"), &json!(false)));
    session.try_prompt("x").await.expect_refusal(409, "session_closed");
}

#[tokio::test]
async fn a_close_is_journalled_before_it_is_answered() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ignore_cancel(), say("x"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.close().await;
    daemon.restart().await;
    session.try_prompt("x").await.expect_refusal(409, "session_closed");
    session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    assert_eq!(session.run(&run).await["finish_reason"], "cancelled");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn closing_a_session_closes_the_sessions_below() {
    let daemon = TestDaemon::start().await;
    let top = daemon.session("script").await;
    let below = top.create_child(json!({ "agent": "script" })).await;
    let deep = below.create_child(json!({ "agent": "script" })).await;
    assert_eq!(
        (below.show().await["parent"].clone(), deep.show().await["parent"].clone()),
        (json!(top.id), json!(below.id))
    );
    let beside = daemon.session("script").await;
    let run = deep.prompt_script(&[sleep_forever()]).await;
    deep.wait_for_start(&run).await;
    top.close().await;
    for session in [&top, &below, &deep] {
        session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
        session.try_prompt("x").await.expect_refusal(409, "session_closed");
        journal_rules::check(&session.events().await);
    }
    assert_eq!(deep.run(&run).await["finish_reason"], "cancelled");
    assert_eq!(beside.show().await["state"], "idle");
}

#[tokio::test]
async fn a_session_cannot_be_made_below_one_that_is_closed_or_unknown_or_elsewhere() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let closed = workspace.session("script").await;
    closed.close().await;
    let below = |parent: &str| json!({ "agent": "script", "parent": parent });
    workspace.try_session(below(&closed.id)).await.expect_refusal(409, "session_closed");
    let unknown = workspace.try_session(below("ses_nobody")).await;
    assert!(matches!(unknown.status, 400 | 404), "{unknown}");
    let elsewhere = daemon.client().workspace(std::path::Path::new("/usr")).await;
    let open = workspace.session("script").await;
    let answer = elsewhere.try_session(below(&open.id)).await;
    assert!(matches!(answer.status, 400 | 404), "{answer}");
}

#[tokio::test]
async fn a_purge_deletes_the_events_and_nothing_of_anybody_else() {
    let daemon = TestDaemon::start().await;
    let (gone, kept) = (daemon.session("script").await, daemon.session("script").await);
    kept.run_script(&[say("stays")]).await;
    gone.run_script(&[say("vanishes")]).await;
    let live = gone.prompt_script(&[sleep_forever()]).await;
    gone.wait_for_start(&live).await;
    let kept_events = kept.events().await;
    let mut stream = daemon.client().stream("/v1/events").await.wait_until_ready().await;
    let answer = daemon.client().delete(&gone.path("?purge=true")).await;
    assert!(answer.status < 300, "{answer}");
    let last = stream.until("session.closed", |event| event.kind == "session.closed").await;
    assert!(last.iter().any(|event| event.is_of_run(&live, "run.finished")), "its run ends first: {last:?}");
    let marker = kept.run_script(&[say("marker")]).await;
    let all = daemon.client().stream("/v1/events?after=0").await;
    let all = { all }.until_run(marker["id"].as_str().unwrap(), "run.finished").await;
    journal_rules::check_order(&all);
    let left: Vec<_> = all.iter().filter(|e| e.session_id.as_deref() == Some(&gone.id)).collect();
    assert!(left.iter().all(|event| event.kind == "session.closed"), "{left:?}");
    assert_eq!(kept.events().await[..kept_events.len()], kept_events);
    let shown = daemon.client().get(&gone.path("/messages")).await;
    assert!(shown.status == 404 || shown.list().is_empty(), "{shown}");
}

/// The files with large contents.
fn blobs(daemon: &TestDaemon) -> Vec<std::path::PathBuf> {
    let kept = daemon.home.path().join("blobs");
    daemon.home.files().into_iter().map(|(path, _)| path).filter(|path| path.starts_with(&kept)).collect()
}

#[tokio::test]
async fn gc_counts_what_it_would_free_and_frees_it_only_when_told() {
    let daemon = TestDaemon::start().await;
    let client = daemon.client();
    let (closed, open) = (daemon.session("script").await, daemon.session("script").await);
    closed.prompt(&"long ".repeat(400_000)).await;
    open.run_script(&[say("stays")]).await;
    closed.close().await;
    closed.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    assert_eq!(
        client.get("/v1/gc").await.expect(200)["closed_sessions"],
        0,
        "the session was closed only now"
    );
    for path in blobs(&daemon) {
        // A new file is not deleted, because it may belong to a prompt that is just being accepted.
        std::fs::File::open(path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    }
    let would = client.get("/v1/gc?older_than_days=0").await.expect(200);
    assert_eq!((&would["closed_sessions"], &would["done"]), (&json!(1), &json!(false)), "{would}");
    assert!(
        would["closed_events"].as_u64() > Some(0) && would["journal_bytes"].as_u64() > Some(0),
        "{would}"
    );
    assert_eq!(
        client.get("/v1/gc?older_than_days=0").await.expect(200)["closed_sessions"],
        1,
        "it only counted"
    );
    let did = client.post("/v1/gc", &json!({ "older_than_days": 0 })).await.expect(200);
    assert_eq!(did["done"], true, "{did}");
    assert!(did["freed_bytes"].as_u64() > Some(0), "{did}");
    assert_eq!(client.get("/v1/gc?older_than_days=0").await.expect(200)["closed_sessions"], 0);
    assert_eq!(open.messages().await[1]["parts"][0]["text"], "stays");
    assert_eq!(open.run_script(&[say("works")]).await["text"], "works");
    assert_eq!(blobs(&daemon).len(), 0, "nothing names the long prompt any more");
}

#[tokio::test]
async fn gc_shows_the_search_index_and_makes_it_smaller() {
    let daemon = TestDaemon::start().await;
    let client = daemon.client();
    let (closed, open) = (daemon.session("echo").await, daemon.session("echo").await);
    let words: Vec<String> = (0..60_000).map(|n| format!("word{n}")).collect();
    let run = closed.prompt(&words.join(" ")).await;
    closed.wait(&run).await;
    let kept = open.prompt("the needle stays").await;
    open.wait(&kept).await;
    let hits = async |words: &str| {
        client.get(&format!("/v1/search?q={words}")).await.expect(200)["hits"].as_array().unwrap().len()
    };
    assert!(hits("word7").await > 0, "the index has everything");
    let before = client.get("/v1/gc?older_than_days=0").await.expect(200);
    let size = |report: &Value| report["derived_bytes"].as_u64().unwrap();
    assert!(size(&before) > 0, "{before}");
    closed.close().await;
    closed.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    client.post("/v1/gc", &json!({ "older_than_days": 0 })).await.expect(200);
    let after = client.get("/v1/gc?older_than_days=0").await.expect(200);
    assert!(size(&after) < size(&before), "{before} {after}");
    assert_eq!(after["derived_unused_bytes"], 0, "{after}");
    assert_eq!((hits("word7").await, hits("needle").await), (0, 2), "the prompt and its echo are found");
    let shown = daemon.qd(&["gc"]).await.ok();
    assert!(shown.contains("\nindex ") && shown.contains(" in the index"), "{shown}");
}

#[tokio::test]
async fn the_values_of_env_are_never_shown_or_journalled() {
    const CANARY: &str = "canary-5f1d-do-not-keep-me";
    let mut daemon = TestDaemon::start().await;
    let env = json!({ "API_KEY": CANARY, "SCRIPT_READY_MS": "1" });
    let session = daemon.session_with(json!({ "agent": "script", "env": env })).await;
    session.run_script(&[config(), say("x")]).await;
    daemon.restart().await;
    session.run_script(&[say("y")]).await;
    let shown = daemon.client().get(&session.path("")).await;
    assert_eq!(shown.json()["env"], json!(["API_KEY", "SCRIPT_READY_MS"]), "the names are listed");
    for path in [
        session.path(""),
        session.path("/events"),
        session.path("/messages"),
        session.workspace_path("/runs"),
        session.workspace_path("/sessions"),
    ] {
        let answer = daemon.client().get(&path).await;
        assert!(!String::from_utf8_lossy(&answer.body).contains(CANARY), "{answer}");
    }
    assert_eq!(daemon.terminate().await, Some(0));
    let secrets = daemon.home.path().join("secrets");
    let mut kept = 0;
    for (path, content) in daemon.home.files() {
        let found = content.windows(CANARY.len()).any(|window| window == CANARY.as_bytes());
        kept += usize::from(found);
        assert!(!found || path.starts_with(&secrets), "{} holds the value", path.display());
        if path.starts_with(&secrets) {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
        }
    }
    assert!(kept > 0, "the value must be stored, because the agent needs it after a restart");
    assert!(!daemon.stderr().contains(CANARY));
}

#[tokio::test]
async fn a_variable_that_cannot_be_one_is_refused_without_telling_its_value() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for name in ["", "A=B", "A\0B"] {
        let answer =
            workspace.try_session(json!({ "agent": "script", "env": { name: "hidden-value" } })).await;
        assert_eq!(answer.status, 400, "{name:?}: {answer}");
        assert!(!String::from_utf8_lossy(&answer.body).contains("hidden-value"), "{answer}");
    }
    let answer = workspace.try_session(json!({ "agent": "script", "env": { "A": 7 } })).await;
    assert_eq!(answer.status, 400, "{answer}");
}
