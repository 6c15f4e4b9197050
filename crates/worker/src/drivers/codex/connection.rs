//! The server's messages, one line of JSON each: JSON-RPC without its version. It knows messages and their ids; what a
//! method means is read elsewhere, and only if somebody wants it.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::drivers::line_transport::{ExitFuture, LineTransport, log_ignored_line};

/// What JSON-RPC says of a method that is not there.
const METHOD_NOT_FOUND: i64 = -32601;
/// The same of parameters that cannot be read.
const INVALID_PARAMS: i64 = -32602;

/// The server at the other end of two streams.
pub(super) struct CodexConnection<R, W> {
    lines: LineTransport<R, W>,
    last_id: u64,
}

/// Something that the server said.
#[derive(Debug)]
pub(super) enum CodexMessage {
    /// The answer to what was asked under this id.
    Response(u64, Result<CodexParams, CodexRpcError>),
    /// It tells something.
    Notification(String, CodexParams),
    /// It asks for something, under an id of its own.
    Request(Value, String, CodexParams),
}

/// What comes with a message, unread.
#[derive(Debug)]
pub(super) struct CodexParams(Option<Box<RawValue>>);

impl CodexParams {
    /// As this type, if it is one. Fields that it does not have are passed over.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_str(self.0.as_deref().map_or("{}", RawValue::get)).ok()
    }
}

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CodexRpcError {
    pub(super) code: i64,
    pub(super) message: String,
}

impl CodexRpcError {
    /// Nothing here knows this method.
    pub(super) fn unknown_method(method: &str) -> Self {
        Self { code: METHOD_NOT_FOUND, message: format!("quarterdeck does not know {method}") }
    }

    /// It is known, and cannot be done as it was asked for.
    pub(super) fn invalid_params(message: impl Into<String>) -> Self {
        Self { code: INVALID_PARAMS, message: message.into() }
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> CodexConnection<R, W> {
    /// Reads from one stream and writes to the other, until the first is over or `exited` says so.
    pub(super) fn new(from: R, to: W, exited: ExitFuture) -> Self {
        Self { lines: LineTransport::new(from, to, exited), last_id: 0 }
    }

    /// Asks the server for something. The answer comes among its messages, under this id.
    pub(super) fn request(&mut self, method: &str, params: Value) -> u64 {
        self.last_id += 1;
        self.lines.queue_message(&json!({"id": self.last_id, "method": method, "params": params}));
        self.last_id
    }

    /// Tells the server something.
    pub(super) fn notify(&mut self, method: &str) {
        self.lines.queue_message(&json!({"method": method}));
    }

    /// Answers what the server asked for.
    pub(super) fn respond(&mut self, id: &Value, answer: Result<Value, CodexRpcError>) {
        self.lines.queue_message(&match answer {
            Ok(result) => json!({"id": id, "result": result}),
            Err(error) => json!({"id": id, "error": error}),
        });
    }

    /// The server's next message, or `None` when there will be none. Writes what waits to be written meanwhile, and
    /// does only that if not `listening`. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self, listening: bool) -> Option<CodexMessage> {
        loop {
            let line = self.lines.next_line(listening).await?;
            match CodexMessage::parse(&line) {
                Some(message) => return Some(message),
                None => log_ignored_line(&line),
            }
        }
    }

    /// Closes the stream to the server, and gives the other one up to be emptied.
    pub(super) fn hang_up(self) -> R {
        self.lines.hang_up()
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
                let answer = match error {
                    Some(refusal) => Err(refusal),
                    None => Ok(CodexParams(result)),
                };
                Some(Self::Response(id.as_u64()?, answer))
            }
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_answer_a_notice_or_a_request_by_what_it_has() {
        let parse = |line: &str| CodexMessage::parse(line.as_bytes());
        assert!(matches!(
            parse(r#"{"id":3,"result":{"x":1},"more":2}"#),
            Some(CodexMessage::Response(3, Ok(_)))
        ));
        let refused = parse(r#"{"error":{"code":-32600,"message":"no"},"id":3}"#);
        assert!(matches!(refused, Some(CodexMessage::Response(3, Err(refusal))) if refusal.message == "no"));
        assert!(
            matches!(parse(r#"{"method":"m"}"#), Some(CodexMessage::Notification(method, _)) if method == "m")
        );
        let asked = parse(r#"{"id":"a","method":"m","params":{}}"#);
        assert!(matches!(asked, Some(CodexMessage::Request(id, _, _)) if id == "a"));
        for none in ["", "words", "[]", "{}", r#"{"id":"not ours","result":{}}"#] {
            assert!(parse(none).is_none(), "{none}");
        }
    }
}
