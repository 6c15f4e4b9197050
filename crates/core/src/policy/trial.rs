//! A policy tried on an ask of the past. The risk is that which was recorded, with the agent's own word in it; a tool
//! that a person had allowed for the session counts as allowed where that was what decided.

use qd_protocol::event::{AskKind, Decision, ResolvedBy};
use qd_protocol::policy::{Policy, Rule, Verdict};
use qd_protocol::trial::{Change, Now, Then, Trial};

use super::{Judgement, Question, judge, main_argument};
use crate::rows::AskDoc;

/// Bytes of an argument that are shown.
const ARGUMENT_MAX: usize = 1024;

/// What a policy would make of an ask; none if it is a question, of which policies say nothing. `workspace` is the
/// directory of the session's agent, if it is known.
pub fn try_again(policy: &Policy, doc: &AskDoc, workspace: Option<&str>) -> Option<Trial> {
    let ask = &doc.ask;
    let tool = ask.tool.as_ref().filter(|_| ask.kind == AskKind::Permission)?;
    let question = Question { tool, input: &ask.input, risk: ask.risk, workspace };
    let now = now(policy, judge(policy, doc.granted, &question));
    let decision = ask.answer.as_ref().and_then(|answer| answer.decision);
    let then = Then { state: ask.state, decision, by: doc.by, rule: doc.rule.clone(), granted: doc.granted };
    let argument =
        main_argument(tool, &ask.input).map(|text| text[..text.floor_char_boundary(ARGUMENT_MAX)].to_owned());
    Some(Trial {
        ask_id: ask.id.clone(),
        session_id: ask.session_id.clone()?,
        tool: tool.clone(),
        argument,
        risk: ask.risk,
        opened_at: ask.opened_at,
        change: change(&then, now.decision),
        against_person: is_against_person(&then, now.decision),
        then,
        now,
    })
}

fn now(policy: &Policy, judgement: Judgement) -> Now {
    let (decision, rule) = match judgement {
        Judgement::Allow { rule } => (Verdict::Allow, rule),
        Judgement::Granted => (Verdict::Allow, None),
        Judgement::Deny { rule, .. } => (Verdict::Deny, rule),
        Judgement::Ask => (Verdict::Ask, None),
    };
    Now { decision, rule: rule.and_then(|rule| number(policy, &rule)) }
}

/// A rule's place in its policy. Of two that are the same the first is the one that decides.
fn number(policy: &Policy, rule: &Rule) -> Option<u32> {
    let Policy::Rules(rules) = policy else { return None };
    (1..).zip(rules).find(|(_, one)| *one == rule).map(|(number, _)| number)
}

fn change(then: &Then, now: Verdict) -> Change {
    let by_policy = then.by == Some(ResolvedBy::Policy);
    let denied = then.decision == Some(Decision::Deny);
    match (by_policy, now) {
        (true, Verdict::Allow) if denied => Change::NowAllowed,
        (true, Verdict::Allow) | (false, Verdict::Ask) => Change::AsBefore,
        (true, Verdict::Deny) if denied => Change::AsBefore,
        (_, Verdict::Deny) => Change::NowDenied,
        (true, Verdict::Ask) => Change::NowAsked,
        (false, Verdict::Allow) => Change::NoLongerAsked,
    }
}

fn is_against_person(then: &Then, now: Verdict) -> bool {
    let allowed = matches!(then.decision, Some(Decision::AllowOnce | Decision::AllowAlways));
    match then.by {
        Some(ResolvedBy::User) if allowed => now == Verdict::Deny,
        Some(ResolvedBy::User) => now == Verdict::Allow && then.decision == Some(Decision::Deny),
        _ => then.granted && now == Verdict::Deny,
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::event::{Answer, Ask, AskState};
    use qd_protocol::policy::Risk;
    use qd_protocol::{AskId, Millis, RunId, SessionId};
    use serde_json::{Value, json};

    use super::*;

    fn doc(by: Option<ResolvedBy>, decision: Option<Decision>) -> AskDoc {
        let state = match (by, decision) {
            (None, _) => AskState::Pending,
            (_, Some(_)) => AskState::Answered,
            (_, None) => AskState::Withdrawn,
        };
        let ask = Ask {
            id: AskId::parse("ask_1").unwrap(),
            session_id: Some(SessionId::parse("ses_1").unwrap()),
            run_id: Some(RunId::parse("run_1").unwrap()),
            fleet_id: None,
            kind: AskKind::Permission,
            tool: Some("Bash".to_owned()),
            input: json!({"command": "make"}),
            risk: Risk::Medium,
            prompt: String::new(),
            options: Vec::new(),
            by_call: false,
            opened_at: Millis(0),
            state,
            answer: decision.map(|decision| Answer { decision: Some(decision), ..Answer::default() }),
        };
        AskDoc { ask, by, rule: None, granted: false }
    }

    fn policy(rules: Value) -> Policy {
        serde_json::from_value(rules).unwrap()
    }

    #[test]
    fn every_way_from_then_to_now_has_its_name() {
        use Change::{AsBefore, NoLongerAsked, NowAllowed, NowAsked, NowDenied};
        let (user, by_policy) = (Some(ResolvedBy::User), Some(ResolvedBy::Policy));
        let (allow, deny) = (Some(Decision::AllowOnce), Some(Decision::Deny));
        for (by, decision, under_allow, under_ask, under_deny) in [
            (user, allow, (NoLongerAsked, false), (AsBefore, false), (NowDenied, true)),
            (user, deny, (NoLongerAsked, true), (AsBefore, false), (NowDenied, false)),
            (by_policy, allow, (AsBefore, false), (NowAsked, false), (NowDenied, false)),
            (by_policy, deny, (NowAllowed, false), (NowAsked, false), (AsBefore, false)),
            (Some(ResolvedBy::Cancel), None, (NoLongerAsked, false), (AsBefore, false), (NowDenied, false)),
            (None, None, (NoLongerAsked, false), (AsBefore, false), (NowDenied, false)),
        ] {
            let tried = |word: &str| {
                let trial = try_again(&policy(json!(word)), &doc(by, decision), None).unwrap();
                assert_eq!(trial.now.rule, None);
                (trial.change, trial.against_person)
            };
            let found = (tried("allow"), tried("ask"), tried("deny"));
            assert_eq!(found, (under_allow, under_ask, under_deny), "{by:?} {decision:?}");
        }
    }

    #[test]
    fn the_rule_is_named_by_its_number() {
        let rules = policy(json!([
            {"tool": "Read", "decision": "allow"},
            {"tool": "Bash", "match": "make*", "decision": "allow"},
            {"tool": "Bash", "match": "make*", "decision": "allow"},
        ]));
        let trial = try_again(&rules, &doc(None, None), None).unwrap();
        assert_eq!((trial.now.decision, trial.now.rule), (Verdict::Allow, Some(2)));
        assert_eq!(trial.argument.as_deref(), Some("make"));
    }

    #[test]
    fn what_a_person_has_allowed_for_the_session_stays_allowed_and_yields_to_a_deny_rule() {
        let granted = AskDoc { granted: true, ..doc(Some(ResolvedBy::Policy), Some(Decision::AllowOnce)) };
        assert_eq!(try_again(&policy(json!("ask")), &granted, None).unwrap().change, Change::AsBefore);
        let deny = policy(json!([{"tool": "Bash", "decision": "deny"}]));
        let trial = try_again(&deny, &granted, None).unwrap();
        assert_eq!((trial.change, trial.against_person), (Change::NowDenied, true));
    }

    #[test]
    fn a_question_is_not_tried() {
        let mut question = doc(None, None);
        question.ask.kind = AskKind::Question;
        assert_eq!(try_again(&policy(json!("allow")), &question, None), None);
    }
}
