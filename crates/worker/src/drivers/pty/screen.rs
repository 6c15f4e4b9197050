//! What a terminal shows. It is fed all that the program writes, answers what programs ask their terminal and wait for,
//! and counts the lines that leave at the top, so that each line has a number for good. It decides nothing.

use std::fmt::Write as _;
use std::num::NonZeroU16;

use vt100::capture::{BasicFormattedCaptureState, RowContents, basic_formatted_to_plain};

/// Answers that may wait; a program that asks for more than it reads gets none.
const REPLIES_MAX: usize = 16 << 10;
/// Lines that may have left the screen since they were last taken; the oldest are dropped on top of that. One piece of
/// output has never as many.
const SCROLLED_MAX: usize = 64 << 10;
/// The largest terminal, either way: its memory is ours.
const SIDE_MAX: u16 = 1000;

/// How large a terminal is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TerminalSize {
    pub(crate) cols: NonZeroU16,
    pub(crate) rows: NonZeroU16,
}

impl TerminalSize {
    /// The nearest that can be.
    pub(crate) fn clamped(cols: u16, rows: u16) -> Self {
        let side = |wanted: u16| NonZeroU16::new(wanted.min(SIDE_MAX)).unwrap_or(NonZeroU16::MIN);
        Self { cols: side(cols), rows: side(rows) }
    }
}

/// One row of the screen, or one that has left it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ScreenRow {
    /// Without the spaces at its end, unless the line goes on.
    pub(crate) text: String,
    /// Whether the line goes on in the next row.
    pub(crate) wrapped: bool,
}

impl ScreenRow {
    fn new(text: String, wrapped: bool) -> Self {
        let text = if wrapped { text } else { text.trim_end().to_owned() };
        Self { text, wrapped }
    }
}

/// A screen.
pub(crate) struct TerminalScreen {
    parser: vt100::Parser<ScreenCallbacks>,
    /// The number of the first row: how many have left before it.
    first_row: u64,
}

/// What the screen cannot do itself.
#[derive(Default)]
struct ScreenCallbacks {
    replies: Vec<u8>,
    scrolled_rows: Vec<ScreenRow>,
    /// How many have left, also those that are dropped.
    scrolled_count: u64,
}

impl TerminalScreen {
    /// An empty one.
    pub(crate) fn new(TerminalSize { cols, rows }: TerminalSize) -> Self {
        // Nothing is kept of what leaves the screen: it is taken at once.
        let parser = vt100::Parser::new_with_callbacks(rows, cols, 0, ScreenCallbacks::default());
        Self { parser, first_row: 0 }
    }

    /// Shows what was written. `look` sees the screen wherever a line ends or something is done to the screen as a
    /// whole: between two looks there is no more than a piece of a line.
    pub(crate) fn feed(&mut self, output: &[u8], mut look: impl FnMut(&Self)) {
        let mut rest = output;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(first_piece_len(rest));
            self.parser.process(piece);
            self.first_row += std::mem::take(&mut self.parser.callbacks_mut().scrolled_count);
            look(self);
            rest = after;
        }
    }

    /// What the program asked its terminal, answered.
    pub(crate) fn take_replies(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.parser.callbacks_mut().replies)
    }

    /// The rows that have left since they were last taken, each with its number.
    pub(crate) fn take_scrolled_rows(&mut self) -> Vec<(u64, ScreenRow)> {
        let gone = std::mem::take(&mut self.parser.callbacks_mut().scrolled_rows);
        let first = self.first_row - gone.len() as u64;
        (first..).zip(gone).collect()
    }

    /// Makes it larger or smaller. A screen that grows does so at its bottom: what has left at the top has been taken.
    pub(crate) fn resize(&mut self, TerminalSize { cols, rows }: TerminalSize) {
        let (height, _) = self.parser.screen().size();
        self.parser.screen_mut().clear_scrollback();
        self.parser.set_size(rows, cols);
        self.first_row += std::mem::take(&mut self.parser.callbacks_mut().scrolled_count);
        if self.emulator().alternate_screen() {
            // Behind it the other one has grown at the top, by as many rows as have left it.
            self.first_row -= u64::from(rows.get().saturating_sub(height.get())).min(self.first_row);
        }
    }

    /// The screen itself.
    pub(crate) fn emulator(&self) -> &vt100::Screen {
        self.parser.screen()
    }

    /// All rows, from the top.
    pub(crate) fn rows(&self) -> Vec<ScreenRow> {
        (0..self.height()).map(|row| self.row(row)).collect()
    }

    /// One row; an empty one if there is none.
    pub(crate) fn row(&self, row: u16) -> ScreenRow {
        ScreenRow::new(self.text_before(row, u16::MAX), self.emulator().row_wrapped(row))
    }

    /// The row that the cursor stands in, up to the cursor.
    pub(crate) fn before_cursor(&self) -> String {
        let (row, col) = self.emulator().cursor_position();
        self.text_before(row, col)
    }

    /// The number of the row that the cursor stands in.
    pub(crate) fn cursor_row(&self) -> u64 {
        self.first_row + u64::from(self.emulator().cursor_position().0)
    }

    /// The number of the first row.
    pub(crate) fn first_row(&self) -> u64 {
        self.first_row
    }

    /// How many rows there are.
    pub(crate) fn height(&self) -> u16 {
        self.emulator().size().0.get()
    }

    /// Whether it is drawn as a whole, and not written line by line: then the cursor's place means nothing.
    pub(crate) fn is_drawn(&self) -> bool {
        let shown = self.emulator();
        let (cursor, _) = shown.cursor_position();
        let stands_below = || (cursor + 1..self.height()).any(|row| !self.is_row_empty(row));
        shown.alternate_screen() || shown.hide_cursor() || stands_below()
    }

    /// Whether it is empty with the cursor at its top, as after it was cleared.
    pub(crate) fn is_cleared(&self) -> bool {
        self.emulator().cursor_position() == (0, 0) && (0..self.height()).all(|row| self.is_row_empty(row))
    }

    /// The last lines that are not empty, for whoever asks what happened.
    pub(crate) fn last_lines(&self, most: usize) -> Vec<String> {
        let mut lines: Vec<String> =
            self.rows().into_iter().map(|row| row.text).filter(|text| !text.trim().is_empty()).collect();
        lines.drain(..lines.len().saturating_sub(most));
        lines
    }

    fn is_row_empty(&self, row: u16) -> bool {
        let is_blank = |cell: &vt100::Cell| cell.contents().trim_end().is_empty();
        (0..self.emulator().size().1.get()).all(|col| self.emulator().cell(row, col).is_none_or(is_blank))
    }

    fn text_before(&self, row: u16, col: u16) -> String {
        let shown = self.emulator();
        let mut text = String::new();
        for col in 0..shown.size().1.get().min(col) {
            match shown.cell(row, col) {
                Some(cell) if cell.is_wide_continuation() => {}
                Some(cell) if cell.has_contents() => text.push_str(cell.contents()),
                _ => text.push(' '),
            }
        }
        text
    }
}

/// The length of the first piece of output: up to the end of a line, or a command to the terminal by itself.
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
    fn queue_reply(&mut self, words: std::fmt::Arguments<'_>) {
        if self.replies.len() < REPLIES_MAX {
            self.replies.extend_from_slice(words.to_string().as_bytes());
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
        // A cursor that is about to leave its row is still in it.
        let (row, col) = (row + 1, (col + 1).min(cols.get()));
        match (first, second, command, param) {
            // Are you there, and where is the cursor?
            (None, None, 'n', 5) => self.queue_reply(format_args!("\x1b[0n")),
            (None, None, 'n', 6) => self.queue_reply(format_args!("\x1b[{row};{col}R")),
            (Some(b'?'), None, 'n', 6) => self.queue_reply(format_args!("\x1b[?{row};{col}R")),
            // What are you? A VT220 with colours, which is what most say.
            (None, None, 'c', 0) => self.queue_reply(format_args!("\x1b[?62;22c")),
            (Some(b'>'), None, 'c', 0) => self.queue_reply(format_args!("\x1b[>1;10;0c")),
            // Do you know this mode? We say of none that we do.
            (Some(b'?'), Some(b'$'), 'p', mode) => self.queue_reply(format_args!("\x1b[?{mode};0$y")),
            // How large are you, in characters?
            (None, None, 't', 18) => self.queue_reply(format_args!("\x1b[8;{rows};{cols}t")),
            _ => {}
        }
    }

    fn unhandled_osc(&mut self, _: &mut vt100::Screen, params: &[&[u8]]) {
        // Which colours do you have? White on black, so that a program that cares finds a dark background.
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
        let (mut text, mut again) = (String::new(), String::new());
        let mut state = BasicFormattedCaptureState::new();
        // Writing to a string cannot fail. The second time there is a break before it, unless the row goes on.
        let _written = contents.write_formatted_basic(&mut text, &mut state);
        let _written = contents.write_formatted_basic(&mut again, &mut state);
        let mut plain = String::new();
        for piece in basic_formatted_to_plain(&text) {
            let _written = plain.write_str(piece);
        }
        if self.scrolled_rows.len() >= SCROLLED_MAX {
            self.scrolled_rows.drain(..SCROLLED_MAX / 2);
        }
        self.scrolled_rows.push(ScreenRow::new(plain, !again.starts_with('\n')));
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
    fn what_programs_ask_their_terminal_and_wait_for_is_answered() {
        let mut screen = new_screen(80, 24);
        for (asked, answer) in [
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
            screen.feed(asked.as_bytes(), |_| {});
            assert_eq!(String::from_utf8(screen.take_replies()).unwrap(), answer, "{asked:?}");
        }
        for _ in 0..100_000 {
            screen.feed(b"\x1b[6n", |_| {});
        }
        assert!(screen.take_replies().len() < REPLIES_MAX + 32);
    }

    #[test]
    fn rows_keep_their_numbers_when_they_leave_and_when_the_screen_grows() {
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
    fn what_is_written_line_by_line_is_told_from_what_is_drawn() {
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
    fn every_end_of_a_line_and_every_command_is_looked_at() {
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
