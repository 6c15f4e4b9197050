//! What clients and the daemon may want of a session. What a command makes possible is left to `next`.

use qd_protocol::event::{
    Answer, Ask, AskKind, AskResolved, AskState, Body, CancelRequested, Closing, Decision, MessageCreated,
    Part, QueueReason, ResolvedBy, Role, RunAccepted, RunQueued, SessionUpdated, SteerAccepted, StopCause,
};
use qd_protocol::limits::QUEUE_MAX;
use qd_protocol::link::Reply as AskReply;
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, FinishReason, MailId, MessageId, Number, RunId, Text};

use super::draft::Draft;
use super::{Accept, AskEntry, Command, Effect, Link, Refusal, Reply, Update};

impl Draft<'_> {
    pub(super) fn command(&mut self, command: Command) {
        if self.closed {
            return self.command_after_the_end(command);
        }
        match command {
            Command::Accept(prompt) => self.accept(prompt),
            Command::Cancel { run, by, reason } => self.cancel(run, by, reason),
            Command::CancelFromAbove { cause } => self.cancel_from_above(cause),
            Command::BelowCancelled { number } => {
                if self.owed_cancel == Some(number) {
                    self.update(SessionUpdated { below_cancelled: Some(number), ..Default::default() });
                }
                self.reply(Reply::Done);
            }
            Command::CancelActive => {
                let hit = self.stop_active(StopCause::Halt, None);
                self.advance();
                self.reply(Reply::Cancelled(hit.into_iter().collect()));
            }
            Command::OverBudget => {
                self.stop_active(StopCause::Budget, None);
                self.advance();
                self.reply(Reply::Done);
            }
            Command::Steer { text } => self.steer(text),
            Command::Answer { ask, answer } => self.answer(&ask, answer),
            Command::Remove { run } => self.remove(&run),
            Command::Clear => {
                let waiting = self.waiting(self.world.halted).map(|(_, run)| run.id.clone()).collect();
                self.drop_waiting(waiting);
            }
            Command::Update(change) => self.change(change),
            Command::AddChild { child } => {
                if self.closing.is_some() {
                    return self.refuse(Refusal::Closed);
                }
                self.update(SessionUpdated { child: Some(child), ..Default::default() });
                self.reply(Reply::Done);
            }
            Command::Close { purge } => self.close(purge),
            Command::BelowClosed => {
                if self.closing.is_some() && !self.below_closed {
                    self.update(SessionUpdated { below_closed: true, ..Default::default() });
                }
                self.advance();
                self.reply(Reply::Done);
            }
            Command::ChildEnded(result) => self.child_ended(result),
            Command::Question { ask, prompt, options } => self.question(ask, prompt, options),
            Command::AnswerTaken { ask } => self.answer_taken(&ask),
            Command::TakeBack { ask } => self.take_back(&ask),
            Command::Put(put) => self.put(put),
            Command::Claim { max, limit_ms } => self.claim(max, limit_ms),
            Command::Acknowledge { id, claim } => self.acknowledge(&id, claim),
        }
    }

    /// Nothing comes after `session.closed`: what would change something is refused, what would stop something finds
    /// nothing to stop.
    fn command_after_the_end(&mut self, command: Command) {
        match command {
            Command::Close { purge } => self.close(purge),
            Command::Cancel { .. } | Command::CancelFromAbove { .. } | Command::CancelActive => {
                self.reply(Reply::Cancelled(Vec::new()));
            }
            Command::Clear => self.reply(Reply::Removed(Vec::new())),
            Command::Remove { .. } => self.refuse(Refusal::NotQueued),
            Command::Answer { .. } => self.refuse(Refusal::AskNotOpen),
            Command::Acknowledge { .. } => self.refuse(Refusal::NotClaimed),
            Command::BelowCancelled { .. }
            | Command::BelowClosed
            | Command::OverBudget
            | Command::AnswerTaken { .. }
            | Command::TakeBack { .. }
            | Command::ChildEnded(_) => self.reply(Reply::Done),
            Command::Accept(_)
            | Command::Steer { .. }
            | Command::Update(_)
            | Command::AddChild { .. }
            | Command::Question { .. }
            | Command::Put(_)
            | Command::Claim { .. } => self.refuse(Refusal::Closed),
        }
    }

    fn accept(&mut self, prompt: Accept) {
        if let Some(known) = self.run(&prompt.run) {
            let reply = match known.fingerprint == prompt.fingerprint {
                true => Reply::Accepted { position: known.position, event: None },
                false => Reply::Refused(Refusal::RunIdConflict),
            };
            return self.reply(reply);
        }
        if self.closing.is_some() {
            return self.refuse(Refusal::Closed);
        }
        if self.queue_is_full() {
            return self.refuse(Refusal::QueueFull);
        }
        let (position, event) = self.enqueue(prompt, None);
        self.advance();
        self.reply(Reply::Accepted { position, event: Some(event) });
    }

    /// Whether one more run may not wait.
    pub(super) fn queue_is_full(&self) -> bool {
        self.waiting(self.world.halted).count() >= QUEUE_MAX
    }

    /// Puts a prompt at the end of the queue; gives its place there, and where its `run.accepted` is.
    pub(super) fn enqueue(&mut self, prompt: Accept, mail: Option<MailId>) -> (u32, usize) {
        let halted = self.world.halted;
        let first = self.runs.is_empty();
        let at_once = first && !halted && !self.lacks_room();
        let position = if at_once { 0 } else { self.waiting(halted).count() as u32 + 1 };
        self.admit(prompt, position, None, mail);
        let event = self.last_event() - 1;
        // One that waits for room alone is told so when its agent would be launched.
        if halted || !first {
            let reason = if halted { QueueReason::Halted } else { QueueReason::Busy };
            let body = Body::RunQueued(RunQueued { reason, position });
            let run = self.runs.back().map(|run| run.id.clone());
            self.emit(run, body);
        }
        (position, event)
    }

    /// The two events that every accepted run begins with.
    pub(super) fn admit(
        &mut self,
        prompt: Accept,
        position: u32,
        steer: Option<Number>,
        mail: Option<MailId>,
    ) {
        let Accept { run, prompt: Text { head, blob }, attachments, fingerprint } = prompt;
        let accepted =
            RunAccepted { prompt: head.clone(), blob: blob.clone(), position, fingerprint, steer, mail };
        self.emit(Some(run.clone()), Body::RunAccepted(accepted));
        let mut parts = vec![Part::Text { text: head, blob }];
        parts.extend(attachments.into_iter().map(|file| Part::File { file }));
        let message_id = MessageId::user(&run);
        let body = Body::MessageCreated(MessageCreated { message_id, role: Role::User, parts });
        self.emit(Some(run), body);
    }

    fn cancel(&mut self, run: Option<RunId>, by: StopCause, reason: Option<String>) {
        let hit = match run {
            Some(run) => self.cancel_one(&run, by, reason).into_iter().collect(),
            None => self.cancel_all(by, reason),
        };
        self.advance();
        self.reply(Reply::Cancelled(hit));
    }

    fn cancel_one(&mut self, run: &RunId, by: StopCause, reason: Option<String>) -> Option<RunId> {
        if let Some(started) = &self.run(run)?.started {
            // What a suspended run waits for is part of it.
            if started.suspended.is_some() {
                self.cancel_below();
            }
            return self.stop_active(by, reason);
        }
        self.cancel_unstarted(run, by, reason);
        Some(run.clone())
    }

    /// Every run there is was accepted before this cancel, and none that is accepted later is here: the order of the
    /// inbox is the order of accept and cancel, and no mark is needed that could hit the wrong run.
    fn cancel_all(&mut self, by: StopCause, reason: Option<String>) -> Vec<RunId> {
        self.cancel_below();
        let hit: Vec<RunId> = self.runs.iter().map(|run| run.id.clone()).collect();
        self.stop_active(by, reason.clone());
        self.cancel_all_unstarted(by, reason);
        hit
    }

    fn cancel_below(&mut self) {
        if !self.children.is_empty() {
            let number = self.update(SessionUpdated { cancels_below: true, ..Default::default() });
            self.effect(Effect::CancelBelow { number });
        }
    }

    fn cancel_all_unstarted(&mut self, by: StopCause, reason: Option<String>) {
        let unstarted = self.runs.iter().filter(|run| run.started.is_none());
        let unstarted: Vec<RunId> = unstarted.map(|run| run.id.clone()).collect();
        for run in &unstarted {
            self.cancel_unstarted(run, by, reason.clone());
        }
    }

    /// No agent has it, so it ends at once; who wanted that, and why, is said as for any other.
    fn cancel_unstarted(&mut self, run: &RunId, by: StopCause, reason: Option<String>) {
        self.emit(Some(run.clone()), Body::RunCancelRequested(CancelRequested { by, reason }));
        self.finish(run, by.finish_reason());
    }

    fn cancel_from_above(&mut self, cause: Number) {
        if cause <= self.parent_cancel {
            return self.reply(Reply::Cancelled(Vec::new()));
        }
        self.update(SessionUpdated { parent_cancel: Some(cause), ..Default::default() });
        let hit = self.cancel_all(StopCause::Parent, None);
        self.advance();
        self.reply(Reply::Cancelled(hit));
    }

    /// Asks the agent to stop its turn. The stop is a latch: asked again it changes nothing, but that a cancel on
    /// top of a timeout makes it a cancel. A suspended run has no turn to stop, and ends at once.
    pub(super) fn stop_active(&mut self, by: StopCause, reason: Option<String>) -> Option<RunId> {
        let (run, started) = self.active()?;
        let (run, stop, in_turn) = (run.id.clone(), started.stop, started.suspended.is_none());
        let cancels = |by: StopCause| by.finish_reason() == FinishReason::Cancelled;
        match stop {
            Some(first) if cancels(first.by) || !cancels(by) => {}
            _ => {
                let body = Body::RunCancelRequested(CancelRequested { by, reason });
                let number = self.emit(Some(run.clone()), body);
                if !in_turn {
                    self.finish(&run, by.finish_reason());
                    return Some(run);
                }
                if stop.is_none() {
                    self.effect(Effect::Cancel { number, run: run.clone() });
                }
                self.withdraw(&run, ResolvedBy::Cancel);
            }
        }
        Some(run)
    }

    /// Takes back every open ask of a run, and tells the agent so.
    pub(super) fn withdraw(&mut self, run: &RunId, by: ResolvedBy) {
        let open: Vec<AskId> = self
            .pending_asks()
            .filter(|ask| ask.run_id.as_ref() == Some(run))
            .map(|ask| ask.id.clone())
            .collect();
        for id in open {
            self.withdraw_one(&id, by);
        }
    }

    pub(super) fn withdraw_one(&mut self, id: &AskId, by: ResolvedBy) {
        let Some(AskEntry::Pending(ask)) = self.asks.get(id) else { return };
        let mut ask = ask.clone();
        ask.state = AskState::Withdrawn;
        let (run, by_call) = (ask.run_id.clone(), ask.by_call);
        let number = self.emit(run, Body::AskResolved(AskResolved::new(ask, by)));
        if by == ResolvedBy::Cancel && !by_call {
            self.effect(Effect::Answer { number, ask: id.clone(), reply: AskReply::Withdrawn });
        }
    }

    fn steer(&mut self, text: Text) {
        match self.steerable() {
            Ok(run) => {
                let event = self.tell(&run, text, None);
                self.reply(Reply::Steered { run, event });
            }
            Err(refusal) => self.refuse(refusal),
        }
    }

    /// The run that can be told something now.
    pub(super) fn steerable(&self) -> Result<RunId, Refusal> {
        let steers = matches!(self.world.link, Link::Ready { steers: true });
        match self.runs.front() {
            _ if self.closing.is_some() => Err(Refusal::Closed),
            _ if self.serving(self.world.halted) == 0 => Err(Refusal::NotRunning),
            _ if self.suspended().is_some() => Err(Refusal::NotRunning),
            _ if !steers && matches!(self.world.link, Link::Ready { .. }) => Err(Refusal::SteerUnsupported),
            // Each of them may become a run that waits.
            Some(run) if self.runs.len() + run.steers.len() > QUEUE_MAX => Err(Refusal::QueueFull),
            Some(run) => Ok(run.id.clone()),
            None => Err(Refusal::NotRunning),
        }
    }

    /// Tells the first run something, now or when it starts; gives where its `steer.accepted` is.
    pub(super) fn tell(&mut self, run: &RunId, text: Text, mail: Option<MailId>) -> usize {
        let started = self.run(run).is_some_and(|run| run.started.is_some());
        let accepted = SteerAccepted { text: text.head.clone(), blob: text.blob.clone(), mail };
        let number = self.emit(Some(run.clone()), Body::SteerAccepted(accepted));
        if started {
            self.effect(Effect::Steer { number, run: run.clone(), text });
        }
        self.last_event()
    }

    fn answer(&mut self, id: &AskId, answer: Answer) {
        let Some(AskEntry::Pending(ask)) = self.asks.get(id) else {
            return self.refuse(Refusal::AskNotOpen);
        };
        if let Err(why) = fits(ask, &answer) {
            return self.refuse(Refusal::InvalidAnswer(why));
        }
        let mut ask = ask.clone();
        ask.state = AskState::Answered;
        ask.answer = Some(answer);
        self.resolve(AskResolved::new(ask.clone(), ResolvedBy::User));
        self.reply(Reply::Answered(Box::new(ask)));
    }

    fn remove(&mut self, run: &RunId) {
        let waits = self.waiting(self.world.halted).any(|(_, waiting)| waiting.id == *run);
        if waits { self.drop_waiting(vec![run.clone()]) } else { self.refuse(Refusal::NotQueued) }
    }

    fn drop_waiting(&mut self, runs: Vec<RunId>) {
        for run in &runs {
            self.finish(run, FinishReason::Cancelled);
        }
        self.advance();
        self.reply(Reply::Removed(runs));
    }

    fn change(&mut self, change: Update) {
        if self.closing.is_some() {
            return self.refuse(Refusal::Closed);
        }
        let Update { title, model, policy, limits } = change;
        self.update(SessionUpdated { title, model, policy, limits, ..Default::default() });
        self.advance();
        self.reply(Reply::Done);
    }

    fn close(&mut self, purge: bool) {
        let wanted = if purge { Closing::Purge } else { Closing::Keep };
        if self.closed {
            if purge {
                self.effect(Effect::Purge);
            }
            return self.reply(Reply::Done);
        }
        if self.closing.is_none() || (purge && self.closing == Some(Closing::Keep)) {
            self.update(SessionUpdated { closing: Some(wanted), ..Default::default() });
            if !self.children.is_empty() {
                self.effect(Effect::CloseBelow { purge });
            }
            self.stop_active(StopCause::Close, None);
            self.cancel_all_unstarted(StopCause::Close, None);
        }
        self.advance();
        self.reply(Reply::Done);
    }

    pub(super) fn update(&mut self, change: SessionUpdated) -> Number {
        self.emit(None, Body::SessionUpdated(change))
    }
}

/// Whether an answer is one to this ask.
pub(crate) fn fits(ask: &Ask, answer: &Answer) -> Result<(), String> {
    match ask.kind {
        AskKind::Permission => match (answer.decision, &answer.value) {
            (_, Some(_)) => Err("a permission takes a decision, not a value".to_owned()),
            (None, _) => Err("a permission takes a decision: allow_once, allow_always or deny".to_owned()),
            (Some(Decision::AllowAlways), _) if ask.risk == Risk::High => {
                Err("what is of high risk is allowed once at a time: use allow_once".to_owned())
            }
            _ => Ok(()),
        },
        AskKind::Question => match (answer.decision, &answer.value) {
            (Some(_), _) => Err("a question takes a value, not a decision".to_owned()),
            (_, None) => Err("a question takes a value".to_owned()),
            (_, Some(value)) if !ask.options.is_empty() && !ask.options.contains(value) => {
                Err(format!("the value is one of: {}", ask.options.join(", ")))
            }
            _ => Ok(()),
        },
    }
}
