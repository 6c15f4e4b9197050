//! The state of one turn: pending output, open asks, steers passed on to the agent, and whether it was asked to stop.
//! This module keeps the state and decides when to cancel again; the loop in `conversation` does everything else.

use std::collections::VecDeque;
use std::time::Duration;

use agent_client_protocol::v1::schema::PromptRequest;
use agent_client_protocol::{Error, RawJsonRpcId};
use qd_protocol::EventNumber;
use serde_json::Value;
use tokio::time::Instant;

use super::asks::AcpAskOutcome;
use crate::turn::{DriverSteer, DriverTurn};
use crate::turn_state::TurnState;

/// The shortest interval between two cancels sent to an agent that keeps working.
const CANCEL_INTERVAL: Duration = Duration::from_millis(250);

/// The state of one turn.
pub(super) struct AcpTurn<'t> {
    pub(super) state: TurnState<'t, RawJsonRpcId, Result<Value, Error>, AcpAskOutcome>,
    /// Unanswered prompt requests: the turn's prompt, and steers sent as prompts. The turn ends when all are answered.
    pub(super) open_prompts: Vec<RawJsonRpcId>,
    /// Steers sent as requests that the agent has not answered.
    pub(super) pending_steers: Vec<(RawJsonRpcId, EventNumber)>,
    /// Steers that wait until the agent pulls them.
    pub(super) pullable_steers: VecDeque<DriverSteer>,
    /// The main arguments of everything allowed in this turn. An agent that asks for permission and then requests the
    /// same operation from the client is not asked about twice.
    pub(super) allowed_arguments: Vec<String>,
    pub(super) tool_refused: bool,
    /// The prompt, if it is to be sent again should the agent apply the stop of an earlier run to it.
    pub(super) prompt_to_repeat: Option<PromptRequest>,
    pub(super) cancelled: bool,
    last_cancel_sent: Option<Instant>,
    /// Whether a cancel was sent after the first sign that the agent has begun this turn.
    cancelled_since_start: bool,
}

impl<'t> AcpTurn<'t> {
    /// A turn in which only the prompt is open.
    pub(super) fn new(turn: &'t DriverTurn<'t>, prompt: RawJsonRpcId) -> Self {
        Self {
            state: TurnState::new(turn),
            open_prompts: vec![prompt],
            pending_steers: Vec::new(),
            pullable_steers: VecDeque::new(),
            allowed_arguments: Vec::new(),
            tool_refused: false,
            prompt_to_repeat: None,
            cancelled: false,
            last_cancel_sent: None,
            cancelled_since_start: false,
        }
    }

    /// Records that a cancel was sent.
    pub(super) fn mark_cancelled(&mut self) {
        self.cancelled = true;
        self.last_cancel_sent = Some(Instant::now());
    }

    /// Whether to send another cancel to an agent that has just shown activity after a cancel. The first cancel may
    /// have reached the agent before its turn had begun and been ignored; only activity shows that the turn has begun.
    pub(super) fn should_cancel_again(&mut self) -> bool {
        let Some(last_sent) = self.last_cancel_sent else { return false };
        if self.cancelled_since_start && last_sent.elapsed() < CANCEL_INTERVAL {
            return false;
        }
        self.cancelled_since_start = true;
        self.last_cancel_sent = Some(Instant::now());
        true
    }
}
