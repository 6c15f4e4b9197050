//! Runs that wait for the sessions that they started. A suspended run is active but has no turn: nothing can be said
//! to it, its time stands still, and it needs an agent only when all that it waits for has ended.

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

/// Sessions that one run may wait for at a time: what became of them has to fit one event.
const WAITED_SESSIONS_MAX: usize = 1000;
/// Bytes of a child's result that are not its text, at most.
const RESULT_OVERHEAD: usize = 256;
/// Bytes that one byte of a text can become as JSON.
const ESCAPE_EXPANSION_MAX: usize = 6;

impl SessionStepBuilder<'_> {
    /// The turn is over and the run is not. What the agent wanted of people is withdrawn, as at any end of a turn.
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
        self.requeue_missed_steers(run, false);
        self.emit(Some(run.clone()), body);
        self.query_children();
    }

    /// Asks how far the sessions are that a suspended run waits for. Their own word may have been lost in a crash.
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
            let all = suspended.waits_for.len() + suspended.results.len();
            let share = (INLINE_MAX / all).saturating_sub(RESULT_OVERHEAD) / ESCAPE_EXPANSION_MAX;
            result.text = escaped_head(&result.text, share.min(HEAD_MAX)).to_owned();
            self.emit_update(SessionUpdated { child_ended: Some(result), ..Default::default() });
            self.advance();
        }
        self.set_reply(CommandReply::Done);
    }

    /// Written when the agent is ready and before the results go to it: a run is resumed once or not at all.
    pub(super) fn resume_run(&mut self, run: RunId) {
        let children = self.suspension().map(|suspended| suspended.results.clone()).unwrap_or_default();
        let number = self.emit(Some(run.clone()), EventBody::RunResumed(RunResumed { children }));
        self.add_effect(SessionEffect::SendPrompt { number, run });
    }

    /// Tells the session above, if there is one, that this one has nothing to do any more.
    pub(super) fn notify_parent(&mut self) {
        if self.settings.parent.is_some() && !self.is_busy() {
            self.add_effect(SessionEffect::NotifyParent);
        }
    }
}

/// Why a turn that wants to be suspended has failed instead.
fn suspension_error(children: &[SessionId], body: &EventBody) -> Option<RunError> {
    if children.is_empty() {
        let message = "the agent suspended its run, but started no session that it could wait for";
        return Some(RunError::new("nothing_to_wait_for", message));
    }
    if children.len() > WAITED_SESSIONS_MAX {
        let message = format!(
            "the agent suspended its run to wait for {} sessions; one run can wait for {WAITED_SESSIONS_MAX} at a time",
            children.len()
        );
        return Some(RunError::new("too_many_to_wait_for", message));
    }
    if body.encode().map_or(0, |data| data.len()) > INLINE_MAX {
        let message =
            format!("the agent suspended its run with a transcript of more than {INLINE_MAX} bytes as JSON");
        return Some(RunError::new("transcript_too_large", message));
    }
    None
}
