//! The driver for somebody else's worker, by the frames of a peer without a subprotocol: one connection for each session,
//! on which one run follows another. There is no process and no keeper, and a run's life is its connection: whoever drops
//! that has cancelled it.
//!
//! Layout, in reading order:
//! - [`Peer`]: the agent, from its first connection to its last.
//! - `way`: how it is reached, and what to do where it cannot be.
//! - `round`: one turn, in one loop.
//! - `words`: what its events mean; `asks`: what it wants leave for.

mod asks;
mod connector;
mod event_decoder;
#[cfg(test)]
mod tests;
mod turn;

use std::time::Duration;

use futures_util::FutureExt;
use qd_link::LinkClosed;
use qd_protocol::event::RunError;
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::TurnOutcome;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use serde_json::Value;

use self::connector::{PeerConnection, PeerConnector};
use self::turn::{PeerTurn, PeerTurnResult};
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// Bytes of a conversation, as JSON, that are kept to restore it: the same that a suspended run may have.
const TRANSCRIPT_MAX: usize = INLINE_MAX;

/// Somebody else's worker.
pub(crate) struct PeerWorkerAgent {
    connector: PeerConnector,
    /// The connection; none after it broke, until the next prompt.
    connection: Option<PeerConnection>,
    /// The conversation as the worker gave it with its last terminal, if it did. It goes with the first run of another
    /// connection: on the same one the worker remembers.
    transcript: Vec<Value>,
}

impl PeerWorkerAgent {
    /// Connects within the limit. Nothing is begun at the other end before there is a prompt.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let failed = |why: String| RunError::new("agent_failed_to_start", why);
        let way = PeerConnector::from_spec(spec, manifest).map_err(failed)?;
        let late = || format!("the worker at {way} did not answer within {} s", limit.as_secs());
        let line = match tokio::time::timeout(limit, way.connect()).await {
            Ok(line) => line.map_err(failed)?,
            Err(_) => return Err(RunError::new("agent_not_ready", late())),
        };
        Ok(Self { connector: way, connection: Some(line), transcript: Vec::new() })
    }

    /// One turn. The connection is in its hands: if it is dropped, so is the connection, which ends the worker's run.
    pub(crate) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(DriverTurnEnd::Stopped(TurnOutcome::cancelled()));
        }
        let mut messages = prompt.messages.clone();
        let line = match self.connection.take().and_then(if_still_open) {
            Some(line) => line,
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
                    Ok(line) => line,
                    Err(why) => {
                        let error = RunError::new("agent_unreachable", why);
                        return Ok(DriverTurnEnd::Stopped(TurnOutcome::failed(error)));
                    }
                }
            }
        };
        let over = PeerTurn::new(turn, line, &self.connector).run(prompt, messages).await?;
        let PeerTurnResult { outcome, connection: line, transcript } = over;
        self.connection = line;
        if self.connection.is_some() {
            let size: usize = transcript.iter().map(|message| message.to_string().len() + 1).sum();
            // Half a conversation cannot be gone on with.
            self.transcript = if size > TRANSCRIPT_MAX { Vec::new() } else { transcript };
        }
        Ok(DriverTurnEnd::Stopped(outcome))
    }

    /// The time between turns, in which signs of life are answered and an end is noticed. Frames belong to no run then,
    /// and mean nothing. It never comes back: a worker that hung up is called again when there is a prompt.
    pub(crate) async fn idle(&mut self) -> RunError {
        while let Some(line) = &mut self.connection {
            if line.next_event(true).await.is_err() {
                self.connection = None;
            }
        }
        std::future::pending().await
    }

    /// Says goodbye.
    pub(crate) async fn stop(self) {
        if let Some(line) = self.connection {
            line.close().await;
        }
    }
}

/// The connection, unless it is known to be over. What came between turns belongs to no run.
fn if_still_open(mut line: PeerConnection) -> Option<PeerConnection> {
    while let Some(came) = line.next_event(true).now_or_never() {
        came.ok()?;
    }
    Some(line)
}
