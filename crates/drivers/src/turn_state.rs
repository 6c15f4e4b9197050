//! The updates and asks of one turn, for drivers that need them in order: one batch of updates is sent at a time, and
//! an ask waits until the batch is sent. This module puts what happens into one order; a driver decides what follows.

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_link::LinkClosed;
use qd_protocol::link::TurnUpdate;
use qd_protocol::{AskId, RunId};

use super::emit::{EmitFuture, emit_all_for_run, wait_for_emit};
use crate::turn::{DriverSteer, DriverTurn};

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

/// What happened in a turn. `M` is a message of the agent.
pub(crate) enum TurnEvent<I, S, M> {
    CancelRequested,
    /// Somebody has answered this ask, which is no longer open.
    Answered(I, S),
    Steer(DriverSteer),
    /// `None` if the agent has exited.
    Message(Option<M>),
    /// Nothing that a driver has to act on: updates have been sent, or an ask was answered that is no longer open.
    Nothing,
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
        self.emit_for_run(self.turn.run.clone(), updates);
    }

    /// Starts to send updates of this run or an earlier one.
    pub(crate) fn emit_for_run(&mut self, run: RunId, updates: Vec<TurnUpdate>) {
        if !updates.is_empty() {
            self.emitting = Some(Box::pin(emit_all_for_run(self.turn, run, updates)));
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

    /// Waits for what happens next. A cancel comes first, and earlier updates are sent before the next message is read.
    /// `cancellable`: the turn was not cancelled before. `steerable`: the agent takes a steer now. `message` is the
    /// agent's next message; it must read nothing unless [`Self::is_listening`]. Dropping the wait loses nothing.
    pub(crate) async fn next_event<M>(
        &mut self,
        cancellable: bool,
        steerable: bool,
        message: impl Future<Output = Option<M>>,
    ) -> Result<TurnEvent<I, S, M>, LinkClosed> {
        tokio::select! {
            biased;
            () = self.turn.cancelled(), if cancellable => Ok(TurnEvent::CancelRequested),
            sent = wait_for_emit(&mut self.emitting) => {
                sent?;
                self.finish_emitting();
                Ok(TurnEvent::Nothing)
            }
            Some(resolved) = self.pending_answers.next() => {
                let (id, outcome) = resolved?;
                let was_open = self.close_ask(&id).is_some();
                Ok(if was_open { TurnEvent::Answered(id, outcome) } else { TurnEvent::Nothing })
            }
            steer = self.turn.next_steer(), if steerable => Ok(TurnEvent::Steer(steer)),
            message = message => Ok(TurnEvent::Message(message)),
        }
    }

    /// Whether the agent may be read: no updates are being sent.
    pub(crate) fn is_listening(&self) -> bool {
        self.emitting.is_none()
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
