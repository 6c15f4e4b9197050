//! A small world around the session machine: clients with a few things to do, an agent with a will of its own, and an
//! observer who checks every event against the contract. The walk tries every order in it, the properties random
//! ones.

#![allow(dead_code, clippy::allow_attributes, reason = "each suite uses its own part of this")]

mod observer;
mod peer;

use qd_core::session::{
    Accept, Command, Effect, Input, Link, Phase, Recorded, Reply, State, Step, Update, World, deadline,
    evolve, step,
};
use qd_protocol::event::{Answer, Decision, RunError, SessionCreated, StopCause};
use qd_protocol::link::{Gone, Up, UpNumber};
use qd_protocol::policy::{Policy, Verdict};
use qd_protocol::{AskId, Millis, Number, RunId, SessionId, WorkspaceId};

pub(crate) use observer::Observer;
pub(crate) use peer::{Peer, Say};

/// Everything that somebody can do in the small world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Action {
    /// The next prompt.
    Prompt,
    /// Cancel everything.
    Cancel,
    /// Cancel the newest run alone.
    CancelNewest,
    /// Steer.
    Steer,
    /// Answer the ask, with a yes.
    Allow,
    /// Answer the ask, with a no.
    Deny,
    /// Take the newest run out of the queue.
    Remove,
    /// Empty the queue.
    Clear,
    /// Set the halt.
    Halt,
    /// Lift it.
    Unhalt,
    /// Allow everything from now on.
    Policy,
    /// Close the session.
    Close,
    /// The agent does something.
    Agent(Say),
    /// The agent's process dies.
    Die,
    /// The agent's machine is lost.
    Vanish,
    /// The connection breaks.
    Break,
    /// It is mended.
    Mend,
    /// The next deadline passes.
    Tick,
}

/// How often each thing may be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Budget {
    pub(crate) prompts: u8,
    pub(crate) cancels: u8,
    pub(crate) single_cancels: u8,
    pub(crate) steers: u8,
    pub(crate) answers: u8,
    pub(crate) removes: u8,
    pub(crate) clears: u8,
    pub(crate) halts: u8,
    pub(crate) policies: u8,
    pub(crate) closes: u8,
    pub(crate) deaths: u8,
    pub(crate) vanishes: u8,
    pub(crate) breaks: u8,
    pub(crate) late: u8,
    pub(crate) asks: u8,
    pub(crate) says: u8,
}

impl Budget {
    /// Nobody does anything.
    pub(crate) const NOTHING: Self = Self {
        prompts: 0,
        cancels: 0,
        single_cancels: 0,
        steers: 0,
        answers: 0,
        removes: 0,
        clears: 0,
        halts: 0,
        policies: 0,
        closes: 0,
        deaths: 0,
        vanishes: 0,
        breaks: 0,
        late: 0,
        asks: 0,
        says: 0,
    };
}

/// The whole of it. Two worlds that are equal have the same future.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Small {
    pub(crate) state: State,
    pub(crate) peer: Peer,
    pub(crate) observer: Observer,
    pub(crate) left: Budget,
    pub(crate) now: Millis,
    pub(crate) halted: bool,
    pub(crate) prompts: u8,
    /// All events, where somebody wants them; the walk leaves it empty.
    pub(crate) journal: Vec<Recorded>,
    pub(crate) keeps_journal: bool,
}

pub(crate) fn run_id(number: u8) -> RunId {
    RunId::parse(&format!("r{number}")).unwrap()
}

pub(crate) fn ask_id(number: u8) -> AskId {
    AskId::parse(&format!("a{number}")).unwrap()
}

pub(crate) fn session() -> State {
    let id = SessionId::parse("s").unwrap();
    let created = SessionCreated { agent: "script".to_owned(), ..SessionCreated::default() };
    State::new(id, WorkspaceId::parse("w").unwrap(), created, Millis(0))
}

pub(crate) fn prompt(run: RunId) -> Accept {
    Accept { prompt: run.as_str().into(), fingerprint: run.to_string(), run, attachments: Vec::new() }
}

impl Small {
    pub(crate) fn new(left: Budget) -> Self {
        Self {
            state: session(),
            peer: Peer::default(),
            observer: Observer::default(),
            left,
            now: Millis(0),
            halted: false,
            prompts: 0,
            journal: Vec::new(),
            keeps_journal: false,
        }
    }

    /// What can happen next.
    pub(crate) fn actions(&self) -> Vec<Action> {
        let left = &self.left;
        let mut actions = Vec::new();
        let mut can = |yes: bool, action: Action| {
            if yes {
                actions.push(action);
            }
        };
        can(left.prompts > 0, Action::Prompt);
        can(left.cancels > 0, Action::Cancel);
        can(left.single_cancels > 0 && self.prompts > 0, Action::CancelNewest);
        can(left.steers > 0, Action::Steer);
        can(left.answers > 0 && self.peer.asked > 0, Action::Allow);
        can(left.answers > 0 && self.peer.asked > 0, Action::Deny);
        can(left.removes > 0 && self.prompts > 0, Action::Remove);
        can(left.clears > 0, Action::Clear);
        can(left.halts > 0 && !self.halted, Action::Halt);
        can(self.halted, Action::Unhalt);
        can(left.policies > 0, Action::Policy);
        can(left.closes > 0, Action::Close);
        can(left.deaths > 0 && self.peer.is_there(), Action::Die);
        can(left.vanishes > 0 && self.peer.is_there(), Action::Vanish);
        can(left.breaks > 0 && self.peer.is_ready(), Action::Break);
        can(self.peer.is_lost(), Action::Mend);
        can(deadline(&self.state).is_some(), Action::Tick);
        for say in self.peer.can_say(left) {
            actions.push(Action::Agent(say));
        }
        actions
    }

    fn world(&self) -> World {
        World { now: self.now, halted: self.halted, over_budget: false, link: self.peer.link() }
    }

    /// Does one thing, checks everything that must hold, and lets the effects reach the agent.
    pub(crate) fn act(&mut self, action: Action) {
        let input = match action {
            Action::Prompt => {
                self.left.prompts -= 1;
                self.prompts += 1;
                Input::Command(Command::Accept(prompt(run_id(self.prompts))))
            }
            Action::Cancel => {
                self.left.cancels -= 1;
                Input::Command(Command::Cancel { run: None, by: StopCause::User, reason: None })
            }
            Action::CancelNewest => {
                self.left.single_cancels -= 1;
                let run = Some(run_id(self.prompts));
                Input::Command(Command::Cancel { run, by: StopCause::User, reason: None })
            }
            Action::Steer => {
                self.left.steers -= 1;
                Input::Command(Command::Steer { text: "left".into() })
            }
            Action::Allow | Action::Deny => {
                self.left.answers -= 1;
                let decision = if action == Action::Allow { Decision::AllowOnce } else { Decision::Deny };
                let answer = Answer { decision: Some(decision), ..Answer::default() };
                Input::Command(Command::Answer { ask: ask_id(self.peer.asked), answer })
            }
            Action::Remove => {
                self.left.removes -= 1;
                Input::Command(Command::Remove { run: run_id(self.prompts) })
            }
            Action::Clear => {
                self.left.clears -= 1;
                Input::Command(Command::Clear)
            }
            Action::Halt => {
                self.left.halts -= 1;
                self.halted = true;
                return;
            }
            Action::Unhalt => {
                self.halted = false;
                Input::Wake
            }
            Action::Policy => {
                self.left.policies -= 1;
                let policy = Some(Policy::Always(Verdict::Allow));
                Input::Command(Command::Update(Update { policy, ..Update::default() }))
            }
            Action::Close => {
                self.left.closes -= 1;
                Input::Command(Command::Close { purge: false })
            }
            Action::Die => {
                self.left.deaths -= 1;
                self.peer.gone();
                Input::Gone(Gone::Failed(RunError::new("agent_exited", "it died")))
            }
            Action::Vanish => {
                self.left.vanishes -= 1;
                self.peer.gone();
                Input::Gone(Gone::Lost)
            }
            Action::Break => {
                self.left.breaks -= 1;
                self.peer.broke();
                Input::Lost
            }
            Action::Mend => Input::Back { applied: self.peer.mended() },
            Action::Tick => {
                self.now = self.now.max(deadline(&self.state).expect("only offered with one"));
                Input::Tick
            }
            Action::Agent(say) => {
                for (number, up) in self.peer.say(say, &mut self.left) {
                    self.heard(number, up);
                }
                return;
            }
        };
        self.input(input);
    }

    /// Delivers what the agent said, twice: the second time it must make nothing.
    fn heard(&mut self, number: UpNumber, up: Up) {
        self.input(Input::Heard(number, up.clone()));
        let before = self.state.clone();
        if number <= self.state.taken {
            let world = self.world();
            let again = step(&mut self.state, Input::Heard(number, up), &world);
            assert_eq!(again, Step::default(), "a repeat of {number:?} made something");
            assert_eq!(self.state, before);
        }
    }

    fn input(&mut self, input: Input) {
        let before = self.state.clone();
        let world = self.world();
        let decided = step(&mut self.state, input.clone(), &world);
        self.crash_and_rebuild(before.clone(), &decided.events);
        self.observer.see(&before, &input, &decided, &self.state, &world);
        if self.keeps_journal {
            self.journal.extend(decided.events);
        }
        for effect in decided.effects {
            self.carry_out(effect);
        }
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
        let mut rebuilt: State = serde_json::from_slice(&serde_json::to_vec(&session()).unwrap()).unwrap();
        for event in events {
            let data = event.body.encode().unwrap();
            let body = qd_protocol::Body::decode(event.body.kind(), &data).unwrap().unwrap();
            assert_eq!(body, event.body, "an event reads back as it was written");
            evolve(&mut rebuilt, &Recorded { body, ..event.clone() });
        }
        assert_eq!(serde_json::to_vec(&rebuilt).unwrap(), serde_json::to_vec(&self.state).unwrap());
        let snapshot: State = serde_json::from_slice(&serde_json::to_vec(&self.state).unwrap()).unwrap();
        assert_eq!(snapshot, self.state, "a snapshot reads back as it was written");
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Launch => self.peer.launch(),
            Effect::StopAgent => self.peer.gone(),
            Effect::Prompt { .. }
            | Effect::Steer { .. }
            | Effect::Cancel { .. }
            | Effect::Kill { .. }
            | Effect::Answer { .. } => self.peer.told(effect),
            Effect::CancelBelow { .. } | Effect::CloseBelow { .. } => panic!("nothing is below"),
            Effect::CheckBudget | Effect::Purge => {}
        }
    }

    /// What must hold when nothing can happen any more: nobody was forgotten.
    pub(crate) fn check_end(&self) {
        assert!(self.state.runs.is_empty(), "runs left over: {:?}", self.state.runs);
        assert!(matches!(self.state.phase(), Phase::Idle | Phase::Closed));
        self.observer.check_end();
    }

    /// The same world with numbers and times replaced by their order, so that worlds with the same future are equal.
    pub(crate) fn canonical(&self) -> Vec<u8> {
        let mut state = self.state.clone();
        let mut numbers: Vec<u64> = Vec::new();
        each_number(&mut state, &mut |number| numbers.push(number.0));
        let applied = self.peer.applied();
        numbers.push(applied.0);
        self.peer.each_number(&mut |number| numbers.push(number.0));
        numbers.sort_unstable();
        numbers.dedup();
        let rank = |number: Number| Number(numbers.binary_search(&number.0).map_or(0, |at| at as u64 + 1));
        each_number(&mut state, &mut |number| *number = rank(*number));
        state.number = Number(0);
        state.taken = UpNumber(0);
        state.updated_at = Millis(0);
        let times = |at: &mut Millis| *at = Millis(u64::from(at.0 >= self.now.0));
        for run in &mut state.runs {
            run.accepted_at = Millis(0);
            if let Some(started) = &mut run.started {
                started.at = Millis(0);
                started.waited_ms = 0;
                started.waiting_since.iter_mut().for_each(times);
                for mark in started.stop.iter_mut().chain(&mut started.kill) {
                    mark.at = Millis(0);
                }
            }
        }
        for entry in state.asks.values_mut() {
            if let qd_core::session::AskEntry::Pending(ask) = entry {
                ask.opened_at = Millis(0);
            }
        }
        let peer = self.peer.canonical(rank);
        let rest = format!(
            "{peer:?}{:?}{:?}{}{}{}",
            self.observer,
            self.left,
            self.halted,
            self.prompts,
            rank(applied).0
        );
        let mut key = serde_json::to_vec(&state).unwrap();
        key.extend(rest.into_bytes());
        key
    }
}

fn each_number(state: &mut State, visit: &mut dyn FnMut(&mut Number)) {
    for run in &mut state.runs {
        for steer in &mut run.steers {
            visit(&mut steer.accepted);
            steer.sent.iter_mut().for_each(&mut *visit);
        }
        if let Some(started) = &mut run.started {
            visit(&mut started.number);
            for mark in started.stop.iter_mut().chain(&mut started.kill) {
                visit(&mut mark.number);
            }
        }
    }
    for entry in state.asks.values_mut() {
        if let qd_core::session::AskEntry::Answered { number, .. } = entry {
            visit(number);
        }
    }
}

/// A reply that is not a refusal.
pub(crate) fn went_well(reply: &Option<Reply>) -> bool {
    !matches!(reply, Some(Reply::Refused(_)))
}

pub(crate) fn link_of(ready: bool) -> Link {
    if ready { Link::Ready { steers: true } } else { Link::Absent }
}
