//! Deadlines. They are computed from the state and never stored, so a rebuilt session has the same ones.
//!
//! Design: docs/design/deadlines-are-computed.md

use qd_protocol::ClockReading;
use qd_protocol::event::{
    EmptyEventData, EventBody, ProcessCleanup, RunStopCause, SessionLimits, SessionUpdated, SurvivingProcess,
};
use qd_protocol::limits::{CANCEL_GRACE_S, KILL_S};

use super::finish::RunEnding;
use super::step_builder::SessionStepBuilder;
use super::{AgentAvailability, RunExecution, SessionEffect, SessionState};

/// How many milliseconds to wait for a worker that was told to stop or to kill a turn: the time that a kill may take, plus
/// some for the report to arrive.
const STOP_WAIT_MS: u64 = (KILL_S + 5) * 1000;

enum DeadlineAction {
    Kill,
    AbandonTurn,
    Timeout,
    Close,
}

/// In how many milliseconds [`SessionInput::Tick`](super::SessionInput::Tick) has something to do, if nothing else
/// happens before.
pub fn deadline(state: &SessionState, agent: AgentAvailability, now: ClockReading) -> Option<u64> {
    let timer = next_timer(state, agent, now).map(|(remaining, _)| remaining);
    [timer, state.next_claim_expiry(now)].into_iter().flatten().min()
}

/// The milliseconds until the next timer, and what it does.
fn next_timer(
    state: &SessionState,
    agent: AgentAvailability,
    now: ClockReading,
) -> Option<(u64, DeadlineAction)> {
    match state.active_run() {
        Some((_, started)) => next_run_timer(&state.settings.limits, started, agent, now),
        None if state.is_ready_to_close() => {
            let since = state.worker_stopping_since?;
            Some((STOP_WAIT_MS.saturating_sub(now.elapsed_since(since)), DeadlineAction::Close))
        }
        None => None,
    }
}

fn next_run_timer(
    limits: &SessionLimits,
    started: &RunExecution,
    agent: AgentAvailability,
    now: ClockReading,
) -> Option<(u64, DeadlineAction)> {
    match (started.stop, started.kill) {
        (_, Some(kill)) => {
            Some((STOP_WAIT_MS.saturating_sub(now.elapsed_since(kill.at)), DeadlineAction::AbandonTurn))
        }
        (Some(stop), None) => {
            let grace = limits.cancel_grace_s.map_or(CANCEL_GRACE_S * 1000, seconds_to_millis);
            Some((grace.saturating_sub(now.elapsed_since(stop.at)), DeadlineAction::Kill))
        }
        (None, None) if started.waiting_since.is_some() => None,
        // A disconnected worker enforces the limit itself, and only it knows how long the turn has run.
        (None, None) if agent == AgentAvailability::Lost => None,
        (None, None) => {
            let limit = seconds_to_millis(limits.run_timeout_s?);
            Some((limit.saturating_sub(started.run_time(now)), DeadlineAction::Timeout))
        }
    }
}

pub fn seconds_to_millis(seconds: f64) -> u64 {
    (seconds * 1000.0).clamp(0.0, 1e15) as u64
}

impl SessionStepBuilder<'_> {
    pub(super) fn handle_tick(&mut self) {
        self.return_expired_claims();
        let Some((0, action)) = next_timer(self, self.context.agent, self.context.now) else { return };
        match (action, self.active_run()) {
            (DeadlineAction::Close, _) => self.advance(),
            (DeadlineAction::Timeout, _) => {
                self.stop_active_run(RunStopCause::Timeout, None);
            }
            (DeadlineAction::Kill, Some((run, _))) => {
                let run = run.id.clone();
                let number = self.emit(Some(run.clone()), EventBody::RunKillRequested(EmptyEventData {}));
                self.add_effect(SessionEffect::KillTurn { number, run });
            }
            (DeadlineAction::AbandonTurn, Some((run, started))) => {
                let run = run.id.clone();
                let reason = started.stop.map_or(RunStopCause::User, |stop| stop.by).finish_reason();
                // This worker did not let go of a killed turn, so it never gets another one. The event tells later
                // daemons too.
                self.emit_update(SessionUpdated { stops_agent: true, ..Default::default() });
                let worker = self.worker.as_ref().map_or("its worker", |worker| worker.as_str());
                let name = format!("unknown: {worker} did not report in time");
                let surviving = vec![SurvivingProcess { pid: None, name }];
                let processes = ProcessCleanup { killed: 0, survivors: 1, surviving };
                self.finish_run_with(&run, RunEnding { processes, ..RunEnding::of(reason) });
                self.advance();
            }
            (DeadlineAction::Kill | DeadlineAction::AbandonTurn, None) => {}
        }
    }

    /// The worker has used up the time that it gets to stop.
    pub(super) fn worker_stop_timed_out(&self) -> bool {
        self.worker_stopping_since.is_some_and(|since| self.context.now.elapsed_since(since) >= STOP_WAIT_MS)
    }
}
