//! The flags of verbs that look back: `status`, `logs`, `search` and `cost`.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use qd_protocol::Millis;
use qd_protocol::limits::PAGE_MAX;
use qd_protocol::usage_report::UsageGrouping;

use crate::past_time::parse_since;

/// `qd status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Show what finished from this time on, instead of since your last look: 30m, 8h, 2d, today or 2026-11-01T18:00
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    pub(crate) since: Option<Millis>,
}

/// `qd logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Keep printing as new events arrive
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Print only the last lines, or with --json the last events
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) tail: Option<usize>,
    /// Print only from this time on: 10m, 24h, 7d, today, yesterday, 2026-11-01 or 2026-11-01T18:00
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    pub(crate) since: Option<Millis>,
    /// Session id, session title, run id or fleet id
    pub(crate) id: String,
}

/// `qd search`.
#[derive(Debug, Args)]
pub(crate) struct SearchArgs {
    /// Words, all of which must be in the text; `pars*` for all words that begin so
    #[arg(required_unless_present = "rebuild")]
    pub(crate) words: Vec<String>,
    /// Only sessions of this agent
    #[arg(long, value_name = "AGENT")]
    pub(crate) agent: Option<String>,
    /// Only text from this time on: 24h, 7d, today, yesterday, 2026-11-01 or 2026-11-01T18:00
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    pub(crate) since: Option<Millis>,
    /// Show at most this many hits, up to 1000
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = hit_limit)]
    pub(crate) limit: usize,
    /// Continue with older hits, as the end of the last page says
    #[arg(long, value_name = "POSITION")]
    pub(crate) before: Option<String>,
    /// Build the index again from the journal, without searching; the daemon does so by itself if it is damaged
    #[arg(long, conflicts_with_all = ["words", "agent", "since", "before"])]
    pub(crate) rebuild: bool,
}

/// `qd cost`.
#[derive(Debug, Args)]
pub(crate) struct CostArgs {
    /// Count only from this time on: 24h, 7d, today, yesterday, 2026-11-01 or 2026-11-01T18:00
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    pub(crate) since: Option<Millis>,
    /// What a row stands for
    #[arg(long, value_name = "WHAT", default_value = "agent", value_parser = usage_grouping())]
    pub(crate) by: UsageGrouping,
}

/// Parses the number of hits on one page.
pub(super) fn hit_limit(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(limit) if (1..=PAGE_MAX).contains(&limit) => Ok(limit),
        _ => Err(format!("expected a number from 1 to {PAGE_MAX}")),
    }
}

/// Parses what the rows of a usage report stand for.
fn usage_grouping() -> impl TypedValueParser<Value = UsageGrouping> {
    let names = UsageGrouping::ALL.map(UsageGrouping::as_str);
    PossibleValuesParser::new(names).map(|name| {
        let grouping = UsageGrouping::ALL.into_iter().find(|grouping| grouping.as_str() == name);
        grouping.unwrap_or_default()
    })
}
