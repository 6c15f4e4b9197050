//! Watches a fleet until it ends: a live display on a terminal, plain lines elsewhere. Asks are answered in place.
//! Ctrl-C cancels a fleet that `qd up` started, and leaves one that `qd attach` found.

use qd_protocol::Millis;
use qd_protocol::api::CancelResponse;
use qd_protocol::event::{Ask, AskStatus, EventBody};
use qd_protocol::fleet::{Fleet, FleetSpec, FleetStatus};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Duration, MissedTickBehavior, interval};

use super::open_asks::{AnswerOutcome, OpenAsks};
use super::run_watcher::{detach_signal, wait_for_detach};
use crate::client::DaemonClient;
use crate::client::stream::{EventStream, EventStreamItem, ReceivedEvent};
use crate::failure::{CliExitCode, Result};
use crate::output::{CliOutput, LiveDisplay};
use crate::render::ask;
use crate::render::fleet_progress::{self, FleetProgress};
use crate::render::visible_text::show_prose;

/// Between two redraws of the live display.
const TICK: Duration = Duration::from_millis(100);

/// How the watcher came to its fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FleetWatchMode {
    /// `qd up` has just started it. Ctrl-C cancels it.
    Started,
    /// `qd attach` follows it from its start, which may be long ago. Ctrl-C detaches.
    Attached,
}

#[derive(Debug)]
pub(super) struct FleetWatcher<'a> {
    out: &'a CliOutput,
    client: &'a DaemonClient,
    fleet: Fleet,
    mode: FleetWatchMode,
    progress: FleetProgress,
    display: LiveDisplay,
    /// Of the fleet and its sessions.
    open_asks: OpenAsks<'a>,
    /// Whether Ctrl-C has cancelled the fleet.
    cancel_requested: bool,
}

impl<'a> FleetWatcher<'a> {
    pub(super) fn new(
        out: &'a CliOutput,
        client: &'a DaemonClient,
        fleet: Fleet,
        spec: &FleetSpec,
        mode: FleetWatchMode,
    ) -> Self {
        Self {
            mode,
            progress: FleetProgress::new(&fleet, spec),
            display: LiveDisplay::new(out),
            open_asks: OpenAsks::new(out, client),
            out,
            client,
            fleet,
            cancel_requested: false,
        }
    }

    /// Watches until the fleet has ended, or until a second Ctrl-C.
    pub(super) async fn watch(mut self, mut stream: EventStream) -> Result<CliExitCode> {
        let mut interrupts = signal(SignalKind::interrupt()).map_err(anyhow::Error::from)?;
        let mut detaches = detach_signal(self.out)?;
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        if !self.draws_live() && !self.out.json && self.mode == FleetWatchMode::Started {
            self.out.print_line(&format!("{} started", self.fleet.id))?;
        }
        loop {
            tokio::select! {
                next = stream.next() => match next? {
                    EventStreamItem::Event(arrived) => {
                        if self.handle_event(&arrived).await? {
                            return self.finish();
                        }
                    }
                    EventStreamItem::Gap => {
                        // Events may have been missed, so ask the daemon whether the fleet has ended.
                        let path = format!("/v1/workspaces/{}/fleets/{}", self.fleet.workspace_id, self.fleet.id);
                        let now: Fleet = self.client.get(&path).await?;
                        if now.state.is_final() {
                            (self.progress.state, self.progress.result) = (now.state, now.result);
                            return self.finish();
                        }
                    }
                },
                _ = interrupts.recv() => {
                    if self.mode == FleetWatchMode::Attached {
                        self.display.finish_drawing();
                        return Ok(CliExitCode::Success);
                    }
                    if self.cancel_requested {
                        self.display.finish_drawing();
                        self.out.print_note(&format!(
                            "not waiting for the cancelled fleet; see `qd ps --fleet {}`",
                            self.fleet.id
                        ));
                        return Ok(CliExitCode::Cancelled);
                    }
                    self.cancel_requested = true;
                    self.display.finish_drawing();
                    self.out.print_note("cancelling; press Ctrl-C again to exit without waiting");
                    let path = format!("/v1/workspaces/{}/fleets/{}/cancel", self.fleet.workspace_id, self.fleet.id);
                    self.client.post::<CancelResponse>(&path, &serde_json::json!({})).await?;
                }
                () = wait_for_detach(&mut detaches) => {
                    self.display.finish_drawing();
                    self.out.print_note(&format!("detached, the fleet goes on: qd attach {}", self.fleet.id));
                    return Ok(CliExitCode::Success);
                }
                line = self.open_asks.next_line(), if self.open_asks.takes_lines() => {
                    if self.open_asks.handle_line(line).await? == AnswerOutcome::Refused {
                        self.prompt_for_answer()?;
                    }
                }
                _ = ticks.tick(), if self.draws_live() && self.open_asks.awaiting_answer().is_none() => self.draw()?,
            }
        }
    }

    fn draws_live(&self) -> bool {
        self.out.out_tty && !self.out.json
    }

    fn draw(&self) -> Result<()> {
        let (width, height) = self.display.size();
        let lines = self.progress.lines(Millis::now(), self.out.out_style(), width, height);
        Ok(self.display.draw(&lines)?)
    }

    /// Handles one event; true if it was the last.
    async fn handle_event(&mut self, arrived: &ReceivedEvent) -> Result<bool> {
        if !self.progress.concerns(&self.fleet, &arrived.event) {
            return Ok(false);
        }
        if self.out.json {
            self.out.print_exact(&format!("{}\n", arrived.line))?;
        }
        let data = arrived.event.data.to_string();
        let Some(body) = EventBody::decode(&arrived.event.kind, data.as_bytes()).unwrap_or(None) else {
            return Ok(false);
        };
        let progress = self.progress.apply_event(&arrived.event, &body);
        if let Some(progress) = progress.filter(|_| !self.draws_live() && !self.out.json) {
            self.out.print_data(&format!("{}\n", progress.line))?;
        }
        match body {
            EventBody::AskOpened(opened) if self.is_open(&opened.ask).await? => {
                self.handle_ask(opened.ask)?
            }
            EventBody::AskResolved(resolved) => {
                self.open_asks.remove(&resolved.ask_id);
                self.prompt_for_answer()?;
            }
            EventBody::FleetFinished(_) => return Ok(true),
            _ => {}
        }
        Ok(false)
    }

    /// Whether an ask still needs an answer. Those in the history of an attached fleet may not.
    async fn is_open(&self, ask: &Ask) -> Result<bool> {
        if self.mode == FleetWatchMode::Started {
            return Ok(true);
        }
        let now: Ask = self.client.get(&format!("/v1/asks/{}", ask.id)).await?;
        Ok(now.state == AskStatus::Pending)
    }

    fn handle_ask(&mut self, ask: Ask) -> Result<()> {
        let first = self.open_asks.is_empty();
        if !self.open_asks.is_interactive() {
            self.display.finish_drawing();
            self.out.print_stderr(&self.format_ask(&ask));
            self.out.print_stderr(&ask::answer_commands(&ask));
        }
        self.open_asks.push(ask);
        if first { self.prompt_for_answer() } else { Ok(()) }
    }

    /// The ask, with the name of the session that asks.
    fn format_ask(&self, ask: &Ask) -> String {
        let name = ask
            .session_id
            .as_ref()
            .and_then(|session| self.progress.session_name(session))
            .unwrap_or("the fleet");
        format!("{name} asks\n{}", ask::format_ask(ask, self.out.err_style(), self.out.err_width()))
    }

    /// Shows the oldest open ask and a prompt for its answer. The live display pauses meanwhile.
    fn prompt_for_answer(&mut self) -> Result<()> {
        if self.draws_live() && self.open_asks.awaiting_answer().is_some() {
            self.draw()?;
        }
        if let Some(ask) = self.open_asks.awaiting_answer() {
            self.display.finish_drawing();
            self.out.print_prompt(&format!("{}{}", self.format_ask(ask), ask::answer_prompt(ask)));
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<CliExitCode> {
        if self.draws_live() {
            self.draw()?;
        }
        self.display.finish_drawing();
        let state = self.progress.state;
        if !self.out.json {
            let style = self.out.err_style();
            let cost = self.progress.cost();
            let money = if cost > 0.0 {
                format!(", {}", crate::render::text::format_dollars(cost))
            } else {
                String::new()
            };
            self.out.print_stderr(&format!("\n{}", self.progress.summary(style)));
            self.out.print_stderr(&format!(
                "{} {}{money}\n",
                self.fleet.id,
                fleet_progress::styled_fleet_state(state, style)
            ));
            if let Some(result) = self.progress.result.as_ref().filter(|result| !result.trim().is_empty()) {
                let result = format!("{}\n", result.trim_end());
                match self.out.out_tty {
                    true => self.out.print_data(&show_prose(&result))?,
                    // What the agent said is data here.
                    false => self.out.print_exact(&result)?,
                }
            }
        }
        Ok(match state {
            FleetStatus::Done => CliExitCode::Success,
            FleetStatus::Cancelled => CliExitCode::Cancelled,
            _ => CliExitCode::Failed,
        })
    }
}
