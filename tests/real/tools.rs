//! Tools with their arguments, whatever the agent calls them: files are created and overwritten by the agent's own tool.
//! Part of the conversation that every agent has.

use qd_testkit::{TestEvent, TestSession};
use serde_json::{Value, json};

use super::{RealAgentTest, answer, assert_ended, describe_events, ended, permission};

/// Creates a file with the agent's own tool and then overwrites it. Both need permission, once.
pub(super) async fn check_files(test: &RealAgentTest, session: &TestSession) {
    let file = test.daemon.home.project_dir().join("created.txt");
    for _ in 0..2 {
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
        assert!(started_input(&events).to_string().contains("created.txt"), "{shown}");
    }
}

fn count(events: &[TestEvent], kind: &str) -> usize {
    events.iter().filter(|event| event.kind == kind).count()
}

/// The arguments with which the first tool was started.
#[track_caller]
fn started_input(events: &[TestEvent]) -> Value {
    let started = events.iter().find(|event| event.kind == "tool.started");
    started.unwrap_or_else(|| panic!("no tool is started: {}", describe_events(events))).data["input"].clone()
}
