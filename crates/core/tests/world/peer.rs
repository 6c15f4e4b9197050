//! The other end of the link: an agent that may speak, ask, obey, ignore, end or linger, in any order that a real one
//! could. It applies each command once, as a worker does.

use std::collections::BTreeSet;

use qd_core::session::{Effect, Link};
use qd_protocol::event::{AskKind, Processes};
use qd_protocol::link::{AskRequest, Outcome, Said, Stop, Up, UpNumber};
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, Number, RunId};

use super::{Budget, ask_id};

/// What an agent can do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Say {
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
    /// A word after the end.
    Late,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum Way {
    #[default]
    Absent,
    Starting,
    Ready,
    Lost,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Peer {
    way: Way,
    /// The turn it is in.
    turn: Option<Turn>,
    /// The turn it was in last.
    last: Option<RunId>,
    /// The last command that it applied.
    applied: Number,
    said: u64,
    /// How many asks it has made.
    pub(crate) asked: u8,
    /// Runs that it was ever given: none may come twice.
    given: BTreeSet<RunId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Turn {
    run: RunId,
    told_to_stop: bool,
    steers: Vec<Number>,
    /// The ask it waits for, and whether the answer has come.
    waits: Option<(AskId, bool)>,
}

impl Peer {
    pub(crate) fn link(&self) -> Link {
        match self.way {
            Way::Absent => Link::Absent,
            Way::Starting => Link::Starting,
            Way::Ready => Link::Ready { steers: true },
            Way::Lost => Link::Lost,
        }
    }

    pub(crate) fn is_there(&self) -> bool {
        matches!(self.way, Way::Starting | Way::Ready)
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.way == Way::Ready
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.way == Way::Lost
    }

    pub(crate) fn launch(&mut self) {
        if self.way == Way::Absent {
            self.way = Way::Starting;
        }
    }

    pub(crate) fn gone(&mut self) {
        self.way = Way::Absent;
        self.turn = None;
    }

    pub(crate) fn broke(&mut self) {
        self.way = Way::Lost;
    }

    /// The connection is back; gives the last command applied.
    pub(crate) fn mended(&mut self) -> Number {
        self.way = Way::Ready;
        self.applied
    }

    pub(crate) fn applied(&self) -> Number {
        self.applied
    }

    /// A command. One that comes while the connection is broken is lost; one that was applied is dropped.
    pub(crate) fn told(&mut self, effect: Effect) {
        assert_ne!(self.way, Way::Absent, "{effect:?} to nobody");
        let number = match &effect {
            Effect::Prompt { number, .. }
            | Effect::Steer { number, .. }
            | Effect::Cancel { number, .. }
            | Effect::Kill { number, .. }
            | Effect::Answer { number, .. } => *number,
            _ => return,
        };
        if self.way == Way::Lost || number <= self.applied {
            return;
        }
        self.applied = number;
        match effect {
            Effect::Prompt { run, .. } => {
                assert!(self.given.insert(run.clone()), "{run} was given to an agent twice");
                assert!(self.turn.is_none(), "{run} was given to an agent that is busy with {:?}", self.turn);
                self.turn = Some(Turn { run, told_to_stop: false, steers: Vec::new(), waits: None });
            }
            Effect::Steer { run, .. } => {
                if let Some(turn) = self.turn.as_mut().filter(|turn| turn.run == run) {
                    turn.steers.push(number);
                }
            }
            Effect::Cancel { run, .. } | Effect::Kill { run, .. } => {
                if let Some(turn) = self.turn.as_mut().filter(|turn| turn.run == run) {
                    turn.told_to_stop = true;
                }
            }
            Effect::Answer { ask, .. } => {
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

    /// What it could do now.
    pub(crate) fn can_say(&self, left: &Budget) -> Vec<Say> {
        let mut can = Vec::new();
        match (&self.way, &self.turn) {
            (Way::Starting, _) => can.push(Say::Ready),
            (Way::Ready, Some(turn)) => {
                let waits = matches!(turn.waits, Some((_, false)));
                if left.says > 0 {
                    can.push(Say::Text);
                }
                if left.asks > 0 && turn.waits.is_none() {
                    can.push(Say::Ask);
                }
                if matches!(turn.waits, Some((_, true))) {
                    can.push(Say::Delivered);
                }
                if !turn.steers.is_empty() && !waits {
                    can.extend([Say::TakeSteer, Say::MissSteer]);
                }
                if !waits {
                    can.push(Say::Done);
                }
                if turn.told_to_stop {
                    can.push(Say::Stopped);
                }
            }
            _ => {}
        }
        if left.late > 0 && self.last.is_some() && self.way == Way::Ready {
            can.push(Say::Late);
        }
        can
    }

    /// Says it.
    pub(crate) fn say(&mut self, say: Say, left: &mut Budget) -> Vec<(UpNumber, Up)> {
        let turn = self.turn.as_mut();
        let up = match (say, turn) {
            (Say::Ready, _) => {
                self.way = Way::Ready;
                Up::Ready { agent_session_id: None, steers: true }
            }
            (Say::Late, _) => {
                left.late -= 1;
                let run = self.last.clone().expect("only offered with one");
                Up::Said { run, what: Said::Text { text: "late".to_owned() } }
            }
            (Say::Text, Some(turn)) => {
                left.says -= 1;
                Up::Said { run: turn.run.clone(), what: Said::Text { text: "x".to_owned() } }
            }
            (Say::Ask, Some(turn)) => {
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
                };
                Up::Ask { run: turn.run.clone(), ask }
            }
            (Say::Delivered, Some(turn)) => {
                let (ask, _) = turn.waits.take().expect("only offered with one");
                Up::AskDelivered { ask }
            }
            (Say::TakeSteer, Some(turn)) => Up::SteerTaken { steer: turn.steers.remove(0) },
            (Say::MissSteer, Some(turn)) => Up::SteerMissed { steer: turn.steers.remove(0) },
            (Say::Done | Say::Stopped, Some(turn)) => {
                let run = turn.run.clone();
                self.turn = None;
                self.last = Some(run.clone());
                let stop = if say == Say::Done { Stop::EndTurn } else { Stop::Cancelled };
                let processes = Processes::default();
                Up::Terminal { run, outcome: Outcome { stop, text: None, error: None, processes } }
            }
            (_, None) => unreachable!("only offered in a turn"),
        };
        self.said += 1;
        vec![(UpNumber(self.said), up)]
    }

    pub(crate) fn each_number(&self, visit: &mut dyn FnMut(Number)) {
        for steer in self.turn.iter().flat_map(|turn| &turn.steers) {
            visit(*steer);
        }
    }

    /// The same with numbers replaced by their order.
    pub(crate) fn canonical(&self, rank: impl Fn(Number) -> Number) -> Self {
        let mut peer = self.clone();
        for steer in peer.turn.iter_mut().flat_map(|turn| &mut turn.steers) {
            *steer = rank(*steer);
        }
        peer.applied = Number(0);
        peer.said = 0;
        peer
    }
}
