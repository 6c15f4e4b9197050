//! Runs that wait for the reset of their account's quota. Which quotas are exhausted is not part of the state, because it
//! concerns all sessions of the account; what was reported to clients about it is.

use qd_protocol::Millis;
use qd_protocol::event::{EventBody, QueueReason, QuotaReached, RunError, RunQueued};

use super::SessionEffect;
use super::step_builder::SessionStepBuilder;
use crate::quota::is_plausible_reset;

impl SessionStepBuilder<'_> {
    /// The error without a reset that cannot be meant. Nothing would wait for it, so clients must not read it.
    pub(super) fn without_absurd_reset(&self, error: RunError) -> RunError {
        let resets_at = error.resets_at.filter(|at| is_plausible_reset(*at, self.context.now.wall));
        RunError { resets_at, ..error }
    }

    /// Records that the account's quota is exhausted. A reset that is not later than the known one changes nothing.
    pub(super) fn record_exhausted_quota(&mut self, until: Millis) {
        if self.context.quota_until.is_some_and(|known| known >= until) {
            return;
        }
        let (account, agent) = (self.account(), self.settings.agent.clone());
        self.emit(None, EventBody::QuotaReached(QuotaReached { account, agent, until }));
        self.add_effect(SessionEffect::WakeAccount);
        self.context.quota_until = Some(until);
    }

    /// Reports for each run that is not in a turn that it waits for the reset. A run of which that was reported needs no
    /// other event.
    pub(super) fn queue_for_quota(&mut self, until: Millis) {
        let resuming = self.suspension().and(self.runs.front()).map(|run| (1, run));
        let waiting: Vec<_> = resuming
            .into_iter()
            .chain(self.queued_runs(true))
            .filter(|(_, run)| run.quota_until != Some(until))
            .map(|(position, run)| (position, run.id.clone()))
            .collect();
        for (position, run) in waiting {
            let queued = RunQueued { reason: QueueReason::Quota, position, until: Some(until) };
            self.emit(Some(run), EventBody::RunQueued(queued));
        }
    }
}
