//! Calls of our own tools by agents that do not ask: the session's policy judges each of them, a person's decision goes
//! to the call and not over the link, and a repeat changes nothing.

use qd_core::session::{
    CommandRefusal, CommandReply, SessionCommand, SessionEffect, SessionStep, SettingsUpdate, ToolCallVerdict,
};
use qd_protocol::AskId;
use qd_protocol::event::{AskAnswer, AskKind, PermissionDecision};
use qd_protocol::link::AskRequest;
use qd_protocol::policy::Policy;
use serde_json::json;

use crate::harness::{SessionHarness, kinds};

fn judge(harness: &mut SessionHarness, id: &str) -> SessionStep {
    harness.command(SessionCommand::JudgeToolCall(AskRequest {
        id: AskId::parse(id).unwrap(),
        kind: AskKind::Permission,
        tool: Some("mcp__quarterdeck__spawn_agent".to_owned()),
        input: json!({"agent": "echo", "prompt": "hi"}),
        risk: None,
        prompt: "May the agent use it?".to_owned(),
        options: Vec::new(),
        implicit: false,
    }))
}

fn set_policy(harness: &mut SessionHarness, policy: &str) {
    let policy: Policy = serde_json::from_value(json!(policy)).unwrap();
    let change = SettingsUpdate { policy: Some(policy), ..SettingsUpdate::default() };
    harness.command(SessionCommand::UpdateSettings(change));
}

fn judged(verdict: ToolCallVerdict) -> Option<CommandReply> {
    Some(CommandReply::ToolCallJudged(verdict))
}

#[test]
fn a_person_decides_and_the_call_gets_the_decision() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    let asked = judge(&mut harness, "c");
    assert_eq!((asked.reply.clone(), kinds(&asked)), (judged(ToolCallVerdict::Pending), vec!["ask.opened"]));
    let again = judge(&mut harness, "c");
    assert_eq!((again.reply.clone(), again.events.len()), (judged(ToolCallVerdict::Pending), 0));
    let answer = AskAnswer {
        decision: Some(PermissionDecision::Deny),
        value: None,
        reason: Some("not now".to_owned()),
    };
    let ask = AskId::parse("c").unwrap();
    let answered = harness.command(SessionCommand::Answer { ask: ask.clone(), answer, shown_sha256: None });
    assert_eq!(kinds(&answered), ["ask.resolved"]);
    let sent = answered.effects.iter().any(|effect| matches!(effect, SessionEffect::SendAnswer { .. }));
    assert!(!sent, "the agent has not asked");
    let denied = judged(ToolCallVerdict::Denied { reason: Some("not now".to_owned()) });
    assert_eq!(judge(&mut harness, "c").reply, denied);
    assert_eq!(kinds(&harness.command(SessionCommand::AnswerDelivered { ask })), ["ask.delivered"]);
}

#[test]
fn the_policy_decides_at_once_and_the_journal_has_it() {
    let mut harness = SessionHarness::new();
    set_policy(&mut harness, "allow");
    harness.prompt("a");
    let allowed = judge(&mut harness, "c");
    assert_eq!(
        (allowed.reply.clone(), kinds(&allowed)),
        (judged(ToolCallVerdict::Allowed), vec!["ask.resolved", "ask.delivered"])
    );
    set_policy(&mut harness, "deny");
    let denied = judge(&mut harness, "d");
    assert!(
        matches!(
            denied.reply,
            Some(CommandReply::ToolCallJudged(ToolCallVerdict::Denied { reason: Some(_) }))
        ),
        "{denied:?}"
    );
}

#[test]
fn without_a_turn_nobody_can_be_asked_but_the_policy_decides() {
    let mut harness = SessionHarness::new();
    assert_eq!(judge(&mut harness, "c").reply, Some(CommandReply::Refused(CommandRefusal::NoTurn)));
    set_policy(&mut harness, "allow");
    let allowed = judge(&mut harness, "d");
    assert_eq!((allowed.reply.clone(), allowed.events.len()), (judged(ToolCallVerdict::Allowed), 0));
}
