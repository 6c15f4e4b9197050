//! A small world around the session machine: clients with a few things to do, a worker with a will of its own, sessions
//! below, and an observer who checks every event against the contract. The walk tries every order in it, the
//! properties random ones.

#![allow(dead_code, clippy::allow_attributes, reason = "each suite uses its own part of this")]

mod action;
mod canonical;
mod children;
mod observer;
mod peer;
pub(crate) mod seeded;

use std::collections::VecDeque;

use qd_core::session::{
    Accept, Command, Effect, Input, Phase, Recorded, State, Step, Update, World, deadline, evolve, step,
};
use qd_protocol::event::{
    Answer, Body, Decision, FinishReason, Limits, Membership, RunError, SessionCreated, StopCause,
};
use qd_protocol::link::{Gone, Up, UpNumber};
use qd_protocol::policy::{Policy, Verdict};
use qd_protocol::{AskId, Millis, RunId, SessionId, WorkspaceId};

pub(crate) use action::{Action, Budget};
use children::Children;
use observer::Observer;
use peer::{Peer, Say};

/// The whole of it. Two worlds that are equal have the same future.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Small {
    pub(crate) state: State,
    peer: Peer,
    children: Children,
    observer: Observer,
    pub(crate) left: Budget,
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
    pub(crate) journal: Vec<Recorded>,
    pub(crate) keeps_journal: bool,
}

fn run_id(number: u8) -> RunId {
    RunId::parse(&format!("r{number}")).unwrap()
}

fn ask_id(number: u8) -> AskId {
    AskId::parse(&format!("a{number}")).unwrap()
}

fn session(restarts: Option<u32>, fleet: Option<Membership>) -> State {
    let id = SessionId::parse("s").unwrap();
    // What a crash counts for is tested where time is; here it counts for ever.
    let limits = Limits { restarts, restart_window_s: Some(1e9), ..Limits::default() };
    let created = SessionCreated { agent: "script".to_owned(), limits, fleet, ..SessionCreated::default() };
    State::new(id, WorkspaceId::parse("w").unwrap(), created, Millis(0))
}

fn prompt(run: RunId) -> Accept {
    Accept { prompt: run.as_str().into(), fingerprint: run.to_string(), run, attachments: Vec::new() }
}

impl Small {
    /// A session whose agent may crash as often as the budget lets it.
    pub(crate) fn new(left: Budget) -> Self {
        Self::with_restarts(left, None)
    }

    /// A session whose agent is started again so often after a crash.
    pub(crate) fn with_restarts(left: Budget, restarts: Option<u32>) -> Self {
        Self::of(left, restarts, None)
    }

    /// A session of a fleet. It keeps its journal, in which the fleet looks things up.
    pub(crate) fn in_fleet(left: Budget, fleet: Membership) -> Self {
        Self { keeps_journal: true, ..Self::of(left, None, Some(fleet)) }
    }

    fn of(left: Budget, restarts: Option<u32>, fleet: Option<Membership>) -> Self {
        Self {
            state: session(restarts, fleet),
            peer: Peer::default(),
            children: Children::default(),
            observer: Observer::default(),
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
    pub(crate) fn actions(&self) -> Vec<Action> {
        let Self { left, peer, .. } = self;
        let mut actions = Vec::new();
        let mut can = |yes: bool, action: Action| {
            if yes {
                actions.push(action);
            }
        };
        can(left.prompts > 0, Action::Prompt);
        can(left.cancels > 0, Action::Cancel);
        can(left.single_cancels > 0 && self.prompts > 0, Action::CancelNewest);
        can(left.single_cancels > 0 && self.active_is_older(), Action::CancelActive);
        can(left.steers > 0, Action::Steer);
        can(left.answers > 0 && peer.asked > 0, Action::Allow);
        can(left.answers > 0 && peer.asked > 0, Action::Deny);
        can(left.removes > 0 && self.prompts > 0, Action::Remove);
        can(left.clears > 0, Action::Clear);
        can(left.halts > 0 && !self.halted, Action::Halt);
        can(self.halted, Action::Unhalt);
        can(left.fills > 0 && self.room, Action::Fill);
        can(!self.room, Action::Free);
        can(left.policies > 0, Action::Policy);
        can(left.forgives > 0, Action::Forgive);
        can(left.closes > 0, Action::Close);
        can(left.spawns > 0 && peer.is_in_turn(), Action::Spawn);
        can(left.deaths > 0 && peer.can_die(), Action::Die);
        can(left.vanishes > 0 && peer.is_there(), Action::Vanish);
        can(left.rests > 0 && peer.can_rest(), Action::Rest);
        can(left.breaks > 0 && peer.can_break(), Action::Break);
        can(left.crashes > 0 && !self.dying, Action::Crash);
        for child in self.children.busy() {
            can(true, Action::ChildEnds(child));
        }
        can(self.children.closing, Action::BelowClosed);
        can(peer.is_cut(), Action::Mend);
        can(deadline(&self.state, self.peer.link()).is_some(), Action::Tick);
        for say in peer.can_say(left) {
            can(true, Action::Agent(say));
        }
        actions
    }

    fn active_is_older(&self) -> bool {
        self.state.active().is_some_and(|(run, _)| run.id != run_id(self.prompts))
    }

    fn world(&self) -> World {
        let Self { now, halted, room, .. } = *self;
        World { now, halted, over_budget: false, room, link: self.peer.link() }
    }

    /// Does one thing, checks everything that must hold, and lets the effects reach the others.
    pub(crate) fn act(&mut self, action: Action) {
        match action {
            Action::Halt => {
                self.left.halts -= 1;
                self.halted = true;
            }
            Action::Unhalt => {
                self.halted = false;
                self.input(Input::Wake);
            }
            Action::Fill => {
                self.left.fills -= 1;
                self.room = false;
            }
            Action::Free => {
                self.room = true;
                self.input(Input::Wake);
            }
            Action::Crash => {
                self.left.crashes -= 1;
                self.dying = true;
            }
            Action::Rest => {
                self.left.rests -= 1;
                self.peer.tire();
            }
            Action::Break => {
                self.left.breaks -= 1;
                self.peer.broke();
                self.input(Input::Lost);
            }
            Action::Vanish => {
                self.left.vanishes -= 1;
                let noticed = !self.peer.is_cut();
                self.peer.vanish();
                if noticed {
                    self.find_out();
                }
            }
            Action::Mend if self.peer.is_there() => self.attach(true),
            Action::Mend => self.find_out(),
            Action::Die => {
                self.left.deaths -= 1;
                let error = RunError::new("agent_exited", "it died");
                if let Some(last_word) = self.peer.die(Gone::Failed(error)) {
                    self.heard(last_word);
                }
            }
            Action::Tick => {
                self.now =
                    self.now.max(deadline(&self.state, self.peer.link()).expect("only offered with one"));
                self.input(Input::Tick);
            }
            Action::Agent(say) => {
                if say == Say::Ready && self.peer.is_new() {
                    self.attach(false);
                }
                if self.peer.can_say(&self.left).contains(&say)
                    && let Some(said) = self.peer.say(say, &mut self.left)
                {
                    self.heard(said);
                }
            }
            Action::ChildEnds(child) => {
                let result = self.children.end(child);
                match self.dying {
                    // The child's end is journalled, and nobody lives to tell it.
                    true => self.restart(),
                    false => {
                        self.input(Input::Command(Command::ChildEnded(result.clone())));
                        self.makes_nothing(Input::Command(Command::ChildEnded(result)));
                    }
                }
            }
            Action::BelowClosed => {
                self.children.closing = false;
                self.input(Input::Command(Command::BelowClosed));
            }
            _ => {
                let command = self.command(action);
                self.input(Input::Command(command));
            }
        }
        let waits_for = self.state.suspended().into_iter().flat_map(|suspended| &suspended.waits_for);
        for child in waits_for {
            assert!(self.children.is_busy(child), "a run waits for {child}, which has ended");
        }
    }

    /// A prompt under this name; false if the session takes none.
    pub(crate) fn accept(&mut self, run: RunId) -> bool {
        self.input(Input::Command(Command::Accept(prompt(run.clone()))));
        self.has(&run)
    }

    /// Stops one run.
    pub(crate) fn cancel_run(&mut self, run: RunId) {
        self.input(Input::Command(Command::Cancel { run: Some(run), by: StopCause::Fleet, reason: None }));
    }

    /// Whether it ever had this run.
    pub(crate) fn has(&self, run: &RunId) -> bool {
        self.events_of(run).any(|body| matches!(body, Body::RunAccepted(_)))
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&self, run: &RunId) -> Option<FinishReason> {
        self.events_of(run).find_map(|body| match body {
            Body::RunFinished(finished) => Some(finished.finish_reason),
            _ => None,
        })
    }

    fn events_of(&self, run: &RunId) -> impl Iterator<Item = &Body> {
        self.journal.iter().filter(|event| event.run.as_ref() == Some(run)).map(|event| &event.body)
    }

    /// How often the daemon has died.
    pub(crate) fn restarts(&self) -> usize {
        usize::from(self.observer.restarts)
    }

    /// What a client sends.
    fn command(&mut self, action: Action) -> Command {
        let cancel = |run| Command::Cancel { run, by: StopCause::User, reason: None };
        match action {
            Action::Prompt => {
                self.left.prompts -= 1;
                self.prompts += 1;
                Command::Accept(prompt(run_id(self.prompts)))
            }
            Action::Cancel => {
                self.left.cancels -= 1;
                cancel(None)
            }
            Action::CancelNewest => {
                self.left.single_cancels -= 1;
                cancel(Some(run_id(self.prompts)))
            }
            Action::CancelActive => {
                self.left.single_cancels -= 1;
                cancel(self.state.active().map(|(run, _)| run.id.clone()))
            }
            Action::Steer => {
                self.left.steers -= 1;
                Command::Steer { text: "left".into() }
            }
            Action::Allow | Action::Deny => {
                self.left.answers -= 1;
                let decision = if action == Action::Allow { Decision::AllowOnce } else { Decision::Deny };
                let answer = Answer { decision: Some(decision), ..Answer::default() };
                Command::Answer { ask: ask_id(self.peer.asked), answer }
            }
            Action::Remove => {
                self.left.removes -= 1;
                Command::Remove { run: run_id(self.prompts) }
            }
            Action::Clear => {
                self.left.clears -= 1;
                Command::Clear
            }
            Action::Policy => {
                self.left.policies -= 1;
                let policy = Some(Policy::Always(Verdict::Allow));
                Command::Update(Update { policy, ..Update::default() })
            }
            Action::Forgive => {
                self.left.forgives -= 1;
                let limits = &self.state.settings.limits;
                let restarts = limits.restarts.map(|restarts| restarts + 1);
                let limits = Some(Limits { restarts, ..limits.clone() });
                Command::Update(Update { limits, ..Update::default() })
            }
            Action::Close => {
                self.left.closes -= 1;
                Command::Close { purge: false }
            }
            Action::Spawn => {
                self.left.spawns -= 1;
                Command::AddChild { child: self.children.spawn() }
            }
            _ => unreachable!("{action:?} is no client's"),
        }
    }

    /// The worker is there: it is told what it missed, and tells what was missed of it.
    fn attach(&mut self, again: bool) {
        let applied = self.peer.attach();
        self.input(Input::Attached { applied, again, run_time_ms: None });
        self.hear_spool();
    }

    /// The worker is no more, and somebody looks: what it left is heard first.
    fn find_out(&mut self) {
        self.hear_spool();
        if self.peer.buried() {
            self.input(Input::Gone(Gone::Lost));
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
    fn heard(&mut self, (number, up): (UpNumber, Up)) {
        self.input(Input::Heard(number, up.clone()));
        if number <= self.state.taken {
            self.makes_nothing(Input::Heard(number, up));
        }
        if self.state.worker.is_none() {
            self.makes_nothing(Input::Gone(Gone::Lost));
        }
    }

    fn makes_nothing(&self, input: Input) {
        let mut state = self.state.clone();
        let again = step(&mut state, input.clone(), &self.world());
        let Step { events, effects, .. } = again;
        assert!(events.is_empty() && effects.is_empty(), "{input:?} made {events:?} and {effects:?}");
        assert_eq!(self.state, state);
    }

    /// Takes in what happened, and what comes of that, in order.
    fn input(&mut self, input: Input) {
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
    fn judge(&mut self, input: Input) -> Option<Vec<Effect>> {
        let before = self.state.clone();
        let world = self.world();
        let decided = step(&mut self.state, input.clone(), &world);
        self.crash_and_rebuild(before.clone(), &decided.events);
        self.observer.see(&before, &input, &decided, &self.state, &world);
        for event in &decided.events {
            if let Body::RunResumed(resumed) = &event.body {
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

    fn reborn(&mut self) -> Input {
        self.dying = false;
        self.observer.restarts += 1;
        self.children.closing = false;
        self.peer.bereft(self.state.worker.as_ref());
        Input::Wake
    }

    /// The state after a crash is the state before it, by the journal alone.
    fn crash_and_rebuild(&self, before: State, events: &[Recorded]) {
        let mut rebuilt = before;
        for event in events {
            evolve(&mut rebuilt, event);
        }
        assert_eq!(rebuilt, self.state, "replay gives another state");
    }

    /// The same through bytes: a snapshot, and events as the journal stores them, give the same state byte for byte.
    pub(crate) fn check_bytes(&self, events: &[Recorded]) {
        let new = serde_json::to_vec(&session(self.restarts, self.state.settings.fleet.clone())).unwrap();
        let mut rebuilt: State = serde_json::from_slice(&new).unwrap();
        for event in events {
            let data = event.body.encode().unwrap();
            let body = Body::decode(event.body.kind(), &data).unwrap().unwrap();
            assert_eq!(body, event.body, "an event reads back as it was written");
            evolve(&mut rebuilt, &Recorded { body, ..event.clone() });
        }
        assert_eq!(serde_json::to_vec(&rebuilt).unwrap(), serde_json::to_vec(&self.state).unwrap());
        let snapshot: State = serde_json::from_slice(&serde_json::to_vec(&self.state).unwrap()).unwrap();
        assert_eq!(snapshot, self.state, "a snapshot reads back as it was written");
    }

    fn carry_out(&mut self, effect: Effect, inbox: &mut VecDeque<Input>) {
        let ended = |child| Input::Command(Command::ChildEnded(child));
        match effect {
            Effect::Launch { worker, fresh } => self.peer.launch(worker, fresh),
            Effect::StopAgent => self.peer.end(),
            Effect::Prompt { .. }
            | Effect::Steer { .. }
            | Effect::Cancel { .. }
            | Effect::Kill { .. }
            | Effect::Answer { .. } => {
                self.peer.told(effect);
                self.observer.check_given(&mut self.peer.given);
            }
            Effect::AskChildren { children } => {
                inbox.extend(self.children.ended(&children).into_iter().map(ended));
            }
            Effect::CancelBelow { number } => {
                inbox.extend(self.children.end_all().into_iter().map(ended));
                inbox.push_back(Input::Command(Command::BelowCancelled { number }));
            }
            Effect::CloseBelow { .. } => {
                inbox.extend(self.children.end_all().into_iter().map(ended));
                self.children.closing = true;
            }
            Effect::TellFleet { run } => self.told.push(run),
            Effect::TellParent => panic!("nothing is above"),
            Effect::CheckBudget | Effect::Purge => {}
        }
    }

    /// What must hold when nothing can happen any more: nobody was forgotten.
    pub(crate) fn check_end(&self) {
        assert!(self.state.runs.is_empty(), "runs left over: {:?}", self.state.runs);
        assert!(matches!(self.state.phase(), Phase::Idle | Phase::Closed));
        assert_eq!(self.state.closing.is_some(), self.state.closed, "a close was forgotten");
        self.observer.check_end();
    }
}
