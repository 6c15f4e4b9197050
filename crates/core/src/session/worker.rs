//! The session's worker: when one is started, what its end means, and how often it may crash. A worker is known by the
//! number of the event that wanted it, so whoever repeats that event's effect means the same one.

use std::collections::VecDeque;

use qd_protocol::event::{
    Body, ExitReason, Limits, Notice, QueueReason, RunError, RunQueued, WorkerExited, WorkerReattached,
    WorkerStarted,
};
use qd_protocol::limits::{RESTART_WINDOW_S, RESTARTS};
use qd_protocol::link::Gone;
use qd_protocol::{FinishReason, Millis, Number, RunId, WorkerId};

use super::draft::Draft;
use super::finish::Ending;
use super::timers::milliseconds;
use super::{AskEntry, Effect, Link};

/// The greatest number of restarts that is counted to; a session that allows more is allowed this many.
const RESTARTS_MAX: u32 = 1000;

/// How often a session's worker may crash.
pub(super) struct Restarts {
    limit: usize,
    window_ms: u64,
}

impl Restarts {
    pub(super) fn of(limits: &Limits) -> Self {
        Self {
            limit: limits.restarts.unwrap_or(RESTARTS).min(RESTARTS_MAX) as usize,
            window_ms: limits.restart_window_s.map_or(RESTART_WINDOW_S * 1000, milliseconds),
        }
    }

    /// Adds a crash to those that are known, and forgets what no longer counts: what is out of the window, and all
    /// beyond the first that is too many.
    pub(super) fn count(&self, crashes: &mut VecDeque<Millis>, now: Millis) {
        crashes.push_back(now);
        crashes.retain(|at| self.counts(*at, now));
        while crashes.len() > self.limit + 1 {
            crashes.pop_front();
        }
    }

    fn counts(&self, at: Millis, now: Millis) -> bool {
        now.since(at) < self.window_ms.max(1)
    }
}

impl Draft<'_> {
    /// What a run that needs an agent ends with instead, if too many have crashed of late.
    pub(super) fn worn_out(&self) -> Option<RunError> {
        let restarts = Restarts::of(&self.settings.limits);
        let crashes = self.crashes.iter().filter(|at| restarts.counts(**at, self.world.now)).count();
        (crashes > restarts.limit).then(|| {
            let Restarts { limit, window_ms } = restarts;
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
    pub(super) fn lacks_room(&self) -> bool {
        let launches = matches!(self.world.link, Link::Absent | Link::Resting);
        launches && !self.world.room && !self.world.over_budget && self.worn_out().is_none()
    }

    /// Whether the first run waits for something else than an agent: what becomes of one does not concern it.
    fn is_held_back(&self) -> bool {
        self.world.halted || self.runs.front().is_some_and(|run| run.lacks_room)
    }

    /// Sees that there is an agent for this run, once one more may live.
    pub(super) fn launch(&mut self, run: &RunId) {
        if !self.world.room {
            if self.run(run).is_some_and(|run| !run.lacks_room) {
                let queued = RunQueued { reason: QueueReason::Capacity, position: 1 };
                self.emit(Some(run.clone()), Body::RunQueued(queued));
            }
            return;
        }
        let (worker, fresh) = match self.worker.clone() {
            Some(worker) => (worker, false),
            None => {
                let worker_id = WorkerId::of_session(&self.id, Number(self.number.0 + 1));
                self.emit(None, Body::WorkerStarted(WorkerStarted { worker_id: worker_id.clone() }));
                (worker_id, true)
            }
        };
        self.effect(Effect::Launch { worker, fresh });
    }

    /// The worker is gone, and its agent with it. A run that it had is over; one that waited for it to be ready failed
    /// only if the agent did, and is otherwise simply started again. Heard twice, it happened once.
    pub(super) fn gone(&mut self, gone: Gone) {
        let Some(worker_id) = self.worker.clone().filter(|_| !self.closed) else { return };
        let (reason, error) = match &gone {
            Gone::Stopped => (ExitReason::Stopped, None),
            Gone::Lost => (ExitReason::Lost, None),
            Gone::Failed(error) => (ExitReason::Failed, Some(error.clone())),
        };
        let was_wanted = self.stopping.is_none();
        self.emit(None, Body::WorkerExited(WorkerExited { worker_id, reason, error }));
        // Its last word may come before the link has noticed; nothing more is given to it either way.
        self.world.link = Link::Absent;
        let in_turn = self.turn().map(|(run, _)| run.id.clone());
        let waited = self.due().filter(|_| was_wanted && !self.is_held_back());
        let ending = match (in_turn, waited, gone) {
            (Some(run), _, Gone::Failed(error)) | (None, Some(run), Gone::Failed(error)) => {
                Some((run, Ending::failed(error)))
            }
            (Some(run), _, Gone::Lost | Gone::Stopped) => Some((run, Ending::of(FinishReason::Interrupted))),
            (None, ..) => None,
        };
        if let Some((run, ending)) = ending {
            self.end(&run, ending);
        }
        self.advance();
    }

    /// What preparing an agent had to say. It belongs to no run: the agent may outlive the one that it is started for.
    pub(super) fn noticed(&mut self, text: String) {
        if !self.closed {
            self.emit(None, Body::NoticeShown(Notice { text, after_run: None }));
        }
    }

    /// The worker is connected: what it has not applied is sent again, in order.
    pub(super) fn attached(&mut self, applied: Number, again: bool, run_time_ms: Option<u64>) {
        if self.closed {
            // The session did not wait for it any longer, but here it is.
            return self.effect(Effect::StopAgent);
        }
        if let (true, Some(worker_id)) = (again, self.worker.clone()) {
            let run_time_ms = run_time_ms.filter(|_| self.turn().is_some());
            self.emit(None, Body::WorkerReattached(WorkerReattached { worker_id, run_time_ms }));
        }
        let mut owed: Vec<(Number, Effect)> = Vec::new();
        if let Some((run, started)) = self.turn() {
            let id = || run.id.clone();
            owed.push((started.number, Effect::Prompt { number: started.number, run: id() }));
            for steer in &run.steers {
                if let Some(number) = steer.sent {
                    owed.push((number, Effect::Steer { number, run: id(), text: steer.words() }));
                }
            }
            owed.extend(
                started.stop.map(|mark| (mark.number, Effect::Cancel { number: mark.number, run: id() })),
            );
            owed.extend(
                started.kill.map(|mark| (mark.number, Effect::Kill { number: mark.number, run: id() })),
            );
        }
        for (id, entry) in &self.asks {
            if let AskEntry::Answered { number, reply, by_call: false, .. } = entry {
                let effect = Effect::Answer { number: *number, ask: id.clone(), reply: reply.clone() };
                owed.push((*number, effect));
            }
        }
        owed.retain(|(number, _)| *number > applied);
        owed.sort_by_key(|(number, _)| *number);
        for (_, effect) in owed {
            self.effect(effect);
        }
        self.advance();
    }
}
