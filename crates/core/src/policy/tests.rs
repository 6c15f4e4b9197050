//! The promises of the policy, by subject: how lines are split, what is judged how, what counts as risky, and what
//! holds for every input. They speak to the public face wherever that is enough.

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

/// A call in a workspace that is not known.
fn proposed_call<'a>(tool: &'a str, input: &'a Value, risk: Risk) -> ProposedToolCall<'a> {
    ProposedToolCall { tool, input, risk, workspace: None }
}

/// What becomes of a call of medium risk without a grant.
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
