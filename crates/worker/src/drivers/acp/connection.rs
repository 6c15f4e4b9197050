//! JSON-RPC over an agent's two streams. It knows messages and their ids, and nothing of what they mean.

use agent_client_protocol::{
    Error, JsonRpcMessage, JsonRpcNotification, JsonRpcRequest, RawJsonRpcId, RawJsonRpcMessage,
    TransportFrame,
};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::drivers::line_transport::{ExitFuture, LineTransport, log_ignored_line};

/// The agent at the other end of two streams.
pub(super) struct AcpConnection<R, W> {
    lines: LineTransport<R, W>,
    last_id: i64,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> AcpConnection<R, W> {
    /// Reads from one stream and writes to the other, until the first is over or `exited` says so.
    pub(super) fn new(from: R, to: W, exited: ExitFuture) -> Self {
        Self { lines: LineTransport::new(from, to, exited), last_id: 0 }
    }

    /// Asks the agent for something. The answer comes among its messages, under this id.
    pub(super) fn request<T: JsonRpcRequest>(&mut self, request: &T) -> RawJsonRpcId {
        self.request_by_name(request.method(), message_params(request))
    }

    /// The same for a method that the protocol does not know.
    pub(super) fn request_by_name(&mut self, method: &str, params: Value) -> RawJsonRpcId {
        self.last_id += 1;
        let message = RawJsonRpcMessage::request(method.to_owned(), params, self.last_id);
        self.lines.queue_message(&message.expect(PARAMS_ARE_OBJECTS));
        self.last_id.into()
    }

    /// Tells the agent something.
    pub(super) fn notify<T: JsonRpcNotification>(&mut self, notification: &T) {
        let message =
            RawJsonRpcMessage::notification(notification.method().to_owned(), message_params(notification));
        self.lines.queue_message(&message.expect(PARAMS_ARE_OBJECTS));
    }

    /// Answers what the agent asked for.
    pub(super) fn respond(&mut self, id: RawJsonRpcId, answer: Result<Value, Error>) {
        self.lines.queue_message(&RawJsonRpcMessage::response(id, answer));
    }

    /// The agent's next message, or `None` when there will be none. Writes what waits to be written meanwhile, and
    /// does only that if not `listening`. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self, listening: bool) -> Option<RawJsonRpcMessage> {
        loop {
            let line = self.lines.next_line(listening).await?;
            match std::str::from_utf8(line.trim_ascii()).map(TransportFrame::parse_json) {
                Ok(TransportFrame::Single(message)) => return Some(message),
                _ => log_ignored_line(&line),
            }
        }
    }

    /// Closes the stream to the agent, and gives the other one up to be emptied.
    pub(super) fn hang_up(self) -> R {
        self.lines.hang_up()
    }
}

const PARAMS_ARE_OBJECTS: &str = "the parameters of every method of the protocol are an object";

fn message_params<T: JsonRpcMessage>(message: &T) -> Value {
    message.to_untyped_message().expect("the protocol's own types are JSON").params
}
