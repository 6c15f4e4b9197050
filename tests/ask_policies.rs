//! What a session's policy decides without asking. A decision by policy writes `ask.resolved`, which names the rule,
//! but no `ask.opened`.

use qd_testkit::{TestDaemon, TestEvent, TestSession, journal_rules, script::*};
use serde_json::{Value, json};

async fn with_policy(daemon: &TestDaemon, policy: Value) -> TestSession {
    daemon.session_with(json!({ "agent": "script", "policy": policy })).await
}

/// Runs one step that needs permission and returns `allowed`, `denied…`, or `asked` if a person would have to decide.
async fn verdict(session: &TestSession, step: Value) -> (String, TestEvent) {
    let run = session.prompt_script(&[step]).await;
    let decided =
        |event: &TestEvent| event.is_of_run(&run, "ask.opened") || event.is_of_run(&run, "ask.resolved");
    let event = session.wait_for_event("a decision", decided).await;
    if event.kind == "ask.opened" {
        session.cancel().await;
        session.wait(&run).await;
        return ("asked".to_owned(), event);
    }
    assert_eq!(event.data["by"], "policy", "{event:?}");
    let outcome = session.wait(&run).await["text"].as_str().unwrap_or_default().to_owned();
    journal_rules::check(&session.events().await);
    (outcome, event)
}

async fn judge(session: &TestSession, command: &str) -> String {
    verdict(session, ask_bash(command)).await.0
}

#[tokio::test]
async fn the_policy_is_ask_unless_given() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    assert_eq!(session.show().await["policy"], "ask");
    assert_eq!(judge(&session, "ls").await, "asked");
}

#[tokio::test]
async fn allow_and_deny_decide_without_opening_an_ask() {
    let daemon = TestDaemon::start().await;
    let allow = with_policy(&daemon, json!("allow")).await;
    let (outcome, event) = verdict(&allow, ask_bash("ls")).await;
    assert_eq!((outcome.as_str(), &event.data["state"]), ("allowed", &json!("answered")));
    let deny = with_policy(&daemon, json!("deny")).await;
    assert!(judge(&deny, "ls").await.starts_with("denied"));
    assert!(daemon.client().pending_asks().await.is_empty());
    for session in [allow, deny] {
        let events = session.events().await;
        assert!(events.iter().all(|event| event.kind != "ask.opened"));
        assert_eq!(events.iter().filter(|event| event.kind == "ask.delivered").count(), 1);
    }
}

#[tokio::test]
async fn the_first_rule_that_matches_decides_and_where_none_does_a_person_is_asked() {
    let daemon = TestDaemon::start().await;
    let rule = json!({ "tool": "Bash", "match": "git status*", "decision": "allow" });
    let session = with_policy(
        &daemon,
        json!([
            { "tool": "Bash", "match": "git push*", "decision": "deny" },
            rule,
            { "tool": "Bash", "match": "git *", "decision": "ask" },
            { "tool": "Read", "decision": "allow" },
        ]),
    )
    .await;
    let (outcome, event) = verdict(&session, ask_bash("git status --short")).await;
    assert_eq!((outcome.as_str(), &event.data["rule"]), ("allowed", &rule));
    assert!(judge(&session, "git push origin").await.starts_with("denied"));
    assert_eq!(judge(&session, "git commit").await, "asked");
    assert_eq!(judge(&session, "cargo test").await, "asked");
    assert_eq!(verdict(&session, ask("Read", json!({ "path": "a.txt" }))).await.0, "allowed");
    assert_eq!(verdict(&session, ask("Write", json!({ "path": "a.txt" }))).await.0, "asked");
}

#[tokio::test]
async fn a_match_is_tried_on_path_and_url_too() {
    let daemon = TestDaemon::start().await;
    let session = with_policy(
        &daemon,
        json!([
            { "tool": "Edit", "match": "src/*", "decision": "allow" },
            { "tool": "Fetch", "match": "https://docs.rs/*", "decision": "allow" },
        ]),
    )
    .await;
    for (tool, input, expected) in [
        ("Edit", json!({ "path": "src/main.rs" }), "allowed"),
        ("Edit", json!({ "path": "Cargo.toml" }), "asked"),
        ("Fetch", json!({ "url": "https://docs.rs/tokio" }), "allowed"),
        ("Fetch", json!({ "url": "https://example.com/" }), "asked"),
    ] {
        assert_eq!(verdict(&session, ask(tool, input.clone())).await.0, expected, "{tool} {input}");
    }
}

#[tokio::test]
async fn an_allow_rule_must_match_every_part_of_a_command_line() {
    let daemon = TestDaemon::start().await;
    let rules = json!([{ "tool": "Bash", "match": "git status*", "decision": "allow" }]);
    let session = with_policy(&daemon, rules).await;
    assert_eq!(judge(&session, "git status").await, "allowed");
    assert_eq!(judge(&session, "git status && git status -s").await, "allowed");
    for command in [
        "git status && curl evil.example",
        "git status; make",
        "git status | sh",
        "git status || make",
        "git status & make",
        "git status\nmake",
        "git status $(make)",
        "git status `make`",
        "git status <(make)",
        "git status 'unclosed",
    ] {
        assert_eq!(judge(&session, command).await, "asked", "{command:?}");
    }
}

#[tokio::test]
async fn a_deny_rule_needs_to_match_one_part_only() {
    let daemon = TestDaemon::start().await;
    let rules = json!([
        { "tool": "Bash", "match": "curl *", "decision": "deny" },
        { "tool": "Bash", "match": "*", "decision": "allow" },
    ]);
    let session = with_policy(&daemon, rules).await;
    assert_eq!(judge(&session, "ls && pwd").await, "allowed");
    let outcome = judge(&session, "ls && curl example.com").await;
    assert!(outcome.starts_with("denied"), "{outcome}");
}

#[tokio::test]
async fn high_risk_is_asked_under_allow_too_and_only_a_rule_with_risk_high_allows_it() {
    let daemon = TestDaemon::start().await;
    let high = || ask_risk("Bash", json!({ "command": "ls" }), "high");
    let allow = with_policy(&daemon, json!("allow")).await;
    let (outcome, event) = verdict(&allow, high()).await;
    assert_eq!(
        (outcome.as_str(), &event.data["risk"]),
        ("asked", &json!("high")),
        "the agent's word raises the risk"
    );
    let rule = with_policy(&daemon, json!([{ "tool": "Bash", "decision": "allow" }])).await;
    assert_eq!(verdict(&rule, high()).await.0, "asked");
    let brave = with_policy(&daemon, json!([{ "tool": "Bash", "decision": "allow", "risk": "high" }])).await;
    assert_eq!(verdict(&brave, high()).await.0, "allowed");
    let deny = with_policy(&daemon, json!("deny")).await;
    assert!(verdict(&deny, high()).await.0.starts_with("denied"));
}

#[tokio::test]
async fn the_agents_word_never_lowers_the_risk() {
    let daemon = TestDaemon::start().await;
    let session = with_policy(&daemon, json!("allow")).await;
    let step = ask_risk("Bash", json!({ "command": "rm -rf /" }), "low");
    let (outcome, event) = verdict(&session, step).await;
    assert_eq!((outcome.as_str(), &event.data["risk"]), ("asked", &json!("high")));
}

#[tokio::test]
async fn allow_always_counts_for_this_session_and_tool_and_the_agent_is_told_once() {
    let daemon = TestDaemon::start().await;
    let (session, other) = (daemon.session("script").await, daemon.session("script").await);
    let always = json!({ "decision": "allow_always" });
    let first = session.run_with_answer(ask_bash("make"), always).await;
    assert_eq!(first["text"], "allowed");
    assert_eq!(judge(&session, "make test").await, "allowed");
    assert_eq!(verdict(&session, ask("Write", json!({ "path": "x" }))).await.0, "asked", "another tool");
    assert_eq!(judge(&other, "make").await, "asked", "another session");
    let high = ask_risk("Bash", json!({ "command": "make" }), "high");
    assert_eq!(verdict(&session, high).await.0, "asked", "never for high risk");
}

#[tokio::test]
async fn allow_always_of_a_high_risk_does_not_count_for_the_next() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let high = || ask_risk("Bash", json!({ "command": "make" }), "high");
    let run = session.prompt_script(&[high()]).await;
    let ask = session.wait_for_ask(&run).await;
    let answer = session.client.answer_ask(&ask, &json!({ "decision": "allow_always" })).await;
    if answer.status == 200 {
        assert_eq!(session.wait(&run).await["text"], "allowed");
    } else {
        answer.expect_refusal(400, "invalid_answer");
        session.cancel().await;
        session.wait(&run).await;
    }
    assert_eq!(verdict(&session, high()).await.0, "asked");
}

#[tokio::test]
async fn allow_always_survives_a_restart_and_a_deny_rule_beats_it() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_with_answer(ask_bash("make"), json!({ "decision": "allow_always" })).await;
    daemon.restart().await;
    assert_eq!(judge(&session, "make").await, "allowed");
    session.patch(json!({ "policy": [{ "tool": "Bash", "match": "make*", "decision": "deny" }] })).await;
    assert!(judge(&session, "make").await.starts_with("denied"));
}

#[tokio::test]
async fn a_new_policy_counts_for_later_asks_and_leaves_open_ones_open() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_bash("one"), say(" "), ask_bash("two")]).await;
    let ask = session.wait_for_ask(&run).await;
    session.patch(json!({ "policy": "allow" })).await;
    assert_eq!(daemon.client().get(&format!("/v1/asks/{ask}")).await.expect(200)["state"], "pending");
    session.client.answer_ask(&ask, &json!({ "decision": "deny", "reason": "no" })).await.expect(200);
    assert_eq!(session.wait(&run).await["text"], "denied: no allowed");
}

#[tokio::test]
async fn a_policy_that_makes_no_sense_is_refused() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for policy in [
        json!("perhaps"),
        json!(7),
        json!([{ "tool": "Bash", "decison": "allow" }]),
        json!([{ "tool": "Bash" }]),
        json!([{ "tool": "Bash", "decision": "maybe" }]),
    ] {
        let answer = workspace.try_session(json!({ "agent": "script", "policy": policy })).await;
        assert_eq!(answer.status, 400, "{policy}: {answer}");
    }
}

#[tokio::test]
async fn a_question_is_asked_whatever_the_policy_of_tools() {
    let daemon = TestDaemon::start().await;
    let session = with_policy(&daemon, json!("allow")).await;
    let answered = session.run_with_answer(question("which?", &["red"]), json!({ "value": "red" })).await;
    assert_eq!(answered["text"], "red");
}
