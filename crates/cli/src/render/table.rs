//! Tables with aligned columns. On a terminal, rows are truncated to its width so each stays on one line; elsewhere
//! nothing is truncated.

use super::style::TextStyle;
use super::text;

/// Between two columns.
const GAP: &str = "  ";

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
        let mut widths: Vec<usize> = self.titles.iter().map(|title| title.len()).collect();
        for row in &self.rows {
            for (widest, cell) in widths.iter_mut().zip(row) {
                *widest = (*widest).max(cell.chars().count());
            }
        }
        let mut out = String::new();
        let titles: Vec<String> = self.titles.iter().map(|&title| title.to_owned()).collect();
        out.push_str(&style.bold(&align_cells(&titles, &widths, width)));
        out.push('\n');
        for row in &self.rows {
            out.push_str(&align_cells(row, &widths, width));
            out.push('\n');
        }
        out
    }
}

fn align_cells(cells: &[String], widths: &[usize], width: Option<usize>) -> String {
    let mut line = String::new();
    for (i, (cell, column_width)) in cells.iter().zip(widths).enumerate() {
        if i > 0 {
            line.push_str(GAP);
        }
        line.push_str(cell);
        line.extend(std::iter::repeat_n(' ', column_width.saturating_sub(cell.chars().count())));
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
}
