//! What is said and asked in one turn, for drivers that keep to one order of it: one thing is said at a time, and an ask
//! comes after what is being said. It keeps; a driver's loop decides.

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_link::LinkClosed;
use qd_protocol::AskId;
use qd_protocol::link::TurnUpdate;

use super::emit::{EmitFuture, emit_all};
use crate::turn::DriverTurn;

/// An ask that waits, and what came of it.
type AskFuture<'t, S> = BoxFuture<'t, Result<S, LinkClosed>>;

/// What is said and asked in one turn. The agent knows its asks by an `I`, an ask that it drops is answered with a `C`,
/// and what comes of one is an `S`.
pub(crate) struct TurnState<'t, I, C, S> {
    pub(crate) turn: &'t DriverTurn<'t>,
    /// What is being said; the agent is not listened to meanwhile, which is how a slow journal slows it down.
    pub(crate) emitting: Option<EmitFuture<'t>>,
    /// Asked when that has been said.
    queued_ask: Option<(OpenAsk<I, C>, AskFuture<'t, S>)>,
    pub(crate) pending_answers: FuturesUnordered<AskFuture<'t, (I, S)>>,
    open_asks: Vec<OpenAsk<I, C>>,
}

/// An ask that the agent waits for.
pub(crate) struct OpenAsk<I, C> {
    pub(crate) id: I,
    pub(crate) ask_ids: Vec<AskId>,
    /// What it is told if its turn is cancelled.
    pub(crate) cancel_answer: C,
}

impl<'t, I, C, S> TurnState<'t, I, C, S>
where
    I: Clone + PartialEq + Send + 't,
    S: 't,
{
    /// Nothing is said or asked yet.
    pub(crate) fn new(turn: &'t DriverTurn<'t>) -> Self {
        Self {
            turn,
            emitting: None,
            queued_ask: None,
            pending_answers: FuturesUnordered::new(),
            open_asks: Vec::new(),
        }
    }

    /// Says something.
    pub(crate) fn emit(&mut self, said: Vec<TurnUpdate>) {
        if !said.is_empty() {
            self.emitting = Some(Box::pin(emit_all(self.turn, said)));
        }
    }

    /// It has been said.
    pub(crate) fn finish_emitting(&mut self) {
        self.emitting = None;
        if let Some((open, asked)) = self.queued_ask.take() {
            self.ask(open, asked);
        }
    }

    /// Asks, after what is being said.
    pub(crate) fn ask(&mut self, open: OpenAsk<I, C>, asked: AskFuture<'t, S>) {
        if self.emitting.is_some() {
            self.queued_ask = Some((open, asked));
            return;
        }
        let id = open.id.clone();
        self.open_asks.push(open);
        self.pending_answers.push(Box::pin(async move { asked.await.map(|settled| (id, settled)) }));
    }

    /// Whether it is open, or will be when that has been said which is being said.
    pub(crate) fn is_ask_open(&self, id: &I) -> bool {
        let next = self.queued_ask.iter().map(|(open, _)| open);
        self.open_asks.iter().chain(next).any(|open| open.id == *id)
    }

    /// The ask is no longer open; gives it if it was.
    pub(crate) fn close_ask(&mut self, id: &I) -> Option<OpenAsk<I, C>> {
        let at = self.open_asks.iter().position(|open| open.id == *id)?;
        Some(self.open_asks.swap_remove(at))
    }

    /// No ask is open any more; gives those that were.
    pub(crate) fn close_all_asks(&mut self) -> Vec<OpenAsk<I, C>> {
        self.pending_answers.clear();
        let next = self.queued_ask.take().map(|(open, _)| open);
        self.open_asks.drain(..).chain(next).collect()
    }
}
