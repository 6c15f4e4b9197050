//! JSON-RPC over an agent's stdin and stdout. This module knows messages and their ids, and nothing of what they mean.

use agent_client_protocol::{
    Error, JsonRpcMessage, JsonRpcNotification, JsonRpcRequest, RawJsonRpcId, RawJsonRpcMessage,
    TransportFrame,
};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::line_transport::{ExitFuture, LineTransport, log_ignored_line};

/// A JSON-RPC connection to an agent.
pub(super) struct AcpConnection<R, W> {
    lines: LineTransport<R, W>,
    last_id: i64,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> AcpConnection<R, W> {
    /// Reads until the stream ends or `exited` resolves.
    pub(super) fn new(from: R, to: W, exited: ExitFuture) -> Self {
        Self { lines: LineTransport::new(from, to, exited), last_id: 0 }
    }

    /// Queues a request. The response arrives through [`Self::next`] under the returned id.
    pub(super) fn request<T: JsonRpcRequest>(&mut self, request: &T) -> RawJsonRpcId {
        self.request_by_name(request.method(), message_params(request))
    }

    /// Queues a request for a method that has no type in the protocol crate.
    pub(super) fn request_by_name(&mut self, method: &str, params: Value) -> RawJsonRpcId {
        self.last_id += 1;
        let message = RawJsonRpcMessage::request(method.to_owned(), params, self.last_id);
        self.lines.queue_message(&message.expect(PARAMS_ARE_OBJECTS));
        self.last_id.into()
    }

    /// Queues a notification.
    pub(super) fn notify<T: JsonRpcNotification>(&mut self, notification: &T) {
        let message =
            RawJsonRpcMessage::notification(notification.method().to_owned(), message_params(notification));
        self.lines.queue_message(&message.expect(PARAMS_ARE_OBJECTS));
    }

    /// Queues the response to a request of the agent.
    pub(super) fn respond(&mut self, id: RawJsonRpcId, result: Result<Value, Error>) {
        self.lines.queue_message(&RawJsonRpcMessage::response(id, result));
    }

    /// Returns the agent's next message, or `None` at the end of its stream. Queued messages are written meanwhile;
    /// with `listening` false, nothing is read. Cancel safe.
    pub(super) async fn next(&mut self, listening: bool) -> Option<RawJsonRpcMessage> {
        loop {
            let line = self.lines.next_line(listening).await?;
            match std::str::from_utf8(line.trim_ascii()).map(TransportFrame::parse_json) {
                Ok(TransportFrame::Single(message)) => return Some(message),
                _ => log_ignored_line(&line),
            }
        }
    }

    /// Closes the agent's stdin and returns its stdout, which the caller drains.
    pub(super) fn hang_up(self) -> R {
        self.lines.close_stdin()
    }
}

const PARAMS_ARE_OBJECTS: &str = "the parameters of every method of the protocol are an object";

fn message_params<T: JsonRpcMessage>(message: &T) -> Value {
    message.to_untyped_message().expect("the protocol's own types are JSON").params
}
