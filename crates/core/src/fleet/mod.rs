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

mod completion;
mod evolve;
pub mod mentions;
pub mod prompt;
mod router;
mod state;
pub mod subtasks;

use std::collections::BTreeMap;
use std::ops::Deref;

use qd_protocol::event::{Ask, AskAnswer, EventBody, FinishReason, FleetStopReason, FleetUpdated};
use qd_protocol::{AskId, EventNumber, Millis, RunId};

pub use evolve::evolve;
pub use state::{
    AssignedRun, AssignmentOutcome, FleetAssignment, FleetState, FleetStop, RouteState, TriggerState,
};

/// What is true at this moment outside the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetContext {
    /// The time.
    pub now: Millis,
    /// Ids for questions, which cannot be guessed: one for each route that asks a person.
    pub ask_ids: Vec<AskId>,
}

/// Everything that can happen to a fleet.
#[derive(Debug, Clone, PartialEq)]
pub enum FleetInput {
    /// A client wants something.
    Command(FleetCommand),
    /// A run has ended. Said at least once of every run that the fleet started; others are none of its business.
    RunFinished(FinishedRun),
    /// What was to be a run was told to one that its session already had, and so will be none.
    RunAbsorbed(RunId),
    /// A [`deadline`] may have passed.
    Tick,
    /// We have just been rebuilt: see what is owed.
    Wake,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedRun {
    /// The run.
    pub run: RunId,
    /// How.
    pub reason: FinishReason,
    /// Its last message; of one that failed without any, what went wrong.
    pub text: String,
    /// The same of the runs that [`State::wants_texts`] names.
    pub other_texts: BTreeMap<RunId, String>,
}

/// What a client wants.
#[derive(Debug, Clone, PartialEq)]
pub enum FleetCommand {
    /// Stop everything.
    Cancel,
    /// Answer a question.
    Answer {
        /// Which.
        ask: AskId,
        /// How.
        answer: AskAnswer,
    },
}

/// What a step decided.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FleetStep {
    /// To be journalled, in order.
    pub events: Vec<FleetEvent>,
    /// To be done once they are.
    pub effects: Vec<FleetEffect>,
    /// For whoever sent the command.
    pub reply: Option<FleetReply>,
}

/// An event of a fleet, before the journal gives it a seq.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetEvent {
    /// Its place in the fleet.
    pub number: EventNumber,
    /// When it was decided.
    pub ts: Millis,
    /// What happened.
    pub body: EventBody,
}

/// What the shell is to do once the events are journalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetEffect {
    /// Give every open run to its session, if it does not have it, and say how those ended that have.
    DispatchRuns,
    /// Cancel every open run that its session has, and say of the others that they have ended so.
    CancelRuns,
}

/// What became of a command.
#[derive(Debug, Clone, PartialEq)]
pub enum FleetReply {
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
pub fn step(state: &mut FleetState, input: FleetInput, world: FleetContext) -> FleetStep {
    let mut draft = FleetStepBuilder { state, context: world, step: FleetStep::default() };
    match input {
        FleetInput::Command(FleetCommand::Cancel) => draft.handle_cancel(),
        FleetInput::Command(FleetCommand::Answer { ask, answer }) => draft.answer_ask(&ask, answer),
        FleetInput::RunFinished(ended) => draft.handle_run_finished(&ended),
        FleetInput::RunAbsorbed(run) => draft.handle_run_absorbed(&run),
        FleetInput::Tick => draft.handle_tick(),
        FleetInput::Wake => draft.handle_wake(),
    }
    draft.step
}

/// When the machine wants a [`Input::Tick`].
pub fn deadline(state: &FleetState) -> Option<Millis> {
    let limit = state.spec.timeout_s.filter(|_| state.stopping.is_none() && state.finished.is_none())?;
    Some(Millis(state.created_at.0.saturating_add(crate::session::seconds_to_millis(limit))))
}

/// A step in the making: it can look at the state, but change it only by [`Draft::emit`].
struct FleetStepBuilder<'a> {
    state: &'a mut FleetState,
    context: FleetContext,
    step: FleetStep,
}

impl Deref for FleetStepBuilder<'_> {
    type Target = FleetState;
    fn deref(&self) -> &FleetState {
        self.state
    }
}

impl FleetStepBuilder<'_> {
    /// Decides an event and applies it.
    fn emit(&mut self, body: EventBody) {
        let number = EventNumber(self.state.number.0 + 1);
        let event = FleetEvent { number, ts: self.context.now, body };
        evolve(self.state, &event);
        self.step.events.push(event);
    }

    fn emit_update(&mut self, change: impl FnOnce(&mut FleetUpdated)) {
        let mut updated = FleetUpdated::of(self.id.clone());
        change(&mut updated);
        self.emit(EventBody::FleetUpdated(updated));
    }

    fn add_effect(&mut self, effect: FleetEffect) {
        if !self.step.effects.contains(&effect) {
            self.step.effects.push(effect);
        }
    }

    /// What is open is given again, or stopped again; what it comes to was decided before.
    fn handle_wake(&mut self) {
        let effect =
            if self.stopping.is_some() { FleetEffect::CancelRuns } else { FleetEffect::DispatchRuns };
        if !self.assignments.is_empty() {
            self.add_effect(effect);
        }
        self.finish_if_done();
    }

    fn handle_tick(&mut self) {
        if deadline(self).is_some_and(|at| at <= self.context.now) {
            self.stop_fleet(FleetStopReason::Timeout);
        }
    }

    fn handle_cancel(&mut self) {
        let open = self.open_runs().map(|open| open.run.clone()).collect();
        if self.finished.is_none()
            && self.stopping.is_none_or(|stopping| stopping.by != FleetStopReason::Cancel)
        {
            self.stop_fleet(FleetStopReason::Cancel);
        }
        self.step.reply = Some(FleetReply::Cancelled(open));
    }

    /// A latch: nothing is routed any more, what is open is cancelled, and when that has ended so has the fleet.
    fn stop_fleet(&mut self, by: FleetStopReason) {
        self.emit_update(|updated| updated.stops = Some(by));
        self.withdraw_asks();
        if !self.assignments.is_empty() {
            self.add_effect(FleetEffect::CancelRuns);
        }
        self.finish_if_done();
    }
}
