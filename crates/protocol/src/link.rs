//! The commands that a session sends to its agent, and the updates that the agent's side reports. The types do not
//! depend on the transport, which may be a channel, a local socket or a network connection.
//!
//! Both directions deliver exactly once. Upwards, updates are numbered 1, 2, 3… over the life of the session. The
//! session journals the number together with the events that result from the update, acknowledges it after the commit,
//! and drops updates that it has already seen. Downwards, a command carries the [`EventNumber`] of the event that
//! caused it, so commands are stored nowhere but in the journal.
//!
//! Design: docs/design/journal-is-the-outbox.md

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::event::{AskAnswer, AskKind, ContextUsage, PlanEntry, ProcessCleanup, RunError, TokenUsage};
use crate::ids::{AskId, EventNumber, RunId};
use crate::policy::Risk;
use crate::sandbox_spec::SandboxReport;

/// Number of an update, counted over the life of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UpdateNumber(pub u64);

/// An update from the agent's side. On the wire it is an object with one key. An internal tag would cost twice as much
/// to parse, because serde has to find the tag before it can read anything else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentUpdate {
    /// The agent can take a prompt.
    Ready {
        /// The agent's own id for the conversation, with which it can be resumed.
        agent_session_id: Option<String>,
        /// Whether a running turn can be steered.
        steers: bool,
    },
    /// The agent is started with this confinement. Comes before `Ready`, and only from a worker whose specification says
    /// how the agent is to be confined.
    Confined(SandboxReport),
    /// Output of a turn.
    #[serde(rename = "said")]
    Turn {
        run: RunId,
        #[serde(rename = "what")]
        update: TurnUpdate,
    },
    /// The agent waits for an answer from a person or a policy.
    Ask { run: RunId, ask: AskRequest },
    /// The agent no longer waits for an answer to this ask.
    AskWithdrawn { ask: AskId },
    /// The agent has received the answer to this ask.
    AskDelivered { ask: AskId },
    /// The turn took a steer.
    SteerTaken {
        /// Number of the steer command.
        steer: EventNumber,
    },
    /// The turn will not take a steer.
    SteerMissed {
        /// Number of the steer command.
        steer: EventNumber,
    },
    /// The turn has stopped, and the processes that it started have been dealt with. Reported a second time if a cancel
    /// or kill arrives after a turn that [left processes running](TurnOutcome::leaves_processes).
    #[serde(rename = "terminal")]
    TurnEnded { run: RunId, outcome: TurnOutcome },
    /// The idle agent was stopped. Its worker stays, because a turn left processes running on purpose.
    #[serde(rename = "rested")]
    IdleStopped,
    /// The agent is gone and its worker exits. This is the last update of both.
    Gone(AgentExitReason),
}

/// Output of a turn. None of it needs an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnUpdate {
    /// A piece of the answer.
    Text { text: String },
    /// A piece of the agent's thinking.
    Thought { text: String },
    /// A tool call started.
    ToolStarted {
        /// The agent's id for the call.
        call_id: String,
        /// Name of the tool.
        name: String,
        /// Arguments of the call.
        input: Value,
    },
    /// A tool call produced output.
    ToolOutput {
        /// The agent's id for the call.
        call_id: String,
        /// A piece of the output.
        text: String,
    },
    /// A tool call ended.
    ToolFinished {
        /// The agent's id for the call.
        call_id: String,
        /// Name of the tool.
        name: String,
        /// Result of the call.
        output: Value,
        /// Whether the tool failed.
        is_error: bool,
    },
    /// The agent's complete current plan.
    Plan { entries: Vec<PlanEntry> },
    /// Something that a person should see and that is not part of the answer.
    Notice {
        text: String,
        /// For how many seconds nothing has come from the agent, if the notice is about that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        silent_s: Option<u64>,
        /// The name of the limit that was reached, as in `docs/limits.md`, if the notice is about that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
    },
    /// Usage since the last report, not a total.
    Usage {
        usage: TokenUsage,
        /// The cost of the whole conversation in US dollars, if the agent reports that. Another process that resumes the
        /// conversation continues from this total.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        conversation_cost_usd: Option<f64>,
    },
    /// The model was called once more. `max_turns` counts these calls.
    #[serde(rename = "turn")]
    ModelCall,
    /// The agent has changed its mode, without being asked to by the session.
    Mode { mode: String },
    /// How full the agent's context is.
    Context(ContextUsage),
    /// The agent replaced the older part of its conversation with a summary.
    Compacted {
        /// Tokens in the context before, if the agent reports that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        used_before: Option<u64>,
    },
}

impl TurnUpdate {
    /// A notice about anything but silence or a limit.
    pub fn notice(text: impl Into<String>) -> Self {
        Self::Notice { text: text.into(), silent_s: None, limit: None }
    }

    /// A notice that says which limit was reached.
    pub fn limit_notice(limit: &str, text: impl Into<String>) -> Self {
        Self::Notice { text: text.into(), silent_s: None, limit: Some(limit.to_owned()) }
    }

    /// Usage since the last report, of an agent that reports no total of the conversation.
    pub fn usage(usage: TokenUsage) -> Self {
        Self::Usage { usage, conversation_cost_usd: None }
    }
}

/// A permission request or question, as the agent's side reports it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskRequest {
    /// Random id chosen by the agent's side, which matches the answer to the ask by it. It cannot be guessed.
    pub id: AskId,
    pub kind: AskKind,
    /// Tool that the agent wants to use. `None` for a question.
    pub tool: Option<String>,
    /// Arguments of the tool call.
    pub input: Value,
    /// The agent's own rating of the risk. It can raise the session's rating but not lower it.
    pub risk: Option<Risk>,
    /// The question, or what the tool would do.
    pub prompt: String,
    /// Allowed answers to a question. Empty if any answer is allowed.
    pub options: Vec<String>,
    /// True if the agent itself would not have asked. A low-risk call is then allowed wherever the policy would ask a
    /// person; a deny still denies it.
    #[serde(rename = "unasked", default, skip_serializing_if = "std::ops::Not::not")]
    pub implicit: bool,
}

/// How a turn stopped, as the agent's side reports it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TurnOutcome {
    pub stop: TurnStopReason,
    /// The agent's result, if it gives one.
    pub text: Option<String>,
    /// What went wrong, if the turn failed.
    pub error: Option<RunError>,
    /// What happened to the processes that the turn started.
    pub processes: ProcessCleanup,
    /// The conversation so far, for a suspended turn to be resumed with. Empty for every other turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transcript: Vec<Value>,
    /// Whether the agent exits after this turn. [`AgentUpdate::Gone`] follows, or [`AgentUpdate::IdleStopped`] if
    /// earlier turns left processes running. The session must not send another prompt before it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub agent_ends: bool,
    /// Whether the turn ended by itself and left processes running. A cancel or kill of its run that arrives later ends
    /// them, and is answered by a second [`AgentUpdate::TurnEnded`]. Workers of earlier releases never set this.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves_processes: bool,
}

impl TurnOutcome {
    /// An outcome with only a stop reason.
    pub fn of(stop: TurnStopReason) -> Self {
        Self {
            stop,
            text: None,
            error: None,
            processes: ProcessCleanup::default(),
            transcript: Vec::new(),
            agent_ends: false,
            leaves_processes: false,
        }
    }

    /// The turn failed.
    pub fn failed(error: RunError) -> Self {
        Self { error: Some(error), ..Self::of(TurnStopReason::Error) }
    }

    /// The turn ended with a result.
    pub fn completed(result: impl Into<String>) -> Self {
        Self { text: Some(result.into()), ..Self::of(TurnStopReason::EndTurn) }
    }

    /// The turn stopped because of a cancel.
    pub fn cancelled() -> Self {
        Self::of(TurnStopReason::Cancelled)
    }

    /// The turn waits for other sessions and must be resumed with this conversation.
    pub fn suspended(transcript: Vec<Value>) -> Self {
        Self { transcript, ..Self::of(TurnStopReason::Suspended) }
    }
}

/// Why a turn stopped, as the agent's side reports it. The session derives the run's finish reason from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnStopReason {
    /// The agent finished its answer.
    EndTurn,
    /// The turn was cancelled.
    Cancelled,
    /// The agent failed.
    Error,
    /// The model reached its output limit.
    MaxTokens,
    /// The agent's own limit of model calls, or `max_turns` while no daemon was attached.
    MaxTurns,
    /// The model refused.
    Refused,
    /// The turn waits for the sessions that it started.
    Suspended,
    /// The turn reached its time limit while no daemon was attached.
    Timeout,
    /// The turn spent its budget while no daemon was attached.
    BudgetExceeded,
}

/// A command from a session to its agent. It carries the number of the event that caused it and is applied once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentCommand {
    /// Start a turn.
    Prompt {
        number: EventNumber,
        run: RunId,
        /// The full prompt.
        prompt: String,
        /// The mode that the agent must be in for this turn. `None` leaves it in the mode in which it is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<String>,
        /// Files attached to the prompt.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        files: Vec<PromptFile>,
        /// The conversation to continue, if the agent does not remember it: a suspended turn's transcript with the
        /// results that it waited for.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        messages: Vec<Value>,
        /// Limits that the worker enforces while no daemon is attached.
        #[serde(default)]
        limits: TurnLimits,
    },
    /// Steer the running turn.
    Steer {
        /// Also identifies the steer in [`AgentUpdate::SteerTaken`] and [`AgentUpdate::SteerMissed`].
        number: EventNumber,
        run: RunId,
        text: String,
    },
    /// Ask the agent to stop the turn.
    Cancel { number: EventNumber, run: RunId },
    /// Stop the turn by force.
    Kill {
        /// Number of the `run.kill_requested` event. A sender without a journal repeats the number of its cancel.
        number: EventNumber,
        run: RunId,
    },
    /// Answer an ask.
    Answer {
        number: EventNumber,
        ask: AskId,
        /// The answer, or that there will be none.
        answer: AskResolution,
    },
}

impl AgentCommand {
    /// Number of the event that caused the command.
    pub fn number(&self) -> EventNumber {
        match self {
            Self::Prompt { number, .. }
            | Self::Steer { number, .. }
            | Self::Cancel { number, .. }
            | Self::Kill { number, .. }
            | Self::Answer { number, .. } => *number,
        }
    }
}

/// A file attached to a prompt, with its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptFile {
    /// File name, shown to the agent and to people.
    pub name: String,
    /// MIME type.
    pub mime: String,
    /// Content in base64.
    pub data: String,
}

/// What remains of a turn's limits. The worker enforces them only while no daemon is attached, starting from the values
/// that the daemon last sent; the daemon judges better, because it also counts the sessions below.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct TurnLimits {
    /// Milliseconds. Time spent waiting for people does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Model calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_turns: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_usd: Option<f64>,
    /// Milliseconds between asking the agent to stop and killing it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
}

/// How an ask was resolved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AskResolution {
    /// A decision or a value.
    Answered(AskAnswer),
    /// The run is being stopped, so nobody will answer.
    Withdrawn,
}

/// Why an agent is gone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentExitReason {
    /// The agent exited by itself or never became ready. Its current turn has failed.
    Failed(RunError),
    /// The agent was lost with its worker or machine. How far its turn came is unknown.
    Lost,
    /// The agent's worker could not be reached any more, and the daemon has given it up. How far its turn came is
    /// unknown; the error says what happened. Only the daemon's side of a link reports this.
    Unreachable(RunError),
    /// The agent was stopped because nothing needed it any more.
    Stopped,
}
