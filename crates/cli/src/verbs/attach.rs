//! `qd attach`: what happened in a session, then what happens, and lines to it: prompts, answers and a few commands.
//! Any number may attach and leave; none of them owns a run.

use std::collections::HashSet;

use qd_protocol::api::{CancelRequest, CancelResponse, SteerReceipt, SteerRequest};
use qd_protocol::event::{Ask, EventBody};
use qd_protocol::{RunId, Seq};
use tokio::signal::unix::{SignalKind, signal};

use super::stdin_lines::StdinLines;
use super::transcript::{TranscriptLayout, TranscriptPrinter, read_page};
use super::{VerbContext, answer, prompt};
use crate::client::DaemonClient;
use crate::client::stream::{EventStream, EventStreamItem, ReceivedEvent};
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;
use crate::refs::{self, ResolvedSession};
use crate::render::ask;

const HELP: &str = "\
a line is sent as a prompt, or answers the ask that is open
/steer TEXT   tell the active run something
/cancel       cancel everything the session has to do
/detach       leave; the session goes on (so does Ctrl-D or Ctrl-C)
/help         this
//TEXT        a prompt that begins with a slash
";

/// Shows a session and talks to it.
pub(crate) async fn attach(context: &VerbContext, id: &str) -> Result<CliExitCode> {
    let client = context.client().await?;
    let session = refs::resolve_session(&client, id).await?;
    let mut attached = SessionConsole {
        out: &context.out,
        client: &client,
        session: &session,
        transcript: TranscriptPrinter::new(&context.out, &client, TranscriptLayout::Whole),
        stdin: StdinLines::new(),
        open_asks: Vec::new(),
        sent_runs: HashSet::new(),
        closed: false,
        refused: false,
        stdin_ended: false,
    };
    let cursor = attached.show_history().await?;
    attached.follow_live(cursor).await
}

/// What a typed line asks for.
#[derive(Debug, PartialEq, Eq)]
enum ConsoleCommand<'a> {
    Nothing,
    Text(&'a str),
    Steer(&'a str),
    Cancel,
    Detach,
    Help,
    Unknown(&'a str),
}

/// A session that we are attached to.
struct SessionConsole<'a> {
    out: &'a CliOutput,
    client: &'a DaemonClient,
    session: &'a ResolvedSession,
    transcript: TranscriptPrinter<'a>,
    stdin: StdinLines,
    /// Asks that nobody has answered, oldest first.
    open_asks: Vec<Ask>,
    /// Runs that were sent from here and have not ended.
    sent_runs: HashSet<RunId>,
    /// Whether the session takes no more prompts.
    closed: bool,
    /// Whether the daemon refused one of our lines.
    refused: bool,
    /// Whether there are no more lines to come.
    stdin_ended: bool,
}

impl SessionConsole<'_> {
    /// Shows what happened, and gives where the present begins.
    async fn show_history(&mut self) -> Result<Seq> {
        let mut cursor = Seq(0);
        loop {
            let (events, next) = read_page(self.client, self.session, cursor).await?;
            if events.is_empty() {
                return Ok(cursor);
            }
            cursor = next;
            for arrived in &events {
                self.track_event(arrived);
            }
            self.transcript.show(events).await?;
        }
    }

    async fn follow_live(mut self, cursor: Seq) -> Result<CliExitCode> {
        let mut interrupts = signal(SignalKind::interrupt()).map_err(anyhow::Error::from)?;
        let mut stream = EventStream::after(self.client, &self.session.stream_path(), cursor);
        if self.stdin.tty && !self.closed {
            self.out.print_note("attached; /help says what you can do");
        }
        for ask in &self.open_asks {
            self.show_answer_help(ask);
        }
        while !self.is_over() {
            tokio::select! {
                next = stream.next() => {
                    if let EventStreamItem::Event(arrived) = next? {
                        self.handle_event(*arrived).await?;
                    }
                }
                _ = interrupts.recv() => break,
                line = self.stdin.next_line(), if !self.stdin_ended => match line {
                    Some(line) => {
                        if self.handle_line(&line).await? {
                            break;
                        }
                    }
                    None => self.stdin_ended = true,
                }
            }
        }
        self.transcript.end_line()?;
        Ok(if self.refused && !self.stdin.tty { CliExitCode::Failed } else { CliExitCode::Success })
    }

    /// Whether there is nothing more to see or to say. A person who ends the input wants to leave; a program that
    /// does has said its last prompt and wants the answer.
    fn is_over(&self) -> bool {
        self.closed || (self.stdin_ended && (self.stdin.tty || self.sent_runs.is_empty()))
    }

    async fn handle_event(&mut self, arrived: ReceivedEvent) -> Result<()> {
        let typed_here = self.stdin.tty
            && arrived.event.kind == "message.created"
            && arrived.event.data["role"] == "user"
            && arrived.event.run_id.as_ref().is_some_and(|run| self.sent_runs.contains(run));
        let opened = self.track_event(&arrived);
        // What was typed here stands on the screen already.
        if !typed_here || self.out.json {
            self.transcript.show([arrived]).await?;
        }
        if let Some(ask) = opened {
            self.show_answer_help(&ask);
        }
        Ok(())
    }

    /// Keeps what an event means for us; gives an ask that it opened.
    fn track_event(&mut self, arrived: &ReceivedEvent) -> Option<Ask> {
        let event = &arrived.event;
        if !matches!(event.kind.as_str(), "ask.opened" | "ask.resolved" | "run.finished" | "session.closed") {
            return None;
        }
        match EventBody::decode(&event.kind, event.data.to_string().as_bytes()).unwrap_or(None)? {
            EventBody::AskOpened(opened) => {
                self.open_asks.push(opened.ask.clone());
                return Some(opened.ask);
            }
            EventBody::AskResolved(resolved) => self.open_asks.retain(|ask| ask.id != resolved.ask_id),
            EventBody::RunFinished(_) => {
                event.run_id.as_ref().map(|run| self.sent_runs.remove(run));
            }
            EventBody::SessionClosed(_) => self.closed = true,
            _ => {}
        }
        None
    }

    /// Says how an ask can be answered: here, or by which command.
    fn show_answer_help(&self, ask: &Ask) {
        if self.stdin.tty && !self.stdin_ended {
            self.out.print_stderr(&ask::answer_prompt(ask));
        } else {
            self.out.print_stderr(&ask::answer_commands(ask));
        }
    }

    /// Does what a line says; true if it says to leave. A refusal is told and ends nothing.
    async fn handle_line(&mut self, line: &str) -> Result<bool> {
        if self.stdin.tty {
            self.out.line_was_typed();
        }
        let done = match parse_line(line) {
            ConsoleCommand::Nothing => Ok(()),
            ConsoleCommand::Detach => return Ok(true),
            ConsoleCommand::Help => {
                self.out.print_stderr(HELP);
                Ok(())
            }
            ConsoleCommand::Unknown(word) => {
                self.out.print_note(&format!("there is no {word}; /help says what there is"));
                self.refused = true;
                Ok(())
            }
            ConsoleCommand::Cancel => self.cancel().await,
            ConsoleCommand::Steer(text) => self.steer(text).await,
            ConsoleCommand::Text(text) => match self.open_asks.first().cloned() {
                Some(ask) => self.send_answer(&ask, text).await,
                None => self.send_prompt(text).await,
            },
        };
        match done {
            Err(CliFailure::Refused(refusal)) => {
                self.out.print_note(&refusal.error.message);
                self.refused = true;
                Ok(false)
            }
            other => other.map(|()| false),
        }
    }

    async fn send_prompt(&mut self, text: &str) -> Result<()> {
        let receipt = prompt::post_prompt(self.client, self.session, text.to_owned()).await?;
        self.sent_runs.insert(receipt.run_id);
        Ok(())
    }

    async fn send_answer(&mut self, ask: &Ask, text: &str) -> Result<()> {
        match ask::parse_answer(ask, text) {
            Ok(request) => {
                answer::post_answer(self.client, ask.id.as_str(), &request).await?;
                self.open_asks.retain(|other| other.id != ask.id);
            }
            Err(say) => self.out.print_stderr(&say),
        }
        Ok(())
    }

    async fn steer(&self, text: &str) -> Result<()> {
        let path = format!("{}/steer", self.session.agent_path());
        self.client.post::<SteerReceipt>(&path, &SteerRequest { text: text.to_owned() }).await?;
        Ok(())
    }

    async fn cancel(&self) -> Result<()> {
        let path = format!("{}/cancel", self.session.agent_path());
        let hit: CancelResponse = self.client.post(&path, &CancelRequest::default()).await?;
        if hit.idle {
            self.out.print_note("there was nothing to cancel");
        }
        Ok(())
    }
}

/// What a typed line asks for.
fn parse_line(line: &str) -> ConsoleCommand<'_> {
    let line = line.trim();
    if line.is_empty() {
        return ConsoleCommand::Nothing;
    }
    let Some(command) = line.strip_prefix('/') else { return ConsoleCommand::Text(line) };
    if command.starts_with('/') {
        return ConsoleCommand::Text(command);
    }
    let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    match (word, rest.trim()) {
        ("steer", text) if !text.is_empty() => ConsoleCommand::Steer(text),
        ("cancel", "") => ConsoleCommand::Cancel,
        ("detach", "") => ConsoleCommand::Detach,
        ("help", "") => ConsoleCommand::Help,
        _ => ConsoleCommand::Unknown(line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_words_or_a_command() {
        assert_eq!(parse_line("  "), ConsoleCommand::Nothing);
        assert_eq!(parse_line(" fix it "), ConsoleCommand::Text("fix it"));
        assert_eq!(parse_line("/steer  go left "), ConsoleCommand::Steer("go left"));
        assert_eq!(parse_line("/cancel"), ConsoleCommand::Cancel);
        assert_eq!(parse_line("/detach"), ConsoleCommand::Detach);
        assert_eq!(parse_line("/help"), ConsoleCommand::Help);
        assert_eq!(parse_line("//compact"), ConsoleCommand::Text("/compact"));
    }

    #[test]
    fn a_slip_of_the_pen_is_never_sent_as_a_prompt() {
        for line in ["/steer", "/cancle", "/cancel now", "/"] {
            assert_eq!(parse_line(line), ConsoleCommand::Unknown(line));
        }
    }
}
