//! Somebody who reads every event and knows the contract. What it remembers of a run is little, so that the walk can
//! tell when two pasts lead to the same future.

use std::collections::{BTreeMap, BTreeSet};

use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, SessionCommand, SessionContext, SessionEffect,
    SessionEvent, SessionInput, SessionPhase, SessionState, SessionStep,
};
use qd_protocol::event::{
    AskStatus, EventBody, MessageRole, QueueReason, ResolvedBy, RunStopCause, WorkerExitReason,
};
use qd_protocol::limits::{KILL_S, RESTARTS};
use qd_protocol::{AskId, FinishReason, RunId, SessionId, WorkerId};

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct ContractObserver {
    runs: BTreeMap<RunId, ObservedRun>,
    asks: BTreeMap<AskId, (RunId, ObservedAskState)>,
    /// Whether there is a worker.
    worker: bool,
    /// Whether it is to end.
    stopped: bool,
    /// How often one was lost or failed.
    crashes: u32,
    closed: bool,
    /// How often the daemon was started again.
    pub(crate) restarts: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct ObservedRun {
    asked_for: bool,
    started: bool,
    answering: bool,
    answered: bool,
    /// It was told that there is no room for its agent.
    held: bool,
    /// Sessions that it started since it was last resumed.
    children: BTreeSet<SessionId>,
    suspended: bool,
    /// How often it may be given to an agent.
    gives: u8,
    /// A cancel hit it: it must end so.
    hit: bool,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ObservedAskState {
    Open,
    Answered,
    Delivered,
    Over,
}

impl ContractObserver {
    /// Reads one step and checks it against the contract.
    pub(crate) fn see(
        &mut self,
        before: &SessionState,
        input: &SessionInput,
        decided: &SessionStep,
        after: &SessionState,
        world: &SessionContext,
    ) {
        self.see_reply(before, input, decided);
        for event in &decided.events {
            assert!(!self.closed, "nothing comes after session.closed");
            self.event(event, world);
            self.worker_event(event, before, after, world);
        }
        for effect in &decided.effects {
            self.effect(effect, decided, after, world);
        }
        let started = after.runs.iter().filter(|run| run.started.is_some()).count();
        assert!(started <= 1, "one run of a session is active at a time");
        assert_eq!(after.is_busy(), self.runs.values().any(|run| !run.ended), "busy is what it says");
        let suspended = self.runs.values().any(|run| run.suspended);
        assert!(
            !suspended || after.phase() == SessionPhase::Waiting,
            "a suspended run makes its session wait"
        );
        let exits = decided.events.iter().any(|event| matches!(event.body, EventBody::WorkerExited(_)));
        if exits && before.suspension().is_some_and(|wait| !wait.waits_for.is_empty()) {
            assert_eq!(
                before.suspension(),
                after.suspension(),
                "a run that waits loses nothing with its worker"
            );
        }
        self.no_run_waits_for_nothing(after, world, decided);
    }

    fn see_reply(&mut self, before: &SessionState, input: &SessionInput, decided: &SessionStep) {
        let SessionInput::Command(command) = input else { return };
        if let Some(CommandReply::Refused(refusal)) = &decided.reply {
            assert!(decided.events.is_empty(), "a refused command changes nothing");
            let suspended = before.suspension().is_some() && before.closing.is_none();
            if let (SessionCommand::Steer { .. }, true) = (command, suspended) {
                assert_eq!(*refusal, CommandRefusal::NotRunning, "a suspended run has no turn to steer");
            }
            return;
        }
        let hit: Vec<RunId> = match command {
            SessionCommand::Cancel { run: None, .. } | SessionCommand::Close { .. } => {
                before.runs.iter().map(|run| run.id.clone()).collect()
            }
            SessionCommand::Cancel { run: Some(run), .. } => {
                before.run(run).map(|run| run.id.clone()).into_iter().collect()
            }
            _ => Vec::new(),
        };
        let removed = match &decided.reply {
            Some(CommandReply::Removed(runs)) => runs.clone(),
            _ => Vec::new(),
        };
        for run in hit.iter().chain(&removed) {
            self.runs.get_mut(run).expect("accepted before").hit = true;
        }
        if let (SessionCommand::Cancel { .. }, Some(CommandReply::Cancelled(said))) =
            (command, &decided.reply)
        {
            assert_eq!(*said, hit, "the receipt of a cancel");
            let below = |event: &SessionEvent| matches!(&event.body, EventBody::SessionUpdated(change) if change.cancels_below);
            if hit.is_empty() {
                assert!(decided.events.iter().all(below), "a cancel that hits nothing changes nothing here");
            }
        }
        if let (SessionCommand::AddChild { child }, Some((run, _))) = (command, before.current_turn()) {
            self.runs.get_mut(&run.id).expect("accepted before").children.insert(child.clone());
        }
    }

    fn effect(
        &mut self,
        effect: &SessionEffect,
        decided: &SessionStep,
        after: &SessionState,
        world: &SessionContext,
    ) {
        match effect {
            SessionEffect::SendPrompt { number, run } => {
                assert!(self.runs[run].started, "a prompt goes down only after run.started");
                let (_, started) = after.active_run().expect("a prompt is of the active run");
                assert_eq!(*number, started.number, "a prompt bears the number of what gave it away");
            }
            SessionEffect::LaunchAgent { worker, new_worker: fresh } => {
                assert!(world.slot_available && !world.halted && !self.stopped, "an agent that may not live");
                assert_eq!(Some(worker), after.worker.as_ref());
                let new = |event: &SessionEvent| matches!(event.body, EventBody::WorkerStarted(_));
                assert_eq!(*fresh, decided.events.iter().any(new), "a new worker is told of");
            }
            SessionEffect::StopAgent => {
                assert!(self.worker, "nobody is stopped");
                self.stopped = true;
            }
            _ => {}
        }
    }

    /// The next run starts whatever ended the last: whenever one could start, it has, or an agent is on its way, or
    /// it was told why not.
    fn no_run_waits_for_nothing(&self, after: &SessionState, world: &SessionContext, decided: &SessionStep) {
        let Some(run) = after.runs.front() else { return };
        let waits = match &run.started {
            None => true,
            Some(started) => started.suspended.as_ref().is_some_and(|wait| wait.waits_for.is_empty()),
        };
        if waits && !world.halted && !self.stopped {
            let launched =
                decided.effects.iter().any(|effect| matches!(effect, SessionEffect::LaunchAgent { .. }));
            let coming = matches!(world.agent, AgentAvailability::Starting | AgentAvailability::Lost);
            let held = !world.slot_available && self.runs[&run.id].held;
            assert!(launched || coming || held, "a run waits and nothing is on its way");
        }
    }

    fn event(&mut self, event: &SessionEvent, world: &SessionContext) {
        let (run, body) = (event.run.as_ref(), &event.body);
        if let Some(run) = run {
            self.event_of_run(run, body, world);
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
                assert_eq!(delta.after_run.is_some(), run.is_none(), "late words are kept apart")
            }
            _ => {}
        }
    }

    fn event_of_run(&mut self, run: &RunId, body: &EventBody, world: &SessionContext) {
        if let EventBody::RunAccepted(_) = body {
            assert!(
                self.runs.insert(run.clone(), ObservedRun::default()).is_none(),
                "{run} was accepted twice"
            );
            return;
        }
        let active = self.runs.values().filter(|run| run.started && !run.ended).count();
        let seen = self.runs.get_mut(run).expect("run.accepted comes first");
        assert!(!seen.ended, "{} of {run} after its run.finished", body.kind());
        match body {
            EventBody::MessageCreated(message) if message.role == MessageRole::User => {
                assert!(!std::mem::replace(&mut seen.asked_for, true), "one user message");
            }
            EventBody::MessageCreated(_) => {
                assert!(
                    seen.asked_for && !std::mem::replace(&mut seen.answering, true),
                    "one assistant message"
                );
            }
            EventBody::RunQueued(queued) if queued.reason == QueueReason::Capacity => {
                assert!(
                    !world.slot_available
                        && matches!(world.agent, AgentAvailability::Absent | AgentAvailability::WorkerOnly)
                );
                assert!(!std::mem::replace(&mut seen.held, true), "told once that there is no room");
            }
            EventBody::RunStarted(_) => {
                assert!(!std::mem::replace(&mut seen.started, true), "at most one run.started");
                assert_eq!(active, 0, "{run} started while another was active");
                assert!(!world.halted, "nothing starts under a halt");
                assert!(!seen.hit, "a cancelled run does not start");
                assert!(self.worker && !self.stopped, "nothing starts on a worker that is to end");
                (seen.held, seen.gives) = (false, 1);
            }
            EventBody::RunSuspended(suspended) => {
                assert!(seen.started && !std::mem::replace(&mut seen.suspended, true) && !seen.hit);
                let children: BTreeSet<_> = suspended.children.iter().cloned().collect();
                assert_eq!(children, seen.children, "it waits for the sessions that it started");
                assert!(!children.is_empty(), "it waits for nothing");
            }
            EventBody::RunResumed(resumed) => {
                assert!(std::mem::replace(&mut seen.suspended, false), "resumed once");
                let children: BTreeSet<_> =
                    resumed.children.iter().map(|child| child.session_id.clone()).collect();
                assert_eq!(children, std::mem::take(&mut seen.children), "it gets what it waited for");
                assert!(!world.halted, "nothing is resumed under a halt");
                assert!(self.worker && !self.stopped, "nothing is resumed on a worker that is to end");
                (seen.held, seen.gives) = (false, seen.gives + 1);
            }
            EventBody::MessageFinished(finished) => {
                assert!(
                    seen.answering && !std::mem::replace(&mut seen.answered, true),
                    "one message.finished"
                );
                assert_eq!(finished.finish.reason == FinishReason::Cancelled, seen.hit);
            }
            EventBody::RunFinished(finished) => {
                assert!(seen.answered, "message.finished comes before run.finished");
                let reason = finished.finish_reason;
                assert_eq!(reason == FinishReason::Cancelled, seen.hit, "{run} ended as {reason:?}");
                let open = self.asks.values().any(|(of, ask)| of == run && *ask == ObservedAskState::Open);
                assert!(!open, "the asks of {run} are withdrawn before its end");
                // Nothing of it can come any more, so nothing of it need be remembered.
                *seen = ObservedRun { ended: true, ..ObservedRun::default() };
                self.asks
                    .values_mut()
                    .filter(|(of, _)| of == run)
                    .for_each(|(_, ask)| *ask = ObservedAskState::Over);
            }
            EventBody::ErrorRaised(error) => {
                assert!(!seen.hit, "no error comes of a cancel");
                let unstarted = !seen.started || seen.suspended;
                assert!(
                    error.code != "restart_limit" || unstarted,
                    "a turn is not ended by a limit on restarts"
                );
            }
            EventBody::RunCancelRequested(request) => {
                let asked =
                    matches!(request.by, RunStopCause::User | RunStopCause::Close | RunStopCause::Fleet);
                assert_eq!(asked, seen.hit, "a run is asked to stop only if something hit it");
            }
            EventBody::RunKillRequested(_) => assert!(!seen.suspended, "there is no turn to kill"),
            EventBody::TextDelta(_) => assert!(seen.started, "words of a run that has not started"),
            _ => {}
        }
    }

    fn worker_event(
        &mut self,
        event: &SessionEvent,
        before: &SessionState,
        after: &SessionState,
        world: &SessionContext,
    ) {
        let limit = after.settings.limits.restarts.unwrap_or(RESTARTS);
        match &event.body {
            EventBody::WorkerStarted(started) => {
                assert_eq!(started.worker_id, WorkerId::of_session(&after.id, event.number));
                assert!(!std::mem::replace(&mut self.worker, true), "one worker at a time");
                assert!(self.crashes <= limit, "a worker too many");
                assert!(world.slot_available && !world.halted, "a worker that may not live");
                // Should the run have to wait again, that is told again.
                self.runs.values_mut().for_each(|run| run.held = false);
            }
            EventBody::WorkerReattached(_) => assert!(self.worker, "nobody was found again"),
            EventBody::WorkerExited(exited) => {
                assert!(std::mem::replace(&mut self.worker, false), "a worker exits once");
                let crashed = !std::mem::replace(&mut self.stopped, false);
                self.crashes += u32::from(crashed && exited.reason != WorkerExitReason::Stopped);
            }
            EventBody::ErrorRaised(error) if error.code == "restart_limit" => {
                assert!(self.crashes > limit, "a run was ended for crashes that were not")
            }
            EventBody::SessionClosed(_) => {
                assert!(
                    self.runs.values().all(|run| run.ended),
                    "session.closed comes after the last run.finished"
                );
                let patience = before
                    .worker_stopping_since
                    .is_some_and(|since| world.now.since(since) >= (KILL_S + 5) * 1000);
                assert!(!self.worker || patience, "session.closed comes after the worker's end");
                self.closed = true;
            }
            _ => {}
        }
        if event.body.kind().starts_with("worker.") || event.body.kind().starts_with("session.") {
            assert_eq!(event.run, None, "{} belongs to no run", event.body.kind());
        }
    }

    /// No prompt is given to an agent twice, and each resume gives once more. Forgets those that have ended.
    pub(crate) fn check_given(&self, given: &mut BTreeMap<RunId, u8>) {
        given.retain(|run, times| {
            let seen = &self.runs[run];
            assert!(seen.ended || *times <= seen.gives, "{run} was given to an agent {times} times");
            !seen.ended
        });
    }

    /// What must hold when nothing can happen any more.
    pub(crate) fn check_end(&self) {
        for (run, seen) in &self.runs {
            assert!(seen.ended, "{run} never ended");
        }
        assert!(self.asks.values().all(|(_, ask)| *ask != ObservedAskState::Open), "an ask was left open");
    }
}
