//! The only place that prints. Data goes to stdout and everything else to stderr; colour and the spinner appear on a
//! terminal only. No other file may touch the standard streams for writing.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

use crate::failure::{CliExitCode, CliFailure};
use crate::render::style::{RESET, TextStyle};

/// Clears the line that the spinner stands on.
const CLEAR_LINE: &str = "\r\x1b[2K";

/// The two streams and what is known about them. Clones share what stands on the terminal.
#[derive(Debug, Clone)]
pub(crate) struct CliOutput {
    /// Whether programs read us: one JSON value, or one per line.
    pub(crate) json: bool,
    /// Whether stdout is a terminal.
    pub(crate) out_tty: bool,
    /// Whether stderr is a terminal.
    pub(crate) err_tty: bool,
    /// Whether colour is unwanted even there.
    no_colour: bool,
    /// Whether the spinner's line stands on the terminal and must be cleared before anything else.
    spinning: Arc<AtomicBool>,
    /// Whether the terminal's last line is unfinished: the spinner would clear its words.
    mid_line: Arc<AtomicBool>,
}

impl CliOutput {
    /// Looks at the streams once.
    pub(crate) fn new(json: bool) -> Self {
        // https://no-color.org: present and not empty.
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            json,
            out_tty: io::stdout().is_terminal(),
            err_tty: io::stderr().is_terminal(),
            no_colour,
            spinning: Arc::default(),
            mid_line: Arc::default(),
        }
    }

    /// How to colour what goes to stdout.
    pub(crate) fn out_style(&self) -> TextStyle {
        TextStyle::new(self.out_tty && !self.no_colour)
    }

    /// How to colour what goes to stderr.
    pub(crate) fn err_style(&self) -> TextStyle {
        TextStyle::new(self.err_tty && !self.no_colour)
    }

    /// Columns of the terminal on stdout; none if it is not one, and nothing need be cut.
    pub(crate) fn width(&self) -> Option<usize> {
        if !self.out_tty {
            return None;
        }
        let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
        (size.ws_col > 0).then_some(usize::from(size.ws_col))
    }

    /// Data, as it is.
    pub(crate) fn print_data(&self, text: &str) -> io::Result<()> {
        self.clear_spinner();
        self.track_line_end(text, self.out_tty);
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// What a terminal is to show, as it is.
    pub(crate) fn print_raw(&self, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    /// One line of data.
    pub(crate) fn print_line(&self, text: &str) -> io::Result<()> {
        self.print_data(&format!("{text}\n"))
    }

    /// One JSON value on a line of its own.
    pub(crate) fn print_json(&self, value: &impl Serialize) -> Result<(), CliFailure> {
        let text = serde_json::to_string(value).map_err(anyhow::Error::from)?;
        Ok(self.print_line(&text)?)
    }

    /// Something beside the data, as it is. That nobody reads stderr is nobody's failure.
    pub(crate) fn print_stderr(&self, text: &str) {
        self.clear_spinner();
        self.track_line_end(text, self.err_tty);
        let mut err = io::stderr().lock();
        let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
    }

    /// One line for people, beside the data.
    pub(crate) fn print_note(&self, text: &str) {
        self.end_open_line();
        self.print_stderr(&format!("{}\n", self.err_style().dim(text)));
    }

    /// A person has ended the terminal's line by typing.
    pub(crate) fn line_was_typed(&self) {
        self.mid_line.store(false, Ordering::Relaxed);
    }

    /// The last word of a verb that failed.
    pub(crate) fn print_failure(&self, failure: &CliFailure) {
        if failure.exit_code() == CliExitCode::Success {
            return;
        }
        self.end_open_line();
        if self.json {
            let text = serde_json::to_string(&failure.error_body()).unwrap_or_else(|error| error.to_string());
            self.print_stderr(&format!("{text}\n"));
        } else {
            self.print_stderr(&format!("{} {failure}\n", self.err_style().red("qd:")));
        }
    }

    /// Puts one line on the terminal that the next output replaces. Only for a stderr that is a terminal, and where
    /// no line is unfinished.
    pub(crate) fn show_spinner(&self, text: &str) {
        if !self.err_tty || self.mid_line.load(Ordering::Relaxed) {
            return;
        }
        let width = rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| usize::from(size.ws_col));
        let text = crate::render::text::truncate(text, width.saturating_sub(1).max(20));
        let line = format!("{CLEAR_LINE}{}", self.err_style().dim(&text));
        let mut err = io::stderr().lock();
        let _ = err.write_all(line.as_bytes()).and_then(|()| err.flush());
        self.spinning.store(true, Ordering::Relaxed);
    }

    /// Takes the spinner away.
    pub(crate) fn clear_spinner(&self) {
        if self.spinning.swap(false, Ordering::Relaxed) {
            let mut err = io::stderr().lock();
            let _ = err.write_all(CLEAR_LINE.as_bytes()).and_then(|()| err.flush());
        }
    }

    /// Leaves an unfinished line of the terminal. The break is no data.
    fn end_open_line(&self) {
        if self.err_tty && self.mid_line.load(Ordering::Relaxed) {
            self.print_stderr("\n");
        }
    }

    /// Keeps whether what is about to be printed leaves a line of the terminal unfinished.
    fn track_line_end(&self, text: &str, on_tty: bool) {
        if on_tty && !text.is_empty() {
            let open = !text.trim_end_matches(RESET).ends_with('\n');
            self.mid_line.store(open, Ordering::Relaxed);
        }
    }
}

/// A picture on the terminal that is drawn over and over, until something else has to be said.
#[derive(Debug)]
pub(crate) struct LiveDisplay {
    /// Lines that stand there now.
    drawn_lines: usize,
    /// Whether there is a terminal to draw on.
    tty: bool,
}

impl LiveDisplay {
    pub(crate) fn new(out: &CliOutput) -> Self {
        Self { drawn_lines: 0, tty: out.out_tty && !out.json }
    }

    /// Columns and rows.
    pub(crate) fn size(&self) -> (usize, usize) {
        match rustix::termios::tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (usize::from(size.ws_col), usize::from(size.ws_row))
            }
            _ => (80, 24),
        }
    }

    /// Puts these lines where the last ones stood.
    pub(crate) fn draw(&mut self, out: &CliOutput, lines: &[String]) -> io::Result<()> {
        if !self.tty {
            return Ok(());
        }
        let mut picture = String::new();
        if self.drawn_lines > 0 {
            picture.push_str(&format!("\x1b[{}A\r", self.drawn_lines));
        }
        for line in lines {
            // Each line replaces what stood there, so nothing flickers.
            picture.push_str(&format!("{line}\x1b[K\n"));
        }
        picture.push_str("\x1b[J");
        self.drawn_lines = lines.len();
        out.print_raw(picture.as_bytes())
    }

    /// Lets the picture stand and goes on below it.
    pub(crate) fn finish_drawing(&mut self) {
        self.drawn_lines = 0;
    }
}
