//! Mail between sessions, as clients see it: a message, how it is to reach its session, and where it stands.

use serde::{Deserialize, Serialize};

use crate::ids::{MailId, RunId, Seq, SessionId};
use crate::time::Millis;

/// Who a person's message is from.
pub const FROM_USER: &str = "user";
/// Who a message is from that was dropped into a mail folder.
pub const FROM_FILE: &str = "file";

/// What a message is meant as.
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
    /// Something to do.
    #[default]
    Task,
    /// A question that wants a `reply`.
    Ask,
    /// Work that goes over to the recipient.
    Handoff,
    /// An answer to an earlier message.
    Reply,
}

impl MailKind {
    /// All of them, as they are written.
    pub const ALL: [(&'static str, Self); 4] =
        [("task", Self::Task), ("ask", Self::Ask), ("handoff", Self::Handoff), ("reply", Self::Reply)];

    /// As it is written.
    pub fn as_str(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(word, _)| word)
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
    /// As a prompt: at once if the session is idle, else after what it has to do.
    #[default]
    Prompt,
    /// As a word to the turn that is running; as a prompt where there is none that can be steered.
    Steer,
    /// Not by itself: it waits in the mailbox until somebody claims it.
    Hold,
}

impl MailDelivery {
    /// All of them, as they are written.
    pub const ALL: [(&'static str, Self); 3] =
        [("prompt", Self::Prompt), ("steer", Self::Steer), ("hold", Self::Hold)];

    /// As it is written.
    pub fn as_str(self) -> &'static str {
        Self::ALL.iter().find(|(_, way)| *way == self).map_or("", |(word, _)| word)
    }

    /// Whether it is what holds where nothing is said.
    pub fn is_prompt(&self) -> bool {
        *self == Self::Prompt
    }
}

/// Where a message stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MailState)]
pub enum MailStatus {
    /// It lies in the mailbox until somebody claims it.
    Waiting,
    /// It is on its way to the agent: its run waits its turn, or it is being told to a running one.
    Delivering,
    /// Somebody has it and has not acknowledged it.
    Claimed,
    /// The agent has it.
    Delivered,
    /// Whoever claimed it is done with it.
    Acknowledged,
    /// Nobody will get it any more; `reason` says why.
    Quarantined,
}

impl MailStatus {
    /// All of them, as they are written.
    pub const ALL: [(&'static str, Self); 6] = [
        ("waiting", Self::Waiting),
        ("delivering", Self::Delivering),
        ("claimed", Self::Claimed),
        ("delivered", Self::Delivered),
        ("acknowledged", Self::Acknowledged),
        ("quarantined", Self::Quarantined),
    ];

    /// As it is written.
    pub fn as_str(self) -> &'static str {
        Self::ALL.iter().find(|(_, state)| *state == self).map_or("", |(word, _)| word)
    }

    /// Whether something may still become of it.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Waiting | Self::Delivering | Self::Claimed)
    }
}

/// One message. Who it is from is for the daemon to say, never for whoever sends it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Message)]
pub struct MailMessage {
    /// The message.
    pub id: MailId,
    /// `user`, `file`, the name of a session in its fleet, or the id of one.
    pub from: String,
    /// The session that it is from, if it is from one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_session_id: Option<SessionId>,
    /// Whose mailbox.
    pub to: SessionId,
    /// What it is meant as.
    pub kind: MailKind,
    /// The words.
    pub text: String,
    /// The message that it answers.
    pub in_reply_to: Option<MailId>,
    /// What the sender knows the whole exchange by.
    pub correlation_id: Option<String>,
    /// When it arrived here.
    pub sent_at: Millis,
}

/// A message and where it stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Mail {
    /// The message.
    #[serde(flatten)]
    pub message: MailMessage,
    /// How it was to be delivered.
    pub deliver: MailDelivery,
    /// Where it stands.
    pub state: MailStatus,
    /// The run that it is, or was told to.
    pub run_id: Option<RunId>,
    /// How it reached the agent, if it did: as a prompt or as a steer.
    pub delivered_as: Option<MailDelivery>,
    /// The claim that somebody has on it, or had last.
    pub claim: Option<u64>,
    /// Until when that counts.
    pub claim_expires_at: Option<Millis>,
    /// How often it has come back.
    pub returns: u32,
    /// Why it came back, or is kept from everybody.
    pub reason: Option<String>,
    /// When that last changed.
    pub updated_at: Millis,
}

/// `POST .../sessions/{s}/mail`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMail {
    /// The words.
    pub text: String,
    /// The sender's own name for it, one of the whole daemon and for ever: the same message under it is sent once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<MailId>,
    /// What it is meant as; `task` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<MailKind>,
    /// How it reaches the session; as the session's own `mail` says unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deliver: Option<MailDelivery>,
    /// The message that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_reply_to: Option<MailId>,
    /// What the sender knows the whole exchange by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
}

/// That a message is in the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct MailReceipt {
    /// The message.
    pub id: MailId,
    /// How it is being delivered: a steer that finds no turn is a prompt.
    pub deliver: MailDelivery,
    /// The run that it becomes, or that it is told to.
    pub run_id: Option<RunId>,
    /// When it arrived.
    pub sent_at: Millis,
    /// The position of its `mail.sent`.
    #[schema(value_type = u64)]
    pub seq: Seq,
}

/// `POST .../sessions/{s}/mail/claim`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ClaimRequest)]
pub struct MailClaimRequest {
    /// How many at most; 1 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<usize>,
    /// Seconds until what was not acknowledged comes back; 60 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_s: Option<f64>,
}

/// A message that is the caller's for a while.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ClaimedMail {
    /// The message.
    #[serde(flatten)]
    pub message: MailMessage,
    /// What it is acknowledged with.
    pub claim: u64,
    /// When it comes back unless it is acknowledged.
    pub claim_expires_at: Millis,
}

/// `POST .../sessions/{s}/mail/{m}/ack`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AckRequest)]
pub struct MailAckRequest {
    /// The claim; without one, whoever has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<u64>,
}
