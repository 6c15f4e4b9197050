//! A conversation with a remote agent, which is a name that the agent gives it. One loop puts all that can happen in a
//! turn into one order; it stops listening while its session takes nothing more. Between turns nothing is open.

use std::sync::Arc;

use qd_link::Closed;
use qd_protocol::link::Outcome;

use super::open::next;
use super::remote::Remote;
use super::round::Round;
use super::words;
use crate::drivers::telling::said;
use crate::turn::{Prompt, Turn};

/// A conversation.
pub(super) struct Talk {
    remote: Arc<Remote>,
    /// The agent's name for it; none before its first answer.
    context: Option<String>,
}

impl Talk {
    /// Goes on with the conversation of this name, or begins one.
    pub(super) fn new(remote: Arc<Remote>, context: Option<String>) -> Self {
        Self { remote, context }
    }

    /// The agent's name for it.
    pub(super) fn context(&self) -> Option<&str> {
        self.context.as_deref()
    }

    /// One turn, from its prompt until the agent's task is over.
    pub(super) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<Outcome, Closed> {
        if turn.is_cancelled() {
            return Ok(Outcome::cancelled());
        }
        let parts = words::prompt(self.remote.card.interface.version, prompt);
        let mut round = Round::new(turn, Arc::clone(&self.remote), self.context.clone());
        round.tell_agent(parts);
        let outcome = go(&mut round).await?;
        self.context = round.context();
        Ok(outcome)
    }
}

async fn go(round: &mut Round<'_>) -> Result<Outcome, Closed> {
    loop {
        if let Some(outcome) = round.settle() {
            return Ok(outcome);
        }
        let listening = round.telling.is_none();
        tokio::select! {
            // A cancel first; what was heard before what comes next.
            biased;
            () = round.turn.cancelled(), if !round.cancelled => round.cancel(),
            told = said(&mut round.telling) => {
                told?;
                round.telling = None;
            }
            answer = next(&mut round.ask) => round.answered(answer?),
            stopped = next(&mut round.stopping) => round.stopped = Some(stopped),
            looked = next(&mut round.look), if listening => round.looked(looked),
            came = round.source.next(), if listening => round.came(came),
        }
    }
}
