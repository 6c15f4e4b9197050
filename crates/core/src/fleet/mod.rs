//! The state machine of a fleet: which session gets which prompt when a run ends. [`step`] handles an input and
//! returns a [`FleetStep`]. Every change of [`FleetState`] goes through [`evolve()`], so replaying the journal gives
//! the same state.
//!
//! Runs belong to the sessions. A fleet only assigns prompts to sessions, under run ids that are derived from their
//! cause, and is told at least once how each run ended. After a crash it simply assigns everything that is open
//! again, and nothing happens twice.
//!
//! - `state`: the state of a fleet; `evolve`: how events change it.
//! - `router`: which routes fire when a run ends; `completion`: questions to people, and when the fleet is done.
//! - [`prompt`]: the prompts that sessions get; [`subtasks`]: how a lead splits its work; [`mentions`]: messages that
//!   address a session by name.
//!
//! Design: docs/design/fleets-assign-at-least-once.md

mod completion;
mod evolve;
pub mod mentions;
pub mod prompt;
mod router;
mod state;
pub mod subtasks;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use qd_protocol::event::{
    Ask, AskAnswer, EventActor, EventBody, FinishReason, FleetStopReason, FleetUpdated,
};
use qd_protocol::{AskId, ClockReading, EventNumber, RunId};

pub use evolve::evolve;
pub use state::{
    AssignedRun, AssignmentOutcome, FleetAssignment, FleetState, FleetStop, RouteState, TriggerState,
};

use crate::event_actor::actor_of_event;

/// Current facts that are not in the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetContext {
    pub now: ClockReading,
    /// Unguessable ids for new asks: one for each route that asks a person.
    pub ask_ids: Vec<AskId>,
}

/// Every input of the fleet machine.
#[derive(Debug, Clone, PartialEq)]
pub enum FleetInput {
    /// A request from a client. Every event that is decided while it is handled carries its actor.
    Command { actor: Arc<EventActor>, command: FleetCommand },
    /// A run has ended. Delivered at least once for every run that the fleet assigned; other runs are ignored.
    RunFinished(FinishedRun),
    /// The prompt of this run was delivered as a steer to another run, so this run will never exist.
    RunDeliveredAsSteer(RunId),
    /// A [`deadline`] may have passed.
    Tick,
    /// The state was just rebuilt from the journal: repeat the effects for open runs.
    Wake,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedRun {
    pub run: RunId,
    pub reason: FinishReason,
    /// Its last message, or the error message if it failed without one.
    pub text: String,
    /// The last messages of the runs in [`FleetState::required_texts`].
    pub other_texts: BTreeMap<RunId, String>,
}

/// A request from a client.
#[derive(Debug, Clone, PartialEq)]
pub enum FleetCommand {
    /// Stop the whole fleet.
    Cancel,
    Answer {
        ask: AskId,
        answer: AskAnswer,
        /// The digest of the input that the answer was given to, if the client says so.
        shown_sha256: Option<String>,
    },
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FleetStep {
    /// Events to append to the journal, in order.
    pub events: Vec<FleetEvent>,
    /// Effects to carry out once the events are journalled.
    pub effects: Vec<FleetEffect>,
    /// The reply to the command, if the input was one.
    pub reply: Option<FleetReply>,
}

/// An event of a fleet, before the journal gives it a seq.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetEvent {
    /// Position in the fleet's own sequence of events, from 1.
    pub number: EventNumber,
    /// When the step decided it.
    pub ts: ClockReading,
    /// Who caused it, if it was not the end of a run.
    pub actor: Option<Arc<EventActor>>,
    pub body: EventBody,
}

/// An action that the shell carries out once the events are journalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetEffect {
    /// Give every open run to its session unless the session already has it, and report the runs that have ended.
    DispatchRuns,
    /// Cancel every open run that its session has. Report all other open runs as cancelled.
    CancelRuns,
}

/// The reply to a command.
#[derive(Debug, Clone, PartialEq)]
pub enum FleetReply {
    /// These runs are being cancelled.
    Cancelled(Vec<RunId>),
    /// The answer was accepted; the ask is now resolved.
    Answered(Box<Ask>),
    /// No open ask has this id.
    AskNotOpen,
    /// The answer was given to another input than that of the ask. The ask stays open.
    AskChanged,
    /// The answer is not valid for this ask; the text says why.
    InvalidAnswer(String),
}

/// Handles one input. Each event is applied with [`evolve()`] as it is decided; nothing else changes the state.
pub fn step(state: &mut FleetState, input: FleetInput, context: FleetContext) -> FleetStep {
    let mut builder = FleetStepBuilder { state, context, actor: None, step: FleetStep::default() };
    match input {
        FleetInput::Command { actor, command } => {
            builder.actor = Some(actor);
            builder.handle_command(command);
        }
        FleetInput::RunFinished(finished) => builder.handle_run_finished(&finished),
        FleetInput::RunDeliveredAsSteer(run) => builder.handle_run_delivered_as_steer(&run),
        FleetInput::Tick => builder.handle_tick(),
        FleetInput::Wake => builder.handle_wake(),
    }
    builder.step
}

/// In how many milliseconds the machine needs a [`FleetInput::Tick`], if nothing else happens before.
pub fn deadline(state: &FleetState, now: ClockReading) -> Option<u64> {
    let limit = state.spec.timeout_s.filter(|_| state.stopping.is_none() && state.finished.is_none())?;
    Some(crate::session::seconds_to_millis(limit).saturating_sub(now.elapsed_since(state.created_at)))
}

/// Builds one step. It can read the state, but changes it only through [`FleetStepBuilder::emit`].
struct FleetStepBuilder<'a> {
    state: &'a mut FleetState,
    context: FleetContext,
    /// Who sent the command being handled.
    actor: Option<Arc<EventActor>>,
    step: FleetStep,
}

impl Deref for FleetStepBuilder<'_> {
    type Target = FleetState;
    fn deref(&self) -> &FleetState {
        self.state
    }
}

impl FleetStepBuilder<'_> {
    /// Adds an event to the step and applies it.
    fn emit(&mut self, body: EventBody) {
        let number = EventNumber(self.state.number.0 + 1);
        let actor = actor_of_event(&body, self.actor.as_ref());
        let event = FleetEvent { number, ts: self.context.now, actor, body };
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

    /// Assigns or cancels the open runs again. Both can be repeated without harm.
    fn handle_wake(&mut self) {
        let effect =
            if self.stopping.is_some() { FleetEffect::CancelRuns } else { FleetEffect::DispatchRuns };
        if !self.assignments.is_empty() {
            self.add_effect(effect);
        }
        self.finish_if_done();
    }

    fn handle_tick(&mut self) {
        if deadline(self, self.context.now) == Some(0) {
            self.stop_fleet(FleetStopReason::Timeout);
        }
    }

    fn handle_command(&mut self, command: FleetCommand) {
        match command {
            FleetCommand::Cancel => self.handle_cancel(),
            FleetCommand::Answer { ask, answer, shown_sha256 } => {
                self.answer_ask(&ask, answer, shown_sha256.as_deref())
            }
        }
    }

    fn handle_cancel(&mut self) {
        let open = self.open_runs().map(|assigned| assigned.run.clone()).collect();
        if self.finished.is_none()
            && self.stopping.is_none_or(|stopping| stopping.by != FleetStopReason::Cancel)
        {
            self.stop_fleet(FleetStopReason::Cancel);
        }
        self.step.reply = Some(FleetReply::Cancelled(open));
    }

    /// Stops the fleet. This is a latch: no route fires any more, open runs are cancelled, and the fleet ends with
    /// the last of them.
    fn stop_fleet(&mut self, by: FleetStopReason) {
        self.emit_update(|updated| updated.stops = Some(by));
        self.withdraw_asks();
        if !self.assignments.is_empty() {
            self.add_effect(FleetEffect::CancelRuns);
        }
        self.finish_if_done();
    }
}
