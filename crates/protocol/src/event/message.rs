//! Messages with their parts, tool calls, plans, notices and usage, and the events about them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::FinishReason;
use crate::ids::{MessageId, RunId};
use crate::text::BlobRef;

/// Author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Role)]
pub enum MessageRole {
    /// The user: the message is a prompt.
    User,
    /// The agent: the message is its answer.
    Assistant,
}

/// A file attached to a prompt. A small file has its content inline, a larger one in a file beside the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Attachment {
    /// File name, shown to the agent and to people.
    pub name: String,
    /// MIME type.
    pub mime: String,
    /// Content in base64, if it is stored inline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// The stored file, if the content is not inline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobRef>,
}

/// One part of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = Part)]
pub enum MessagePart {
    /// Text of the prompt or of the answer.
    Text {
        /// The text, or its beginning if `blob` is present.
        text: String,
        /// The file that holds the whole text.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blob: Option<BlobRef>,
    },
    /// Thinking of the agent.
    Thought { text: String },
    /// A tool call.
    Tool {
        /// The agent's id for the call.
        call_id: String,
        /// Name of the tool.
        name: String,
        /// Arguments of the call.
        #[schema(value_type = Object)]
        input: Value,
        /// Output while the tool was running.
        text: String,
        /// Result. Null while the tool is running.
        #[schema(value_type = Object)]
        output: Option<Value>,
        /// Whether the tool failed. Null while it is running.
        is_error: Option<bool>,
    },
    /// The agent's plan in its latest version.
    Plan { entries: Vec<PlanEntry> },
    /// A steer that the turn received.
    Steer { text: String },
    /// A file attached to the prompt.
    File { file: Attachment },
}

/// Data of `message.created`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MessageCreated {
    pub message_id: MessageId,
    pub role: MessageRole,
    /// The complete user message. Empty for an assistant message.
    pub parts: Vec<MessagePart>,
}

/// Data of `text.delta` and `thought.delta`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageDelta {
    /// The message that the text belongs to. Absent if the text came after the end of its run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    pub text: String,
    /// The run that had already ended when this text came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// Data of `tool.started`, `tool.output` and `tool.finished`. Each kind uses some of the fields.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ToolCallEvent {
    /// The message that the call belongs to. Absent if the update came after the end of its run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    /// The agent's id for the call.
    pub call_id: String,
    /// Name of the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Arguments of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Value>,
    /// A piece of output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Result of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<Value>,
    /// Whether the tool failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_error: Option<bool>,
    /// The run that had already ended when this update came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// One entry of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PlanEntry {
    /// The step to be done.
    pub content: String,
    /// State of the step, in the agent's own terms.
    #[serde(default)]
    pub status: String,
}

/// Data of `plan.updated`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanUpdated {
    /// The message that the plan belongs to. Absent if the plan came after the end of its run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    /// The complete plan, not a change to it.
    pub entries: Vec<PlanEntry>,
    /// The run that had already ended when this plan came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// Data of `notice.shown`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoticeShown {
    pub text: String,
    /// The run that had already ended when this notice came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
    /// For how many seconds nothing has come from the agent, if the notice is about that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent_s: Option<u64>,
    /// The name of the limit that was reached, as in `docs/limits.md`, if the notice is about that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
}

impl NoticeShown {
    /// A notice that belongs to no run that has ended.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), after_run: None, silent_s: None, limit: None }
    }

    /// A notice that says which limit was reached.
    pub fn of_limit(limit: &str, text: impl Into<String>) -> Self {
        Self { limit: Some(limit.to_owned()), ..Self::new(text) }
    }
}

/// Tokens and money used.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
#[schema(as = Usage)]
pub struct TokenUsage {
    /// Input tokens.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Cost in US dollars.
    pub cost_usd: f64,
}

/// Every sum of usage goes through here. It stops at the highest number instead of overflowing: JSON has no infinity.
impl std::ops::AddAssign for TokenUsage {
    fn add_assign(&mut self, more: Self) {
        self.input_tokens = self.input_tokens.saturating_add(more.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(more.output_tokens);
        let cost = self.cost_usd + more.cost_usd;
        self.cost_usd = if cost.is_finite() { cost } else { f64::MAX };
    }
}

/// Data of `usage.reported`: the increment since the last report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UsageReported {
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub cost_usd: f64,
    /// The agent's own total of the conversation in US dollars, from which a resumed conversation continues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation_cost_usd: Option<f64>,
    /// The run that had already ended when this report came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

impl UsageReported {
    /// The increment alone.
    pub fn usage(&self) -> TokenUsage {
        TokenUsage {
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            cost_usd: self.cost_usd,
        }
    }
}

/// How full the context of an agent's model is, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ContextUsage {
    /// Tokens of the conversation that the model reads with its next call.
    pub used: u64,
    /// Tokens that the model can read at most.
    pub size: u64,
}

/// Data of `context.updated`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextUpdated {
    #[serde(flatten)]
    pub context: ContextUsage,
    /// The run that had already ended when this report came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// Data of `context.compacted`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextCompacted {
    /// Tokens in the context before it was compacted, if the agent reports that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_before: Option<u64>,
    /// The run that had already ended when this report came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// How a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Finish)]
pub struct MessageFinish {
    /// The finish reason of its run.
    pub reason: FinishReason,
}

/// Data of `message.finished`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageFinished {
    pub message_id: MessageId,
    /// Always the assistant: a user message is complete when it is created.
    pub role: MessageRole,
    pub finish: MessageFinish,
}
