//! The session's worker: when one is started, what its end means, and how often it may crash. A worker is known by the
//! number of the event that wanted it, so whoever repeats that event's effect means the same one.

use std::collections::VecDeque;

use qd_protocol::event::{
    EventBody, NoticeShown, QueueReason, RunError, RunQueued, SessionLimits, WorkerExitReason, WorkerExited,
    WorkerReattached, WorkerStarted,
};
use qd_protocol::limits::{RESTART_WINDOW_S, RESTARTS};
use qd_protocol::link::AgentExitReason;
use qd_protocol::{EventNumber, FinishReason, Millis, RunId, WorkerId};

use super::finish::RunEnding;
use super::step_builder::SessionStepBuilder;
use super::timers::seconds_to_millis;
use super::{AgentAvailability, AskEntry, SessionEffect};

/// The greatest number of restarts that is counted to; a session that allows more is allowed this many.
const RESTARTS_MAX: u32 = 1000;

/// How often a session's worker may crash.
pub(super) struct RestartLimit {
    limit: usize,
    window_ms: u64,
}

impl RestartLimit {
    pub(super) fn from_limits(limits: &SessionLimits) -> Self {
        Self {
            limit: limits.restarts.unwrap_or(RESTARTS).min(RESTARTS_MAX) as usize,
            window_ms: limits.restart_window_s.map_or(RESTART_WINDOW_S * 1000, seconds_to_millis),
        }
    }

    /// Adds a crash to those that are known, and forgets what no longer counts: what is out of the window, and all
    /// beyond the first that is too many.
    pub(super) fn record_crash(&self, crashes: &mut VecDeque<Millis>, now: Millis) {
        crashes.push_back(now);
        crashes.retain(|at| self.is_in_window(*at, now));
        while crashes.len() > self.limit + 1 {
            crashes.pop_front();
        }
    }

    fn is_in_window(&self, at: Millis, now: Millis) -> bool {
        now.since(at) < self.window_ms.max(1)
    }
}

impl SessionStepBuilder<'_> {
    /// What a run that needs an agent ends with instead, if too many have crashed of late.
    pub(super) fn restart_limit_error(&self) -> Option<RunError> {
        let restarts = RestartLimit::from_limits(&self.settings.limits);
        let crashes = self.crashes.iter().filter(|at| restarts.is_in_window(**at, self.context.now)).count();
        (crashes > restarts.limit).then(|| {
            let RestartLimit { limit, window_ms } = restarts;
            let seconds = window_ms as f64 / 1000.0;
            let times = if crashes == 1 { "once" } else { &format!("{crashes} times") };
            let message = format!(
                "the agent crashed {times} within {seconds} s and may be restarted {limit} times in that time: \
                 raise `restarts` with a PATCH of the session, or wait until the crashes are older"
            );
            RunError::new("restart_limit", message)
        })
    }

    /// Whether a run that comes first has to wait for an agent that may not live yet.
    pub(super) fn must_wait_for_slot(&self) -> bool {
        let launches =
            matches!(self.context.agent, AgentAvailability::Absent | AgentAvailability::WorkerOnly);
        launches
            && !self.context.slot_available
            && !self.context.over_budget
            && self.restart_limit_error().is_none()
    }

    /// Whether the first run waits for something else than an agent: what becomes of one does not concern it.
    fn is_first_run_blocked(&self) -> bool {
        self.context.halted || self.runs.front().is_some_and(|run| run.waits_for_slot)
    }

    /// Sees that there is an agent for this run, once one more may live.
    pub(super) fn launch_agent(&mut self, run: &RunId) {
        if !self.context.slot_available {
            if self.run(run).is_some_and(|run| !run.waits_for_slot) {
                let queued = RunQueued { reason: QueueReason::Capacity, position: 1 };
                self.emit(Some(run.clone()), EventBody::RunQueued(queued));
            }
            return;
        }
        let (worker, fresh) = match self.worker.clone() {
            Some(worker) => (worker, false),
            None => {
                let worker_id = WorkerId::of_session(&self.id, EventNumber(self.number.0 + 1));
                self.emit(None, EventBody::WorkerStarted(WorkerStarted { worker_id: worker_id.clone() }));
                (worker_id, true)
            }
        };
        self.add_effect(SessionEffect::LaunchAgent { worker, new_worker: fresh });
    }

    /// The worker is gone, and its agent with it. A run that it had is over; one that waited for it to be ready failed
    /// only if the agent did, and is otherwise simply started again. Heard twice, it happened once.
    pub(super) fn handle_worker_gone(&mut self, gone: AgentExitReason) {
        let Some(worker_id) = self.worker.clone().filter(|_| !self.closed) else { return };
        let (reason, error) = match &gone {
            AgentExitReason::Stopped => (WorkerExitReason::Stopped, None),
            AgentExitReason::Lost => (WorkerExitReason::Lost, None),
            AgentExitReason::Failed(error) => (WorkerExitReason::Failed, Some(error.clone())),
        };
        let was_wanted = self.worker_stopping_since.is_none();
        self.emit(None, EventBody::WorkerExited(WorkerExited { worker_id, reason, error }));
        // Its last word may come before the link has noticed; nothing more is given to it either way.
        self.context.agent = AgentAvailability::Absent;
        let in_turn = self.current_turn().map(|(run, _)| run.id.clone());
        let waited = self.run_awaiting_agent().filter(|_| was_wanted && !self.is_first_run_blocked());
        let ending = match (in_turn, waited, gone) {
            (Some(run), _, AgentExitReason::Failed(error))
            | (None, Some(run), AgentExitReason::Failed(error)) => Some((run, RunEnding::failed(error))),
            (Some(run), _, AgentExitReason::Lost | AgentExitReason::Stopped) => {
                Some((run, RunEnding::of(FinishReason::Interrupted)))
            }
            (None, ..) => None,
        };
        if let Some((run, ending)) = ending {
            self.finish_run_with(&run, ending);
        }
        self.advance();
    }

    /// What preparing an agent had to say. It belongs to no run: the agent may outlive the one that it is started for.
    pub(super) fn emit_notice(&mut self, text: String) {
        if !self.closed {
            self.emit(None, EventBody::NoticeShown(NoticeShown { text, after_run: None }));
        }
    }

    /// The worker is connected: what it has not applied is sent again, in order.
    pub(super) fn handle_worker_attached(
        &mut self,
        applied: EventNumber,
        again: bool,
        run_time_ms: Option<u64>,
    ) {
        if self.closed {
            // The session did not wait for it any longer, but here it is.
            return self.add_effect(SessionEffect::StopAgent);
        }
        if let (true, Some(worker_id)) = (again, self.worker.clone()) {
            let run_time_ms = run_time_ms.filter(|_| self.current_turn().is_some());
            self.emit(None, EventBody::WorkerReattached(WorkerReattached { worker_id, run_time_ms }));
        }
        let mut owed: Vec<(EventNumber, SessionEffect)> = Vec::new();
        if let Some((run, started)) = self.current_turn() {
            let id = || run.id.clone();
            owed.push((started.number, SessionEffect::SendPrompt { number: started.number, run: id() }));
            for steer in &run.steers {
                if let Some(number) = steer.sent {
                    owed.push((
                        number,
                        SessionEffect::SendSteer { number, run: id(), text: steer.full_text() },
                    ));
                }
            }
            owed.extend(
                started
                    .stop
                    .map(|mark| (mark.number, SessionEffect::CancelTurn { number: mark.number, run: id() })),
            );
            owed.extend(
                started
                    .kill
                    .map(|mark| (mark.number, SessionEffect::KillTurn { number: mark.number, run: id() })),
            );
        }
        for (id, entry) in &self.asks {
            if let AskEntry::Answered { number, reply, by_call: false, .. } = entry {
                let effect =
                    SessionEffect::SendAnswer { number: *number, ask: id.clone(), reply: reply.clone() };
                owed.push((*number, effect));
            }
        }
        owed.retain(|(number, _)| *number > applied);
        owed.sort_by_key(|(number, _)| *number);
        for (_, effect) in owed {
            self.add_effect(effect);
        }
        self.advance();
    }
}
