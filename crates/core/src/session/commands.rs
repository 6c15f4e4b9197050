//! Handles the commands of clients and of the daemon. Starting the runs that a command makes possible is left to
//! `advance`.
//!
//! Design: docs/design/mailbox-order-decides-cancels.md

use qd_protocol::event::{
    Ask, AskAnswer, AskKind, AskResolved, AskStatus, EventBody, MessageCreated, MessagePart, MessageRole,
    ModeChangeSource, ModeChanged, PermissionDecision, QueueReason, ResolvedBy, RunAccepted,
    RunCancelRequested, RunQueued, RunStopCause, SessionCloseMode, SessionUpdated, SteerAccepted,
};
use qd_protocol::limits::QUEUE_MAX;
use qd_protocol::link::AskResolution;
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, EventNumber, FinishReason, LongText, MailId, MessageId, RunId};

use super::step_builder::SessionStepBuilder;
use super::{
    AgentAvailability, AskEntry, CommandRefusal, CommandReply, PromptSubmission, RunStopRequest,
    SessionCommand, SessionContext, SessionEffect, SettingsUpdate,
};
use crate::ask_digest;

impl SessionStepBuilder<'_> {
    pub(super) fn handle_command(&mut self, command: SessionCommand) {
        if self.closed {
            return self.handle_command_when_closed(command);
        }
        match command {
            SessionCommand::AcceptPrompt(prompt) => self.accept_prompt(prompt),
            SessionCommand::Cancel { run, by, reason } => self.handle_cancel(run, by, reason),
            SessionCommand::CancelFromParent { cause } => self.cancel_from_parent(cause),
            SessionCommand::ChildrenCancelled { number } => {
                if self.pending_child_cancel == Some(number) {
                    self.emit_update(SessionUpdated {
                        children_cancelled: Some(number),
                        ..Default::default()
                    });
                }
                self.set_reply(CommandReply::Done);
            }
            SessionCommand::CancelActiveRun => {
                let cancelled = self.stop_active_run(RunStopCause::Halt, None);
                self.advance();
                self.set_reply(CommandReply::Cancelled(cancelled.into_iter().collect()));
            }
            SessionCommand::OverBudget => {
                self.stop_active_run(RunStopCause::Budget, None);
                self.advance();
                self.set_reply(CommandReply::Done);
            }
            SessionCommand::Steer { text } => self.handle_steer(text),
            SessionCommand::Answer { ask, answer, shown_sha256 } => {
                self.answer_ask(&ask, answer, shown_sha256.as_deref())
            }
            SessionCommand::RemoveQueued { run } => self.remove_queued(&run),
            SessionCommand::ClearQueue => self.remove_from_queue(self.queued_run_ids()),
            SessionCommand::MoveQueued { run, before } => self.move_queued(run, before),
            SessionCommand::UpdateSettings(change) => self.update_settings(change),
            SessionCommand::AddChild { child } => {
                if self.closing.is_some() {
                    return self.refuse(CommandRefusal::Closed);
                }
                self.emit_update(SessionUpdated { child: Some(child), ..Default::default() });
                self.set_reply(CommandReply::Done);
            }
            SessionCommand::Close { purge } => self.close(purge),
            SessionCommand::ChildrenClosed => {
                if self.closing.is_some() && !self.children_closed {
                    self.emit_update(SessionUpdated { children_closed: true, ..Default::default() });
                }
                self.advance();
                self.set_reply(CommandReply::Done);
            }
            SessionCommand::ChildEnded(result) => self.record_child_ended(result),
            SessionCommand::OpenQuestion { ask, prompt, options } => self.open_question(ask, prompt, options),
            SessionCommand::JudgeToolCall(request) => self.judge_tool_call(request),
            SessionCommand::AnswerDelivered { ask } => self.record_answer_delivered(&ask),
            SessionCommand::WithdrawQuestion { ask } => self.withdraw_question(&ask),
            SessionCommand::AcceptMail(mail) => self.accept_mail(mail),
            SessionCommand::ClaimMail { max, lease_ms } => self.claim_mail(max, lease_ms),
            SessionCommand::AcknowledgeMail { id, claim } => self.acknowledge_mail(&id, claim),
        }
    }

    /// No event follows `session.closed`: commands that would change something are refused, and commands that would
    /// stop something find nothing to stop.
    fn handle_command_when_closed(&mut self, command: SessionCommand) {
        match command {
            SessionCommand::Close { purge } => self.close(purge),
            SessionCommand::Cancel { .. }
            | SessionCommand::CancelFromParent { .. }
            | SessionCommand::CancelActiveRun => {
                self.set_reply(CommandReply::Cancelled(Vec::new()));
            }
            SessionCommand::ClearQueue => self.set_reply(CommandReply::Removed(Vec::new())),
            SessionCommand::RemoveQueued { .. } | SessionCommand::MoveQueued { .. } => {
                self.refuse(CommandRefusal::NotQueued)
            }
            SessionCommand::Answer { .. } => self.refuse(CommandRefusal::AskNotOpen),
            SessionCommand::AcknowledgeMail { .. } => self.refuse(CommandRefusal::NotClaimed),
            SessionCommand::ChildrenCancelled { .. }
            | SessionCommand::ChildrenClosed
            | SessionCommand::OverBudget
            | SessionCommand::AnswerDelivered { .. }
            | SessionCommand::WithdrawQuestion { .. }
            | SessionCommand::ChildEnded(_) => self.set_reply(CommandReply::Done),
            SessionCommand::AcceptPrompt(_)
            | SessionCommand::Steer { .. }
            | SessionCommand::UpdateSettings(_)
            | SessionCommand::AddChild { .. }
            | SessionCommand::OpenQuestion { .. }
            | SessionCommand::JudgeToolCall(_)
            | SessionCommand::AcceptMail(_)
            | SessionCommand::ClaimMail { .. } => self.refuse(CommandRefusal::Closed),
        }
    }

    fn accept_prompt(&mut self, prompt: PromptSubmission) {
        if let Some(known) = self.run(&prompt.run) {
            let reply = match known.fingerprint == prompt.fingerprint {
                true => CommandReply::Accepted { position: known.position, event: None },
                false => CommandReply::Refused(CommandRefusal::RunIdConflict),
            };
            return self.set_reply(reply);
        }
        if self.closing.is_some() {
            return self.refuse(CommandRefusal::Closed);
        }
        if self.is_at_journal_limit() {
            return self.refuse(CommandRefusal::JournalLimit);
        }
        if self.queue_is_full() {
            return self.refuse(CommandRefusal::QueueFull);
        }
        let (position, event) = self.enqueue_prompt(prompt, None);
        self.advance();
        self.set_reply(CommandReply::Accepted { position, event: Some(event) });
    }

    pub(super) fn queue_is_full(&self) -> bool {
        self.queued_runs(self.context.holds_runs()).count() >= QUEUE_MAX
    }

    /// Appends a prompt to the queue. Returns its position and the index of its `run.accepted` in the step.
    pub(super) fn enqueue_prompt(&mut self, prompt: PromptSubmission, mail: Option<MailId>) -> (u32, usize) {
        let SessionContext { halted, quota_until, .. } = self.context;
        let held = self.context.holds_runs();
        let is_first = self.runs.is_empty();
        let starts_at_once = is_first && !held && !self.must_wait_for_slot();
        let position = if starts_at_once { 0 } else { self.queued_runs(held).count() as u32 + 1 };
        self.emit_run_accepted(prompt, position, None, mail);
        let event = self.last_event_index() - 1;
        // A first run that only waits for a slot gets its `run.queued` from `launch_agent`.
        let queued = match quota_until {
            _ if halted => Some(RunQueued::new(QueueReason::Halted, position)),
            Some(until) => Some(RunQueued { reason: QueueReason::Quota, position, until: Some(until) }),
            None if is_first => None,
            None => Some(RunQueued::new(QueueReason::Busy, position)),
        };
        if let Some(queued) = queued {
            let run = self.runs.back().map(|run| run.id.clone());
            self.emit(run, EventBody::RunQueued(queued));
        }
        (position, event)
    }

    /// Emits the two events that every accepted run begins with.
    pub(super) fn emit_run_accepted(
        &mut self,
        prompt: PromptSubmission,
        position: u32,
        steer: Option<EventNumber>,
        mail: Option<MailId>,
    ) {
        let PromptSubmission { run, prompt: LongText { head, blob }, attachments, fingerprint } = prompt;
        let accepted =
            RunAccepted { prompt: head.clone(), blob: blob.clone(), position, fingerprint, steer, mail };
        self.emit(Some(run.clone()), EventBody::RunAccepted(accepted));
        let mut parts = vec![MessagePart::Text { text: head, blob }];
        parts.extend(attachments.into_iter().map(|file| MessagePart::File { file }));
        let message_id = MessageId::user(&run);
        let body = EventBody::MessageCreated(MessageCreated { message_id, role: MessageRole::User, parts });
        self.emit(Some(run), body);
    }

    fn handle_cancel(&mut self, run: Option<RunId>, by: RunStopCause, reason: Option<String>) {
        let cancelled = match run {
            Some(run) => self.cancel_run(&run, by, reason).into_iter().collect(),
            None => self.cancel_all_runs(by, reason),
        };
        self.advance();
        self.set_reply(CommandReply::Cancelled(cancelled));
    }

    fn cancel_run(&mut self, run: &RunId, by: RunStopCause, reason: Option<String>) -> Option<RunId> {
        if let Some(started) = &self.run(run)?.execution {
            // A suspended run includes the child sessions that it waits for.
            if started.suspended.is_some() {
                self.cancel_children();
            }
            return self.stop_active_run(by, reason);
        }
        self.cancel_unstarted(run, by, reason);
        Some(run.clone())
    }

    /// Cancels all runs and child sessions. Commands are handled in order, so `runs` holds exactly the runs that were
    /// accepted before this cancel; no marker is needed that could hit a later run.
    fn cancel_all_runs(&mut self, by: RunStopCause, reason: Option<String>) -> Vec<RunId> {
        self.cancel_children();
        let cancelled: Vec<RunId> = self.runs.iter().map(|run| run.id.clone()).collect();
        self.stop_active_run(by, reason.clone());
        self.cancel_all_unstarted(by, reason);
        cancelled
    }

    fn cancel_children(&mut self) {
        if !self.children.is_empty() {
            let number = self.emit_update(SessionUpdated { cancels_children: true, ..Default::default() });
            self.add_effect(SessionEffect::CancelChildren { number });
        }
    }

    fn cancel_all_unstarted(&mut self, by: RunStopCause, reason: Option<String>) {
        let unstarted = self.runs.iter().filter(|run| run.execution.is_none());
        let unstarted: Vec<RunId> = unstarted.map(|run| run.id.clone()).collect();
        for run in &unstarted {
            self.cancel_unstarted(run, by, reason.clone());
        }
    }

    /// Ends a run that no agent has yet, at once. The event still records who cancelled it and why.
    fn cancel_unstarted(&mut self, run: &RunId, by: RunStopCause, reason: Option<String>) {
        self.emit(Some(run.clone()), EventBody::RunCancelRequested(RunCancelRequested { by, reason }));
        self.finish_run(run, by.finish_reason());
    }

    fn cancel_from_parent(&mut self, cause: EventNumber) {
        if cause <= self.last_parent_cancel {
            return self.set_reply(CommandReply::Cancelled(Vec::new()));
        }
        self.emit_update(SessionUpdated { parent_cancel: Some(cause), ..Default::default() });
        let cancelled = self.cancel_all_runs(RunStopCause::Parent, None);
        self.advance();
        self.set_reply(CommandReply::Cancelled(cancelled));
    }

    /// Asks the agent to stop its turn. The stop is a latch: a repeat has no effect, except that a cancel after a
    /// timeout makes the run end as cancelled, and that a cancel includes every steer accepted before it. A suspended
    /// run has no turn to stop and ends at once.
    pub(super) fn stop_active_run(&mut self, by: RunStopCause, reason: Option<String>) -> Option<RunId> {
        let (active, started) = self.active_run()?;
        let (run, stop, in_turn) = (active.id.clone(), started.stop, started.suspended.is_none());
        let cancels = |by: RunStopCause| by.finish_reason() == FinishReason::Cancelled;
        // A repeated cancel also includes the steers that were accepted since the first.
        let includes_steers =
            |first: RunStopRequest| active.steers.iter().any(|steer| steer.accepted > first.number);
        match stop {
            Some(first) if !cancels(by) || (cancels(first.by) && !includes_steers(first)) => {}
            _ => {
                let body = EventBody::RunCancelRequested(RunCancelRequested { by, reason });
                let number = self.emit(Some(run.clone()), body);
                if !in_turn {
                    self.finish_run(&run, by.finish_reason());
                    return Some(run);
                }
                if stop.is_none() {
                    self.add_effect(SessionEffect::CancelTurn { number, run: run.clone() });
                }
                self.withdraw_asks(&run, ResolvedBy::Cancel);
            }
        }
        Some(run)
    }

    /// Withdraws every open ask of a run; after a cancel the agent is told.
    pub(super) fn withdraw_asks(&mut self, run: &RunId, by: ResolvedBy) {
        let open: Vec<AskId> = self
            .pending_asks()
            .filter(|ask| ask.run_id.as_ref() == Some(run))
            .map(|ask| ask.id.clone())
            .collect();
        for id in open {
            self.withdraw_ask(&id, by);
        }
    }

    pub(super) fn withdraw_ask(&mut self, id: &AskId, by: ResolvedBy) {
        let Some(AskEntry::Pending(ask)) = self.asks.get(id) else { return };
        let mut ask = Ask::clone(ask);
        ask.state = AskStatus::Withdrawn;
        let (run, asked_by_tool) = (ask.run_id.clone(), ask.asked_by_tool);
        let number = self.emit(run, EventBody::AskResolved(AskResolved::new(ask, by)));
        if by == ResolvedBy::Cancel && !asked_by_tool {
            self.add_effect(SessionEffect::SendAnswer {
                number,
                ask: id.clone(),
                reply: AskResolution::Withdrawn,
            });
        }
    }

    fn handle_steer(&mut self, text: LongText) {
        match self.steerable_run() {
            Ok(run) => {
                let event = self.accept_steer(&run, text, None);
                self.set_reply(CommandReply::Steered { run, event });
            }
            Err(refusal) => self.refuse(refusal),
        }
    }

    /// The run that a steer would go to now.
    pub(super) fn steerable_run(&self) -> Result<RunId, CommandRefusal> {
        let can_steer = matches!(self.context.agent, AgentAvailability::Ready { steerable: true });
        match self.runs.front() {
            _ if self.closing.is_some() => Err(CommandRefusal::Closed),
            _ if self.serving_count(self.context.holds_runs()) == 0 => Err(CommandRefusal::NotRunning),
            _ if self.suspension().is_some() => Err(CommandRefusal::NotRunning),
            _ if !can_steer && matches!(self.context.agent, AgentAvailability::Ready { .. }) => {
                Err(CommandRefusal::SteerUnsupported)
            }
            // Each steer may become a queued run if the turn misses it.
            Some(run) if self.runs.len() + run.steers.len() > QUEUE_MAX => Err(CommandRefusal::QueueFull),
            Some(run) => Ok(run.id.clone()),
            None => Err(CommandRefusal::NotRunning),
        }
    }

    /// Accepts a steer for the first run, sent now or when the run starts. Returns the index of its `steer.accepted`.
    pub(super) fn accept_steer(&mut self, run: &RunId, text: LongText, mail: Option<MailId>) -> usize {
        let started = self.run(run).is_some_and(|run| run.execution.is_some());
        let accepted = SteerAccepted { text: text.head.clone(), blob: text.blob.clone(), mail };
        let number = self.emit(Some(run.clone()), EventBody::SteerAccepted(accepted));
        if started {
            self.add_effect(SessionEffect::SendSteer { number, run: run.clone(), text });
        }
        self.last_event_index()
    }

    fn answer_ask(&mut self, id: &AskId, answer: AskAnswer, shown_sha256: Option<&str>) {
        let Some(AskEntry::Pending(ask)) = self.asks.get(id) else {
            return self.refuse(CommandRefusal::AskNotOpen);
        };
        if !ask_digest::matches_shown(ask, shown_sha256) {
            return self.refuse(CommandRefusal::AskChanged);
        }
        if let Err(problem) = validate_answer(ask, &answer) {
            return self.refuse(CommandRefusal::InvalidAnswer(problem));
        }
        let mut ask = Ask::clone(ask);
        ask.state = AskStatus::Answered;
        ask.answer = Some(answer);
        self.resolve_ask(AskResolved::new(ask.clone(), ResolvedBy::User));
        self.set_reply(CommandReply::Answered(Box::new(ask)));
    }

    fn update_settings(&mut self, change: SettingsUpdate) {
        if self.closing.is_some() {
            return self.refuse(CommandRefusal::Closed);
        }
        let SettingsUpdate { title, model, mode, policy, sandbox, network, limits } = change;
        let update = SessionUpdated { title, model, policy, sandbox, network, limits, ..Default::default() };
        if update != SessionUpdated::default() || mode.is_none() {
            self.emit_update(update);
        }
        if let Some(mode) = mode.filter(|mode| self.settings.mode.as_ref() != Some(mode)) {
            let changed = ModeChanged { mode, by: ModeChangeSource::User, after_run: None };
            self.emit(None, EventBody::ModeChanged(changed));
        }
        self.advance();
        self.set_reply(CommandReply::Done);
    }

    fn close(&mut self, purge: bool) {
        let mode = if purge { SessionCloseMode::Purge } else { SessionCloseMode::Keep };
        if self.closed {
            if purge {
                self.add_effect(SessionEffect::Purge);
            }
            return self.set_reply(CommandReply::Done);
        }
        if self.closing.is_none() || (purge && self.closing == Some(SessionCloseMode::Keep)) {
            self.emit_update(SessionUpdated { closing: Some(mode), ..Default::default() });
            if !self.children.is_empty() {
                self.add_effect(SessionEffect::CloseChildren { purge });
            }
            self.stop_active_run(RunStopCause::Close, None);
            self.cancel_all_unstarted(RunStopCause::Close, None);
        }
        self.advance();
        self.set_reply(CommandReply::Done);
    }

    pub(super) fn emit_update(&mut self, change: SessionUpdated) -> EventNumber {
        self.emit(None, EventBody::SessionUpdated(change))
    }
}

/// Checks that an answer is valid for this ask; the error says why not.
pub(crate) fn validate_answer(ask: &Ask, answer: &AskAnswer) -> Result<(), String> {
    match ask.kind {
        AskKind::Permission => match (answer.decision, &answer.value) {
            (_, Some(_)) => Err("a permission request takes a decision, not a value".to_owned()),
            (None, _) => {
                Err("a permission request takes a decision: allow_once, allow_always or deny".to_owned())
            }
            (Some(PermissionDecision::AllowAlways), _) if ask.risk == Risk::High => {
                Err("high-risk actions can only be allowed one at a time: use allow_once".to_owned())
            }
            _ => Ok(()),
        },
        AskKind::Question => match (answer.decision, &answer.value) {
            (Some(_), _) => Err("a question takes a value, not a decision".to_owned()),
            (_, None) => Err("a question takes a value".to_owned()),
            (_, Some(value)) if !ask.options.is_empty() && !ask.options.contains(value) => {
                Err(format!("the value must be one of: {}", ask.options.join(", ")))
            }
            _ => Ok(()),
        },
    }
}
