//! Tables with aligned columns. On a terminal, a table that is too wide gives up space of its widest columns, so each
//! row stays on one line with all its columns; elsewhere nothing is truncated. Widths are columns of the terminal, which
//! wide characters take two of.

use super::style::TextStyle;
use super::text;

/// Between two columns.
const GAP: &str = "  ";
/// A column is never made narrower than this. The first column holds what commands take, and keeps its width.
const COLUMN_MIN: usize = 6;

#[derive(Debug)]
pub(crate) struct TextTable {
    titles: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    pub(crate) fn new(titles: &[&'static str]) -> Self {
        Self { titles: titles.to_vec(), rows: Vec::new() }
    }

    /// Adds a row with one cell per column. Control characters are stripped, because a title may come from an agent.
    pub(crate) fn add_row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.titles.len(), "a row has a cell for every column");
        self.rows
            .push(cells.iter().map(|cell| text::strip_controls(cell).replace(['\n', '\t'], " ")).collect());
    }

    /// The whole table; each row ends with a newline.
    pub(crate) fn render(&self, style: TextStyle, width: Option<usize>) -> String {
        let widths = self.column_widths(width);
        let titles: Vec<String> = self.titles.iter().map(|&title| title.to_owned()).collect();
        let mut out = format!("{}\n", style.bold(&align_cells(&titles, &widths, width)));
        for row in &self.rows {
            out.push_str(&align_cells(row, &widths, width));
            out.push('\n');
        }
        out
    }

    fn column_widths(&self, width: Option<usize>) -> Vec<usize> {
        let mut widths: Vec<usize> = self.titles.iter().map(|title| title.len()).collect();
        for row in &self.rows {
            for (widest, cell) in widths.iter_mut().zip(row) {
                *widest = (*widest).max(text::display_width(cell));
            }
        }
        let Some(width) = width else { return widths };
        let gaps = GAP.len() * widths.len().saturating_sub(1);
        while widths.iter().sum::<usize>() + gaps > width {
            let rest = widths.iter_mut().skip(1).filter(|column| **column > COLUMN_MIN);
            let Some(widest) = rest.max() else { break };
            *widest -= 1;
        }
        widths
    }
}

fn align_cells(cells: &[String], widths: &[usize], width: Option<usize>) -> String {
    let mut line = String::new();
    for (i, (cell, &column_width)) in cells.iter().zip(widths).enumerate() {
        if i > 0 {
            line.push_str(GAP);
        }
        let cell = text::truncate(cell, column_width);
        line.push_str(&cell);
        line.extend(std::iter::repeat_n(' ', column_width.saturating_sub(text::display_width(&cell))));
    }
    let line = line.trim_end();
    width.map_or_else(|| line.to_owned(), |width| text::truncate(line, width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_rows_stay_lines() {
        let mut table = TextTable::new(&["ID", "TITLE"]);
        table.add_row(["ses_1".to_owned(), "a\nb".to_owned()]);
        table.add_row(["s".to_owned(), "fix \x1b[31mit".to_owned()]);
        assert_eq!(
            table.render(TextStyle::new(false), None),
            "ID     TITLE\nses_1  a b\ns      fix [31mit\n"
        );
        assert_eq!(table.render(TextStyle::new(false), Some(9)), "ID     T…\nses_1  a…\ns      f…\n");
    }

    #[test]
    fn a_long_cell_does_not_push_the_next_column_off_the_screen() {
        let mut table = TextTable::new(&["ID", "AGENT", "STATE"]);
        table.add_row([
            "ses_1".to_owned(),
            "acp:node /opt/agents/my-own-agent.js --fast".to_owned(),
            "done".to_owned(),
        ]);
        assert_eq!(
            table.render(TextStyle::new(false), Some(30)),
            "ID     AGENT            STATE\nses_1  acp:node /opt/…  done\n"
        );
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let mut table = TextTable::new(&["TITLE", "STATE"]);
        table.add_row(["修复测试".to_owned(), "done".to_owned()]);
        table.add_row(["🚀 ship".to_owned(), "failed".to_owned()]);
        table.add_row(["e\u{301}te\u{301}".to_owned(), "idle".to_owned()]);
        assert_eq!(
            table.render(TextStyle::new(false), None),
            "TITLE     STATE\n修复测试  done\n🚀 ship   failed\ne\u{301}te\u{301}       idle\n"
        );
    }
}
