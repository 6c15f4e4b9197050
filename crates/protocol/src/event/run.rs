//! Events of runs (accepted, queued, cancelled, suspended, resumed, finished) and of steers.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::TokenUsage;
use crate::ids::{EventNumber, MailId, RunId, SessionId};
use crate::text::BlobRef;
use crate::time::Millis;

/// Data of `run.accepted`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAccepted {
    /// The prompt, or its beginning if `blob` is present.
    pub prompt: String,
    /// The file that holds the whole prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobRef>,
    /// Place in the queue; 0 if the run starts at once.
    pub position: u32,
    /// Hash of session, prompt and attachments. It tells a repeat of the request from another prompt with the same run
    /// id.
    pub fingerprint: String,
    /// The missed steer that became this run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steer: Option<EventNumber>,
    /// The mail message that became this run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail: Option<MailId>,
}

/// Why a run waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueReason {
    /// Another run of the session comes first.
    Busy,
    /// A halt is set.
    Halted,
    /// As many agents are running as the daemon allows.
    Capacity,
    /// The quota of the session's account is exhausted.
    Quota,
}

/// Data of `run.queued`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunQueued {
    pub reason: QueueReason,
    /// Place in the queue, from 1.
    pub position: u32,
    /// When the quota resets. Present only if that is what the run waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Millis>,
}

impl RunQueued {
    /// A run that waits for anything but a quota.
    pub fn new(reason: QueueReason, position: u32) -> Self {
        Self { reason, position, until: None }
    }
}

/// Data of `run.moved`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunMoved {
    /// The queued run that now comes next after the moved one. Null if it was moved to the end.
    pub before: Option<RunId>,
    /// Its new place in the queue, from 1.
    pub position: u32,
}

/// Data of `steer.accepted`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerAccepted {
    /// The steer, or its beginning if `blob` is present.
    pub text: String,
    /// The file that holds the whole text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobRef>,
    /// The mail message that is delivered as this steer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail: Option<MailId>,
}

/// Data of `steer.sent`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerSent {
    /// Number of the `steer.accepted` event.
    pub steer: EventNumber,
}

/// Data of `steer.taken`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerTaken {
    /// Number of the `steer.accepted` event.
    pub steer: EventNumber,
}

/// Data of `steer.missed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerMissed {
    /// Number of the `steer.accepted` event.
    pub steer: EventNumber,
    /// The run that the steer becomes. Null if the steered run was cancelled after the steer.
    pub next_run_id: Option<RunId>,
}

/// Who or what stops a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStopCause {
    /// A client cancelled the run.
    User,
    /// The parent session was cancelled.
    Parent,
    /// The fleet was cancelled or reached its time limit.
    Fleet,
    /// The session is closing.
    Close,
    /// A halt that cancels live runs was set.
    Halt,
    /// The run reached `run_timeout_s`.
    Timeout,
    /// The run reached `max_turns`.
    MaxTurns,
    /// The budget of the session, or of a session above it, is spent.
    Budget,
    /// The agent has said as much as it may in this session.
    JournalLimit,
}

impl RunStopCause {
    /// The finish reason of a run that was stopped for this cause.
    pub fn finish_reason(self) -> FinishReason {
        match self {
            Self::User | Self::Parent | Self::Fleet | Self::Close | Self::Halt => FinishReason::Cancelled,
            Self::Timeout => FinishReason::Timeout,
            Self::MaxTurns => FinishReason::MaxTurns,
            Self::Budget => FinishReason::BudgetExceeded,
            Self::JournalLimit => FinishReason::Error,
        }
    }
}

/// Data of `run.cancel_requested`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunCancelRequested {
    pub by: RunStopCause,
    /// Reason given by the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The agent finished its answer.
    EndTurn,
    /// A cancel stopped the run.
    Cancelled,
    /// The agent failed, exited during the turn, or was not ready in time.
    Error,
    /// The model reached its output limit.
    MaxTokens,
    /// The run reached its limit of model calls.
    MaxTurns,
    /// The budget of the session, or of a session above it, is spent.
    BudgetExceeded,
    /// The run reached its time limit.
    Timeout,
    /// The model refused.
    Refused,
    /// The worker or its machine was lost during the turn.
    Interrupted,
}

/// What went wrong with a run or an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RunError {
    /// Stable code in snake_case.
    pub code: String,
    /// One sentence for people.
    pub message: String,
    /// Exit status of the agent, if it exited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_status: Option<i32>,
    /// The last lines that the agent wrote to stderr.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stderr: Vec<String>,
    /// When the exhausted quota resets, as the agent says. Only with the code `quota_exhausted`, and only if the time is
    /// plausible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resets_at: Option<Millis>,
}

impl RunError {
    /// The code of an error that means that the quota or rate limit of the agent's account is exhausted.
    pub const QUOTA_EXHAUSTED: &'static str = "quota_exhausted";

    /// An error without exit status and stderr.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            message: message.into(),
            exit_status: None,
            stderr: Vec::new(),
            resets_at: None,
        }
    }

    /// An error that means that the account's quota is exhausted, until `resets_at` if the agent says so.
    pub fn quota_exhausted(message: impl Into<String>, resets_at: Option<Millis>) -> Self {
        Self { resets_at, ..Self::new(Self::QUOTA_EXHAUSTED, message) }
    }
}

/// What happened to the processes that a run started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Processes)]
pub struct ProcessCleanup {
    /// Processes that were killed.
    pub killed: u32,
    /// Processes that were still alive after they had been killed.
    pub survivors: u32,
    /// The survivors by name, or as many of them as fit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub surviving: Vec<SurvivingProcess>,
}

/// A process that was still alive after it had been killed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SurvivingProcess {
    /// Absent if only the worker knows the process, and the worker did not report in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The name of the process, or which worker did not report.
    pub name: String,
}

/// Data of `run.suspended`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSuspended {
    /// The sessions that the run waits for.
    pub children: Vec<SessionId>,
    /// The conversation so far. The turn is resumed with it.
    pub transcript: Vec<Value>,
}

/// Data of `run.resumed`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResumed {
    /// Results of the sessions that the run waited for.
    pub children: Vec<ChildResult>,
}

/// Result of a session that a suspended run waited for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChildResult {
    pub session_id: SessionId,
    /// How the session's last run ended. `None` if it had no run.
    pub finish_reason: Option<FinishReason>,
    /// Result of that run, or its beginning.
    pub text: String,
}

/// Data of `run.finished`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunFinished {
    pub finish_reason: FinishReason,
    /// The agent's result if it gave one, otherwise all text of the run; only the beginning if `blob` is present.
    pub text: String,
    /// The file that holds the whole text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobRef>,
    /// What went wrong, if the run failed.
    pub error: Option<RunError>,
    pub usage: TokenUsage,
    /// What happened to the processes that the run started.
    pub processes: ProcessCleanup,
}
