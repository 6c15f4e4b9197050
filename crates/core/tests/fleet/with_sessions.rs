//! A fleet and its sessions, both machines at once, in an order that nobody chose: letters between them that take their
//! time, agents that end, die and vanish, clients who cancel or close, and a daemon that dies after whatever it commits,
//! which loses every letter. `QD_SEED=N` runs a seed again.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use qd_core::fleet::{FleetEffect, FleetStep};
use qd_protocol::RunId;
use qd_protocol::event::{EventBody, FinishReason, FleetMembership};
use qd_protocol::fleet::{FleetSpec, FleetStatus};

use crate::fleet_harness::FleetHarness;
use crate::properties::{check_routes, fleet, text};
use crate::simulation::seeded::runner;
use crate::simulation::{ActionBudget, SimulatedAction, SimulatedSession};

const CASES: u32 = 10_000;
const STEPS: usize = 300;
/// More steps than it can take to come to rest.
const REST: usize = 20_000;

/// What may befall one session.
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

/// On the way from the fleet to a session.
#[derive(Debug, Clone, PartialEq, Eq)]
enum FleetLetter {
    Give(RunId),
    Stop(RunId),
}

/// What can happen next.
#[derive(Debug, Clone)]
enum CombinedMove {
    /// A session gets its next letter.
    Deliver(String),
    /// The fleet hears of an end.
    Tell,
    /// Something happens in a session.
    Act(String, SimulatedAction),
    /// Somebody answers the fleet's question.
    Answer,
    /// Somebody cancels the fleet.
    Cancel,
    /// The daemon dies after what the fleet commits next.
    Crash,
}

struct FleetWithSessions {
    crew: FleetHarness,
    sessions: BTreeMap<String, SimulatedSession>,
    letters: BTreeMap<String, VecDeque<FleetLetter>>,
    ends: VecDeque<RunId>,
    cancels: u8,
    crashes: u8,
    dying: bool,
    deaths: usize,
}

impl FleetWithSessions {
    fn start(declared: FleetSpec) -> Self {
        let crew = FleetHarness::start(declared);
        let member = |name: &String| {
            let fleet = FleetMembership { fleet_id: crew.state.id.clone(), name: name.clone() };
            (name.clone(), SimulatedSession::in_fleet(TROUBLE, fleet))
        };
        let sessions = crew.state.sessions.keys().map(member).collect();
        let mut team = Self {
            crew,
            sessions,
            letters: BTreeMap::new(),
            ends: VecDeque::new(),
            cancels: 1,
            crashes: 2,
            dying: false,
            deaths: 0,
        };
        team.give();
        team
    }

    fn moves(&self) -> Vec<CombinedMove> {
        let mut moves = Vec::new();
        if self.cancels > 0 && !self.crew.stands().is_final() {
            moves.push(CombinedMove::Cancel);
        }
        if self.crashes > 0 && !self.dying {
            moves.push(CombinedMove::Crash);
        }
        for (name, session) in &self.sessions {
            moves.extend(session.actions().into_iter().map(|action| CombinedMove::Act(name.clone(), action)));
        }
        if !self.crew.state.asks.is_empty() {
            moves.push(CombinedMove::Answer);
        }
        let waiting = self.letters.iter().filter(|(_, letters)| !letters.is_empty());
        moves.extend(waiting.map(|(name, _)| CombinedMove::Deliver(name.clone())));
        if !self.ends.is_empty() {
            moves.push(CombinedMove::Tell);
        }
        moves
    }

    fn make(&mut self, next: CombinedMove) {
        match next {
            CombinedMove::Cancel => {
                self.cancels -= 1;
                let step =
                    self.crew.step(qd_core::fleet::FleetInput::Command(qd_core::fleet::FleetCommand::Cancel));
                self.carry_out(&step);
            }
            CombinedMove::Crash => {
                self.crashes -= 1;
                self.dying = true;
            }
            CombinedMove::Answer => {
                self.crew.answer("so be it");
            }
            CombinedMove::Act(name, action) => self.act(&name, action),
            CombinedMove::Deliver(name) => self.deliver(&name),
            CombinedMove::Tell => {
                if let Some(run) = self.ends.pop_front() {
                    self.hear(&run);
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
        let told = std::mem::take(&mut session.told);
        match died {
            true => self.die(Some(name)),
            false => self.ends.extend(told),
        }
    }

    fn deliver(&mut self, name: &str) {
        let Some(letter) = self.letters.get_mut(name).and_then(VecDeque::pop_front) else { return };
        let (FleetLetter::Give(run) | FleetLetter::Stop(run)) = letter.clone();
        let session = self.session(name);
        if session.ended(&run).is_some() {
            return self.ends.push_back(run);
        }
        let before = session.restarts();
        let refused = match &letter {
            FleetLetter::Give(run) if session.has(run) => None,
            FleetLetter::Give(run) => (!session.accept(run.clone())).then_some(FinishReason::Error),
            FleetLetter::Stop(run) if session.has(run) => {
                session.cancel_run(run.clone());
                None
            }
            FleetLetter::Stop(_) => Some(FinishReason::Cancelled),
        };
        let died = session.restarts() != before;
        let told = std::mem::take(&mut session.told);
        match (died, refused) {
            (true, _) => self.die(Some(name)),
            (false, Some(reason)) => {
                let step = self.crew.end_run(&run, reason, "");
                self.carry_out(&step);
            }
            (false, None) => self.ends.extend(told),
        }
    }

    /// What it came to is in the session's journal.
    fn hear(&mut self, run: &RunId) {
        let reason = self.sessions.values().find_map(|session| session.ended(run));
        let said = run.as_str().bytes().fold(0_u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte));
        let step = self.crew.end_run(run, reason.expect("it was told of"), text(said));
        self.carry_out(&step);
    }

    fn carry_out(&mut self, step: &FleetStep) {
        if self.dying && !step.events.is_empty() {
            return self.die(None);
        }
        for effect in &step.effects {
            match effect {
                FleetEffect::DispatchRuns => self.give(),
                FleetEffect::CancelRuns => {
                    for (name, run) in self.crew.open() {
                        self.letters.entry(name).or_default().push_back(FleetLetter::Stop(run));
                    }
                }
            }
        }
    }

    /// Looks after everything that is open, as often as it likes.
    fn give(&mut self) {
        for (name, run) in self.crew.open() {
            let session = &self.sessions[&name];
            match session.ended(&run) {
                Some(_) => self.ends.push_back(run),
                None if session.has(&run) => {}
                None => {
                    let letters = self.letters.entry(name).or_default();
                    if !letters.contains(&FleetLetter::Give(run.clone())) {
                        letters.push_back(FleetLetter::Give(run));
                    }
                }
            }
        }
    }

    /// The daemon dies; all but the journals is lost, and the next one wakes everybody. One session may have died and
    /// woken already.
    fn die(&mut self, awake: Option<&str>) {
        self.deaths += 1;
        self.dying = false;
        self.letters.clear();
        self.ends.clear();
        for (name, session) in &mut self.sessions {
            if awake != Some(name.as_str()) {
                session.restart();
            }
            session.told.clear();
        }
        let step = self.crew.crash();
        self.carry_out(&step);
    }

    fn is_known(&self, run: &RunId) -> bool {
        self.sessions.values().any(|session| session.has(run))
    }

    /// Nobody does anything any more: everything must end, and be told.
    fn rest(&mut self) {
        (self.cancels, self.crashes) = (0, 0);
        for session in self.sessions.values_mut() {
            session.left = ActionBudget::NOTHING;
        }
        for _ in 0..REST {
            match self.moves().pop() {
                Some(next) => self.make(next),
                None => return self.check(),
            }
        }
        panic!("it does not come to rest: {:?}", self.crew.state);
    }

    fn check(&self) {
        let FleetHarness { state, events, .. } = &self.crew;
        assert!(
            self.crew.stands().is_final(),
            "nobody can do anything and it goes on: {:?}",
            self.crew.open()
        );
        assert!(self.crew.open().is_empty(), "a session has finished and is awaited");
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
        check_routes(&self.crew).unwrap();
    }
}

/// Whether a run ended without its session ever having had it: because that was closed, or the fleet was stopped first.
fn ended_unseen(body: &EventBody, run: &RunId) -> bool {
    let EventBody::FleetUpdated(updated) = body else { return false };
    let reasons = [FinishReason::Error, FinishReason::Cancelled];
    updated.ended.iter().any(|ended| ended.run_id == *run && reasons.contains(&ended.finish_reason))
}

#[test]
fn a_fleet_and_its_sessions_agree_in_any_order() {
    let (seed, mut runner) = runner(CASES);
    // Left to chance alone, it would be cancelled and killed before anybody has said a word.
    let choices = prop::collection::vec((any::<prop::sample::Index>(), prop::bool::weighted(0.05)), STEPS);
    let (steps, deaths, done) = (Cell::new(0), Cell::new(0), Cell::new(0));
    let result = runner.run(&(fleet(), choices), |(declared, choices)| {
        let mut team = FleetWithSessions::start(declared);
        for (choice, trouble) in choices {
            let mut moves = team.moves();
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
            team.make(choice.get(&moves).clone());
            steps.set(steps.get() + 1);
        }
        team.rest();
        deaths.set(deaths.get() + team.deaths);
        done.set(done.get() + usize::from(team.crew.stands() == FleetStatus::Done));
        Ok(())
    });
    let (steps, deaths, done) = (steps.get(), deaths.get(), done.get());
    println!("{CASES} fleets, {steps} steps, {deaths} deaths of the daemon, {done} done; QD_SEED={seed}");
    if let Err(error) = result {
        panic!("QD_SEED={seed}: {error}");
    }
    assert!(deaths > CASES as usize / 4 && done > CASES as usize / 10, "the test tried too little");
}
