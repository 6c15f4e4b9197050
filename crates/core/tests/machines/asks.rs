//! How a session decides the permission requests of its agent: by its policy, by session grants, and by the location
//! of its workspace.

use qd_core::session::{CommandRefusal, CommandReply, SessionCommand, SessionState, SessionStep};
use qd_protocol::event::{AskAnswer, AskKind, EventBody, PermissionDecision, ResolvedBy};
use qd_protocol::link::{AgentUpdate, AskRequest};
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, RunId};
use serde_json::{Value, json};

use crate::harness::SessionHarness;

fn session(policy: Value) -> SessionHarness {
    let mut harness = SessionHarness::new();
    harness.state.settings.policy = serde_json::from_value(policy).unwrap();
    harness.prompt("a");
    harness
}

fn request(harness: &mut SessionHarness, id: &str, tool: &str, input: Value) -> SessionStep {
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
    harness.receive(AgentUpdate::Ask { run: RunId::parse("a").unwrap(), ask })
}

fn request_command(harness: &mut SessionHarness, id: &str, command: &str) -> SessionStep {
    request(harness, id, "Bash", json!({ "command": command }))
}

fn answer(harness: &mut SessionHarness, id: &str, decision: PermissionDecision) -> SessionStep {
    let answer = AskAnswer { decision: Some(decision), ..AskAnswer::default() };
    harness.command(SessionCommand::Answer { ask: AskId::parse(id).unwrap(), answer, shown_sha256: None })
}

/// How a step decided: who, what, and whether because of a session grant. `None` if a person is asked.
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
    let mut harness = session(json!("ask"));
    assert_eq!(decided(&request_command(&mut harness, "1", "make")), None);
    answer(&mut harness, "1", PermissionDecision::AllowAlways);
    assert_eq!(decided(&request_command(&mut harness, "2", "make test")), GRANTED);
    assert_eq!(decided(&request_command(&mut harness, "3", "rm -rf /")), None, "high risk is asked");
    assert_eq!(decided(&request(&mut harness, "4", "Write", json!({ "path": "x" }))), None, "another tool");
    let refused = answer(&mut harness, "3", PermissionDecision::AllowAlways);
    assert!(
        matches!(refused.reply, Some(CommandReply::Refused(CommandRefusal::InvalidAnswer(_)))),
        "{:?}",
        refused.reply
    );
    answer(&mut harness, "3", PermissionDecision::AllowOnce);
    assert_eq!(decided(&request_command(&mut harness, "5", "rm -rf /")), None, "once is once");
}

#[test]
fn allow_once_is_not_remembered() {
    let mut harness = session(json!("ask"));
    request_command(&mut harness, "1", "make");
    answer(&mut harness, "1", PermissionDecision::AllowOnce);
    assert_eq!(decided(&request_command(&mut harness, "2", "make")), None);
}

#[test]
fn a_deny_rule_beats_allow_always_wherever_it_stands() {
    let mut harness = session(json!([
        {"tool": "Bash", "match": "git *", "decision": "ask"},
        {"tool": "Bash", "match": "curl *", "decision": "deny"},
    ]));
    request_command(&mut harness, "1", "make");
    answer(&mut harness, "1", PermissionDecision::AllowAlways);
    assert_eq!(decided(&request_command(&mut harness, "2", "git log")), GRANTED);
    assert_eq!(decided(&request_command(&mut harness, "3", "curl x.org")), DENIED);
    assert_eq!(
        decided(&request_command(&mut harness, "4", "git log; curl x.org")),
        None,
        "the ask rule is first"
    );
}

#[test]
fn a_session_grant_survives_a_restart() {
    let mut harness = session(json!("ask"));
    request_command(&mut harness, "1", "make");
    answer(&mut harness, "1", PermissionDecision::AllowAlways);
    let snapshot = serde_json::to_vec(&harness.state).unwrap();
    harness.state = serde_json::from_slice(&snapshot).unwrap();
    assert_eq!(decided(&request_command(&mut harness, "2", "make")), GRANTED);
}

#[test]
fn a_decision_by_policy_records_everything_needed_to_judge_it_again() {
    let mut harness = session(json!([{"tool": "Bash", "match": "make*", "decision": "allow"}]));
    let step = request_command(&mut harness, "1", "make");
    assert_eq!(decided(&step), ALLOWED);
    let EventBody::AskResolved(resolved) = &step.events[0].body else { panic!("{:?}", step.events) };
    assert_eq!(resolved.ask.tool.as_deref(), Some("Bash"));
    assert_eq!(resolved.ask.input, json!({ "command": "make" }));
    assert_eq!(resolved.ask.risk, Risk::Medium);
    assert_eq!(resolved.rule.as_ref().unwrap().pattern.as_deref(), Some("make*"));
}

#[test]
fn the_directory_of_the_session_tells_inside_from_outside() {
    let write = |harness: &mut SessionHarness, id: &str, path: &str| {
        decided(&request(harness, id, "Write", json!({ "file_path": path })))
    };
    let mut harness = session(json!("allow"));
    assert_eq!(write(&mut harness, "1", "/srv/other/x"), ALLOWED, "the workspace is not known");
    harness.state.settings.directory = Some("/srv/app".to_owned());
    assert_eq!(write(&mut harness, "2", "/srv/app/x"), ALLOWED);
    assert_eq!(write(&mut harness, "3", "/srv/other/x"), None, "a write outside is high risk");
}

#[test]
fn a_session_from_before_directories_were_recorded_can_still_be_read() {
    let mut snapshot = serde_json::to_value(&session(json!("ask")).state).unwrap();
    assert!(snapshot["settings"].as_object_mut().unwrap().remove("directory").is_none(), "it has none");
    let state: SessionState = serde_json::from_value(snapshot).unwrap();
    assert_eq!(state.settings.directory, None);
    let old = br#"{"agent":"script","policy":"ask","limits":{}}"#;
    let EventBody::SessionCreated(created) = EventBody::decode("session.created", old).unwrap().unwrap()
    else {
        panic!("a session")
    };
    assert_eq!(created.directory, None);
}

fn answer_shown(harness: &mut SessionHarness, id: &str, shown: Option<&str>) -> SessionStep {
    let answer =
        AskAnswer { decision: Some(PermissionDecision::AllowOnce), reason: None, ..AskAnswer::default() };
    let shown_sha256 = shown.map(str::to_owned);
    harness.command(SessionCommand::Answer { ask: AskId::parse(id).unwrap(), answer, shown_sha256 })
}

/// The digest in the `ask.opened` of a step.
fn opened_digest(step: &SessionStep) -> String {
    let opened = step.events.iter().find_map(|event| match &event.body {
        EventBody::AskOpened(opened) => opened.ask.input_sha256.clone(),
        _ => None,
    });
    opened.unwrap()
}

#[test]
fn an_answer_with_the_digest_of_another_ask_leaves_both_open() {
    let mut harness = session(json!("ask"));
    let first = opened_digest(&request_command(&mut harness, "1", "make"));
    let second = opened_digest(&request_command(&mut harness, "2", "make install"));
    assert_eq!(first, qd_core::ask_digest::input_sha256(&json!({ "command": "make" })));
    let refused = answer_shown(&mut harness, "2", Some(&first));
    assert_eq!(refused.reply, Some(CommandReply::Refused(CommandRefusal::AskChanged)));
    assert_eq!(harness.state.pending_asks().count(), 2);
    assert!(matches!(
        answer_shown(&mut harness, "2", Some(&second)).reply,
        Some(CommandReply::Answered(ask)) if ask.input_sha256 == Some(second)
    ));
    assert!(matches!(answer_shown(&mut harness, "1", None).reply, Some(CommandReply::Answered(_))));
}

#[test]
fn an_ask_of_a_release_without_digests_is_answered_by_the_digest_of_its_input() {
    let mut harness = session(json!("ask"));
    let digest = opened_digest(&request_command(&mut harness, "1", "make"));
    let snapshot = serde_json::to_string(&harness.state).unwrap();
    let stored = format!(r#""input_sha256":"{digest}","#);
    assert!(snapshot.contains(&stored), "{snapshot}");
    harness.state = serde_json::from_str(&snapshot.replace(&stored, "")).unwrap();
    let refused = answer_shown(&mut harness, "1", Some("of something else"));
    assert_eq!(refused.reply, Some(CommandReply::Refused(CommandRefusal::AskChanged)));
    assert!(matches!(answer_shown(&mut harness, "1", Some(&digest)).reply, Some(CommandReply::Answered(_))));
}

proptest::proptest! {
    #[test]
    fn an_answer_with_a_wrong_digest_changes_nothing(
        command in ".{0,40}",
        shown in "[0-9a-f]{0,64}",
        decision in proptest::sample::select(vec![
            PermissionDecision::AllowOnce, PermissionDecision::AllowAlways, PermissionDecision::Deny,
        ]),
    ) {
        let mut harness = session(json!("ask"));
        let digest = opened_digest(&request(&mut harness, "1", "Bash", json!({ "command": command })));
        proptest::prop_assume!(shown != digest);
        let before = serde_json::to_vec(&harness.state).unwrap();
        let answer = AskAnswer { decision: Some(decision), ..AskAnswer::default() };
        let ask = AskId::parse("1").unwrap();
        let step = harness.command(SessionCommand::Answer { ask, answer, shown_sha256: Some(shown) });
        proptest::prop_assert_eq!(step.reply, Some(CommandReply::Refused(CommandRefusal::AskChanged)));
        proptest::prop_assert!(step.events.is_empty() && step.effects.is_empty());
        proptest::prop_assert_eq!(serde_json::to_vec(&harness.state).unwrap(), before);
    }
}
