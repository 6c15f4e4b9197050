//! A fleet, as a machine: who is given what when somebody has ended. [`step`] judges an input and answers with a
//! [`Step`]; every change of [`State`] goes through [`evolve`], so replaying the journal gives the same state.
//!
//! What runs is the sessions' business. A fleet only gives them prompts, under run ids that are derived from their
//! cause, and hears of their ends at least once; so after a crash everything that is open is simply given again, and
//! nothing happens twice.
//!
//! - `state`: what a fleet is; `evolve`: how events change it.
//! - `router`: what follows on an end. `settle`: when there is nothing left to follow.
//! - [`prompt`]: what a session is told. [`subtasks`]: how a lead deals out its work. [`mentions`]: who is written to.

mod evolve;
pub mod mentions;
pub mod prompt;
mod router;
mod settle;
mod state;
pub mod subtasks;

use std::collections::BTreeMap;
use std::ops::Deref;

use qd_protocol::event::{Answer, Ask, Body, FinishReason, FleetUpdated, StopReason};
use qd_protocol::{AskId, Millis, Number, RunId};

pub use evolve::evolve;
pub use state::{Errand, Last, Open, RouteState, Slot, State, Stopping};

/// What is true at this moment outside the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// The time.
    pub now: Millis,
    /// Ids for questions, which cannot be guessed: one for each route that asks a person.
    pub asks: Vec<AskId>,
}

/// Everything that can happen to a fleet.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A client wants something.
    Command(Command),
    /// A run has ended. Said at least once of every run that the fleet started; others are none of its business.
    Ended(Ended),
    /// What was to be a run was told to one that its session already had, and so will be none.
    TakenIn(RunId),
    /// A [`deadline`] may have passed.
    Tick,
    /// We have just been rebuilt: see what is owed.
    Wake,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Ended {
    /// The run.
    pub run: RunId,
    /// How.
    pub reason: FinishReason,
    /// Its last message; of one that failed without any, what went wrong.
    pub text: String,
    /// The same of the runs that [`State::wants_texts`] names.
    pub others: BTreeMap<RunId, String>,
}

/// What a client wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Stop everything.
    Cancel,
    /// Answer a question.
    Answer {
        /// Which.
        ask: AskId,
        /// How.
        answer: Answer,
    },
}

/// What a step decided.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// To be journalled, in order.
    pub events: Vec<Recorded>,
    /// To be done once they are.
    pub effects: Vec<Effect>,
    /// For whoever sent the command.
    pub reply: Option<Reply>,
}

/// An event of a fleet, before the journal gives it a seq.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// Its place in the fleet.
    pub number: Number,
    /// When it was decided.
    pub ts: Millis,
    /// What happened.
    pub body: Body,
}

/// What the shell is to do once the events are journalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Give every open run to its session, if it does not have it, and say how those ended that have.
    Give,
    /// Cancel every open run that its session has, and say of the others that they have ended so.
    Stop,
}

/// What became of a command.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// These runs are being stopped.
    Cancelled(Vec<RunId>),
    /// An answer won.
    Answered(Box<Ask>),
    /// No open question has this id.
    AskNotOpen,
    /// The answer does not fit.
    InvalidAnswer(String),
}

/// Judges one input. Each event is applied with [`evolve`] as it is decided; nothing else changes the state.
pub fn step(state: &mut State, input: Input, world: World) -> Step {
    let mut draft = Draft { state, world, step: Step::default() };
    match input {
        Input::Command(Command::Cancel) => draft.cancel(),
        Input::Command(Command::Answer { ask, answer }) => draft.answer(&ask, answer),
        Input::Ended(ended) => draft.ended(&ended),
        Input::TakenIn(run) => draft.taken_in(&run),
        Input::Tick => draft.tick(),
        Input::Wake => draft.wake(),
    }
    draft.step
}

/// When the machine wants a [`Input::Tick`].
pub fn deadline(state: &State) -> Option<Millis> {
    let limit = state.spec.timeout_s.filter(|_| state.stopping.is_none() && state.finished.is_none())?;
    Some(Millis(state.created_at.0.saturating_add(crate::session::milliseconds(limit))))
}

/// A step in the making: it can look at the state, but change it only by [`Draft::emit`].
struct Draft<'a> {
    state: &'a mut State,
    world: World,
    step: Step,
}

impl Deref for Draft<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        self.state
    }
}

impl Draft<'_> {
    /// Decides an event and applies it.
    fn emit(&mut self, body: Body) {
        let number = Number(self.state.number.0 + 1);
        let event = Recorded { number, ts: self.world.now, body };
        evolve(self.state, &event);
        self.step.events.push(event);
    }

    fn update(&mut self, change: impl FnOnce(&mut FleetUpdated)) {
        let mut updated = FleetUpdated::of(self.id.clone());
        change(&mut updated);
        self.emit(Body::FleetUpdated(updated));
    }

    fn effect(&mut self, effect: Effect) {
        if !self.step.effects.contains(&effect) {
            self.step.effects.push(effect);
        }
    }

    /// What is open is given again, or stopped again; what it comes to was decided before.
    fn wake(&mut self) {
        let effect = if self.stopping.is_some() { Effect::Stop } else { Effect::Give };
        if !self.errands.is_empty() {
            self.effect(effect);
        }
        self.settle();
    }

    fn tick(&mut self) {
        if deadline(self).is_some_and(|at| at <= self.world.now) {
            self.stop(StopReason::Timeout);
        }
    }

    fn cancel(&mut self) {
        let open = self.open_runs().map(|open| open.run.clone()).collect();
        if self.finished.is_none() && self.stopping.is_none_or(|stopping| stopping.by != StopReason::Cancel) {
            self.stop(StopReason::Cancel);
        }
        self.step.reply = Some(Reply::Cancelled(open));
    }

    /// A latch: nothing is routed any more, what is open is cancelled, and when that has ended so has the fleet.
    fn stop(&mut self, by: StopReason) {
        self.update(|updated| updated.stops = Some(by));
        self.withdraw_asks();
        if !self.errands.is_empty() {
            self.effect(Effect::Stop);
        }
        self.settle();
    }
}
