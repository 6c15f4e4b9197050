//! What is open in one turn: what is being said, the asks that wait, the steers that were passed on, and whether the
//! agent was asked to stop. It keeps; the loop in `talk` decides.

use std::collections::VecDeque;
use std::time::Duration;

use agent_client_protocol::{Error, RawJsonRpcId};
use qd_protocol::EventNumber;
use serde_json::Value;
use tokio::time::Instant;

use super::asks::AcpAskOutcome;
use crate::drivers::turn_state::TurnState;
use crate::turn::{DriverSteer, DriverTurn};

/// How often an agent that goes on after its cancel is told again, at most.
const CANCEL_INTERVAL: Duration = Duration::from_millis(250);

/// What is open in one turn.
pub(super) struct AcpTurn<'t> {
    pub(super) state: TurnState<'t, RawJsonRpcId, Result<Value, Error>, AcpAskOutcome>,
    /// The requests whose answers end it: its prompt, and steers that were given as prompts.
    pub(super) open_prompts: Vec<RawJsonRpcId>,
    /// Steers of which the agent has not said what became of them.
    pub(super) pending_steers: Vec<(RawJsonRpcId, EventNumber)>,
    /// Steers that the agent has not asked for yet, where it is the one who asks.
    pub(super) pullable_steers: VecDeque<DriverSteer>,
    /// What was allowed so far, by what it was judged by: an agent that asks and then wishes the same has asked once.
    pub(super) allowed_arguments: Vec<String>,
    /// Whether a tool was refused.
    pub(super) tool_refused: bool,
    pub(super) cancelled: bool,
    /// When the agent was last told to stop.
    last_cancel_sent: Option<Instant>,
    /// Whether the agent has been told since it was seen to have begun.
    cancelled_since_start: bool,
}

impl<'t> AcpTurn<'t> {
    /// Nothing is open yet but its prompt.
    pub(super) fn new(turn: &'t DriverTurn<'t>, prompt: RawJsonRpcId) -> Self {
        Self {
            state: TurnState::new(turn),
            open_prompts: vec![prompt],
            pending_steers: Vec::new(),
            pullable_steers: VecDeque::new(),
            allowed_arguments: Vec::new(),
            tool_refused: false,
            cancelled: false,
            last_cancel_sent: None,
            cancelled_since_start: false,
        }
    }

    /// The agent is told to stop.
    pub(super) fn mark_cancelled(&mut self) {
        self.cancelled = true;
        self.last_cancel_sent = Some(Instant::now());
    }

    /// Whether an agent that was told to stop, and has just done something of a turn, is to be told again: it may have
    /// missed a cancel that reached it before its turn had begun, and that this turn has begun shows only now.
    pub(super) fn should_cancel_again(&mut self) -> bool {
        let Some(told) = self.last_cancel_sent else { return false };
        if self.cancelled_since_start && told.elapsed() < CANCEL_INTERVAL {
            return false;
        }
        self.cancelled_since_start = true;
        self.last_cancel_sent = Some(Instant::now());
        true
    }
}
