//! Changes of a session's settings and of its relation to child sessions and to its parent.

use qd_protocol::event::SessionUpdated;

use super::current_turn_mut;
use crate::session::SessionEvent;
use crate::session::state::SessionState;

pub(super) fn apply_updated(state: &mut SessionState, event: &SessionEvent, change: &SessionUpdated) {
    let settings = &mut state.settings;
    settings.title = change.title.clone().or(settings.title.take());
    settings.model = change.model.clone().or(settings.model.take());
    if let Some(policy) = &change.policy {
        settings.policy = policy.clone();
    }
    if let Some(limits) = &change.limits {
        settings.limits = limits.clone();
    }
    settings.sandbox = change.sandbox.or(settings.sandbox);
    settings.network = change.network.or(settings.network);
    if let Some(confined) = &change.confined {
        state.sandbox = Some(confined.clone());
    }
    if change.agent_session_id.is_some() && state.agent_session_id.is_some() {
        // The agent has begun another conversation.
        state.conversation_cost_usd = Some(0.0);
    }
    state.agent_session_id = change.agent_session_id.clone().or(state.agent_session_id.take());
    if let Some(child) = &change.child {
        state.children.insert(child.clone());
        if let Some(started) = current_turn_mut(state) {
            started.children.insert(child.clone());
        }
    }
    if let Some(result) = &change.child_ended {
        let active = state.runs.front_mut().and_then(|run| run.execution.as_mut());
        if let Some(suspended) = active.and_then(|started| started.suspended.as_mut())
            && suspended.waits_for.remove(&result.session_id)
        {
            suspended.results.push(result.clone());
        }
    }
    state.last_parent_cancel = change.parent_cancel.unwrap_or(state.last_parent_cancel);
    if change.cancels_children {
        state.pending_child_cancel = Some(event.number);
    }
    if change.children_cancelled.is_some() && change.children_cancelled == state.pending_child_cancel {
        state.pending_child_cancel = None;
    }
    state.closing = change.closing.or(state.closing);
    state.children_closed |= change.children_closed;
    if change.stops_agent && state.worker.is_some() {
        state.worker_stopping_since.get_or_insert(event.ts);
    }
    if let (true, Some(run)) = (change.takes_slot, state.runs.front_mut()) {
        run.waits_for_slot = false;
    }
}
