//! Messages in the mailbox: accepted, claimed, returned, and gone from it once they are delivered, acknowledged or
//! quarantined.

use qd_protocol::MailId;
use qd_protocol::event::{MailClaimed, MailDelivered, MailReturned, MailSent};
use qd_protocol::mail::MailDelivery;

use crate::session::SessionEvent;
use crate::session::state::{MailDeliveryState, MailboxEntry, SessionState};

pub(super) fn apply_sent(state: &mut SessionState, sent: &MailSent) {
    let delivery = match (sent.deliver, &sent.run_id, &sent.else_run_id) {
        (MailDelivery::Prompt, Some(run), _) => MailDeliveryState::Run(run.clone()),
        (MailDelivery::Steer, Some(target_run), Some(fallback_run)) => {
            MailDeliveryState::Steer { target_run: target_run.clone(), fallback_run: fallback_run.clone() }
        }
        _ => MailDeliveryState::Held,
    };
    state.mail.push_back(MailboxEntry { id: sent.mail.id.clone(), returns: 0, delivery });
}

pub(super) fn apply_delivered(state: &mut SessionState, delivered: &MailDelivered) {
    remove_entry(state, &delivered.id);
    for run in &mut state.runs {
        // Once the agent has the message, the end of the run no longer affects it.
        run.mail.take_if(|mail| *mail == delivered.id);
    }
}

pub(super) fn apply_claimed(state: &mut SessionState, event: &SessionEvent, claimed: &MailClaimed) {
    let (claim, until) = (claimed.claim, claimed.claim_expires_at);
    let since = event.ts.uptime.map(|_| event.ts);
    set_delivery(state, &claimed.id, MailDeliveryState::Claimed { claim, until, since });
}

pub(super) fn apply_returned(state: &mut SessionState, returned: &MailReturned) {
    if let Some(entry) = state.mail.iter_mut().find(|entry| entry.id == returned.id) {
        entry.returns = returned.returns;
        entry.delivery = MailDeliveryState::Held;
    }
}

pub(super) fn set_delivery(state: &mut SessionState, id: &MailId, delivery: MailDeliveryState) {
    if let Some(entry) = state.mail.iter_mut().find(|entry| entry.id == *id) {
        entry.delivery = delivery;
    }
}

pub(super) fn remove_entry(state: &mut SessionState, id: &MailId) {
    state.mail.retain(|entry| entry.id != *id);
}
