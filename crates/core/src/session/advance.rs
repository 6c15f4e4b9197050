//! What comes next: the rule that gives a run to the agent, and the one that ends the session. Every step that may
//! have made room ends in [`Draft::advance`], so no run can be forgotten whatever ended the one before it.

use qd_protocol::event::{
    EmptyEventData, EventBody, MessageCreated, MessageRole, SessionCloseMode, SessionClosed, SteerSent,
};
use qd_protocol::mail::MailDelivery;
use qd_protocol::{FinishReason, MessageId, RunId};

use super::finish::RunEnding;
use super::step_builder::SessionStepBuilder;
use super::{AgentAvailability, SessionEffect};

impl SessionStepBuilder<'_> {
    /// After a rebuild, or when the world has changed for the better: what is owed is owed again.
    pub(super) fn handle_wake(&mut self) {
        if let Some(number) = self.pending_child_cancel {
            self.add_effect(SessionEffect::CancelChildren { number });
        }
        if let (Some(closing), false) = (self.closing, self.closed)
            && !self.children.is_empty()
            && !self.children_closed
        {
            self.add_effect(SessionEffect::CloseChildren { purge: closing == SessionCloseMode::Purge });
        }
        // Before there were workers, an agent lived in the daemon and ended with it.
        if self.worker.is_none()
            && let Some((run, _)) = self.current_turn()
        {
            let run = run.id.clone();
            self.finish_run(&run, FinishReason::Interrupted);
        }
        self.query_children();
        self.advance();
    }

    /// Gives the next run to the agent if it can be given; ends the session if it is closing and nothing is left.
    pub(super) fn advance(&mut self) {
        while let Some(run) = self.run_awaiting_agent() {
            if self.context.over_budget {
                self.finish_run(&run, FinishReason::BudgetExceeded);
                continue;
            }
            if self.context.halted || self.worker_stopping_since.is_some() {
                break;
            }
            match self.context.agent {
                AgentAvailability::Ready { .. } if self.suspension().is_some() => self.resume_run(run),
                AgentAvailability::Ready { .. } => self.start_run(run),
                AgentAvailability::Absent | AgentAvailability::WorkerOnly => match self.restart_limit_error()
                {
                    Some(error) => {
                        self.finish_run_with(&run, RunEnding::failed(error));
                        continue;
                    }
                    None => self.launch_agent(&run),
                },
                AgentAvailability::Starting | AgentAvailability::Lost => {}
            }
            break;
        }
        self.stop_worker_and_close();
    }

    /// The run that only waits for an agent: the first, if it has not started or has all that it was suspended for.
    pub(super) fn run_awaiting_agent(&self) -> Option<RunId> {
        let run = self.runs.front()?;
        let due = match &run.started {
            None => true,
            Some(started) => started.suspended.as_ref().is_some_and(|wait| wait.waits_for.is_empty()),
        };
        due.then(|| run.id.clone())
    }

    /// Ends a worker that is not wanted any more, and the session once it is gone, or will not go.
    fn stop_worker_and_close(&mut self) {
        if self.closed {
            return;
        }
        if self.worker_stopping_since.is_some() {
            self.add_effect(SessionEffect::StopAgent);
        }
        let alone = self.worker.is_none() || self.worker_stop_timed_out();
        let Some(closing) = self.closing.filter(|_| self.is_ready_to_close() && alone) else { return };
        let purge = closing == SessionCloseMode::Purge;
        self.close_mailbox();
        self.emit(None, EventBody::SessionClosed(SessionClosed { purge }));
        self.notify_parent();
        if purge {
            self.add_effect(SessionEffect::Purge);
        }
    }

    /// Written when the agent is ready and before the prompt goes to it: a run without it was never given away.
    fn start_run(&mut self, run: RunId) {
        let number = self.emit(Some(run.clone()), EventBody::RunStarted(EmptyEventData {}));
        self.open_assistant_message(&run);
        if let Some(mail) = self.run(&run).and_then(|run| run.mail.clone()) {
            self.record_mail_delivery(mail, MailDelivery::Prompt, &run);
        }
        self.add_effect(SessionEffect::SendPrompt { number, run: run.clone() });
        let waiting: Vec<_> = self.runs.front().map(|run| run.steers.clone()).unwrap_or_default();
        for steer in waiting {
            let body = EventBody::SteerSent(SteerSent { steer: steer.accepted });
            let number = self.emit(Some(run.clone()), body);
            self.add_effect(SessionEffect::SendSteer { number, run: run.clone(), text: steer.full_text() });
        }
    }

    /// The assistant's message of a run, still empty.
    pub(super) fn open_assistant_message(&mut self, run: &RunId) {
        let message_id = MessageId::assistant(run);
        let body = EventBody::MessageCreated(MessageCreated {
            message_id,
            role: MessageRole::Assistant,
            parts: Vec::new(),
        });
        self.emit(Some(run.clone()), body);
    }
}
