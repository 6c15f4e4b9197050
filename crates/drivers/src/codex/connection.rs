//! Messages to and from the server, one JSON object per line: JSON-RPC without its version field. This module knows
//! messages and their ids. Parameters are parsed elsewhere, and only if somebody needs them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::line_transport::{ExitFuture, LineTransport, log_ignored_line};

/// The JSON-RPC error code for an unknown method.
const METHOD_NOT_FOUND: i64 = -32601;
/// The JSON-RPC error code for invalid parameters.
const INVALID_PARAMS: i64 = -32602;

/// A connection to the server.
pub(super) struct CodexConnection<R, W> {
    lines: LineTransport<R, W>,
    last_id: u64,
}

/// A message from the server.
#[derive(Debug)]
pub(super) enum CodexMessage {
    /// The response to our request with this id.
    Response(u64, Result<CodexParams, CodexRpcError>),
    Notification(String, CodexParams),
    /// A request of the server, with its own id.
    Request(Value, String, CodexParams),
}

/// The unparsed parameters or result of a message.
#[derive(Debug)]
pub(super) struct CodexParams(Option<Box<RawValue>>);

impl CodexParams {
    /// Parses the parameters. Unknown fields are ignored; `None` if they do not fit the type.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_str(self.0.as_deref().map_or("{}", RawValue::get)).ok()
    }
}

/// A JSON-RPC error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CodexRpcError {
    pub(super) code: i64,
    pub(super) message: String,
}

impl CodexRpcError {
    pub(super) fn unknown_method(method: &str) -> Self {
        Self { code: METHOD_NOT_FOUND, message: format!("quarterdeck does not know {method}") }
    }

    pub(super) fn invalid_params(message: impl Into<String>) -> Self {
        Self { code: INVALID_PARAMS, message: message.into() }
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> CodexConnection<R, W> {
    /// Reads until the stream ends or `exited` resolves.
    pub(super) fn new(from: R, to: W, exited: ExitFuture) -> Self {
        Self { lines: LineTransport::new(from, to, exited), last_id: 0 }
    }

    /// Queues a request. The response arrives through [`Self::next`] under the returned id.
    pub(super) fn request(&mut self, method: &str, params: Value) -> u64 {
        self.last_id += 1;
        self.lines.queue_message(&json!({"id": self.last_id, "method": method, "params": params}));
        self.last_id
    }

    /// Queues a notification without parameters.
    pub(super) fn notify(&mut self, method: &str) {
        self.lines.queue_message(&json!({"method": method}));
    }

    /// Queues the response to a request of the server.
    pub(super) fn respond(&mut self, id: &Value, result: Result<Value, CodexRpcError>) {
        self.lines.queue_message(&match result {
            Ok(result) => json!({"id": id, "result": result}),
            Err(error) => json!({"id": id, "error": error}),
        });
    }

    /// Returns the server's next message, or `None` at the end of its stream. Queued messages are written meanwhile;
    /// with `listening` false, nothing is read. Cancel safe.
    pub(super) async fn next(&mut self, listening: bool) -> Option<CodexMessage> {
        loop {
            let line = self.lines.next_line(listening).await?;
            match CodexMessage::parse(&line) {
                Some(message) => return Some(message),
                None => log_ignored_line(&line),
            }
        }
    }

    /// Closes the server's stdin and returns its stdout, which the caller drains.
    pub(super) fn close_stdin(self) -> R {
        self.lines.close_stdin()
    }
}

impl CodexMessage {
    fn parse(line: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct CodexRawMessage {
            id: Option<Value>,
            method: Option<String>,
            params: Option<Box<RawValue>>,
            result: Option<Box<RawValue>>,
            error: Option<CodexRpcError>,
        }
        let CodexRawMessage { id, method, params, result, error } = serde_json::from_slice(line).ok()?;
        match (id, method) {
            (Some(id), Some(method)) => Some(Self::Request(id, method, CodexParams(params))),
            (None, Some(method)) => Some(Self::Notification(method, CodexParams(params))),
            (Some(id), None) => {
                let response = match error {
                    Some(refusal) => Err(refusal),
                    None => Ok(CodexParams(result)),
                };
                Some(Self::Response(id.as_u64()?, response))
            }
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_response_a_notification_or_a_request_by_its_fields() {
        let parse = |line: &str| CodexMessage::parse(line.as_bytes());
        assert!(matches!(
            parse(r#"{"id":3,"result":{"x":1},"more":2}"#),
            Some(CodexMessage::Response(3, Ok(_)))
        ));
        let error_response = parse(r#"{"error":{"code":-32600,"message":"no"},"id":3}"#);
        assert!(
            matches!(error_response, Some(CodexMessage::Response(3, Err(refusal))) if refusal.message == "no")
        );
        assert!(
            matches!(parse(r#"{"method":"m"}"#), Some(CodexMessage::Notification(method, _)) if method == "m")
        );
        let request = parse(r#"{"id":"a","method":"m","params":{}}"#);
        assert!(matches!(request, Some(CodexMessage::Request(id, _, _)) if id == "a"));
        for line in ["", "words", "[]", "{}", r#"{"id":"not ours","result":{}}"#] {
            assert!(parse(line).is_none(), "{line}");
        }
    }
}
