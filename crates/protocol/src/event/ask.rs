//! What an agent waits for, and what people and policies answer.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::{AskId, FleetId, RunId, SessionId};
use crate::policy::{PolicyRule, Risk};
use crate::time::Millis;

/// What an agent waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AskKind {
    /// May this tool be used?
    Permission,
    /// A question to a person.
    Question,
}

/// Where an ask stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = AskState)]
pub enum AskStatus {
    /// Nobody has answered.
    Pending,
    /// Somebody has.
    Answered,
    /// The agent no longer waits.
    Withdrawn,
}

/// An answer to a permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Decision)]
pub enum PermissionDecision {
    /// This time.
    AllowOnce,
    /// This tool, for the rest of the session, unless the risk is high.
    AllowAlways,
    /// No.
    Deny,
}

/// An answer to an ask.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Answer)]
pub struct AskAnswer {
    /// For a permission.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<PermissionDecision>,
    /// For a question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Why; a deny's reason is told to the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Who resolved an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResolvedBy {
    /// A person, or a program in a person's place.
    User,
    /// The session's policy.
    Policy,
    /// Its run was cancelled.
    Cancel,
    /// The agent withdrew it.
    Agent,
    /// Its run ended.
    End,
}

/// Something an agent waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Ask {
    /// The ask.
    pub id: AskId,
    /// Whose; absent if it is a fleet's.
    pub session_id: Option<SessionId>,
    /// In which run.
    pub run_id: Option<RunId>,
    /// The fleet that wants to know its result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet_id: Option<FleetId>,
    /// Permission or question.
    pub kind: AskKind,
    /// The tool that wants permission.
    pub tool: Option<String>,
    /// Its arguments.
    #[schema(value_type = Object)]
    pub input: Value,
    /// How much harm it could do.
    pub risk: Risk,
    /// The question, or what the tool would do.
    pub prompt: String,
    /// What a question may be answered with; empty: anything.
    pub options: Vec<String>,
    /// Whether it was asked by a call of the tool `ask_human`, whose result the answer is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_call: bool,
    /// Since when.
    pub opened_at: Millis,
    /// Where it stands.
    pub state: AskStatus,
    /// The answer that won.
    pub answer: Option<AskAnswer>,
}

/// See [`EventBody::AskOpened`]: the ask itself. Flattened, which we otherwise avoid, because the contract shows the ask's
/// fields at the top of its events; asks are rare, so what flattening costs does not matter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskOpened {
    /// The ask's id, under the name that other events have for it.
    pub ask_id: AskId,
    /// All of it.
    #[serde(flatten)]
    pub ask: Ask,
}

/// See [`EventBody::AskResolved`]: the ask as it now stands, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskResolved {
    /// The ask's id, under the name that other events have for it.
    pub ask_id: AskId,
    /// All of it.
    #[serde(flatten)]
    pub ask: Ask,
    /// By whom.
    pub by: ResolvedBy,
    /// The rule that decided; absent if the policy is one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// Whether the policy would have asked, but a person had allowed the tool for the rest of the session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub granted: bool,
}

impl AskResolved {
    /// Of an ask as it now stands; no rule had a part in it.
    pub fn new(ask: Ask, by: ResolvedBy) -> Self {
        Self { ask_id: ask.id.clone(), ask, by, rule: None, granted: false }
    }
}

/// See [`EventBody::AskDelivered`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskDelivered {
    /// The ask's id.
    pub ask_id: AskId,
}
