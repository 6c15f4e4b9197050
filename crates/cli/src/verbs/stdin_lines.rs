//! Lines that a person or a program types at us.

use std::io::IsTerminal;

use tokio::io::{AsyncBufReadExt, BufReader, Lines, Stdin};

/// Stdin, line by line. Nothing is read before the first line is asked for.
#[derive(Debug)]
pub(super) struct StdinLines {
    lines: Option<Lines<BufReader<Stdin>>>,
    /// Whether it is a terminal.
    pub(super) tty: bool,
}

impl StdinLines {
    /// From the beginning.
    pub(super) fn new() -> Self {
        Self { lines: None, tty: std::io::stdin().is_terminal() }
    }

    /// The next line; none at the end. May be given up and called again; nothing is lost by it.
    pub(super) async fn next_line(&mut self) -> Option<String> {
        let lines = self.lines.get_or_insert_with(|| BufReader::new(tokio::io::stdin()).lines());
        // What cannot be read, or is no text, is the end of what can be said.
        lines.next_line().await.unwrap_or(None)
    }
}
