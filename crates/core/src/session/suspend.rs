//! Runs that wait for the sessions that they started. A suspended run is active but has no turn: nothing can be said
//! to it, its time stands still, and it needs an agent only when all that it waits for has ended.

use qd_protocol::event::{Body, ChildResult, ResolvedBy, RunError, RunResumed, RunSuspended, SessionUpdated};
use qd_protocol::limits::{HEAD_MAX, INLINE_MAX};
use qd_protocol::text::head;
use qd_protocol::{RunId, SessionId};
use serde_json::Value;

use super::draft::Draft;
use super::finish::Ending;
use super::{Effect, Reply};

/// Sessions that one run may wait for at a time: what became of them has to fit one event.
const WAITED_MAX: usize = 1000;
/// Bytes of a child's result that are not its text, at most.
const RESULT_FRAME: usize = 256;
/// Bytes that one byte of a text can become as JSON.
const ESCAPED_MAX: usize = 6;

impl Draft<'_> {
    /// The turn is over and the run is not. What the agent wanted of people is withdrawn, as at any end of a turn.
    pub(super) fn suspend(&mut self, run: &RunId, transcript: Vec<Value>) {
        let children: Vec<SessionId> = match self.turn() {
            Some((_, started)) => started.children.iter().cloned().collect(),
            None => return,
        };
        let body = Body::RunSuspended(RunSuspended { children: children.clone(), transcript });
        if let Some(error) = cannot_wait(&children, &body) {
            return self.end(run, Ending::failed(error));
        }
        self.withdraw(run, ResolvedBy::End);
        self.miss_all(run, false);
        self.emit(Some(run.clone()), body);
        self.ask_children();
    }

    /// Asks how far the sessions are that a suspended run waits for. Their own word may have been lost in a crash.
    pub(super) fn ask_children(&mut self) {
        let Some(suspended) = self.suspended() else { return };
        let children: Vec<SessionId> = suspended.waits_for.iter().cloned().collect();
        if !children.is_empty() {
            self.effect(Effect::AskChildren { children });
        }
    }

    pub(super) fn child_ended(&mut self, mut result: ChildResult) {
        if let Some(suspended) = self.suspended()
            && suspended.waits_for.contains(&result.session_id)
        {
            let all = suspended.waits_for.len() + suspended.ended.len();
            let share = (INLINE_MAX / all).saturating_sub(RESULT_FRAME) / ESCAPED_MAX;
            result.text = head(&result.text, share.min(HEAD_MAX)).to_owned();
            self.update(SessionUpdated { child_ended: Some(result), ..Default::default() });
            self.advance();
        }
        self.reply(Reply::Done);
    }

    /// Written when the agent is ready and before the results go to it: a run is resumed once or not at all.
    pub(super) fn resume(&mut self, run: RunId) {
        let children = self.suspended().map(|suspended| suspended.ended.clone()).unwrap_or_default();
        let number = self.emit(Some(run.clone()), Body::RunResumed(RunResumed { children }));
        self.effect(Effect::Prompt { number, run });
    }

    /// Tells the session above, if there is one, that this one has nothing to do any more.
    pub(super) fn tell_parent(&mut self) {
        if self.settings.parent.is_some() && !self.busy() {
            self.effect(Effect::TellParent);
        }
    }
}

/// Why a turn that wants to be suspended has failed instead.
fn cannot_wait(children: &[SessionId], body: &Body) -> Option<RunError> {
    if children.is_empty() {
        let message = "the agent suspended its run, but started no session that it could wait for";
        return Some(RunError::new("nothing_to_wait_for", message));
    }
    if children.len() > WAITED_MAX {
        let message = format!(
            "the agent suspended its run to wait for {} sessions; one run can wait for {WAITED_MAX} at a time",
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
