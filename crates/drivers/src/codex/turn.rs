//! The state of one turn: pending output, open asks, steers passed on to the server, and the progress of a cancel. This
//! module only keeps state; the loop in `conversation` makes the decisions.

use std::time::Duration;

use qd_protocol::EventNumber;
use qd_protocol::link::TurnOutcome;
use serde_json::Value;
use tokio::time::Instant;

use super::asks::CodexAskOutcome;
use super::turn_end::{CodexTurnEnd, CodexTurnError};
use crate::turn::DriverTurn;
use crate::turn_state::TurnState;

/// How long to wait until the commands of a cancelled turn report their end. They are ended in any case; waiting only
/// puts their end before the end of the run.
const SETTLE_LIMIT: Duration = Duration::from_millis(500);

/// The state of one turn.
pub(super) struct CodexTurn<'t> {
    pub(super) state: TurnState<'t, Value, Value, CodexAskOutcome>,
    /// The id of the `turn/start` request.
    pub(super) start_request: u64,
    /// The server's id for the turn, once it has responded.
    pub(super) id: Option<String>,
    /// Whether the server has begun the turn. Only then can it be steered, or interrupted for certain.
    pub(super) started: bool,
    /// Whether an item of the turn was seen.
    pub(super) has_items: bool,
    /// Steers that the server has not answered, with their request ids.
    pub(super) pending_steers: Vec<(u64, EventNumber)>,
    /// Whether the turn is cancelled. Stays set; the interrupt is repeated at every point where the server may have
    /// missed it.
    pub(super) cancelled: bool,
    /// The last interrupt request.
    pub(super) interrupt_request: Option<u64>,
    /// Whether the server refused it. Then it is repeated at the next item.
    pub(super) interrupt_refused: bool,
    /// The error that the server reported before the turn's end.
    pub(super) pending_error: Option<CodexTurnError>,
    /// Turns of our thread that ended before the id of ours was known.
    pub(super) early_ends: Vec<CodexTurnEnd>,
    /// How the turn ended. Kept while leftover commands are being ended.
    pub(super) outcome: Option<TurnOutcome>,
    /// The unanswered request that ends leftover commands.
    pub(super) clean_request: Option<u64>,
    /// The request that lists running commands, sent if some of them are to be kept.
    pub(super) list_request: Option<u64>,
    /// How long to wait for [`Self::clean_request`] and for commands to report their end.
    pub(super) settle_deadline: Option<Instant>,
}

impl<'t> CodexTurn<'t> {
    /// A turn in which only the start request is open.
    pub(super) fn new(turn: &'t DriverTurn<'t>, start_request: u64) -> Self {
        Self {
            state: TurnState::new(turn),
            start_request,
            id: None,
            started: false,
            has_items: false,
            pending_steers: Vec::new(),
            cancelled: false,
            interrupt_request: None,
            interrupt_refused: false,
            pending_error: None,
            early_ends: Vec::new(),
            outcome: None,
            clean_request: None,
            list_request: None,
            settle_deadline: None,
        }
    }

    /// Whether `turn` is this turn's id.
    pub(super) fn is_turn(&self, turn: &str) -> bool {
        self.id.as_deref() == Some(turn)
    }

    /// Whether the turn can be steered now.
    pub(super) fn takes_steers(&self) -> bool {
        self.started && self.id.is_some() && !self.cancelled && self.outcome.is_none()
    }

    /// Records the outcome, while the request `clean` ends leftover commands.
    pub(super) fn end_after_clean(&mut self, outcome: TurnOutcome, clean: u64) {
        self.outcome = Some(outcome);
        self.clean_request = Some(clean);
        self.settle_deadline = Some(Instant::now() + SETTLE_LIMIT);
    }
}

/// Waits until the deadline, or for ever if there is none.
pub(super) async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
