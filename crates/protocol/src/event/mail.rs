//! What becomes of mail, on the stream of the session that it is for.

use serde::{Deserialize, Serialize};

use crate::ids::{EventNumber, MailId, RunId};
use crate::mail::{MailDelivery, MailMessage};
use crate::time::Millis;

/// See [`EventBody::MailSent`](super::EventBody::MailSent).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailSent {
    /// The message.
    #[serde(flatten)]
    pub mail: MailMessage,
    /// How it is being delivered.
    pub deliver: MailDelivery,
    /// The run that it becomes, or that it is told to; one that is held has none.
    pub run_id: Option<RunId>,
    /// The run that it becomes if the turn that it is told to does not take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub else_run_id: Option<RunId>,
    /// What tells it apart from another message under the same id.
    pub fingerprint: String,
}

/// See [`EventBody::MailDelivered`](super::EventBody::MailDelivered).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailDelivered {
    /// The message.
    pub id: MailId,
    /// As a prompt or as a steer.
    pub delivered_as: MailDelivery,
    /// The run whose agent has it.
    pub run_id: RunId,
}

/// See [`EventBody::MailClaimed`](super::EventBody::MailClaimed).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailClaimed {
    /// The message.
    pub id: MailId,
    /// What it is acknowledged with: the number of this event in its session.
    pub claim: EventNumber,
    /// When it comes back unless it is acknowledged.
    pub claim_expires_at: Millis,
}

/// See [`EventBody::MailAcknowledged`](super::EventBody::MailAcknowledged).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailAcknowledged {
    /// The message.
    pub id: MailId,
    /// By whoever had this claim.
    pub claim: EventNumber,
}

/// See [`EventBody::MailReturned`](super::EventBody::MailReturned).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailReturned {
    /// The message.
    pub id: MailId,
    /// Why.
    pub reason: String,
    /// How often it has come back with this.
    pub returns: u32,
}

/// See [`EventBody::MailQuarantined`](super::EventBody::MailQuarantined).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailQuarantined {
    /// The message.
    pub id: MailId,
    /// Why.
    pub reason: String,
}
