//! `qd attach`: shows a session's history, follows it live, and sends typed lines to it as prompts, answers or
//! commands. Any number of clients may attach and detach; none of them owns a run.

use std::collections::HashSet;

use qd_protocol::api::{CancelRequest, CancelResponse, SteerReceipt, SteerRequest};
use qd_protocol::event::{Ask, EventBody};
use qd_protocol::{RunId, Seq};
use tokio::signal::unix::{SignalKind, signal};

use super::fleet_logs::attach_fleet;
use super::stdin_lines::StdinLines;
use super::transcript::{TranscriptLayout, TranscriptPrinter, read_page};
use super::{VerbContext, answer, prompt};
use crate::client::DaemonClient;
use crate::client::stream::{EventStream, EventStreamItem, ReceivedEvent};
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;
use crate::refs::{self, ResolvedSession, WatchTarget};
use crate::render::ask;

const HELP: &str = "\
TEXT          send a prompt, or answer the open ask
/steer TEXT   send text to the running turn
/cancel       cancel the current and queued runs
/detach       leave; the session keeps running (also Ctrl-D or Ctrl-C)
/help         show this help
//TEXT        send a prompt that begins with a slash
";

pub(crate) async fn attach(context: &VerbContext, id: &str) -> Result<CliExitCode> {
    let client = context.client().await?;
    let session = match refs::resolve_watch_target(&client, id).await? {
        WatchTarget::Fleet(fleet) => return attach_fleet(context, &client, &fleet).await,
        WatchTarget::Session(session) => session,
        WatchTarget::Run(session, run) => {
            context.out.print_note(&format!("{run} is a run of {}", session.id));
            session
        }
    };
    let mut console = SessionConsole {
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
    let cursor = console.show_history().await?;
    console.follow_live(cursor).await
}

/// A parsed line of input.
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

/// The state of `qd attach`.
struct SessionConsole<'a> {
    out: &'a CliOutput,
    client: &'a DaemonClient,
    session: &'a ResolvedSession,
    transcript: TranscriptPrinter<'a>,
    stdin: StdinLines,
    /// Unanswered asks, oldest first.
    open_asks: Vec<Ask>,
    /// Unfinished runs that were sent from here.
    sent_runs: HashSet<RunId>,
    /// Whether the session is closed.
    closed: bool,
    /// Whether a line was refused or unknown.
    refused: bool,
    stdin_ended: bool,
}

impl SessionConsole<'_> {
    /// Prints the history and returns the position at which live events begin.
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
            self.out.print_note("attached; type /help for help");
        }
        match &self.open_asks[..] {
            [_, _, ..] if self.takes_answers() => self.show_first_ask(),
            asks => asks.iter().for_each(|ask| self.show_answer_help(ask)),
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

    /// Whether to exit. End of input on a terminal means that the user wants to leave; from a program it means that the
    /// last prompt was sent, so its answer is still awaited.
    fn is_over(&self) -> bool {
        self.closed || (self.stdin_ended && (self.stdin.tty || self.sent_runs.is_empty()))
    }

    async fn handle_event(&mut self, arrived: ReceivedEvent) -> Result<()> {
        let typed_here = self.stdin.tty
            && arrived.event.kind == "message.created"
            && arrived.event.data["role"] == "user"
            && arrived.event.run_id.as_ref().is_some_and(|run| self.sent_runs.contains(run));
        let was_resolved = arrived.event.kind == "ask.resolved";
        let opened = self.track_event(&arrived);
        // A prompt that was typed here is already on the screen.
        if !typed_here || self.out.json {
            self.transcript.show([arrived]).await?;
        }
        if let Some(ask) = opened {
            self.show_answer_help(&ask);
        } else if was_resolved && self.takes_answers() {
            self.show_first_ask();
        }
        Ok(())
    }

    /// Updates the state from an event and returns the ask that it opened, if any.
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

    /// Whether somebody can type answers.
    fn takes_answers(&self) -> bool {
        self.stdin.tty && !self.stdin_ended
    }

    /// Prints how to answer a new ask: on a terminal the prompt for the oldest one, which a typed line answers, else the
    /// commands.
    fn show_answer_help(&self, new: &Ask) {
        if self.takes_answers() {
            self.out.print_prompt(&ask::prompt_for_first(&self.open_asks, self.out.err_width()));
        } else {
            self.out.print_stderr(&ask::answer_commands(new));
        }
    }

    /// Shows the ask that a typed line answers again, if there is one.
    fn show_first_ask(&self) {
        if !self.open_asks.is_empty() {
            let (style, width) = (self.out.err_style(), self.out.err_width());
            self.out.print_prompt(&ask::first_with_prompt(&self.open_asks, style, width));
        }
    }

    /// Handles a typed line; true if it detaches. A refusal is printed and does not end the verb.
    async fn handle_line(&mut self, line: &str) -> Result<bool> {
        if self.stdin.tty {
            self.out.line_was_typed();
        }
        let result = match parse_line(line) {
            ConsoleCommand::Nothing => Ok(()),
            ConsoleCommand::Detach => return Ok(true),
            ConsoleCommand::Help => {
                self.out.print_stderr(HELP);
                Ok(())
            }
            ConsoleCommand::Unknown(line) => {
                self.out.print_note(&format!("unknown command {line}; type /help for help"));
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
        match result {
            Err(CliFailure::Refused(refusal)) => {
                self.out.print_note(&refusal.error.message);
                self.refused = true;
                Ok(false)
            }
            other => other.map(|()| false),
        }
    }

    async fn send_prompt(&mut self, text: &str) -> Result<()> {
        let receipt = prompt::post_prompt(self.client, self.session, text.to_owned(), Vec::new()).await?;
        self.sent_runs.insert(receipt.run_id);
        Ok(())
    }

    async fn send_answer(&mut self, ask: &Ask, text: &str) -> Result<()> {
        match ask::parse_answer(ask, text) {
            Ok(request) => {
                answer::post_answer(self.client, ask, request).await?;
                self.open_asks.retain(|other| other.id != ask.id);
            }
            Err(hint) => self.out.print_stderr(&hint),
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
        let response: CancelResponse = self.client.post(&path, &CancelRequest::default()).await?;
        if response.idle {
            self.out.print_note("nothing to cancel");
        }
        Ok(())
    }
}

fn parse_line(line: &str) -> ConsoleCommand<'_> {
    let line = line.trim();
    if line.is_empty() {
        return ConsoleCommand::Nothing;
    }
    let Some(command) = line.strip_prefix('/') else { return ConsoleCommand::Text(line) };
    if command.starts_with('/') {
        return ConsoleCommand::Text(command);
    }
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    match (name, rest.trim()) {
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
    fn a_line_is_text_or_a_command() {
        assert_eq!(parse_line("  "), ConsoleCommand::Nothing);
        assert_eq!(parse_line(" fix it "), ConsoleCommand::Text("fix it"));
        assert_eq!(parse_line("/steer  go left "), ConsoleCommand::Steer("go left"));
        assert_eq!(parse_line("/cancel"), ConsoleCommand::Cancel);
        assert_eq!(parse_line("/detach"), ConsoleCommand::Detach);
        assert_eq!(parse_line("/help"), ConsoleCommand::Help);
        assert_eq!(parse_line("//compact"), ConsoleCommand::Text("/compact"));
    }

    #[test]
    fn a_mistyped_command_is_never_sent_as_a_prompt() {
        for line in ["/steer", "/cancle", "/cancel now", "/"] {
            assert_eq!(parse_line(line), ConsoleCommand::Unknown(line));
        }
    }
}
