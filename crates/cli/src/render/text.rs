//! Small text helpers: truncation, durations, sizes and money.

use qd_protocol::Millis;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::visible_text::show_prose_line;

/// The columns that a text takes on a terminal. Wide characters take two, combining ones none.
pub(crate) fn display_width(text: &str) -> usize {
    text.width()
}

/// The text, followed by spaces up to so many columns.
pub(crate) fn pad(text: &str, width: usize) -> String {
    format!("{text}{}", " ".repeat(width.saturating_sub(display_width(text))))
}

/// At most `width` columns. A truncated text ends with an ellipsis.
pub(crate) fn truncate(text: &str, width: usize) -> String {
    if display_width(text) <= width {
        return text.to_owned();
    }
    let mut head = String::new();
    let mut used = 0;
    for c in text.chars() {
        used += c.width().unwrap_or(0);
        if used >= width {
            break;
        }
        head.push(c);
    }
    head.push('…');
    head
}

/// At most `width` columns, from the end. A truncated text begins with an ellipsis.
pub(crate) fn truncate_start(text: &str, width: usize) -> String {
    if display_width(text) <= width {
        return text.to_owned();
    }
    let mut start = text.len();
    let mut used = 0;
    for (at, c) in text.char_indices().rev() {
        used += c.width().unwrap_or(0);
        if used >= width {
            break;
        }
        start = at;
    }
    format!("…{}", &text[start..])
}

/// The first line that is not blank, made visible and truncated, for lists.
pub(crate) fn first_line(text: &str, width: usize) -> String {
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    truncate(&show_prose_line(line), width)
}

/// An upper bound of the columns that a terminal needs for a character.
pub(crate) fn columns_at_most(c: char) -> usize {
    match c {
        '\0'..='\u{10ff}' => 1,
        // From here on there are wide characters.
        _ => 2,
    }
}

/// `1 line`, `2 lines`.
pub(crate) fn count_lines(lines: usize) -> String {
    format!("{lines} line{}", if lines == 1 { "" } else { "s" })
}

/// A duration in its one or two largest units.
pub(crate) fn format_duration(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m", s / 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d{:02}h", s / 86_400, s / 3600 % 24),
    }
}

/// The duration since `then`.
pub(crate) fn format_age(then: Millis, now: Millis) -> String {
    format_duration(now.since(then))
}

/// A number of bytes in a readable unit.
pub(crate) fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut scaled = bytes;
    // Stops one step early; the last division is done in floating point to keep one decimal.
    while scaled >= 1024 * 1024 && unit + 2 < UNITS.len() {
        scaled /= 1024;
        unit += 1;
    }
    if scaled < 1024 {
        return format!("{scaled} {}", UNITS[unit]);
    }
    let value = scaled as f64 / 1024.0;
    format!("{value:.1} {}", UNITS[unit + 1])
}

/// An amount in dollars; `-` if it is zero.
pub(crate) fn format_dollars(usd: f64) -> String {
    if usd == 0.0 {
        "-".to_owned()
    } else if usd < 0.01 {
        format!("${usd:.4}")
    } else {
        format!("${usd:.2}")
    }
}

/// The name of a state, as in JSON.
pub(crate) fn wire_name(state: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(state).ok();
    value.and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_counts_columns() {
        assert_eq!(truncate("äöü", 3), "äöü");
        assert_eq!(truncate("修复测试", 8), "修复测试");
        assert_eq!(truncate("修复测试", 6), "修复…");
        assert_eq!(truncate("修复测试", 0), "…");
        assert_eq!(truncate("äöüß", 3), "äö…");
        assert_eq!(truncate_start("/a/修复/测试", 6), "…/测试");
        assert_eq!(truncate_start("äöü", 3), "äöü");
        assert_eq!(truncate_start("äöüß", 3), "…üß");
        assert_eq!(truncate_start("äöüß", 0), "…");
        assert_eq!(first_line("\n\n  first \nsecond", 20), "first");
    }

    #[test]
    fn durations_sizes_and_money_are_short() {
        assert_eq!(format_duration(999), "0s");
        assert_eq!(format_duration(59_000), "59s");
        assert_eq!(format_duration(61_000), "1m");
        assert_eq!(format_duration(3_660_000), "1h01m");
        assert_eq!(format_duration(90_000_000), "1d01h");
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(1023), "1023 B");
        assert_eq!(format_size(1536), "1.5 KiB");
        assert_eq!(format_size(5 << 20), "5.0 MiB");
        assert_eq!(format_size(3 << 40), "3.0 TiB");
        assert_eq!(format_dollars(0.0), "-");
        assert_eq!(format_dollars(0.001), "$0.0010");
        assert_eq!(format_dollars(1.5), "$1.50");
    }
}
