//! The mailbox. A message that is not held becomes a run or a steer in the step that accepts it, so no crash can come
//! between accepting and delivering; the queue keeps the order of arrival. A message that the agent never received is
//! returned to the mailbox and held: it is not lost, and nothing starts again that a person stopped.
//!
//! The state holds only open messages, so it cannot know that an id was used before: callers look that up first.
//!
//! Design: docs/design/mail-becomes-a-run.md

use qd_protocol::event::{
    EventBody, MailAcknowledged, MailClaimed, MailDelivered, MailQuarantined, MailReturned, MailSent,
};
use qd_protocol::limits::{MAIL_OPEN_MAX, MAIL_RETURNS_MAX};
use qd_protocol::mail::{FROM_USER, MailDelivery, MailKind, MailMessage};
use qd_protocol::{EventNumber, MailId, RunId};

use super::step_builder::SessionStepBuilder;
use super::{
    CommandRefusal, CommandReply, MailDeliveryState, MailSubmission, MailboxEntry, PromptSubmission,
    SessionEffect,
};

impl SessionStepBuilder<'_> {
    pub(super) fn accept_mail(&mut self, submission: MailSubmission) {
        if self.mailbox_entry(&submission.id).is_some() {
            return self.set_reply(CommandReply::MailAccepted { event: None });
        }
        if self.closing.is_some() {
            return self.refuse(CommandRefusal::Closed);
        }
        if self.mail.len() >= MAIL_OPEN_MAX {
            return self.refuse(CommandRefusal::MailboxFull);
        }
        let requested = submission.deliver.unwrap_or(self.settings.mail);
        let steered = match requested {
            MailDelivery::Steer => self.steerable_run().ok(),
            MailDelivery::Prompt | MailDelivery::Hold => None,
        };
        let deliver = match (requested, &steered) {
            (MailDelivery::Hold, _) => MailDelivery::Hold,
            (_, Some(_)) => MailDelivery::Steer,
            (_, None) if self.queue_is_full() => return self.refuse(CommandRefusal::QueueFull),
            (_, None) => MailDelivery::Prompt,
        };
        let number = EventNumber(self.number.0 + 1);
        let own_run = submission.run.clone().unwrap_or_else(|| RunId::of_mail(&self.id, number));
        let prompt_text = format_mail_prompt(&submission);
        let MailSubmission {
            id,
            from,
            from_session,
            kind,
            text,
            in_reply_to,
            correlation_id,
            fingerprint,
            ..
        } = submission;
        let mail = MailMessage {
            id: id.clone(),
            from,
            from_session_id: from_session,
            to: self.id.clone(),
            kind,
            text,
            in_reply_to,
            correlation_id,
            sent_at: self.context.now.wall,
        };
        let (run_id, else_run_id) = match deliver {
            MailDelivery::Prompt => (Some(own_run.clone()), None),
            MailDelivery::Steer => (steered.clone(), Some(own_run.clone())),
            MailDelivery::Hold => (None, None),
        };
        self.emit(None, EventBody::MailSent(MailSent { mail, deliver, run_id, else_run_id, fingerprint }));
        let event = self.last_event_index();
        match (deliver, steered) {
            (MailDelivery::Steer, Some(run)) => {
                self.accept_steer(&run, prompt_text.into(), Some(id));
            }
            (MailDelivery::Hold, _) => {}
            _ => {
                let fingerprint = format!("mail:{id}");
                let prompt = PromptSubmission {
                    run: own_run,
                    prompt: prompt_text.into(),
                    attachments: Vec::new(),
                    fingerprint,
                };
                self.enqueue_prompt(prompt, Some(id));
                self.advance();
            }
        }
        self.set_reply(CommandReply::MailAccepted { event: Some(event) });
    }

    /// Claims the oldest held messages.
    pub(super) fn claim_mail(&mut self, max: usize, lease_ms: u64) {
        self.return_expired_claims();
        let until = self.context.now.wall.plus(lease_ms);
        let held = self.mail.iter().filter(|entry| entry.delivery == MailDeliveryState::Held);
        let held: Vec<MailId> = held.map(|entry| entry.id.clone()).take(max).collect();
        let mut mail = Vec::with_capacity(held.len());
        for id in held {
            let claim = EventNumber(self.number.0 + 1);
            let claimed = MailClaimed { id: id.clone(), claim, claim_expires_at: until };
            self.emit(None, EventBody::MailClaimed(claimed));
            mail.push((id, claim));
        }
        self.set_reply(CommandReply::MailClaimed { mail, until });
    }

    /// Acknowledges a message. Expired claims are returned first: an expired claim is no longer valid, even if no
    /// tick has noticed, because another caller may have claimed the message since.
    pub(super) fn acknowledge_mail(&mut self, id: &MailId, by: Option<EventNumber>) {
        self.return_expired_claims();
        match self.mailbox_entry(id).map(|entry| &entry.delivery) {
            Some(MailDeliveryState::Claimed { claim, .. }) if by.is_none_or(|by| by == *claim) => {
                let claim = *claim;
                self.emit(None, EventBody::MailAcknowledged(MailAcknowledged { id: id.clone(), claim }));
                self.set_reply(CommandReply::Done);
            }
            _ => self.refuse(CommandRefusal::NotClaimed),
        }
    }

    /// Returns messages that were claimed and not acknowledged in time.
    pub(super) fn return_expired_claims(&mut self) {
        let now = self.context.now;
        let expired = |entry: &&MailboxEntry| entry.delivery.claim_time_left(now) == Some(0);
        let expired: Vec<MailId> = self.mail.iter().filter(expired).map(|entry| entry.id.clone()).collect();
        for id in expired {
            self.return_mail(&id, "it was claimed and not acknowledged in time");
        }
    }

    /// Records that the agent has the message.
    pub(super) fn record_mail_delivery(&mut self, id: MailId, delivered_as: MailDelivery, run: &RunId) {
        let unused_run = self.fallback_run(&id);
        let delivered = MailDelivered { id, delivered_as, run_id: run.clone() };
        self.emit(Some(run.clone()), EventBody::MailDelivered(delivered));
        // The run that the message would have become will never exist; the fleet may be waiting for it.
        self.notify_fleet(unused_run);
    }

    /// The message that was delivered as this steer.
    pub(super) fn mail_of_steer(&self, run: &RunId, accepted: EventNumber) -> Option<MailId> {
        let steers = &self.run(run)?.steers;
        steers.iter().find(|steer| steer.accepted == accepted)?.mail.clone()
    }

    /// The run that a message becomes if the steer is missed.
    pub(super) fn fallback_run(&self, id: &MailId) -> Option<RunId> {
        match &self.mailbox_entry(id)?.delivery {
            MailDeliveryState::Steer { fallback_run, .. } => Some(fallback_run.clone()),
            _ => None,
        }
    }

    /// Returns the message of a run that ended before the agent received it.
    pub(super) fn return_unread_mail(&mut self, run: &RunId) {
        if let Some(mail) = self.run(run).and_then(|run| run.mail.clone()) {
            self.return_mail(&mail, "its run ended before the agent received it");
        }
    }

    /// Returns a message to the mailbox to be claimed. A message that was returned too often is quarantined.
    pub(super) fn return_mail(&mut self, id: &MailId, reason: &str) {
        let Some(entry) = self.mailbox_entry(id) else { return };
        let (returns, unused_run) = (entry.returns + 1, self.fallback_run(id));
        if returns >= MAIL_RETURNS_MAX {
            let reason = format!("it was returned {returns} times, the last time because {reason}");
            self.emit(None, EventBody::MailQuarantined(MailQuarantined { id: id.clone(), reason }));
        } else {
            let returned = MailReturned { id: id.clone(), reason: reason.to_owned(), returns };
            self.emit(None, EventBody::MailReturned(returned));
        }
        self.notify_fleet(unused_run);
    }

    /// Quarantines all open messages, since no event can follow the end of a session.
    pub(super) fn close_mailbox(&mut self) {
        let open: Vec<MailId> = self.mail.iter().map(|entry| entry.id.clone()).collect();
        for id in open {
            let reason = "the session was closed".to_owned();
            self.emit(None, EventBody::MailQuarantined(MailQuarantined { id, reason }));
        }
    }

    fn notify_fleet(&mut self, run: Option<RunId>) {
        if let Some(run) = run.filter(|_| self.settings.fleet.is_some()) {
            self.add_effect(SessionEffect::NotifyFleet { run });
        }
    }
}

/// The text that the agent gets. A task from a person reads like an ordinary prompt. Any other message starts with a
/// line that names the sender and the id to reply to.
fn format_mail_prompt(submission: &MailSubmission) -> String {
    let MailSubmission { id, from, kind, text, in_reply_to, .. } = submission;
    if from == FROM_USER && *kind == MailKind::Task && in_reply_to.is_none() {
        return text.clone();
    }
    let reply_note = in_reply_to.as_ref().map_or(String::new(), |mail| format!(" in reply to {mail}"));
    format!("--- {} from {from} ({id}){reply_note} ---\n{text}", kind.as_str())
}
