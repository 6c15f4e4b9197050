//! What is open in one turn: what is being said, the asks that wait, the steers that were passed on, and whether the
//! agent was asked to stop. It keeps; the loop in `talk` decides.

use agent_client_protocol::RawJsonRpcId;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_link::Closed;
use qd_protocol::link::Said;
use qd_protocol::{AskId, Number};
use serde_json::Value;

use super::asks::Asked;
use crate::drivers::telling::{Telling, tell};
use crate::turn::Turn;

/// An ask that waits, and what its answer is for.
type Waiting<'a> = BoxFuture<'a, Result<(RawJsonRpcId, Value), Closed>>;

/// What is open in one turn.
pub(super) struct Round<'t> {
    pub(super) turn: &'t Turn<'t>,
    /// The request whose answer ends it.
    pub(super) prompt: RawJsonRpcId,
    /// What is being said; the agent is not listened to meanwhile, which is how a slow journal slows it down.
    pub(super) telling: Option<Telling<'t>>,
    /// Asked when that has been said.
    pub(super) next_ask: Option<(Open, Asked)>,
    pub(super) asks: FuturesUnordered<Waiting<'t>>,
    /// The asks that the agent waits for.
    pub(super) open: Vec<Open>,
    /// Steers of which the agent has not said what became of them.
    pub(super) steers: Vec<(RawJsonRpcId, Number)>,
    pub(super) cancelled: bool,
    /// Whether the cancel was sent before the turn was seen to have begun.
    pub(super) too_early: bool,
    /// Whether the agent has said anything.
    pub(super) begun: bool,
}

/// An ask that the agent waits for.
pub(super) struct Open {
    pub(super) id: RawJsonRpcId,
    pub(super) asks: Vec<AskId>,
    /// What it is told if its turn is cancelled.
    pub(super) cancelled: Value,
}

impl<'t> Round<'t> {
    /// Nothing is open yet but its prompt.
    pub(super) fn new(turn: &'t Turn<'t>, prompt: RawJsonRpcId) -> Self {
        Self {
            turn,
            prompt,
            telling: None,
            next_ask: None,
            asks: FuturesUnordered::new(),
            open: Vec::new(),
            steers: Vec::new(),
            cancelled: false,
            too_early: false,
            begun: false,
        }
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
        self.asks.push(Box::pin(async move { asked.put(turn).await.map(|answer| (id, answer)) }));
    }

    /// The ask is no longer open; gives it if it was.
    pub(super) fn close(&mut self, id: &RawJsonRpcId) -> Option<Open> {
        let at = self.open.iter().position(|open| open.id == *id)?;
        Some(self.open.swap_remove(at))
    }
}
