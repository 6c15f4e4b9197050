//! What is open in one turn: what is being said, the asks that wait, the steers that were passed on, and how far a
//! cancel has come. It keeps; the loop in `talk` decides.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_link::LinkClosed;
use qd_protocol::link::{TurnOutcome, TurnUpdate};
use qd_protocol::{AskId, EventNumber, RunId};
use serde_json::Value;
use tokio::time::Instant;

use super::asks::{CodexAsk, CodexAskOutcome};
use super::turn_end::{CodexTurnEnd, CodexTurnError};
use crate::drivers::emit::{EmitFuture, emit_all_for_run};
use crate::turn::DriverTurn;

/// How long the commands of a turn that has stopped may take to say so. They are ended in any case; this only gives
/// them their place before the end of their run.
const SETTLE_LIMIT: Duration = Duration::from_millis(500);

/// An ask that waits, and what its answer is for.
type CodexAskFuture<'a> = BoxFuture<'a, Result<(Value, CodexAskOutcome), LinkClosed>>;

/// What is open in one turn.
pub(super) struct CodexTurn<'t> {
    pub(super) turn: &'t DriverTurn<'t>,
    /// The request that starts it.
    pub(super) start_request: u64,
    /// The server's name for it, once it has answered.
    pub(super) id: Option<String>,
    /// Whether the server was seen to work on it: only then can it be steered, or stopped with certainty.
    pub(super) started: bool,
    /// Whether an item of it was seen.
    pub(super) has_items: bool,
    /// What is being said; the server is not listened to meanwhile, which is how a slow journal slows it down.
    pub(super) emitting: Option<EmitFuture<'t>>,
    pub(super) pending_answers: FuturesUnordered<CodexAskFuture<'t>>,
    /// The asks that the server waits for.
    pub(super) open_asks: Vec<CodexOpenAsk>,
    /// Steers of which the server has not said what became of them.
    pub(super) pending_steers: Vec<(u64, EventNumber)>,
    /// Whether it is to stop. Stays, and is said again at every edge at which the server may have missed it.
    pub(super) cancelled: bool,
    /// The last word of that, and whether the server would not hear it: then its next word is another edge.
    pub(super) interrupt_request: Option<u64>,
    pub(super) interrupt_refused: bool,
    /// Why it will fail.
    pub(super) pending_error: Option<CodexTurnError>,
    /// Turns of our thread that ended before the server had said which one is ours.
    pub(super) early_ends: Vec<CodexTurnEnd>,
    /// How it ended, while what it left behind is being ended.
    pub(super) outcome: Option<TurnOutcome>,
    /// The request for that, until it is answered, and until when that is waited for.
    pub(super) clean_request: Option<u64>,
    /// The request for a list of the commands that go on, where not all of them are to be ended.
    pub(super) list_request: Option<u64>,
    pub(super) settle_deadline: Option<Instant>,
}

/// An ask that the server waits for.
pub(super) struct CodexOpenAsk {
    pub(super) id: Value,
    pub(super) ask_ids: Vec<AskId>,
    /// What it is told if its turn is cancelled.
    pub(super) cancel_answer: Value,
}

impl<'t> CodexTurn<'t> {
    /// Nothing is open yet but its start.
    pub(super) fn new(turn: &'t DriverTurn<'t>, start_request: u64) -> Self {
        Self {
            turn,
            start_request,
            id: None,
            started: false,
            has_items: false,
            emitting: None,
            pending_answers: FuturesUnordered::new(),
            open_asks: Vec::new(),
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

    /// Whether this is the turn.
    pub(super) fn is_turn(&self, turn: &str) -> bool {
        self.id.as_deref() == Some(turn)
    }

    /// Whether it can be told something on its way.
    pub(super) fn takes_steers(&self) -> bool {
        self.started && self.id.is_some() && !self.cancelled && self.outcome.is_none()
    }

    /// Says something, of this run or of an earlier one.
    pub(super) fn emit(&mut self, run: RunId, said: Vec<TurnUpdate>) {
        if !said.is_empty() {
            self.emitting = Some(Box::pin(emit_all_for_run(self.turn, run, said)));
        }
    }

    /// Asks.
    pub(super) fn open_ask(&mut self, open: CodexOpenAsk, asked: CodexAsk) {
        let (turn, id) = (self.turn, open.id.clone());
        self.open_asks.push(open);
        self.pending_answers
            .push(Box::pin(async move { asked.ask_and_wait(turn).await.map(|reply| (id, reply)) }));
    }

    /// The ask is no longer open; gives it if it was.
    pub(super) fn close_ask(&mut self, id: &Value) -> Option<CodexOpenAsk> {
        let at = self.open_asks.iter().position(|open| open.id == *id)?;
        Some(self.open_asks.swap_remove(at))
    }

    /// It has ended, and what it left behind is being ended by this request.
    pub(super) fn end_after_clean(&mut self, outcome: TurnOutcome, clean: u64) {
        self.outcome = Some(outcome);
        self.clean_request = Some(clean);
        self.settle_deadline = Some(Instant::now() + SETTLE_LIMIT);
    }
}

/// Waits until then; for ever if there is no such moment.
pub(super) async fn sleep_until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
