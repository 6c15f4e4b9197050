//! How a conversation begins: the program is asked for what it can do, and answers when it is ready. One that is to go on
//! with a conversation that it does not find says so instead.

use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use super::conversation::next_message;
use super::messages::{self, ClaudeMessage};
use crate::drivers::line_transport::LineTransport;

/// Why nothing came of it.
#[derive(Debug)]
pub(super) enum ClaudeHandshakeError {
    /// The agent is no more.
    AgentExited,
    /// It would not, for this reason.
    Refused(String),
}

const HELLO_ID: &str = "qd-hello";

/// Waits until the agent is ready.
pub(super) async fn perform_handshake<R, W>(
    lines: &mut LineTransport<R, W>,
) -> Result<(), ClaudeHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    lines.queue_message(&messages::control_request(HELLO_ID, json!({"subtype": "initialize"})));
    loop {
        match next_message(lines, true).await.ok_or(ClaudeHandshakeError::AgentExited)? {
            ClaudeMessage::ControlResponse { id, answer } if id == HELLO_ID => {
                return answer.map(drop).map_err(ClaudeHandshakeError::Refused);
            }
            ClaudeMessage::Result(result) if result.is_error => {
                let told = result.errors.join("; ");
                let told = if told.is_empty() { result.result.unwrap_or(result.subtype) } else { told };
                return Err(ClaudeHandshakeError::Refused(told));
            }
            ClaudeMessage::ControlRequest { id, .. } => {
                lines.queue_message(&messages::control_error(&id, "nothing can be asked before the start"))
            }
            // What it repeats of its past is known.
            _ => {}
        }
    }
}
