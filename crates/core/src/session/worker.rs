//! The session's worker: when it is started, what its exit means, and how often it may crash. A worker's id is
//! derived from the number of its `worker.started`, so repeating the launch after a crash means the same worker.
//!
//! Design: docs/design/journal-is-the-outbox.md

use std::collections::VecDeque;

use qd_protocol::event::{
    EventBody, NoticeShown, QueueReason, ResolvedBy, RunError, RunQueued, SessionLimits, SessionUpdated,
    WorkerExitReason, WorkerExited, WorkerReattached, WorkerStarted,
};
use qd_protocol::limits::{RESTART_WINDOW_S, RESTARTS};
use qd_protocol::link::AgentExitReason;
use qd_protocol::{ClockReading, EventNumber, FinishReason, RunId, WorkerId};

use super::finish::RunEnding;
use super::step_builder::SessionStepBuilder;
use super::timers::seconds_to_millis;
use super::{
    AgentAvailability, AskEntry, SessionCommand, SessionContext, SessionEffect, SessionInput, SessionState,
};

/// The highest restart limit that is honoured. Bounds the number of crash times in the state.
const RESTARTS_MAX: u32 = 1000;

/// How many times a session's worker may crash within a time window.
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

    /// Adds a crash, and drops entries that no longer matter: those outside the window, and the oldest beyond limit +
    /// 1.
    pub(super) fn record_crash(&self, crashes: &mut VecDeque<ClockReading>, now: ClockReading) {
        crashes.push_back(now);
        crashes.retain(|at| self.is_in_window(*at, now));
        while crashes.len() > self.limit + 1 {
            crashes.pop_front();
        }
    }

    fn is_in_window(&self, at: ClockReading, now: ClockReading) -> bool {
        now.elapsed_since(at) < self.window_ms.max(1)
    }
}

/// Whether a step could start a worker, and with it decide how an agent is confined. Says yes too often rather than too
/// rarely: the step itself may still end the run, or refuse the prompt.
pub fn may_start_worker(state: &SessionState, input: &SessionInput, context: &SessionContext) -> bool {
    let may_add_run = matches!(
        input,
        SessionInput::Command {
            command: SessionCommand::AcceptPrompt(_) | SessionCommand::AcceptMail(_),
            ..
        }
    );
    let has_no_agent =
        context.agent == AgentAvailability::Absent || matches!(input, SessionInput::WorkerGone(_));
    has_no_agent && (state.is_busy() || may_add_run) && context.slot_available && !context.holds_runs()
}

impl SessionStepBuilder<'_> {
    /// The error that a run ends with instead of starting another agent, if too many crashed recently.
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

    /// A new first run would need a new agent, and the limit on live agents is reached.
    pub(super) fn must_wait_for_slot(&self) -> bool {
        self.can_launch_agent()
            && !self.context.slot_available
            && !self.context.over_budget
            && self.restart_limit_error().is_none()
    }

    /// There is no agent, and none is on its way. If the journal has a worker and there is no agent at all, then the
    /// worker's launch is decided and not performed yet, or its exit is about to be reported.
    pub(super) fn can_launch_agent(&self) -> bool {
        match self.context.agent {
            AgentAvailability::Absent => self.worker.is_none(),
            AgentAvailability::IdleStopped => true,
            AgentAvailability::Starting | AgentAvailability::Ready { .. } | AgentAvailability::Lost => false,
        }
    }

    /// The first run waits for something other than an agent, so a failing agent does not fail it.
    fn is_first_run_blocked(&self) -> bool {
        self.context.holds_runs() || self.waits_for_slot()
    }

    /// Launches an agent for this run, or queues the run until a slot is free.
    pub(super) fn launch_agent(&mut self, run: &RunId) {
        if !self.context.slot_available {
            if self.run(run).is_some_and(|run| !run.waits_for_slot) {
                let queued = RunQueued::new(QueueReason::Capacity, 1);
                self.emit(Some(run.clone()), EventBody::RunQueued(queued));
            }
            return;
        }
        let (worker, new_worker) = match self.worker.clone() {
            Some(worker) => {
                if self.waits_for_slot() {
                    self.emit_update(SessionUpdated { takes_slot: true, ..Default::default() });
                }
                (worker, false)
            }
            None => {
                let worker_id = WorkerId::of_session(&self.id, EventNumber(self.number.0 + 1));
                let sandbox = self.context.sandbox.clone();
                self.emit(
                    None,
                    EventBody::WorkerStarted(WorkerStarted { worker_id: worker_id.clone(), sandbox }),
                );
                (worker_id, true)
            }
        };
        self.add_effect(SessionEffect::LaunchAgent { worker, new_worker });
    }

    /// Records that the worker is gone, and its agent with it. A run in a turn ends. A run that waited for the agent
    /// to be ready fails only if the agent failed; otherwise another agent is started for it. Repeats have no effect.
    pub(super) fn handle_worker_gone(&mut self, exit: AgentExitReason) {
        let Some(worker_id) = self.worker.clone().filter(|_| !self.closed) else { return };
        let (reason, error) = match &exit {
            AgentExitReason::Stopped => (WorkerExitReason::Stopped, None),
            AgentExitReason::Lost => (WorkerExitReason::Lost, None),
            AgentExitReason::Unreachable(error) => (WorkerExitReason::Lost, Some(error.clone())),
            AgentExitReason::Failed(error) => (WorkerExitReason::Failed, Some(error.clone())),
        };
        let was_needed = self.worker_stopping_since.is_none();
        self.emit(None, EventBody::WorkerExited(WorkerExited { worker_id, reason, error }));
        // The agent's exit may arrive before the link notices; either way nothing more is sent to this agent.
        self.context.agent = AgentAvailability::Absent;
        let in_turn = self.current_turn().map(|(run, _)| run.id.clone());
        let waiting = self.run_awaiting_agent().filter(|_| was_needed && !self.is_first_run_blocked());
        let waiting = waiting.map(|run| run.id.clone());
        let ending = match (in_turn, waiting, exit) {
            (Some(run), _, AgentExitReason::Failed(error))
            | (None, Some(run), AgentExitReason::Failed(error)) => Some((run, RunEnding::failed(error))),
            (Some(run), _, AgentExitReason::Lost | AgentExitReason::Stopped) => {
                Some((run, RunEnding::of(FinishReason::Interrupted)))
            }
            (Some(run), _, AgentExitReason::Unreachable(error)) => {
                Some((run, RunEnding { error: Some(error), ..RunEnding::of(FinishReason::Interrupted) }))
            }
            (None, ..) => None,
        };
        if let Some((run, ending)) = ending {
            // Nobody is left to take an answer.
            self.withdraw_asks(&run, ResolvedBy::Agent);
            self.finish_run_with(&run, ending);
        }
        self.advance();
    }

    /// Shows a notice about preparing the agent. It belongs to no run, because the agent may outlive the run it is
    /// started for.
    pub(super) fn emit_notice(&mut self, text: String) {
        if !self.closed {
            self.emit(None, EventBody::NoticeShown(NoticeShown::new(text)));
        }
    }

    /// The worker is connected: everything that it has not applied is sent again, in order.
    pub(super) fn handle_worker_attached(
        &mut self,
        applied: EventNumber,
        reattached: bool,
        run_time_ms: Option<u64>,
    ) {
        if self.closed {
            // The session was closed without waiting any longer for this worker.
            return self.add_effect(SessionEffect::StopAgent);
        }
        if let (true, Some(worker_id)) = (reattached, self.worker.clone()) {
            let run_time_ms = run_time_ms.filter(|_| self.current_turn().is_some());
            self.emit(None, EventBody::WorkerReattached(WorkerReattached { worker_id, run_time_ms }));
        }
        let mut unapplied: Vec<(EventNumber, SessionEffect)> = Vec::new();
        if let Some((run, started)) = self.current_turn() {
            let id = || run.id.clone();
            unapplied.push((started.number, SessionEffect::SendPrompt { number: started.number, run: id() }));
            for steer in &run.steers {
                if let Some(number) = steer.sent {
                    unapplied.push((
                        number,
                        SessionEffect::SendSteer { number, run: id(), text: steer.full_text() },
                    ));
                }
            }
            unapplied.extend(
                started
                    .stop
                    .map(|stop| (stop.number, SessionEffect::CancelTurn { number: stop.number, run: id() })),
            );
            unapplied.extend(
                started
                    .kill
                    .map(|kill| (kill.number, SessionEffect::KillTurn { number: kill.number, run: id() })),
            );
        }
        for (id, entry) in &self.asks {
            if let AskEntry::Answered { number, reply, asked_by_tool: false, .. } = entry {
                let effect =
                    SessionEffect::SendAnswer { number: *number, ask: id.clone(), reply: reply.clone() };
                unapplied.push((*number, effect));
            }
        }
        unapplied.retain(|(number, _)| *number > applied);
        unapplied.sort_by_key(|(number, _)| *number);
        for (_, effect) in unapplied {
            self.add_effect(effect);
        }
        self.advance();
    }
}
