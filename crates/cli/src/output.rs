//! The only place that prints. Data goes to stdout and everything else to stderr; colour and the spinner appear on a
//! terminal only. No other file may touch the standard streams for writing.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

use crate::failure::{Exit, Failure};
use crate::render::style::{RESET, Style};

/// Clears the line that the spinner stands on.
const CLEAR_LINE: &str = "\r\x1b[2K";

/// The two streams and what is known about them. Clones share what stands on the terminal.
#[derive(Debug, Clone)]
pub(crate) struct Output {
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

impl Output {
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
    pub(crate) fn out_style(&self) -> Style {
        Style::new(self.out_tty && !self.no_colour)
    }

    /// How to colour what goes to stderr.
    pub(crate) fn err_style(&self) -> Style {
        Style::new(self.err_tty && !self.no_colour)
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
    pub(crate) fn data(&self, text: &str) -> io::Result<()> {
        self.clear_spinner();
        self.stands(text, self.out_tty);
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// What a terminal is to show, as it is.
    pub(crate) fn paint(&self, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    /// One line of data.
    pub(crate) fn line(&self, text: &str) -> io::Result<()> {
        self.data(&format!("{text}\n"))
    }

    /// One JSON value on a line of its own.
    pub(crate) fn value(&self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string(value).map_err(anyhow::Error::from)?;
        Ok(self.line(&text)?)
    }

    /// Something beside the data, as it is. That nobody reads stderr is nobody's failure.
    pub(crate) fn aside(&self, text: &str) {
        self.clear_spinner();
        self.stands(text, self.err_tty);
        let mut err = io::stderr().lock();
        let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
    }

    /// One line for people, beside the data.
    pub(crate) fn note(&self, text: &str) {
        self.new_line();
        self.aside(&format!("{}\n", self.err_style().dim(text)));
    }

    /// A person has ended the terminal's line by typing.
    pub(crate) fn line_was_typed(&self) {
        self.mid_line.store(false, Ordering::Relaxed);
    }

    /// The last word of a verb that failed.
    pub(crate) fn failure(&self, failure: &Failure) {
        if failure.exit() == Exit::Well {
            return;
        }
        self.new_line();
        if self.json {
            let text = serde_json::to_string(&failure.body()).unwrap_or_else(|error| error.to_string());
            self.aside(&format!("{text}\n"));
        } else {
            self.aside(&format!("{} {failure}\n", self.err_style().red("qd:")));
        }
    }

    /// Puts one line on the terminal that the next output replaces. Only for a stderr that is a terminal, and where
    /// no line is unfinished.
    pub(crate) fn spin(&self, text: &str) {
        if !self.err_tty || self.mid_line.load(Ordering::Relaxed) {
            return;
        }
        let width = rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| usize::from(size.ws_col));
        let text = crate::render::text::cut(text, width.saturating_sub(1).max(20));
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
    fn new_line(&self) {
        if self.err_tty && self.mid_line.load(Ordering::Relaxed) {
            self.aside("\n");
        }
    }

    /// Keeps whether what is about to be printed leaves a line of the terminal unfinished.
    fn stands(&self, text: &str, on_tty: bool) {
        if on_tty && !text.is_empty() {
            let open = !text.trim_end_matches(RESET).ends_with('\n');
            self.mid_line.store(open, Ordering::Relaxed);
        }
    }
}

/// A picture on the terminal that is drawn over and over, until something else has to be said.
#[derive(Debug)]
pub(crate) struct Live {
    /// Lines that stand there now.
    drawn: usize,
    /// Whether there is a terminal to draw on.
    tty: bool,
}

impl Live {
    pub(crate) fn new(out: &Output) -> Self {
        Self { drawn: 0, tty: out.out_tty && !out.json }
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
    pub(crate) fn draw(&mut self, out: &Output, lines: &[String]) -> io::Result<()> {
        if !self.tty {
            return Ok(());
        }
        let mut picture = String::new();
        if self.drawn > 0 {
            picture.push_str(&format!("\x1b[{}A\r", self.drawn));
        }
        for line in lines {
            // Each line replaces what stood there, so nothing flickers.
            picture.push_str(&format!("{line}\x1b[K\n"));
        }
        picture.push_str("\x1b[J");
        self.drawn = lines.len();
        out.paint(picture.as_bytes())
    }

    /// Lets the picture stand and goes on below it.
    pub(crate) fn leave(&mut self) {
        self.drawn = 0;
    }
}
