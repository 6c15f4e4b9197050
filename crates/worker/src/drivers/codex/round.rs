//! What is open in one turn: what is being said, the asks that wait, the steers that were passed on, and how far a
//! cancel has come. It keeps; the loop in `talk` decides.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_link::Closed;
use qd_protocol::link::{Outcome, Said};
use qd_protocol::{AskId, Number, RunId};
use serde_json::Value;
use tokio::time::Instant;

use super::asks::{Asked, Reply};
use super::ends::{Ended, TurnError};
use crate::drivers::telling::{Telling, tell_of};
use crate::turn::Turn;

/// How long the commands of a turn that has stopped may take to say so. They are ended in any case; this only gives
/// them their place before the end of their run.
const SETTLE: Duration = Duration::from_millis(500);

/// An ask that waits, and what its answer is for.
type Waiting<'a> = BoxFuture<'a, Result<(Value, Reply), Closed>>;

/// What is open in one turn.
pub(super) struct Round<'t> {
    pub(super) turn: &'t Turn<'t>,
    /// The request that starts it.
    pub(super) request: u64,
    /// The server's name for it, once it has answered.
    pub(super) id: Option<String>,
    /// Whether the server was seen to work on it: only then can it be steered, or stopped with certainty.
    pub(super) begun: bool,
    /// Whether an item of it was seen.
    pub(super) has_items: bool,
    /// What is being said; the server is not listened to meanwhile, which is how a slow journal slows it down.
    pub(super) telling: Option<Telling<'t>>,
    pub(super) asks: FuturesUnordered<Waiting<'t>>,
    /// The asks that the server waits for.
    pub(super) open: Vec<Open>,
    /// Steers of which the server has not said what became of them.
    pub(super) steers: Vec<(u64, Number)>,
    /// Whether it is to stop. Stays, and is said again at every edge at which the server may have missed it.
    pub(super) cancelled: bool,
    /// The last word of that, and whether the server would not hear it: then its next word is another edge.
    pub(super) interrupt: Option<u64>,
    pub(super) missed: bool,
    /// Why it will fail.
    pub(super) failing: Option<TurnError>,
    /// Turns of our thread that ended before the server had said which one is ours.
    pub(super) ended: Vec<Ended>,
    /// How it ended, while what it left behind is being ended.
    pub(super) outcome: Option<Outcome>,
    /// The request for that, until it is answered, and until when that is waited for.
    pub(super) clean: Option<u64>,
    /// The request for a list of the commands that go on, where not all of them are to be ended.
    pub(super) list: Option<u64>,
    pub(super) settled_by: Option<Instant>,
}

/// An ask that the server waits for.
pub(super) struct Open {
    pub(super) id: Value,
    pub(super) asks: Vec<AskId>,
    /// What it is told if its turn is cancelled.
    pub(super) cancelled: Value,
}

impl<'t> Round<'t> {
    /// Nothing is open yet but its start.
    pub(super) fn new(turn: &'t Turn<'t>, request: u64) -> Self {
        Self {
            turn,
            request,
            id: None,
            begun: false,
            has_items: false,
            telling: None,
            asks: FuturesUnordered::new(),
            open: Vec::new(),
            steers: Vec::new(),
            cancelled: false,
            interrupt: None,
            missed: false,
            failing: None,
            ended: Vec::new(),
            outcome: None,
            clean: None,
            list: None,
            settled_by: None,
        }
    }

    /// Whether this is the turn.
    pub(super) fn is(&self, turn: &str) -> bool {
        self.id.as_deref() == Some(turn)
    }

    /// Whether it can be told something on its way.
    pub(super) fn takes_steers(&self) -> bool {
        self.begun && self.id.is_some() && !self.cancelled && self.outcome.is_none()
    }

    /// Says something, of this run or of an earlier one.
    pub(super) fn tell(&mut self, run: RunId, said: Vec<Said>) {
        if !said.is_empty() {
            self.telling = Some(Box::pin(tell_of(self.turn, run, said)));
        }
    }

    /// Asks.
    pub(super) fn ask(&mut self, open: Open, asked: Asked) {
        let (turn, id) = (self.turn, open.id.clone());
        self.open.push(open);
        self.asks.push(Box::pin(async move { asked.put(turn).await.map(|reply| (id, reply)) }));
    }

    /// The ask is no longer open; gives it if it was.
    pub(super) fn close(&mut self, id: &Value) -> Option<Open> {
        let at = self.open.iter().position(|open| open.id == *id)?;
        Some(self.open.swap_remove(at))
    }

    /// It has ended, and what it left behind is being ended by this request.
    pub(super) fn settle(&mut self, outcome: Outcome, clean: u64) {
        self.outcome = Some(outcome);
        self.clean = Some(clean);
        self.settled_by = Some(Instant::now() + SETTLE);
    }
}

/// Waits until then; for ever if there is no such moment.
pub(super) async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
