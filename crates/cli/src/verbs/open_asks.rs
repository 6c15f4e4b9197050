//! The open asks of a run or fleet that is being watched, and the answers that are typed on its terminal. How an ask is
//! shown is up to the watcher; nothing here knows runs or fleets.

use qd_protocol::AskId;
use qd_protocol::api::AnswerRequest;
use qd_protocol::event::Ask;

use super::answer;
use super::stdin_lines::StdinLines;
use crate::client::DaemonClient;
use crate::failure::{CliFailure, Result};
use crate::output::CliOutput;
use crate::render::ask;

#[derive(Debug)]
pub(super) struct OpenAsks<'a> {
    out: &'a CliOutput,
    client: &'a DaemonClient,
    stdin: StdinLines,
    /// Oldest first; a typed line answers the first.
    asks: Vec<Ask>,
}

/// What became of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerOutcome {
    /// Nothing needs to be shown: the answer was accepted, or the terminal already says what is missing.
    Handled,
    /// The daemon refused the answer (already answered, not an option), so the oldest ask is to be shown again.
    Refused,
}

impl<'a> OpenAsks<'a> {
    pub(super) fn new(out: &'a CliOutput, client: &'a DaemonClient) -> Self {
        Self { out, client, stdin: StdinLines::new(), asks: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.asks.is_empty()
    }

    pub(super) fn push(&mut self, ask: Ask) {
        self.asks.push(ask);
    }

    pub(super) fn remove(&mut self, id: &AskId) {
        self.asks.retain(|ask| ask.id != *id);
    }

    /// Whether asks can be answered on this terminal.
    pub(super) fn is_interactive(&self) -> bool {
        self.stdin.tty && self.out.err_tty && !self.out.json
    }

    /// The ask that a typed line answers. `None` if no ask is open or nobody can type.
    pub(super) fn awaiting_answer(&self) -> Option<&Ask> {
        self.asks.first().filter(|_| self.is_interactive())
    }

    /// Prints the prompt for the ask that a typed line answers.
    pub(super) fn show_prompt(&self) {
        if self.awaiting_answer().is_some() {
            self.out.print_prompt(&ask::prompt_for_first(&self.asks, self.out.err_width()));
        }
    }

    /// Prints the ask that a typed line answers, as a whole, and the prompt for it.
    pub(super) fn show_first(&self) {
        if self.awaiting_answer().is_some() {
            let (style, width) = (self.out.err_style(), self.out.err_width());
            self.out.print_prompt(&ask::first_with_prompt(&self.asks, style, width));
        }
    }

    /// Whether to read what is typed: an answer, or a line that came before the next question and must not answer it.
    pub(super) fn takes_lines(&self) -> bool {
        self.is_interactive() && (!self.asks.is_empty() || self.stdin.has_begun())
    }

    /// The next typed line; `None` at the end of input. Cancel-safe.
    pub(super) async fn next_line(&mut self) -> Option<String> {
        self.stdin.next_line().await
    }

    /// Handles a line that was typed while an ask is open.
    pub(super) async fn handle_line(&mut self, line: Option<String>) -> Result<AnswerOutcome> {
        let Some(line) = line else {
            // Stdin has ended; the asks can still be answered from elsewhere.
            self.stdin.tty = false;
            for ask in &self.asks {
                self.out.print_stderr(&format!("\n{}", ask::answer_commands(ask)));
            }
            return Ok(AnswerOutcome::Handled);
        };
        self.out.line_was_typed();
        let Some(ask) = self.asks.first().cloned() else { return Ok(AnswerOutcome::Handled) };
        match ask::parse_answer(&ask, &line) {
            Ok(request) => self.send_answer(&ask, request).await,
            Err(hint) => {
                match hint.ends_with('\n') {
                    true => self.out.print_prompt(&format!("{hint}{}", ask::answer_prompt(&ask))),
                    false => self.out.print_prompt(&hint),
                }
                Ok(AnswerOutcome::Handled)
            }
        }
    }

    /// Answers an ask. A refusal is printed and does not end the verb.
    pub(super) async fn send_answer(&mut self, ask: &Ask, request: AnswerRequest) -> Result<AnswerOutcome> {
        match answer::post_answer(self.client, ask, request).await {
            Ok(_) => {
                self.remove(&ask.id);
                Ok(AnswerOutcome::Handled)
            }
            Err(CliFailure::Refused(refusal)) => {
                self.out.print_note(&refusal.error.message);
                Ok(AnswerOutcome::Refused)
            }
            Err(failure) => Err(failure),
        }
    }
}
