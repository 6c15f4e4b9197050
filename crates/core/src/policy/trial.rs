//! Tries a policy on a past ask. The risk is the recorded one, which includes the agent's claim. If the ask was
//! allowed by a session grant, the grant still counts.

use qd_protocol::event::{AskKind, PermissionDecision, ResolvedBy};
use qd_protocol::policy::{Policy, PolicyRule, PolicyVerdict};
use qd_protocol::policy_trial::{DecisionChange, PastDecision, PolicyTrial, TrialDecision};

use super::{PolicyJudgement, ProposedToolCall, judge, main_argument};
use crate::rows::AskDoc;

/// How many bytes of an argument are shown.
const ARGUMENT_MAX: usize = 1024;

/// How a policy would decide a past ask. `None` for questions, which policies do not decide. `workspace` is the
/// directory of the session's agent, if known.
pub fn run_trial(policy: &Policy, doc: &AskDoc, workspace: Option<&str>) -> Option<PolicyTrial> {
    let ask = &doc.ask;
    let tool = ask.tool.as_ref().filter(|_| ask.kind == AskKind::Permission)?;
    let call = ProposedToolCall { tool, input: &ask.input, risk: ask.risk, workspace };
    let now = current_outcome(policy, judge(policy, doc.granted, &call));
    let decision = ask.answer.as_ref().and_then(|answer| answer.decision);
    let then =
        PastDecision { state: ask.state, decision, by: doc.by, rule: doc.rule.clone(), granted: doc.granted };
    let argument =
        main_argument(tool, &ask.input).map(|text| text[..text.floor_char_boundary(ARGUMENT_MAX)].to_owned());
    Some(PolicyTrial {
        ask_id: ask.id.clone(),
        session_id: ask.session_id.clone()?,
        tool: tool.clone(),
        argument,
        risk: ask.risk,
        opened_at: ask.opened_at,
        change: classify_change(&then, now.decision),
        against_person: is_against_person(&then, now.decision),
        then,
        now,
    })
}

fn current_outcome(policy: &Policy, judgement: PolicyJudgement) -> TrialDecision {
    let (decision, rule) = match judgement {
        PolicyJudgement::Allow { rule } => (PolicyVerdict::Allow, rule),
        PolicyJudgement::Granted => (PolicyVerdict::Allow, None),
        PolicyJudgement::Deny { rule, .. } => (PolicyVerdict::Deny, rule),
        PolicyJudgement::Ask => (PolicyVerdict::Ask, None),
    };
    TrialDecision { decision, rule: rule.and_then(|rule| rule_number(policy, &rule)) }
}

/// A rule's number in its policy, from 1. If two rules are equal, the first one decides.
fn rule_number(policy: &Policy, rule: &PolicyRule) -> Option<u32> {
    let Policy::Rules(rules) = policy else { return None };
    (1..).zip(rules).find(|(_, candidate)| *candidate == rule).map(|(number, _)| number)
}

fn classify_change(then: &PastDecision, now: PolicyVerdict) -> DecisionChange {
    let by_policy = then.by == Some(ResolvedBy::Policy);
    let denied = then.decision == Some(PermissionDecision::Deny);
    match (by_policy, now) {
        (true, PolicyVerdict::Allow) if denied => DecisionChange::NowAllowed,
        (true, PolicyVerdict::Allow) | (false, PolicyVerdict::Ask) => DecisionChange::AsBefore,
        (true, PolicyVerdict::Deny) if denied => DecisionChange::AsBefore,
        (_, PolicyVerdict::Deny) => DecisionChange::NowDenied,
        (true, PolicyVerdict::Ask) => DecisionChange::NowAsked,
        (false, PolicyVerdict::Allow) => DecisionChange::NoLongerAsked,
    }
}

fn is_against_person(then: &PastDecision, now: PolicyVerdict) -> bool {
    let allowed = then.decision.is_some_and(PermissionDecision::allows);
    match then.by {
        Some(ResolvedBy::User) if allowed => now == PolicyVerdict::Deny,
        Some(ResolvedBy::User) => {
            now == PolicyVerdict::Allow && then.decision == Some(PermissionDecision::Deny)
        }
        _ => then.granted && now == PolicyVerdict::Deny,
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::event::{Ask, AskAnswer, AskStatus};
    use qd_protocol::policy::Risk;
    use qd_protocol::{AskId, Millis, RunId, SessionId};
    use serde_json::{Value, json};

    use super::*;

    fn ask_doc(by: Option<ResolvedBy>, decision: Option<PermissionDecision>) -> AskDoc {
        let state = match (by, decision) {
            (None, _) => AskStatus::Pending,
            (_, Some(_)) => AskStatus::Answered,
            (_, None) => AskStatus::Withdrawn,
        };
        let ask = Ask {
            id: AskId::parse("ask_1").unwrap(),
            session_id: Some(SessionId::parse("ses_1").unwrap()),
            run_id: Some(RunId::parse("run_1").unwrap()),
            fleet_id: None,
            kind: AskKind::Permission,
            tool: Some("Bash".to_owned()),
            input: json!({"command": "make"}),
            input_sha256: None,
            risk: Risk::Medium,
            prompt: String::new(),
            options: Vec::new(),
            asked_by_tool: false,
            opened_at: Millis(0),
            state,
            answer: decision.map(|decision| AskAnswer { decision: Some(decision), ..AskAnswer::default() }),
        };
        AskDoc { ask, by, rule: None, granted: false, resolved_at: None }
    }

    fn policy(rules: Value) -> Policy {
        serde_json::from_value(rules).unwrap()
    }

    #[test]
    fn every_change_from_then_to_now_is_classified() {
        use DecisionChange::{AsBefore, NoLongerAsked, NowAllowed, NowAsked, NowDenied};
        let (user, by_policy) = (Some(ResolvedBy::User), Some(ResolvedBy::Policy));
        let (allow, deny) = (Some(PermissionDecision::AllowOnce), Some(PermissionDecision::Deny));
        for (by, decision, under_allow, under_ask, under_deny) in [
            (user, allow, (NoLongerAsked, false), (AsBefore, false), (NowDenied, true)),
            (user, deny, (NoLongerAsked, true), (AsBefore, false), (NowDenied, false)),
            (by_policy, allow, (AsBefore, false), (NowAsked, false), (NowDenied, false)),
            (by_policy, deny, (NowAllowed, false), (NowAsked, false), (AsBefore, false)),
            (Some(ResolvedBy::Cancel), None, (NoLongerAsked, false), (AsBefore, false), (NowDenied, false)),
            (None, None, (NoLongerAsked, false), (AsBefore, false), (NowDenied, false)),
        ] {
            let tried = |verdict: &str| {
                let trial = run_trial(&policy(json!(verdict)), &ask_doc(by, decision), None).unwrap();
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
        let trial = run_trial(&rules, &ask_doc(None, None), None).unwrap();
        assert_eq!((trial.now.decision, trial.now.rule), (PolicyVerdict::Allow, Some(2)));
        assert_eq!(trial.argument.as_deref(), Some("make"));
    }

    #[test]
    fn a_session_grant_still_allows_and_yields_to_a_deny_rule() {
        let granted = AskDoc {
            granted: true,
            ..ask_doc(Some(ResolvedBy::Policy), Some(PermissionDecision::AllowOnce))
        };
        assert_eq!(
            run_trial(&policy(json!("ask")), &granted, None).unwrap().change,
            DecisionChange::AsBefore
        );
        let deny = policy(json!([{"tool": "Bash", "decision": "deny"}]));
        let trial = run_trial(&deny, &granted, None).unwrap();
        assert_eq!((trial.change, trial.against_person), (DecisionChange::NowDenied, true));
    }

    #[test]
    fn a_question_is_not_tried() {
        let mut question = ask_doc(None, None);
        question.ask.kind = AskKind::Question;
        assert_eq!(run_trial(&policy(json!("allow")), &question, None), None);
    }
}
