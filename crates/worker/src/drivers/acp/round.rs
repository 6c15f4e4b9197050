//! What is open in one turn: what is being said, the asks that wait, the steers that were passed on, and whether the
//! agent was asked to stop. It keeps; the loop in `talk` decides.

use std::collections::VecDeque;
use std::time::Duration;

use agent_client_protocol::{Error, RawJsonRpcId};
use qd_protocol::Number;
use serde_json::Value;
use tokio::time::Instant;

use super::asks::Settled;
use crate::drivers::floor::Floor;
use crate::turn::{Steer, Turn};

/// How often an agent that goes on after its cancel is told again, at most.
const CANCEL_AGAIN: Duration = Duration::from_millis(250);

/// What is open in one turn.
pub(super) struct Round<'t> {
    pub(super) floor: Floor<'t, RawJsonRpcId, Result<Value, Error>, Settled>,
    /// The requests whose answers end it: its prompt, and steers that were given as prompts.
    pub(super) prompts: Vec<RawJsonRpcId>,
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

impl<'t> Round<'t> {
    /// Nothing is open yet but its prompt.
    pub(super) fn new(turn: &'t Turn<'t>, prompt: RawJsonRpcId) -> Self {
        Self {
            floor: Floor::new(turn),
            prompts: vec![prompt],
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
}
