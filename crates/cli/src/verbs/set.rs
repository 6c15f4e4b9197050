//! `qd set`: changes a session's title, model, mode, policy, confinement or limits.

use qd_protocol::api::{Session, SessionPatch};

use super::{VerbContext, prompt};
use crate::args::{SetArgs, parse_network, parse_sandbox};
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs;

const KEYS: &str =
    "title, model, mode, policy, sandbox, network, budget, max_turns, timeout, grace, max_journal_mb";

/// Applies all changes in one request, so either all of them apply or none.
pub(crate) async fn set(context: &VerbContext, flags: &SetArgs) -> Result<CliExitCode> {
    let patch = parse_changes(&flags.changes)?;
    let client = context.client().await?;
    let session = refs::resolve_session(&client, &flags.id).await?;
    let session: Session = client.patch(&session.path(), &patch).await?;
    if context.out.json {
        context.out.print_json(&session)?;
    } else {
        context.out.print_line(&format!("{} changed", session.id))?;
    }
    Ok(CliExitCode::Success)
}

fn parse_changes(changes: &[String]) -> Result<SessionPatch> {
    let mut patch = SessionPatch::default();
    for change in changes {
        let usage = |hint: &str| CliFailure::Usage(format!("{change}: {hint}"));
        let Some((key, value)) = change.split_once('=') else {
            return Err(usage(&format!("expected KEY=VALUE with a key of {KEYS}")));
        };
        match key {
            "title" => patch.title = Some(value.to_owned()),
            "model" => patch.model = Some(value.to_owned()),
            "mode" => patch.mode = Some(value.to_owned()),
            "policy" => patch.policy = Some(prompt::read_policy(value)?),
            "sandbox" => patch.sandbox = Some(parse_sandbox(value).map_err(usage)?),
            "network" => patch.network = Some(parse_network(value).map_err(usage)?),
            "budget" => patch.budget_usd = Some(parse_limit(value.trim_start_matches('$')).map_err(usage)?),
            "max_turns" => patch.max_turns = Some(parse_limit(value).map_err(usage)?),
            "timeout" => patch.run_timeout_s = Some(parse_limit(value).map_err(usage)?),
            "max_journal_mb" => patch.max_journal_mb = Some(parse_limit(value).map_err(usage)?),
            "grace" => patch.cancel_grace_s = Some(parse_limit(value).map_err(usage)?),
            _ => return Err(usage(&format!("there is no key {key}; the keys are {KEYS}"))),
        }
    }
    Ok(patch)
}

/// A number, or `none` to remove the limit.
fn parse_limit<T: std::str::FromStr>(value: &str) -> Result<Option<T>, &'static str> {
    match value {
        "none" => Ok(None),
        _ => value.parse().map(Some).map_err(|_| "expected a number, or `none` to remove the limit"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(changes: &[&str]) -> Result<SessionPatch> {
        parse_changes(&changes.iter().map(|&change| change.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn changes_become_one_patch() {
        let changes = [
            "title=a=b",
            "mode=plan",
            "budget=$5",
            "max_turns=none",
            "policy=allow",
            "sandbox=deck",
            "network=off",
        ];
        let patch = parse(&changes).unwrap();
        assert_eq!(
            serde_json::to_value(patch).unwrap(),
            serde_json::json!({
                "title": "a=b", "mode": "plan", "budget_usd": 5.0, "max_turns": null, "policy": "allow",
                "sandbox": "deck", "network": "off"
            })
        );
    }

    #[test]
    fn a_wrong_change_says_what_is_possible() {
        for (change, hint) in [
            ("budget", "KEY=VALUE"),
            ("bugdet=5", "the keys are title"),
            ("budget=five", "`none`"),
            ("policy=no", "policy"),
            ("sandbox=high", "auto, off, deck or workspace"),
            ("network=none", "on or off"),
        ] {
            let failure = parse(&[change]).unwrap_err();
            assert_eq!(failure.exit_code(), CliExitCode::Usage);
            assert!(failure.to_string().contains(hint), "{failure}");
        }
    }
}
