//! Tables with aligned columns. On a terminal, a table that is too wide gives up space of its widest columns, so each
//! row stays on one line with all its columns; elsewhere nothing is truncated. Widths are columns of the terminal, which
//! wide characters take two of.

use super::style::{CellColour, TextStyle};
use super::text;
use super::visible_text::show_prose_line;

/// Between two columns.
const GAP: &str = "  ";
/// A column is never made narrower than this. The first column holds what commands take, and keeps its width.
const COLUMN_MIN: usize = 6;

#[derive(Debug)]
pub(crate) struct TextTable {
    titles: Vec<&'static str>,
    rows: Vec<TableRow>,
    /// How narrow each column may become. One whose content people copy is never truncated.
    min_widths: Vec<usize>,
    /// The columns that keep the end of a cell that is too wide, because there it differs from others.
    ends_kept: Vec<usize>,
}

#[derive(Debug)]
struct TableRow {
    cells: Vec<String>,
    /// The column whose cell is coloured, and its colour.
    colour: Option<(usize, CellColour)>,
}

impl TextTable {
    pub(crate) fn new(titles: &[&'static str]) -> Self {
        let mut min_widths = vec![COLUMN_MIN; titles.len()];
        if let Some(first) = min_widths.first_mut() {
            *first = usize::MAX;
        }
        Self { titles: titles.to_vec(), rows: Vec::new(), min_widths, ends_kept: Vec::new() }
    }

    /// A table that is shown without titles, by [`Self::render_rows`]. Only the last column is never truncated.
    pub(crate) fn untitled(columns: usize) -> Self {
        let mut min_widths = vec![COLUMN_MIN; columns];
        if let Some(last) = min_widths.last_mut() {
            *last = usize::MAX;
        }
        Self { titles: vec![""; columns], rows: Vec::new(), min_widths, ends_kept: Vec::new() }
    }

    /// Keeps a column at least this wide, if its content is.
    pub(crate) fn set_min_width(&mut self, column: usize, width: usize) {
        if let Some(min_width) = self.min_widths.get_mut(column) {
            *min_width = width;
        }
    }

    /// Truncates the beginnings of a column's cells instead of their ends: paths, whose last parts tell them apart.
    pub(crate) fn keep_ends(&mut self, column: usize) {
        self.ends_kept.push(column);
    }

    /// Adds a row with one cell per column. Hidden characters are shown, because a title may come from an agent.
    pub(crate) fn add_row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().map(|cell| show_prose_line(&cell)).collect();
        debug_assert_eq!(cells.len(), self.titles.len(), "a row has a cell for every column");
        self.rows.push(TableRow { cells, colour: None });
    }

    /// Colours one cell of the row that was added last.
    pub(crate) fn colour_cell(&mut self, column: usize, colour: CellColour) {
        if let Some(row) = self.rows.last_mut() {
            row.colour = Some((column, colour));
        }
    }

    /// The whole table; each row ends with a newline.
    pub(crate) fn render(&self, style: TextStyle, width: Option<usize>) -> String {
        let widths = self.column_widths(width);
        let titles: Vec<String> = self.titles.iter().map(|&title| title.to_owned()).collect();
        let titles = align_cells(&titles, &widths, width, &[], None);
        format!("{}\n{}", style.bold(&titles), self.render_rows(style, width, ""))
    }

    /// The rows without the titles, each after `indent` and with a newline at its end.
    pub(crate) fn render_rows(&self, style: TextStyle, width: Option<usize>, indent: &str) -> String {
        let width = width.map(|width| width.saturating_sub(indent.len()));
        let widths = self.column_widths(width);
        let mut out = String::new();
        for row in &self.rows {
            let colour = row.colour.map(|(column, colour)| (column, colour, style));
            out.push_str(indent);
            out.push_str(&align_cells(&row.cells, &widths, width, &self.ends_kept, colour));
            out.push('\n');
        }
        out
    }

    fn column_widths(&self, width: Option<usize>) -> Vec<usize> {
        let mut widths: Vec<usize> = self.titles.iter().map(|title| title.len()).collect();
        for row in &self.rows {
            for (widest, cell) in widths.iter_mut().zip(&row.cells) {
                *widest = (*widest).max(text::display_width(cell));
            }
        }
        let Some(width) = width else { return widths };
        let gaps = GAP.len() * widths.len().saturating_sub(1);
        while widths.iter().sum::<usize>() + gaps > width {
            let rest = widths.iter_mut().zip(&self.min_widths).filter(|(column, min)| **column > **min);
            let Some((widest, _)) = rest.max_by_key(|(column, _)| **column) else { break };
            *widest -= 1;
        }
        widths
    }
}

/// One line of the table. A line that is too wide although its columns are as narrow as possible is truncated, and then
/// has no colour.
fn align_cells(
    cells: &[String],
    widths: &[usize],
    width: Option<usize>,
    ends_kept: &[usize],
    colour: Option<(usize, CellColour, TextStyle)>,
) -> String {
    let (mut plain, mut line) = (String::new(), String::new());
    for (i, (cell, &column_width)) in cells.iter().zip(widths).enumerate() {
        let gap = if i > 0 { GAP } else { "" };
        let cut = if ends_kept.contains(&i) { text::truncate_start } else { text::truncate };
        let cell = cut(cell, column_width);
        let padding = " ".repeat(column_width.saturating_sub(text::display_width(&cell)));
        let painted = match colour {
            Some((column, colour, style)) if column == i => style.coloured(colour, &cell),
            _ => cell.clone(),
        };
        plain.extend([gap, &cell, &padding]);
        line.extend([gap, &painted, &padding]);
    }
    let plain = plain.trim_end();
    match width {
        Some(width) if text::display_width(plain) > width => text::truncate(plain, width),
        _ => line.trim_end().to_owned(),
    }
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
            "ID     TITLE\nses_1  a b\ns      fix ^[[31mit\n"
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
            "ID     AGENT             STATE\nses_1  acp:node /opt/a…  done\n"
        );
    }

    #[test]
    fn a_path_keeps_its_end() {
        let mut table = TextTable::new(&["ID", "PATH"]);
        table.keep_ends(1);
        table.add_row(["ses_1".to_owned(), "/home/ann/code/shop".to_owned()]);
        assert_eq!(table.render(TextStyle::new(false), Some(17)), "ID     PATH\nses_1  …code/shop\n");
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

    #[test]
    fn a_colour_takes_no_space_and_is_left_out_of_a_truncated_line() {
        let mut table = TextTable::new(&["ID", "STATE", "TITLE"]);
        table.add_row(["ses_1".to_owned(), "done".to_owned(), "x".to_owned()]);
        table.colour_cell(1, CellColour::Success);
        assert_eq!(table.render(TextStyle::new(false), None), "ID     STATE  TITLE\nses_1  done   x\n");
        assert_eq!(
            table.render(TextStyle::new(true), Some(80)),
            "\x1b[1mID     STATE  TITLE\x1b[0m\nses_1  \x1b[32mdone\x1b[0m   x\n"
        );
        assert_eq!(table.render_rows(TextStyle::new(true), Some(9), ""), "ses_1  d…\n");
    }

    #[test]
    fn the_command_at_the_end_of_a_row_without_titles_stays_whole() {
        let mut table = TextTable::untitled(2);
        table.add_row(["a title that is much too long".to_owned(), "qd attach ses_1".to_owned()]);
        let rows = table.render_rows(TextStyle::new(false), Some(30), "  ");
        assert_eq!(rows, "  a title th…  qd attach ses_1\n");
    }
}
