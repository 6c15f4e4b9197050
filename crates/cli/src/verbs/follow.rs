//! A run watched to its end: its words, its asks, Ctrl-C, the time limit and the spinner, in one loop. The run belongs
//! to the daemon; whatever happens here can at most ask for its cancel.

use std::time::Duration;

use qd_protocol::api::{AnswerRequest, CancelRequest, Cancelled, Receipt};
use qd_protocol::event::{Ask, AskKind, Body, QueueReason};
use qd_protocol::{FinishReason, Seq};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::answer;
use super::transcript::{Shape, Transcript, is_of};
use super::typed::Typed;
use crate::args::OnAsk;
use crate::client::Client;
use crate::client::stream::{Arrived, EventStream, Next};
use crate::failure::{Exit, Failure, Result};
use crate::output::Output;
use crate::refs::SessionRef;
use crate::render::{ask, spinner};

/// Further away than any run: where no time limit is set.
const NEVER: Duration = Duration::from_secs(366 * 86_400);

/// What is watched, and how.
#[derive(Debug)]
pub(super) struct Watched {
    /// Whose run.
    pub(super) session: SessionRef,
    /// The run.
    pub(super) receipt: Receipt,
    /// Who works on it.
    pub(super) agent: String,
    /// What to do when it asks.
    pub(super) on_ask: OnAsk,
    /// Seconds after which it is cancelled.
    pub(super) timeout: Option<f64>,
}

/// Why we asked for the run's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopped {
    Interrupt,
    Timeout,
    Ask,
}

/// A run that is being watched.
#[derive(Debug)]
pub(super) struct Follow<'a> {
    out: &'a Output,
    client: &'a Client,
    watched: Watched,
    transcript: Transcript<'a>,
    typed: Typed,
    /// Asks of the run that nobody has answered, oldest first.
    open: Vec<Ask>,
    /// Why we asked for its end, if we did.
    stopped: Option<Stopped>,
    /// What the agent does, for the spinner, and since when.
    does: &'static str,
    since: Instant,
    /// When something last came.
    heard: Instant,
}

impl<'a> Follow<'a> {
    /// Begins when the prompt was accepted.
    pub(super) fn new(out: &'a Output, client: &'a Client, watched: Watched) -> Self {
        let now = Instant::now();
        Self {
            out,
            client,
            watched,
            transcript: Transcript::new(out, client, Shape::Answer),
            typed: Typed::new(),
            open: Vec::new(),
            stopped: None,
            does: "starts",
            since: now,
            heard: now,
        }
    }

    /// Watches until the run has ended or a second Ctrl-C says to leave it alone.
    pub(super) async fn watch(mut self, mut stream: EventStream) -> Result<Exit> {
        let mut interrupts = signal(SignalKind::interrupt()).map_err(anyhow::Error::from)?;
        let limit = self.watched.timeout.map_or(NEVER, Duration::from_secs_f64);
        let deadline = sleep_until(Instant::now() + limit);
        tokio::pin!(deadline);
        let mut ticks = interval(spinner::TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut pictures = 0;
        loop {
            tokio::select! {
                next = stream.next() => match next? {
                    Next::Event(arrived) => {
                        if let Some(exit) = self.event(*arrived).await? {
                            return Ok(exit);
                        }
                    }
                    // Nothing had come yet, so the receipt says where to begin.
                    Next::Gap => {
                        let before = Seq(self.watched.receipt.seq.0.saturating_sub(1));
                        stream = EventStream::after(self.client, &self.watched.session.stream_path(), before);
                    }
                },
                _ = interrupts.recv() => {
                    if self.stopped == Some(Stopped::Interrupt) {
                        self.transcript.end_line()?;
                        let id = &self.watched.session.id;
                        self.out.note(&format!("left alone; it ends by itself (qd attach {id})"));
                        return Ok(Exit::Cancelled);
                    }
                    self.stop(Stopped::Interrupt, "Ctrl-C").await?;
                    self.out.note("cancelling; Ctrl-C again leaves it alone");
                }
                () = &mut deadline, if self.watched.timeout.is_some() && self.stopped.is_none() => {
                    self.stop(Stopped::Timeout, "over the time of qd run --timeout").await?;
                }
                line = self.typed.next(), if self.can_be_answered() => self.answer(line).await?,
                _ = ticks.tick(), if self.out.err_tty && !self.out.json && self.open.is_empty() => {
                    if self.heard.elapsed() >= spinner::PATIENCE {
                        pictures += 1;
                        let since = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
                        self.out.spin(&spinner::picture(pictures, &self.watched.agent, self.does, since));
                    }
                }
            }
        }
    }

    /// Takes one event; gives the exit code if it was the last.
    async fn event(&mut self, arrived: Arrived) -> Result<Option<Exit>> {
        let ours = is_of(&arrived.event, &self.watched.receipt.run_id);
        // Another run of the session is somebody else's; what belongs to no run is of interest to programs only.
        let of_no_run = self.out.json && arrived.event.run_id.is_none();
        if !ours && !of_no_run {
            return Ok(None);
        }
        self.heard = Instant::now();
        let data = arrived.event.data.to_string();
        let body = Body::decode(&arrived.event.kind, data.as_bytes()).unwrap_or(None);
        self.transcript.show([arrived]).await?;
        match body.filter(|_| ours) {
            Some(Body::RunQueued(queued)) => self.now(match queued.reason {
                QueueReason::Busy => "is queued",
                QueueReason::Halted => "is halted",
                QueueReason::Capacity => "waits for room",
            }),
            Some(Body::RunStarted(_)) => self.now("works"),
            Some(Body::RunCancelRequested(_)) => self.now("stops"),
            Some(Body::AskOpened(opened)) => self.opened(opened.ask).await?,
            Some(Body::AskResolved(resolved)) => {
                self.open.retain(|ask| ask.id != resolved.ask_id);
                self.invite();
            }
            Some(Body::RunFinished(finished)) => return Ok(Some(self.ended(finished.finish_reason))),
            _ => {}
        }
        Ok(None)
    }

    fn now(&mut self, does: &'static str) {
        self.does = does;
        self.since = Instant::now();
    }

    fn ended(&self, reason: FinishReason) -> Exit {
        match (reason, self.stopped) {
            (FinishReason::Cancelled, Some(Stopped::Timeout)) => {
                self.out.note("it took longer than --timeout allows");
                Exit::TimedOut
            }
            (FinishReason::Cancelled, Some(Stopped::Ask)) => Exit::Failed,
            _ => Exit::of(reason),
        }
    }

    async fn opened(&mut self, ask: Ask) -> Result<()> {
        match self.watched.on_ask {
            OnAsk::Wait => {}
            OnAsk::Deny if ask.kind == AskKind::Permission => {
                let reason = Some("nobody is there to allow it".to_owned());
                let request = AnswerRequest { decision: Some("deny".to_owned()), value: None, reason };
                return self.post(&ask, &request).await;
            }
            OnAsk::Deny => {
                self.out.note("a question cannot be denied, so the run is cancelled (--on-ask deny)");
                return self.stop(Stopped::Ask, "qd run --on-ask deny met a question").await;
            }
            OnAsk::Fail => {
                self.out.note("the agent asks, so the run is cancelled (--on-ask fail)");
                return self.stop(Stopped::Ask, "qd run --on-ask fail").await;
            }
        }
        if self.out.json {
            self.out.aside(&ask::block(&ask));
        }
        if !self.has_person() {
            self.out.aside(&ask::commands(&ask));
        }
        self.open.push(ask);
        self.invite();
        Ok(())
    }

    /// Whether somebody sits at the terminal who can answer there.
    fn has_person(&self) -> bool {
        self.typed.tty && self.out.err_tty && !self.out.json
    }

    fn can_be_answered(&self) -> bool {
        self.has_person() && !self.open.is_empty()
    }

    /// Puts the prompt line for the oldest open ask.
    fn invite(&self) {
        if let Some(ask) = self.open.first().filter(|_| self.can_be_answered()) {
            self.out.aside(&ask::invitation(ask));
        }
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
                    self.invite();
                }
                Ok(())
            }
        }
    }

    /// Answers an ask. That somebody was faster, or that the answer does not fit, ends nothing.
    async fn post(&mut self, ask: &Ask, request: &AnswerRequest) -> Result<()> {
        match answer::post(self.client, ask.id.as_str(), request).await {
            Ok(_) => self.open.retain(|other| other.id != ask.id),
            Err(Failure::Refused(refusal)) => {
                self.out.note(&refusal.error.message);
                self.invite();
            }
            Err(failure) => return Err(failure),
        }
        Ok(())
    }

    /// Asks for the run's end; `run.finished` says when it has come.
    async fn stop(&mut self, why: Stopped, reason: &str) -> Result<()> {
        self.stopped = Some(why);
        let path = format!("{}/cancel", self.watched.session.agent_path());
        let run_id = Some(self.watched.receipt.run_id.clone());
        let request = CancelRequest { run_id, reason: Some(reason.to_owned()) };
        self.client.post::<Cancelled>(&path, &request).await?;
        Ok(())
    }
}
