//! The driver for a foreign worker that speaks plain frames (the protocol without a subprotocol): one connection per
//! session, on which one run follows another. There is no process and no keeper. A run lives as long as its connection:
//! dropping the connection cancels the run.
//!
//! Layout, in reading order:
//! - [`PeerWorkerAgent`]: the agent, from its first connection to its last.
//! - `connector`: how the worker is reached, and the messages for when it cannot be.
//! - `turn`: one turn, in one loop.
//! - `event_decoder`: what the worker's events mean; `asks`: its approval requests.

mod asks;
mod connector;
mod event_decoder;
#[cfg(test)]
mod tests;
mod turn;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::{AgentUpdate, TurnOutcome};
use qd_protocol::worker::AgentSpec;
use serde_json::Value;

use self::connector::{PeerConnection, PeerConnector};
use self::turn::{PeerTurn, PeerTurnResult};
use crate::agent_driver::{AgentDriver, AgentStart};
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// The most bytes of a transcript, as JSON, that are kept to restore the conversation: the limit of a suspended run.
const TRANSCRIPT_MAX: usize = INLINE_MAX;

/// A foreign worker.
pub(crate) struct PeerWorkerAgent {
    connector: PeerConnector,
    /// `None` after the connection broke, until the next prompt.
    connection: Option<PeerConnection>,
    /// The conversation as the worker's last terminal had it, if it did. It is sent with the first run on a new
    /// connection; on the same connection the worker remembers it.
    transcript: Vec<Value>,
}

impl PeerWorkerAgent {
    /// Connects within the limit. Nothing is started at the worker before there is a prompt.
    pub(crate) async fn start(start: AgentStart<'_>) -> Result<Self, RunError> {
        let limit = start.time_limit();
        let AgentStart { spec, manifest, .. } = start;
        let failed = |message: String| RunError::new("agent_failed_to_start", message);
        let connector = PeerConnector::from_spec(spec, &manifest).map_err(failed)?;
        let timed_out = || format!("the worker at {connector} did not answer within {} s", limit.as_secs());
        let connection = match tokio::time::timeout(limit, connector.connect()).await {
            Ok(connection) => connection.map_err(failed)?,
            Err(_) => return Err(RunError::new("agent_not_ready", timed_out())),
        };
        Ok(Self { connector, connection: Some(connection), transcript: Vec::new() })
    }

    /// Runs one turn. The turn owns the connection: dropping the future drops the connection, which ends the worker's
    /// run.
    async fn run_turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(DriverTurnEnd::Stopped(TurnOutcome::cancelled()));
        }
        let mut messages = prompt.messages.clone();
        let connection = match self.connection.take().and_then(if_still_open) {
            Some(connection) => connection,
            None => {
                let dialled = tokio::select! {
                    biased;
                    () = turn.cancelled() => return Ok(DriverTurnEnd::Stopped(TurnOutcome::cancelled())),
                    dialled = self.connector.connect() => dialled,
                };
                if messages.is_empty() {
                    messages.clone_from(&self.transcript);
                }
                match dialled {
                    Ok(connection) => connection,
                    Err(message) => {
                        let error = RunError::new("agent_unreachable", message);
                        return Ok(DriverTurnEnd::Stopped(TurnOutcome::failed(error)));
                    }
                }
            }
        };
        let result = PeerTurn::new(turn, connection, &self.connector).run(prompt, messages).await?;
        let PeerTurnResult { outcome, connection, transcript } = result;
        self.connection = connection;
        if self.connection.is_some() {
            let size: usize = transcript.iter().map(|message| message.to_string().len() + 1).sum();
            // A truncated conversation cannot be resumed.
            self.transcript = if size > TRANSCRIPT_MAX { Vec::new() } else { transcript };
        }
        Ok(DriverTurnEnd::Stopped(outcome))
    }
}

impl AgentDriver for PeerWorkerAgent {
    /// The conversation has no id: it lives in the connection.
    fn ready_update(&self, _: &AgentSpec) -> AgentUpdate {
        AgentUpdate::Ready { agent_session_id: None, steers: true }
    }

    fn turn<'a>(
        &'a mut self,
        turn: &'a DriverTurn<'a>,
        prompt: &'a DriverPrompt,
    ) -> BoxFuture<'a, Result<DriverTurnEnd, LinkClosed>> {
        Box::pin(self.run_turn(turn, prompt))
    }

    /// Answers pings between turns and notices a closed connection. Frames belong to no run then and are ignored. Never
    /// resolves: a closed connection is opened again at the next prompt.
    fn idle<'a>(&'a mut self, _: &'a AgentOutput) -> BoxFuture<'a, RunError> {
        Box::pin(async move {
            while let Some(connection) = &mut self.connection {
                if connection.next_event(true).await.is_err() {
                    self.connection = None;
                }
            }
            std::future::pending().await
        })
    }

    /// Closes the connection.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Some(connection) = self.connection {
                connection.close().await;
            }
        })
    }
}

/// The connection, unless it is known to be closed. Frames that arrived between turns belong to no run and are dropped.
fn if_still_open(mut connection: PeerConnection) -> Option<PeerConnection> {
    while let Some(event) = connection.next_event(true).now_or_never() {
        event.ok()?;
    }
    Some(connection)
}
