//! Trying a policy on past asks: request and response of `POST /v1/policy/test`. The trial only reports what the policy
//! would have decided; it changes nothing.

use serde::{Deserialize, Serialize};

use crate::event::{AskStatus, PermissionDecision, ResolvedBy};
use crate::ids::{AskId, SessionId, WorkspaceId};
use crate::policy::{Policy, PolicyRule, PolicyVerdict, Risk};
use crate::time::Millis;

/// Body of `POST /v1/policy/test`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = PolicyTest)]
pub struct PolicyTestRequest {
    /// The policy to try.
    pub policy: Policy,
    /// Use only asks of this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Use only asks of this workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_id: Option<WorkspaceId>,
    /// Maximum number of asks; the newest are used. Defaults to 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

/// What a policy would have decided. Each ask is counted in exactly one of `as_before`, `no_longer_asked`,
/// `now_allowed`, `now_asked` and `now_denied`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = PolicyReport)]
pub struct PolicyTestReport {
    /// Number of permission requests that the policy was tried on.
    pub asks: usize,
    /// Asks with the same decision as before.
    pub as_before: usize,
    /// Asks that a person was asked about and that the policy would allow.
    pub no_longer_asked: usize,
    /// Asks that the policy of that time denied and that this policy would allow.
    pub now_allowed: usize,
    /// Asks that the policy of that time decided and that a person would now be asked about.
    pub now_asked: usize,
    /// Asks that the policy of that time did not deny and that this policy would deny.
    pub now_denied: usize,
    /// Asks about which a person had decided the opposite. Each is also in one of the counts above.
    pub against_people: usize,
    /// Every ask with its old and new decision, oldest first.
    pub trials: Vec<PolicyTrial>,
}

/// One ask with its old and new decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Trial)]
pub struct PolicyTrial {
    pub ask_id: AskId,
    pub session_id: SessionId,
    /// Tool that the agent wanted to use.
    pub tool: String,
    /// The main argument, against which rules are matched. A long one is cut.
    pub argument: Option<String>,
    /// Risk as it was rated at that time.
    pub risk: Risk,
    pub opened_at: Millis,
    /// What was decided at that time.
    pub then: PastDecision,
    /// What this policy would decide.
    pub now: TrialDecision,
    /// How the two differ.
    pub change: DecisionChange,
    /// Whether a person had decided the opposite.
    pub against_person: bool,
}

/// What was decided about an ask at that time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Then)]
pub struct PastDecision {
    pub state: AskStatus,
    /// The answer, if there is one.
    pub decision: Option<PermissionDecision>,
    /// Who or what resolved the ask. Null while it is open.
    pub by: Option<ResolvedBy>,
    /// The rule that decided, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// True if nobody was asked because a person had allowed the tool for the rest of the session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub granted: bool,
}

/// What the tried policy would decide about an ask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Now)]
pub struct TrialDecision {
    pub decision: PolicyVerdict,
    /// Number of the rule that decides, from 1. Null if no rule does, or if the policy is a single verdict.
    pub rule: Option<u32>,
}

/// How the old and the new decision differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Change)]
pub enum DecisionChange {
    /// The decision is the same.
    AsBefore,
    /// A person was asked; the policy would allow it.
    NoLongerAsked,
    /// The policy of that time denied it; this policy would allow it.
    NowAllowed,
    /// The policy of that time decided it; now a person would be asked.
    NowAsked,
    /// The policy of that time did not deny it; this policy would.
    NowDenied,
}

impl PolicyTestReport {
    /// Counts the trials.
    pub fn of(trials: Vec<PolicyTrial>) -> Self {
        let count = |change: DecisionChange| trials.iter().filter(|trial| trial.change == change).count();
        Self {
            asks: trials.len(),
            as_before: count(DecisionChange::AsBefore),
            no_longer_asked: count(DecisionChange::NoLongerAsked),
            now_allowed: count(DecisionChange::NowAllowed),
            now_asked: count(DecisionChange::NowAsked),
            now_denied: count(DecisionChange::NowDenied),
            against_people: trials.iter().filter(|trial| trial.against_person).count(),
            trials,
        }
    }
}
