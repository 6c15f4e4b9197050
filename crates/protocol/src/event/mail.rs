//! Data of mail events. They appear on the stream of the session that receives the message.

use serde::{Deserialize, Serialize};

use crate::ids::{EventNumber, MailId, RunId};
use crate::mail::{MailDelivery, MailMessage};
use crate::time::Millis;

/// Data of `mail.sent`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailSent {
    #[serde(flatten)]
    pub mail: MailMessage,
    /// How the message is delivered. A steer that finds no turn is delivered as a prompt.
    pub deliver: MailDelivery,
    /// The run that the message becomes, or the run that it steers. Null for a held message.
    pub run_id: Option<RunId>,
    /// The run that the message becomes if the steered turn does not take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub else_run_id: Option<RunId>,
    /// Hash of the content. It tells a repeat of the message from another message with the same id.
    pub fingerprint: String,
}

/// Data of `mail.delivered`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailDelivered {
    pub id: MailId,
    /// `prompt` or `steer`.
    pub delivered_as: MailDelivery,
    /// The run whose agent has the message.
    pub run_id: RunId,
}

/// Data of `mail.claimed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailClaimed {
    pub id: MailId,
    /// Number of this event in its session. The claimer acknowledges the message with it.
    pub claim: EventNumber,
    /// When the message returns to the mailbox unless it is acknowledged.
    pub claim_expires_at: Millis,
}

/// Data of `mail.acknowledged`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailAcknowledged {
    pub id: MailId,
    /// The claim under which the message was acknowledged.
    pub claim: EventNumber,
}

/// Data of `mail.returned`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailReturned {
    pub id: MailId,
    pub reason: String,
    /// How many times the message has returned to the mailbox, including this time.
    pub returns: u32,
}

/// Data of `mail.quarantined`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailQuarantined {
    pub id: MailId,
    pub reason: String,
}
