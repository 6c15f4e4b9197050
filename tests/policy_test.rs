//! `qd policy test`: what a policy would have decided about the asks in the journal. Also what the journal has of tool
//! calls for which the agent did not ask.

use qd_testkit::{TestDaemon, TestSession, script::*};
use serde_json::{Value, json};

/// A session with four asks in the journal: allowed by a person, denied by a person, withdrawn, and allowed because a
/// person had allowed the tool for the session.
async fn history(daemon: &TestDaemon) -> TestSession {
    let session = daemon.session("script").await;
    session.run_with_answer(ask_bash("make"), json!({ "decision": "allow_once" })).await;
    session.run_with_answer(ask_bash("make install"), json!({ "decision": "deny" })).await;
    let run = session.prompt_script(&[ask_bash("make clean")]).await;
    session.wait_for_ask(&run).await;
    session.cancel().await;
    session.wait(&run).await;
    session
        .run_with_answer(ask("Write", json!({ "path": "a" })), json!({ "decision": "allow_always" }))
        .await;
    assert_eq!(session.run_script(&[ask("Write", json!({ "path": "b" }))]).await["text"], "allowed");
    session.run_with_answer(question("which?", &[]), json!({ "value": "this" })).await;
    session
}

async fn report(daemon: &TestDaemon, request: Value) -> Value {
    daemon.client().post("/v1/policy/test", &request).await.expect(200)
}

fn counts(report: &Value) -> [u64; 7] {
    let names =
        ["asks", "as_before", "no_longer_asked", "now_allowed", "now_asked", "now_denied", "against_people"];
    names.map(|name| report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}")))
}

#[tokio::test]
async fn a_policy_is_tried_on_every_permission_in_the_journal_and_on_no_question() {
    let daemon = TestDaemon::start().await;
    let session = history(&daemon).await;
    assert_eq!(counts(&report(&daemon, json!({ "policy": "ask" })).await), [5, 5, 0, 0, 0, 0, 0]);
    assert_eq!(counts(&report(&daemon, json!({ "policy": "allow" })).await), [5, 1, 4, 0, 0, 0, 1]);
    assert_eq!(counts(&report(&daemon, json!({ "policy": "deny" })).await), [5, 0, 0, 0, 0, 5, 3]);
    let rules = json!([
        { "tool": "Write", "decision": "deny" },
        { "tool": "Bash", "match": "make*", "decision": "allow" },
    ]);
    let tried = report(&daemon, json!({ "policy": rules })).await;
    assert_eq!(counts(&tried), [5, 0, 3, 0, 0, 2, 3]);
    let trials = tried["trials"].as_array().unwrap();
    let of = |at: usize| (&trials[at]["argument"], &trials[at]["then"]["by"], &trials[at]["now"]);
    let allowed = json!({ "decision": "allow", "rule": 2 });
    let denied = json!({ "decision": "deny", "rule": 1 });
    assert_eq!(of(0), (&json!("make"), &json!("user"), &allowed));
    assert_eq!(of(2), (&json!("make clean"), &json!("cancel"), &allowed));
    assert_eq!(of(4), (&json!("b"), &json!("policy"), &denied));
    assert_eq!(trials[1]["against_person"], true, "a person had denied it");
    assert_eq!(trials[4]["then"]["granted"], true);
    let asked = session.show().await;
    assert_eq!(asked["policy"], "ask", "nothing was changed");
}

#[tokio::test]
async fn decisions_by_policy_can_be_judged_again_also_after_a_rebuild_of_the_lists() {
    let mut daemon = TestDaemon::start().await;
    let rules = json!([
        { "tool": "Bash", "match": "git push*", "decision": "deny" },
        { "tool": "Bash", "match": "git *", "decision": "allow" },
    ]);
    let session = daemon.session_with(json!({ "agent": "script", "policy": rules })).await;
    session.run_script(&[ask_bash("git push"), ask_bash("git fetch")]).await;
    let before = report(&daemon, json!({ "policy": "ask" })).await;
    assert_eq!(counts(&before), [2, 0, 0, 0, 2, 0, 0]);
    assert_eq!(before["trials"][0]["then"]["rule"], rules[0]);
    assert_eq!(counts(&report(&daemon, json!({ "policy": "allow" })).await), [2, 1, 0, 1, 0, 0, 0]);
    daemon.terminate().await;
    daemon.home.qd(&["doctor", "--rebuild"]).await.ok();
    daemon.start_again().await;
    assert_eq!(report(&daemon, json!({ "policy": "ask" })).await, before);
}

#[tokio::test]
async fn the_asks_can_be_narrowed_down() {
    let daemon = TestDaemon::start().await;
    let (one, other) = (daemon.session("script").await, daemon.session("script").await);
    for (session, command) in [(&one, "first"), (&other, "second"), (&one, "third")] {
        session.run_with_answer(ask_bash(command), json!({ "decision": "allow_once" })).await;
    }
    let arguments = async |request: Value| {
        let tried = report(&daemon, request).await;
        let trials = tried["trials"].as_array().unwrap().clone();
        trials.iter().map(|trial| trial["argument"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let with = |mut request: Value| {
        request["policy"] = json!("ask");
        request
    };
    assert_eq!(arguments(with(json!({}))).await, ["first", "second", "third"]);
    assert_eq!(arguments(with(json!({ "limit": 2 }))).await, ["second", "third"], "the newest");
    assert_eq!(arguments(with(json!({ "session_id": one.id }))).await, ["first", "third"]);
    assert_eq!(arguments(with(json!({ "workspace_id": one.workspace }))).await.len(), 3);
    let client = daemon.client();
    for bad in [json!({ "limit": 0 }), json!({ "limit": 1001 })] {
        client.post("/v1/policy/test", &with(bad)).await.expect_refusal(400, "invalid_value");
    }
    for missing in [json!({ "session_id": "ses_nobody" }), json!({ "workspace_id": "ws_nobody" })] {
        client.post("/v1/policy/test", &with(missing)).await.expect_refusal(404, "not_found");
    }
}

#[tokio::test]
async fn the_verb_prints_what_changes_and_a_summary() {
    let daemon = TestDaemon::start().await;
    let session = history(&daemon).await;
    let file = daemon.home.project_dir().join("rules.json");
    std::fs::write(&file, r#"[{"tool": "Bash", "match": "make*", "decision": "allow"}]"#).unwrap();
    let file = file.to_str().unwrap();
    let text = daemon.qd(&["policy", "test", file]).await.ok();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5, "a header, three changes, a summary: {text}");
    assert!(lines[1].contains("asked, allowed") && lines[1].ends_with("Bash: make"), "{text}");
    assert!(lines[2].contains("asked, denied") && lines[2].contains("allowed by rule 1"), "{text}");
    assert_eq!(
        lines[4], "5 asks: 2 as before, 3 no longer asked; 1 contradicts what a person decided",
        "{text}"
    );
    let short = daemon.qd(&["policy", "test", "ask", "--session", &session.id]).await.ok();
    assert_eq!(short.trim(), "5 asks: 5 as before");
    let value = daemon.qd(&["policy", "test", "allow", "--limit", "3", "--json"]).await.json();
    assert_eq!(value["asks"], 3);
    let (work, elsewhere) = (daemon.home.project_dir(), daemon.home.sibling_path("elsewhere"));
    let here = daemon.qd(&["policy", "test", "ask", "--workspace", work.to_str().unwrap()]).await.ok();
    assert_eq!(here.trim(), "5 asks: 5 as before");
    std::fs::create_dir_all(&elsewhere).unwrap();
    daemon.qd(&["policy", "test", "ask", "--workspace", elsewhere.to_str().unwrap()]).await.expect_exit(3);
    daemon.qd(&["policy", "test", "ask", "--session", "nobody"]).await.expect_exit(3);
}

#[tokio::test]
async fn a_bad_rule_file_is_wrong_usage_and_the_rule_is_named() {
    let daemon = TestDaemon::start().await;
    let file = daemon.home.project_dir().join("rules.json");
    for (rules, hint) in [
        (r#"[{"decision": "allow"}, {"decison": "deny"}]"#, "rule 2: unknown field `decison`"),
        (r#"[{"decision": "allow"}, {"tool": "", "decision": "deny"}]"#, "Rule 2 of the policy has an empty"),
        (r#"{"tool": "Bash"}"#, "a list of rules"),
        ("[", "not a valid policy"),
    ] {
        std::fs::write(&file, rules).unwrap();
        let output = daemon.qd(&["policy", "test", file.to_str().unwrap()]).await;
        assert!(output.stderr.contains(hint), "{rules}: {output:?}");
        output.expect_exit(2);
    }
    daemon.qd(&["policy", "test", "no-such-file.json"]).await.expect_exit(2);
}

#[tokio::test]
async fn a_path_in_the_workspace_is_inside_however_it_is_named() {
    let daemon = TestDaemon::start().await;
    let work = daemon.home.project_dir().canonicalize().unwrap();
    let path = |rest: &str| format!("{}/{rest}", work.display());
    let rules = json!([{ "tool": "Edit", "match": "src/*", "decision": "allow" }]);
    let session = daemon.session_with(json!({ "agent": "script", "policy": rules })).await;
    for (tool, input, risk) in [
        ("Read", json!({ "file_path": path("src/a.rs") }), "low"),
        ("Read", json!({ "file_path": "/home/nobody/a.rs" }), "medium"),
        ("Write", json!({ "file_path": path("a.rs") }), "medium"),
        ("Write", json!({ "file_path": "/home/nobody/a.rs" }), "high"),
        ("Bash", json!({ "command": format!("cd {} && ls", work.display()) }), "low"),
    ] {
        let run = session.prompt_script(&[ask(tool, input.clone())]).await;
        let opened = session.wait_for_run_event(&run, "ask.opened").await;
        assert_eq!(opened.data["risk"], risk, "{tool} {input}");
        session.cancel().await;
        session.wait(&run).await;
    }
    let edit = ask("Edit", json!({ "file_path": path("src/a.rs") }));
    assert_eq!(session.run_script(&[edit]).await["text"], "allowed", "by a rule for src/*");
}

#[tokio::test]
async fn what_an_agent_does_without_asking_is_in_the_journal_all_the_same() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "policy": "deny" })).await;
    let run = session.prompt_script(&[tool("Bash", json!({ "command": "rm -rf build" }), "gone")]).await;
    session.wait(&run).await;
    let events = session.events_of(&run).await;
    let of = |kind: &str| events.iter().find(|event| event.kind == kind).unwrap().data.clone();
    assert_eq!(of("tool.started")["input"]["command"], "rm -rf build");
    assert_eq!(of("tool.finished")["name"], "Bash");
    assert!(events.iter().all(|event| !event.kind.starts_with("ask.")), "nobody was asked");
}
