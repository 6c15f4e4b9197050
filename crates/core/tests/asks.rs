//! What a session makes of the permissions that its agent asks for: by its policy, by what a person has allowed for good,
//! and by where its workspace is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;

use harness::SessionHarness;
use qd_core::session::{CommandRefusal, CommandReply, SessionCommand, SessionState, SessionStep};
use qd_protocol::event::{AskAnswer, AskKind, EventBody, PermissionDecision, ResolvedBy};
use qd_protocol::link::{AgentUpdate, AskRequest};
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, RunId};
use serde_json::{Value, json};

fn session(policy: Value) -> SessionHarness {
    let mut bench = SessionHarness::new();
    bench.state.settings.policy = serde_json::from_value(policy).unwrap();
    bench.prompt("a");
    bench
}

fn asks(bench: &mut SessionHarness, id: &str, tool: &str, input: Value) -> SessionStep {
    let ask = AskRequest {
        id: AskId::parse(id).unwrap(),
        kind: AskKind::Permission,
        tool: Some(tool.to_owned()),
        input,
        risk: None,
        prompt: "?".to_owned(),
        options: Vec::new(),
        implicit: false,
    };
    bench.hear(AgentUpdate::Ask { run: RunId::parse("a").unwrap(), ask })
}

fn runs(bench: &mut SessionHarness, id: &str, command: &str) -> SessionStep {
    asks(bench, id, "Bash", json!({ "command": command }))
}

fn answers(bench: &mut SessionHarness, id: &str, decision: PermissionDecision) -> SessionStep {
    let answer = AskAnswer { decision: Some(decision), ..AskAnswer::default() };
    bench.command(SessionCommand::Answer { ask: AskId::parse(id).unwrap(), answer })
}

/// How a step has decided: by whom and what, and whether a person had allowed it for good; none if a person is asked.
fn decided(step: &SessionStep) -> Option<(ResolvedBy, PermissionDecision, bool)> {
    step.events.iter().find_map(|event| match &event.body {
        EventBody::AskResolved(resolved) => {
            Some((resolved.by, resolved.ask.answer.clone()?.decision?, resolved.granted))
        }
        _ => None,
    })
}

const GRANTED: Option<(ResolvedBy, PermissionDecision, bool)> =
    Some((ResolvedBy::Policy, PermissionDecision::AllowOnce, true));
const ALLOWED: Option<(ResolvedBy, PermissionDecision, bool)> =
    Some((ResolvedBy::Policy, PermissionDecision::AllowOnce, false));
const DENIED: Option<(ResolvedBy, PermissionDecision, bool)> =
    Some((ResolvedBy::Policy, PermissionDecision::Deny, false));

#[test]
fn allow_always_holds_for_its_tool_and_not_for_high_risk() {
    let mut bench = session(json!("ask"));
    assert_eq!(decided(&runs(&mut bench, "1", "make")), None);
    answers(&mut bench, "1", PermissionDecision::AllowAlways);
    assert_eq!(decided(&runs(&mut bench, "2", "make test")), GRANTED);
    assert_eq!(decided(&runs(&mut bench, "3", "rm -rf /")), None, "high risk is asked");
    assert_eq!(decided(&asks(&mut bench, "4", "Write", json!({ "path": "x" }))), None, "another tool");
    let refused = answers(&mut bench, "3", PermissionDecision::AllowAlways);
    assert!(
        matches!(refused.reply, Some(CommandReply::Refused(CommandRefusal::InvalidAnswer(_)))),
        "{:?}",
        refused.reply
    );
    answers(&mut bench, "3", PermissionDecision::AllowOnce);
    assert_eq!(decided(&runs(&mut bench, "5", "rm -rf /")), None, "once is once");
}

#[test]
fn allow_once_is_not_remembered() {
    let mut bench = session(json!("ask"));
    runs(&mut bench, "1", "make");
    answers(&mut bench, "1", PermissionDecision::AllowOnce);
    assert_eq!(decided(&runs(&mut bench, "2", "make")), None);
}

#[test]
fn a_deny_rule_beats_allow_always_wherever_it_stands() {
    let mut bench = session(json!([
        {"tool": "Bash", "match": "git *", "decision": "ask"},
        {"tool": "Bash", "match": "curl *", "decision": "deny"},
    ]));
    runs(&mut bench, "1", "make");
    answers(&mut bench, "1", PermissionDecision::AllowAlways);
    assert_eq!(decided(&runs(&mut bench, "2", "git log")), GRANTED);
    assert_eq!(decided(&runs(&mut bench, "3", "curl x.org")), DENIED);
    assert_eq!(decided(&runs(&mut bench, "4", "git log; curl x.org")), None, "the ask rule is first");
}

#[test]
fn what_was_allowed_for_good_is_known_again_after_a_restart() {
    let mut bench = session(json!("ask"));
    runs(&mut bench, "1", "make");
    answers(&mut bench, "1", PermissionDecision::AllowAlways);
    let kept = serde_json::to_vec(&bench.state).unwrap();
    bench.state = serde_json::from_slice(&kept).unwrap();
    assert_eq!(decided(&runs(&mut bench, "2", "make")), GRANTED);
}

#[test]
fn a_decision_by_policy_has_all_that_it_takes_to_judge_it_again() {
    let mut bench = session(json!([{"tool": "Bash", "match": "make*", "decision": "allow"}]));
    let step = runs(&mut bench, "1", "make");
    assert_eq!(decided(&step), ALLOWED);
    let EventBody::AskResolved(resolved) = &step.events[0].body else { panic!("{:?}", step.events) };
    assert_eq!(resolved.ask.tool.as_deref(), Some("Bash"));
    assert_eq!(resolved.ask.input, json!({ "command": "make" }));
    assert_eq!(resolved.ask.risk, Risk::Medium);
    assert_eq!(resolved.rule.as_ref().unwrap().pattern.as_deref(), Some("make*"));
}

#[test]
fn the_directory_of_the_session_tells_inside_from_outside() {
    let write = |bench: &mut SessionHarness, id: &str, path: &str| {
        decided(&asks(bench, id, "Write", json!({ "file_path": path })))
    };
    let mut bench = session(json!("allow"));
    assert_eq!(write(&mut bench, "1", "/srv/other/x"), ALLOWED, "nobody knows where it is");
    bench.state.settings.directory = Some("/srv/app".to_owned());
    assert_eq!(write(&mut bench, "2", "/srv/app/x"), ALLOWED);
    assert_eq!(write(&mut bench, "3", "/srv/other/x"), None, "a write outside is of high risk");
}

#[test]
fn a_session_from_before_directories_were_recorded_can_still_be_read() {
    let mut kept = serde_json::to_value(&session(json!("ask")).state).unwrap();
    assert!(kept["settings"].as_object_mut().unwrap().remove("directory").is_none(), "it has none");
    let state: SessionState = serde_json::from_value(kept).unwrap();
    assert_eq!(state.settings.directory, None);
    let old = br#"{"agent":"script","policy":"ask","limits":{}}"#;
    let EventBody::SessionCreated(created) = EventBody::decode("session.created", old).unwrap().unwrap()
    else {
        panic!("a session")
    };
    assert_eq!(created.directory, None);
}
