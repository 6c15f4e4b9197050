//! The state of a fleet, as far as the journal knows. Only [`evolve`](super::evolve()) changes it.

use std::collections::{BTreeMap, BTreeSet};

use qd_protocol::event::{Ask, FleetStarted, FleetStopReason, RouteSource, SubtaskRef};
use qd_protocol::fleet::{FleetSpec, FleetStatus, RouteAction, TriggerOutcome};
use qd_protocol::{
    AskId, ClockReading, EventNumber, FleetId, MachineUptime, Millis, RunId, SessionId, WorkspaceId,
};
use serde::{Deserialize, Serialize};

/// Everything the machine knows about one fleet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetState {
    pub id: FleetId,
    pub workspace: WorkspaceId,
    /// The number of its last event, which is also how many events it has.
    pub number: EventNumber,
    /// The fleet file, with the task that the fleet was started with.
    pub spec: FleetSpec,
    /// Session ids by their names in the fleet file.
    pub sessions: BTreeMap<String, SessionId>,
    /// Assignments that have not ended, in the order in which they were made.
    #[serde(rename = "errands")]
    pub assignments: Vec<FleetAssignment>,
    /// The outcome of the last assignment of each session that has had one.
    #[serde(rename = "last")]
    pub last_outcomes: BTreeMap<String, AssignmentOutcome>,
    /// The state of each route, in the order of the fleet file.
    pub routes: Vec<RouteState>,
    /// How many messages were sent because of mentions.
    #[serde(rename = "mentions", default)]
    pub mention_count: u32,
    /// Asks that are not answered.
    pub asks: BTreeMap<AskId, Ask>,
    /// Why routes could not be followed. Any entry makes the fleet fail.
    pub problems: Vec<String>,
    /// The result so far.
    pub result: Option<String>,
    /// The requested stop, a latch.
    pub stopping: Option<FleetStop>,
    /// The final status, once the fleet has ended.
    pub finished: Option<FleetStatus>,
    /// When it was created, from which its timeout is counted.
    pub created_at: ClockReading,
    /// The time of its last event.
    pub updated_at: Millis,
    /// The uptime at its last event that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_uptime: Option<MachineUptime>,
}

/// Work that a session was assigned at once: one run, or one run for each of its subtasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetAssignment {
    pub session: String,
    /// The route that made it; `None` for a starting session or a mention.
    pub route: Option<u32>,
    /// How many times the route had fired, this time included. For a mention, its number in the fleet.
    pub round: u32,
    /// The sessions whose last messages go into the prompt.
    pub from: Vec<RouteSource>,
    pub runs: Vec<AssignedRun>,
    /// It is delivered as mail, because another session mentioned this one.
    #[serde(rename = "mention", default)]
    pub by_mention: bool,
}

/// One run of an assignment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedRun {
    /// The run id of the latest attempt.
    pub run: RunId,
    /// How many times the run was retried.
    pub attempt: u32,
    /// The subtask that it works on.
    pub subtask: Option<SubtaskRef>,
    pub ended: Option<TriggerOutcome>,
    /// Indexes of the routes whose pattern its last message matches.
    pub matches: BTreeSet<u32>,
    /// The number of subtasks in its last message, or why they could not be read. `None` if no route needs it.
    pub subtasks: Option<Result<u32, String>>,
}

/// How the last assignment of a session ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignmentOutcome {
    pub runs: Vec<RunId>,
    pub ending: TriggerOutcome,
    /// A route has fired on this outcome, so it does not count for the fleet's status.
    pub routed: bool,
}

/// The triggers that a route has route_state since it was last considered.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RouteState {
    /// How many times it has fired.
    pub fired: u32,
    /// One entry per trigger; `None` while the route still waits for it.
    #[serde(rename = "slots")]
    pub triggers: Vec<Option<TriggerState>>,
}

/// A trigger that its route no longer waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TriggerState {
    /// It has happened.
    Ended {
        /// The runs that ended.
        runs: Vec<RunId>,
        /// The last message of one of them matches the route's pattern.
        matches: bool,
        /// For each run, the number of subtasks in its last message or why they could not be read.
        subtasks: Vec<Result<u32, String>>,
    },
    /// Its session got no subtasks, so the route does not wait for it.
    Excused,
}

/// A requested stop of the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetStop {
    pub by: FleetStopReason,
    pub at: Millis,
}

impl RouteState {
    /// Nothing is left to wait for, and at least one trigger has happened.
    pub fn is_complete(&self) -> bool {
        self.triggers.iter().all(Option::is_some)
            && self
                .triggers
                .iter()
                .flatten()
                .any(|trigger_state| matches!(trigger_state, TriggerState::Ended { .. }))
    }
}

impl FleetState {
    /// The state after `fleet.started`, the first event.
    pub fn new(workspace: WorkspaceId, started: FleetStarted, at: ClockReading) -> Self {
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
            updated_at: at.wall,
            last_uptime: at.uptime,
        }
    }

    pub fn status(&self) -> FleetStatus {
        match self.finished {
            Some(state) => state,
            None if self.assignments.is_empty() => FleetStatus::Waiting,
            None => FleetStatus::Running,
        }
    }

    /// Assigned runs that have not ended, each with its assignment.
    pub fn open_assigned_runs(&self) -> impl Iterator<Item = (&FleetAssignment, &AssignedRun)> {
        let runs = |assignment: &FleetAssignment| assignment.runs.len();
        self.assignments
            .iter()
            .flat_map(move |assignment| {
                (0..runs(assignment))
                    .filter_map(move |at| assignment.runs.get(at).map(|run| (assignment, run)))
            })
            .filter(|(_, run)| run.ended.is_none())
    }

    /// Assigned runs that have not ended.
    pub fn open_runs(&self) -> impl Iterator<Item = &AssignedRun> {
        self.open_assigned_runs().map(|(_, run)| run)
    }

    /// The runs whose last messages a step needs when this run ends: those that an ask would show to a person.
    pub fn required_texts(&self, run: &RunId) -> BTreeSet<RunId> {
        let Some((assignment, _)) = self.open_assigned_runs().find(|(_, assigned)| assigned.run == *run)
        else {
            return BTreeSet::new();
        };
        let mut required = BTreeSet::new();
        for (route, route_state) in self.spec.routes.iter().zip(&self.routes) {
            let is_triggered = route.when.iter().any(|trigger| trigger.session == assignment.session);
            if is_triggered && route.then == RouteAction::CollectHuman {
                for trigger_state in route_state.triggers.iter().flatten() {
                    if let TriggerState::Ended { runs, .. } = trigger_state {
                        required.extend(runs.iter().cloned());
                    }
                }
                required.extend(assignment.runs.iter().map(|assigned| assigned.run.clone()));
            }
        }
        required.remove(run);
        required
    }
}

impl AssignedRun {
    /// The first attempt of a run.
    pub fn new(run: RunId, subtask: Option<SubtaskRef>) -> Self {
        Self { run, attempt: 0, subtask, ended: None, matches: BTreeSet::new(), subtasks: None }
    }
}
