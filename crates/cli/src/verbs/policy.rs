//! `qd policy test`: what would change if a policy had been there when agents asked.

use std::path::Path;

use qd_protocol::WorkspaceId;
use qd_protocol::api::Workspace;
use qd_protocol::event::ResolvedBy;
use qd_protocol::policy::Verdict;
use qd_protocol::trial::{Change, Now, PolicyReport, PolicyTest, Then, Trial};

use super::{Context, prompt};
use crate::args::PolicyVerb;
use crate::client::Client;
use crate::failure::{Exit, Failure, Result};
use crate::refs;
use crate::render::table::Table;
use crate::render::{ask, text};

/// How much of an argument a line shows.
const HEAD: usize = 100;

/// Tries a policy.
pub(crate) async fn policy(context: &Context, verb: PolicyVerb) -> Result<Exit> {
    let PolicyVerb::Test { policy, session, workspace, limit } = verb;
    let policy = prompt::policy(&policy)?;
    let client = context.client().await?;
    let session_id = match &session {
        Some(text) => Some(refs::session(&client, text).await?.id),
        None => None,
    };
    let workspace_id = match &workspace {
        Some(dir) => Some(workspace_at(&client, dir).await?),
        None => None,
    };
    let request = PolicyTest { policy, session_id, workspace_id, limit: limit.map(|limit| limit as usize) };
    let report: PolicyReport = client.post("/v1/policy/test", &request).await.map_err(unusable)?;
    if context.out.json {
        context.out.value(&report)?;
        return Ok(Exit::Well);
    }
    let changed = || report.trials.iter().filter(|trial| trial.change != Change::AsBefore);
    if changed().next().is_some() {
        context.out.data(&table(changed()).render(context.out.out_style(), context.out.width()))?;
    }
    context.out.line(&summary(&report))?;
    Ok(Exit::Well)
}

/// The workspace of a directory. It is not made one by being asked about.
async fn workspace_at(client: &Client, dir: &Path) -> Result<WorkspaceId> {
    let path = dir
        .canonicalize()
        .map_err(|error| Failure::Usage(format!("{} is no directory: {error}", dir.display())))?;
    let known: Vec<Workspace> = client.list("/v1/workspaces").await?;
    let found = known.into_iter().find(|workspace| Path::new(&workspace.path) == path);
    found.map(|workspace| workspace.id).ok_or_else(|| {
        Failure::NotFound(format!(
            "nothing was ever run in {}; `qd ps -a` lists what there is",
            path.display()
        ))
    })
}

/// A policy that the daemon cannot use was given on the command line, so this is wrong usage.
fn unusable(failure: Failure) -> Failure {
    match failure.code() {
        Some("invalid_value" | "invalid_request") => Failure::Usage(failure.to_string()),
        _ => failure,
    }
}

fn table<'t>(trials: impl Iterator<Item = &'t Trial>) -> Table {
    let mut table = Table::new(&["ASK", "SESSION", "RISK", "THEN", "NOW", "WANTS"]);
    for trial in trials {
        let tool = text::head(&trial.tool, HEAD);
        table.row([
            trial.ask_id.to_string(),
            trial.session_id.to_string(),
            ask::risk(trial.risk).to_owned(),
            then(&trial.then),
            now(&trial.now),
            match &trial.argument {
                Some(argument) => format!("{tool}: {}", text::head(argument, HEAD)),
                None => tool,
            },
        ]);
    }
    table
}

fn then(then: &Then) -> String {
    let verdict = match then.decision {
        Some(qd_protocol::event::Decision::Deny) => "denied",
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

fn now(now: &Now) -> String {
    let word = match now.decision {
        Verdict::Allow => "allowed",
        Verdict::Deny => "denied",
        Verdict::Ask => "asked",
    };
    match now.rule {
        Some(rule) => format!("{word} by rule {rule}"),
        None => word.to_owned(),
    }
}

/// The numbers in one line; what did not happen is not named, but for what stays.
fn summary(report: &PolicyReport) -> String {
    let mut line = match report.asks {
        1 => "1 ask".to_owned(),
        asks => format!("{asks} asks"),
    };
    line.push_str(&format!(": {} as before", report.as_before));
    for (count, what) in [
        (report.no_longer_asked, "no longer asked"),
        (report.now_allowed, "now allowed"),
        (report.now_asked, "now asked"),
        (report.now_denied, "now denied"),
    ] {
        if count > 0 {
            line.push_str(&format!(", {count} {what}"));
        }
    }
    match report.against_people {
        0 => {}
        1 => line.push_str("; 1 goes against what a person decided"),
        several => line.push_str(&format!("; {several} go against what a person decided")),
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::error::ErrorDoc;

    #[test]
    fn a_summary_names_what_changed_and_what_goes_against_people() {
        let report = PolicyReport {
            asks: 128,
            as_before: 90,
            no_longer_asked: 31,
            now_denied: 7,
            ..PolicyReport::default()
        };
        assert_eq!(summary(&report), "128 asks: 90 as before, 31 no longer asked, 7 now denied");
        let one = PolicyReport { asks: 1, no_longer_asked: 1, against_people: 1, ..PolicyReport::default() };
        let text = "1 ask: 0 as before, 1 no longer asked; 1 goes against what a person decided";
        assert_eq!(summary(&one), text);
        assert_eq!(summary(&PolicyReport::default()), "0 asks: 0 as before");
    }

    #[test]
    fn a_policy_that_the_daemon_refuses_is_wrong_usage() {
        let refused = |status, code: &str| {
            let error = ErrorDoc {
                code: code.to_owned(),
                message: "Rule 2 is bad.".to_owned(),
                details: serde_json::Map::new(),
            };
            unusable(Failure::Refused(Box::new(crate::failure::Refusal { status, error })))
        };
        assert_eq!(refused(400, "invalid_value").exit(), Exit::Usage);
        assert_eq!(refused(400, "invalid_value").to_string(), "Rule 2 is bad.");
        assert_eq!(refused(404, "not_found").exit(), Exit::NotFound);
    }
}
