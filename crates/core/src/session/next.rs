//! What comes next: the rule that gives a run to the agent, and the one that ends the session. Every step that may
//! have made room ends in [`Draft::advance`], so no run can be forgotten whatever ended the one before it.

use qd_protocol::event::{Body, Closing, Empty, MessageCreated, Role, SessionClosed, SteerSent};
use qd_protocol::mail::Deliver;
use qd_protocol::{FinishReason, MessageId, RunId};

use super::draft::Draft;
use super::finish::Ending;
use super::{Effect, Link};

impl Draft<'_> {
    /// After a rebuild, or when the world has changed for the better: what is owed is owed again.
    pub(super) fn wake(&mut self) {
        if let Some(number) = self.owed_cancel {
            self.effect(Effect::CancelBelow { number });
        }
        if let (Some(closing), false) = (self.closing, self.closed)
            && !self.children.is_empty()
            && !self.below_closed
        {
            self.effect(Effect::CloseBelow { purge: closing == Closing::Purge });
        }
        // Before there were workers, an agent lived in the daemon and ended with it.
        if self.worker.is_none()
            && let Some((run, _)) = self.turn()
        {
            let run = run.id.clone();
            self.finish(&run, FinishReason::Interrupted);
        }
        self.ask_children();
        self.advance();
    }

    /// Gives the next run to the agent if it can be given; ends the session if it is closing and nothing is left.
    pub(super) fn advance(&mut self) {
        while let Some(run) = self.due() {
            if self.world.over_budget {
                self.finish(&run, FinishReason::BudgetExceeded);
                continue;
            }
            if self.world.halted || self.stopping.is_some() {
                break;
            }
            match self.world.link {
                Link::Ready { .. } if self.suspended().is_some() => self.resume(run),
                Link::Ready { .. } => self.start(run),
                Link::Absent | Link::Resting => match self.worn_out() {
                    Some(error) => {
                        self.end(&run, Ending::failed(error));
                        continue;
                    }
                    None => self.launch(&run),
                },
                Link::Starting | Link::Lost => {}
            }
            break;
        }
        self.stop_and_close();
    }

    /// The run that only waits for an agent: the first, if it has not started or has all that it was suspended for.
    pub(super) fn due(&self) -> Option<RunId> {
        let run = self.runs.front()?;
        let due = match &run.started {
            None => true,
            Some(started) => started.suspended.as_ref().is_some_and(|wait| wait.waits_for.is_empty()),
        };
        due.then(|| run.id.clone())
    }

    /// Ends a worker that is not wanted any more, and the session once it is gone, or will not go.
    fn stop_and_close(&mut self) {
        if self.closed {
            return;
        }
        if self.stopping.is_some() {
            self.effect(Effect::StopAgent);
        }
        let alone = self.worker.is_none() || self.has_waited_for_worker();
        let Some(closing) = self.closing.filter(|_| self.is_closing_up() && alone) else { return };
        let purge = closing == Closing::Purge;
        self.close_mailbox();
        self.emit(None, Body::SessionClosed(SessionClosed { purge }));
        self.tell_parent();
        if purge {
            self.effect(Effect::Purge);
        }
    }

    /// Written when the agent is ready and before the prompt goes to it: a run without it was never given away.
    fn start(&mut self, run: RunId) {
        let number = self.emit(Some(run.clone()), Body::RunStarted(Empty {}));
        self.open_answer(&run);
        if let Some(mail) = self.run(&run).and_then(|run| run.mail.clone()) {
            self.delivered(mail, Deliver::Prompt, &run);
        }
        self.effect(Effect::Prompt { number, run: run.clone() });
        let waiting: Vec<_> = self.runs.front().map(|run| run.steers.clone()).unwrap_or_default();
        for steer in waiting {
            let body = Body::SteerSent(SteerSent { steer: steer.accepted });
            let number = self.emit(Some(run.clone()), body);
            self.effect(Effect::Steer { number, run: run.clone(), text: steer.words() });
        }
    }

    /// The assistant's message of a run, still empty.
    pub(super) fn open_answer(&mut self, run: &RunId) {
        let message_id = MessageId::assistant(run);
        let body =
            Body::MessageCreated(MessageCreated { message_id, role: Role::Assistant, parts: Vec::new() });
        self.emit(Some(run.clone()), body);
    }
}
