//! Snapshots of what verbs print: one file for each view, at both usual widths of a terminal, with and without colour.
//! Only for tests.

use super::style::{TextStyle, visible_width};

/// Compares a view with its snapshot. No line may be wider than its terminal.
#[track_caller]
pub(crate) fn assert_view(name: &str, render: impl Fn(TextStyle, Option<usize>) -> String) {
    let mut shown = String::new();
    for width in [80, 140] {
        for (colour, suffix) in [(false, ""), (true, ", in colour")] {
            let text = render(TextStyle::new(colour), Some(width));
            for line in text.lines() {
                assert!(visible_width(line) <= width, "{name}: wider than {width} columns: {line}");
            }
            shown.push_str(&format!("== {width} columns{suffix}\n{}\n", text.replace('\x1b', "␛")));
        }
    }
    insta::assert_snapshot!(name, shown);
}
