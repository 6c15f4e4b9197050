//! What is said in a conversation: messages with their parts, tools, plans, and what they used.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::FinishReason;
use crate::ids::{MessageId, RunId};
use crate::text::BlobRef;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Role)]
pub enum MessageRole {
    /// The prompt.
    User,
    /// The answer.
    Assistant,
}

/// A file that comes with a prompt. Small ones have their data here, others a file beside the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Attachment {
    /// Its name, for the agent and for people.
    pub name: String,
    /// What it is.
    pub mime: String,
    /// Its content in base64, if it is small.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// The file that holds its content, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobRef>,
}

/// One part of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = Part)]
pub enum MessagePart {
    /// What was said.
    Text {
        /// The words, or their head.
        text: String,
        /// The file that holds the whole.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blob: Option<BlobRef>,
    },
    /// What was thought.
    Thought {
        /// The words.
        text: String,
    },
    /// A tool call.
    Tool {
        /// The call.
        call_id: String,
        /// The tool.
        name: String,
        /// Its arguments.
        #[schema(value_type = Object)]
        input: Value,
        /// What it gave out while it ran.
        text: String,
        /// What it gave in the end, if it has ended.
        #[schema(value_type = Object)]
        output: Option<Value>,
        /// Whether it failed.
        is_error: Option<bool>,
    },
    /// The plan as it last was.
    Plan {
        /// Its entries.
        entries: Vec<PlanEntry>,
    },
    /// What the turn was told on its way.
    Steer {
        /// The words.
        text: String,
    },
    /// A file.
    File {
        /// The file.
        file: Attachment,
    },
}

/// See [`EventBody::MessageCreated`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MessageCreated {
    /// The message.
    pub message_id: MessageId,
    /// Who speaks.
    pub role: MessageRole,
    /// What is known of it at once: all of the user's, nothing of the assistant's.
    pub parts: Vec<MessagePart>,
}

/// See [`EventBody::TextDelta`] and [`EventBody::ThoughtDelta`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageDelta {
    /// The message it belongs to; a late one belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    /// The piece.
    pub text: String,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// See [`EventBody::ToolStarted`], [`EventBody::ToolOutput`] and [`EventBody::ToolFinished`]: what is known of a call.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ToolCallEvent {
    /// The message it belongs to; a late one belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    /// The call.
    pub call_id: String,
    /// The tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Value>,
    /// What it gave out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// What it gave in the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<Value>,
    /// Whether it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_error: Option<bool>,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// One line of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PlanEntry {
    /// What is to be done.
    pub content: String,
    /// How far it is, in the agent's words.
    #[serde(default)]
    pub status: String,
}

/// See [`EventBody::PlanUpdated`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanUpdated {
    /// The message it belongs to; a late one belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    /// All of it.
    pub entries: Vec<PlanEntry>,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// See [`EventBody::NoticeShown`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoticeShown {
    /// What.
    pub text: String,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// Tokens and money.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
#[schema(as = Usage)]
pub struct TokenUsage {
    /// Tokens in.
    pub input_tokens: u64,
    /// Tokens out.
    pub output_tokens: u64,
    /// Dollars.
    pub cost_usd: f64,
}

impl std::ops::AddAssign for TokenUsage {
    fn add_assign(&mut self, more: Self) {
        self.input_tokens = self.input_tokens.saturating_add(more.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(more.output_tokens);
        self.cost_usd += more.cost_usd;
    }
}

/// See [`EventBody::UsageReported`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UsageReported {
    /// Tokens in.
    pub input_tokens: u64,
    /// Tokens out.
    pub output_tokens: u64,
    /// Dollars.
    pub cost_usd: f64,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

impl UsageReported {
    /// The numbers alone.
    pub fn usage(&self) -> TokenUsage {
        TokenUsage {
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            cost_usd: self.cost_usd,
        }
    }
}

/// How a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Finish)]
pub struct MessageFinish {
    /// As its run.
    pub reason: FinishReason,
}

/// See [`EventBody::MessageFinished`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageFinished {
    /// The message.
    pub message_id: MessageId,
    /// Always the assistant: the user's is complete when it is created.
    pub role: MessageRole,
    /// How.
    pub finish: MessageFinish,
}
