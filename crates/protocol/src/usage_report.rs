//! What sessions have used: the response of `GET /v1/usage`. The docs of these types are the descriptions in
//! `openapi.json`, so they are written for users of the API.

use serde::{Deserialize, Serialize};

use crate::search::IndexProgress;
use crate::time::Millis;

/// What the rows of a usage report stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum UsageGrouping {
    #[default]
    Agent,
    /// The model that the session was set to when the usage was reported.
    Model,
    Session,
    Workspace,
    /// Calendar days in the time zone of the request.
    Day,
}

impl UsageGrouping {
    pub const ALL: [Self; 5] = [Self::Agent, Self::Model, Self::Session, Self::Workspace, Self::Day];

    /// The name in JSON and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Model => "model",
            Self::Session => "session",
            Self::Workspace => "workspace",
            Self::Day => "day",
        }
    }
}

/// Response of `GET /v1/usage`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct UsageReport {
    /// What a row stands for.
    pub by: UsageGrouping,
    /// Only usage that was reported at this time or later is counted. Null if all is.
    pub since: Option<Millis>,
    /// The time zone of the days.
    pub zone: String,
    /// Days in their order; other rows by cost, then by tokens, the highest first.
    pub rows: Vec<UsageRow>,
    /// All rows together.
    pub total: UsageSum,
    /// Whether everything was counted that was in the journal when the request came. If not, the index is still being
    /// built, and `index` says how far it is.
    pub complete: bool,
    pub index: IndexProgress,
}

/// The usage of one agent, model, session, workspace or day.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct UsageRow {
    /// The agent, the model, the id of the session or workspace, or the day as `YYYY-MM-DD`. Null for sessions without a
    /// model of their own: their agent chose it.
    pub key: Option<String>,
    /// The title of the session, or the path of the workspace.
    pub label: Option<String>,
    #[serde(flatten)]
    pub sum: UsageSum,
}

/// A sum of usage. Sums stop at the highest number instead of overflowing.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct UsageSum {
    pub input_tokens: u64,
    pub output_tokens: u64,
    /// Cost in US dollars. Null if no cost is known.
    pub cost_usd: Option<f64>,
    /// Runs that reported usage.
    pub runs: u64,
    /// Those of them that used tokens and reported no cost. If there are any, the real cost is higher than `cost_usd`.
    pub runs_without_cost: u64,
}
