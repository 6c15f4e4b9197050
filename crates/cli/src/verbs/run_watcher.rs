//! Watches a run until it ends: output, asks, Ctrl-C, the time limit and the spinner, in one loop. The run belongs to
//! the daemon; the watcher can only ask to cancel it.

use std::time::Duration;

use qd_protocol::api::{AnswerRequest, CancelRequest, CancelResponse, PromptReceipt};
use qd_protocol::event::{Ask, AskKind, EventBody, QueueReason};
use qd_protocol::{FinishReason, Seq};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::open_asks::{AnswerOutcome, OpenAsks};
use super::transcript::{TranscriptLayout, TranscriptPrinter, is_of_run};
use crate::args::OnAskAction;
use crate::client::DaemonClient;
use crate::client::stream::{EventStream, EventStreamItem, ReceivedEvent};
use crate::failure::{CliExitCode, Result};
use crate::output::CliOutput;
use crate::refs::ResolvedSession;
use crate::render::{ask, spinner};

/// The deadline of the timer when no time limit is set: longer than any run.
const NO_TIMEOUT: Duration = Duration::from_secs(366 * 86_400);

/// The run to watch, and the flags of `qd run` that matter for it.
#[derive(Debug)]
pub(super) struct WatchedRun {
    pub(super) session: ResolvedSession,
    pub(super) receipt: PromptReceipt,
    pub(super) agent: String,
    /// What `--on-ask` says. Without it, asks are answered here if that is possible.
    pub(super) on_ask: Option<OnAskAction>,
    /// Seconds after which the run is cancelled.
    pub(super) timeout: Option<f64>,
}

/// Why the watcher cancelled the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WatcherStopReason {
    Interrupt,
    Timeout,
    Ask,
}

#[derive(Debug)]
pub(super) struct RunWatcher<'a> {
    out: &'a CliOutput,
    client: &'a DaemonClient,
    watched: WatchedRun,
    transcript: TranscriptPrinter<'a>,
    open_asks: OpenAsks<'a>,
    /// Set once the watcher has cancelled the run.
    stop_reason: Option<WatcherStopReason>,
    /// What the spinner says the agent is doing.
    activity: &'static str,
    activity_since: Instant,
    /// The spinner appears some time after the last event.
    last_event_at: Instant,
}

impl<'a> RunWatcher<'a> {
    pub(super) fn new(out: &'a CliOutput, client: &'a DaemonClient, watched: WatchedRun) -> Self {
        let now = Instant::now();
        Self {
            out,
            client,
            watched,
            transcript: TranscriptPrinter::new(out, client, TranscriptLayout::Answer),
            open_asks: OpenAsks::new(out, client),
            stop_reason: None,
            activity: "starts",
            activity_since: now,
            last_event_at: now,
        }
    }

    /// Watches until the run has ended, or until a second Ctrl-C.
    pub(super) async fn watch(mut self, mut stream: EventStream) -> Result<CliExitCode> {
        let mut interrupts = signal(SignalKind::interrupt()).map_err(anyhow::Error::from)?;
        let mut detaches = detach_signal(self.out)?;
        let limit = self.watched.timeout.map_or(NO_TIMEOUT, Duration::from_secs_f64);
        let deadline = sleep_until(Instant::now() + limit);
        tokio::pin!(deadline);
        let mut ticks = interval(spinner::TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut frames = 0;
        loop {
            tokio::select! {
                next = stream.next() => match next? {
                    EventStreamItem::Event(arrived) => {
                        if let Some(exit) = self.handle_event(*arrived).await? {
                            return Ok(exit);
                        }
                    }
                    // No event had arrived yet, so continue from the position in the receipt.
                    EventStreamItem::Gap => {
                        let before = Seq(self.watched.receipt.seq.0.saturating_sub(1));
                        stream = EventStream::after(self.client, &self.watched.session.stream_path(), before);
                    }
                },
                _ = interrupts.recv() => {
                    if self.stop_reason == Some(WatcherStopReason::Interrupt) {
                        self.transcript.end_line()?;
                        let id = &self.watched.session.id;
                        self.out.print_note(&format!("not waiting for the cancelled run; see `qd attach {id}`"));
                        return Ok(CliExitCode::Cancelled);
                    }
                    self.cancel_run(WatcherStopReason::Interrupt, "Ctrl-C").await?;
                    self.out.print_note("cancelling; press Ctrl-C again to exit without waiting");
                }
                () = wait_for_detach(&mut detaches) => {
                    self.transcript.end_line()?;
                    self.note_detached();
                    return Ok(CliExitCode::Success);
                }
                () = &mut deadline, if self.watched.timeout.is_some() && self.stop_reason.is_none() => {
                    self.cancel_run(WatcherStopReason::Timeout, "qd run --timeout").await?;
                }
                line = self.open_asks.next_line(), if self.open_asks.awaiting_answer().is_some() => {
                    if self.open_asks.handle_line(line).await? == AnswerOutcome::Refused {
                        self.open_asks.show_prompt();
                    }
                }
                _ = ticks.tick(), if self.out.err_tty && !self.out.json && self.open_asks.is_empty() => {
                    if self.last_event_at.elapsed() >= spinner::SHOW_AFTER {
                        frames += 1;
                        let since = u64::try_from(self.activity_since.elapsed().as_millis()).unwrap_or(u64::MAX);
                        let agent = &self.watched.agent;
                        self.out.show_spinner(&spinner::spinner_frame(frames, agent, self.activity, since));
                    }
                }
            }
        }
    }

    fn note_detached(&self) {
        let id = &self.watched.session.id;
        let timeout = match self.watched.timeout {
            Some(_) => "; --timeout no longer applies",
            None => "",
        };
        self.out.print_note(&format!("detached, the run goes on{timeout}: qd attach {id}"));
    }

    /// Handles one event; returns the exit code if it was the last.
    async fn handle_event(&mut self, arrived: ReceivedEvent) -> Result<Option<CliExitCode>> {
        let ours = is_of_run(&arrived.event, &self.watched.receipt.run_id);
        // Events of other runs are skipped. Events without a run are printed only with --json.
        let of_no_run = self.out.json && arrived.event.run_id.is_none();
        if !ours && !of_no_run {
            return Ok(None);
        }
        self.last_event_at = Instant::now();
        let data = arrived.event.data.to_string();
        let body = EventBody::decode(&arrived.event.kind, data.as_bytes()).unwrap_or(None);
        self.transcript.show([arrived]).await?;
        match body.filter(|_| ours) {
            Some(EventBody::RunQueued(queued)) => self.set_activity(match queued.reason {
                QueueReason::Busy => "is queued",
                QueueReason::Halted => "is halted",
                QueueReason::Capacity => "waits for a free slot",
                QueueReason::Quota => "waits for its quota to reset",
            }),
            Some(EventBody::RunStarted(_)) => self.set_activity("works"),
            Some(EventBody::RunCancelRequested(_)) => self.set_activity("stops"),
            Some(EventBody::AskOpened(opened)) => return self.handle_ask(opened.ask).await,
            Some(EventBody::AskResolved(resolved)) => {
                self.open_asks.remove(&resolved.ask_id);
                self.open_asks.show_first();
            }
            Some(EventBody::RunFinished(finished)) => {
                return Ok(Some(self.exit_code(finished.finish_reason)));
            }
            _ => {}
        }
        Ok(None)
    }

    fn set_activity(&mut self, activity: &'static str) {
        self.activity = activity;
        self.activity_since = Instant::now();
    }

    fn exit_code(&self, reason: FinishReason) -> CliExitCode {
        match (reason, self.stop_reason) {
            (FinishReason::Cancelled, Some(WatcherStopReason::Timeout)) => {
                self.out.print_note("cancelled: it took longer than --timeout");
                CliExitCode::TimedOut
            }
            (FinishReason::Cancelled, Some(WatcherStopReason::Ask)) => CliExitCode::Failed,
            _ => CliExitCode::from_finish_reason(reason),
        }
    }

    /// Handles a new ask; returns the exit code if the watcher leaves because of it.
    async fn handle_ask(&mut self, ask: Ask) -> Result<Option<CliExitCode>> {
        let default = if self.open_asks.is_interactive() { OnAskAction::Wait } else { OnAskAction::Exit };
        match self.watched.on_ask.unwrap_or(default) {
            OnAskAction::Wait => {}
            OnAskAction::Exit => {
                self.show_ask(&ask);
                self.out.print_note(&format!(
                    "not waiting for an answer; the run goes on when it is answered: qd wait {}\n\
                     (--on-ask wait waits here, --policy decides without you)",
                    self.watched.session.id
                ));
                return Ok(Some(CliExitCode::Failed));
            }
            OnAskAction::Deny if ask.kind == AskKind::Permission => {
                let reason = Some("nobody is available to allow this".to_owned());
                let request =
                    AnswerRequest { decision: Some("deny".to_owned()), reason, ..AnswerRequest::default() };
                if self.open_asks.send_answer(&ask, request).await? == AnswerOutcome::Refused {
                    self.open_asks.show_prompt();
                }
                return Ok(None);
            }
            OnAskAction::Deny => {
                self.out
                    .print_note("cancelling: the agent asked a question, which --on-ask deny cannot answer");
                self.cancel_run(WatcherStopReason::Ask, "a question met qd run --on-ask deny").await?;
                return Ok(None);
            }
            OnAskAction::Fail => {
                self.out.print_note("cancelling: the agent asked (--on-ask fail)");
                self.cancel_run(WatcherStopReason::Ask, "qd run --on-ask fail").await?;
                return Ok(None);
            }
        }
        self.show_ask(&ask);
        self.open_asks.push(ask);
        self.open_asks.show_prompt();
        Ok(None)
    }

    /// Prints what the transcript has not shown: with --json the ask itself, and without a terminal how to answer it.
    fn show_ask(&self, ask: &Ask) {
        if self.out.json {
            self.out.print_stderr(&ask::format_ask(ask, self.out.err_style(), self.out.err_width()));
        }
        if !self.open_asks.is_interactive() {
            self.out.print_stderr(&ask::answer_commands(ask));
        }
    }

    /// Requests the cancel; `run.finished` follows when the run has ended.
    async fn cancel_run(&mut self, stop_reason: WatcherStopReason, reason: &str) -> Result<()> {
        self.stop_reason = Some(stop_reason);
        let path = format!("{}/cancel", self.watched.session.agent_path());
        let run_id = Some(self.watched.receipt.run_id.clone());
        let request = CancelRequest { run_id, reason: Some(reason.to_owned()) };
        self.client.post::<CancelResponse>(&path, &request).await?;
        Ok(())
    }
}

/// Ctrl-Z, which leaves what is being watched. Without a terminal the signal keeps its usual meaning.
pub(super) fn detach_signal(out: &CliOutput) -> Result<Option<Signal>> {
    if !out.err_tty {
        return Ok(None);
    }
    let kind = SignalKind::from_raw(rustix::process::Signal::TSTP.as_raw());
    Ok(Some(signal(kind).map_err(anyhow::Error::from)?))
}

/// Waits for Ctrl-Z.
pub(super) async fn wait_for_detach(detaches: &mut Option<Signal>) {
    match detaches {
        Some(detaches) => _ = detaches.recv().await,
        None => std::future::pending().await,
    }
}
