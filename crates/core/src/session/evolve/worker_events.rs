//! The session's worker: started, found again, and gone.

use qd_protocol::event::{WorkerExitReason, WorkerExited, WorkerReattached, WorkerStarted};

use super::current_turn_mut;
use crate::session::SessionEvent;
use crate::session::state::SessionState;
use crate::session::worker::RestartLimit;

pub(super) fn apply_started(state: &mut SessionState, event: &SessionEvent, started: &WorkerStarted) {
    state.worker = Some(started.worker_id.clone());
    state.sandbox.clone_from(&started.sandbox);
    state.worker_since = event.ts.wall;
    if let Some(run) = state.runs.front_mut() {
        run.waits_for_slot = false;
    }
}

pub(super) fn apply_reattached(
    state: &mut SessionState,
    event: &SessionEvent,
    reattached: &WorkerReattached,
) {
    let (Some(run_time), Some(started)) = (reattached.run_time_ms, current_turn_mut(state)) else { return };
    // Only the worker saw this turn, so any other time since its start was not run time.
    let passed = started.waiting_since.unwrap_or(event.ts).elapsed_since(started.started_at);
    // Keep a longer wait that is known here: the worker does not see questions asked by tool calls.
    started.waited_ms = started.waited_ms.max(passed.saturating_sub(run_time));
    // A worker on another machine saw the time that a reboot of this one hid.
    if let Some(uptime) = &mut started.started_at.uptime {
        let hidden = run_time.saturating_sub(passed);
        uptime.awake_ms = uptime.awake_ms.saturating_sub_unsigned(hidden);
    }
}

pub(super) fn apply_exited(state: &mut SessionState, event: &SessionEvent, exited: &WorkerExited) {
    state.worker = None;
    // A worker that is being stopped has not crashed, however it exits.
    if state.worker_stopping_since.take().is_none() && exited.reason != WorkerExitReason::Stopped {
        RestartLimit::from_limits(&state.settings.limits).record_crash(&mut state.crashes, event.ts);
    }
}
