//! What a session says to its agent and hears from it, whatever lies between: a channel, a socket, an ocean.
//!
//! Both directions are exactly once. Up, everything the agent's side says is numbered 1, 2, 3… over the life of the
//! session; the session commits the number with what it made of it, acknowledges after the commit, and drops what it
//! has seen. Down, a command bears the [`Number`] of the event that caused it, so the journal is the only outbox.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::event::{Answer, AskKind, Attachment, PlanEntry, Processes, RunError, Usage};
use crate::ids::{AskId, Number, RunId};
use crate::policy::Risk;
use crate::text::Blob;

/// The number of something said upwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UpNumber(pub u64);

/// What the agent's side says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum Up {
    /// The agent can take a prompt.
    Ready {
        /// The agent's own name for the conversation, by which it can be resumed.
        agent_session_id: Option<String>,
        /// Whether a turn can be steered.
        steers: bool,
    },
    /// Something of a turn.
    Said {
        /// The turn.
        run: RunId,
        /// What of it.
        what: Said,
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
        steer: Number,
    },
    /// The turn will not take a steer in.
    SteerMissed {
        /// The steer, by the number of its command.
        steer: Number,
    },
    /// The turn has stopped, and what it started has been seen to.
    Terminal {
        /// The turn.
        run: RunId,
        /// How.
        outcome: Outcome,
    },
}

/// Something of a turn that needs no answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Said {
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
        usage: Usage,
    },
    /// The model was called once more: a turn, as `max_turns` counts them.
    Turn,
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
}

/// How a turn stopped, in the agent's words.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Why.
    pub stop: Stop,
    /// The agent's result, if it gives one.
    pub text: Option<String>,
    /// What went wrong.
    pub error: Option<RunError>,
    /// What became of the processes that it started.
    pub processes: Processes,
}

/// Why a turn stopped, in the agent's words. The session decides what that makes of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
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
}

/// What a session says to its agent. Each bears the number of the event that caused it and is applied once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Down {
    /// Begin a turn.
    Prompt {
        /// Its cause.
        number: Number,
        /// The run it serves.
        run: RunId,
        /// What to do; the whole of it is in the file if there is one.
        prompt: String,
        /// The file.
        blob: Option<Blob>,
        /// Files that come with it.
        attachments: Vec<Attachment>,
    },
    /// Tell the running turn something.
    Steer {
        /// Its cause, and its name in [`Up::SteerTaken`].
        number: Number,
        /// The turn.
        run: RunId,
        /// What.
        text: String,
        /// The file that has the whole of it.
        blob: Option<Blob>,
    },
    /// Stop the turn, politely.
    Cancel {
        /// Its cause.
        number: Number,
        /// The turn.
        run: RunId,
    },
    /// Stop the turn, whatever it takes.
    Kill {
        /// The number of the cancel that had no effect.
        number: Number,
        /// The turn.
        run: RunId,
    },
    /// Answer an ask.
    Answer {
        /// Its cause.
        number: Number,
        /// The ask.
        ask: AskId,
        /// The answer, or that nobody will give one.
        answer: Reply,
    },
}

/// What comes back for an ask.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "as", rename_all = "snake_case")]
pub enum Reply {
    /// A decision or a value.
    Answered(Answer),
    /// The run is being stopped; nobody will answer.
    Withdrawn,
}

/// Why an agent is gone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum Gone {
    /// It ended by itself, or never became ready. The turn it was in has failed.
    Failed(RunError),
    /// It was lost with its worker or machine. Nobody knows how far its turn came.
    Lost,
    /// It was stopped because nobody needed it.
    Stopped,
}
