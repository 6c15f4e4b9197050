//! Tables of asks: those that wait for an answer, and those that were decided. On a terminal a row takes one line, and
//! what does not fit is marked; elsewhere nothing is cut.

use qd_protocol::Millis;
use qd_protocol::policy::Risk;

use super::ask::{AskSummary, risk_name};
use super::style::TextStyle;
use super::text;
use super::visible_text::show_prose_line;

/// Between two columns.
const GAP: &str = "  ";
/// The most that a column with a title or a decision takes of the screen: one part in so many.
const TITLE_SHARE: usize = 4;
/// The least that is left for the last column, however narrow the screen is.
const LAST_COLUMN_MIN: usize = 16;

/// An open ask.
#[derive(Debug, Clone)]
pub(crate) struct OpenAskRow {
    /// `None` for a question.
    pub(crate) risk: Option<Risk>,
    /// The id, perhaps shortened.
    pub(crate) id: String,
    pub(crate) opened_at: Millis,
    /// The title of the session, or another name for who asks.
    pub(crate) title: String,
    pub(crate) summary: AskSummary,
}

/// A decision about an ask.
#[derive(Debug, Clone)]
pub(crate) struct DecidedAskRow {
    /// When it was decided, as far as known.
    pub(crate) at: Millis,
    /// What was decided, in a few words.
    pub(crate) outcome: String,
    /// Who decided.
    pub(crate) by: String,
    pub(crate) id: String,
    pub(crate) title: String,
    pub(crate) summary: AskSummary,
}

/// The table of open asks.
pub(crate) fn open_asks(rows: &[OpenAskRow], now: Millis, style: TextStyle, width: Option<usize>) -> String {
    let cells = rows.iter().map(|row| {
        let age = text::format_age(row.opened_at, now);
        let fixed = [row.risk.map_or("-", risk_name).to_owned(), row.id.clone(), age];
        (fixed, row.title.clone(), &row.summary)
    });
    let paint = |risk: &str, padded: &str| match risk {
        "high" => style.red(padded),
        "medium" => style.yellow(padded),
        _ => padded.to_owned(),
    };
    render(["RISK", "ID", "AGE"], cells.collect(), paint, style, width)
}

/// The table of decisions.
pub(crate) fn decided_asks(
    rows: &[DecidedAskRow],
    now: Millis,
    style: TextStyle,
    width: Option<usize>,
) -> String {
    let outcome_room = width.map_or(usize::MAX, |width| width / TITLE_SHARE);
    let cells = rows.iter().map(|row| {
        let outcome = text::truncate(&row.outcome, outcome_room);
        let fixed = [outcome, row.by.clone(), text::format_age(row.at, now), row.id.clone()];
        (fixed, row.title.clone(), &row.summary)
    });
    let paint = |_: &str, padded: &str| padded.to_owned();
    render(["DECISION", "BY", "AGE", "ID"], cells.collect(), paint, style, width)
}

/// Renders columns of full width, then the title, then what is wanted in the rest of the line.
fn render<const N: usize>(
    names: [&str; N],
    rows: Vec<([String; N], String, &AskSummary)>,
    paint_first: impl Fn(&str, &str) -> String,
    style: TextStyle,
    width: Option<usize>,
) -> String {
    let title_room = width.map_or(usize::MAX, |width| width / TITLE_SHARE);
    let rows: Vec<_> = rows
        .into_iter()
        .map(|(cells, title, summary)| {
            let title = show_prose_line(&title);
            (cells, text::truncate(&title, title_room), summary)
        })
        .collect();
    let widest = |name: &str, cells: &mut dyn Iterator<Item = &String>| {
        cells.map(|cell| text::display_width(cell)).chain([name.len()]).max().unwrap_or_default()
    };
    let widths: [usize; N] =
        std::array::from_fn(|i| widest(names[i], &mut rows.iter().map(|(cells, _, _)| &cells[i])));
    let title_width = widest("SESSION", &mut rows.iter().map(|(_, title, _)| title));
    let taken = widths.iter().sum::<usize>() + title_width + GAP.len() * (N + 1);
    let last = width.map(|width| width.saturating_sub(taken).max(LAST_COLUMN_MIN));

    let heading: String =
        names.iter().zip(widths).map(|(name, width)| format!("{name:width$}{GAP}")).collect();
    let mut out = format!("{}\n", style.bold(&format!("{heading}{:title_width$}{GAP}WANTS", "SESSION")));
    for (cells, title, summary) in rows {
        for (i, (cell, width)) in cells.iter().zip(widths).enumerate() {
            let padded = text::pad(cell, width);
            out.push_str(&if i == 0 { paint_first(cell, &padded) } else { padded });
            out.push_str(GAP);
        }
        out.push_str(&format!("{}{GAP}{}\n", text::pad(&title, title_width), summary.fit(last)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(first_line: &str, more_lines: usize) -> AskSummary {
        AskSummary { first_line: first_line.to_owned(), more_lines }
    }

    fn open_rows(id: impl Fn(&str) -> String) -> Vec<OpenAskRow> {
        let row = |risk, name, opened_at, title: &str, summary| OpenAskRow {
            risk,
            id: id(name),
            opened_at: Millis(opened_at),
            title: title.to_owned(),
            summary,
        };
        vec![
            row(
                Some(Risk::High),
                "f6vh",
                0,
                "nightly build of the documentation",
                summary("Bash: rm -rf build", 0),
            ),
            row(
                Some(Risk::Medium),
                "0k2v7",
                3_000_000,
                "tidy",
                summary("Bash: cargo test --workspace --all-features -- --nocapture --test-threads 1", 2),
            ),
            row(None, "zz01", 3_599_000, "fleet: Port the parser.", summary("What is the result?", 24)),
            row(Some(Risk::Low), "9w1x", 3_599_000, "文書を直す", summary("Read: 設計/入口.md", 0)),
        ]
    }

    #[test]
    fn open_asks_are_readable_on_narrow_and_wide_screens() {
        let now = Millis(3_600_000);
        let short = |name: &str| name.to_owned();
        for (name, colour, width) in [
            ("80_columns", false, Some(80)),
            ("140_columns", false, Some(140)),
            ("80_columns_colour", true, Some(80)),
        ] {
            let table = open_asks(&open_rows(short), now, TextStyle::new(colour), width);
            if !colour {
                let longest = table.lines().map(text::display_width).max();
                assert!(longest <= width, "{table}");
            }
            insta::assert_snapshot!(format!("open_asks_{name}"), table.replace('\x1b', "ESC"));
        }
        let whole = |name: &str| format!("ask_{name:0<26}");
        let table = open_asks(&open_rows(whole), now, TextStyle::new(false), None);
        insta::assert_snapshot!("open_asks_no_terminal", table);
    }

    #[test]
    fn decisions_say_who_decided() {
        let row = |outcome: &str, by: &str, at| DecidedAskRow {
            at: Millis(at),
            outcome: outcome.to_owned(),
            by: by.to_owned(),
            id: "f6vh".to_owned(),
            title: "tidy".to_owned(),
            summary: summary("Bash: rm -rf build", 1),
        };
        let rows = [row("denied: use make clean, not rm", "user", 0), row("allowed once", "policy", 59_000)];
        let table = decided_asks(&rows, Millis(60_000), TextStyle::new(false), Some(80));
        insta::assert_snapshot!("decided_asks_80_columns", table);
    }
}
