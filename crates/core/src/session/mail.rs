//! The mailbox. A message that is not held becomes a run or a steer in the step that takes it, so between "it is ours"
//! and "it is on its way" no crash can fall; the order of the queue is the order of arrival. What the agent never got
//! comes back and is held: nothing is lost, and nothing starts again behind the back of whoever stopped it.
//!
//! That an id is one message for ever is not known here, where only open messages are: whoever puts one has looked it up.

use qd_protocol::event::{
    Body, MailAcknowledged, MailClaimed, MailDelivered, MailQuarantined, MailReturned, MailSent,
};
use qd_protocol::limits::{MAIL_OPEN_MAX, MAIL_RETURNS_MAX};
use qd_protocol::mail::{Deliver, FROM_USER, MailKind, Message};
use qd_protocol::{MailId, Number, RunId};

use super::draft::Draft;
use super::{Accept, Effect, Letter, Put, Refusal, Reply, Stands};

impl Draft<'_> {
    pub(super) fn put(&mut self, put: Put) {
        if self.letter(&put.id).is_some() {
            return self.reply(Reply::Mailed { event: None });
        }
        if self.closing.is_some() {
            return self.refuse(Refusal::Closed);
        }
        if self.mail.len() >= MAIL_OPEN_MAX {
            return self.refuse(Refusal::MailboxFull);
        }
        let wanted = put.deliver.unwrap_or(self.settings.mail);
        let steered = match wanted {
            Deliver::Steer => self.steerable().ok(),
            Deliver::Prompt | Deliver::Hold => None,
        };
        let deliver = match (wanted, &steered) {
            (Deliver::Hold, _) => Deliver::Hold,
            (_, Some(_)) => Deliver::Steer,
            (_, None) if self.queue_is_full() => return self.refuse(Refusal::QueueFull),
            (_, None) => Deliver::Prompt,
        };
        let number = Number(self.number.0 + 1);
        let own = put.run.clone().unwrap_or_else(|| RunId::of_mail(&self.id, number));
        let words = told(&put);
        let Put { id, from, from_session, kind, text, in_reply_to, correlation_id, fingerprint, .. } = put;
        let mail = Message {
            id: id.clone(),
            from,
            from_session_id: from_session,
            to: self.id.clone(),
            kind,
            text,
            in_reply_to,
            correlation_id,
            sent_at: self.world.now,
        };
        let (run_id, else_run_id) = match deliver {
            Deliver::Prompt => (Some(own.clone()), None),
            Deliver::Steer => (steered.clone(), Some(own.clone())),
            Deliver::Hold => (None, None),
        };
        self.emit(None, Body::MailSent(MailSent { mail, deliver, run_id, else_run_id, fingerprint }));
        let event = self.last_event();
        match (deliver, steered) {
            (Deliver::Steer, Some(run)) => {
                self.tell(&run, words.into(), Some(id));
            }
            (Deliver::Hold, _) => {}
            _ => {
                let fingerprint = format!("mail:{id}");
                let prompt = Accept { run: own, prompt: words.into(), attachments: Vec::new(), fingerprint };
                self.enqueue(prompt, Some(id));
                self.advance();
            }
        }
        self.reply(Reply::Mailed { event: Some(event) });
    }

    /// Gives out the oldest messages that wait.
    pub(super) fn claim(&mut self, max: usize, limit_ms: u64) {
        self.return_expired();
        let until = self.world.now.plus(limit_ms);
        let held = self.mail.iter().filter(|letter| letter.stands == Stands::Held);
        let held: Vec<MailId> = held.map(|letter| letter.id.clone()).take(max).collect();
        let mut mail = Vec::with_capacity(held.len());
        for id in held {
            let claim = Number(self.number.0 + 1);
            let claimed = MailClaimed { id: id.clone(), claim, claim_expires_at: until };
            self.emit(None, Body::MailClaimed(claimed));
            mail.push((id, claim));
        }
        self.reply(Reply::Claimed { mail, until });
    }

    /// A claim that has run out counts no more, also if nobody has noticed yet: the message may be another's by now.
    pub(super) fn acknowledge(&mut self, id: &MailId, by: Option<Number>) {
        self.return_expired();
        match self.letter(id).map(|letter| &letter.stands) {
            Some(Stands::Claimed { claim, .. }) if by.is_none_or(|by| by == *claim) => {
                let claim = *claim;
                self.emit(None, Body::MailAcknowledged(MailAcknowledged { id: id.clone(), claim }));
                self.reply(Reply::Done);
            }
            _ => self.refuse(Refusal::NotClaimed),
        }
    }

    /// What was claimed and not acknowledged in time comes back.
    pub(super) fn return_expired(&mut self) {
        let now = self.world.now;
        let expired =
            |letter: &&Letter| matches!(letter.stands, Stands::Claimed { until, .. } if until <= now);
        let expired: Vec<MailId> = self.mail.iter().filter(expired).map(|letter| letter.id.clone()).collect();
        for id in expired {
            self.give_back(&id, "it was claimed and not acknowledged in time");
        }
    }

    /// The agent has it.
    pub(super) fn delivered(&mut self, id: MailId, delivered_as: Deliver, run: &RunId) {
        let own = self.otherwise(&id);
        let delivered = MailDelivered { id, delivered_as, run_id: run.clone() };
        self.emit(Some(run.clone()), Body::MailDelivered(delivered));
        // Whoever waits for the run that it would have become waits for nothing.
        self.tell_fleet_of(own);
    }

    /// The message that a steer of a run is.
    pub(super) fn mail_of_steer(&self, run: &RunId, accepted: Number) -> Option<MailId> {
        let steers = &self.run(run)?.steers;
        steers.iter().find(|steer| steer.accepted == accepted)?.mail.clone()
    }

    /// The run that a message becomes if the one that it is told to does not take it.
    pub(super) fn otherwise(&self, id: &MailId) -> Option<RunId> {
        match &self.letter(id)?.stands {
            Stands::Steer { otherwise, .. } => Some(otherwise.clone()),
            _ => None,
        }
    }

    /// A run that ends before the agent had it leaves its message in the mailbox.
    pub(super) fn return_unread(&mut self, run: &RunId) {
        if let Some(mail) = self.run(run).and_then(|run| run.mail.clone()) {
            self.give_back(&mail, "its run ended before the agent had it");
        }
    }

    /// Puts a message back, to be claimed; one that has come back too often is kept from everybody.
    pub(super) fn give_back(&mut self, id: &MailId, why: &str) {
        let Some(letter) = self.letter(id) else { return };
        let (returns, own) = (letter.returns + 1, self.otherwise(id));
        if returns >= MAIL_RETURNS_MAX {
            let reason = format!("it has come back {returns} times; at last because {why}");
            self.emit(None, Body::MailQuarantined(MailQuarantined { id: id.clone(), reason }));
        } else {
            let returned = MailReturned { id: id.clone(), reason: why.to_owned(), returns };
            self.emit(None, Body::MailReturned(returned));
        }
        self.tell_fleet_of(own);
    }

    /// Nothing comes after the end of a session, so nothing may be left open.
    pub(super) fn close_mailbox(&mut self) {
        let open: Vec<MailId> = self.mail.iter().map(|letter| letter.id.clone()).collect();
        for id in open {
            let reason = "the session was closed".to_owned();
            self.emit(None, Body::MailQuarantined(MailQuarantined { id, reason }));
        }
    }

    fn tell_fleet_of(&mut self, run: Option<RunId>) {
        if let Some(run) = run.filter(|_| self.settings.fleet.is_some()) {
            self.effect(Effect::TellFleet { run });
        }
    }
}

/// What the agent is told. A person's task is told like a prompt of theirs; of anything else the agent has to know whose
/// words these are, and under which id it can answer them.
fn told(put: &Put) -> String {
    let Put { id, from, kind, text, in_reply_to, .. } = put;
    if from == FROM_USER && *kind == MailKind::Task && in_reply_to.is_none() {
        return text.clone();
    }
    let answers = in_reply_to.as_ref().map_or(String::new(), |mail| format!(" in reply to {mail}"));
    format!("--- {} from {from} ({id}){answers} ---\n{text}", kind.as_str())
}
