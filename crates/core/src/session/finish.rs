//! Ends a run: exactly once, and with every open ask, steer and message settled before its last event.

use qd_protocol::event::{
    EventBody, MessageFinish, MessageFinished, MessageRole, ProcessCleanup, ResolvedBy, RunError,
    RunFinished, RunStopCause, SteerMissed,
};
use qd_protocol::limits::{HEAD_MAX, INLINE_MAX};
use qd_protocol::text::{escaped_head, escaped_len};
use qd_protocol::{EventNumber, FinishReason, MessageId, RunId};

use super::step_builder::SessionStepBuilder;
use super::{OversizedText, PromptSubmission, SessionEffect};

/// How a run ends, unless a stop was requested.
pub(super) struct RunEnding {
    pub(super) reason: FinishReason,
    /// The result reported by the agent, if any.
    pub(super) text: Option<String>,
    pub(super) error: Option<RunError>,
    pub(super) processes: ProcessCleanup,
}

impl RunEnding {
    pub(super) fn of(reason: FinishReason) -> Self {
        Self { reason, text: None, error: None, processes: ProcessCleanup::default() }
    }

    pub(super) fn failed(error: RunError) -> Self {
        Self { error: Some(error), ..Self::of(FinishReason::Error) }
    }
}

impl SessionStepBuilder<'_> {
    /// Ends a run without a result or an error.
    pub(super) fn finish_run(&mut self, run: &RunId, reason: FinishReason) {
        self.finish_run_with(run, RunEnding::of(reason));
    }

    /// Ends a run. If a stop was requested, that decides the finish reason, whatever the agent reported.
    pub(super) fn finish_run_with(&mut self, id: &RunId, ending: RunEnding) {
        let Some(run) = self.run(id) else { return };
        let never_started = run.execution.is_none();
        let stop = run.execution.as_ref().and_then(|started| started.stop);
        let usage = run.execution.as_ref().map(|started| started.usage).unwrap_or_default();
        let reported = ending.error.map(|error| self.without_absurd_reset(error));
        // Also of a run that is being stopped: the quota is exhausted all the same.
        let quota_until = reported.as_ref().and_then(|error| error.resets_at);
        let (reason, error) = match stop {
            Some(stop) => (stop.by.finish_reason(), self.stop_error(stop.by)),
            None => (ending.reason, reported),
        };
        let by = if reason == FinishReason::Cancelled { ResolvedBy::Cancel } else { ResolvedBy::End };
        self.withdraw_asks(id, by);
        self.settle_missed_steers(id, reason == FinishReason::Cancelled);
        if let Some(error) = &error {
            self.emit(Some(id.clone()), EventBody::ErrorRaised(error.clone()));
        }
        if never_started {
            self.return_unread_mail(id);
            self.open_assistant_message(id);
        }
        let message_id = MessageId::assistant(id);
        let finished =
            MessageFinished { message_id, role: MessageRole::Assistant, finish: MessageFinish { reason } };
        let (text, oversized) = self.result_text(id, ending.text);
        self.emit(Some(id.clone()), EventBody::MessageFinished(finished));
        let processes = ending.processes;
        let finished = RunFinished { finish_reason: reason, text, blob: None, error, usage, processes };
        self.emit(Some(id.clone()), EventBody::RunFinished(finished));
        if let Some(text) = oversized {
            let event_index = self.last_event_index();
            self.add_oversized_text(OversizedText { event_index, text });
        }
        if let Some(until) = quota_until {
            self.record_exhausted_quota(until);
        }
        if self.settings.fleet.is_some() {
            self.add_effect(SessionEffect::NotifyFleet { run: id.clone() });
        }
        self.notify_parent();
    }

    /// The error of a run that was stopped for this cause, if that is an error.
    fn stop_error(&self, cause: RunStopCause) -> Option<RunError> {
        (cause == RunStopCause::JournalLimit).then(|| {
            let message = format!(
                "the agent of this session has said more than {} MiB; raise `max_journal_mb` of the session to go on",
                self.journal_limit_mb()
            );
            RunError::new("journal_limit", message)
        })
    }

    /// The result text if it fits into the event. Otherwise its head, and the text to write to a file: the given
    /// text, or `None` for the run's deltas in the journal.
    fn result_text(&self, id: &RunId, reported: Option<String>) -> (String, Option<Option<String>>) {
        let started = self.run(id).and_then(|run| run.execution.as_ref());
        let text = match (reported, started) {
            (Some(reported), _) => reported,
            (None, Some(started)) if started.text.len() as u64 != started.text_len => {
                return (escaped_head(&started.text, HEAD_MAX).to_owned(), Some(None));
            }
            (None, Some(started)) => started.text.clone(),
            (None, None) => String::new(),
        };
        if escaped_len(&text) <= INLINE_MAX {
            (text, None)
        } else {
            (escaped_head(&text, HEAD_MAX).to_owned(), Some(Some(text)))
        }
    }

    /// Settles all steers that the turn did not take. `cancelled` says whether the run ends because of a cancel.
    pub(super) fn settle_missed_steers(&mut self, id: &RunId, cancelled: bool) {
        let Some(run) = self.run(id) else { return };
        let open: Vec<EventNumber> = run.steers.iter().map(|steer| steer.accepted).collect();
        for steer in open {
            self.settle_missed_steer(id, steer, cancelled);
        }
    }

    /// Settles a steer that the turn did not take. It runs next, unless a later cancel included it.
    pub(super) fn settle_missed_steer(&mut self, id: &RunId, steer: EventNumber, cancelled: bool) {
        let Some(run) = self.run(id) else { return };
        let stop = run.execution.as_ref().map(|started| started.stop.map(|stop| stop.number));
        // A run that never started was cancelled with everything that it had.
        let was_cancelled = cancelled && stop.is_none_or(|stop| stop.is_some_and(|stop| steer < stop));
        if !was_cancelled && self.closing.is_none() {
            return self.requeue_missed_steer(id, steer);
        }
        let mail = self.mail_of_steer(id, steer);
        let missed = SteerMissed { steer, next_run_id: None };
        self.emit(Some(id.clone()), EventBody::SteerMissed(missed));
        if let Some(mail) = mail {
            self.return_mail(&mail, "the run that it was sent to was cancelled");
        }
    }

    /// Turns a steer that the turn did not take into the next run.
    fn requeue_missed_steer(&mut self, id: &RunId, accepted: EventNumber) {
        let Some(steer) =
            self.run(id).and_then(|run| run.steers.iter().find(|steer| steer.accepted == accepted))
        else {
            return;
        };
        let (prompt, mail) = (steer.full_text(), steer.mail.clone());
        let next = mail.as_ref().and_then(|mail| self.fallback_run(mail));
        let next = next.unwrap_or_else(|| RunId::of_missed_steer(&self.id, accepted));
        let missed = SteerMissed { steer: accepted, next_run_id: Some(next.clone()) };
        self.emit(Some(id.clone()), EventBody::SteerMissed(missed));
        let position = 1 + self.runs.iter().skip(1).take_while(|run| run.was_steer).count() as u32;
        let fingerprint = format!("steer:{}", accepted.0);
        let prompt = PromptSubmission { run: next, prompt, attachments: Vec::new(), fingerprint };
        self.emit_run_accepted(prompt, position, Some(accepted), mail);
    }
}
