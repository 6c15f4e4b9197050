//! The handshake: we send `initialize`, and the program answers when it is ready. A program that does not find the
//! conversation to resume sends an error result instead.

use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::conversation::next_message;
use super::messages::{self, ClaudeMessage};
use crate::line_transport::LineTransport;
use crate::stdio_agent::StdioHandshakeError;

/// Why no conversation could be opened.
pub(super) type ClaudeHandshakeError = StdioHandshakeError<String>;

const HELLO_ID: &str = "qd-hello";

/// Waits until the agent is ready. Returns the mode that it is in, if it reports one.
pub(super) async fn perform_handshake<R, W>(
    lines: &mut LineTransport<R, W>,
) -> Result<Option<String>, ClaudeHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    lines.queue_message(&messages::control_request(HELLO_ID, json!({"subtype": "initialize"})));
    loop {
        match next_message(lines, true).await.ok_or(ClaudeHandshakeError::AgentExited)? {
            ClaudeMessage::ControlResponse { id, answer } if id == HELLO_ID => {
                let mode = |hello: Value| hello["current_permission_mode"].as_str().map(str::to_owned);
                return answer.map(mode).map_err(ClaudeHandshakeError::Refused);
            }
            ClaudeMessage::Result(result) if result.is_error => {
                let reason = result.errors.join("; ");
                let reason = if reason.is_empty() { result.result.unwrap_or(result.subtype) } else { reason };
                return Err(ClaudeHandshakeError::Refused(reason));
            }
            ClaudeMessage::ControlRequest { id, .. } => lines.queue_message(&messages::control_error(
                &id,
                "requests are not served before the first turn",
            )),
            // A resumed agent may replay its history, which the session already has.
            _ => {}
        }
    }
}
