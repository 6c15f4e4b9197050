//! The promises of the policy, by subject: how lines are split, what is judged how, what counts as risky, and what
//! holds for every input. They speak to the public face wherever that is enough.

mod corpus;
mod judgements;
mod lines;
mod properties;
mod risks;
mod workspace;

use qd_protocol::policy::{Policy, Risk, Rule, Verdict};
use serde_json::{Value, json};

use super::{Judgement, Question, judge};

fn rule(tool: &str, pattern: Option<&str>, decision: Verdict) -> Rule {
    Rule { tool: tool.to_owned(), pattern: pattern.map(str::to_owned), decision, risk: None }
}

fn rules(list: &[(&str, &str, Verdict)]) -> Policy {
    Policy::Rules(list.iter().map(|(tool, pattern, decision)| rule(tool, Some(pattern), *decision)).collect())
}

fn line(command: &str) -> Value {
    json!({ "command": command })
}

/// A call in a workspace that is not known.
fn question<'a>(tool: &'a str, input: &'a Value, risk: Risk) -> Question<'a> {
    Question { tool, input, risk, workspace: None }
}

/// What becomes of a call of medium risk without a grant.
fn outcome(policy: &Policy, tool: &str, input: &Value) -> Verdict {
    verdict(&judge(policy, false, &question(tool, input, Risk::Medium)))
}

fn verdict(judgement: &Judgement) -> Verdict {
    match judgement {
        Judgement::Allow { .. } | Judgement::Granted => Verdict::Allow,
        Judgement::Deny { .. } => Verdict::Deny,
        Judgement::Ask => Verdict::Ask,
    }
}
