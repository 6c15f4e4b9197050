//! What a fleet is, as far as the journal says. Only [`evolve`](super::evolve) changes it.

use std::collections::{BTreeMap, BTreeSet};

use qd_protocol::event::{Ask, FleetStarted, FleetStopReason, RouteSource, SubtaskRef};
use qd_protocol::fleet::{FleetSpec, FleetStatus, RouteAction, TriggerOutcome};
use qd_protocol::{AskId, EventNumber, FleetId, Millis, RunId, SessionId, WorkspaceId};
use serde::{Deserialize, Serialize};

/// Several sessions that work together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetState {
    /// The fleet.
    pub id: FleetId,
    /// Its project.
    pub workspace: WorkspaceId,
    /// How many events it has.
    pub number: EventNumber,
    /// As it was declared, with the task that it was given.
    pub spec: FleetSpec,
    /// Its sessions, by name.
    pub sessions: BTreeMap<String, SessionId>,
    /// What sessions were given and have not ended, in the order in which it was given.
    #[serde(rename = "errands")]
    pub assignments: Vec<FleetAssignment>,
    /// What became of the last one of each session that had any.
    #[serde(rename = "last")]
    pub last_outcomes: BTreeMap<String, AssignmentOutcome>,
    /// One for each route.
    pub routes: Vec<RouteState>,
    /// How many messages were sent because somebody was mentioned.
    #[serde(default)]
    #[serde(rename = "mentions")]
    pub mention_count: u32,
    /// Questions that nobody has answered.
    pub asks: BTreeMap<AskId, Ask>,
    /// Why routes could not be followed.
    pub problems: Vec<String>,
    /// What came of it so far.
    pub result: Option<String>,
    /// A stop that was asked for: a latch.
    pub stopping: Option<FleetStop>,
    /// How it has ended.
    pub finished: Option<FleetStatus>,
    /// Since when it exists.
    pub created_at: Millis,
    /// Its last event.
    pub updated_at: Millis,
}

/// What a session was given at once: one run, or one for each of its subtasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetAssignment {
    /// Whose.
    pub session: String,
    /// By which route; `None`: it is one that begins.
    pub route: Option<u32>,
    /// How often that had fired.
    pub round: u32,
    /// Whose last messages it was given.
    pub from: Vec<RouteSource>,
    /// Its runs, in order.
    pub runs: Vec<AssignedRun>,
    /// Whether it is given as mail, since somebody mentioned the session.
    #[serde(default)]
    #[serde(rename = "mention")]
    pub by_mention: bool,
}

/// One run of an errand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedRun {
    /// The run, in its last attempt.
    pub run: RunId,
    /// How often it was tried before.
    pub attempt: u32,
    /// The subtask that it is for.
    pub subtask: Option<SubtaskRef>,
    /// How it ended.
    pub ended: Option<TriggerOutcome>,
    /// The routes whose pattern its last message matches.
    pub matches: BTreeSet<u32>,
    /// How many subtasks are in its last message, or why that cannot be said.
    pub subtasks: Option<Result<u32, String>>,
}

/// How the last errand of a session ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignmentOutcome {
    /// Its runs.
    pub runs: Vec<RunId>,
    /// How.
    pub ending: TriggerOutcome,
    /// Whether a route has followed on it.
    pub routed: bool,
}

/// What a route has seen since it was last considered.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RouteState {
    /// How often it has fired.
    pub fired: u32,
    /// For each of its triggers.
    #[serde(rename = "slots")]
    pub triggers: Vec<Option<TriggerState>>,
}

/// A trigger that need not be waited for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TriggerState {
    /// It has happened.
    Ended {
        /// The runs whose end it was.
        runs: Vec<RunId>,
        /// Whether one of their last messages matches the route's pattern.
        matches: bool,
        /// How many subtasks are in each of their last messages, or why that cannot be said.
        subtasks: Vec<Result<u32, String>>,
    },
    /// Its session was dealt nothing.
    Excused,
}

/// A stop that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetStop {
    /// Why.
    pub by: FleetStopReason,
    /// When.
    pub at: Millis,
}

impl RouteState {
    /// Whether everything it waits for has happened, and something has.
    pub fn is_complete(&self) -> bool {
        self.triggers.iter().all(Option::is_some)
            && self.triggers.iter().flatten().any(|slot| matches!(slot, TriggerState::Ended { .. }))
    }
}

impl FleetState {
    /// A fleet that has just been started. The event is its first.
    pub fn new(workspace: WorkspaceId, started: FleetStarted, at: Millis) -> Self {
        let FleetStarted { fleet_id, spec, sessions } = started;
        let routes = spec.routes.iter();
        let routes = routes.map(|route| RouteState { fired: 0, triggers: vec![None; route.when.len()] });
        let begin = |name: &String| FleetAssignment {
            session: name.clone(),
            route: None,
            round: 0,
            from: Vec::new(),
            runs: vec![AssignedRun::new(RunId::of_fleet(&fleet_id, "start", name, 0, 0), None)],
            by_mention: false,
        };
        Self {
            assignments: spec.start.iter().map(begin).collect(),
            routes: routes.collect(),
            id: fleet_id,
            workspace,
            number: EventNumber(1),
            spec,
            sessions,
            last_outcomes: BTreeMap::new(),
            mention_count: 0,
            asks: BTreeMap::new(),
            problems: Vec::new(),
            result: None,
            stopping: None,
            finished: None,
            created_at: at,
            updated_at: at,
        }
    }

    /// Where it stands.
    pub fn status(&self) -> FleetStatus {
        match self.finished {
            Some(state) => state,
            None if self.assignments.is_empty() => FleetStatus::Waiting,
            None => FleetStatus::Running,
        }
    }

    /// Runs that the fleet has given and that have not ended, each with its errand.
    pub fn open_assigned_runs(&self) -> impl Iterator<Item = (&FleetAssignment, &AssignedRun)> {
        let runs = |errand: &FleetAssignment| errand.runs.len();
        self.assignments
            .iter()
            .flat_map(move |errand| {
                (0..runs(errand)).filter_map(move |at| errand.runs.get(at).map(|open| (errand, open)))
            })
            .filter(|(_, open)| open.ended.is_none())
    }

    /// The same without their errands.
    pub fn open_runs(&self) -> impl Iterator<Item = &AssignedRun> {
        self.open_assigned_runs().map(|(_, open)| open)
    }

    /// Which last messages the next step has to have at hand if this run ends: those that a person would be shown with
    /// it.
    pub fn required_texts(&self, run: &RunId) -> BTreeSet<RunId> {
        let Some((errand, _)) = self.open_assigned_runs().find(|(_, open)| open.run == *run) else {
            return BTreeSet::new();
        };
        let mut wanted = BTreeSet::new();
        for (route, seen) in self.spec.routes.iter().zip(&self.routes) {
            let concerns = route.when.iter().any(|trigger| trigger.session == errand.session);
            if concerns && route.then == RouteAction::CollectHuman {
                for slot in seen.triggers.iter().flatten() {
                    if let TriggerState::Ended { runs, .. } = slot {
                        wanted.extend(runs.iter().cloned());
                    }
                }
                wanted.extend(errand.runs.iter().map(|open| open.run.clone()));
            }
        }
        wanted.remove(run);
        wanted
    }
}

impl AssignedRun {
    /// One that has not been tried before.
    pub fn new(run: RunId, subtask: Option<SubtaskRef>) -> Self {
        Self { run, attempt: 0, subtask, ended: None, matches: BTreeSet::new(), subtasks: None }
    }
}
