//! The table of `qd cost`: one row for each agent, model, session, workspace or day, with a bar, and the total.

use qd_protocol::usage_report::{UsageGrouping, UsageReport, UsageRow, UsageSum};

use super::style::TextStyle;
use super::text::{display_width, format_dollars, pad, truncate};
use super::visible_text::show_prose_line;

/// Between two columns.
const GAP: &str = "  ";
/// The longest name that is shown.
const NAME_CHARS: usize = 48;
/// The shortest name column on a narrow terminal.
const NAME_CHARS_MIN: usize = 8;
/// The longest bar, in characters.
const BAR_CHARS: usize = 24;
/// Names are cut to leave this much for the bars.
const BAR_CHARS_KEPT: usize = 10;
/// Below this there is no bar: it would say nothing.
const BAR_CHARS_MIN: usize = 4;
/// The last character of a bar, in eighths.
const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];

/// Renders a report as a table. Bars compare costs, or tokens if no cost is known.
pub(crate) fn render_usage(report: &UsageReport, style: TextStyle, width: Option<usize>) -> String {
    let cells: Vec<[String; 4]> = report
        .rows
        .iter()
        .map(|row| usage_cells(row_name(report.by, row), &row.sum))
        .chain([usage_cells("total".to_owned(), &report.total)])
        .collect();
    let titles = [report.by.as_str().to_uppercase(), "INPUT".into(), "OUTPUT".into(), "COST".into()];
    let widest = |column: usize| {
        let cells = cells.iter().chain([&titles]);
        cells.map(|cells| display_width(&cells[column])).max().unwrap_or_default()
    };
    let numbers = [widest(1), widest(2), widest(3)];
    let fixed: usize = numbers.iter().map(|width| width + GAP.len()).sum();
    let mut name_width = widest(0);
    let mut bar_width = BAR_CHARS;
    if let Some(width) = width {
        let room = width.saturating_sub(fixed + GAP.len() + BAR_CHARS_KEPT);
        name_width = name_width.min(room.max(NAME_CHARS_MIN));
        bar_width = bar_width.min(width.saturating_sub(fixed + name_width + GAP.len()));
    }
    let line = |cells: &[String; 4]| {
        let mut line = pad(&truncate(&cells[0], name_width), name_width);
        for (cell, width) in cells[1..].iter().zip(numbers) {
            line.push_str(&format!("{GAP}{cell:>width$}"));
        }
        line
    };
    let mut out = format!("{}\n", style.bold(&line(&titles)));
    let largest = report.rows.iter().map(|row| weight(report, &row.sum)).fold(0.0, f64::max);
    for (cells, row) in cells.iter().zip(&report.rows) {
        let bar = bar(weight(report, &row.sum), largest, bar_width);
        let end = if bar.is_empty() { String::new() } else { format!("{GAP}{}", style.cyan(&bar)) };
        out.push_str(&format!("{}{end}\n", line(cells)));
    }
    if let Some(total) = cells.last() {
        out.push_str(&format!("{}\n", style.bold(&line(total))));
    }
    out
}

fn usage_cells(name: String, sum: &UsageSum) -> [String; 4] {
    [name, group_digits(sum.input_tokens), group_digits(sum.output_tokens), describe_cost(sum)]
}

fn row_name(by: UsageGrouping, row: &UsageRow) -> String {
    let name = match (by, &row.key, &row.label) {
        (UsageGrouping::Model, None, _) => "(the agent's choice)".to_owned(),
        (_, None, _) => "(none)".to_owned(),
        (UsageGrouping::Session, Some(id), Some(title)) => format!("{id} {title}"),
        (UsageGrouping::Workspace, Some(_), Some(path)) => path.clone(),
        (_, Some(key), _) => key.clone(),
    };
    truncate(&show_prose_line(&name), NAME_CHARS)
}

/// The cost; if some or all of it is not known, it says so.
fn describe_cost(sum: &UsageSum) -> String {
    match sum.cost_usd {
        None => "unknown".to_owned(),
        Some(cost) if sum.runs_without_cost > 0 => format!("over {}", format_dollars(cost)),
        Some(cost) => format_dollars(cost),
    }
}

/// What the bars compare.
fn weight(report: &UsageReport, sum: &UsageSum) -> f64 {
    match report.total.cost_usd {
        Some(cost) if cost > 0.0 => sum.cost_usd.unwrap_or_default(),
        _ => sum.input_tokens as f64 + sum.output_tokens as f64,
    }
}

/// A bar whose length is to `width` as `weight` is to `largest`. Anything above zero is visible.
fn bar(weight: f64, largest: f64, width: usize) -> String {
    if weight <= 0.0 || largest <= 0.0 || width < BAR_CHARS_MIN {
        return String::new();
    }
    let eighths = (weight / largest * (width * 8) as f64).round().max(1.0) as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

/// A number with commas between its thousands.
fn group_digits(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(
        key: Option<&str>,
        label: Option<&str>,
        tokens: u64,
        cost_usd: Option<f64>,
        lacking: u64,
    ) -> UsageRow {
        let sum = UsageSum {
            input_tokens: tokens,
            output_tokens: tokens / 3,
            cost_usd,
            runs: 5,
            runs_without_cost: lacking,
        };
        UsageRow { key: key.map(str::to_owned), label: label.map(str::to_owned), sum }
    }

    fn report(by: UsageGrouping, rows: Vec<UsageRow>) -> UsageReport {
        let total = UsageSum {
            input_tokens: rows.iter().map(|row| row.sum.input_tokens).sum(),
            output_tokens: rows.iter().map(|row| row.sum.output_tokens).sum(),
            cost_usd: rows.iter().filter_map(|row| row.sum.cost_usd).reduce(|left, right| left + right),
            runs: 5 * rows.len() as u64,
            runs_without_cost: rows.iter().map(|row| row.sum.runs_without_cost).sum(),
        };
        UsageReport { by, rows, total, complete: true, ..UsageReport::default() }
    }

    fn reports() -> [(&'static str, UsageReport); 3] {
        let agents = vec![
            row(Some("claude"), None, 12_345_678, Some(41.5), 0),
            row(Some("codex"), None, 900_000, Some(3.25), 2),
            row(Some("acp:my-agent --with a-very-long-command-line --and more"), None, 1_000, Some(0.004), 0),
            row(Some("gemini"), None, 77, None, 5),
        ];
        let sessions = vec![
            row(Some("ses_4kq8zt2m"), Some("nightly \x1b[2J update"), 5_000, None, 5),
            row(Some("ses_9b"), None, 20_000, None, 5),
            row(Some("ses_7cw0q1"), Some("文書を直す"), 10_000, None, 5),
        ];
        let models = vec![row(None, None, 500, Some(1.0), 0), row(Some("large"), None, 50, Some(0.5), 0)];
        [
            ("agents", report(UsageGrouping::Agent, agents)),
            ("sessions", report(UsageGrouping::Session, sessions)),
            ("models", report(UsageGrouping::Model, models)),
        ]
    }

    #[test]
    fn a_report_is_a_table_with_bars_and_a_total() {
        for (name, report) in reports() {
            for (suffix, colour, width) in [
                ("at_80_columns", false, Some(80)),
                ("at_140_columns", false, Some(140)),
                ("in_colour_at_80_columns", true, Some(80)),
                ("in_colour_at_140_columns", true, Some(140)),
            ] {
                let text = render_usage(&report, TextStyle::new(colour), width);
                insta::assert_snapshot!(format!("usage_of_{name}_{suffix}"), text.replace('\x1b', "␛"));
            }
        }
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for (_, report) in reports() {
            for width in 50..160 {
                for line in render_usage(&report, TextStyle::new(false), Some(width)).lines() {
                    assert!(display_width(line) <= width, "{width}: {line}");
                }
            }
        }
    }

    #[test]
    fn bars_are_as_long_as_their_share() {
        assert_eq!(bar(1.0, 1.0, 4), "████");
        assert_eq!(bar(0.5, 1.0, 5), "██▌");
        assert_eq!(bar(0.0001, 1.0, 24), "▏", "little is not nothing");
        assert_eq!(bar(0.0, 1.0, 24), "");
        assert_eq!(bar(1.0, 1.0, 3), "", "there is no room for it");
        assert_eq!(bar(f64::MAX, f64::MAX, 8), "████████");
    }

    #[test]
    fn digits_are_grouped() {
        assert_eq!(group_digits(0), "0");
        assert_eq!(group_digits(999), "999");
        assert_eq!(group_digits(1000), "1,000");
        assert_eq!(group_digits(12_345_678), "12,345,678");
        assert_eq!(group_digits(u64::MAX), "18,446,744,073,709,551,615");
    }
}
