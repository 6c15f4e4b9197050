//! `qd policy test`: shows what would change if a policy had been in effect for past asks.

use std::path::Path;

use qd_protocol::WorkspaceId;
use qd_protocol::api::{ReferenceKind, Workspace};
use qd_protocol::event::ResolvedBy;
use qd_protocol::policy::PolicyVerdict;
use qd_protocol::policy_trial::{
    DecisionChange, PastDecision, PolicyTestReport, PolicyTestRequest, PolicyTrial, TrialDecision,
};

use super::{VerbContext, prompt};
use crate::args::PolicyVerb;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs;
use crate::render::session_cells::ShownIds;
use crate::render::table::TextTable;
use crate::render::{ask, text};

/// How much of an argument one line shows.
const PREVIEW_CHARS: usize = 100;

pub(crate) async fn policy(context: &VerbContext, verb: PolicyVerb) -> Result<CliExitCode> {
    let PolicyVerb::Test { policy, session, workspace, limit } = verb;
    let policy = prompt::read_policy(&policy)?;
    let client = context.client().await?;
    let session_id = match &session {
        Some(text) => Some(refs::resolve_session(&client, text).await?.id),
        None => None,
    };
    let workspace_id = match &workspace {
        Some(dir) => Some(workspace_at(&client, dir).await?),
        None => None,
    };
    let request =
        PolicyTestRequest { policy, session_id, workspace_id, limit: limit.map(|limit| limit as usize) };
    let report: PolicyTestReport =
        client.post("/v1/policy/test", &request).await.map_err(as_usage_failure)?;
    if context.out.json {
        context.out.print_json(&report)?;
        return Ok(CliExitCode::Success);
    }
    let changed = || report.trials.iter().filter(|trial| trial.change != DecisionChange::AsBefore);
    if changed().next().is_some() {
        let width = context.out.width();
        let asks = changed().map(|trial| trial.ask_id.to_string()).collect();
        let sessions = changed().map(|trial| trial.session_id.to_string()).collect();
        let asks = refs::shown_ids(&context.out, &client, &[ReferenceKind::Ask], asks).await?;
        let sessions = refs::shown_ids(&context.out, &client, &refs::WATCHED_KINDS, sessions).await?;
        let table = table(changed(), &asks.and(sessions));
        context.out.print_data(&table.render(context.out.out_style(), width))?;
    }
    context.out.print_line(&summarize_report(&report))?;
    Ok(CliExitCode::Success)
}

/// The existing workspace of a directory. Unlike `qd run`, this never creates one.
async fn workspace_at(client: &DaemonClient, dir: &Path) -> Result<WorkspaceId> {
    let path = dir
        .canonicalize()
        .map_err(|error| CliFailure::Usage(format!("{} is not a directory: {error}", dir.display())))?;
    let known: Vec<Workspace> = client.list("/v1/workspaces").await?;
    let found = known.into_iter().find(|workspace| Path::new(&workspace.path) == path);
    found.map(|workspace| workspace.id).ok_or_else(|| {
        CliFailure::NotFound(format!("no session has run in {}; see `qd ps -a`", path.display()))
    })
}

/// Turns the daemon's rejection of a policy into a usage error, because the policy came from the command line.
fn as_usage_failure(failure: CliFailure) -> CliFailure {
    match failure.code() {
        Some("invalid_value" | "invalid_request") => CliFailure::Usage(failure.to_string()),
        _ => failure,
    }
}

fn table<'t>(trials: impl Iterator<Item = &'t PolicyTrial>, ids: &ShownIds) -> TextTable {
    let mut table = TextTable::new(&["ASK", "SESSION", "RISK", "THEN", "NOW", "WANTS"]);
    [1, 2, 3, 4].into_iter().for_each(|column| table.set_min_width(column, usize::MAX));
    for trial in trials {
        let tool = text::first_line(&trial.tool, PREVIEW_CHARS);
        table.add_row([
            ids.shown(&trial.ask_id),
            ids.shown(&trial.session_id),
            ask::risk_name(trial.risk).to_owned(),
            describe_past_decision(&trial.then),
            describe_new_decision(&trial.now),
            match &trial.argument {
                Some(argument) => format!("{tool}: {}", text::first_line(argument, PREVIEW_CHARS)),
                None => tool,
            },
        ]);
    }
    table
}

fn describe_past_decision(then: &PastDecision) -> String {
    let verdict = match then.decision {
        Some(qd_protocol::event::PermissionDecision::Deny) => "denied",
        Some(_) => "allowed",
        None => "",
    };
    match then.by {
        Some(ResolvedBy::User) => format!("asked, {verdict}"),
        Some(ResolvedBy::Policy) if then.granted => "allowed always".to_owned(),
        Some(ResolvedBy::Policy) if then.rule.is_some() => format!("{verdict} by rule"),
        Some(ResolvedBy::Policy) => format!("{verdict} by policy"),
        Some(ResolvedBy::Cancel | ResolvedBy::Agent | ResolvedBy::End) => "asked, withdrawn".to_owned(),
        None => "asked".to_owned(),
    }
}

fn describe_new_decision(now: &TrialDecision) -> String {
    let decision = match now.decision {
        PolicyVerdict::Allow => "allowed",
        PolicyVerdict::Deny => "denied",
        PolicyVerdict::Ask => "asked",
    };
    match now.rule {
        Some(rule) => format!("{decision} by rule {rule}"),
        None => decision.to_owned(),
    }
}

/// The counts on one line. Zero counts are left out, except for "as before".
fn summarize_report(report: &PolicyTestReport) -> String {
    let mut line = match report.asks {
        1 => "1 ask".to_owned(),
        asks => format!("{asks} asks"),
    };
    line.push_str(&format!(": {} as before", report.as_before));
    for (count, change) in [
        (report.no_longer_asked, "no longer asked"),
        (report.now_allowed, "now allowed"),
        (report.now_asked, "now asked"),
        (report.now_denied, "now denied"),
    ] {
        if count > 0 {
            line.push_str(&format!(", {count} {change}"));
        }
    }
    match report.against_people {
        0 => {}
        1 => line.push_str("; 1 contradicts what a person decided"),
        several => line.push_str(&format!("; {several} contradict what a person decided")),
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;
    use qd_protocol::error::ErrorDoc;

    #[test]
    fn a_summary_names_changes_and_contradicted_people() {
        let report = PolicyTestReport {
            asks: 128,
            as_before: 90,
            no_longer_asked: 31,
            now_denied: 7,
            ..PolicyTestReport::default()
        };
        assert_eq!(summarize_report(&report), "128 asks: 90 as before, 31 no longer asked, 7 now denied");
        let one = PolicyTestReport {
            asks: 1,
            no_longer_asked: 1,
            against_people: 1,
            ..PolicyTestReport::default()
        };
        let text = "1 ask: 0 as before, 1 no longer asked; 1 contradicts what a person decided";
        assert_eq!(summarize_report(&one), text);
        assert_eq!(summarize_report(&PolicyTestReport::default()), "0 asks: 0 as before");
    }

    #[test]
    fn a_policy_that_the_daemon_refuses_is_wrong_usage() {
        let refused = |status, code: &str| {
            let error = ErrorDoc {
                code: code.to_owned(),
                message: "Rule 2 is bad.".to_owned(),
                details: serde_json::Map::new(),
            };
            as_usage_failure(CliFailure::Refused(Box::new(crate::failure::DaemonRefusal { status, error })))
        };
        assert_eq!(refused(400, "invalid_value").exit_code(), CliExitCode::Usage);
        assert_eq!(refused(400, "invalid_value").to_string(), "Rule 2 is bad.");
        assert_eq!(refused(404, "not_found").exit_code(), CliExitCode::NotFound);
    }

    #[test]
    fn what_a_policy_would_change_reads_well() {
        let trial = |ask: &str, decision: &str, now: &str, argument: &str| -> PolicyTrial {
            serde_json::from_value(serde_json::json!({
                "ask_id": ask, "session_id": "ses_ar477mby3tane7hf", "tool": "Bash", "argument": argument,
                "risk": "medium", "opened_at": qd_protocol::Millis(0), "change": "no_longer_asked",
                "against_person": false,
                "then": { "state": "answered", "decision": decision, "by": "user" },
                "now": { "decision": now, "rule": 2 },
            }))
            .unwrap()
        };
        let trials = [
            trial("ask_0k2v7m4q8s1x5z9b", "allow_once", "allow", "cargo test --workspace --all-features"),
            trial("ask_f6vh2k1m9d4vq8s7", "deny", "ask", "rm -rf build"),
        ];
        let ids = ShownIds::from_pairs(&[
            ("ask_0k2v7m4q8s1x5z9b", "0k2v7"),
            ("ask_f6vh2k1m9d4vq8s7", "f6vh"),
            ("ses_ar477mby3tane7hf", "ar47"),
        ]);
        assert_view("policy_test", |style, width| table(trials.iter(), &ids).render(style, width));
    }
}
