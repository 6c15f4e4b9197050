//! Asks (permission requests and questions of agents), their answers, and the events about them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::{AskId, FleetId, RunId, SessionId};
use crate::policy::{PolicyRule, Risk};
use crate::time::Millis;

/// Kind of an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AskKind {
    /// The agent requests permission to use a tool.
    Permission,
    /// The agent asks a person a question.
    Question,
}

/// State of an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = AskState)]
pub enum AskStatus {
    /// Nobody has answered yet.
    Pending,
    /// A person or a policy has answered.
    Answered,
    /// The agent no longer waits for an answer.
    Withdrawn,
}

/// Answer to a permission request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Decision)]
pub enum PermissionDecision {
    /// Allow this call.
    AllowOnce,
    /// Allow this tool for the rest of the session, except for high-risk calls.
    AllowAlways,
    /// Refuse this call.
    Deny,
}

impl PermissionDecision {
    /// Whether the agent may go on, this time at least.
    pub fn allows(self) -> bool {
        matches!(self, Self::AllowOnce | Self::AllowAlways)
    }
}

/// Answer to an ask.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Answer)]
pub struct AskAnswer {
    /// Answer to a permission request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<PermissionDecision>,
    /// Answer to a question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Reason for the answer. The reason for a `deny` is passed to the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Who or what resolved an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResolvedBy {
    /// A person, or a program that answers for one.
    User,
    /// The session's policy.
    Policy,
    /// A cancel of the run.
    Cancel,
    /// The agent, by withdrawing the ask.
    Agent,
    /// The end of the run.
    End,
}

/// A permission request or a question that an agent waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Ask {
    pub id: AskId,
    /// The session whose agent asks. Null if a fleet asks.
    pub session_id: Option<SessionId>,
    /// The run whose agent asks. Null if a fleet asks.
    pub run_id: Option<RunId>,
    /// The fleet that asks a person for its result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet_id: Option<FleetId>,
    pub kind: AskKind,
    /// Tool that the agent wants to use. Null for a question.
    pub tool: Option<String>,
    /// Arguments of the tool call.
    #[schema(value_type = Object)]
    pub input: Value,
    /// SHA-256 of `input` as canonical JSON, in lowercase hex. An answer may carry it to name what was shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_sha256: Option<String>,
    /// How much harm the tool call could do.
    pub risk: Risk,
    /// The question, or what the tool would do.
    pub prompt: String,
    /// Allowed answers to a question. Empty if any answer is allowed.
    pub options: Vec<String>,
    /// True if a call of one of Quarterdeck's own tools waits for the answer: `ask_human`, whose result it is, or a
    /// call that an agent makes without asking.
    #[serde(rename = "by_call", default, skip_serializing_if = "std::ops::Not::not")]
    pub asked_by_tool: bool,
    pub opened_at: Millis,
    pub state: AskStatus,
    /// The answer, once there is one.
    pub answer: Option<AskAnswer>,
}

/// Data of `ask.opened`: the ask itself. Its fields are at the top level of the data, because that is the documented
/// format. We avoid `flatten` elsewhere because it is slow, but asks are rare.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskOpened {
    /// Same as the ask's `id`, under the name that other events use for it.
    pub ask_id: AskId,
    #[serde(flatten)]
    pub ask: Ask,
}

/// Data of `ask.resolved`: the ask in its new state, and who resolved it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskResolved {
    /// Same as the ask's `id`, under the name that other events use for it.
    pub ask_id: AskId,
    #[serde(flatten)]
    pub ask: Ask,
    pub by: ResolvedBy,
    /// The rule that decided. Absent if the policy is a single verdict or did not decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// True if the policy would have asked, but a person had allowed the tool for the rest of the session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub granted: bool,
}

impl AskResolved {
    /// Resolved without a policy rule.
    pub fn new(ask: Ask, by: ResolvedBy) -> Self {
        Self { ask_id: ask.id.clone(), ask, by, rule: None, granted: false }
    }
}

/// Data of `ask.delivered`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskDelivered {
    pub ask_id: AskId,
}
