//! What becomes of a prompt: accepted, queued, steered, stopped, suspended, ended.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::TokenUsage;
use crate::ids::{EventNumber, MailId, RunId, SessionId};
use crate::text::BlobRef;

/// See [`EventBody::RunAccepted`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAccepted {
    /// The prompt, or its head.
    pub prompt: String,
    /// The file that holds the whole of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobRef>,
    /// Its place in the queue; 0: it starts at once.
    pub position: u32,
    /// What tells it apart from another prompt under the same id.
    pub fingerprint: String,
    /// The steer that it was before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steer: Option<EventNumber>,
    /// The message that it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail: Option<MailId>,
}

/// Why a run waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueReason {
    /// Another run of the session is before it.
    Busy,
    /// A halt is set.
    Halted,
    /// Too many agents are alive.
    Capacity,
}

/// See [`EventBody::RunQueued`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunQueued {
    /// Why it waits.
    pub reason: QueueReason,
    /// Its place in the queue, from 1.
    pub position: u32,
}

/// See [`EventBody::SteerAccepted`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerAccepted {
    /// The words, or their head.
    pub text: String,
    /// The file that holds the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobRef>,
    /// The message that it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail: Option<MailId>,
}

/// See [`EventBody::SteerSent`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerSent {
    /// The steer, by the number of its `steer.accepted`.
    pub steer: EventNumber,
}

/// See [`EventBody::SteerTaken`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerTaken {
    /// The steer, by the number of its `steer.accepted`.
    pub steer: EventNumber,
}

/// See [`EventBody::SteerMissed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerMissed {
    /// The steer, by the number of its `steer.accepted`.
    pub steer: EventNumber,
    /// The run it becomes; none if the run it was meant for was cancelled after it.
    pub next_run_id: Option<RunId>,
}

/// Who or what stops a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStopCause {
    /// A client.
    User,
    /// The session above was cancelled.
    Parent,
    /// Its fleet was cancelled, or is over its time.
    Fleet,
    /// The session is closing.
    Close,
    /// A halt that cancels.
    Halt,
    /// Over its time.
    Timeout,
    /// Over its turns.
    MaxTurns,
    /// Over its money.
    Budget,
}

impl RunStopCause {
    /// What a run that was stopped for this ends as.
    pub fn finish_reason(self) -> FinishReason {
        match self {
            Self::User | Self::Parent | Self::Fleet | Self::Close | Self::Halt => FinishReason::Cancelled,
            Self::Timeout => FinishReason::Timeout,
            Self::MaxTurns => FinishReason::MaxTurns,
            Self::Budget => FinishReason::BudgetExceeded,
        }
    }
}

/// See [`EventBody::RunCancelRequested`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunCancelRequested {
    /// By whom or what.
    pub by: RunStopCause,
    /// In the client's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The agent had nothing more to say.
    EndTurn,
    /// A cancel hit it.
    Cancelled,
    /// The agent failed.
    Error,
    /// The model's limit on its answer.
    MaxTokens,
    /// Over its turns.
    MaxTurns,
    /// Over the budget of its session or of one above.
    BudgetExceeded,
    /// Over its time.
    Timeout,
    /// The model would not.
    Refused,
    /// Worker or machine lost in mid-turn.
    Interrupted,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RunError {
    /// A stable snake_case word.
    pub code: String,
    /// A sentence.
    pub message: String,
    /// The agent's exit status, if it exited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_status: Option<i32>,
    /// The last lines that it wrote to stderr.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stderr: Vec<String>,
}

impl RunError {
    /// An error with nothing more to say.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), exit_status: None, stderr: Vec::new() }
    }
}

/// What became of the processes that a run started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Processes)]
pub struct ProcessCleanup {
    /// Ended by us.
    pub killed: u32,
    /// Those that the kernel would not let die.
    pub survivors: u32,
}

/// See [`EventBody::RunSuspended`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSuspended {
    /// The sessions that it waits for.
    pub children: Vec<SessionId>,
    /// The conversation that it is resumed with.
    pub transcript: Vec<Value>,
}

/// See [`EventBody::RunResumed`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResumed {
    /// What became of the sessions that it waited for.
    pub children: Vec<ChildResult>,
}

/// What became of a session below.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChildResult {
    /// The session.
    pub session_id: SessionId,
    /// How its last run ended; `None`: it had none.
    pub finish_reason: Option<FinishReason>,
    /// What that run said, or its head.
    pub text: String,
}

/// See [`EventBody::RunFinished`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunFinished {
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The agent's result if it gave one, else all its text; or the head of that.
    pub text: String,
    /// The file that holds the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobRef>,
    /// What went wrong.
    pub error: Option<RunError>,
    /// What it used.
    pub usage: TokenUsage,
    /// What became of the processes that it started.
    pub processes: ProcessCleanup,
}
