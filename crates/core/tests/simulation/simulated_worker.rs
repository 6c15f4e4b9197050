//! The other end of the link: a worker with an agent that may speak, ask, obey, ignore, end or linger, in any order
//! that a real one could. It applies each command once, keeps what it says while nobody hears it, and rests or ends
//! when it is told to.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use qd_core::session::{AgentAvailability, SessionEffect};
use qd_protocol::event::AskKind;
use qd_protocol::link::{
    AgentExitReason, AgentUpdate, AskRequest, TurnOutcome, TurnStopReason, TurnUpdate, UpdateNumber,
};
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, EventNumber, RunId, WorkerId};

use super::{ActionBudget, ask_id};

/// What an agent can do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WorkerAction {
    Ready,
    Text,
    Ask,
    Delivered,
    TakeSteer,
    MissSteer,
    /// Ends its turn well, even if it was told to stop.
    Done,
    /// Ends its turn because it was told to.
    Stopped,
    /// Ends its turn to wait for sessions below.
    Suspend,
    /// A word after the end.
    Late,
    /// It was told to rest, and does.
    Rested,
    /// Its worker was told to end, and has.
    Ended,
}

/// What the worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
enum SimulatedAgentState {
    /// There is no worker.
    #[default]
    None,
    /// An agent that is not ready.
    Starting,
    /// An agent.
    Ready,
    /// An agent that is being stopped.
    Tiring,
    /// No agent.
    Resting,
    /// All that there is, is being ended.
    Ending,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct SimulatedWorker {
    seat: SimulatedAgentState,
    /// The worker that it is.
    worker: Option<WorkerId>,
    /// Whether nobody hears it: the connection is broken, or there is nobody at the other end.
    cut: bool,
    /// Whether it has been connected before.
    attached: bool,
    /// What it said while nobody heard it.
    spool: Vec<(UpdateNumber, AgentUpdate)>,
    /// The turn it is in.
    turn: Option<SimulatedTurn>,
    /// The turn it was in last.
    last: Option<RunId>,
    /// The last command that it applied.
    applied: EventNumber,
    said: u64,
    /// How many asks it has made.
    pub(crate) asked: u8,
    /// How often each run was given to an agent.
    pub(crate) given: BTreeMap<RunId, u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SimulatedTurn {
    run: RunId,
    told_to_stop: bool,
    steers: Vec<EventNumber>,
    /// The ask it waits for, and whether the answer has come.
    waits: Option<(AskId, bool)>,
}

impl Hash for SimulatedWorker {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self { seat, worker, cut, attached, spool, turn, last, applied, said, asked, given } = self;
        (seat, worker, cut, attached, turn, last, applied, said, asked, given).hash(state);
        for (number, up) in spool {
            (number, format!("{up:?}")).hash(state);
        }
    }
}

impl SimulatedWorker {
    /// What a daemon knows of it.
    pub(crate) fn link(&self) -> AgentAvailability {
        match self.seat {
            _ if self.cut => AgentAvailability::Lost,
            SimulatedAgentState::None => AgentAvailability::Absent,
            SimulatedAgentState::Starting | SimulatedAgentState::Tiring | SimulatedAgentState::Ending => {
                AgentAvailability::Starting
            }
            SimulatedAgentState::Ready => AgentAvailability::Ready { steerable: true },
            SimulatedAgentState::Resting => AgentAvailability::WorkerOnly,
        }
    }

    pub(crate) fn is_there(&self) -> bool {
        self.seat != SimulatedAgentState::None
    }

    pub(crate) fn can_die(&self) -> bool {
        !self.cut && matches!(self.seat, SimulatedAgentState::Starting | SimulatedAgentState::Ready)
    }

    pub(crate) fn can_rest(&self) -> bool {
        !self.cut && self.seat == SimulatedAgentState::Ready && self.turn.is_none()
    }

    pub(crate) fn can_break(&self) -> bool {
        !self.cut && self.attached
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut
    }

    pub(crate) fn is_in_turn(&self) -> bool {
        !self.cut && self.turn.is_some()
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.seat == SimulatedAgentState::Ending
    }

    pub(crate) fn launch(&mut self, worker: WorkerId, fresh: bool) {
        if fresh {
            assert_eq!(self.seat, SimulatedAgentState::None, "a second worker beside {:?}", self.worker);
            let Self { last, said, asked, given, .. } = std::mem::take(self);
            let worker = Some(worker);
            *self = Self {
                seat: SimulatedAgentState::Starting,
                worker,
                last,
                said,
                asked,
                given,
                ..Self::default()
            };
        } else {
            assert_eq!(self.worker.as_ref(), Some(&worker), "an agent in a worker that is not there");
            assert_eq!(self.seat, SimulatedAgentState::Resting, "a second agent in one worker");
            self.seat = SimulatedAgentState::Starting;
        }
    }

    /// The worker is told to end. While nobody is connected that does not reach it.
    pub(crate) fn end(&mut self) {
        assert!(self.cut || self.is_there(), "nobody is told to end");
        if !self.cut {
            self.seat = SimulatedAgentState::Ending;
        }
    }

    /// The agent is told to rest.
    pub(crate) fn tire(&mut self) {
        self.seat = SimulatedAgentState::Tiring;
    }

    /// The worker is no more, and nobody knows yet. Its spool is left.
    pub(crate) fn vanish(&mut self) {
        self.seat = SimulatedAgentState::None;
        self.worker = None;
        self.attached = false;
        self.turn = None;
        self.cut = true;
    }

    /// Whether all that it left has been heard; from then on everybody knows that it is no more.
    pub(crate) fn buried(&mut self) -> bool {
        let buried = self.seat == SimulatedAgentState::None && self.spool.is_empty();
        self.cut &= !buried;
        buried
    }

    /// The agent ends by itself, and its worker with it.
    pub(crate) fn die(&mut self, gone: AgentExitReason) -> Option<(UpdateNumber, AgentUpdate)> {
        self.vanish();
        self.cut = false;
        self.speak(AgentUpdate::Gone(gone))
    }

    pub(crate) fn broke(&mut self) {
        self.cut = true;
    }

    /// The daemon died; another one looks for this worker.
    pub(crate) fn bereft(&mut self, worker: Option<&WorkerId>) {
        if worker.is_none() {
            self.vanish();
            self.cut = false;
        } else {
            assert!(
                self.worker.is_none() || self.worker.as_ref() == worker,
                "the journal names another worker"
            );
            self.cut = true;
        }
    }

    /// The connection is there; gives the last command applied.
    pub(crate) fn attach(&mut self) -> EventNumber {
        self.cut = false;
        self.attached = true;
        self.applied
    }

    /// The next thing that was said while nobody heard it.
    pub(crate) fn unspool(&mut self) -> Option<(UpdateNumber, AgentUpdate)> {
        (!self.spool.is_empty()).then(|| self.spool.remove(0))
    }

    pub(crate) fn is_new(&self) -> bool {
        !self.attached
    }

    pub(crate) fn applied(&self) -> EventNumber {
        self.applied
    }

    /// A command. One that comes while the connection is broken is lost; one that was applied is dropped.
    pub(crate) fn told(&mut self, effect: SessionEffect) {
        let number = match &effect {
            SessionEffect::SendPrompt { number, .. }
            | SessionEffect::SendSteer { number, .. }
            | SessionEffect::CancelTurn { number, .. }
            | SessionEffect::KillTurn { number, .. }
            | SessionEffect::SendAnswer { number, .. } => *number,
            _ => return,
        };
        if self.cut || number <= self.applied {
            return;
        }
        assert!(self.is_there(), "{effect:?} to nobody");
        self.applied = number;
        match effect {
            SessionEffect::SendPrompt { run, .. } => {
                assert_eq!(
                    self.seat,
                    SimulatedAgentState::Ready,
                    "{run} was given to an agent that is not ready"
                );
                assert!(self.turn.is_none(), "{run} was given to an agent that is busy with {:?}", self.turn);
                *self.given.entry(run.clone()).or_default() += 1;
                self.turn = Some(SimulatedTurn { run, told_to_stop: false, steers: Vec::new(), waits: None });
            }
            SessionEffect::SendSteer { run, .. } => {
                if let Some(turn) = self.turn.as_mut().filter(|turn| turn.run == run) {
                    turn.steers.push(number);
                }
            }
            SessionEffect::CancelTurn { run, .. } | SessionEffect::KillTurn { run, .. } => {
                if let Some(turn) = self.turn.as_mut().filter(|turn| turn.run == run) {
                    turn.told_to_stop = true;
                }
            }
            SessionEffect::SendAnswer { ask, .. } => {
                if let Some((waits, answered)) = self.turn.as_mut().and_then(|turn| turn.waits.as_mut())
                    && *waits == ask
                {
                    assert!(!*answered, "{ask} was answered twice");
                    *answered = true;
                }
            }
            _ => {}
        }
    }

    /// What it could do now. While nobody hears it, it may still come to the end of its turn.
    pub(crate) fn can_say(&self, left: &ActionBudget) -> Vec<WorkerAction> {
        let mut can = Vec::new();
        match (self.seat, &self.turn) {
            (SimulatedAgentState::Ready, Some(turn)) if self.cut => {
                if !matches!(turn.waits, Some((_, false))) {
                    can.push(WorkerAction::Done);
                }
            }
            _ if self.cut => {}
            (SimulatedAgentState::Starting, _) => can.push(WorkerAction::Ready),
            (SimulatedAgentState::Tiring, _) => can.push(WorkerAction::Rested),
            (SimulatedAgentState::Ending, _) => can.push(WorkerAction::Ended),
            (SimulatedAgentState::Ready, Some(turn)) => {
                let waits = matches!(turn.waits, Some((_, false)));
                if left.says > 0 {
                    can.push(WorkerAction::Text);
                }
                if left.asks > 0 && turn.waits.is_none() {
                    can.push(WorkerAction::Ask);
                }
                if matches!(turn.waits, Some((_, true))) {
                    can.push(WorkerAction::Delivered);
                }
                if !turn.steers.is_empty() && !waits {
                    can.extend([WorkerAction::TakeSteer, WorkerAction::MissSteer]);
                }
                if left.suspends > 0 && !waits {
                    can.push(WorkerAction::Suspend);
                }
                if !waits {
                    can.push(WorkerAction::Done);
                }
                if turn.told_to_stop {
                    can.push(WorkerAction::Stopped);
                }
            }
            (SimulatedAgentState::Ready | SimulatedAgentState::Resting | SimulatedAgentState::None, _) => {}
        }
        if left.late > 0 && self.last.is_some() && self.seat == SimulatedAgentState::Ready && !self.cut {
            can.push(WorkerAction::Late);
        }
        can
    }

    /// Says it; gives what somebody hears of it.
    pub(crate) fn say(
        &mut self,
        say: WorkerAction,
        left: &mut ActionBudget,
    ) -> Option<(UpdateNumber, AgentUpdate)> {
        let turn = self.turn.as_mut();
        let up = match (say, turn) {
            (WorkerAction::Ready, _) => {
                self.seat = SimulatedAgentState::Ready;
                AgentUpdate::Ready { agent_session_id: None, steers: true }
            }
            (WorkerAction::Rested, _) => {
                self.seat = SimulatedAgentState::Resting;
                AgentUpdate::Rested
            }
            (WorkerAction::Ended, _) => {
                return self.die(AgentExitReason::Stopped);
            }
            (WorkerAction::Late, _) => {
                left.late -= 1;
                let run = self.last.clone().expect("only offered with one");
                AgentUpdate::Turn { run, update: TurnUpdate::Text { text: "late".to_owned() } }
            }
            (WorkerAction::Text, Some(turn)) => {
                left.says -= 1;
                AgentUpdate::Turn { run: turn.run.clone(), update: TurnUpdate::Text { text: "x".to_owned() } }
            }
            (WorkerAction::Ask, Some(turn)) => {
                left.asks -= 1;
                self.asked += 1;
                let id = ask_id(self.asked);
                turn.waits = Some((id.clone(), false));
                let ask = AskRequest {
                    id,
                    kind: AskKind::Permission,
                    tool: Some("Demo".to_owned()),
                    input: serde_json::Value::Null,
                    risk: Some(Risk::Medium),
                    prompt: "may I?".to_owned(),
                    options: Vec::new(),
                    implicit: false,
                };
                AgentUpdate::Ask { run: turn.run.clone(), ask }
            }
            (WorkerAction::Delivered, Some(turn)) => {
                let (ask, _) = turn.waits.take().expect("only offered with one");
                AgentUpdate::AskDelivered { ask }
            }
            (WorkerAction::TakeSteer, Some(turn)) => AgentUpdate::SteerTaken { steer: turn.steers.remove(0) },
            (WorkerAction::MissSteer, Some(turn)) => {
                AgentUpdate::SteerMissed { steer: turn.steers.remove(0) }
            }
            (WorkerAction::Done | WorkerAction::Stopped | WorkerAction::Suspend, Some(turn)) => {
                let run = turn.run.clone();
                self.turn = None;
                self.last = Some(run.clone());
                let stop = match say {
                    WorkerAction::Done => TurnStopReason::EndTurn,
                    WorkerAction::Stopped => TurnStopReason::Cancelled,
                    _ => {
                        left.suspends -= 1;
                        TurnStopReason::Suspended
                    }
                };
                AgentUpdate::Terminal { run, outcome: TurnOutcome::of(stop) }
            }
            (_, None) => unreachable!("only offered in a turn"),
        };
        self.speak(up)
    }

    fn speak(&mut self, up: AgentUpdate) -> Option<(UpdateNumber, AgentUpdate)> {
        self.said += 1;
        let said = (UpdateNumber(self.said), up);
        if self.cut {
            self.spool.push(said);
            return None;
        }
        Some(said)
    }

    pub(crate) fn each_number(&self, visit: &mut dyn FnMut(EventNumber)) {
        visit(self.applied);
        for steer in self.turn.iter().flat_map(|turn| &turn.steers) {
            visit(*steer);
        }
    }

    /// The same with numbers replaced by their order, and without what it will never use again.
    pub(crate) fn canonical(&self, rank: impl Fn(EventNumber) -> EventNumber, left: &ActionBudget) -> Self {
        let mut peer = self.clone();
        if left.late == 0 {
            peer.last = None;
        }
        for steer in peer.turn.iter_mut().flat_map(|turn| &mut turn.steers) {
            *steer = rank(*steer);
        }
        peer.applied = rank(peer.applied);
        peer.worker = None;
        peer.said = 0;
        for (number, _) in &mut peer.spool {
            *number = UpdateNumber(0);
        }
        peer
    }
}
