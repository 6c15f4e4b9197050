//! A template for a driver, to copy into a folder of its own. It drives an agent on stdio that speaks a made-up
//! protocol: one JSON value per line, as [`ExampleRequest`] and [`ExampleReply`] define them. Only tests compile it.
//!
//! CONTRIBUTING.md says what else a driver needs. For asks and steers see `turn_state` and the conversation of `claude`.

mod tests;

use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnStopReason, TurnUpdate};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::unix::pipe;

use crate::agent_driver::AgentStart;
use crate::line_transport::{LineTransport, log_ignored_line};
use crate::stdio_agent::{
    StdioAgent, StdioAgentStart, StdioConversation, StdioHandshakeError, refused_start,
};
use crate::turn::{DriverPrompt, DriverTurn};
use crate::turn_state::{TurnEvent, TurnState};

/// Starts the agent's process and opens a conversation, resuming the one named in the specification if there is one.
pub(crate) async fn start_example_agent(
    start: AgentStart<'_>,
) -> Result<StdioAgent<ExampleConversation<pipe::Receiver, pipe::Sender>>, RunError> {
    let start = StdioAgentStart::new(start)?;
    let (mut process, stdin, stdout) = start.start_process(start.program()).await?;
    let mut lines = LineTransport::new(stdout, stdin, process.exited());
    let handshake = perform_handshake(&mut lines, start.spec.agent_session_id.clone());
    match start.finish_step(&mut process, handshake).await? {
        Ok(session) => Ok(start.into_agent(process, ExampleConversation { lines, session }, false)),
        Err(reason) => Err(refused_start(&mut process, RunError::new("agent_error", reason)).await),
    }
}

/// A line to the agent.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum ExampleRequest {
    /// Opens a conversation.
    Hello {
        resume: Option<String>,
    },
    Prompt(String),
    /// Stops the turn.
    Stop,
}

/// A line from the agent.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ExampleReply {
    /// The conversation is open and has this id.
    Ready(String),
    /// A piece of the answer.
    Text(String),
    /// The turn is over.
    Done {
        stopped: bool,
    },
    Failed(String),
}

/// Opens a conversation, and returns its id.
async fn perform_handshake<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    lines: &mut LineTransport<R, W>,
    resume: Option<String>,
) -> Result<String, StdioHandshakeError<String>> {
    lines.queue_message(&ExampleRequest::Hello { resume });
    loop {
        match next_reply(lines, true).await.ok_or(StdioHandshakeError::AgentExited)? {
            ExampleReply::Ready(session) => return Ok(session),
            ExampleReply::Failed(reason) => return Err(StdioHandshakeError::Refused(reason)),
            ExampleReply::Text(_) | ExampleReply::Done { .. } => {}
        }
    }
}

/// The agent's next line that is a message; `None` if the agent has exited.
async fn next_reply<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    lines: &mut LineTransport<R, W>,
    listening: bool,
) -> Option<ExampleReply> {
    loop {
        let line = lines.next_line(listening).await?;
        match serde_json::from_slice(&line) {
            Ok(reply) => return Some(reply),
            Err(_) => log_ignored_line(&line),
        }
    }
}

/// The updates of a turn. This agent asks nothing, so nothing has to be known of its asks.
type ExampleTurnState<'t> = TurnState<'t, (), (), ()>;

/// A conversation with one agent.
pub(crate) struct ExampleConversation<R, W> {
    lines: LineTransport<R, W>,
    session: String,
}

impl<R, W> StdioConversation for ExampleConversation<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn session_id(&self) -> Option<String> {
        Some(self.session.clone())
    }

    async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(Some(TurnOutcome::cancelled()));
        }
        self.lines.queue_message(&ExampleRequest::Prompt(prompt.text.clone()));
        let mut state = ExampleTurnState::new(turn);
        let mut cancelled = false;
        loop {
            let reply = next_reply(&mut self.lines, state.is_listening());
            match state.next_event(!cancelled, false, reply).await? {
                TurnEvent::CancelRequested => {
                    cancelled = true;
                    self.lines.queue_message(&ExampleRequest::Stop);
                }
                TurnEvent::Message(None) => return Ok(None),
                TurnEvent::Message(Some(ExampleReply::Text(text))) => {
                    state.emit(vec![TurnUpdate::Text { text }]);
                }
                TurnEvent::Message(Some(ExampleReply::Done { stopped: true })) => {
                    return Ok(Some(TurnOutcome::cancelled()));
                }
                TurnEvent::Message(Some(ExampleReply::Done { stopped: false })) => {
                    return Ok(Some(TurnOutcome::of(TurnStopReason::EndTurn)));
                }
                TurnEvent::Message(Some(ExampleReply::Failed(reason))) => {
                    return Ok(Some(TurnOutcome::failed(RunError::new("agent_error", reason))));
                }
                TurnEvent::Message(Some(ExampleReply::Ready(session))) => self.session = session,
                TurnEvent::Answered((), ()) | TurnEvent::Steer(_) | TurnEvent::Nothing => {}
            }
        }
    }

    /// What this agent says between turns belongs to nothing.
    async fn idle(&mut self, _: &AgentOutput) {
        while next_reply(&mut self.lines, true).await.is_some() {}
    }

    fn close_stdin(self) -> impl AsyncRead + Unpin + Send {
        self.lines.close_stdin()
    }
}
