//! A step in the making. It can look at the state, but change it only by [`Draft::emit`]: the borrow is private to
//! this file, so no rule of the machine can get around `evolve`.

use std::ops::Deref;

use qd_protocol::event::Body;
use qd_protocol::link::UpNumber;
use qd_protocol::{Number, RunId};

use super::{Effect, Large, Recorded, Refusal, Reply, State, Step, World};
use crate::rows::{self, apply};

pub(super) struct Draft<'a> {
    state: &'a mut State,
    pub(super) world: World,
    /// What is being judged was heard under this number; the first event made of it bears it.
    up: Option<UpNumber>,
    step: Step,
}

impl Deref for Draft<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        self.state
    }
}

impl<'a> Draft<'a> {
    pub(super) fn new(state: &'a mut State, world: World) -> Self {
        Self { state, world, up: None, step: Step::default() }
    }

    pub(super) fn hearing(&mut self, up: UpNumber) {
        self.up = Some(up);
    }

    /// Decides an event, applies it, and gives its number.
    pub(super) fn emit(&mut self, run: Option<RunId>, body: Body) -> Number {
        let number = Number(self.state.number.0 + 1);
        let event = Recorded { number, ts: self.world.now, run, up: self.up.take(), body };
        self.step.rows.extend(apply(self.state, &event));
        self.step.session_changed |= rows::touches_session(&event.body);
        self.step.events.push(event);
        number
    }

    /// The place of the event that was emitted last among the step's events.
    pub(super) fn last_event(&self) -> usize {
        self.step.events.len().saturating_sub(1)
    }

    pub(super) fn effect(&mut self, effect: Effect) {
        self.step.effects.push(effect);
    }

    pub(super) fn large(&mut self, large: Large) {
        self.step.large.push(large);
    }

    pub(super) fn reply(&mut self, reply: Reply) {
        self.step.reply = Some(reply);
    }

    pub(super) fn refuse(&mut self, refusal: Refusal) {
        self.reply(Reply::Refused(refusal));
    }

    pub(super) fn done(self) -> Step {
        self.step
    }
}
