//! A policy tried on asks of the past: `POST /v1/policy/test`. Nothing is decided again; the answer says what would have
//! been.

use serde::{Deserialize, Serialize};

use crate::event::{AskStatus, PermissionDecision, ResolvedBy};
use crate::ids::{AskId, SessionId, WorkspaceId};
use crate::policy::{Policy, PolicyRule, PolicyVerdict, Risk};
use crate::time::Millis;

/// `POST /v1/policy/test`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = PolicyTest)]
pub struct PolicyTestRequest {
    /// The policy to be tried.
    pub policy: Policy,
    /// Only on the asks of this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Only on the asks of this workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_id: Option<WorkspaceId>,
    /// On so many at most, the newest; 1000 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

/// What a policy would have done. Each ask counts under one of the five changes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = PolicyReport)]
pub struct PolicyTestReport {
    /// How many permissions it was tried on.
    pub asks: usize,
    /// Those that would have gone the same way.
    pub as_before: usize,
    /// Those that a person was asked for and that would be allowed.
    pub no_longer_asked: usize,
    /// Those that were refused by policy and would be allowed.
    pub now_allowed: usize,
    /// Those that were decided by policy and would be asked.
    pub now_asked: usize,
    /// Those that were not refused by policy and would be.
    pub now_denied: usize,
    /// Those of all of these in which a person had decided the opposite.
    pub against_people: usize,
    /// Each of them, the oldest first.
    pub trials: Vec<PolicyTrial>,
}

/// One ask, then and now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Trial)]
pub struct PolicyTrial {
    /// The ask.
    pub ask_id: AskId,
    /// Whose.
    pub session_id: SessionId,
    /// The tool that wanted permission.
    pub tool: String,
    /// The argument that rules are tried on, or its beginning.
    pub argument: Option<String>,
    /// How much harm it could do, as it was judged then.
    pub risk: Risk,
    /// When it came.
    pub opened_at: Millis,
    /// What became of it.
    pub then: PastDecision,
    /// What would.
    pub now: TrialDecision,
    /// What is different.
    pub change: DecisionChange,
    /// Whether a person had decided the opposite.
    pub against_person: bool,
}

/// What became of an ask.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Then)]
pub struct PastDecision {
    /// Where it stands.
    pub state: AskStatus,
    /// The answer, if there is one.
    pub decision: Option<PermissionDecision>,
    /// By whom; absent while it is open.
    pub by: Option<ResolvedBy>,
    /// The rule that decided, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// Whether a person had allowed the tool for the rest of the session, and so was not asked.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub granted: bool,
}

/// What would become of an ask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Now)]
pub struct TrialDecision {
    /// What the policy says.
    pub decision: PolicyVerdict,
    /// The rule that says so, counted from 1; absent if none does, or the policy is one word.
    pub rule: Option<u32>,
}

/// How then and now differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Change)]
pub enum DecisionChange {
    /// Not at all.
    AsBefore,
    /// A person was asked; it would be allowed.
    NoLongerAsked,
    /// The policy refused it; it would be allowed.
    NowAllowed,
    /// The policy decided it; a person would be asked.
    NowAsked,
    /// It was not refused by policy; it would be.
    NowDenied,
}

impl PolicyTestReport {
    /// The sum of these.
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
