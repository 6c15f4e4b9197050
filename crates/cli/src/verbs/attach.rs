//! `qd attach`: what happened in a session, then what happens, and lines to it: prompts, answers and a few commands.
//! Any number may attach and leave; none of them owns a run.

use std::collections::HashSet;

use qd_protocol::api::{CancelRequest, Cancelled, SteerRequest, Steered};
use qd_protocol::event::{Ask, Body};
use qd_protocol::{RunId, Seq};
use tokio::signal::unix::{SignalKind, signal};

use super::transcript::{Shape, Transcript, page};
use super::typed::Typed;
use super::{Context, answer, prompt};
use crate::client::Client;
use crate::client::stream::{Arrived, EventStream, Next};
use crate::failure::{Exit, Failure, Result};
use crate::output::Output;
use crate::refs::{self, SessionRef};
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
pub(crate) async fn attach(context: &Context, id: &str) -> Result<Exit> {
    let client = context.client().await?;
    let session = refs::session(&client, id).await?;
    let mut attached = Attached {
        out: &context.out,
        client: &client,
        session: &session,
        transcript: Transcript::new(&context.out, &client, Shape::Whole),
        typed: Typed::new(),
        open: Vec::new(),
        sent: HashSet::new(),
        closed: false,
        refused: false,
        at_end: false,
    };
    let cursor = attached.past().await?;
    attached.present(cursor).await
}

/// What a typed line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Said<'a> {
    Nothing,
    Words(&'a str),
    Steer(&'a str),
    Cancel,
    Detach,
    Help,
    Unknown(&'a str),
}

/// A session that we are attached to.
struct Attached<'a> {
    out: &'a Output,
    client: &'a Client,
    session: &'a SessionRef,
    transcript: Transcript<'a>,
    typed: Typed,
    /// Asks that nobody has answered, oldest first.
    open: Vec<Ask>,
    /// Runs that were sent from here and have not ended.
    sent: HashSet<RunId>,
    /// Whether the session takes no more prompts.
    closed: bool,
    /// Whether the daemon refused one of our lines.
    refused: bool,
    /// Whether there are no more lines to come.
    at_end: bool,
}

impl Attached<'_> {
    /// Shows what happened, and gives where the present begins.
    async fn past(&mut self) -> Result<Seq> {
        let mut cursor = Seq(0);
        loop {
            let (events, next) = page(self.client, self.session, cursor).await?;
            if events.is_empty() {
                return Ok(cursor);
            }
            cursor = next;
            for arrived in &events {
                self.note(arrived);
            }
            self.transcript.show(events).await?;
        }
    }

    async fn present(mut self, cursor: Seq) -> Result<Exit> {
        let mut interrupts = signal(SignalKind::interrupt()).map_err(anyhow::Error::from)?;
        let mut stream = EventStream::after(self.client, &self.session.stream_path(), cursor);
        if self.typed.tty && !self.closed {
            self.out.note("attached; /help says what you can do");
        }
        for ask in &self.open {
            self.offer(ask);
        }
        while !self.is_over() {
            tokio::select! {
                next = stream.next() => {
                    if let Next::Event(arrived) = next? {
                        self.live(*arrived).await?;
                    }
                }
                _ = interrupts.recv() => break,
                line = self.typed.next(), if !self.at_end => match line {
                    Some(line) => {
                        if self.line(&line).await? {
                            break;
                        }
                    }
                    None => self.at_end = true,
                }
            }
        }
        self.transcript.end_line()?;
        Ok(if self.refused && !self.typed.tty { Exit::Failed } else { Exit::Well })
    }

    /// Whether there is nothing more to see or to say. A person who ends the input wants to leave; a program that
    /// does has said its last prompt and wants the answer.
    fn is_over(&self) -> bool {
        self.closed || (self.at_end && (self.typed.tty || self.sent.is_empty()))
    }

    async fn live(&mut self, arrived: Arrived) -> Result<()> {
        let typed_here = self.typed.tty
            && arrived.event.kind == "message.created"
            && arrived.event.data["role"] == "user"
            && arrived.event.run_id.as_ref().is_some_and(|run| self.sent.contains(run));
        let opened = self.note(&arrived);
        // What was typed here stands on the screen already.
        if !typed_here || self.out.json {
            self.transcript.show([arrived]).await?;
        }
        if let Some(ask) = opened {
            self.offer(&ask);
        }
        Ok(())
    }

    /// Keeps what an event means for us; gives an ask that it opened.
    fn note(&mut self, arrived: &Arrived) -> Option<Ask> {
        let event = &arrived.event;
        if !matches!(event.kind.as_str(), "ask.opened" | "ask.resolved" | "run.finished" | "session.closed") {
            return None;
        }
        match Body::decode(&event.kind, event.data.to_string().as_bytes()).unwrap_or(None)? {
            Body::AskOpened(opened) => {
                self.open.push(opened.ask.clone());
                return Some(opened.ask);
            }
            Body::AskResolved(resolved) => self.open.retain(|ask| ask.id != resolved.ask_id),
            Body::RunFinished(_) => {
                event.run_id.as_ref().map(|run| self.sent.remove(run));
            }
            Body::SessionClosed(_) => self.closed = true,
            _ => {}
        }
        None
    }

    /// Says how an ask can be answered: here, or by which command.
    fn offer(&self, ask: &Ask) {
        if self.typed.tty && !self.at_end {
            self.out.aside(&ask::invitation(ask));
        } else {
            self.out.aside(&ask::commands(ask));
        }
    }

    /// Does what a line says; true if it says to leave. A refusal is told and ends nothing.
    async fn line(&mut self, line: &str) -> Result<bool> {
        if self.typed.tty {
            self.out.line_was_typed();
        }
        let done = match said(line) {
            Said::Nothing => Ok(()),
            Said::Detach => return Ok(true),
            Said::Help => {
                self.out.aside(HELP);
                Ok(())
            }
            Said::Unknown(word) => {
                self.out.note(&format!("there is no {word}; /help says what there is"));
                self.refused = true;
                Ok(())
            }
            Said::Cancel => self.cancel().await,
            Said::Steer(text) => self.steer(text).await,
            Said::Words(text) => match self.open.first().cloned() {
                Some(ask) => self.answer(&ask, text).await,
                None => self.prompt(text).await,
            },
        };
        match done {
            Err(Failure::Refused(refusal)) => {
                self.out.note(&refusal.error.message);
                self.refused = true;
                Ok(false)
            }
            other => other.map(|()| false),
        }
    }

    async fn prompt(&mut self, text: &str) -> Result<()> {
        let receipt = prompt::post(self.client, self.session, text.to_owned()).await?;
        self.sent.insert(receipt.run_id);
        Ok(())
    }

    async fn answer(&mut self, ask: &Ask, text: &str) -> Result<()> {
        match ask::reply(ask, text) {
            Ok(request) => {
                answer::post(self.client, ask.id.as_str(), &request).await?;
                self.open.retain(|other| other.id != ask.id);
            }
            Err(say) => self.out.aside(&say),
        }
        Ok(())
    }

    async fn steer(&self, text: &str) -> Result<()> {
        let path = format!("{}/steer", self.session.agent_path());
        self.client.post::<Steered>(&path, &SteerRequest { text: text.to_owned() }).await?;
        Ok(())
    }

    async fn cancel(&self) -> Result<()> {
        let path = format!("{}/cancel", self.session.agent_path());
        let hit: Cancelled = self.client.post(&path, &CancelRequest::default()).await?;
        if hit.idle {
            self.out.note("there was nothing to cancel");
        }
        Ok(())
    }
}

/// What a typed line asks for.
fn said(line: &str) -> Said<'_> {
    let line = line.trim();
    if line.is_empty() {
        return Said::Nothing;
    }
    let Some(command) = line.strip_prefix('/') else { return Said::Words(line) };
    if command.starts_with('/') {
        return Said::Words(command);
    }
    let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    match (word, rest.trim()) {
        ("steer", text) if !text.is_empty() => Said::Steer(text),
        ("cancel", "") => Said::Cancel,
        ("detach", "") => Said::Detach,
        ("help", "") => Said::Help,
        _ => Said::Unknown(line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_words_or_a_command() {
        assert_eq!(said("  "), Said::Nothing);
        assert_eq!(said(" fix it "), Said::Words("fix it"));
        assert_eq!(said("/steer  go left "), Said::Steer("go left"));
        assert_eq!(said("/cancel"), Said::Cancel);
        assert_eq!(said("/detach"), Said::Detach);
        assert_eq!(said("/help"), Said::Help);
        assert_eq!(said("//compact"), Said::Words("/compact"));
    }

    #[test]
    fn a_slip_of_the_pen_is_never_sent_as_a_prompt() {
        for line in ["/steer", "/cancle", "/cancel now", "/"] {
            assert_eq!(said(line), Said::Unknown(line));
        }
    }
}
