//! Data of fleet events. A fleet numbers its events like a session does; they have no `session_id` and no `run_id`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::FinishReason;
use crate::fleet::{FleetSpec, FleetStatus};
use crate::ids::{AskId, FleetId, RunId, SessionId};

/// Data of `fleet.started`. The fleet's sessions are created in the same transaction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetStarted {
    pub fleet_id: FleetId,
    /// The fleet as declared, with the task that it was started with.
    pub spec: FleetSpec,
    /// Session ids by member name.
    pub sessions: BTreeMap<String, SessionId>,
}

/// Data of `fleet.updated`. Only the fields that changed are present.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetUpdated {
    pub fleet_id: FleetId,
    /// A run that the fleet started has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<FleetRunEnded>,
    /// The fleet's result so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<String>,
    /// The fleet starts nothing more and cancels its live runs, for this reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stops: Option<FleetStopReason>,
}

impl FleetUpdated {
    /// An update in which nothing has changed yet.
    pub fn of(fleet_id: FleetId) -> Self {
        Self { fleet_id, ended: None, result: None, stops: None }
    }
}

/// Why a fleet stops early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FleetStopReason {
    /// A client cancelled the fleet.
    Cancel,
    /// The fleet reached its `timeout_s`.
    Timeout,
}

/// How a run that the fleet started has ended, and what the fleet read from its last message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetRunEnded {
    pub run_id: RunId,
    pub finish_reason: FinishReason,
    /// The run that retries the same prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retried_as: Option<RunId>,
    /// Routes whose pattern matches the last message, by their position in the file, from 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matches: Vec<u32>,
    /// Number of subtasks in the last message, if a route distributes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subtasks: Option<u32>,
    /// Why the block of subtasks could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_subtasks: Option<String>,
    /// There was no separate run: a run that was already active in the session took the message as a steer.
    #[serde(rename = "taken_in", default, skip_serializing_if = "std::ops::Not::not")]
    pub delivered_as_steer: bool,
}

/// Data of `fleet.mentioned`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetMentioned {
    pub fleet_id: FleetId,
    /// How many times the fleet has followed mentions, including this time.
    pub round: u32,
    /// The session whose last message mentions the others.
    pub from: RouteSource,
    /// The sessions that get the message, each as mail that becomes a run.
    pub to: Vec<RouteAssignment>,
    /// Why some of the mentioned sessions do not get the message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Data of `fleet.routed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetRouted {
    pub fleet_id: FleetId,
    /// Position of the route in the file, from 0.
    pub route: u32,
    /// How many times the route has fired, including this time.
    pub round: u32,
    /// The sessions whose ends triggered the route.
    pub from: Vec<RouteSource>,
    /// Other sessions whose last messages the prompt quotes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quoted: Vec<RouteSource>,
    /// The sessions that get a prompt. A session without subtasks has no runs.
    pub to: Vec<RouteAssignment>,
    /// The question, if the route asks a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask_id: Option<AskId>,
    /// Why the route could not be followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A session of a fleet, and the runs whose last messages are used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteSource {
    /// Name of the session in the fleet.
    pub session: String,
    pub runs: Vec<RunId>,
}

/// What a route gives to one session: one run, or one run per subtask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteAssignment {
    /// Name of the session in the fleet.
    pub session: String,
    /// Runs in the order in which the session gets them.
    pub runs: Vec<RunId>,
    /// The subtask of each run, in the same order. Empty if the route does not distribute subtasks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub subtasks: Vec<SubtaskRef>,
}

/// Reference to one entry of a block of subtasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubtaskRef {
    /// The run whose last message contains the block.
    pub run: RunId,
    /// Position of the entry in the block, from 0.
    pub entry: u32,
}

/// Data of `fleet.finished`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetFinished {
    pub fleet_id: FleetId,
    pub state: FleetStatus,
    pub result: Option<String>,
}
