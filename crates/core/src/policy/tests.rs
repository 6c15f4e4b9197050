//! Tests of the policy by subject: how lines are split, how calls are judged, which risk they have, and properties
//! that hold for every input. They use the public interface where that is enough.

mod corpus;
mod judgements;
mod lines;
mod properties;
mod risks;
mod workspace;

use qd_protocol::policy::{Policy, PolicyRule, PolicyVerdict, Risk};
use serde_json::{Value, json};

use super::{PolicyJudgement, ProposedToolCall, judge};

fn rule(tool: &str, pattern: Option<&str>, decision: PolicyVerdict) -> PolicyRule {
    PolicyRule { tool: tool.to_owned(), pattern: pattern.map(str::to_owned), decision, risk: None }
}

fn rules(list: &[(&str, &str, PolicyVerdict)]) -> Policy {
    Policy::Rules(list.iter().map(|(tool, pattern, decision)| rule(tool, Some(pattern), *decision)).collect())
}

fn command_input(command: &str) -> Value {
    json!({ "command": command })
}

/// A call in an unknown workspace.
fn proposed_call<'a>(tool: &'a str, input: &'a Value, risk: Risk) -> ProposedToolCall<'a> {
    ProposedToolCall { tool, input, risk, workspace: None }
}

/// The verdict on a call of medium risk without a grant.
fn verdict_on(policy: &Policy, tool: &str, input: &Value) -> PolicyVerdict {
    verdict_of(&judge(policy, false, &proposed_call(tool, input, Risk::Medium)))
}

fn verdict_of(judgement: &PolicyJudgement) -> PolicyVerdict {
    match judgement {
        PolicyJudgement::Allow { .. } | PolicyJudgement::Granted => PolicyVerdict::Allow,
        PolicyJudgement::Deny { .. } => PolicyVerdict::Deny,
        PolicyJudgement::Ask => PolicyVerdict::Ask,
    }
}
