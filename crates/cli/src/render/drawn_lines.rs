//! Where on the terminal the lines of a live display are, after the user has resized the window. Pure: it counts rows and
//! returns escape sequences; only `output.rs` prints them.

/// The lines that a live display has drawn and will draw over, by their widths.
///
/// A terminal that becomes narrower wraps them, so they take more rows. Rows that no longer fit on the screen move into
/// its history, where nothing can erase them; when the window grows, they come back.
#[derive(Debug, Default)]
pub(crate) struct DrawnLines {
    widths: Vec<usize>,
    /// Whether the last of `widths` is the beginning of a line whose other rows were erased. The terminal takes the next
    /// line for its continuation.
    ends_wrapped: bool,
}

impl DrawnLines {
    pub(crate) fn is_empty(&self) -> bool {
        self.widths.is_empty()
    }

    /// Moves the cursor from below the lines to the first row of them that the screen shows. What is above it stays
    /// remembered.
    pub(crate) fn move_to_first_row(&mut self, (columns, rows): (usize, usize)) -> String {
        let reachable = rows.saturating_sub(1);
        let mut beyond = self.widths.iter().map(|width| rows_of(*width, columns)).sum::<usize>();
        let upwards = beyond.min(reachable);
        beyond -= upwards;
        let mut kept = Vec::new();
        self.ends_wrapped = false;
        for width in std::mem::take(&mut self.widths) {
            if beyond == 0 {
                break;
            }
            let taken = rows_of(width, columns);
            self.ends_wrapped = taken > beyond;
            kept.push(if self.ends_wrapped { beyond * columns } else { width });
            beyond -= taken.min(beyond);
        }
        self.widths = kept;
        if upwards == 0 { String::new() } else { format!("\x1b[{upwards}A\r") }
    }

    /// Adds the line that was drawn next.
    pub(crate) fn push(&mut self, width: usize) {
        match self.widths.last_mut().filter(|_| std::mem::take(&mut self.ends_wrapped)) {
            Some(beginning) => *beginning += width,
            None => self.widths.push(width),
        }
    }

    /// Forgets all lines. They stay on the screen.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The rows that a line takes on a terminal with so many columns.
pub(crate) fn rows_of(width: usize, columns: usize) -> usize {
    width.div_ceil(columns.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(widths: &[usize]) -> DrawnLines {
        let mut lines = DrawnLines::default();
        widths.iter().for_each(|width| lines.push(*width));
        lines
    }

    #[test]
    fn lines_that_were_wrapped_by_a_narrower_terminal_are_all_drawn_over() {
        assert_eq!(drawn(&[]).move_to_first_row((80, 24)), "");
        assert_eq!(drawn(&[70, 0, 80]).move_to_first_row((80, 24)), "\x1b[3A\r");
        assert_eq!(drawn(&[70, 0, 80]).move_to_first_row((40, 24)), "\x1b[5A\r");
    }

    #[test]
    fn rows_that_left_a_small_screen_are_drawn_over_when_they_come_back() {
        let mut lines = drawn(&[10, 70, 70, 70]);
        assert_eq!(lines.move_to_first_row((80, 3)), "\x1b[2A\r");
        lines.push(10);
        lines.push(20);
        assert_eq!(
            lines.move_to_first_row((80, 24)),
            "\x1b[4A\r",
            "two that came back, and two that were drawn"
        );
        assert!(lines.is_empty(), "nothing is left above");
    }

    #[test]
    fn the_beginning_of_a_wrapped_line_continues_with_the_line_drawn_after_it() {
        // 7 rows, of which the screen shows the last 3. Above them are `10` and three rows of the line of 70 columns.
        let mut lines = drawn(&[10, 70, 30]);
        assert_eq!(lines.move_to_first_row((20, 4)), "\x1b[3A\r");
        lines.push(15);
        lines.push(19);
        // As wide as before: `10`, 60 + 15 columns in one line, and `19`.
        assert_eq!(lines.move_to_first_row((80, 24)), "\x1b[3A\r");
    }

    #[test]
    fn no_size_of_a_terminal_fails() {
        for size in [(0, 0), (1, 1), (1, 0), (0, 1), (usize::MAX, usize::MAX)] {
            let mut lines = drawn(&[10, 0, 3]);
            lines.move_to_first_row(size);
            lines.push(4);
            lines.move_to_first_row(size);
        }
    }
}
