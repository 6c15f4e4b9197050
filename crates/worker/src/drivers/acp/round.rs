//! What is open in one turn: what is being said, the asks that wait, the steers that were passed on, and whether the
//! agent was asked to stop. It keeps; the loop in `talk` decides.

use std::collections::VecDeque;
use std::time::Duration;

use agent_client_protocol::{Error, RawJsonRpcId};
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_link::Closed;
use qd_protocol::link::Said;
use qd_protocol::{AskId, Number};
use serde_json::Value;
use tokio::time::Instant;

use super::asks::{Asked, Settled};
use crate::drivers::telling::{Telling, tell};
use crate::turn::{Steer, Turn};

/// An ask that waits, and what its answer is for.
type Waiting<'a> = BoxFuture<'a, Result<(RawJsonRpcId, Settled), Closed>>;
/// How often an agent that goes on after its cancel is told again, at most.
const CANCEL_AGAIN: Duration = Duration::from_millis(250);

/// What is open in one turn.
pub(super) struct Round<'t> {
    pub(super) turn: &'t Turn<'t>,
    /// The requests whose answers end it: its prompt, and steers that were given as prompts.
    pub(super) prompts: Vec<RawJsonRpcId>,
    /// What is being said; the agent is not listened to meanwhile, which is how a slow journal slows it down.
    pub(super) telling: Option<Telling<'t>>,
    /// Asked when that has been said.
    pub(super) next_ask: Option<(Open, Asked)>,
    pub(super) asks: FuturesUnordered<Waiting<'t>>,
    /// The asks that the agent waits for.
    pub(super) open: Vec<Open>,
    /// Steers of which the agent has not said what became of them.
    pub(super) steers: Vec<(RawJsonRpcId, Number)>,
    /// Steers that the agent has not asked for yet, where it is the one who asks.
    pub(super) pulled: VecDeque<Steer>,
    /// What was allowed so far, by what it was judged by: an agent that asks and then wishes the same has asked once.
    pub(super) granted: Vec<String>,
    /// Whether a tool was refused.
    pub(super) refused: bool,
    pub(super) cancelled: bool,
    /// When the agent was last told to stop.
    told_to_stop: Option<Instant>,
    /// Whether the agent has been told since it was seen to have begun.
    told_in_turn: bool,
}

/// An ask that the agent waits for.
pub(super) struct Open {
    pub(super) id: RawJsonRpcId,
    pub(super) asks: Vec<AskId>,
    /// What it is told if its turn is cancelled.
    pub(super) cancelled: Result<Value, Error>,
}

impl<'t> Round<'t> {
    /// Nothing is open yet but its prompt.
    pub(super) fn new(turn: &'t Turn<'t>, prompt: RawJsonRpcId) -> Self {
        Self {
            turn,
            prompts: vec![prompt],
            telling: None,
            next_ask: None,
            asks: FuturesUnordered::new(),
            open: Vec::new(),
            steers: Vec::new(),
            pulled: VecDeque::new(),
            granted: Vec::new(),
            refused: false,
            cancelled: false,
            told_to_stop: None,
            told_in_turn: false,
        }
    }

    /// The agent is told to stop.
    pub(super) fn stops(&mut self) {
        self.cancelled = true;
        self.told_to_stop = Some(Instant::now());
    }

    /// Whether an agent that was told to stop, and has just done something of a turn, is to be told again: it may have
    /// missed a cancel that reached it before its turn had begun, and that this turn has begun shows only now.
    pub(super) fn stops_again(&mut self) -> bool {
        let Some(told) = self.told_to_stop else { return false };
        if self.told_in_turn && told.elapsed() < CANCEL_AGAIN {
            return false;
        }
        self.told_in_turn = true;
        self.told_to_stop = Some(Instant::now());
        true
    }

    /// Says something.
    pub(super) fn tell(&mut self, said: Vec<Said>) {
        if !said.is_empty() {
            self.telling = Some(Box::pin(tell(self.turn, said)));
        }
    }

    /// It has been said.
    pub(super) fn told(&mut self) {
        self.telling = None;
        if let Some((open, asked)) = self.next_ask.take() {
            self.ask(open, asked);
        }
    }

    /// Asks, after what is being said.
    pub(super) fn ask(&mut self, open: Open, asked: Asked) {
        if self.telling.is_some() {
            self.next_ask = Some((open, asked));
            return;
        }
        let (turn, id) = (self.turn, open.id.clone());
        self.open.push(open);
        self.asks.push(Box::pin(async move { asked.put(turn).await.map(|settled| (id, settled)) }));
    }

    /// The ask is no longer open; gives it if it was.
    pub(super) fn close(&mut self, id: &RawJsonRpcId) -> Option<Open> {
        let at = self.open.iter().position(|open| open.id == *id)?;
        Some(self.open.swap_remove(at))
    }
}
