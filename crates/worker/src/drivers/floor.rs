//! What is said and asked in one turn, for drivers that keep to one order of it: one thing is said at a time, and an ask
//! comes after what is being said. It keeps; a driver's loop decides.

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_link::Closed;
use qd_protocol::AskId;
use qd_protocol::link::Said;

use super::telling::{Telling, tell};
use crate::turn::Turn;

/// An ask that waits, and what came of it.
type Waiting<'t, S> = BoxFuture<'t, Result<S, Closed>>;

/// What is said and asked in one turn. The agent knows its asks by an `I`, an ask that it drops is answered with a `C`,
/// and what comes of one is an `S`.
pub(crate) struct Floor<'t, I, C, S> {
    pub(crate) turn: &'t Turn<'t>,
    /// What is being said; the agent is not listened to meanwhile, which is how a slow journal slows it down.
    pub(crate) telling: Option<Telling<'t>>,
    /// Asked when that has been said.
    next: Option<(Open<I, C>, Waiting<'t, S>)>,
    pub(crate) asks: FuturesUnordered<Waiting<'t, (I, S)>>,
    open: Vec<Open<I, C>>,
}

/// An ask that the agent waits for.
pub(crate) struct Open<I, C> {
    pub(crate) id: I,
    pub(crate) asks: Vec<AskId>,
    /// What it is told if its turn is cancelled.
    pub(crate) cancelled: C,
}

impl<'t, I, C, S> Floor<'t, I, C, S>
where
    I: Clone + PartialEq + Send + 't,
    S: 't,
{
    /// Nothing is said or asked yet.
    pub(crate) fn new(turn: &'t Turn<'t>) -> Self {
        Self { turn, telling: None, next: None, asks: FuturesUnordered::new(), open: Vec::new() }
    }

    /// Says something.
    pub(crate) fn tell(&mut self, said: Vec<Said>) {
        if !said.is_empty() {
            self.telling = Some(Box::pin(tell(self.turn, said)));
        }
    }

    /// It has been said.
    pub(crate) fn told(&mut self) {
        self.telling = None;
        if let Some((open, asked)) = self.next.take() {
            self.ask(open, asked);
        }
    }

    /// Asks, after what is being said.
    pub(crate) fn ask(&mut self, open: Open<I, C>, asked: Waiting<'t, S>) {
        if self.telling.is_some() {
            self.next = Some((open, asked));
            return;
        }
        let id = open.id.clone();
        self.open.push(open);
        self.asks.push(Box::pin(async move { asked.await.map(|settled| (id, settled)) }));
    }

    /// Whether it is open, or will be when that has been said which is being said.
    pub(crate) fn is_open(&self, id: &I) -> bool {
        let next = self.next.iter().map(|(open, _)| open);
        self.open.iter().chain(next).any(|open| open.id == *id)
    }

    /// The ask is no longer open; gives it if it was.
    pub(crate) fn close(&mut self, id: &I) -> Option<Open<I, C>> {
        let at = self.open.iter().position(|open| open.id == *id)?;
        Some(self.open.swap_remove(at))
    }

    /// No ask is open any more; gives those that were.
    pub(crate) fn close_all(&mut self) -> Vec<Open<I, C>> {
        self.asks.clear();
        let next = self.next.take().map(|(open, _)| open);
        self.open.drain(..).chain(next).collect()
    }
}
