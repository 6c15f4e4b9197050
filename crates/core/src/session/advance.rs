//! Starts the next run and closes a finished session. Every step that may have unblocked a run ends in
//! [`SessionStepBuilder::advance`], so no run is forgotten, whatever ended the run before it.

use qd_protocol::event::{
    EmptyEventData, EventBody, MessageCreated, MessageRole, ResolvedBy, SessionCloseMode, SessionClosed,
    SteerSent,
};
use qd_protocol::mail::MailDelivery;
use qd_protocol::{FinishReason, MessageId, RunId};

use super::finish::RunEnding;
use super::step_builder::SessionStepBuilder;
use super::{AgentAvailability, SessionEffect};

impl SessionStepBuilder<'_> {
    /// Runs after a rebuild or when the context improved. Repeats the effects whose completion is not journalled.
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
        // A turn without a worker: the journal is from a release in which agents lived in the daemon and ended with it.
        if self.worker.is_none()
            && let Some((run, _)) = self.current_turn()
        {
            let run = run.id.clone();
            self.withdraw_asks(&run, ResolvedBy::Agent);
            self.finish_run(&run, FinishReason::Interrupted);
        }
        self.query_children();
        self.advance();
    }

    /// Starts the next run if possible, and closes the session if it is closing and nothing is left to do.
    pub(super) fn advance(&mut self) {
        while let Some(run) = self.run_awaiting_agent().map(|run| run.id.clone()) {
            if self.context.over_budget {
                self.finish_run(&run, FinishReason::BudgetExceeded);
                continue;
            }
            if self.context.halted || self.worker_stopping_since.is_some() {
                break;
            }
            if let Some(until) = self.context.quota_until {
                self.queue_for_quota(until);
                break;
            }
            match self.context.agent {
                AgentAvailability::Ready { .. } if self.suspension().is_some() => self.resume_run(run),
                AgentAvailability::Ready { .. } => self.start_run(run),
                _ if !self.can_launch_agent() => {}
                _ => match self.restart_limit_error() {
                    Some(error) => {
                        self.finish_run_with(&run, RunEnding::failed(error));
                        continue;
                    }
                    None => self.launch_agent(&run),
                },
            }
            break;
        }
        self.stop_worker_and_close();
    }

    /// Stops a worker that is no longer needed. Closes the session once the worker is gone or did not stop in time.
    fn stop_worker_and_close(&mut self) {
        if self.closed {
            return;
        }
        if self.worker_stopping_since.is_some() {
            self.add_effect(SessionEffect::StopAgent);
        }
        let worker_done = self.worker.is_none() || self.worker_stop_timed_out();
        let Some(closing) = self.closing.filter(|_| self.is_ready_to_close() && worker_done) else { return };
        let purge = closing == SessionCloseMode::Purge;
        self.close_mailbox();
        self.emit(None, EventBody::SessionClosed(SessionClosed { purge }));
        self.notify_parent();
        if purge {
            self.add_effect(SessionEffect::Purge);
        }
    }

    /// Emits `run.started` once the agent is ready and before the prompt is sent. So a run without this event was never
    /// sent to an agent.
    fn start_run(&mut self, run: RunId) {
        let number = self.emit(Some(run.clone()), EventBody::RunStarted(EmptyEventData {}));
        self.open_assistant_message(&run);
        if let Some(mail) = self.run(&run).and_then(|run| run.mail.clone()) {
            self.record_mail_delivery(mail, MailDelivery::Prompt, &run);
        }
        self.add_effect(SessionEffect::SendPrompt { number, run: run.clone() });
        let steers: Vec<_> = self.runs.front().map(|run| run.steers.clone()).unwrap_or_default();
        for steer in steers {
            let body = EventBody::SteerSent(SteerSent { steer: steer.accepted });
            let number = self.emit(Some(run.clone()), body);
            self.add_effect(SessionEffect::SendSteer { number, run: run.clone(), text: steer.full_text() });
        }
    }

    /// Opens the empty assistant message of a run.
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
