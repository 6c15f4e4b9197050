//! What a fleet is made of and what it gives to whom. A fleet's events are numbered like a session's and bear no session.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::FinishReason;
use crate::fleet::{FleetSpec, FleetStatus};
use crate::ids::{AskId, FleetId, RunId, SessionId};

/// See [`EventBody::FleetStarted`](super::EventBody::FleetStarted). Its sessions are created with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetStarted {
    /// The fleet.
    pub fleet_id: FleetId,
    /// As it was declared, with the task that it was given.
    pub spec: FleetSpec,
    /// Its sessions, by name.
    pub sessions: BTreeMap<String, SessionId>,
}

/// See [`EventBody::FleetUpdated`](super::EventBody::FleetUpdated). Only what changed is there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetUpdated {
    /// The fleet.
    pub fleet_id: FleetId,
    /// A run that the fleet started has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<FleetRunEnded>,
    /// What came of it so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<String>,
    /// It starts nothing any more, and what runs is being cancelled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stops: Option<FleetStopReason>,
}

impl FleetUpdated {
    /// Of this fleet, with nothing changed yet.
    pub fn of(fleet_id: FleetId) -> Self {
        Self { fleet_id, ended: None, result: None, stops: None }
    }
}

/// Why a fleet stops before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FleetStopReason {
    /// Somebody cancelled it.
    Cancel,
    /// Its time is over.
    Timeout,
}

/// How a run that the fleet started ended, and what there is to know of its last message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetRunEnded {
    /// The run.
    pub run_id: RunId,
    /// How.
    pub finish_reason: FinishReason,
    /// The run that it is given again as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retried_as: Option<RunId>,
    /// The routes whose pattern its last message matches, by their place in the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matches: Vec<u32>,
    /// How many subtasks are in it, where a route deals them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subtasks: Option<u32>,
    /// Why they could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_subtasks: Option<String>,
    /// There was no such run: its words were told to a run that its session already had.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "taken_in")]
    pub delivered_as_steer: bool,
}

/// See [`EventBody::FleetMentioned`](super::EventBody::FleetMentioned).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetMentioned {
    /// The fleet.
    pub fleet_id: FleetId,
    /// How often mentions have been followed with this.
    pub round: u32,
    /// Whose last message it was.
    pub from: RouteSource,
    /// Who gets it, each as a message and a run of its own.
    pub to: Vec<RouteAssignment>,
    /// Why some get nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// See [`EventBody::FleetRouted`](super::EventBody::FleetRouted).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetRouted {
    /// The fleet.
    pub fleet_id: FleetId,
    /// The route, by its place in the file.
    pub route: u32,
    /// How often it has fired with this.
    pub round: u32,
    /// On whose ends it followed.
    pub from: Vec<RouteSource>,
    /// Who else is quoted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quoted: Vec<RouteSource>,
    /// Who gets something, and what; one that is dealt nothing has no runs.
    pub to: Vec<RouteAssignment>,
    /// The question that a person is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask_id: Option<AskId>,
    /// Why it could not be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A session and the runs whose last messages count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteSource {
    /// Its name.
    pub session: String,
    /// Its runs.
    pub runs: Vec<RunId>,
}

/// What a session is given: one run, or one for each of its subtasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteAssignment {
    /// Its name.
    pub session: String,
    /// The runs, in order.
    pub runs: Vec<RunId>,
    /// The subtask of each of them, where they are dealt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub subtasks: Vec<SubtaskRef>,
}

/// An entry of a block of subtasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubtaskRef {
    /// In the last message of this run.
    pub run: RunId,
    /// Its place there.
    pub entry: u32,
}

/// See [`EventBody::FleetFinished`](super::EventBody::FleetFinished).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetFinished {
    /// The fleet.
    pub fleet_id: FleetId,
    /// How.
    pub state: FleetStatus,
    /// What came of it.
    pub result: Option<String>,
}
