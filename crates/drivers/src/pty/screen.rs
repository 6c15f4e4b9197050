//! A terminal's screen. It is fed all output of the program, answers the queries that programs send to their terminal,
//! and counts the rows that scroll off at the top, so that each row has a permanent number. It decides nothing.

use std::fmt::Write as _;
use std::num::NonZeroU16;

use vt100::capture::{BasicFormattedCaptureState, RowContents, basic_formatted_to_plain};

/// The most bytes of query replies that may wait. A program that asks more than it reads gets no further replies.
const REPLIES_MAX: usize = 16 << 10;
/// The most scrolled-off rows kept until they are taken; beyond that the oldest are dropped. One chunk of output never
/// has this many.
const SCROLLED_MAX: usize = 64 << 10;
/// The largest width and height of a terminal, which bounds its memory.
const SIDE_MAX: u16 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    pub(crate) cols: NonZeroU16,
    pub(crate) rows: NonZeroU16,
}

impl TerminalSize {
    /// The nearest size within the limits.
    pub fn clamped(cols: u16, rows: u16) -> Self {
        let side = |value: u16| NonZeroU16::new(value.min(SIDE_MAX)).unwrap_or(NonZeroU16::MIN);
        Self { cols: side(cols), rows: side(rows) }
    }
}

/// One row on the screen, or one that has scrolled off.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ScreenRow {
    /// The text without trailing spaces, unless the line continues.
    pub(crate) text: String,
    /// Whether the line continues in the next row.
    pub(crate) wrapped: bool,
}

impl ScreenRow {
    fn new(text: String, wrapped: bool) -> Self {
        let text = if wrapped { text } else { text.trim_end().to_owned() };
        Self { text, wrapped }
    }
}

pub(crate) struct TerminalScreen {
    parser: vt100::Parser<ScreenCallbacks>,
    /// The number of the top row: how many rows have scrolled off before it.
    first_row: u64,
}

/// Handles what the emulator does not: query replies and scrolled-off rows.
#[derive(Default)]
struct ScreenCallbacks {
    replies: Vec<u8>,
    scrolled_rows: Vec<ScreenRow>,
    /// The number of rows that have scrolled off, including dropped ones.
    scrolled_count: u64,
}

impl TerminalScreen {
    pub(crate) fn new(TerminalSize { cols, rows }: TerminalSize) -> Self {
        // No scrollback: rows that scroll off are taken by the callback at once.
        let parser = vt100::Parser::new_with_callbacks(rows, cols, 0, ScreenCallbacks::default());
        Self { parser, first_row: 0 }
    }

    /// Feeds output to the screen. `observe` sees the screen at the end of every line and after every escape sequence,
    /// so at most a piece of a line lies between two calls.
    pub(crate) fn feed(&mut self, output: &[u8], mut observe: impl FnMut(&Self)) {
        let mut rest = output;
        while !rest.is_empty() {
            let (piece, next) = rest.split_at(first_piece_len(rest));
            self.parser.process(piece);
            self.first_row += std::mem::take(&mut self.parser.callbacks_mut().scrolled_count);
            observe(self);
            rest = next;
        }
    }

    /// Takes the replies to the program's terminal queries.
    pub(crate) fn take_replies(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.parser.callbacks_mut().replies)
    }

    /// Takes the rows that have scrolled off since the last call, each with its number.
    pub(crate) fn take_scrolled_rows(&mut self) -> Vec<(u64, ScreenRow)> {
        let rows = std::mem::take(&mut self.parser.callbacks_mut().scrolled_rows);
        let first = self.first_row - rows.len() as u64;
        (first..).zip(rows).collect()
    }

    /// Changes the size. A screen that grows does so at the bottom, because rows that scrolled off have been taken.
    pub(crate) fn resize(&mut self, TerminalSize { cols, rows }: TerminalSize) {
        let (height, _) = self.parser.screen().size();
        self.parser.screen_mut().clear_scrollback();
        self.parser.set_size(rows, cols);
        self.first_row += std::mem::take(&mut self.parser.callbacks_mut().scrolled_count);
        if self.emulator().alternate_screen() {
            // The primary screen behind it has grown at the top, by as many rows as had scrolled off.
            self.first_row -= u64::from(rows.get().saturating_sub(height.get())).min(self.first_row);
        }
    }

    /// The terminal emulator's own screen.
    pub(crate) fn emulator(&self) -> &vt100::Screen {
        self.parser.screen()
    }

    pub(crate) fn rows(&self) -> Vec<ScreenRow> {
        (0..self.height()).map(|row| self.row(row)).collect()
    }

    /// One row; empty if it does not exist.
    pub(crate) fn row(&self, row: u16) -> ScreenRow {
        ScreenRow::new(self.text_before(row, u16::MAX), self.emulator().row_wrapped(row))
    }

    /// The text of the cursor's row, up to the cursor.
    pub(crate) fn before_cursor(&self) -> String {
        let (row, col) = self.emulator().cursor_position();
        self.text_before(row, col)
    }

    /// The number of the cursor's row.
    pub(crate) fn cursor_row(&self) -> u64 {
        self.first_row + u64::from(self.emulator().cursor_position().0)
    }

    /// The number of the top row.
    pub(crate) fn first_row(&self) -> u64 {
        self.first_row
    }

    pub(crate) fn height(&self) -> u16 {
        self.emulator().size().0.get()
    }

    /// Whether the program draws the screen as a whole instead of writing line by line. Then the cursor position means
    /// nothing.
    pub(crate) fn is_drawn(&self) -> bool {
        let emulator = self.emulator();
        let (cursor, _) = emulator.cursor_position();
        let has_rows_below = || (cursor + 1..self.height()).any(|row| !self.is_row_empty(row));
        emulator.alternate_screen() || emulator.hide_cursor() || has_rows_below()
    }

    /// Whether the screen is empty with the cursor at the top, as after a clear.
    pub(crate) fn is_cleared(&self) -> bool {
        self.emulator().cursor_position() == (0, 0) && (0..self.height()).all(|row| self.is_row_empty(row))
    }

    /// The last lines that are not empty, to explain a failure.
    pub(crate) fn last_lines(&self, max: usize) -> Vec<String> {
        let mut lines: Vec<String> =
            self.rows().into_iter().map(|row| row.text).filter(|text| !text.trim().is_empty()).collect();
        lines.drain(..lines.len().saturating_sub(max));
        lines
    }

    fn is_row_empty(&self, row: u16) -> bool {
        let is_blank = |cell: &vt100::Cell| cell.contents().trim_end().is_empty();
        (0..self.emulator().size().1.get()).all(|col| self.emulator().cell(row, col).is_none_or(is_blank))
    }

    fn text_before(&self, row: u16, col: u16) -> String {
        let emulator = self.emulator();
        let mut text = String::new();
        for col in 0..emulator.size().1.get().min(col) {
            match emulator.cell(row, col) {
                Some(cell) if cell.is_wide_continuation() => {}
                Some(cell) if cell.has_contents() => text.push_str(cell.contents()),
                _ => text.push(' '),
            }
        }
        text
    }
}

/// The length of the first piece of output: up to the end of a line, or one escape sequence.
fn first_piece_len(output: &[u8]) -> usize {
    let until = |from: usize, ends: fn(u8) -> bool| {
        output.iter().skip(from).position(|byte| ends(*byte)).map(|at| at + from)
    };
    let end = match output {
        [0x1b, b'[', ..] => until(2, |byte| (0x40..=0x7e).contains(&byte)).map(|at| at + 1),
        _ => until(0, |byte| byte == b'\n').map(|at| at + 1),
    };
    let command = until(1, |byte| byte == 0x1b).unwrap_or(output.len());
    end.unwrap_or(output.len()).min(command)
}

impl ScreenCallbacks {
    fn queue_reply(&mut self, reply: std::fmt::Arguments<'_>) {
        if self.replies.len() < REPLIES_MAX {
            self.replies.extend_from_slice(reply.to_string().as_bytes());
        }
    }
}

impl vt100::Callbacks for ScreenCallbacks {
    fn unhandled_csi(
        &mut self,
        screen: &mut vt100::Screen,
        first: Option<u8>,
        second: Option<u8>,
        params: &[&[u16]],
        command: char,
    ) {
        let param = params.first().and_then(|param| param.first()).copied().unwrap_or_default();
        let ((rows, cols), (row, col)) = (screen.size(), screen.cursor_position());
        // A cursor past the last column is still in its row.
        let (row, col) = (row + 1, (col + 1).min(cols.get()));
        match (first, second, command, param) {
            // Status report, and cursor position.
            (None, None, 'n', 5) => self.queue_reply(format_args!("\x1b[0n")),
            (None, None, 'n', 6) => self.queue_reply(format_args!("\x1b[{row};{col}R")),
            (Some(b'?'), None, 'n', 6) => self.queue_reply(format_args!("\x1b[?{row};{col}R")),
            // Device attributes: a VT220 with colours, as most terminals report.
            (None, None, 'c', 0) => self.queue_reply(format_args!("\x1b[?62;22c")),
            (Some(b'>'), None, 'c', 0) => self.queue_reply(format_args!("\x1b[>1;10;0c")),
            // Mode queries: every mode is reported as not recognised.
            (Some(b'?'), Some(b'$'), 'p', mode) => self.queue_reply(format_args!("\x1b[?{mode};0$y")),
            // The size in characters.
            (None, None, 't', 18) => self.queue_reply(format_args!("\x1b[8;{rows};{cols}t")),
            _ => {}
        }
    }

    fn unhandled_osc(&mut self, _: &mut vt100::Screen, params: &[&[u8]]) {
        // Colour queries: white on black, so that a program that cares finds a dark background.
        match params {
            [b"10", b"?"] => self.queue_reply(format_args!("\x1b]10;rgb:ffff/ffff/ffff\x1b\\")),
            [b"11", b"?"] => self.queue_reply(format_args!("\x1b]11;rgb:0000/0000/0000\x1b\\")),
            _ => {}
        }
    }

    fn on_scroll(&mut self, contents: RowContents<'_>, alternate_screen: bool) {
        if alternate_screen {
            return;
        }
        let (mut text, mut second_copy) = (String::new(), String::new());
        let mut state = BasicFormattedCaptureState::new();
        // Writing to a string cannot fail. The row is written twice: the second copy begins with a newline unless the
        // row continues.
        let _written = contents.write_formatted_basic(&mut text, &mut state);
        let _written = contents.write_formatted_basic(&mut second_copy, &mut state);
        let mut plain = String::new();
        for piece in basic_formatted_to_plain(&text) {
            let _written = plain.write_str(piece);
        }
        if self.scrolled_rows.len() >= SCROLLED_MAX {
            self.scrolled_rows.drain(..SCROLLED_MAX / 2);
        }
        self.scrolled_rows.push(ScreenRow::new(plain, !second_copy.starts_with('\n')));
        self.scrolled_count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_screen(cols: u16, rows: u16) -> TerminalScreen {
        TerminalScreen::new(TerminalSize::clamped(cols, rows))
    }

    fn feed_and_read(screen: &mut TerminalScreen, output: &str) -> Vec<String> {
        screen.feed(output.as_bytes(), |_| {});
        screen.rows().into_iter().map(|row| row.text).collect()
    }

    #[test]
    fn terminal_queries_of_programs_are_answered() {
        let mut screen = new_screen(80, 24);
        for (query, answer) in [
            ("ab\r\n12345\x1b[6n", "\x1b[2;6R"),
            ("\x1b[5n", "\x1b[0n"),
            ("\x1b[c", "\x1b[?62;22c"),
            ("\x1b[0c", "\x1b[?62;22c"),
            ("\x1b[>c", "\x1b[>1;10;0c"),
            ("\x1b[?2026$p", "\x1b[?2026;0$y"),
            ("\x1b[18t", "\x1b[8;24;80t"),
            ("\x1b]11;?\x07", "\x1b]11;rgb:0000/0000/0000\x1b\\"),
            ("\x1b]10;?\x1b\\", "\x1b]10;rgb:ffff/ffff/ffff\x1b\\"),
            ("\x1b[?25h plain \x1b[1mbold\x1b[m", ""),
        ] {
            screen.feed(query.as_bytes(), |_| {});
            assert_eq!(String::from_utf8(screen.take_replies()).unwrap(), answer, "{query:?}");
        }
        for _ in 0..100_000 {
            screen.feed(b"\x1b[6n", |_| {});
        }
        assert!(screen.take_replies().len() < REPLIES_MAX + 32);
    }

    #[test]
    fn rows_keep_their_numbers_when_they_scroll_off_and_when_the_screen_grows() {
        let mut screen = new_screen(4, 2);
        feed_and_read(&mut screen, "a\r\nbbbbbb\r\nc");
        let row = |text: &str, wrapped| ScreenRow { text: text.to_owned(), wrapped };
        assert_eq!(screen.take_scrolled_rows(), [(0, row("a", false)), (1, row("bbbb", true))]);
        assert_eq!((screen.first_row(), screen.cursor_row()), (2, 3));
        assert_eq!(screen.row(0).text, "bb");
        screen.resize(TerminalSize::clamped(4, 3));
        assert_eq!((screen.first_row(), screen.cursor_row()), (2, 3), "it grows at its bottom");
        feed_and_read(&mut screen, "\r\nd");
        assert_eq!((screen.take_scrolled_rows(), screen.cursor_row()), (vec![], 4));
        screen.resize(TerminalSize::clamped(4, 1));
        assert_eq!(screen.take_scrolled_rows(), [(2, row("bb", false)), (3, row("c", false))]);
        assert_eq!(screen.cursor_row(), 4);
    }

    #[test]
    fn line_output_is_distinguished_from_a_drawn_screen() {
        let mut screen = new_screen(20, 5);
        feed_and_read(&mut screen, "one\r\ntwo\r\n$ ");
        assert!(!screen.is_drawn());
        assert_eq!(screen.before_cursor(), "$ ");
        feed_and_read(&mut screen, "\x1b[1;1H");
        assert!(screen.is_drawn(), "something stands below the cursor");
        feed_and_read(&mut screen, "\x1b[2J");
        assert!(screen.is_cleared() && !screen.is_drawn());
        feed_and_read(&mut screen, "\x1b[?1049h");
        assert!(screen.is_drawn(), "the whole screen is the program's");
    }

    #[test]
    fn the_screen_is_observed_after_every_line_and_escape_sequence() {
        let mut screen = new_screen(20, 5);
        let mut seen = Vec::new();
        screen.feed(b"$ ls\r\nx\r\n\x1b[1m$ \x1b[m", |screen| seen.push(screen.before_cursor()));
        assert_eq!(seen, ["", "", "", "$ ", "$ "]);
    }

    #[test]
    fn no_size_is_too_small_or_too_large() {
        let TerminalSize { cols, rows } = TerminalSize::clamped(0, u16::MAX);
        assert_eq!((cols.get(), rows.get()), (1, SIDE_MAX));
    }
}
