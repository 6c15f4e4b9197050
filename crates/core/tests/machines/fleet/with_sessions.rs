//! A fleet and its sessions, both machines at once, in random order: messages between them are delayed, agents end,
//! die and vanish, clients cancel or close, and the daemon dies after any commit, which loses all messages.
//! `QD_SEED=N` repeats a seed.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use qd_core::fleet::{FleetEffect, FleetStep};
use qd_protocol::RunId;
use qd_protocol::event::{EventBody, FinishReason, FleetMembership};
use qd_protocol::fleet::{FleetSpec, FleetStatus};

use crate::fleet::fleet_harness::{FleetHarness, command_input};
use crate::fleet::properties::{check_routes, fleet, text};
use crate::simulation::seeded::runner;
use crate::simulation::{ActionBudget, SimulatedAction, SimulatedSession};

const CASES: u32 = 10_000;
const STEPS: usize = 300;
/// More steps than the simulation can take to come to an end.
const SETTLE_STEPS: usize = 20_000;

/// What may happen to one session.
const TROUBLE: ActionBudget = ActionBudget {
    cancels: 1,
    closes: 1,
    deaths: 1,
    vanishes: 1,
    rests: 1,
    breaks: 1,
    crashes: 1,
    says: 2,
    ..ActionBudget::NOTHING
};

/// A message on its way from the fleet to a session.
#[derive(Debug, Clone, PartialEq, Eq)]
enum FleetMessage {
    Assign(RunId),
    Cancel(RunId),
}

/// What can happen next.
#[derive(Debug, Clone)]
enum CombinedMove {
    /// A session receives its next message.
    Deliver(String),
    /// The fleet receives the end of a run.
    ReportEnd,
    /// Something happens in a session.
    Act(String, SimulatedAction),
    /// A person answers the fleet's question.
    Answer,
    /// A client cancels the fleet.
    Cancel,
    /// The daemon dies after the fleet's next commit.
    Crash,
}

struct FleetWithSessions {
    fleet: FleetHarness,
    sessions: BTreeMap<String, SimulatedSession>,
    messages: BTreeMap<String, VecDeque<FleetMessage>>,
    ends: VecDeque<RunId>,
    cancels: u8,
    crashes: u8,
    dying: bool,
    deaths: usize,
}

impl FleetWithSessions {
    fn start(declared: FleetSpec) -> Self {
        let fleet = FleetHarness::start(declared);
        let member = |name: &String| {
            let fleet = FleetMembership { fleet_id: fleet.state.id.clone(), name: name.clone() };
            (name.clone(), SimulatedSession::in_fleet(TROUBLE, fleet))
        };
        let sessions = fleet.state.sessions.keys().map(member).collect();
        let mut simulation = Self {
            fleet,
            sessions,
            messages: BTreeMap::new(),
            ends: VecDeque::new(),
            cancels: 1,
            crashes: 2,
            dying: false,
            deaths: 0,
        };
        simulation.dispatch_runs();
        simulation
    }

    fn moves(&self) -> Vec<CombinedMove> {
        let mut moves = Vec::new();
        if self.cancels > 0 && !self.fleet.status().is_final() {
            moves.push(CombinedMove::Cancel);
        }
        if self.crashes > 0 && !self.dying {
            moves.push(CombinedMove::Crash);
        }
        for (name, session) in &self.sessions {
            moves.extend(session.actions().into_iter().map(|action| CombinedMove::Act(name.clone(), action)));
        }
        if !self.fleet.state.asks.is_empty() {
            moves.push(CombinedMove::Answer);
        }
        let waiting = self.messages.iter().filter(|(_, messages)| !messages.is_empty());
        moves.extend(waiting.map(|(name, _)| CombinedMove::Deliver(name.clone())));
        if !self.ends.is_empty() {
            moves.push(CombinedMove::ReportEnd);
        }
        moves
    }

    fn perform(&mut self, next: CombinedMove) {
        match next {
            CombinedMove::Cancel => {
                self.cancels -= 1;
                let step = self.fleet.step(command_input(qd_core::fleet::FleetCommand::Cancel));
                self.carry_out(&step);
            }
            CombinedMove::Crash => {
                self.crashes -= 1;
                self.dying = true;
            }
            CombinedMove::Answer => {
                self.fleet.answer("so be it");
            }
            CombinedMove::Act(name, action) => self.act(&name, action),
            CombinedMove::Deliver(name) => self.deliver(&name),
            CombinedMove::ReportEnd => {
                if let Some(run) = self.ends.pop_front() {
                    self.report_end(&run);
                }
            }
        }
    }

    fn session(&mut self, name: &str) -> &mut SimulatedSession {
        self.sessions.get_mut(name).unwrap()
    }

    fn act(&mut self, name: &str, action: SimulatedAction) {
        let session = self.session(name);
        let before = session.restarts();
        session.act(action);
        let died = session.restarts() != before;
        let notified = std::mem::take(&mut session.notified);
        match died {
            true => self.die(Some(name)),
            false => self.ends.extend(notified),
        }
    }

    fn deliver(&mut self, name: &str) {
        let Some(message) = self.messages.get_mut(name).and_then(VecDeque::pop_front) else { return };
        let (FleetMessage::Assign(run) | FleetMessage::Cancel(run)) = message.clone();
        let session = self.session(name);
        if session.ended(&run).is_some() {
            return self.ends.push_back(run);
        }
        let before = session.restarts();
        let refused = match &message {
            FleetMessage::Assign(run) if session.has(run) => None,
            FleetMessage::Assign(run) => (!session.accept(run.clone())).then_some(FinishReason::Error),
            FleetMessage::Cancel(run) if session.has(run) => {
                session.cancel_run(run.clone());
                None
            }
            FleetMessage::Cancel(_) => Some(FinishReason::Cancelled),
        };
        let died = session.restarts() != before;
        let notified = std::mem::take(&mut session.notified);
        match (died, refused) {
            (true, _) => self.die(Some(name)),
            (false, Some(reason)) => {
                let step = self.fleet.end_run(&run, reason, "");
                self.carry_out(&step);
            }
            (false, None) => self.ends.extend(notified),
        }
    }

    /// Reports the end of a run to the fleet, with the result from the session's journal.
    fn report_end(&mut self, run: &RunId) {
        let reason = self.sessions.values().find_map(|session| session.ended(run));
        let text_choice =
            run.as_str().bytes().fold(0_u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte));
        let step = self.fleet.end_run(run, reason.expect("the run has ended"), text(text_choice));
        self.carry_out(&step);
    }

    fn carry_out(&mut self, step: &FleetStep) {
        if self.dying && !step.events.is_empty() {
            return self.die(None);
        }
        for effect in &step.effects {
            match effect {
                FleetEffect::DispatchRuns => self.dispatch_runs(),
                FleetEffect::CancelRuns => {
                    for (name, run) in self.fleet.open_runs() {
                        self.messages.entry(name).or_default().push_back(FleetMessage::Cancel(run));
                    }
                }
            }
        }
    }

    /// Sends every open run to its session. Can be repeated without harm.
    fn dispatch_runs(&mut self) {
        for (name, run) in self.fleet.open_runs() {
            let session = &self.sessions[&name];
            match session.ended(&run) {
                Some(_) => self.ends.push_back(run),
                None if session.has(&run) => {}
                None => {
                    let messages = self.messages.entry(name).or_default();
                    if !messages.contains(&FleetMessage::Assign(run.clone())) {
                        messages.push_back(FleetMessage::Assign(run));
                    }
                }
            }
        }
    }

    /// The daemon dies: everything but the journals is lost, and the next daemon wakes all sessions. `awake` has died
    /// and woken already.
    fn die(&mut self, awake: Option<&str>) {
        self.deaths += 1;
        self.dying = false;
        self.messages.clear();
        self.ends.clear();
        for (name, session) in &mut self.sessions {
            if awake != Some(name.as_str()) {
                session.restart();
            }
            session.notified.clear();
        }
        let step = self.fleet.crash();
        self.carry_out(&step);
    }

    fn is_known(&self, run: &RunId) -> bool {
        self.sessions.values().any(|session| session.has(run))
    }

    /// Takes no more trouble and runs to the end: every run must end and be reported.
    fn run_to_end(&mut self) {
        (self.cancels, self.crashes) = (0, 0);
        for session in self.sessions.values_mut() {
            session.budget = ActionBudget::NOTHING;
        }
        for _ in 0..SETTLE_STEPS {
            match self.moves().pop() {
                Some(next) => self.perform(next),
                None => return self.check(),
            }
        }
        panic!("it does not come to an end: {:?}", self.fleet.state);
    }

    fn check(&self) {
        let FleetHarness { state, events, .. } = &self.fleet;
        assert!(
            self.fleet.status().is_final(),
            "nothing can happen and the fleet has not ended: {:?}",
            self.fleet.open_runs()
        );
        assert!(self.fleet.open_runs().is_empty(), "a run is awaited although its session has finished");
        for session in self.sessions.values() {
            session.check_end();
        }
        let mut announced: BTreeSet<RunId> =
            state.spec.start.iter().map(|name| RunId::of_fleet(&state.id, "start", name, 0, 0)).collect();
        for body in events {
            match body {
                EventBody::FleetRouted(routed) => {
                    announced.extend(routed.to.iter().flat_map(|to| to.runs.clone()))
                }
                EventBody::FleetUpdated(updated) => {
                    announced.extend(updated.ended.iter().filter_map(|ended| ended.retried_as.clone()));
                }
                _ => {}
            }
        }
        let closed = |run: &RunId| events.iter().any(|body| ended_unseen(body, run));
        for run in &announced {
            assert!(self.is_known(run) || closed(run), "{run} was announced and not delivered");
        }
        for session in self.sessions.values() {
            for event in &session.journal {
                if let (EventBody::RunAccepted(_), Some(run)) = (&event.body, &event.run) {
                    assert!(announced.contains(run), "{run} was delivered and not announced");
                }
            }
        }
        check_routes(&self.fleet).unwrap();
    }
}

/// Whether a run ended without ever reaching its session, because the session was closed or the fleet was stopped
/// first.
fn ended_unseen(body: &EventBody, run: &RunId) -> bool {
    let EventBody::FleetUpdated(updated) = body else { return false };
    let reasons = [FinishReason::Error, FinishReason::Cancelled];
    updated.ended.iter().any(|ended| ended.run_id == *run && reasons.contains(&ended.finish_reason))
}

#[test]
fn a_fleet_and_its_sessions_agree_in_any_order() {
    let (seed, mut runner) = runner(CASES);
    // By chance alone, the fleet would be cancelled and killed before any agent has done anything.
    let choices = prop::collection::vec((any::<prop::sample::Index>(), prop::bool::weighted(0.05)), STEPS);
    let (steps, deaths, done) = (Cell::new(0), Cell::new(0), Cell::new(0));
    let result = runner.run(&(fleet(), choices), |(declared, choices)| {
        let mut simulation = FleetWithSessions::start(declared);
        for (choice, trouble) in choices {
            let mut moves = simulation.moves();
            let harmless = |next: &CombinedMove| match next {
                CombinedMove::Cancel | CombinedMove::Crash => false,
                CombinedMove::Act(_, action) => matches!(
                    action,
                    SimulatedAction::Agent(_) | SimulatedAction::Mend | SimulatedAction::Tick
                ),
                _ => true,
            };
            if !trouble && moves.iter().any(harmless) {
                moves.retain(harmless);
            }
            if moves.is_empty() {
                break;
            }
            simulation.perform(choice.get(&moves).clone());
            steps.set(steps.get() + 1);
        }
        simulation.run_to_end();
        deaths.set(deaths.get() + simulation.deaths);
        done.set(done.get() + usize::from(simulation.fleet.status() == FleetStatus::Done));
        Ok(())
    });
    let (steps, deaths, done) = (steps.get(), deaths.get(), done.get());
    println!("{CASES} fleets, {steps} steps, {deaths} deaths of the daemon, {done} done; QD_SEED={seed}");
    if let Err(error) = result {
        panic!("QD_SEED={seed}: {error}");
    }
    assert!(deaths > CASES as usize / 4 && done > CASES as usize / 10, "the test tried too little");
}
