//! All printing. Data goes to stdout and everything else to stderr; colour and the spinner appear only on a terminal.
//! No other file may write to the standard streams.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde::Serialize;

use crate::failure::{CliExitCode, CliFailure};
use crate::render::style::{self, RESET, TextStyle};
use crate::render::text;

/// Clears the spinner's line.
const CLEAR_LINE: &str = "\r\x1b[2K";

/// Stdout and stderr, and what is known about them. Clones share the state of the terminal.
#[derive(Debug, Clone)]
pub(crate) struct CliOutput {
    /// `--json`: print one JSON value, or one per line.
    pub(crate) json: bool,
    /// Whether stdout is a terminal.
    pub(crate) out_tty: bool,
    /// Whether stderr is a terminal.
    pub(crate) err_tty: bool,
    /// No colour even on a terminal.
    no_colour: bool,
    /// Whether the spinner is on the screen and must be cleared before anything else is printed.
    spinning: Arc<AtomicBool>,
    /// Whether the cursor is in the middle of a line. The spinner would erase that line's text.
    mid_line: Arc<AtomicBool>,
    /// The widths of the lines that a [`LiveDisplay`] has drawn last and will draw over. Anything else that is printed
    /// erases them first, and the next draw puts them below it.
    drawn: Arc<Mutex<Vec<usize>>>,
}

impl CliOutput {
    pub(crate) fn new(json: bool) -> Self {
        // https://no-color.org: set and not empty.
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            json,
            out_tty: io::stdout().is_terminal(),
            err_tty: io::stderr().is_terminal(),
            no_colour,
            spinning: Arc::default(),
            mid_line: Arc::default(),
            drawn: Arc::default(),
        }
    }

    pub(crate) fn out_style(&self) -> TextStyle {
        TextStyle::new(self.out_tty && !self.no_colour)
    }

    pub(crate) fn err_style(&self) -> TextStyle {
        TextStyle::new(self.err_tty && !self.no_colour)
    }

    /// Columns of the terminal on stdout. `None` if stdout is not a terminal: then nothing is truncated.
    pub(crate) fn width(&self) -> Option<usize> {
        let size = rustix::termios::tcgetwinsize(io::stdout()).ok().filter(|_| self.out_tty)?;
        (size.ws_col > 0).then_some(usize::from(size.ws_col))
    }

    /// Columns of the terminal on stderr. `None` if stderr is not a terminal.
    pub(crate) fn err_width(&self) -> Option<usize> {
        let size = rustix::termios::tcgetwinsize(io::stderr()).ok().filter(|_| self.err_tty)?;
        (size.ws_col > 0).then_some(usize::from(size.ws_col))
    }

    /// Prints data to stdout as it is.
    pub(crate) fn print_data(&self, text: &str) -> io::Result<()> {
        self.clear_spinner();
        self.erase_display();
        self.track_line_end(text, self.out_tty);
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Writes bytes to stdout without tracking the spinner or the line state.
    pub(crate) fn print_raw(&self, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    pub(crate) fn print_line(&self, text: &str) -> io::Result<()> {
        self.print_data(&format!("{text}\n"))
    }

    /// Prints one JSON value on its own line.
    pub(crate) fn print_json(&self, value: &impl Serialize) -> Result<(), CliFailure> {
        let text = serde_json::to_string(value).map_err(anyhow::Error::from)?;
        Ok(self.print_line(&text)?)
    }

    /// Prints to stderr as it is. Errors are ignored: a closed stderr must not fail the verb.
    pub(crate) fn print_stderr(&self, text: &str) {
        self.clear_spinner();
        if self.err_tty {
            self.erase_display();
        }
        self.track_line_end(text, self.err_tty);
        let mut err = io::stderr().lock();
        let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
    }

    /// Prints one dimmed line to stderr, for people. It may quote an agent, so the terminal obeys nothing in it.
    pub(crate) fn print_note(&self, text: &str) {
        self.end_open_line();
        self.print_stderr(&format!("{}\n", self.err_style().dim(&text::show_hidden(text))));
    }

    /// Notes that the user pressed Enter, so the cursor is at the start of a line.
    pub(crate) fn line_was_typed(&self) {
        self.mid_line.store(false, Ordering::Relaxed);
    }

    /// Prints why the verb failed, as JSON with `--json`. A broken pipe prints nothing. The daemon's message may quote an
    /// agent, so the terminal obeys nothing in it.
    pub(crate) fn print_failure(&self, failure: &CliFailure) {
        if failure.exit_code() == CliExitCode::Success {
            return;
        }
        self.end_open_line();
        if self.json {
            let text = serde_json::to_string(&failure.error_body()).unwrap_or_else(|error| error.to_string());
            self.print_stderr(&format!("{text}\n"));
        } else {
            self.print_stderr(&format_failure(failure, self.err_style()));
        }
    }

    /// Shows one line that the next output replaces. Does nothing if stderr is not a terminal or the cursor is in the
    /// middle of a line.
    pub(crate) fn show_spinner(&self, text: &str) {
        if !self.err_tty || self.mid_line.load(Ordering::Relaxed) {
            return;
        }
        let width = rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| usize::from(size.ws_col));
        let text = text::truncate(text, width.saturating_sub(1).max(20));
        let line = format!("{CLEAR_LINE}{}", self.err_style().dim(&text));
        let mut err = io::stderr().lock();
        let _ = err.write_all(line.as_bytes()).and_then(|()| err.flush());
        self.spinning.store(true, Ordering::Relaxed);
    }

    pub(crate) fn clear_spinner(&self) {
        if self.spinning.swap(false, Ordering::Relaxed) {
            let mut err = io::stderr().lock();
            let _ = err.write_all(CLEAR_LINE.as_bytes()).and_then(|()| err.flush());
        }
    }

    /// Removes what a [`LiveDisplay`] has drawn.
    fn erase_display(&self) {
        let drawn = std::mem::take(&mut *self.drawn.lock());
        if !drawn.is_empty() {
            let mut out = io::stdout().lock();
            let erase = format!("{}\x1b[J", move_above(&drawn, terminal_size().0));
            let _ = out.write_all(erase.as_bytes()).and_then(|()| out.flush());
        }
    }

    /// Starts a new line on the terminal if the cursor is in the middle of one. The newline goes to stderr, because it
    /// is not data.
    fn end_open_line(&self) {
        if self.err_tty && self.mid_line.load(Ordering::Relaxed) {
            self.print_stderr("\n");
        }
    }

    /// Records whether `text` leaves the cursor in the middle of a line.
    fn track_line_end(&self, text: &str, on_tty: bool) {
        if on_tty && !text.is_empty() {
            let open = !text.trim_end_matches(RESET).ends_with('\n');
            self.mid_line.store(open, Ordering::Relaxed);
        }
    }
}

fn format_failure(failure: &CliFailure, style: TextStyle) -> String {
    format!("{} {}\n", style.red("qd:"), text::show_hidden(&failure.to_string()))
}

/// A block of lines on the terminal that is redrawn in place.
#[derive(Debug)]
pub(crate) struct LiveDisplay {
    out: CliOutput,
    /// Without a terminal nothing is drawn.
    tty: bool,
}

impl LiveDisplay {
    pub(crate) fn new(out: &CliOutput) -> Self {
        Self { out: out.clone(), tty: out.out_tty && !out.json }
    }

    /// Columns and rows of the terminal.
    pub(crate) fn size(&self) -> (usize, usize) {
        terminal_size()
    }

    /// Draws these lines over the previous ones.
    pub(crate) fn draw(&self, lines: &[String]) -> io::Result<()> {
        if !self.tty {
            return Ok(());
        }
        let mut drawn = self.out.drawn.lock();
        let mut screen = move_above(&drawn, terminal_size().0);
        for line in lines {
            // Overwriting line by line instead of clearing first avoids flicker.
            screen.push_str(&format!("{line}\x1b[K\n"));
        }
        screen.push_str("\x1b[J");
        *drawn = lines.iter().map(|line| style::visible_width(line)).collect();
        self.out.print_raw(screen.as_bytes())
    }

    /// Leaves the drawn lines on the screen; the next output goes below them.
    pub(crate) fn finish_drawing(&self) {
        self.out.drawn.lock().clear();
    }
}

fn terminal_size() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            (usize::from(size.ws_col), usize::from(size.ws_row))
        }
        _ => (80, 24),
    }
}

/// Moves the cursor to the first of the drawn lines. If the terminal has become narrower since, a line takes several
/// rows.
fn move_above(drawn: &[usize], columns: usize) -> String {
    let rows: usize = drawn.iter().map(|width| width.div_ceil(columns).max(1)).sum();
    if rows == 0 { String::new() } else { format!("\x1b[{rows}A\r") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_were_wrapped_by_a_narrower_terminal_are_all_drawn_over() {
        assert_eq!(move_above(&[], 80), "");
        assert_eq!(move_above(&[70, 0, 80], 80), "\x1b[3A\r");
        assert_eq!(move_above(&[70, 0, 80], 40), "\x1b[5A\r");
    }

    #[test]
    fn a_failure_that_quotes_an_agent_cannot_control_the_terminal() {
        let quoted =
            CliFailure::Usage("the value must be one of: a\x1b]0;x\x07, \u{202e}b\r\n  or c".to_owned());
        let shown = format_failure(&quoted, TextStyle::new(true));
        assert_eq!(shown, "\x1b[31mqd:\x1b[0m the value must be one of: a^[]0;x^G, \\u{202e}b^M\n  or c\n");
    }
}
