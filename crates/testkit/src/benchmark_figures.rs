//! Formatting for the benchmarks: percentiles, units, and a table in which every figure is next to its limit. Pure;
//! the benchmark prints it.

use std::fmt;
use std::time::Duration;

/// The table of one benchmark.
#[derive(Debug, Default)]
pub struct BenchmarkTable {
    title: String,
    rows: Vec<[String; 6]>,
}

const HEADINGS: [&str; 6] = ["figure", "ours", "limit", "ratio", "aim", "the limit is"];

impl BenchmarkTable {
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), rows: Vec::new() }
    }

    /// Adds a figure for which more is better, as a percentage of its limit.
    pub fn add_rate(&mut self, name: &str, ours: f64, limit: f64, aim: &str, limit_name: &str) -> &mut Self {
        let ratio = format!("{:.0} %", 100.0 * ours / limit);
        self.add_row([name, &format_rate(ours), &format_rate(limit), &ratio, aim, limit_name])
    }

    /// Adds a figure for which less is better, as a multiple of its limit.
    pub fn add_time(
        &mut self,
        name: &str,
        ours: Duration,
        limit: Duration,
        aim: &str,
        limit_name: &str,
    ) -> &mut Self {
        let ratio = format!("{:.2} x", ours.as_secs_f64() / limit.as_secs_f64());
        self.add_row([name, &format_duration(ours), &format_duration(limit), &ratio, aim, limit_name])
    }

    /// Adds a figure without a limit.
    pub fn add_plain(&mut self, name: &str, ours: &str, aim: &str) -> &mut Self {
        self.add_row([name, ours, "", "", aim, ""])
    }

    /// Adds a row as it is.
    pub fn add_row(&mut self, cells: [&str; 6]) -> &mut Self {
        self.rows.push(cells.map(str::to_owned));
        self
    }
}

impl fmt::Display for BenchmarkTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = HEADINGS.map(str::to_owned);
        let lines = || std::iter::once(&head).chain(&self.rows);
        let width = |column: usize| lines().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 6] = std::array::from_fn(width);
        writeln!(f, "\n{}", self.title)?;
        for row in lines() {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
                let is_number = (1..4).contains(&column);
                line += &if is_number { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The `part`-th percentile. Sorts `values`.
pub fn percentile<T: Copy + Ord>(values: &mut [T], part: usize) -> T {
    values.sort_unstable();
    values[(values.len() - 1) * part / 100]
}

/// Formats a rate with a suitable number of digits.
pub fn format_rate(rate: f64) -> String {
    match rate {
        _ if rate >= 1e6 => format!("{:.2} M/s", rate / 1e6),
        _ if rate >= 1e3 => format!("{:.1} k/s", rate / 1e3),
        _ => format!("{rate:.0} /s"),
    }
}

/// Formats a duration with a suitable number of digits.
pub fn format_duration(time: Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    match us {
        _ if us < 1e3 => format!("{us:.0} us"),
        _ if us < 1e5 => format!("{:.2} ms", us / 1e3),
        _ if us < 1e6 => format!("{:.0} ms", us / 1e3),
        _ => format!("{:.2} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_every_figure_has_its_ratio() {
        let mut table = BenchmarkTable::new("title");
        table.add_rate("events", 45_000.0, 90_000.0, "45 %", "raw log");
        table.add_time("p50", Duration::from_micros(300), Duration::from_micros(200), "< 2 x", "fdatasync");
        let text = table.to_string();
        assert!(text.contains("45.0 k/s") && text.contains("50 %") && text.contains("1.50 x"), "{text}");
        let at = |needle: &str| text.lines().find_map(|line| line.find(needle));
        assert_eq!(at("raw log"), at("fdatasync"));
    }

    #[test]
    fn a_percentile_is_a_value_that_was_there() {
        let mut values: Vec<u32> = (0..100).rev().collect();
        assert_eq!((percentile(&mut values, 50), percentile(&mut values, 99)), (49, 98));
        assert_eq!(percentile(&mut [7], 99), 7);
    }
}
