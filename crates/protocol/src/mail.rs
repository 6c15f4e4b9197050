//! Mail between sessions, as clients see it: messages, how they are delivered, and their state.

use serde::{Deserialize, Serialize};

use crate::ids::{MailId, RunId, Seq, SessionId};
use crate::time::Millis;

/// `from` of a message that a person or a client sent.
pub const FROM_USER: &str = "user";
/// `from` of a message that was dropped into a mail folder.
pub const FROM_FILE: &str = "file";

/// What a message is meant as. All kinds are delivered in the same way.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Default,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    PartialOrd,
    Ord,
)]
#[serde(rename_all = "snake_case")]
pub enum MailKind {
    /// A task for the recipient.
    #[default]
    Task,
    /// A question that expects a `reply`.
    Ask,
    /// Work that the recipient takes over.
    Handoff,
    /// Answer to an earlier message.
    Reply,
}

impl MailKind {
    /// Every kind with its name in JSON.
    pub const ALL: [(&'static str, Self); 4] =
        [("task", Self::Task), ("ask", Self::Ask), ("handoff", Self::Handoff), ("reply", Self::Reply)];

    pub fn as_str(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

/// How a message reaches its session.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Default,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    PartialOrd,
    Ord,
)]
#[serde(rename_all = "snake_case")]
#[schema(as = Deliver)]
pub enum MailDelivery {
    /// As a prompt: at once if the session is idle, otherwise after the runs that are already queued.
    #[default]
    Prompt,
    /// As a steer of the running turn. If no turn can be steered, as a prompt.
    Steer,
    /// Not automatically: the message waits in the mailbox until a client claims it.
    Hold,
}

impl MailDelivery {
    /// Every way of delivery with its name in JSON.
    pub const ALL: [(&'static str, Self); 3] =
        [("prompt", Self::Prompt), ("steer", Self::Steer), ("hold", Self::Hold)];

    pub fn as_str(self) -> &'static str {
        Self::ALL.iter().find(|(_, delivery)| *delivery == self).map_or("", |(name, _)| name)
    }

    /// Whether this is the default way. serde uses it to leave out the field.
    pub fn is_prompt(&self) -> bool {
        *self == Self::Prompt
    }
}

/// State of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MailState)]
pub enum MailStatus {
    /// In the mailbox until a client claims it.
    Waiting,
    /// On its way to the agent: its run is queued, or a running turn is being steered with it.
    Delivering,
    /// A client has claimed the message and not yet acknowledged it.
    Claimed,
    /// The agent has the message.
    Delivered,
    /// The client that claimed the message is done with it.
    Acknowledged,
    /// The message will not be delivered any more. `reason` says why.
    Quarantined,
}

impl MailStatus {
    /// Every state with its name in JSON.
    pub const ALL: [(&'static str, Self); 6] = [
        ("waiting", Self::Waiting),
        ("delivering", Self::Delivering),
        ("claimed", Self::Claimed),
        ("delivered", Self::Delivered),
        ("acknowledged", Self::Acknowledged),
        ("quarantined", Self::Quarantined),
    ];

    pub fn as_str(self) -> &'static str {
        Self::ALL.iter().find(|(_, state)| *state == self).map_or("", |(name, _)| name)
    }

    /// Whether the message can still be delivered or acknowledged.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Waiting | Self::Delivering | Self::Claimed)
    }
}

/// A mail message. The daemon sets `from`; a sender cannot choose it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct MailMessage {
    pub id: MailId,
    /// `user`, `file`, or the sending session by its name in its fleet or by its id.
    pub from: String,
    /// The session that sent the message, if a session did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_session_id: Option<SessionId>,
    /// The session that receives the message.
    pub to: SessionId,
    pub kind: MailKind,
    pub text: String,
    /// The message that this one answers.
    pub in_reply_to: Option<MailId>,
    /// Id chosen by the sender to tie messages together. It is only passed on.
    pub correlation_id: Option<String>,
    /// When the daemon received the message.
    pub sent_at: Millis,
}

/// A mail message with its state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Mail {
    #[serde(flatten)]
    pub message: MailMessage,
    /// How the message is delivered.
    pub deliver: MailDelivery,
    pub state: MailStatus,
    /// The run that the message became, or the run that it steered.
    pub run_id: Option<RunId>,
    /// How the message reached the agent: `prompt` or `steer`. Null if it has not.
    pub delivered_as: Option<MailDelivery>,
    /// The current or last claim on the message.
    pub claim: Option<u64>,
    /// When that claim expires.
    pub claim_expires_at: Option<Millis>,
    /// How many times the message has returned to the mailbox.
    pub returns: u32,
    /// Why the message returned to the mailbox or was quarantined.
    pub reason: Option<String>,
    /// When the state last changed.
    pub updated_at: Millis,
}

/// Body of `POST .../sessions/{s}/mail`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMail {
    pub text: String,
    /// Id chosen by the sender, unique in the whole daemon and permanently. Sending the same message with the same id
    /// again has no effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<MailId>,
    /// What the message is meant as. Defaults to `task`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<MailKind>,
    /// How the message reaches the session. Defaults to the session's `mail` setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deliver: Option<MailDelivery>,
    /// The message that this one answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_reply_to: Option<MailId>,
    /// Id chosen by the sender to tie messages together. It is only passed on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
}

/// Response to a message that is in the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct MailReceipt {
    pub id: MailId,
    /// How the message is delivered. A steer that finds no turn to steer is delivered as a prompt.
    pub deliver: MailDelivery,
    /// The run that the message becomes, or the run that it steers.
    pub run_id: Option<RunId>,
    /// When the daemon received the message.
    pub sent_at: Millis,
    /// Position of the `mail.sent` event in the journal.
    #[schema(value_type = u64)]
    pub seq: Seq,
}

/// Body of `POST .../sessions/{s}/mail/claim`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ClaimRequest)]
pub struct MailClaimRequest {
    /// Maximum number of messages. Defaults to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<usize>,
    /// Seconds after which unacknowledged messages return to the mailbox. Defaults to 60.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_s: Option<f64>,
}

/// A message that the caller has claimed for a limited time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ClaimedMail {
    #[serde(flatten)]
    pub message: MailMessage,
    /// Claim to acknowledge the message with.
    pub claim: u64,
    /// When the message returns to the mailbox unless it is acknowledged.
    pub claim_expires_at: Millis,
}

/// Body of `POST .../sessions/{s}/mail/{m}/ack`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AckRequest)]
pub struct MailAckRequest {
    /// The claim to acknowledge. Without it, the current claim is acknowledged, whoever holds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<u64>,
}
