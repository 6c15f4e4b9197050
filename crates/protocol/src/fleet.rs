//! A fleet as declared: its sessions, where it starts, and its routes. `qd-fleetfile` parses and checks the file that
//! people write; the types here hold only checked values and are journalled as they are.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::api::SessionStatus;
use crate::event::{FinishReason, SessionLimits};
use crate::ids::{FleetId, SessionId, WorkspaceId};
use crate::mail::MailDelivery;
use crate::policy::Policy;
use crate::sandbox::{NetworkSetting, SandboxSetting};
use crate::time::Millis;

/// A checked fleet declaration: several sessions and the routes between them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct FleetSpec {
    pub task: String,
    /// Branch from which the sessions' worktrees start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_branch: Option<String>,
    /// Budget in US dollars for all sessions together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_usd: Option<f64>,
    /// Seconds after the start at which the fleet is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// Whether a session's last message is sent as mail to every session that it mentions with `@NAME` at the start of
    /// a line.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mentions: bool,
    /// Members by name.
    pub sessions: BTreeMap<String, FleetMember>,
    /// Names of the sessions that get the task first.
    pub start: Vec<String>,
    /// Routes in the order of the file.
    #[serde(default)]
    pub routes: Vec<FleetRoute>,
}

/// One session of a fleet, as declared.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct FleetMember {
    pub agent: String,
    /// Model that the agent should use, by the agent's own name for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Mode that the agent should be in, such as `plan`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// What the session is for. People see it, and templates can use it as `{{role}}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    #[serde(default)]
    pub policy: Policy,
    /// Whether the session works in its own git worktree.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub worktree: bool,
    #[serde(default)]
    pub limits: SessionLimits,
    /// How many times a failed prompt of the fleet is retried before it counts as failed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retry: u32,
    /// Template for the prompts that routes give to this session, unless the route has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// How mail without its own `deliver` reaches the session.
    #[serde(default, skip_serializing_if = "MailDelivery::is_prompt")]
    pub mail: MailDelivery,
    /// How strongly the agent is confined. Absent: its manifest decides, else the daemon's setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxSetting>,
    /// Whether the agent reaches the network. Absent: its manifest decides, else the daemon's setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSetting>,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// A rule of the fleet: what happens once all of its triggers have happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetRoute {
    /// The ends that the route waits for. It fires when all of them have happened.
    pub when: Vec<RouteTrigger>,
    /// Pattern that the last message of at least one of these sessions must match.
    #[serde(rename = "match", default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    pub then: RouteAction,
    /// How many times the route may fire. After that it is ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// Template for the prompts that the route gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
}

impl FleetRoute {
    /// Whether both routes have the same triggers, in any order.
    pub fn has_same_trigger(&self, other: &Self) -> bool {
        let covers =
            |some: &[RouteTrigger], all: &[RouteTrigger]| some.iter().all(|trigger| all.contains(trigger));
        covers(&self.when, &other.when) && covers(&other.when, &self.when)
    }
}

/// An end of a session that a route waits for. Written as `lead.done`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RouteTrigger {
    /// Name of the session in the fleet.
    pub session: String,
    pub on: TriggerOutcome,
}

/// How the work that a fleet gave to a session has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TriggerOutcome {
    /// The run ended as `end_turn`.
    Done,
    /// The run ended in any other way.
    Failed,
    /// The run ended as `cancelled`.
    Cancelled,
}

impl TriggerOutcome {
    /// Every outcome with its name in the fleet file.
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
        let name = Self::ALL.iter().find(|(_, outcome)| outcome == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl fmt::Display for RouteTrigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.session, self.on)
    }
}

/// Text that is not a trigger.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a trigger is the name of a session followed by .done, .failed or .cancelled")]
pub struct TriggerParseError;

impl FromStr for RouteTrigger {
    type Err = TriggerParseError;
    fn from_str(text: &str) -> Result<Self, TriggerParseError> {
        let (session, on) = text.rsplit_once('.').ok_or(TriggerParseError)?;
        let (_, on) = TriggerOutcome::ALL.iter().find(|(name, _)| *name == on).ok_or(TriggerParseError)?;
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

/// What a route does when it fires.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteAction {
    /// One session gets a prompt.
    RouteTo(String),
    /// Several sessions get a prompt.
    FanOut {
        /// Names of the sessions.
        to: Vec<String>,
        split: FanOutSplit,
    },
    /// A person is shown the results and asked. The answer is the fleet's result.
    CollectHuman,
}

impl RouteAction {
    /// Names of the sessions that get a prompt. Empty for [`CollectHuman`](Self::CollectHuman).
    pub fn targets(&self) -> &[String] {
        match self {
            Self::RouteTo(name) => std::slice::from_ref(name),
            Self::FanOut { to, .. } => to,
            Self::CollectHuman => &[],
        }
    }
}

/// What each session of a fan-out gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FanOutSplit {
    /// Every session gets the same prompt.
    #[default]
    Broadcast,
    /// The entries of the `cap-subtasks` block in the last message are dealt to the sessions in turn.
    BySubtask,
}

/// State of a fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = FleetState)]
pub enum FleetStatus {
    /// Something is running or about to run.
    Running,
    /// The fleet waits for a person's answer.
    Waiting,
    /// Every session that ran has ended well, or a route followed its failure.
    Done,
    /// A session failed and no route followed the failure, a route could not be followed, or the fleet timed out.
    Failed,
    /// The fleet was cancelled.
    Cancelled,
}

impl FleetStatus {
    /// Whether the fleet has ended.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

/// A fleet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Fleet {
    pub id: FleetId,
    pub workspace_id: WorkspaceId,
    pub state: FleetStatus,
    /// Sessions by name.
    pub sessions: BTreeMap<String, FleetSession>,
    /// The fleet's result: the answer of the person who was asked, otherwise the last message that triggered no route.
    pub result: Option<String>,
    pub task: String,
    /// Reasons for the failure that no session shows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    pub created_at: Millis,
    /// Time of the last change.
    pub updated_at: Millis,
}

/// One session of a fleet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FleetSession {
    pub session_id: SessionId,
    pub state: SessionStatus,
}
