//! `qd cost`: tokens and cost by agent, model, session, workspace or day.

use qd_protocol::usage_report::UsageReport;

use super::VerbContext;
use super::search::describe_incomplete;
use crate::args::CostArgs;
use crate::client::percent_encode;
use crate::failure::{CliExitCode, Result};
use crate::past_time::local_zone;
use crate::render::usage::render_usage;

pub(crate) async fn cost(context: &VerbContext, args: CostArgs) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut path = format!("/v1/usage?by={}&zone={}", args.by.as_str(), percent_encode(&local_zone()));
    if let Some(since) = args.since {
        path.push_str(&format!("&since={}", percent_encode(&since.to_string())));
    }
    let report: UsageReport = client.get(&path).await?;
    if context.out.json {
        context.out.print_json(&report)?;
        return Ok(CliExitCode::Success);
    }
    context.out.print_data(&render_usage(&report, context.out.out_style(), context.out.width()))?;
    if let Some(note) = describe_missing_costs(&report) {
        context.out.print_note(&note);
    }
    if !report.complete {
        context.out.print_note(&describe_incomplete(report.index));
    }
    Ok(CliExitCode::Success)
}

/// Says how much of the usage has no known cost.
fn describe_missing_costs(report: &UsageReport) -> Option<String> {
    let (missing, runs) = (report.total.runs_without_cost, report.total.runs);
    (missing > 0).then(|| {
        format!(
            "{missing} of {runs} runs reported tokens but no cost; with `prices` in config.toml, later runs get one"
        )
    })
}

#[cfg(test)]
mod tests {
    use qd_protocol::usage_report::UsageSum;

    use super::*;

    #[test]
    fn runs_without_a_cost_are_mentioned() {
        let report = |runs_without_cost| UsageReport {
            total: UsageSum { runs: 7, runs_without_cost, ..UsageSum::default() },
            ..UsageReport::default()
        };
        assert_eq!(describe_missing_costs(&report(0)), None);
        assert!(describe_missing_costs(&report(2)).unwrap().starts_with("2 of 7 runs reported"));
    }
}
