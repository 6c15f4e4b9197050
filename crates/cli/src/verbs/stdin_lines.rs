//! Lines from stdin, typed by a user or written by a program.

use std::io::IsTerminal;

use tokio::io::{AsyncBufReadExt, BufReader, Lines, Stdin};

/// Reads stdin line by line. Nothing is read before the first call.
#[derive(Debug)]
pub(super) struct StdinLines {
    lines: Option<Lines<BufReader<Stdin>>>,
    /// Whether stdin is a terminal.
    pub(super) tty: bool,
}

impl StdinLines {
    pub(super) fn new() -> Self {
        Self { lines: None, tty: std::io::stdin().is_terminal() }
    }

    /// Whether a line was asked for before. What is typed from then on is read, even if nobody waits for it.
    pub(super) fn has_begun(&self) -> bool {
        self.lines.is_some()
    }

    /// The next line; `None` at the end. Cancel-safe.
    pub(super) async fn next_line(&mut self) -> Option<String> {
        let lines = self.lines.get_or_insert_with(|| BufReader::new(tokio::io::stdin()).lines());
        // A read error or invalid UTF-8 counts as the end of input.
        lines.next_line().await.unwrap_or(None)
    }
}
