//! Runs that wait for the child sessions they started. A suspended run is active but has no turn: it cannot be
//! steered, its run time does not count, and it needs an agent only when all children that it waits for have ended.

use qd_protocol::event::{
    ChildResult, EventBody, ResolvedBy, RunError, RunResumed, RunSuspended, SessionUpdated,
};
use qd_protocol::limits::{HEAD_MAX, INLINE_MAX};
use qd_protocol::text::escaped_head;
use qd_protocol::{RunId, SessionId};
use serde_json::Value;

use super::finish::RunEnding;
use super::step_builder::SessionStepBuilder;
use super::{CommandReply, SessionEffect};

/// How many sessions one run may wait for at a time; their results have to fit into one event.
const WAITED_SESSIONS_MAX: usize = 1000;
/// Upper bound in bytes for the JSON of a child's result without its text.
const RESULT_OVERHEAD: usize = 256;
/// Bytes that one byte of text can take up as JSON.
const ESCAPE_EXPANSION_MAX: usize = 6;

impl SessionStepBuilder<'_> {
    /// Ends the turn and keeps the run. Open asks are withdrawn, as at any end of a turn.
    pub(super) fn suspend_run(&mut self, run: &RunId, transcript: Vec<Value>) {
        let children: Vec<SessionId> = match self.current_turn() {
            Some((_, started)) => started.children.iter().cloned().collect(),
            None => return,
        };
        let body = EventBody::RunSuspended(RunSuspended { children: children.clone(), transcript });
        if let Some(error) = suspension_error(&children, &body) {
            return self.finish_run_with(run, RunEnding::failed(error));
        }
        self.withdraw_asks(run, ResolvedBy::End);
        self.settle_missed_steers(run, false);
        self.emit(Some(run.clone()), body);
        self.query_children();
    }

    /// Asks for the state of the children that a suspended run waits for. Their own notification may have been lost
    /// in a crash.
    pub(super) fn query_children(&mut self) {
        let Some(suspended) = self.suspension() else { return };
        let children: Vec<SessionId> = suspended.waits_for.iter().cloned().collect();
        if !children.is_empty() {
            self.add_effect(SessionEffect::QueryChildren { children });
        }
    }

    pub(super) fn record_child_ended(&mut self, mut result: ChildResult) {
        if let Some(suspended) = self.suspension()
            && suspended.waits_for.contains(&result.session_id)
        {
            let total = suspended.waits_for.len() + suspended.results.len();
            let share = (INLINE_MAX / total).saturating_sub(RESULT_OVERHEAD) / ESCAPE_EXPANSION_MAX;
            result.text = escaped_head(&result.text, share.min(HEAD_MAX)).to_owned();
            self.emit_update(SessionUpdated { child_ended: Some(result), ..Default::default() });
            self.advance();
        }
        self.set_reply(CommandReply::Done);
    }

    /// Emits `run.resumed` once the agent is ready and before the results are sent, so a run is resumed at most once.
    pub(super) fn resume_run(&mut self, run: RunId) {
        let children = self.suspension().map(|suspended| suspended.results.clone()).unwrap_or_default();
        let number = self.emit(Some(run.clone()), EventBody::RunResumed(RunResumed { children }));
        self.add_effect(SessionEffect::SendPrompt { number, run });
    }

    /// Notifies the parent session, if there is one, that this session is idle.
    pub(super) fn notify_parent(&mut self) {
        if self.settings.parent.is_some() && !self.is_busy() {
            self.add_effect(SessionEffect::NotifyParent);
        }
    }
}

/// The error if a run cannot be suspended.
fn suspension_error(children: &[SessionId], body: &EventBody) -> Option<RunError> {
    if children.is_empty() {
        let message = "the agent suspended its run, but started no session to wait for";
        return Some(RunError::new("nothing_to_wait_for", message));
    }
    if children.len() > WAITED_SESSIONS_MAX {
        let message = format!(
            "the agent suspended its run to wait for {} sessions; one run can wait for {WAITED_SESSIONS_MAX} at a time",
            children.len()
        );
        return Some(RunError::new("too_many_to_wait_for", message));
    }
    if body.encode(None).map_or(0, |data| data.len()) > INLINE_MAX {
        let message =
            format!("the agent suspended its run with a transcript of more than {INLINE_MAX} bytes as JSON");
        return Some(RunError::new("transcript_too_large", message));
    }
    None
}
