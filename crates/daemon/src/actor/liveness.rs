//! The check that something will make a session go on. The supervisor requests it every few seconds from every awake
//! session. A session that fails it is a mistake of ours: it is reported, counted and woken, so that its runs end.
//!
//! Design: docs/design/no-run-is-forgotten.md

use qd_core::session::{AgentAvailability, ExpectedWakeup, SessionInput, expected_wakeup};
use qd_protocol::link::AgentExitReason;

use super::SessionActor;
use super::batch::ActorBatch;

/// At every such check, a suspended session asks whether the child sessions that it waits for have ended.
const CHECKS_PER_CHILDREN_QUERY: u8 = 12;

impl SessionActor {
    /// Reports and wakes the session if nothing will make its runs go on. It must be so at two checks in a row without
    /// an event between them: what is under way at one check has happened, or shows, at the next.
    pub(super) fn check_liveness(&mut self, batch: &mut ActorBatch) {
        if !self.is_stuck() {
            self.stuck_at = None;
            return self.query_children_rarely(batch);
        }
        if self.stuck_at.replace(self.state.number) != Some(self.state.number) {
            return;
        }
        self.daemon.metrics.count_stuck_session();
        tracing::error!(
            session = %self.session.id,
            phase = ?self.state.phase(),
            runs = self.state.runs.len(),
            worker = ?self.state.worker,
            agent = ?self.agent_availability(),
            waits_for_slot = self.state.waits_for_slot(),
            "a session with unfinished runs has nothing that will wake it; it is woken now"
        );
        let agent_is_missing = match self.agent_availability() {
            AgentAvailability::Absent => self.state.worker.is_some(),
            AgentAvailability::IdleStopped => self.state.current_turn().is_some(),
            _ => false,
        };
        match agent_is_missing {
            true => self.end_agent(AgentExitReason::Lost),
            false => self.step_machine(batch, SessionInput::Wake),
        }
    }

    /// A child's end is reported until the report arrives. This finds one whose report was lost with a panic.
    fn query_children_rarely(&mut self, batch: &mut ActorBatch) {
        let waits_for_children = self.state.suspension().is_some_and(|it| !it.waits_for.is_empty());
        self.checks_suspended = if waits_for_children { self.checks_suspended + 1 } else { 0 };
        if self.checks_suspended == CHECKS_PER_CHILDREN_QUERY {
            self.checks_suspended = 0;
            self.step_machine(batch, SessionInput::Wake);
        }
    }

    fn is_stuck(&self) -> bool {
        // Inputs that wait to be judged are judged soon.
        if !self.state.is_busy() || self.has_unjudged_inputs() {
            return false;
        }
        let in_line = self.daemon.agent_slots.is_waiting(&self.session.id);
        match expected_wakeup(&self.state, &self.session_context(), in_line) {
            None => true,
            Some(ExpectedWakeup::AgentChange) => {
                !self.launch_decided && self.preparation.is_none() && !self.agent.is_changing()
            }
            Some(_) => false,
        }
    }
}
