//! What a fleet is, as far as the journal says. Only [`evolve`](super::evolve) changes it.

use std::collections::{BTreeMap, BTreeSet};

use qd_protocol::event::{Ask, FleetStarted, Source, StopReason, Subtask};
use qd_protocol::fleet::{Action, Ending, FleetState, Spec};
use qd_protocol::{AskId, FleetId, Millis, Number, RunId, SessionId, WorkspaceId};
use serde::{Deserialize, Serialize};

/// Several sessions that work together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The fleet.
    pub id: FleetId,
    /// Its project.
    pub workspace: WorkspaceId,
    /// How many events it has.
    pub number: Number,
    /// As it was declared, with the task that it was given.
    pub spec: Spec,
    /// Its sessions, by name.
    pub sessions: BTreeMap<String, SessionId>,
    /// What sessions were given and have not ended, in the order in which it was given.
    pub errands: Vec<Errand>,
    /// What became of the last one of each session that had any.
    pub last: BTreeMap<String, Last>,
    /// One for each route.
    pub routes: Vec<RouteState>,
    /// How many messages were sent because somebody was mentioned.
    #[serde(default)]
    pub mentions: u32,
    /// Questions that nobody has answered.
    pub asks: BTreeMap<AskId, Ask>,
    /// Why routes could not be followed.
    pub problems: Vec<String>,
    /// What came of it so far.
    pub result: Option<String>,
    /// A stop that was asked for: a latch.
    pub stopping: Option<Stopping>,
    /// How it has ended.
    pub finished: Option<FleetState>,
    /// Since when it exists.
    pub created_at: Millis,
    /// Its last event.
    pub updated_at: Millis,
}

/// What a session was given at once: one run, or one for each of its subtasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errand {
    /// Whose.
    pub session: String,
    /// By which route; `None`: it is one that begins.
    pub route: Option<u32>,
    /// How often that had fired.
    pub round: u32,
    /// Whose last messages it was given.
    pub from: Vec<Source>,
    /// Its runs, in order.
    pub runs: Vec<Open>,
    /// Whether it is given as mail, since somebody mentioned the session.
    #[serde(default)]
    pub mention: bool,
}

/// One run of an errand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// The run, in its last attempt.
    pub run: RunId,
    /// How often it was tried before.
    pub attempt: u32,
    /// The subtask that it is for.
    pub subtask: Option<Subtask>,
    /// How it ended.
    pub ended: Option<Ending>,
    /// The routes whose pattern its last message matches.
    pub matches: BTreeSet<u32>,
    /// How many subtasks are in its last message, or why that cannot be said.
    pub subtasks: Option<Result<u32, String>>,
}

/// How the last errand of a session ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Last {
    /// Its runs.
    pub runs: Vec<RunId>,
    /// How.
    pub ending: Ending,
    /// Whether a route has followed on it.
    pub routed: bool,
}

/// What a route has seen since it was last considered.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RouteState {
    /// How often it has fired.
    pub fired: u32,
    /// For each of its triggers.
    pub slots: Vec<Option<Slot>>,
}

/// A trigger that need not be waited for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Slot {
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
pub struct Stopping {
    /// Why.
    pub by: StopReason,
    /// When.
    pub at: Millis,
}

impl RouteState {
    /// Whether everything it waits for has happened, and something has.
    pub fn is_full(&self) -> bool {
        self.slots.iter().all(Option::is_some)
            && self.slots.iter().flatten().any(|slot| matches!(slot, Slot::Ended { .. }))
    }
}

impl State {
    /// A fleet that has just been started. The event is its first.
    pub fn new(workspace: WorkspaceId, started: FleetStarted, at: Millis) -> Self {
        let FleetStarted { fleet_id, spec, sessions } = started;
        let routes = spec.routes.iter();
        let routes = routes.map(|route| RouteState { fired: 0, slots: vec![None; route.when.len()] });
        let begin = |name: &String| Errand {
            session: name.clone(),
            route: None,
            round: 0,
            from: Vec::new(),
            runs: vec![Open::new(RunId::of_fleet(&fleet_id, "start", name, 0, 0), None)],
            mention: false,
        };
        Self {
            errands: spec.start.iter().map(begin).collect(),
            routes: routes.collect(),
            id: fleet_id,
            workspace,
            number: Number(1),
            spec,
            sessions,
            last: BTreeMap::new(),
            mentions: 0,
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
    pub fn state(&self) -> FleetState {
        match self.finished {
            Some(state) => state,
            None if self.errands.is_empty() => FleetState::Waiting,
            None => FleetState::Running,
        }
    }

    /// Runs that the fleet has given and that have not ended, each with its errand.
    pub fn open(&self) -> impl Iterator<Item = (&Errand, &Open)> {
        let runs = |errand: &Errand| errand.runs.len();
        self.errands
            .iter()
            .flat_map(move |errand| {
                (0..runs(errand)).filter_map(move |at| errand.runs.get(at).map(|open| (errand, open)))
            })
            .filter(|(_, open)| open.ended.is_none())
    }

    /// The same without their errands.
    pub fn open_runs(&self) -> impl Iterator<Item = &Open> {
        self.open().map(|(_, open)| open)
    }

    /// Which last messages the next step has to have at hand if this run ends: those that a person would be shown with
    /// it.
    pub fn wants_texts(&self, run: &RunId) -> BTreeSet<RunId> {
        let Some((errand, _)) = self.open().find(|(_, open)| open.run == *run) else {
            return BTreeSet::new();
        };
        let mut wanted = BTreeSet::new();
        for (route, seen) in self.spec.routes.iter().zip(&self.routes) {
            let concerns = route.when.iter().any(|trigger| trigger.session == errand.session);
            if concerns && route.then == Action::CollectHuman {
                for slot in seen.slots.iter().flatten() {
                    if let Slot::Ended { runs, .. } = slot {
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

impl Open {
    /// One that has not been tried before.
    pub fn new(run: RunId, subtask: Option<Subtask>) -> Self {
        Self { run, attempt: 0, subtask, ended: None, matches: BTreeSet::new(), subtasks: None }
    }
}
