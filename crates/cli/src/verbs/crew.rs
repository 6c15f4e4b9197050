//! A fleet watched to its end: a live picture on a terminal, plain lines elsewhere; its asks answered in place; Ctrl-C.

use qd_protocol::Millis;
use qd_protocol::api::{AnswerRequest, Cancelled};
use qd_protocol::event::{Ask, Body};
use qd_protocol::fleet::{Fleet, FleetState, Spec};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Duration, MissedTickBehavior, interval};

use super::answer;
use super::typed::Typed;
use crate::client::Client;
use crate::client::stream::{Arrived, EventStream, Next};
use crate::failure::{Exit, Failure, Result};
use crate::output::{Live, Output};
use crate::render::ask;
use crate::render::board::{self, Board};

/// How often the picture is drawn anew, at most.
const TICK: Duration = Duration::from_millis(100);

/// A fleet that is being watched.
#[derive(Debug)]
pub(super) struct Crew<'a> {
    out: &'a Output,
    client: &'a Client,
    fleet: Fleet,
    board: Board,
    typed: Typed,
    live: Live,
    /// Asks of its sessions and of itself that nobody has answered, oldest first.
    open: Vec<Ask>,
    /// Whether we asked for its end.
    stopped: bool,
}

impl<'a> Crew<'a> {
    pub(super) fn new(out: &'a Output, client: &'a Client, fleet: Fleet, spec: &Spec) -> Self {
        Self {
            board: Board::new(&fleet, spec),
            live: Live::new(out),
            typed: Typed::new(),
            out,
            client,
            fleet,
            open: Vec::new(),
            stopped: false,
        }
    }

    /// Watches until the fleet has ended or a second Ctrl-C says to leave it alone.
    pub(super) async fn watch(mut self, mut stream: EventStream) -> Result<Exit> {
        let mut interrupts = signal(SignalKind::interrupt()).map_err(anyhow::Error::from)?;
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        if !self.is_pictured() && !self.out.json {
            self.out.line(&format!("{} started", self.fleet.id))?;
        }
        loop {
            tokio::select! {
                next = stream.next() => match next? {
                    Next::Event(arrived) => {
                        if self.event(&arrived).await? {
                            return self.ended();
                        }
                    }
                    Next::Gap => {
                        // What came meanwhile is in the journal, and the fleet knows whether it is over.
                        let path = format!("/v1/workspaces/{}/fleets/{}", self.fleet.workspace_id, self.fleet.id);
                        let now: Fleet = self.client.get(&path).await?;
                        if now.state.is_end() {
                            (self.board.state, self.board.result) = (now.state, now.result);
                            return self.ended();
                        }
                    }
                },
                _ = interrupts.recv() => {
                    if self.stopped {
                        self.live.leave();
                        self.out.note(&format!("left alone; it ends by itself (qd ps --fleet {})", self.fleet.id));
                        return Ok(Exit::Cancelled);
                    }
                    self.stopped = true;
                    self.live.leave();
                    self.out.note("cancelling; Ctrl-C again leaves it alone");
                    let path = format!("/v1/workspaces/{}/fleets/{}/cancel", self.fleet.workspace_id, self.fleet.id);
                    self.client.post::<Cancelled>(&path, &serde_json::json!({})).await?;
                }
                line = self.typed.next(), if self.can_be_answered() => self.answer(line).await?,
                _ = ticks.tick(), if self.is_pictured() && !self.can_be_answered() => self.draw()?,
            }
        }
    }

    fn is_pictured(&self) -> bool {
        self.out.out_tty && !self.out.json
    }

    fn draw(&mut self) -> Result<()> {
        let (width, height) = self.live.size();
        let lines = self.board.lines(Millis::now(), self.out.out_style(), width, height);
        Ok(self.live.draw(self.out, &lines)?)
    }

    /// Takes one event; true if it was the last.
    async fn event(&mut self, arrived: &Arrived) -> Result<bool> {
        if !self.board.concerns(&self.fleet, &arrived.event) {
            return Ok(false);
        }
        if self.out.json {
            self.out.line(&arrived.line)?;
        }
        let data = arrived.event.data.to_string();
        let Some(body) = Body::decode(&arrived.event.kind, data.as_bytes()).unwrap_or(None) else {
            return Ok(false);
        };
        let news = self.board.take(&arrived.event, &body);
        if let Some(news) = news.filter(|_| !self.is_pictured() && !self.out.json) {
            self.out.line(&news.line)?;
        }
        match body {
            Body::AskOpened(opened) => self.opened(opened.ask)?,
            Body::AskResolved(resolved) => {
                self.open.retain(|ask| ask.id != resolved.ask_id);
                self.invite()?;
            }
            Body::FleetFinished(_) => return Ok(true),
            _ => {}
        }
        Ok(false)
    }

    fn opened(&mut self, ask: Ask) -> Result<()> {
        let first = self.open.is_empty();
        if !self.has_person() {
            self.live.leave();
            self.out.aside(&self.block(&ask));
            self.out.aside(&ask::commands(&ask));
        }
        self.open.push(ask);
        if first { self.invite() } else { Ok(()) }
    }

    /// The ask with the name of whoever asks.
    fn block(&self, ask: &Ask) -> String {
        let name =
            ask.session_id.as_ref().and_then(|session| self.board.name(session)).unwrap_or("the fleet");
        format!("{name} asks\n{}", ask::block(ask))
    }

    fn has_person(&self) -> bool {
        self.typed.tty && self.out.err_tty && !self.out.json
    }

    fn can_be_answered(&self) -> bool {
        self.has_person() && !self.open.is_empty()
    }

    /// Shows the oldest open ask and puts its prompt line. The picture stands still meanwhile.
    fn invite(&mut self) -> Result<()> {
        if !self.can_be_answered() {
            return Ok(());
        }
        if self.is_pictured() {
            self.draw()?;
        }
        self.live.leave();
        if let Some(ask) = self.open.first() {
            self.out.aside(&format!("{}{}", self.block(ask), ask::invitation(ask)));
        }
        Ok(())
    }

    /// A line that was typed while an ask is open.
    async fn answer(&mut self, line: Option<String>) -> Result<()> {
        let Some(line) = line else {
            // The person has gone; others may still answer.
            self.typed.tty = false;
            for ask in &self.open {
                self.out.aside(&format!("\n{}", ask::commands(ask)));
            }
            return Ok(());
        };
        self.out.line_was_typed();
        let Some(ask) = self.open.first().cloned() else { return Ok(()) };
        match ask::reply(&ask, &line) {
            Ok(request) => self.post(&ask, &request).await,
            Err(say) => {
                self.out.aside(&say);
                if say.ends_with('\n') {
                    self.out.aside(&ask::invitation(&ask));
                }
                Ok(())
            }
        }
    }

    async fn post(&mut self, ask: &Ask, request: &AnswerRequest) -> Result<()> {
        match answer::post(self.client, ask.id.as_str(), request).await {
            Ok(_) => {
                self.open.retain(|other| other.id != ask.id);
                self.invite()
            }
            Err(Failure::Refused(refusal)) => {
                self.out.note(&refusal.error.message);
                self.invite()
            }
            Err(failure) => Err(failure),
        }
    }

    fn ended(&mut self) -> Result<Exit> {
        if self.is_pictured() {
            self.draw()?;
        }
        self.live.leave();
        let state = self.board.state;
        if !self.out.json {
            let style = self.out.err_style();
            let cost = self.board.cost();
            let money =
                if cost > 0.0 { format!(", {}", crate::render::text::dollars(cost)) } else { String::new() };
            self.out.aside(&format!("\n{}", self.board.summary(style)));
            self.out.aside(&format!("{} {}{money}\n", self.fleet.id, board::state(state, style)));
            if let Some(result) = self.board.result.as_ref().filter(|result| !result.trim().is_empty()) {
                self.out.data(&format!("{}\n", crate::render::text::clean(result.trim_end())))?;
            }
        }
        Ok(match state {
            FleetState::Done => Exit::Well,
            FleetState::Cancelled => Exit::Cancelled,
            _ => Exit::Failed,
        })
    }
}
