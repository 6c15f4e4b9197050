//! All printing. Data goes to stdout and everything else to stderr; colour and the spinner appear only on a terminal.
//! No other file may write to the standard streams.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde::Serialize;

use crate::failure::{CliExitCode, CliFailure};
use crate::render::drawn_lines::{DrawnLines, rows_of};
use crate::render::style::{self, RESET, TextStyle};
use crate::render::text;
use crate::render::visible_text::{show_hidden, show_prose_line, show_rendered};
use crate::terminal_echo::TerminalEcho;

/// Clears the line of the cursor.
const CLEAR_LINE: &str = "\r\x1b[2K";

/// Columns and rows of a terminal that does not say how large it is.
const DEFAULT_SIZE: (usize, usize) = (80, 24);

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
    /// The columns of the spinner that is on the screen and must be cleared before anything else is printed; 0 if there
    /// is none.
    spinner_width: Arc<AtomicUsize>,
    /// Whether the cursor is in the middle of a line. The spinner would erase that line's text.
    mid_line: Arc<AtomicBool>,
    /// Whether the open line is a prompt that nobody has answered yet. Other output goes below it.
    prompt_open: Arc<AtomicBool>,
    /// Whether a note has ended a line that the transcript believes to be open. Its next newline would leave a blank line.
    line_ended: Arc<AtomicBool>,
    /// The lines of a [`LiveDisplay`]. Anything else that is printed erases them first, and the next draw puts them below
    /// it.
    drawn: Arc<Mutex<DrawnLines>>,
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
            spinner_width: Arc::default(),
            mid_line: Arc::default(),
            prompt_open: Arc::default(),
            line_ended: Arc::default(),
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

    /// Prints rendered text to stdout. Whatever its renderer let through, the terminal obeys and hides nothing of it but
    /// our own colours.
    pub(crate) fn print_data(&self, text: &str) -> io::Result<()> {
        self.print_exact(&show_rendered(text))
    }

    /// Prints to stdout as it is: JSON, and what must stay exact because a program reads it.
    pub(crate) fn print_exact(&self, text: &str) -> io::Result<()> {
        self.clear_spinner();
        self.erase_display();
        let text = self.below_open_line(text, self.out_tty);
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
        Ok(self.print_exact(&format!("{text}\n"))?)
    }

    /// Prints rendered text to stderr. Errors are ignored: a closed stderr must not fail the verb.
    pub(crate) fn print_stderr(&self, text: &str) {
        self.print_exact_to_stderr(&show_rendered(text));
    }

    fn print_exact_to_stderr(&self, text: &str) {
        self.clear_spinner();
        if self.err_tty {
            self.erase_display();
        }
        let text = self.below_open_line(text, self.err_tty);
        self.track_line_end(text, self.err_tty);
        let mut err = io::stderr().lock();
        let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
    }

    /// Prints one dimmed line to stderr, for people. It may quote an agent, so the terminal obeys nothing in it.
    pub(crate) fn print_note(&self, text: &str) {
        let ended = self.end_open_line();
        self.print_stderr(&format!("{}\n", self.err_style().dim(&show_hidden(text))));
        self.line_ended.store(ended, Ordering::Relaxed);
    }

    /// Asks the user for a line of input. Whatever is printed before it is typed begins on a line of its own.
    pub(crate) fn print_prompt(&self, text: &str) {
        self.print_stderr(text);
        self.prompt_open.store(self.err_tty, Ordering::Relaxed);
    }

    /// Notes that the user pressed Enter, so the cursor is at the start of a line.
    pub(crate) fn line_was_typed(&self) {
        self.mid_line.store(false, Ordering::Relaxed);
        self.prompt_open.store(false, Ordering::Relaxed);
    }

    /// Prints why the verb failed, as JSON with `--json`. A broken pipe prints nothing. The daemon's message may quote an
    /// agent, so the terminal obeys nothing in it.
    pub(crate) fn print_failure(&self, failure: &CliFailure) {
        if failure.exit_code() == CliExitCode::Success {
            return;
        }
        let _ = self.end_open_line();
        if self.json {
            let text = serde_json::to_string(&failure.error_body()).unwrap_or_else(|error| error.to_string());
            self.print_exact_to_stderr(&format!("{text}\n"));
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
        let width = self.err_width().unwrap_or(DEFAULT_SIZE.0);
        let text = text::truncate(&show_prose_line(text), width.saturating_sub(1));
        let before = self.spinner_width.swap(text::display_width(&text).max(1), Ordering::Relaxed);
        let line = format!("{}{}", clear_spinner_rows(before, width), self.err_style().dim(&text));
        let mut err = io::stderr().lock();
        let _ = err.write_all(line.as_bytes()).and_then(|()| err.flush());
    }

    pub(crate) fn clear_spinner(&self) {
        let shown = self.spinner_width.swap(0, Ordering::Relaxed);
        if shown > 0 {
            let width = self.err_width().unwrap_or(DEFAULT_SIZE.0);
            let mut err = io::stderr().lock();
            let _ = err.write_all(clear_spinner_rows(shown, width).as_bytes()).and_then(|()| err.flush());
        }
    }

    /// Removes what a [`LiveDisplay`] has drawn.
    fn erase_display(&self) {
        let mut drawn = std::mem::take(&mut *self.drawn.lock());
        if !drawn.is_empty() {
            let mut out = io::stdout().lock();
            let erase = format!("{}\x1b[J", drawn.move_to_first_row(terminal_size()));
            let _ = out.write_all(erase.as_bytes()).and_then(|()| out.flush());
        }
    }

    /// Starts a new line on the terminal if the cursor is in the middle of one. The newline goes to stderr, because it
    /// is not data. True if the line belongs to the transcript, false if it is a prompt or no line is open.
    fn end_open_line(&self) -> bool {
        let is_prompt = self.prompt_open.swap(false, Ordering::Relaxed);
        let is_open = self.err_tty && self.mid_line.load(Ordering::Relaxed);
        if is_open {
            self.print_stderr("\n");
        }
        is_open && !is_prompt
    }

    /// Starts a new line if a prompt waits on the terminal.
    fn end_prompt(&self) {
        if self.prompt_open.swap(false, Ordering::Relaxed) {
            let mut err = io::stderr().lock();
            let _ = err.write_all(b"\n").and_then(|()| err.flush());
        }
    }

    /// What is left to print of a text, after a prompt that waits on the terminal got a line of its own.
    fn below_open_line<'t>(&self, text: &'t str, on_tty: bool) -> &'t str {
        if !on_tty || text.is_empty() {
            return text;
        }
        self.end_prompt();
        match self.line_ended.swap(false, Ordering::Relaxed) {
            true => text.strip_prefix('\n').unwrap_or(text),
            false => text,
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
    format!("{} {}\n", style.red("qd:"), show_hidden(&failure.to_string()))
}

/// A block of lines on the terminal that is redrawn in place.
#[derive(Debug)]
pub(crate) struct LiveDisplay {
    out: CliOutput,
    /// Without a terminal nothing is drawn.
    tty: bool,
    /// Off while lines are drawn over.
    echo: TerminalEcho,
}

impl LiveDisplay {
    pub(crate) fn new(out: &CliOutput) -> Self {
        Self { out: out.clone(), tty: out.out_tty && !out.json, echo: TerminalEcho::default() }
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
        self.out.end_prompt();
        self.echo.turn_off();
        let mut drawn = self.out.drawn.lock();
        let mut screen = drawn.move_to_first_row(terminal_size());
        for line in lines {
            // Overwriting line by line instead of clearing first avoids flicker.
            let line = show_rendered(line);
            screen.push_str(&format!("{line}\x1b[K\n"));
            drawn.push(style::visible_width(&line));
        }
        screen.push_str("\x1b[J");
        self.out.print_raw(screen.as_bytes())
    }

    /// Leaves the drawn lines on the screen; the next output goes below them.
    pub(crate) fn finish_drawing(&self) {
        self.echo.restore();
        self.out.drawn.lock().clear();
    }
}

fn terminal_size() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            (usize::from(size.ws_col), usize::from(size.ws_row))
        }
        _ => DEFAULT_SIZE,
    }
}

/// Clears a spinner of so many columns. If the terminal has become narrower since, it takes several rows, and the cursor
/// is in the last of them.
fn clear_spinner_rows(spinner: usize, columns: usize) -> String {
    match rows_of(spinner, columns) - 1 {
        0 => CLEAR_LINE.to_owned(),
        above => format!("\x1b[{above}A\r\x1b[J"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spinner_that_a_narrower_terminal_has_wrapped_is_cleared_whole() {
        assert_eq!(clear_spinner_rows(70, 80), CLEAR_LINE);
        assert_eq!(clear_spinner_rows(80, 80), CLEAR_LINE);
        assert_eq!(clear_spinner_rows(70, 30), "\x1b[2A\r\x1b[J");
    }

    #[test]
    fn a_failure_that_quotes_an_agent_cannot_control_the_terminal() {
        let quoted =
            CliFailure::Usage("the value must be one of: a\x1b]0;x\x07, \u{202e}b\r\n  or c".to_owned());
        let shown = format_failure(&quoted, TextStyle::new(true));
        assert_eq!(shown, "\x1b[31mqd:\x1b[0m the value must be one of: a^[]0;x^G, \\u{202e}b^M\n  or c\n");
    }
}
