//! A fleet without sessions: the tests decide how runs end, and see which runs are assigned.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use qd_core::fleet::{
    FinishedRun, FleetCommand, FleetContext, FleetInput, FleetReply, FleetState, FleetStep, evolve, prompt,
    step,
};
use qd_protocol::event::{AskAnswer, EventActor, EventBody, FinishReason, FleetStarted};
use qd_protocol::fleet::{FanOutSplit, FleetMember, FleetRoute, FleetSpec, FleetStatus, RouteAction};
use qd_protocol::{AskId, ClockReading, FleetId, MachineUptime, Millis, RunId, SessionId, WorkspaceId};

/// What the clocks of a machine show that was started at the beginning of the epoch.
pub(crate) fn clocks_at(ms: u64) -> ClockReading {
    let uptime = i64::try_from(ms).unwrap();
    ClockReading {
        wall: Millis(ms),
        uptime: Some(MachineUptime { boot: 1, awake_ms: uptime, total_ms: uptime }),
    }
}

/// The input for a command that this user sends.
pub(crate) fn command_input(command: FleetCommand) -> FleetInput {
    FleetInput::Command { actor: Arc::new(EventActor::User { uid: 1000, pid: None, command: None }), command }
}

pub(crate) struct FleetHarness {
    pub(crate) state: FleetState,
    /// Everything that was journalled after its first event.
    pub(crate) events: Vec<EventBody>,
    /// Last messages, as in the sessions' journals.
    pub(crate) texts: BTreeMap<RunId, String>,
    /// Every run that was ever assigned.
    pub(crate) assigned: BTreeSet<RunId>,
    start: FleetState,
    asks: u32,
    now: u64,
}

/// Routes as a fleet file would declare them, one line each: `lead.done -> a`, `lead.done => a, b` (broadcast),
/// `lead.done / a, b` (by subtask), `a.done + b.done -> c`, `c.done ~ pattern -> a max 2`, `c.done ?` (asks a
/// person).
pub(crate) fn spec(sessions: &[&str], start: &[&str], routes: &[&str]) -> FleetSpec {
    FleetSpec {
        task: "the task".to_owned(),
        sessions: sessions.iter().map(|name| ((*name).to_owned(), FleetMember::default())).collect(),
        start: start.iter().map(|name| (*name).to_owned()).collect(),
        routes: routes.iter().map(|line| route(line)).collect(),
        ..FleetSpec::default()
    }
}

fn route(line: &str) -> FleetRoute {
    let names = |list: &str| list.split(',').map(|name| name.trim().to_owned()).collect::<Vec<_>>();
    let (line, max) = match line.split_once(" max ") {
        Some((line, max)) => (line, Some(max.parse().unwrap())),
        None => (line, None),
    };
    let (when, then) = if let Some((when, to)) = line.split_once(" -> ") {
        (when, RouteAction::RouteTo(to.trim().to_owned()))
    } else if let Some((when, to)) = line.split_once(" => ") {
        (when, RouteAction::FanOut { to: names(to), split: FanOutSplit::Broadcast })
    } else if let Some((when, to)) = line.split_once(" / ") {
        (when, RouteAction::FanOut { to: names(to), split: FanOutSplit::BySubtask })
    } else {
        (line.trim_end_matches(" ?"), RouteAction::CollectHuman)
    };
    let (when, pattern) = match when.split_once(" ~ ") {
        Some((when, pattern)) => (when, Some(pattern.to_owned())),
        None => (when, None),
    };
    let when = when.split(" + ").map(|trigger| trigger.trim().parse().unwrap()).collect();
    FleetRoute { when, pattern, then, max, prompt: None }
}

impl FleetHarness {
    pub(crate) fn start(spec: FleetSpec) -> Self {
        let fleet_id = FleetId::parse("flt_test").unwrap();
        let session = |name: &String| (name.clone(), SessionId::parse(&format!("ses_{name}")).unwrap());
        let sessions = spec.sessions.keys().map(session).collect();
        let workspace = WorkspaceId::parse("ws_test").unwrap();
        let state = FleetState::new(workspace, FleetStarted { fleet_id, spec, sessions }, clocks_at(0));
        let mut fleet = Self {
            start: state.clone(),
            state,
            events: Vec::new(),
            texts: BTreeMap::new(),
            assigned: BTreeSet::new(),
            asks: 0,
            now: 0,
        };
        fleet.record_assigned();
        fleet
    }

    fn record_assigned(&mut self) {
        let open: Vec<RunId> = self.state.open_runs().map(|open| open.run.clone()).collect();
        self.assigned.extend(open);
    }

    pub(crate) fn at(&mut self, now: u64) -> &mut Self {
        self.now = now;
        self
    }

    pub(crate) fn step(&mut self, input: FleetInput) -> FleetStep {
        let before = self.state.clone();
        let asks = (0..4).map(|n| AskId::parse(&format!("ask_{}_{n}", self.asks)).unwrap()).collect();
        self.asks += 1;
        let decided = step(&mut self.state, input, FleetContext { now: clocks_at(self.now), ask_ids: asks });
        let mut replayed = before;
        for event in &decided.events {
            evolve(&mut replayed, event);
            self.events.push(event.body.clone());
        }
        assert_eq!(replayed, self.state, "replaying the events gives the same state");
        self.record_assigned();
        decided
    }

    /// The daemon dies: the state is rebuilt from the journal.
    pub(crate) fn crash(&mut self) -> FleetStep {
        let mut state = self.start.clone();
        let now = clocks_at(self.now);
        for (number, body) in (2..).zip(&self.events) {
            let event = qd_core::fleet::FleetEvent {
                number: qd_protocol::EventNumber(number),
                ts: now,
                actor: None,
                body: body.clone(),
            };
            evolve(&mut state, &event);
        }
        state.updated_at = self.state.updated_at;
        let same = FleetState { stopping: self.state.stopping, last_uptime: self.state.last_uptime, ..state };
        assert_eq!(same, self.state, "a fleet read from the journal is the same fleet");
        self.step(FleetInput::Wake)
    }

    /// The open runs, with their sessions.
    pub(crate) fn open_runs(&self) -> Vec<(String, RunId)> {
        self.state
            .open_assigned_runs()
            .map(|(assignment, open)| (assignment.session.clone(), open.run.clone()))
            .collect()
    }

    /// The sessions with open runs, in the order of assignment.
    pub(crate) fn busy_sessions(&self) -> Vec<String> {
        self.open_runs().into_iter().map(|(name, _)| name).collect()
    }

    /// The prompt of this session's first open run.
    pub(crate) fn prompt_of(&self, name: &str) -> String {
        let (assignment, open) =
            self.state.open_assigned_runs().find(|(assignment, _)| assignment.session == name).unwrap();
        let texts = assignment
            .from
            .iter()
            .map(|source| {
                let texts = source.runs.iter().map(|run| self.texts[run].as_str());
                (source.session.clone(), prompt::join_texts(texts))
            })
            .collect();
        let subtask = open.subtask.as_ref().map(|subtask| {
            let entries = qd_core::fleet::subtasks::parse_subtasks(&self.texts[&subtask.run]).unwrap();
            entries[subtask.entry as usize].clone()
        });
        prompt::compose_prompt(&self.state, assignment, &texts, subtask.as_deref())
    }

    /// Ends the first open run of this session.
    pub(crate) fn end(&mut self, name: &str, reason: FinishReason, text: &str) -> FleetStep {
        let run = self.open_runs().into_iter().find(|(session, _)| session == name).unwrap().1;
        self.end_run(&run, reason, text)
    }

    pub(crate) fn end_run(&mut self, run: &RunId, reason: FinishReason, text: &str) -> FleetStep {
        self.texts.insert(run.clone(), text.to_owned());
        let others = self.state.required_texts(run);
        let others =
            others.into_iter().filter_map(|run| self.texts.get(&run).map(|text| (run.clone(), text.clone())));
        let ended =
            FinishedRun { run: run.clone(), reason, text: text.to_owned(), other_texts: others.collect() };
        self.step(FleetInput::RunFinished(ended))
    }

    pub(crate) fn done(&mut self, name: &str) -> &mut Self {
        self.end(name, FinishReason::EndTurn, &format!("{name} says"));
        self
    }

    pub(crate) fn done_with(&mut self, name: &str, text: &str) -> &mut Self {
        self.end(name, FinishReason::EndTurn, text);
        self
    }

    pub(crate) fn fails(&mut self, name: &str) -> &mut Self {
        self.end(name, FinishReason::Error, "it broke");
        self
    }

    pub(crate) fn cancelled(&mut self, name: &str) -> &mut Self {
        self.end(name, FinishReason::Cancelled, "");
        self
    }

    pub(crate) fn cancel(&mut self) -> Vec<RunId> {
        match self.step(command_input(FleetCommand::Cancel)).reply {
            Some(FleetReply::Cancelled(hit)) => hit,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn answer(&mut self, value: &str) -> Option<FleetReply> {
        let ask = self.state.asks.keys().next().unwrap().clone();
        let answer = AskAnswer { decision: None, value: Some(value.to_owned()), reason: None };
        self.step(command_input(FleetCommand::Answer { ask, answer, shown_sha256: None })).reply
    }

    pub(crate) fn status(&self) -> FleetStatus {
        self.state.status()
    }
}
