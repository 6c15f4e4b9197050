//! A fleet as it was declared and checked: who takes part, who begins, and what follows on whose end. The file that
//! people write is read elsewhere; past that point nothing here can be wrong, and it is journalled as it is.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::api::SessionStatus;
use crate::event::{FinishReason, SessionLimits};
use crate::ids::{FleetId, SessionId, WorkspaceId};
use crate::mail::MailDelivery;
use crate::policy::Policy;
use crate::time::Millis;

/// Several sessions and the routes between them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct FleetSpec {
    /// What is to be done.
    pub task: String,
    /// Where worktrees start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_branch: Option<String>,
    /// Dollars, for all of its sessions together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_usd: Option<f64>,
    /// Seconds from the start, after which it is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// Whether a last message that begins a line with `@NAME` is sent to that session as mail.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mentions: bool,
    /// Who takes part, by name.
    pub sessions: BTreeMap<String, FleetMember>,
    /// Who gets the task first.
    pub start: Vec<String>,
    /// What follows on whose end, in the order of the file.
    #[serde(default)]
    pub routes: Vec<FleetRoute>,
}

/// One session of a fleet.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct FleetMember {
    /// The agent's name.
    pub agent: String,
    /// Which model, in the agent's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What the agent is told before anything else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// What it is there for, for people and for templates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// What it may do without asking.
    #[serde(default)]
    pub policy: Policy,
    /// Whether it works in a git worktree of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub worktree: bool,
    /// What a run of it may take.
    #[serde(default)]
    pub limits: SessionLimits,
    /// How often a prompt of the fleet that failed is given again before it counts as failed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retry: u32,
    /// What it is told when it is routed to, if the route does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// How mail reaches it that does not say.
    #[serde(default, skip_serializing_if = "MailDelivery::is_prompt")]
    pub mail: MailDelivery,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// What follows when all of its triggers have happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetRoute {
    /// Whose ends; several are waited for together.
    pub when: Vec<RouteTrigger>,
    /// A pattern that the last message of one of them has to match.
    #[serde(rename = "match", default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// What then.
    pub then: RouteAction,
    /// How often; past that it counts as absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// What those that it leads to are told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
}

impl FleetRoute {
    /// Whether another one waits for the same, in whatever order it is written.
    pub fn has_same_trigger(&self, other: &Self) -> bool {
        let covers =
            |some: &[RouteTrigger], all: &[RouteTrigger]| some.iter().all(|trigger| all.contains(trigger));
        covers(&self.when, &other.when) && covers(&other.when, &self.when)
    }
}

/// An end that a route waits for. Written `lead.done`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RouteTrigger {
    /// Whose.
    pub session: String,
    /// How it ended.
    pub on: TriggerOutcome,
}

/// How what a fleet gave to a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TriggerOutcome {
    /// As `end_turn`.
    Done,
    /// As anything else.
    Failed,
    /// As `cancelled`.
    Cancelled,
}

impl TriggerOutcome {
    /// All of them, as they are written.
    pub const ALL: [(&'static str, Self); 3] =
        [("done", Self::Done), ("failed", Self::Failed), ("cancelled", Self::Cancelled)];
}

impl From<FinishReason> for TriggerOutcome {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::EndTurn => Self::Done,
            FinishReason::Cancelled => Self::Cancelled,
            _ => Self::Failed,
        }
    }
}

impl fmt::Display for TriggerOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Self::ALL.iter().find(|(_, ending)| ending == self).map_or("", |(word, _)| word);
        f.write_str(word)
    }
}

impl fmt::Display for RouteTrigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.session, self.on)
    }
}

/// A trigger that is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a trigger is the name of a session with .done, .failed or .cancelled")]
pub struct TriggerParseError;

impl FromStr for RouteTrigger {
    type Err = TriggerParseError;
    fn from_str(text: &str) -> Result<Self, TriggerParseError> {
        let (session, on) = text.rsplit_once('.').ok_or(TriggerParseError)?;
        let (_, on) = TriggerOutcome::ALL.iter().find(|(word, _)| *word == on).ok_or(TriggerParseError)?;
        Ok(Self { session: session.to_owned(), on: *on })
    }
}

impl TryFrom<String> for RouteTrigger {
    type Error = TriggerParseError;
    fn try_from(text: String) -> Result<Self, TriggerParseError> {
        text.parse()
    }
}

impl From<RouteTrigger> for String {
    fn from(trigger: RouteTrigger) -> Self {
        trigger.to_string()
    }
}

/// What a route does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteAction {
    /// One session goes on.
    RouteTo(String),
    /// Several do.
    FanOut {
        /// Which.
        to: Vec<String>,
        /// What each of them gets.
        split: FanOutSplit,
    },
    /// A person decides.
    CollectHuman,
}

impl RouteAction {
    /// The sessions that it leads to.
    pub fn targets(&self) -> &[String] {
        match self {
            Self::RouteTo(name) => std::slice::from_ref(name),
            Self::FanOut { to, .. } => to,
            Self::CollectHuman => &[],
        }
    }
}

/// What each of several sessions gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FanOutSplit {
    /// All of them the same.
    #[default]
    Broadcast,
    /// The entries of the block `cap-subtasks` in the last message, dealt round and round.
    BySubtask,
}

/// Where a fleet stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = FleetState)]
pub enum FleetStatus {
    /// Something runs, or is about to.
    Running,
    /// A person has to answer.
    Waiting,
    /// Every session that ran ended well, or its failure was routed on.
    Done,
    /// One did not.
    Failed,
    /// It was cancelled.
    Cancelled,
}

impl FleetStatus {
    /// Whether nothing follows it.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

/// A fleet, as clients see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Fleet {
    /// The fleet.
    pub id: FleetId,
    /// Its project.
    pub workspace_id: WorkspaceId,
    /// Where it stands.
    pub state: FleetStatus,
    /// Its sessions, by name.
    pub sessions: BTreeMap<String, FleetSession>,
    /// What came of it: the answer of a person who was asked, else the last message that led nowhere.
    pub result: Option<String>,
    /// What it is to do.
    pub task: String,
    /// Why it failed, where no session says so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Since when.
    pub created_at: Millis,
    /// Its last change.
    pub updated_at: Millis,
}

/// One session of a fleet, as clients see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FleetSession {
    /// The session.
    pub session_id: SessionId,
    /// What it does.
    pub state: SessionStatus,
}
