//! Builds one [`SessionStep`]. The builder can read the state, but changes it only through
//! [`SessionStepBuilder::emit`]: the mutable borrow is private to this file, so no rule can bypass `evolve`.

use std::ops::Deref;
use std::sync::Arc;

use qd_protocol::event::{EventActor, EventBody};
use qd_protocol::link::UpdateNumber;
use qd_protocol::{EventNumber, RunId};

use super::evolve::records_uptime;
use super::{
    CommandRefusal, CommandReply, OversizedText, SessionContext, SessionEffect, SessionEvent, SessionState,
    SessionStep,
};
use crate::event_actor::actor_of_event;
use crate::rows::{self, apply_event};

pub(super) struct SessionStepBuilder<'a> {
    state: &'a mut SessionState,
    pub(super) context: SessionContext,
    /// The number of the agent update being handled, until the first event takes it.
    update_number: Option<UpdateNumber>,
    /// Who sent the command being handled.
    actor: Option<Arc<EventActor>>,
    step: SessionStep,
}

impl Deref for SessionStepBuilder<'_> {
    type Target = SessionState;
    fn deref(&self) -> &SessionState {
        self.state
    }
}

impl<'a> SessionStepBuilder<'a> {
    pub(super) fn new(state: &'a mut SessionState, context: SessionContext) -> Self {
        Self { state, context, update_number: None, actor: None, step: SessionStep::default() }
    }

    pub(super) fn set_update_number(&mut self, number: UpdateNumber) {
        self.update_number = Some(number);
    }

    pub(super) fn set_actor(&mut self, actor: Arc<EventActor>) {
        self.actor = Some(actor);
    }

    /// Adds an event to the step, applies it and returns its number.
    pub(super) fn emit(&mut self, run: Option<RunId>, body: EventBody) -> EventNumber {
        let number = EventNumber(self.state.number.0 + 1);
        let now = self.context.now;
        let ts = if records_uptime(&body) { now } else { now.wall.into() };
        let actor = actor_of_event(&body, self.actor.as_ref());
        let event = SessionEvent { number, ts, run, update_number: self.update_number.take(), actor, body };
        self.step.rows.extend(apply_event(self.state, &event));
        self.step.session_changed |= rows::changes_session_row(&event.body);
        self.step.events.push(event);
        number
    }

    /// Index of the last emitted event in the step.
    pub(super) fn last_event_index(&self) -> usize {
        self.step.events.len().saturating_sub(1)
    }

    pub(super) fn add_effect(&mut self, effect: SessionEffect) {
        self.step.effects.push(effect);
    }

    pub(super) fn add_oversized_text(&mut self, text: OversizedText) {
        self.step.oversized_texts.push(text);
    }

    pub(super) fn set_reply(&mut self, reply: CommandReply) {
        self.step.reply = Some(reply);
    }

    pub(super) fn refuse(&mut self, refusal: CommandRefusal) {
        self.set_reply(CommandReply::Refused(refusal));
    }

    pub(super) fn into_step(self) -> SessionStep {
        self.step
    }
}
