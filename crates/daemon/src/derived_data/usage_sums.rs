//! Adds up reported usage by agent, model, session, workspace or day. Pure, apart from the system's time zones.

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;
use jiff::fmt::temporal::DateTimeParser;
use jiff::tz::TimeZone;
use qd_journal::derived::UsageEntry;
use qd_protocol::usage_report::{UsageGrouping, UsageReport, UsageRow, UsageSum};
use qd_protocol::{ApiError, Millis, TokenUsage};

use crate::invalid_value;

/// The time zone whose days a report has.
#[derive(Debug, Clone)]
pub(crate) struct UsageZone {
    name: String,
    zone: TimeZone,
}

impl UsageZone {
    /// A zone by its name (`Europe/Berlin`) or its offset (`+02:00`); UTC if none is given.
    pub(crate) fn parse(given: Option<&str>) -> Result<Self, ApiError> {
        const PARSER: DateTimeParser = DateTimeParser::new();
        let Some(name) = given else { return Ok(Self { name: "UTC".to_owned(), zone: TimeZone::UTC }) };
        match PARSER.parse_time_zone(name) {
            Ok(zone) => Ok(Self { name: name.to_owned(), zone }),
            Err(_) => Err(invalid_value(
                "`zone` must be a time zone that the daemon's machine knows, such as Europe/Berlin, or an offset such \
                 as +02:00",
            )),
        }
    }

    /// The day of a moment, as `YYYY-MM-DD`.
    fn day(&self, at: Millis) -> String {
        let time = i64::try_from(at.0).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
        self.zone.to_datetime(time.unwrap_or(Timestamp::MAX)).date().to_string()
    }
}

/// The usage of one row so far.
#[derive(Debug, Default)]
struct UsageGroup<'e> {
    label: Option<&'e str>,
    usage: TokenUsage,
    runs: HashSet<&'e (i64, Option<String>)>,
    runs_without_cost: HashSet<&'e (i64, Option<String>)>,
}

impl<'e> UsageGroup<'e> {
    fn add(&mut self, entry: &'e UsageEntry) {
        self.usage += entry.usage;
        self.runs.insert(&entry.run);
        if entry.lacks_cost {
            self.runs_without_cost.insert(&entry.run);
        }
    }

    fn sum(&self) -> UsageSum {
        let TokenUsage { input_tokens, output_tokens, cost_usd } = self.usage;
        let is_unknown = cost_usd <= 0.0 && !self.runs_without_cost.is_empty();
        UsageSum {
            input_tokens,
            output_tokens,
            cost_usd: (!is_unknown).then_some(cost_usd),
            runs: self.runs.len() as u64,
            runs_without_cost: self.runs_without_cost.len() as u64,
        }
    }
}

/// Adds up entries, which are in the order in which they were reported.
pub(crate) fn build_usage_report(by: UsageGrouping, zone: &UsageZone, entries: &[UsageEntry]) -> UsageReport {
    let mut groups: HashMap<Option<String>, UsageGroup<'_>> = HashMap::new();
    let mut total = UsageGroup::default();
    for entry in entries {
        let (key, label) = match by {
            UsageGrouping::Agent => (Some(entry.agent.clone()), None),
            UsageGrouping::Model => (entry.model.clone(), None),
            UsageGrouping::Session => (Some(entry.session_id.clone()), entry.title.as_deref()),
            UsageGrouping::Workspace => (entry.workspace_id.clone(), entry.workspace_path.as_deref()),
            UsageGrouping::Day => (Some(zone.day(entry.at)), None),
        };
        let group = groups.entry(key).or_default();
        group.label = label;
        group.add(entry);
        total.add(entry);
    }
    let mut rows: Vec<UsageRow> = groups
        .into_iter()
        .map(|(key, group)| UsageRow { key, label: group.label.map(str::to_owned), sum: group.sum() })
        .collect();
    rows.sort_by(|left, right| {
        let by_size = || {
            let cost = |row: &UsageRow| row.sum.cost_usd.unwrap_or_default();
            let tokens = |row: &UsageRow| row.sum.input_tokens.saturating_add(row.sum.output_tokens);
            cost(right).total_cmp(&cost(left)).then_with(|| tokens(right).cmp(&tokens(left)))
        };
        let order = if by == UsageGrouping::Day { std::cmp::Ordering::Equal } else { by_size() };
        order.then_with(|| left.key.cmp(&right.key))
    });
    UsageReport { by, zone: zone.name.clone(), rows, total: total.sum(), ..UsageReport::default() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(at: u64, session: i64, run: &str, tokens: u64, cost_usd: f64, lacks_cost: bool) -> UsageEntry {
        UsageEntry {
            at: Millis(at),
            usage: TokenUsage { input_tokens: tokens, output_tokens: 1, cost_usd },
            session_id: format!("ses_{session}"),
            title: Some(format!("title {session}")),
            agent: if session == 1 { "claude" } else { "codex" }.to_owned(),
            model: None,
            workspace_id: Some("ws_1".to_owned()),
            workspace_path: Some("/src".to_owned()),
            run: (session, Some(run.to_owned())),
            lacks_cost,
        }
    }

    fn report(by: UsageGrouping, zone: &str, entries: &[UsageEntry]) -> UsageReport {
        build_usage_report(by, &UsageZone::parse(Some(zone)).unwrap(), entries)
    }

    #[test]
    fn rows_are_sorted_by_cost_and_an_unknown_cost_is_not_zero() {
        let entries = [
            entry(1, 2, "run_a", 100, 0.0, true),
            entry(2, 1, "run_b", 10, 0.25, false),
            entry(3, 1, "run_b", 10, 0.25, false),
            entry(4, 1, "run_c", 10, 0.0, true),
        ];
        let report = report(UsageGrouping::Agent, "UTC", &entries);
        let shown: Vec<_> = report
            .rows
            .iter()
            .map(|row| {
                (row.key.as_deref().unwrap(), row.sum.cost_usd, row.sum.runs, row.sum.runs_without_cost)
            })
            .collect();
        assert_eq!(shown, [("claude", Some(0.5), 2, 1), ("codex", None, 1, 1)]);
        assert_eq!((report.total.input_tokens, report.total.cost_usd), (130, Some(0.5)));
        assert_eq!((report.total.runs, report.total.runs_without_cost), (3, 2));
    }

    #[test]
    fn days_are_those_of_the_zone() {
        // 2026-03-28T23:30Z and 2026-03-29T22:30Z: summer time begins in Berlin between them.
        let entries = [
            entry(1_774_740_600_000, 1, "a", 1, 0.1, false),
            entry(1_774_823_400_000, 1, "a", 2, 0.1, false),
        ];
        let days = |zone: &str| -> Vec<String> {
            report(UsageGrouping::Day, zone, &entries).rows.into_iter().filter_map(|row| row.key).collect()
        };
        assert_eq!(days("UTC"), ["2026-03-28", "2026-03-29"]);
        assert_eq!(days("+01:00"), ["2026-03-29"]);
        assert_eq!(days("CET-1CEST,M3.5.0,M10.5.0/3"), ["2026-03-29", "2026-03-30"]);
        for bad in ["", "Mars/Base", "25:00", "../../etc/passwd", "Z\0"] {
            assert!(UsageZone::parse(Some(bad)).is_err(), "{bad:?}");
        }
        assert_eq!(UsageZone::parse(None).unwrap().day(Millis(u64::MAX)), "9999-12-30");
    }

    #[test]
    fn nothing_costs_nothing() {
        let report = report(UsageGrouping::Session, "UTC", &[]);
        assert_eq!((report.rows.len(), report.total.cost_usd), (0, Some(0.0)));
    }

    proptest! {
        #[test]
        fn the_rows_of_every_grouping_add_up_to_the_total(
            reports in proptest::collection::vec((0..u64::from(u32::MAX), 0..4_i64, 0..u64::MAX, 0.0..1000.0_f64), 0..40),
        ) {
            let entries: Vec<UsageEntry> =
                reports.iter().map(|(at, session, tokens, cost)| entry(*at, *session, "run", *tokens, *cost, false)).collect();
            for by in UsageGrouping::ALL {
                let report = report(by, "UTC", &entries);
                let tokens = report.rows.iter().fold(0_u64, |sum, row| sum.saturating_add(row.sum.input_tokens));
                prop_assert_eq!(tokens, report.total.input_tokens);
                let cost: f64 = report.rows.iter().filter_map(|row| row.sum.cost_usd).sum();
                let total = report.total.cost_usd.unwrap_or_default();
                prop_assert!((cost - total).abs() <= total * 1e-9, "{} {}", cost, total);
                prop_assert!(report.rows.iter().all(|row| row.sum.runs >= 1));
            }
        }
    }
}
