//! A conversation with a remote agent, which is a name that the agent gives it. One loop puts all that can happen in a
//! turn into one order; it stops listening while its session takes nothing more. Between turns nothing is open.

use std::sync::Arc;

use qd_link::LinkClosed;
use qd_protocol::link::TurnOutcome;

use super::client::A2aClient;
use super::event_source::wait_pending;
use super::messages;
use super::turn::A2aTurn;
use crate::drivers::emit::wait_for_emit;
use crate::turn::{DriverPrompt, DriverTurn};

/// A conversation.
pub(super) struct A2aConversation {
    client: Arc<A2aClient>,
    /// The agent's name for it; none before its first answer.
    context: Option<String>,
}

impl A2aConversation {
    /// Goes on with the conversation of this name, or begins one.
    pub(super) fn new(client: Arc<A2aClient>, context: Option<String>) -> Self {
        Self { client, context }
    }

    /// The agent's name for it.
    pub(super) fn context_id(&self) -> Option<&str> {
        self.context.as_deref()
    }

    /// One turn, from its prompt until the agent's task is over.
    pub(super) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<TurnOutcome, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(TurnOutcome::cancelled());
        }
        let parts = messages::prompt_parts(self.client.card.interface.version, prompt);
        let mut round = A2aTurn::new(turn, Arc::clone(&self.client), self.context.clone());
        round.send_to_agent(parts);
        let outcome = run_turn(&mut round).await?;
        self.context = round.context_id();
        Ok(outcome)
    }
}

async fn run_turn(round: &mut A2aTurn<'_>) -> Result<TurnOutcome, LinkClosed> {
    loop {
        if let Some(outcome) = round.advance() {
            return Ok(outcome);
        }
        let listening = round.emitting.is_none();
        tokio::select! {
            // A cancel first; what was heard before what comes next.
            biased;
            () = round.turn.cancelled(), if !round.cancelled => round.cancel(),
            told = wait_for_emit(&mut round.emitting) => {
                told?;
                round.emitting = None;
            }
            answer = wait_pending(&mut round.open_ask) => round.handle_answer(answer?),
            stopped = wait_pending(&mut round.cancel_request) => round.cancel_result = Some(stopped),
            looked = wait_pending(&mut round.poll), if listening => round.handle_poll(looked),
            came = round.source.next(), if listening => round.handle_source_event(came),
        }
    }
}
