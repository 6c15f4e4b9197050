//! Changes of the queue by clients: removing queued runs, and moving one to another place. Which runs are queued depends
//! on the halt and on quotas as well, so it is asked of the state each time. A run that is active or about to start is never touched.

use qd_protocol::event::{EventBody, RunMoved};
use qd_protocol::{FinishReason, RunId};

use super::step_builder::SessionStepBuilder;
use super::{CommandRefusal, CommandReply};

impl SessionStepBuilder<'_> {
    /// The queued runs, in order.
    pub(super) fn queued_run_ids(&self) -> Vec<RunId> {
        self.queued_runs(self.context.holds_runs()).map(|(_, run)| run.id.clone()).collect()
    }

    pub(super) fn remove_queued(&mut self, run: &RunId) {
        if self.queued_run_ids().contains(run) {
            self.remove_from_queue(vec![run.clone()])
        } else {
            self.refuse(CommandRefusal::NotQueued)
        }
    }

    /// Ends queued runs as cancelled.
    pub(super) fn remove_from_queue(&mut self, runs: Vec<RunId>) {
        for run in &runs {
            self.finish_run(run, FinishReason::Cancelled);
        }
        self.advance();
        self.set_reply(CommandReply::Removed(runs));
    }

    /// Moves a queued run before another one, or to the end. Steers that wait for the start of the run move with it. A
    /// move that does not change the order needs no event.
    pub(super) fn move_queued(&mut self, run: RunId, before: Option<RunId>) {
        let queue = self.queued_run_ids();
        if !queue.contains(&run) {
            return self.refuse(CommandRefusal::NotQueued);
        }
        let followers: Vec<&RunId> = queue.iter().filter(|queued| **queued != run).collect();
        let place = match &before {
            None => Some(followers.len()),
            Some(next) if *next == run => queue.iter().position(|queued| *queued == run),
            Some(next) => followers.iter().position(|queued| *queued == next),
        };
        let Some(place) = place else {
            return self.refuse(CommandRefusal::MoveTargetNotQueued);
        };
        let position = place as u32 + 1;
        if queue.get(place) != Some(&run) {
            self.emit(Some(run), EventBody::RunMoved(RunMoved { before, position }));
            // Another run may be the first now. It needs an agent, or a slot for one, like any first run.
            self.advance();
        }
        self.set_reply(CommandReply::Moved { position });
    }
}
