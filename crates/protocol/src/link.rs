//! What a session says to its agent and hears from it, whatever lies between: a channel, a socket, an ocean.
//!
//! Both directions are exactly once. Up, everything the agent's side says is numbered 1, 2, 3… over the life of the
//! session; the session commits the number with what it made of it, acknowledges after the commit, and drops what it
//! has seen. Down, a command bears the [`Number`] of the event that caused it, so the journal is the only outbox.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::event::{AskAnswer, AskKind, PlanEntry, ProcessCleanup, RunError, TokenUsage};
use crate::ids::{AskId, EventNumber, RunId};
use crate::policy::Risk;

/// The number of something said upwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UpdateNumber(pub u64);

/// What the agent's side says. On the wire each is an object with one key: tags inside would have to be looked for
/// before anything else could be read, at twice the cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentUpdate {
    /// The agent can take a prompt.
    Ready {
        /// The agent's own name for the conversation, by which it can be resumed.
        agent_session_id: Option<String>,
        /// Whether a turn can be steered.
        steers: bool,
    },
    /// Something of a turn.
    #[serde(rename = "said")]
    Turn {
        /// The turn.
        run: RunId,
        /// What of it.
        #[serde(rename = "what")]
        update: TurnUpdate,
    },
    /// The agent waits for a person or a policy.
    Ask {
        /// The turn.
        run: RunId,
        /// For what.
        ask: AskRequest,
    },
    /// The agent no longer waits.
    AskWithdrawn {
        /// For this.
        ask: AskId,
    },
    /// The agent has its answer.
    AskDelivered {
        /// To this.
        ask: AskId,
    },
    /// The turn took a steer in.
    SteerTaken {
        /// The steer, by the number of its command.
        steer: EventNumber,
    },
    /// The turn will not take a steer in.
    SteerMissed {
        /// The steer, by the number of its command.
        steer: EventNumber,
    },
    /// The turn has stopped, and what it started has been seen to.
    Terminal {
        /// The turn.
        run: RunId,
        /// How.
        outcome: TurnOutcome,
    },
    /// The agent was stopped because nobody needed it; its worker stays for what a turn left running on purpose.
    Rested,
    /// There is no agent any more, and its worker ends: the last word of both.
    Gone(AgentExitReason),
}

/// Something of a turn that needs no answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnUpdate {
    /// A piece of the answer.
    Text {
        /// The piece.
        text: String,
    },
    /// A piece of what the agent thinks.
    Thought {
        /// The piece.
        text: String,
    },
    /// A tool call has begun.
    ToolStarted {
        /// The call.
        call_id: String,
        /// The tool.
        name: String,
        /// Its arguments.
        input: Value,
    },
    /// A tool call gave something out.
    ToolOutput {
        /// The call.
        call_id: String,
        /// A piece of it.
        text: String,
    },
    /// A tool call has ended.
    ToolFinished {
        /// The call.
        call_id: String,
        /// The tool.
        name: String,
        /// What it gave.
        output: Value,
        /// Whether it failed.
        is_error: bool,
    },
    /// The agent's plan, whole.
    Plan {
        /// Its entries.
        entries: Vec<PlanEntry>,
    },
    /// Something that a person should see and that is not part of the answer.
    Notice {
        /// What.
        text: String,
    },
    /// What was used since the last report.
    Usage {
        /// How much.
        usage: TokenUsage,
    },
    /// The model was called once more: a turn, as `max_turns` counts them.
    #[serde(rename = "turn")]
    ModelCall,
}

/// What an agent asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskRequest {
    /// Made by the agent's side, which tells answers apart by it; it cannot be guessed.
    pub id: AskId,
    /// Permission or question.
    pub kind: AskKind,
    /// The tool that wants permission.
    pub tool: Option<String>,
    /// Its arguments.
    pub input: Value,
    /// The agent's word on the risk, which may raise ours.
    pub risk: Option<Risk>,
    /// The question, or what the tool would do.
    pub prompt: String,
    /// What a question may be answered with; empty: anything.
    pub options: Vec<String>,
    /// Whether the agent would not have asked by itself: then nobody is asked where the risk is low and no rule says so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "unasked")]
    pub implicit: bool,
}

/// How a turn stopped, in the agent's words.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TurnOutcome {
    /// Why.
    pub stop: TurnStopReason,
    /// The agent's result, if it gives one.
    pub text: Option<String>,
    /// What went wrong.
    pub error: Option<RunError>,
    /// What became of the processes that it started.
    pub processes: ProcessCleanup,
    /// The conversation so far, of a turn that is to be resumed with it; empty for every other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transcript: Vec<Value>,
    /// Whether the agent ends with this turn: [`Up::Gone`] follows, and no prompt should meet it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub agent_ends: bool,
}

impl TurnOutcome {
    /// An outcome with nothing more to say.
    pub fn of(stop: TurnStopReason) -> Self {
        Self {
            stop,
            text: None,
            error: None,
            processes: ProcessCleanup::default(),
            transcript: Vec::new(),
            agent_ends: false,
        }
    }

    /// The outcome of a turn that went wrong.
    pub fn failed(error: RunError) -> Self {
        Self { error: Some(error), ..Self::of(TurnStopReason::Error) }
    }

    /// The outcome of a turn that came to its end with a result.
    pub fn completed(result: impl Into<String>) -> Self {
        Self { text: Some(result.into()), ..Self::of(TurnStopReason::EndTurn) }
    }

    /// The outcome of a turn that stopped because it was told to.
    pub fn cancelled() -> Self {
        Self::of(TurnStopReason::Cancelled)
    }

    /// The outcome of a turn that waits for others, and is to be run again with this conversation.
    pub fn suspended(transcript: Vec<Value>) -> Self {
        Self { transcript, ..Self::of(TurnStopReason::Suspended) }
    }
}

/// Why a turn stopped, in the agent's words. The session decides what that makes of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnStopReason {
    /// It had nothing more to say.
    EndTurn,
    /// It was asked to stop.
    Cancelled,
    /// It failed.
    Error,
    /// The model's limit on its answer.
    MaxTokens,
    /// The agent's own limit on its turns.
    MaxTurns,
    /// The model would not.
    Refused,
    /// It waits for the sessions that it started.
    Suspended,
    /// Its time was over while no daemon was there to say so.
    Timeout,
    /// Its budget was spent while no daemon was there to say so.
    BudgetExceeded,
}

/// What a session says to its agent. Each bears the number of the event that caused it and is applied once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentCommand {
    /// Begin a turn.
    Prompt {
        /// Its cause.
        number: EventNumber,
        /// The run it serves.
        run: RunId,
        /// What to do, the whole of it.
        prompt: String,
        /// Files that come with it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        files: Vec<PromptFile>,
        /// The conversation that it goes on with, where the agent does not remember it: a suspended turn's
        /// transcript and what it waited for.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        messages: Vec<Value>,
        /// What the worker enforces while no daemon is there to do it.
        #[serde(default)]
        limits: TurnLimits,
    },
    /// Tell the running turn something.
    Steer {
        /// Its cause, and its name in [`Up::SteerTaken`].
        number: EventNumber,
        /// The turn.
        run: RunId,
        /// What.
        text: String,
    },
    /// Stop the turn, politely.
    Cancel {
        /// Its cause.
        number: EventNumber,
        /// The turn.
        run: RunId,
    },
    /// Stop the turn, whatever it takes.
    Kill {
        /// The number of the cancel that had no effect.
        number: EventNumber,
        /// The turn.
        run: RunId,
    },
    /// Answer an ask.
    Answer {
        /// Its cause.
        number: EventNumber,
        /// The ask.
        ask: AskId,
        /// The answer, or that nobody will give one.
        answer: AskResolution,
    },
}

impl AgentCommand {
    /// The number of its cause.
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

/// A file with its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptFile {
    /// Its name, for the agent and for people.
    pub name: String,
    /// What it is.
    pub mime: String,
    /// Its content in base64.
    pub data: String,
}

/// What is left to a turn. A worker counts only while no daemon is attached, and from what was left when the prompt
/// was given; the daemon is the better judge.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct TurnLimits {
    /// Milliseconds, waiting for people not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Model calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_turns: Option<u32>,
    /// Money.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_usd: Option<f64>,
    /// Milliseconds between asking the agent to stop and killing it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
}

/// What comes back for an ask.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AskResolution {
    /// A decision or a value.
    Answered(AskAnswer),
    /// The run is being stopped; nobody will answer.
    Withdrawn,
}

/// Why an agent is gone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentExitReason {
    /// It ended by itself, or never became ready. The turn it was in has failed.
    Failed(RunError),
    /// It was lost with its worker or machine. Nobody knows how far its turn came.
    Lost,
    /// It was stopped because nobody needed it.
    Stopped,
}
