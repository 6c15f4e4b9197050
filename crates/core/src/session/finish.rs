//! How a run ends: exactly once, with everything that it owes said before its last event.

use qd_protocol::event::{
    Body, Finish, MessageFinished, Processes, ResolvedBy, Role, RunError, RunFinished, SteerMissed,
};
use qd_protocol::limits::{HEAD_MAX, INLINE_MAX};
use qd_protocol::text::{escaped_len, head};
use qd_protocol::{FinishReason, MessageId, Number, RunId};

use super::draft::Draft;
use super::{Accept, Effect, Large};

/// How a run is to end, if nobody asked for another end.
pub(super) struct Ending {
    pub(super) reason: FinishReason,
    /// The agent's result, if it gave one.
    pub(super) text: Option<String>,
    pub(super) error: Option<RunError>,
    pub(super) processes: Processes,
}

impl Ending {
    pub(super) fn of(reason: FinishReason) -> Self {
        Self { reason, text: None, error: None, processes: Processes::default() }
    }

    pub(super) fn failed(error: RunError) -> Self {
        Self { error: Some(error), ..Self::of(FinishReason::Error) }
    }
}

impl Draft<'_> {
    /// Ends a run with nothing more to say than why.
    pub(super) fn finish(&mut self, run: &RunId, reason: FinishReason) {
        self.end(run, Ending::of(reason));
    }

    /// Ends a run. If a stop was asked for, that is why it ended, whatever the agent says.
    pub(super) fn end(&mut self, id: &RunId, ending: Ending) {
        let Some(run) = self.run(id) else { return };
        let never_started = run.started.is_none();
        let stop = run.started.as_ref().and_then(|started| started.stop);
        let usage = run.started.as_ref().map(|started| started.usage).unwrap_or_default();
        let (reason, error) = match stop {
            Some(stop) => (stop.by.finish_reason(), None),
            None => (ending.reason, ending.error),
        };
        let by = if reason == FinishReason::Cancelled { ResolvedBy::Cancel } else { ResolvedBy::End };
        self.withdraw(id, by);
        self.miss_all(id, reason == FinishReason::Cancelled);
        if let Some(error) = &error {
            self.emit(Some(id.clone()), Body::ErrorRaised(error.clone()));
        }
        if never_started {
            self.return_unread(id);
            self.open_answer(id);
        }
        let message_id = MessageId::assistant(id);
        let finished = MessageFinished { message_id, role: Role::Assistant, finish: Finish { reason } };
        let (text, large) = self.result(id, ending.text);
        self.emit(Some(id.clone()), Body::MessageFinished(finished));
        let processes = ending.processes;
        let finished = RunFinished { finish_reason: reason, text, blob: None, error, usage, processes };
        self.emit(Some(id.clone()), Body::RunFinished(finished));
        if let Some(text) = large {
            let event = self.last_event();
            self.large(Large { event, text });
        }
        if self.settings.fleet.is_some() {
            self.effect(Effect::TellFleet { run: id.clone() });
        }
        self.tell_parent();
    }

    /// The text of a run, or its head and what must be kept as a file: the text, or the run's deltas in the journal.
    fn result(&self, id: &RunId, given: Option<String>) -> (String, Option<Option<String>>) {
        let started = self.run(id).and_then(|run| run.started.as_ref());
        let text = match (given, started) {
            (Some(given), _) => given,
            (None, Some(started)) if started.text.len() as u64 != started.text_len => {
                return (head(&started.text, HEAD_MAX).to_owned(), Some(None));
            }
            (None, Some(started)) => started.text.clone(),
            (None, None) => String::new(),
        };
        if escaped_len(&text) <= INLINE_MAX {
            (text, None)
        } else {
            (head(&text, HEAD_MAX).to_owned(), Some(Some(text)))
        }
    }

    /// What the turn did not take is not lost: it runs next. But a cancel that came after a steer meant it too.
    pub(super) fn miss_all(&mut self, id: &RunId, cancelled: bool) {
        let Some(run) = self.run(id) else { return };
        let stop = run.started.as_ref().and_then(|started| started.stop).map(|stop| stop.number);
        let never_started = run.started.is_none();
        let left: Vec<Number> = run.steers.iter().map(|steer| steer.accepted).collect();
        for steer in left {
            let meant = cancelled && (never_started || stop.is_some_and(|stop| steer < stop));
            match meant || self.closing.is_some() {
                true => {
                    let mail = self.mail_of_steer(id, steer);
                    let missed = SteerMissed { steer, next_run_id: None };
                    self.emit(Some(id.clone()), Body::SteerMissed(missed));
                    if let Some(mail) = mail {
                        self.give_back(&mail, "the run that it was told to was cancelled");
                    }
                }
                false => self.miss(id, steer),
            }
        }
    }

    /// A steer that the turn did not take becomes the next run.
    pub(super) fn miss(&mut self, id: &RunId, accepted: Number) {
        let Some(steer) =
            self.run(id).and_then(|run| run.steers.iter().find(|steer| steer.accepted == accepted))
        else {
            return;
        };
        let (prompt, mail) = (steer.words(), steer.mail.clone());
        let next = mail.as_ref().and_then(|mail| self.otherwise(mail));
        let next = next.unwrap_or_else(|| RunId::of_missed_steer(&self.id, accepted));
        let missed = SteerMissed { steer: accepted, next_run_id: Some(next.clone()) };
        self.emit(Some(id.clone()), Body::SteerMissed(missed));
        let position = 1 + self.runs.iter().skip(1).take_while(|run| run.was_steer).count() as u32;
        let fingerprint = format!("steer:{}", accepted.0);
        let prompt = Accept { run: next, prompt, attachments: Vec::new(), fingerprint };
        self.admit(prompt, position, Some(accepted), mail);
    }
}
