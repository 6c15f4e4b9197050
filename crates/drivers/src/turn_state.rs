//! The updates and asks of one turn, for drivers that need them in order: one batch of updates is sent at a time, and
//! an ask waits until the batch is sent. This module only keeps the state; a driver's loop decides.

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_link::LinkClosed;
use qd_protocol::AskId;
use qd_protocol::link::TurnUpdate;

use super::emit::{EmitFuture, emit_all};
use crate::turn::DriverTurn;

/// An ask that waits for its answer.
type AskFuture<'t, S> = BoxFuture<'t, Result<S, LinkClosed>>;

/// The updates and asks of one turn. `I` is the agent's id of an ask, `C` the reply to an ask that is cancelled, and
/// `S` the result of an ask.
pub(crate) struct TurnState<'t, I, C, S> {
    pub(crate) turn: &'t DriverTurn<'t>,
    /// Updates that are being sent. The agent is not read meanwhile: this is how a slow journal slows it down.
    pub(crate) emitting: Option<EmitFuture<'t>>,
    /// An ask that is opened when those updates have been sent.
    queued_ask: Option<(OpenAsk<I, C>, AskFuture<'t, S>)>,
    pub(crate) pending_answers: FuturesUnordered<AskFuture<'t, (I, S)>>,
    open_asks: Vec<OpenAsk<I, C>>,
}

/// An ask that the agent waits for.
pub(crate) struct OpenAsk<I, C> {
    pub(crate) id: I,
    pub(crate) ask_ids: Vec<AskId>,
    /// The reply to the agent if its turn is cancelled.
    pub(crate) cancel_answer: C,
}

impl<'t, I, C, S> TurnState<'t, I, C, S>
where
    I: Clone + PartialEq + Send + 't,
    S: 't,
{
    pub(crate) fn new(turn: &'t DriverTurn<'t>) -> Self {
        Self {
            turn,
            emitting: None,
            queued_ask: None,
            pending_answers: FuturesUnordered::new(),
            open_asks: Vec::new(),
        }
    }

    /// Starts to send updates.
    pub(crate) fn emit(&mut self, updates: Vec<TurnUpdate>) {
        if !updates.is_empty() {
            self.emitting = Some(Box::pin(emit_all(self.turn, updates)));
        }
    }

    /// Called when `emitting` has been sent; opens the queued ask.
    pub(crate) fn finish_emitting(&mut self) {
        self.emitting = None;
        if let Some((open, future)) = self.queued_ask.take() {
            self.ask(open, future);
        }
    }

    /// Opens an ask, after the updates that are being sent.
    pub(crate) fn ask(&mut self, open: OpenAsk<I, C>, future: AskFuture<'t, S>) {
        if self.emitting.is_some() {
            self.queued_ask = Some((open, future));
            return;
        }
        let id = open.id.clone();
        self.open_asks.push(open);
        self.pending_answers.push(Box::pin(async move { future.await.map(|settled| (id, settled)) }));
    }

    /// Whether the ask is open, or queued behind the updates that are being sent.
    pub(crate) fn is_ask_open(&self, id: &I) -> bool {
        let queued = self.queued_ask.iter().map(|(open, _)| open);
        self.open_asks.iter().chain(queued).any(|open| open.id == *id)
    }

    /// Closes an ask, and returns it if it was open.
    pub(crate) fn close_ask(&mut self, id: &I) -> Option<OpenAsk<I, C>> {
        let at = self.open_asks.iter().position(|open| open.id == *id)?;
        Some(self.open_asks.swap_remove(at))
    }

    /// Closes all asks, and returns those that were open or queued.
    pub(crate) fn close_all_asks(&mut self) -> Vec<OpenAsk<I, C>> {
        self.pending_answers.clear();
        let queued = self.queued_ask.take().map(|(open, _)| open);
        self.open_asks.drain(..).chain(queued).collect()
    }
}
