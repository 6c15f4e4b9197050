//! Asks: opened, and resolved by an answer or a withdrawal.

use qd_protocol::event::{AskOpened, AskResolved, AskStatus, PermissionDecision};
use qd_protocol::link::AskResolution;

use super::update_waiting_time;
use crate::session::SessionEvent;
use crate::session::state::{AskEntry, SessionState};

pub(super) fn apply_opened(state: &mut SessionState, event: &SessionEvent, opened: &AskOpened) {
    state.asks.insert(opened.ask_id.clone(), AskEntry::Pending(Box::new(opened.ask.clone())));
    update_waiting_time(state, event);
}

pub(super) fn apply_resolved(state: &mut SessionState, event: &SessionEvent, resolved: &AskResolved) {
    let ask = &resolved.ask;
    match (&ask.state, &ask.answer) {
        (AskStatus::Answered, Some(answer)) => {
            let always = answer.decision == Some(PermissionDecision::AllowAlways);
            if let (true, Some(tool)) = (always, &ask.tool) {
                state.grants.insert(tool.clone());
            }
            let mut reply = answer.clone();
            if always {
                reply.decision = Some(PermissionDecision::AllowOnce);
            }
            let entry = AskEntry::Answered {
                run: ask.run_id.clone(),
                number: event.number,
                reply: AskResolution::Answered(reply),
                asked_by_tool: ask.asked_by_tool,
            };
            state.asks.insert(resolved.ask_id.clone(), entry);
        }
        _ => {
            state.asks.remove(&resolved.ask_id);
        }
    }
    update_waiting_time(state, event);
}
