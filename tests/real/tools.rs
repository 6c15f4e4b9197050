//! Tools under one name and with their arguments, whatever the agent calls them: files are created and overwritten by
//! the agent's own tool, and the tools of `qd mcp` are used. Part of the conversation that every agent has.

use qd_testkit::{RealAgent, TestEvent, TestSession};
use serde_json::{Value, json};

use super::shown::Behaviour;
use super::{RealAgentTest, answer, assert_ended, describe_events, ended, permission};

/// Creates a file with the agent's own tool and then overwrites it. Both need permission, once.
pub(super) async fn check_files(test: &RealAgentTest, session: &TestSession) {
    let file = test.daemon.home.project_dir().join("created.txt");
    for behaviour in [Behaviour::CreatesFiles, Behaviour::OverwritesFiles] {
        if matches!(behaviour, Behaviour::OverwritesFiles) && test.cli == RealAgent::Copilot {
            test.lacks(behaviour, "its tool for this only creates files");
            break;
        }
        let run = session.prompt(&format!("TOOL:create:{}", file.display())).await;
        let ask = permission(session, &run).await;
        assert!(ask["input"].to_string().contains("created.txt"), "{ask}");
        let before = std::fs::read_to_string(&file).ok();
        answer(session, &ask, json!({ "decision": "allow_once" })).await;
        assert_ended(&ended(session, &run).await, "end_turn");
        let events = session.events_of(&run).await;
        let shown = describe_events(&events);
        assert_eq!(std::fs::read_to_string(&file).ok().as_deref().map(str::trim), Some("hi"), "{shown}");
        assert!(before.is_none_or(|before| before.trim() == "hi"), "nothing is written before it is allowed");
        assert_eq!(count(&events, "ask.opened"), 1, "it is asked once: {shown}");
        assert!(started_input(&events, None).to_string().contains("created.txt"), "{shown}");
        test.shows(behaviour);
    }
}

/// Uses two tools of `qd mcp`: one is allowed, the other refused.
pub(super) async fn check_mcp(test: &RealAgentTest, session: &TestSession) {
    let allowed = json!({ "session": session.id });
    let run = session.prompt(&format!("TOOL:mcp:status {allowed}")).await;
    let ask = permission(session, &run).await;
    assert_eq!((&ask["tool"], &ask["input"]), (&json!("mcp__quarterdeck__status"), &allowed), "{ask}");
    answer(session, &ask, json!({ "decision": "allow_once" })).await;
    assert_ended(&ended(session, &run).await, "end_turn");
    let events = session.events_of(&run).await;
    let shown = describe_events(&events);
    assert_eq!(count(&events, "ask.opened"), 1, "it is asked once: {shown}");
    assert_eq!(started_input(&events, Some("mcp__quarterdeck__status")), allowed, "{shown}");
    assert!(events.iter().any(|event| is_result_of(event, &session.id)), "it gets the result: {shown}");

    let refused = json!({ "agent": "echo", "prompt": "no", "title": "never" });
    let run = session.prompt(&format!("TOOL:mcp:spawn_agent {refused}")).await;
    let ask = permission(session, &run).await;
    assert_eq!((&ask["tool"], &ask["input"]), (&json!("mcp__quarterdeck__spawn_agent"), &refused), "{ask}");
    answer(session, &ask, json!({ "decision": "deny", "reason": "not-without-me" })).await;
    assert_ended(&ended(session, &run).await, "end_turn");
    let sessions = test.daemon.client().get("/v1/sessions").await.list();
    assert!(sessions.iter().all(|one| one["title"] != "never"), "{sessions:?}");
    test.shows(Behaviour::UsesOurTools);
}

fn count(events: &[TestEvent], kind: &str) -> usize {
    events.iter().filter(|event| event.kind == kind).count()
}

/// The arguments with which the tool of this name, or the first tool, was started.
#[track_caller]
fn started_input(events: &[TestEvent], name: Option<&str>) -> Value {
    let started = events
        .iter()
        .find(|event| event.kind == "tool.started" && name.is_none_or(|name| event.data["name"] == name));
    started.unwrap_or_else(|| panic!("{name:?} is not started: {}", describe_events(events))).data["input"]
        .clone()
}

/// Whether the event is the end of a tool whose result contains these words.
fn is_result_of(event: &TestEvent, words: &str) -> bool {
    event.kind == "tool.finished" && event.data.to_string().contains(words)
}
