//! Reads every event and checks it against the contract. It remembers little about a run, so that the walk can tell
//! when two pasts lead to the same future.

use std::collections::{BTreeMap, BTreeSet};

use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, SessionCommand, SessionContext, SessionEffect,
    SessionEvent, SessionInput, SessionPhase, SessionState, SessionStep,
};
use qd_protocol::event::{
    AskStatus, EventActor, EventBody, MessageRole, ModeChangeSource, QueueReason, ResolvedBy, RunStopCause,
    WorkerExitReason,
};
use qd_protocol::limits::{KILL_S, RESTARTS};
use qd_protocol::{AskId, FinishReason, Millis, RunId, SessionId, WorkerId};

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct ContractObserver {
    runs: BTreeMap<RunId, ObservedRun>,
    asks: BTreeMap<AskId, (RunId, ObservedAskState)>,
    /// There is a worker.
    worker: bool,
    /// The worker is being stopped.
    stopped: bool,
    /// How many times a worker was lost or failed.
    crashes: u32,
    closed: bool,
    /// How many times the daemon was restarted.
    pub(crate) restarts: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct ObservedRun {
    has_user_message: bool,
    started: bool,
    has_assistant_message: bool,
    message_finished: bool,
    /// It was queued because the limit on live agents is reached.
    queued_for_slot: bool,
    /// The reset that it was last queued for.
    queued_for_quota: Option<Millis>,
    /// Child sessions that it started since it was last resumed.
    children: BTreeSet<SessionId>,
    suspended: bool,
    /// How many times it may be sent to an agent.
    prompts_allowed: u8,
    /// A cancel applied to it, so it must end as cancelled.
    cancelled: bool,
    /// How many of its oldest open steers were accepted before a cancel, and so must not run.
    cancelled_steers: usize,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ObservedAskState {
    Open,
    Answered,
    Delivered,
    Over,
}

/// Whatever a command caused says who sent it, what a policy or a limit decided says that, and the agent's own work says
/// nothing.
fn check_actor(input: &SessionInput, event: &SessionEvent) {
    let is_limit = |by: RunStopCause| {
        matches!(by, RunStopCause::Timeout | RunStopCause::MaxTurns | RunStopCause::Budget)
    };
    let is_expected = match (&event.body, event.actor.as_deref()) {
        (EventBody::AskResolved(resolved), actor) if resolved.by == ResolvedBy::Policy => {
            matches!(actor, Some(EventActor::Policy { .. }))
        }
        (EventBody::RunCancelRequested(requested), actor) if is_limit(requested.by) => {
            actor == Some(&EventActor::DAEMON)
        }
        (EventBody::RunKillRequested(_), actor) => actor == Some(&EventActor::DAEMON),
        (_, actor) => match input {
            SessionInput::Command { actor: sender, .. } => actor == Some(&**sender),
            _ => actor.is_none(),
        },
    };
    assert!(is_expected, "{input:?} made {event:?}");
}

impl ContractObserver {
    /// Checks one step against the contract.
    pub(crate) fn observe(
        &mut self,
        before: &SessionState,
        input: &SessionInput,
        step: &SessionStep,
        after: &SessionState,
        context: &SessionContext,
    ) {
        self.check_reply(before, input, step);
        self.check_steers(before, step);
        self.check_move(before, input, step, after, context);
        let mut context = context.clone();
        for event in &step.events {
            assert!(!self.closed, "nothing comes after session.closed");
            check_actor(input, event);
            if let EventBody::QuotaReached(reached) = &event.body {
                assert!(context.quota_until.is_none_or(|known| known < reached.until), "reported twice");
                context.quota_until = Some(reached.until);
            }
            self.event(event, &context);
            self.worker_event(event, before, after, &context);
        }
        for effect in &step.effects {
            self.effect(effect, step, after, &context);
        }
        let started = after.runs.iter().filter(|run| run.execution.is_some()).count();
        assert!(started <= 1, "one run of a session is active at a time");
        assert_eq!(
            after.is_busy(),
            self.runs.values().any(|run| !run.ended),
            "busy while a run has not ended"
        );
        let suspended = self.runs.values().any(|run| run.suspended);
        assert!(
            !suspended || after.phase() == SessionPhase::Waiting,
            "a suspended run makes its session wait"
        );
        let exits = step.events.iter().any(|event| matches!(event.body, EventBody::WorkerExited(_)));
        if exits && before.suspension().is_some_and(|suspension| !suspension.waits_for.is_empty()) {
            assert_eq!(
                before.suspension(),
                after.suspension(),
                "a run that waits loses nothing with its worker"
            );
        }
        self.check_progress(after, &context, step);
    }

    fn check_reply(&mut self, before: &SessionState, input: &SessionInput, step: &SessionStep) {
        let SessionInput::Command { command, .. } = input else { return };
        if let Some(CommandReply::Refused(refusal)) = &step.reply {
            assert!(step.events.is_empty(), "a refused command changes nothing");
            let suspended = before.suspension().is_some() && before.closing.is_none();
            if let (SessionCommand::Steer { .. }, true) = (command, suspended) {
                assert_eq!(*refusal, CommandRefusal::NotRunning, "a suspended run has no turn to steer");
            }
            return;
        }
        let cancelled: Vec<RunId> = match command {
            SessionCommand::Cancel { run: None, .. } | SessionCommand::Close { .. } => {
                before.runs.iter().map(|run| run.id.clone()).collect()
            }
            SessionCommand::Cancel { run: Some(run), .. } => {
                before.run(run).map(|run| run.id.clone()).into_iter().collect()
            }
            _ => Vec::new(),
        };
        let removed = match &step.reply {
            Some(CommandReply::Removed(runs)) => runs.clone(),
            _ => Vec::new(),
        };
        for run in cancelled.iter().chain(&removed) {
            let observed = self.runs.get_mut(run).expect("accepted before");
            observed.cancelled = true;
            observed.cancelled_steers = before.run(run).map_or(0, |run| run.steers.len());
        }
        if let (SessionCommand::Cancel { .. }, Some(CommandReply::Cancelled(reported))) =
            (command, &step.reply)
        {
            assert_eq!(*reported, cancelled, "the receipt of a cancel");
            let below = |event: &SessionEvent| matches!(&event.body, EventBody::SessionUpdated(change) if change.cancels_children);
            if cancelled.is_empty() {
                assert!(step.events.iter().all(below), "a cancel without runs changes nothing here");
            }
        }
        if let (SessionCommand::AddChild { child }, Some((run, _))) = (command, before.current_turn()) {
            self.runs.get_mut(&run.id).expect("accepted before").children.insert(child.clone());
        }
    }

    /// A move changes the order of the queue as it was asked to, and nothing else.
    fn check_move(
        &mut self,
        before: &SessionState,
        input: &SessionInput,
        step: &SessionStep,
        after: &SessionState,
        context: &SessionContext,
    ) {
        let SessionInput::Command { command: SessionCommand::MoveQueued { run, before: next }, .. } = input
        else {
            return;
        };
        let queued: Vec<RunId> =
            before.queued_runs(context.holds_runs()).map(|(_, queued)| queued.id.clone()).collect();
        let movable = queued.contains(run) && next.as_ref().is_none_or(|next| queued.contains(next));
        let Some(CommandReply::Moved { position }) = step.reply else {
            assert!(!movable, "a queued run can be moved");
            return;
        };
        assert!(movable, "only queued runs are moved, and only before queued runs");
        let ids =
            |state: &SessionState| -> Vec<RunId> { state.runs.iter().map(|run| run.id.clone()).collect() };
        let mut expected = ids(before);
        if next.as_ref() != Some(run) {
            expected.retain(|id| id != run);
            let at = next.as_ref().and_then(|next| expected.iter().position(|id| id == next));
            expected.insert(at.unwrap_or(expected.len()), run.clone());
        }
        let place =
            expected.iter().position(|id| id == run).unwrap() - before.serving_count(context.holds_runs());
        assert_eq!(position as usize, place + 1, "the place that the client is told");
        let moved = step.events.iter().any(|event| matches!(event.body, EventBody::RunMoved(_)));
        assert_eq!(moved, expected != ids(before), "run.moved says that the order changed");
        // If another run is the first now, it waits for a slot in its own right.
        if expected.first() != ids(before).first() {
            self.runs.values_mut().for_each(|run| run.queued_for_slot = false);
        }
        expected.retain(|id| after.run(id).is_some());
        assert_eq!(ids(after), expected, "the order after a move");
    }

    /// A steer that was accepted before a cancel of its run does not become a run after it.
    fn check_steers(&mut self, before: &SessionState, step: &SessionStep) {
        let Some(run) = before.runs.front() else { return };
        let mut open: Vec<_> = run.steers.iter().map(|steer| steer.accepted).collect();
        for event in step.events.iter().filter(|event| event.run.as_ref() == Some(&run.id)) {
            let (steer, runs_next) = match &event.body {
                EventBody::SteerTaken(taken) => (taken.steer, false),
                EventBody::SteerMissed(missed) => (missed.steer, missed.next_run_id.is_some()),
                _ => continue,
            };
            let Some(position) = open.iter().position(|open| *open == steer) else { continue };
            open.remove(position);
            let observed = self.runs.get_mut(&run.id).expect("accepted before");
            if position < observed.cancelled_steers {
                observed.cancelled_steers -= 1;
                assert!(!runs_next, "a steer from before a cancel runs after it");
            }
        }
    }

    fn effect(
        &mut self,
        effect: &SessionEffect,
        step: &SessionStep,
        after: &SessionState,
        context: &SessionContext,
    ) {
        match effect {
            SessionEffect::SendPrompt { number, run } => {
                assert!(self.runs[run].started, "a prompt is sent only after run.started");
                let (_, started) = after.active_run().expect("a prompt is of the active run");
                assert_eq!(*number, started.number, "a prompt has the number of the event that sent it");
            }
            SessionEffect::LaunchAgent { worker, new_worker } => {
                assert!(
                    context.slot_available && !context.holds_runs() && !self.stopped,
                    "an agent that must not be launched"
                );
                assert_eq!(Some(worker), after.worker.as_ref());
                let new = |event: &SessionEvent| matches!(event.body, EventBody::WorkerStarted(_));
                assert_eq!(*new_worker, step.events.iter().any(new), "a new worker has its worker.started");
            }
            SessionEffect::StopAgent => {
                assert!(self.worker, "there is no worker to stop");
                self.stopped = true;
            }
            _ => {}
        }
    }

    /// Whatever ended the last run, the next one goes on: if a run could start, it has started, an agent is being
    /// launched, or it was queued with a reason.
    fn check_progress(&self, after: &SessionState, context: &SessionContext, step: &SessionStep) {
        let Some(run) = after.runs.front() else { return };
        let waits_for_agent = match &run.execution {
            None => true,
            Some(started) => {
                started.suspended.as_ref().is_some_and(|suspension| suspension.waits_for.is_empty())
            }
        };
        if waits_for_agent && !context.halted && !self.stopped {
            if let Some(until) = context.quota_until {
                let observed = &self.runs[&run.id];
                assert_eq!(
                    observed.queued_for_quota,
                    Some(until),
                    "a run waits, and its client does not know why"
                );
                return;
            }
            let launched =
                step.effects.iter().any(|effect| matches!(effect, SessionEffect::LaunchAgent { .. }));
            let agent_coming = matches!(context.agent, AgentAvailability::Starting | AgentAvailability::Lost);
            let queued_for_slot = !context.slot_available && self.runs[&run.id].queued_for_slot;
            assert!(launched || agent_coming || queued_for_slot, "a run waits and nothing is on its way");
        }
    }

    fn event(&mut self, event: &SessionEvent, context: &SessionContext) {
        let (run, body) = (event.run.as_ref(), &event.body);
        if let Some(run) = run {
            self.event_of_run(run, body, context);
        }
        match body {
            EventBody::AskOpened(opened) => {
                let asked = (opened.ask.run_id.clone().unwrap(), ObservedAskState::Open);
                assert!(self.asks.insert(opened.ask_id.clone(), asked).is_none(), "opened twice");
            }
            EventBody::AskResolved(resolved) => {
                let before = self.asks.get(&resolved.ask_id).map(|(_, asked)| *asked);
                let by_user = resolved.by == ResolvedBy::User;
                assert!(
                    matches!(before, Some(ObservedAskState::Open)) || (before.is_none() && !by_user),
                    "resolved twice"
                );
                let now = if resolved.ask.state == AskStatus::Answered {
                    ObservedAskState::Answered
                } else {
                    ObservedAskState::Over
                };
                self.asks.insert(resolved.ask_id.clone(), (resolved.ask.run_id.clone().unwrap(), now));
            }
            EventBody::AskDelivered(delivered) => {
                let (_, asked) = self.asks.get_mut(&delivered.ask_id).expect("resolved before");
                let before = std::mem::replace(asked, ObservedAskState::Delivered);
                assert_eq!(before, ObservedAskState::Answered, "delivered once, after its answer");
            }
            EventBody::TextDelta(delta) => {
                assert_eq!(delta.after_run.is_some(), run.is_none(), "late output belongs to no run")
            }
            EventBody::ModeChanged(changed) => {
                let is_late = changed.by == ModeChangeSource::Agent && run.is_none();
                assert_eq!(
                    changed.after_run.is_some(),
                    is_late,
                    "a late change of the mode belongs to no run"
                );
                assert!(
                    changed.by == ModeChangeSource::Agent || run.is_none(),
                    "a setting belongs to no run"
                );
            }
            EventBody::ContextUpdated(updated) => {
                assert_eq!(updated.after_run.is_some(), run.is_none(), "a late report belongs to no run")
            }
            EventBody::ContextCompacted(compacted) => {
                assert_eq!(compacted.after_run.is_some(), run.is_none(), "a late report belongs to no run")
            }
            _ => {}
        }
    }

    fn event_of_run(&mut self, run: &RunId, body: &EventBody, context: &SessionContext) {
        if let EventBody::RunAccepted(_) = body {
            assert!(
                self.runs.insert(run.clone(), ObservedRun::default()).is_none(),
                "{run} was accepted twice"
            );
            return;
        }
        let active = self.runs.values().filter(|run| run.started && !run.ended).count();
        let observed = self.runs.get_mut(run).expect("run.accepted comes first");
        assert!(!observed.ended, "{} of {run} after its run.finished", body.kind());
        match body {
            EventBody::MessageCreated(message) if message.role == MessageRole::User => {
                assert!(!std::mem::replace(&mut observed.has_user_message, true), "one user message");
            }
            EventBody::MessageCreated(_) => {
                assert!(
                    observed.has_user_message
                        && !std::mem::replace(&mut observed.has_assistant_message, true),
                    "one assistant message"
                );
            }
            EventBody::RunQueued(queued) if queued.reason == QueueReason::Capacity => {
                assert!(
                    !context.slot_available
                        && matches!(
                            context.agent,
                            AgentAvailability::Absent | AgentAvailability::IdleStopped
                        )
                );
                assert!(!std::mem::replace(&mut observed.queued_for_slot, true), "queued for capacity once");
                observed.queued_for_quota = None;
            }
            EventBody::RunQueued(queued) if queued.reason == QueueReason::Quota => {
                assert_eq!(queued.until, context.quota_until, "queued until the quota resets");
                let before = std::mem::replace(&mut observed.queued_for_quota, queued.until);
                assert_ne!(before, queued.until, "queued for a quota once");
                observed.queued_for_slot = false;
            }
            EventBody::RunMoved(_) => assert!(!observed.started, "a run that has started is not moved"),
            EventBody::RunStarted(_) => {
                assert!(!std::mem::replace(&mut observed.started, true), "at most one run.started");
                assert_eq!(active, 0, "{run} started while another was active");
                assert!(!context.holds_runs(), "nothing starts under a halt or without a quota");
                assert!(!observed.cancelled, "a cancelled run does not start");
                assert!(self.worker && !self.stopped, "nothing starts on a worker that is being stopped");
                (observed.queued_for_slot, observed.queued_for_quota) = (false, None);
                observed.prompts_allowed = 1;
            }
            EventBody::RunSuspended(suspended) => {
                assert!(
                    observed.started
                        && !std::mem::replace(&mut observed.suspended, true)
                        && !observed.cancelled
                );
                let children: BTreeSet<_> = suspended.children.iter().cloned().collect();
                assert_eq!(children, observed.children, "it waits for the sessions that it started");
                assert!(!children.is_empty(), "it waits for nothing");
            }
            EventBody::RunResumed(resumed) => {
                assert!(std::mem::replace(&mut observed.suspended, false), "resumed once");
                let children: BTreeSet<_> =
                    resumed.children.iter().map(|child| child.session_id.clone()).collect();
                assert_eq!(children, std::mem::take(&mut observed.children), "it gets what it waited for");
                assert!(!context.holds_runs(), "nothing is resumed under a halt or without a quota");
                assert!(self.worker && !self.stopped, "nothing is resumed on a worker that is being stopped");
                (observed.queued_for_slot, observed.queued_for_quota) = (false, None);
                observed.prompts_allowed += 1;
            }
            EventBody::MessageFinished(finished) => {
                assert!(
                    observed.has_assistant_message
                        && !std::mem::replace(&mut observed.message_finished, true),
                    "one message.finished"
                );
                assert_eq!(finished.finish.reason == FinishReason::Cancelled, observed.cancelled);
            }
            EventBody::RunFinished(finished) => {
                assert!(observed.message_finished, "message.finished comes before run.finished");
                let reason = finished.finish_reason;
                assert_eq!(
                    reason == FinishReason::Cancelled,
                    observed.cancelled,
                    "{run} ended as {reason:?}"
                );
                let open =
                    self.asks.values().any(|(owner, ask)| owner == run && *ask == ObservedAskState::Open);
                assert!(!open, "the asks of {run} are withdrawn before its end");
                // The run has no more events, so forget everything about it.
                *observed = ObservedRun { ended: true, ..ObservedRun::default() };
                self.asks
                    .values_mut()
                    .filter(|(owner, _)| owner == run)
                    .for_each(|(_, ask)| *ask = ObservedAskState::Over);
            }
            EventBody::ErrorRaised(error) => {
                assert!(!observed.cancelled, "a cancel raises no error");
                let unstarted = !observed.started || observed.suspended;
                assert!(
                    error.code != "restart_limit" || unstarted,
                    "a turn is not ended by a limit on restarts"
                );
            }
            EventBody::RunCancelRequested(request) => {
                let asked =
                    matches!(request.by, RunStopCause::User | RunStopCause::Close | RunStopCause::Fleet);
                assert_eq!(
                    asked, observed.cancelled,
                    "a run is asked to stop only if a cancel applied to it"
                );
            }
            EventBody::RunKillRequested(_) => assert!(!observed.suspended, "there is no turn to kill"),
            EventBody::TextDelta(_) => assert!(observed.started, "output of a run that has not started"),
            _ => {}
        }
    }

    fn worker_event(
        &mut self,
        event: &SessionEvent,
        before: &SessionState,
        after: &SessionState,
        context: &SessionContext,
    ) {
        let limit = after.settings.limits.restarts.unwrap_or(RESTARTS);
        match &event.body {
            EventBody::WorkerStarted(started) => {
                assert_eq!(started.worker_id, WorkerId::of_session(&after.id, event.number));
                assert!(!std::mem::replace(&mut self.worker, true), "one worker at a time");
                assert!(self.crashes <= limit, "one worker too many");
                assert!(started.sandbox.is_some(), "the step was not expected to start a worker");
                assert!(context.slot_available && !context.holds_runs(), "a worker that must not be started");
                // If the run has to wait for a slot again, it is queued again.
                self.runs.values_mut().for_each(|run| run.queued_for_slot = false);
            }
            EventBody::SessionUpdated(change) if change.takes_slot => {
                assert!(self.worker && !self.stopped, "an agent started without a worker");
                assert!(context.slot_available && !context.holds_runs(), "an agent that must not be started");
                self.runs.values_mut().for_each(|run| run.queued_for_slot = false);
            }
            EventBody::WorkerReattached(_) => assert!(self.worker, "no worker could be reattached"),
            EventBody::WorkerExited(exited) => {
                assert!(std::mem::replace(&mut self.worker, false), "a worker exits once");
                let crashed = !std::mem::replace(&mut self.stopped, false);
                self.crashes += u32::from(crashed && exited.reason != WorkerExitReason::Stopped);
            }
            EventBody::ErrorRaised(error) if error.code == "restart_limit" => {
                assert!(self.crashes > limit, "a run ended because of crashes that did not happen")
            }
            EventBody::SessionClosed(_) => {
                assert!(
                    self.runs.values().all(|run| run.ended),
                    "session.closed comes after the last run.finished"
                );
                let timed_out = before
                    .worker_stopping_since
                    .is_some_and(|since| context.now.elapsed_since(since) >= (KILL_S + 5) * 1000);
                assert!(!self.worker || timed_out, "session.closed comes after the worker's end");
                self.closed = true;
            }
            _ => {}
        }
        if event.body.kind().starts_with("worker.") || event.body.kind().starts_with("session.") {
            assert_eq!(event.run, None, "{} belongs to no run", event.body.kind());
        }
    }

    /// No prompt is sent to an agent twice; each resume allows one more. Forgets runs that have ended.
    pub(crate) fn check_prompt_counts(&self, prompt_counts: &mut BTreeMap<RunId, u8>) {
        prompt_counts.retain(|run, times| {
            let observed = &self.runs[run];
            assert!(
                observed.ended || *times <= observed.prompts_allowed,
                "{run} was sent to an agent {times} times"
            );
            !observed.ended
        });
    }

    /// What must hold when nothing can happen any more.
    pub(crate) fn check_end(&self) {
        for (run, observed) in &self.runs {
            assert!(observed.ended, "{run} never ended");
        }
        assert!(self.asks.values().all(|(_, ask)| *ask != ObservedAskState::Open), "an ask was left open");
    }
}
