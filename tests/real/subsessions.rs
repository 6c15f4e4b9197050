//! Session trees: a real agent uses the MCP server to start another agent, waits for it, and asks a person.

use qd_testkit::mcp::session_token;
use qd_testkit::{TestSession, processes};
use serde_json::json;

use super::shown::Behaviour;
use super::{RealAgentTest, answer, assert_ended, describe_events, ended};

/// Part of the conversation that every agent has.
pub(super) async fn check_subsessions(test: &RealAgentTest, session: &TestSession) {
    let rules = json!([{ "tool": "mcp__quarterdeck__*", "decision": "allow", "risk": "high" }]);
    session.patch(json!({ "policy": rules })).await;
    let wanted = json!({ "agent": "echo", "prompt": "from above", "title": "below", "wait": true });
    let run = session.prompt(&format!("TOOL:mcp:spawn_agent {wanted}")).await;
    let spawned = ended(session, &run).await;
    assert_ended(&spawned, "end_turn");
    let events = session.events_of(&run).await;
    let finished = events.iter().find(|event| event.kind == "tool.finished").unwrap_or_else(|| {
        panic!("it used no tool: {spawned:#}\n{}", describe_events(&events));
    });
    assert!(finished.data.to_string().contains("echo: from above"), "{}", finished.data);
    let sessions = test.daemon.client().get("/v1/sessions").await.list();
    let child = sessions.iter().find(|one| one["title"] == "below").unwrap();
    assert_eq!(child["parent"], session.id);

    // The session's token is on no command line.
    let secret = session_token(&test.daemon.home, &session.id);
    let secret = secret.split_once('.').unwrap().1;
    for process in processes::all_processes() {
        let line = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&line).contains(secret), "{process:?}");
    }

    let run = session.prompt(&format!("TOOL:mcp:ask_human {}", json!({ "question": "Which?" }))).await;
    let ask = session.wait_for_run_event(&run, "ask.opened").await.data;
    assert_eq!((&ask["kind"], &ask["prompt"]), (&json!("question"), &json!("Which?")), "{ask}");
    answer(session, &ask, json!({ "value": "the-blue-one" })).await;
    let asked = ended(session, &run).await;
    assert_ended(&asked, "end_turn");
    assert!(asked["text"].as_str().unwrap().contains("the-blue-one"), "the model hears it: {asked:#}");
    test.shows(Behaviour::StartsSessions);
}
