//! Steers: accepted, sent to the turn, and then taken or missed by it.

use qd_protocol::EventNumber;
use qd_protocol::event::{SteerAccepted, SteerSent};

use super::first_run_of_event;
use crate::session::SessionEvent;
use crate::session::state::{PendingSteer, SessionState};

pub(super) fn apply_accepted(state: &mut SessionState, event: &SessionEvent, steer: &SteerAccepted) {
    if let Some(run) = first_run_of_event(state, event) {
        run.steers.push(PendingSteer {
            accepted: event.number,
            sent: run.execution.is_some().then_some(event.number),
            text: steer.text.clone(),
            blob: steer.blob.clone(),
            mail: steer.mail.clone(),
        });
    }
}

pub(super) fn apply_sent(state: &mut SessionState, event: &SessionEvent, sent: &SteerSent) {
    let steers = state.runs.front_mut().into_iter().flat_map(|run| &mut run.steers);
    for steer in steers.filter(|steer| steer.accepted == sent.steer) {
        steer.sent = Some(event.number);
    }
}

pub(super) fn remove_steer(state: &mut SessionState, accepted: EventNumber) {
    for run in &mut state.runs {
        run.steers.retain(|steer| steer.accepted != accepted);
    }
}
