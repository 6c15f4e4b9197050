//! A conversation with a remote agent, identified by the agent's context id. One loop puts everything that can happen
//! in a turn into one order. It stops reading while the session cannot take more updates. Between turns nothing is
//! open.

use std::sync::Arc;

use qd_link::LinkClosed;
use qd_protocol::link::TurnOutcome;

use super::client::A2aClient;
use super::event_source::wait_pending;
use super::messages;
use super::turn::A2aTurn;
use crate::emit::wait_for_emit;
use crate::turn::{DriverPrompt, DriverTurn};

/// A conversation with one remote agent.
pub(super) struct A2aConversation {
    client: Arc<A2aClient>,
    /// The agent's context id; `None` before its first response.
    context: Option<String>,
}

impl A2aConversation {
    /// Resumes the conversation with this context id, or starts a new one.
    pub(super) fn new(client: Arc<A2aClient>, context: Option<String>) -> Self {
        Self { client, context }
    }

    /// The agent's id for this conversation.
    pub(super) fn context_id(&self) -> Option<&str> {
        self.context.as_deref()
    }

    /// Runs one turn, from the prompt until the agent's task is over.
    pub(super) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<TurnOutcome, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(TurnOutcome::cancelled());
        }
        let parts = messages::prompt_parts(self.client.card.interface.version, prompt);
        let mut open_turn = A2aTurn::new(turn, Arc::clone(&self.client), self.context.clone());
        open_turn.send_to_agent(parts);
        let outcome = run_turn(&mut open_turn).await?;
        self.context = open_turn.context_id();
        Ok(outcome)
    }
}

async fn run_turn(open_turn: &mut A2aTurn<'_>) -> Result<TurnOutcome, LinkClosed> {
    loop {
        if let Some(outcome) = open_turn.advance() {
            return Ok(outcome);
        }
        let listening = open_turn.emitting.is_none();
        tokio::select! {
            // A cancel comes first, and earlier updates are sent before the next event is read.
            biased;
            () = open_turn.turn.cancelled(), if !open_turn.cancelled => open_turn.cancel(),
            sent = wait_for_emit(&mut open_turn.emitting) => {
                sent?;
                open_turn.emitting = None;
            }
            answer = wait_pending(&mut open_turn.open_ask) => open_turn.handle_answer(answer?),
            result = wait_pending(&mut open_turn.cancel_request) => open_turn.cancel_result = Some(result),
            task = wait_pending(&mut open_turn.poll), if listening => open_turn.handle_poll(task),
            event = open_turn.source.next(), if listening => open_turn.handle_source_event(event),
        }
    }
}
