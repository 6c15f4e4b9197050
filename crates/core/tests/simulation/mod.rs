//! A small world around the session machine: clients with a few things to do, a worker with a will of its own, sessions
//! below, and an observer who checks every event against the contract. The walk tries every order in it, the
//! properties random ones.

#![allow(dead_code, clippy::allow_attributes, reason = "each suite uses its own part of this")]

mod action;
mod canonical;
mod children;
mod observer;
pub(crate) mod seeded;
mod simulated_worker;

use std::collections::VecDeque;

use qd_core::session::{
    PromptSubmission, SessionCommand, SessionContext, SessionEffect, SessionEvent, SessionInput,
    SessionPhase, SessionState, SessionStep, SettingsUpdate, deadline, evolve, step,
};
use qd_protocol::event::{
    AskAnswer, EventBody, FinishReason, FleetMembership, PermissionDecision, RunError, RunStopCause,
    SessionCreated, SessionLimits,
};
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::policy::{Policy, PolicyVerdict};
use qd_protocol::{AskId, Millis, RunId, SessionId, WorkspaceId};

pub(crate) use action::{ActionBudget, SimulatedAction};
use children::SimulatedChildren;
use observer::ContractObserver;
use simulated_worker::{SimulatedWorker, WorkerAction};

/// The whole of it. Two worlds that are equal have the same future.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SimulatedSession {
    pub(crate) state: SessionState,
    peer: SimulatedWorker,
    children: SimulatedChildren,
    observer: ContractObserver,
    pub(crate) left: ActionBudget,
    /// What the session was created with.
    restarts: Option<u32>,
    now: Millis,
    halted: bool,
    room: bool,
    /// Whether the daemon dies after what it commits next.
    dying: bool,
    prompts: u8,
    /// Ends that its fleet is to be told.
    pub(crate) told: Vec<RunId>,
    /// All events, where somebody wants them; the walk leaves it empty.
    pub(crate) journal: Vec<SessionEvent>,
    pub(crate) keeps_journal: bool,
}

fn run_id(number: u8) -> RunId {
    RunId::parse(&format!("r{number}")).unwrap()
}

fn ask_id(number: u8) -> AskId {
    AskId::parse(&format!("a{number}")).unwrap()
}

fn session(restarts: Option<u32>, fleet: Option<FleetMembership>) -> SessionState {
    let id = SessionId::parse("s").unwrap();
    // What a crash counts for is tested where time is; here it counts for ever.
    let limits = SessionLimits { restarts, restart_window_s: Some(1e9), ..SessionLimits::default() };
    let created = SessionCreated { agent: "script".to_owned(), limits, fleet, ..SessionCreated::default() };
    SessionState::new(id, WorkspaceId::parse("w").unwrap(), created, Millis(0))
}

fn prompt(run: RunId) -> PromptSubmission {
    PromptSubmission {
        prompt: run.as_str().into(),
        fingerprint: run.to_string(),
        run,
        attachments: Vec::new(),
    }
}

impl SimulatedSession {
    /// A session whose agent may crash as often as the budget lets it.
    pub(crate) fn new(left: ActionBudget) -> Self {
        Self::with_restarts(left, None)
    }

    /// A session whose agent is started again so often after a crash.
    pub(crate) fn with_restarts(left: ActionBudget, restarts: Option<u32>) -> Self {
        Self::of(left, restarts, None)
    }

    /// A session of a fleet. It keeps its journal, in which the fleet looks things up.
    pub(crate) fn in_fleet(left: ActionBudget, fleet: FleetMembership) -> Self {
        Self { keeps_journal: true, ..Self::of(left, None, Some(fleet)) }
    }

    fn of(left: ActionBudget, restarts: Option<u32>, fleet: Option<FleetMembership>) -> Self {
        Self {
            state: session(restarts, fleet),
            peer: SimulatedWorker::default(),
            children: SimulatedChildren::default(),
            observer: ContractObserver::default(),
            left,
            restarts,
            now: Millis(0),
            halted: false,
            room: true,
            dying: false,
            prompts: 0,
            told: Vec::new(),
            journal: Vec::new(),
            keeps_journal: false,
        }
    }

    /// What can happen next. The last of it is what the others do when the clients are done.
    pub(crate) fn actions(&self) -> Vec<SimulatedAction> {
        let Self { left, peer, .. } = self;
        let mut actions = Vec::new();
        let mut can = |yes: bool, action: SimulatedAction| {
            if yes {
                actions.push(action);
            }
        };
        can(left.prompts > 0, SimulatedAction::Prompt);
        can(left.cancels > 0, SimulatedAction::Cancel);
        can(left.single_cancels > 0 && self.prompts > 0, SimulatedAction::CancelNewest);
        can(left.single_cancels > 0 && self.active_is_older(), SimulatedAction::CancelActive);
        can(left.steers > 0, SimulatedAction::Steer);
        can(left.answers > 0 && peer.asked > 0, SimulatedAction::Allow);
        can(left.answers > 0 && peer.asked > 0, SimulatedAction::Deny);
        can(left.removes > 0 && self.prompts > 0, SimulatedAction::Remove);
        can(left.clears > 0, SimulatedAction::Clear);
        can(left.halts > 0 && !self.halted, SimulatedAction::Halt);
        can(self.halted, SimulatedAction::Unhalt);
        can(left.fills > 0 && self.room, SimulatedAction::Fill);
        can(!self.room, SimulatedAction::Free);
        can(left.policies > 0, SimulatedAction::Policy);
        can(left.forgives > 0, SimulatedAction::Forgive);
        can(left.closes > 0, SimulatedAction::Close);
        can(left.spawns > 0 && peer.is_in_turn(), SimulatedAction::Spawn);
        can(left.deaths > 0 && peer.can_die(), SimulatedAction::Die);
        can(left.vanishes > 0 && peer.is_there(), SimulatedAction::Vanish);
        can(left.rests > 0 && peer.can_rest(), SimulatedAction::Rest);
        can(left.breaks > 0 && peer.can_break(), SimulatedAction::Break);
        can(left.crashes > 0 && !self.dying, SimulatedAction::Crash);
        for child in self.children.busy() {
            can(true, SimulatedAction::ChildEnds(child));
        }
        can(self.children.closing, SimulatedAction::BelowClosed);
        can(peer.is_cut(), SimulatedAction::Mend);
        can(deadline(&self.state, self.peer.link()).is_some(), SimulatedAction::Tick);
        for say in peer.can_say(left) {
            can(true, SimulatedAction::Agent(say));
        }
        actions
    }

    fn active_is_older(&self) -> bool {
        self.state.active_run().is_some_and(|(run, _)| run.id != run_id(self.prompts))
    }

    fn world(&self) -> SessionContext {
        let Self { now, halted, room, .. } = *self;
        SessionContext { now, halted, over_budget: false, slot_available: room, agent: self.peer.link() }
    }

    /// Does one thing, checks everything that must hold, and lets the effects reach the others.
    pub(crate) fn act(&mut self, action: SimulatedAction) {
        match action {
            SimulatedAction::Halt => {
                self.left.halts -= 1;
                self.halted = true;
            }
            SimulatedAction::Unhalt => {
                self.halted = false;
                self.input(SessionInput::Wake);
            }
            SimulatedAction::Fill => {
                self.left.fills -= 1;
                self.room = false;
            }
            SimulatedAction::Free => {
                self.room = true;
                self.input(SessionInput::Wake);
            }
            SimulatedAction::Crash => {
                self.left.crashes -= 1;
                self.dying = true;
            }
            SimulatedAction::Rest => {
                self.left.rests -= 1;
                self.peer.tire();
            }
            SimulatedAction::Break => {
                self.left.breaks -= 1;
                self.peer.broke();
                self.input(SessionInput::LinkLost);
            }
            SimulatedAction::Vanish => {
                self.left.vanishes -= 1;
                let noticed = !self.peer.is_cut();
                self.peer.vanish();
                if noticed {
                    self.find_out();
                }
            }
            SimulatedAction::Mend if self.peer.is_there() => self.attach(true),
            SimulatedAction::Mend => self.find_out(),
            SimulatedAction::Die => {
                self.left.deaths -= 1;
                let error = RunError::new("agent_exited", "it died");
                if let Some(last_word) = self.peer.die(AgentExitReason::Failed(error)) {
                    self.heard(last_word);
                }
            }
            SimulatedAction::Tick => {
                self.now =
                    self.now.max(deadline(&self.state, self.peer.link()).expect("only offered with one"));
                self.input(SessionInput::Tick);
            }
            SimulatedAction::Agent(say) => {
                if say == WorkerAction::Ready && self.peer.is_new() {
                    self.attach(false);
                }
                if self.peer.can_say(&self.left).contains(&say)
                    && let Some(said) = self.peer.say(say, &mut self.left)
                {
                    self.heard(said);
                }
            }
            SimulatedAction::ChildEnds(child) => {
                let result = self.children.end(child);
                match self.dying {
                    // The child's end is journalled, and nobody lives to tell it.
                    true => self.restart(),
                    false => {
                        self.input(SessionInput::Command(SessionCommand::ChildEnded(result.clone())));
                        self.makes_nothing(SessionInput::Command(SessionCommand::ChildEnded(result)));
                    }
                }
            }
            SimulatedAction::BelowClosed => {
                self.children.closing = false;
                self.input(SessionInput::Command(SessionCommand::ChildrenClosed));
            }
            _ => {
                let command = self.command(action);
                self.input(SessionInput::Command(command));
            }
        }
        let waits_for = self.state.suspension().into_iter().flat_map(|suspended| &suspended.waits_for);
        for child in waits_for {
            assert!(self.children.is_busy(child), "a run waits for {child}, which has ended");
        }
    }

    /// A prompt under this name; false if the session takes none.
    pub(crate) fn accept(&mut self, run: RunId) -> bool {
        self.input(SessionInput::Command(SessionCommand::AcceptPrompt(prompt(run.clone()))));
        self.has(&run)
    }

    /// Stops one run.
    pub(crate) fn cancel_run(&mut self, run: RunId) {
        self.input(SessionInput::Command(SessionCommand::Cancel {
            run: Some(run),
            by: RunStopCause::Fleet,
            reason: None,
        }));
    }

    /// Whether it ever had this run.
    pub(crate) fn has(&self, run: &RunId) -> bool {
        self.events_of(run).any(|body| matches!(body, EventBody::RunAccepted(_)))
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&self, run: &RunId) -> Option<FinishReason> {
        self.events_of(run).find_map(|body| match body {
            EventBody::RunFinished(finished) => Some(finished.finish_reason),
            _ => None,
        })
    }

    fn events_of(&self, run: &RunId) -> impl Iterator<Item = &EventBody> {
        self.journal.iter().filter(|event| event.run.as_ref() == Some(run)).map(|event| &event.body)
    }

    /// How often the daemon has died.
    pub(crate) fn restarts(&self) -> usize {
        usize::from(self.observer.restarts)
    }

    /// What a client sends.
    fn command(&mut self, action: SimulatedAction) -> SessionCommand {
        let cancel = |run| SessionCommand::Cancel { run, by: RunStopCause::User, reason: None };
        match action {
            SimulatedAction::Prompt => {
                self.left.prompts -= 1;
                self.prompts += 1;
                SessionCommand::AcceptPrompt(prompt(run_id(self.prompts)))
            }
            SimulatedAction::Cancel => {
                self.left.cancels -= 1;
                cancel(None)
            }
            SimulatedAction::CancelNewest => {
                self.left.single_cancels -= 1;
                cancel(Some(run_id(self.prompts)))
            }
            SimulatedAction::CancelActive => {
                self.left.single_cancels -= 1;
                cancel(self.state.active_run().map(|(run, _)| run.id.clone()))
            }
            SimulatedAction::Steer => {
                self.left.steers -= 1;
                SessionCommand::Steer { text: "left".into() }
            }
            SimulatedAction::Allow | SimulatedAction::Deny => {
                self.left.answers -= 1;
                let decision = if action == SimulatedAction::Allow {
                    PermissionDecision::AllowOnce
                } else {
                    PermissionDecision::Deny
                };
                let answer = AskAnswer { decision: Some(decision), ..AskAnswer::default() };
                SessionCommand::Answer { ask: ask_id(self.peer.asked), answer }
            }
            SimulatedAction::Remove => {
                self.left.removes -= 1;
                SessionCommand::RemoveQueued { run: run_id(self.prompts) }
            }
            SimulatedAction::Clear => {
                self.left.clears -= 1;
                SessionCommand::ClearQueue
            }
            SimulatedAction::Policy => {
                self.left.policies -= 1;
                let policy = Some(Policy::Always(PolicyVerdict::Allow));
                SessionCommand::UpdateSettings(SettingsUpdate { policy, ..SettingsUpdate::default() })
            }
            SimulatedAction::Forgive => {
                self.left.forgives -= 1;
                let limits = &self.state.settings.limits;
                let restarts = limits.restarts.map(|restarts| restarts + 1);
                let limits = Some(SessionLimits { restarts, ..limits.clone() });
                SessionCommand::UpdateSettings(SettingsUpdate { limits, ..SettingsUpdate::default() })
            }
            SimulatedAction::Close => {
                self.left.closes -= 1;
                SessionCommand::Close { purge: false }
            }
            SimulatedAction::Spawn => {
                self.left.spawns -= 1;
                SessionCommand::AddChild { child: self.children.spawn() }
            }
            _ => unreachable!("{action:?} is no client's"),
        }
    }

    /// The worker is there: it is told what it missed, and tells what was missed of it.
    fn attach(&mut self, again: bool) {
        let applied = self.peer.attach();
        self.input(SessionInput::WorkerAttached { applied, reattached: again, run_time_ms: None });
        self.hear_spool();
    }

    /// The worker is no more, and somebody looks: what it left is heard first.
    fn find_out(&mut self) {
        self.hear_spool();
        if self.peer.buried() {
            self.input(SessionInput::WorkerGone(AgentExitReason::Lost));
        }
    }

    fn hear_spool(&mut self) {
        // A daemon that dies in between leaves the rest to the next.
        let starts = self.observer.restarts;
        while self.observer.restarts == starts
            && let Some(said) = self.peer.unspool()
        {
            self.heard(said);
        }
    }

    /// Delivers what the agent said, twice: the second time it must make nothing.
    fn heard(&mut self, (number, up): (UpdateNumber, AgentUpdate)) {
        self.input(SessionInput::LinkMessage(number, up.clone()));
        if number <= self.state.last_link_number {
            self.makes_nothing(SessionInput::LinkMessage(number, up));
        }
        if self.state.worker.is_none() {
            self.makes_nothing(SessionInput::WorkerGone(AgentExitReason::Lost));
        }
    }

    fn makes_nothing(&self, input: SessionInput) {
        let mut state = self.state.clone();
        let again = step(&mut state, input.clone(), &self.world());
        let SessionStep { events, effects, .. } = again;
        assert!(events.is_empty() && effects.is_empty(), "{input:?} made {events:?} and {effects:?}");
        assert_eq!(self.state, state);
    }

    /// Takes in what happened, and what comes of that, in order.
    fn input(&mut self, input: SessionInput) {
        let mut inbox = VecDeque::from([input]);
        while let Some(input) = inbox.pop_front() {
            let effects = self.judge(input);
            match effects {
                Some(effects) => {
                    for effect in effects {
                        self.carry_out(effect, &mut inbox);
                    }
                }
                None => inbox = VecDeque::from([self.reborn()]),
            }
        }
    }

    /// One step, committed. Gives what is to be done, if there is still somebody to do it.
    fn judge(&mut self, input: SessionInput) -> Option<Vec<SessionEffect>> {
        let before = self.state.clone();
        let world = self.world();
        let decided = step(&mut self.state, input.clone(), &world);
        self.crash_and_rebuild(before.clone(), &decided.events);
        self.observer.see(&before, &input, &decided, &self.state, &world);
        for event in &decided.events {
            if let EventBody::RunResumed(resumed) = &event.body {
                let busy = resumed.children.iter().any(|child| self.children.is_busy(&child.session_id));
                assert!(!busy, "resumed while a session that it waits for is busy");
            }
        }
        let commits = !decided.events.is_empty();
        if self.keeps_journal {
            self.journal.extend(decided.events);
        }
        (!self.dying || !commits).then_some(decided.effects)
    }

    /// The daemon dies and another one is started.
    pub(crate) fn restart(&mut self) {
        let wake = self.reborn();
        self.input(wake);
    }

    fn reborn(&mut self) -> SessionInput {
        self.dying = false;
        self.observer.restarts += 1;
        self.children.closing = false;
        self.peer.bereft(self.state.worker.as_ref());
        SessionInput::Wake
    }

    /// The state after a crash is the state before it, by the journal alone.
    fn crash_and_rebuild(&self, before: SessionState, events: &[SessionEvent]) {
        let mut rebuilt = before;
        for event in events {
            evolve(&mut rebuilt, event);
        }
        assert_eq!(rebuilt, self.state, "replay gives another state");
    }

    /// The same through bytes: a snapshot, and events as the journal stores them, give the same state byte for byte.
    pub(crate) fn check_bytes(&self, events: &[SessionEvent]) {
        let new = serde_json::to_vec(&session(self.restarts, self.state.settings.fleet.clone())).unwrap();
        let mut rebuilt: SessionState = serde_json::from_slice(&new).unwrap();
        for event in events {
            let data = event.body.encode().unwrap();
            let body = EventBody::decode(event.body.kind(), &data).unwrap().unwrap();
            assert_eq!(body, event.body, "an event reads back as it was written");
            evolve(&mut rebuilt, &SessionEvent { body, ..event.clone() });
        }
        assert_eq!(serde_json::to_vec(&rebuilt).unwrap(), serde_json::to_vec(&self.state).unwrap());
        let snapshot: SessionState =
            serde_json::from_slice(&serde_json::to_vec(&self.state).unwrap()).unwrap();
        assert_eq!(snapshot, self.state, "a snapshot reads back as it was written");
    }

    fn carry_out(&mut self, effect: SessionEffect, inbox: &mut VecDeque<SessionInput>) {
        let ended = |child| SessionInput::Command(SessionCommand::ChildEnded(child));
        match effect {
            SessionEffect::LaunchAgent { worker, new_worker: fresh } => self.peer.launch(worker, fresh),
            SessionEffect::StopAgent => self.peer.end(),
            SessionEffect::SendPrompt { .. }
            | SessionEffect::SendSteer { .. }
            | SessionEffect::CancelTurn { .. }
            | SessionEffect::KillTurn { .. }
            | SessionEffect::SendAnswer { .. } => {
                self.peer.told(effect);
                self.observer.check_given(&mut self.peer.given);
            }
            SessionEffect::QueryChildren { children } => {
                inbox.extend(self.children.ended(&children).into_iter().map(ended));
            }
            SessionEffect::CancelChildren { number } => {
                inbox.extend(self.children.end_all().into_iter().map(ended));
                inbox.push_back(SessionInput::Command(SessionCommand::ChildrenCancelled { number }));
            }
            SessionEffect::CloseChildren { .. } => {
                inbox.extend(self.children.end_all().into_iter().map(ended));
                self.children.closing = true;
            }
            SessionEffect::NotifyFleet { run } => self.told.push(run),
            SessionEffect::NotifyParent => panic!("nothing is above"),
            SessionEffect::CheckBudget | SessionEffect::Purge => {}
        }
    }

    /// What must hold when nothing can happen any more: nobody was forgotten.
    pub(crate) fn check_end(&self) {
        assert!(self.state.runs.is_empty(), "runs left over: {:?}", self.state.runs);
        assert!(matches!(self.state.phase(), SessionPhase::Idle | SessionPhase::Closed));
        assert_eq!(self.state.closing.is_some(), self.state.closed, "a close was forgotten");
        self.observer.check_end();
    }
}
