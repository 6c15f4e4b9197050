//! The mailbox. A message that is not held becomes a run or a steer in the step that takes it, so between "it is ours"
//! and "it is on its way" no crash can fall; the order of the queue is the order of arrival. What the agent never got
//! comes back and is held: nothing is lost, and nothing starts again behind the back of whoever stopped it.
//!
//! That an id is one message for ever is not known here, where only open messages are: whoever puts one has looked it up.

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
    pub(super) fn accept_mail(&mut self, put: MailSubmission) {
        if self.mailbox_entry(&put.id).is_some() {
            return self.set_reply(CommandReply::MailAccepted { event: None });
        }
        if self.closing.is_some() {
            return self.refuse(CommandRefusal::Closed);
        }
        if self.mail.len() >= MAIL_OPEN_MAX {
            return self.refuse(CommandRefusal::MailboxFull);
        }
        let wanted = put.deliver.unwrap_or(self.settings.mail);
        let steered = match wanted {
            MailDelivery::Steer => self.steerable_run().ok(),
            MailDelivery::Prompt | MailDelivery::Hold => None,
        };
        let deliver = match (wanted, &steered) {
            (MailDelivery::Hold, _) => MailDelivery::Hold,
            (_, Some(_)) => MailDelivery::Steer,
            (_, None) if self.queue_is_full() => return self.refuse(CommandRefusal::QueueFull),
            (_, None) => MailDelivery::Prompt,
        };
        let number = EventNumber(self.number.0 + 1);
        let own = put.run.clone().unwrap_or_else(|| RunId::of_mail(&self.id, number));
        let words = format_mail_prompt(&put);
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
        } = put;
        let mail = MailMessage {
            id: id.clone(),
            from,
            from_session_id: from_session,
            to: self.id.clone(),
            kind,
            text,
            in_reply_to,
            correlation_id,
            sent_at: self.context.now,
        };
        let (run_id, else_run_id) = match deliver {
            MailDelivery::Prompt => (Some(own.clone()), None),
            MailDelivery::Steer => (steered.clone(), Some(own.clone())),
            MailDelivery::Hold => (None, None),
        };
        self.emit(None, EventBody::MailSent(MailSent { mail, deliver, run_id, else_run_id, fingerprint }));
        let event = self.last_event_index();
        match (deliver, steered) {
            (MailDelivery::Steer, Some(run)) => {
                self.accept_steer(&run, words.into(), Some(id));
            }
            (MailDelivery::Hold, _) => {}
            _ => {
                let fingerprint = format!("mail:{id}");
                let prompt =
                    PromptSubmission { run: own, prompt: words.into(), attachments: Vec::new(), fingerprint };
                self.enqueue_prompt(prompt, Some(id));
                self.advance();
            }
        }
        self.set_reply(CommandReply::MailAccepted { event: Some(event) });
    }

    /// Gives out the oldest messages that wait.
    pub(super) fn claim_mail(&mut self, max: usize, limit_ms: u64) {
        self.return_expired_claims();
        let until = self.context.now.plus(limit_ms);
        let held = self.mail.iter().filter(|letter| letter.delivery == MailDeliveryState::Held);
        let held: Vec<MailId> = held.map(|letter| letter.id.clone()).take(max).collect();
        let mut mail = Vec::with_capacity(held.len());
        for id in held {
            let claim = EventNumber(self.number.0 + 1);
            let claimed = MailClaimed { id: id.clone(), claim, claim_expires_at: until };
            self.emit(None, EventBody::MailClaimed(claimed));
            mail.push((id, claim));
        }
        self.set_reply(CommandReply::MailClaimed { mail, until });
    }

    /// A claim that has run out counts no more, also if nobody has noticed yet: the message may be another's by now.
    pub(super) fn acknowledge_mail(&mut self, id: &MailId, by: Option<EventNumber>) {
        self.return_expired_claims();
        match self.mailbox_entry(id).map(|letter| &letter.delivery) {
            Some(MailDeliveryState::Claimed { claim, .. }) if by.is_none_or(|by| by == *claim) => {
                let claim = *claim;
                self.emit(None, EventBody::MailAcknowledged(MailAcknowledged { id: id.clone(), claim }));
                self.set_reply(CommandReply::Done);
            }
            _ => self.refuse(CommandRefusal::NotClaimed),
        }
    }

    /// What was claimed and not acknowledged in time comes back.
    pub(super) fn return_expired_claims(&mut self) {
        let now = self.context.now;
        let expired = |letter: &&MailboxEntry| matches!(letter.delivery, MailDeliveryState::Claimed { until, .. } if until <= now);
        let expired: Vec<MailId> = self.mail.iter().filter(expired).map(|letter| letter.id.clone()).collect();
        for id in expired {
            self.return_mail(&id, "it was claimed and not acknowledged in time");
        }
    }

    /// The agent has it.
    pub(super) fn record_mail_delivery(&mut self, id: MailId, delivered_as: MailDelivery, run: &RunId) {
        let own = self.fallback_run(&id);
        let delivered = MailDelivered { id, delivered_as, run_id: run.clone() };
        self.emit(Some(run.clone()), EventBody::MailDelivered(delivered));
        // Whoever waits for the run that it would have become waits for nothing.
        self.notify_fleet(own);
    }

    /// The message that a steer of a run is.
    pub(super) fn mail_of_steer(&self, run: &RunId, accepted: EventNumber) -> Option<MailId> {
        let steers = &self.run(run)?.steers;
        steers.iter().find(|steer| steer.accepted == accepted)?.mail.clone()
    }

    /// The run that a message becomes if the one that it is told to does not take it.
    pub(super) fn fallback_run(&self, id: &MailId) -> Option<RunId> {
        match &self.mailbox_entry(id)?.delivery {
            MailDeliveryState::Steer { fallback_run: otherwise, .. } => Some(otherwise.clone()),
            _ => None,
        }
    }

    /// A run that ends before the agent had it leaves its message in the mailbox.
    pub(super) fn return_unread_mail(&mut self, run: &RunId) {
        if let Some(mail) = self.run(run).and_then(|run| run.mail.clone()) {
            self.return_mail(&mail, "its run ended before the agent had it");
        }
    }

    /// Puts a message back, to be claimed; one that has come back too often is kept from everybody.
    pub(super) fn return_mail(&mut self, id: &MailId, why: &str) {
        let Some(letter) = self.mailbox_entry(id) else { return };
        let (returns, own) = (letter.returns + 1, self.fallback_run(id));
        if returns >= MAIL_RETURNS_MAX {
            let reason = format!("it has come back {returns} times; at last because {why}");
            self.emit(None, EventBody::MailQuarantined(MailQuarantined { id: id.clone(), reason }));
        } else {
            let returned = MailReturned { id: id.clone(), reason: why.to_owned(), returns };
            self.emit(None, EventBody::MailReturned(returned));
        }
        self.notify_fleet(own);
    }

    /// Nothing comes after the end of a session, so nothing may be left open.
    pub(super) fn close_mailbox(&mut self) {
        let open: Vec<MailId> = self.mail.iter().map(|letter| letter.id.clone()).collect();
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

/// What the agent is told. A person's task is told like a prompt of theirs; of anything else the agent has to know whose
/// words these are, and under which id it can answer them.
fn format_mail_prompt(put: &MailSubmission) -> String {
    let MailSubmission { id, from, kind, text, in_reply_to, .. } = put;
    if from == FROM_USER && *kind == MailKind::Task && in_reply_to.is_none() {
        return text.clone();
    }
    let answers = in_reply_to.as_ref().map_or(String::new(), |mail| format!(" in reply to {mail}"));
    format!("--- {} from {from} ({id}){answers} ---\n{text}", kind.as_str())
}
