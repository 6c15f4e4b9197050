//! The parent's side of a connection without a subprotocol: speaks to any worker that knows the frames, ours or not.

use std::future::poll_fn;
use std::task::{Context, Poll};

use qd_protocol::frame::plain::{Approval, FromParent, FromWorker, Status};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::net::TcpStream;

use crate::executor::Job;
use crate::socket::{Incoming, STEP, Socket, SocketError, Upgrade, Wire};

/// A connection to a worker. Dropping it ends the worker's run.
#[derive(Debug)]
pub struct PlainClient<W = TcpStream> {
    socket: Socket<W>,
    /// Whether something was posted that may not be written.
    posted: bool,
}

/// What came from a worker.
#[derive(Debug, Clone, PartialEq)]
pub enum Came {
    /// A frame that means something.
    Frame(FromWorker),
    /// A sign of life and no more.
    Alive,
}

impl PlainClient {
    /// Connects to `HOST:PORT`, with or without `ws://` before it.
    pub async fn connect(endpoint: &str, token: Option<&str>) -> Result<Self, SocketError> {
        let host = endpoint.strip_prefix("ws://").unwrap_or(endpoint).trim_end_matches('/');
        let stream = tokio::time::timeout(STEP, TcpStream::connect(host));
        let stream = stream.await.map_err(|_| SocketError::TimedOut)?.map_err(SocketError::from)?;
        stream.set_nodelay(true)?;
        Self::over(stream, host, token).await
    }
}

impl<W: Wire> PlainClient<W> {
    /// Upgrades a stream that is there already: TLS, a unix socket, a pipe in a test.
    pub async fn over(wire: W, host: &str, token: Option<&str>) -> Result<Self, SocketError> {
        let upgrade = Upgrade {
            host: host.to_owned(),
            path: "/".to_owned(),
            subprotocol: None,
            token: token.map(str::to_owned),
        };
        Self::upgrade(wire, &upgrade).await
    }

    /// The same, as the upgrade says.
    pub async fn upgrade(wire: W, upgrade: &Upgrade) -> Result<Self, SocketError> {
        let (socket, _) = Socket::client(wire, upgrade).await?;
        Ok(Self { socket, posted: false })
    }

    /// Begins a run; one that is active is cancelled first.
    pub async fn run(&mut self, job: Job) -> Result<(), SocketError> {
        let Job { assignment, reasoning_effort, messages, .. } = job;
        self.socket.send(&FromParent::Run { assignment, reasoning_effort, messages }).await
    }

    /// Stops the active run.
    pub async fn cancel(&mut self) -> Result<(), SocketError> {
        self.socket.send(&FromParent::Cancel).await
    }

    /// Tells the active run something.
    pub async fn message(&mut self, text: impl Into<String>) -> Result<(), SocketError> {
        self.socket.send(&FromParent::Message { text: text.into() }).await
    }

    /// Answers an approval.
    pub async fn approval_reply(&mut self, id: impl Into<String>, approved: bool) -> Result<(), SocketError> {
        self.socket.send(&FromParent::ApprovalReply { id: id.into(), approved }).await
    }

    /// The next frame that means something. Nothing is lost if the wait is given up.
    pub async fn next(&mut self) -> Result<FromWorker, SocketError> {
        loop {
            if let Incoming::Text(text) = self.socket.next().await?
                && let Some(frame) = read(text.as_str())
            {
                return Ok(frame);
            }
        }
    }

    /// Puts a frame in line and waits for nothing. It goes out while [`PlainClient::came`] is waited for, so that a worker
    /// which does not read keeps nobody from hearing it.
    pub fn post(&mut self, frame: &FromParent) -> Result<(), SocketError> {
        let text = serde_json::to_string(frame).map_err(std::io::Error::from)?;
        self.socket.start(text)?;
        self.posted = true;
        Ok(())
    }

    /// Asks for a sign of life in the same way. When that comes, the worker has read all that was posted before.
    pub fn post_ping(&mut self) -> Result<(), SocketError> {
        self.socket.start_ping()?;
        self.posted = true;
        Ok(())
    }

    /// Sends what was posted, and waits for what comes; for ever, if nobody is listening. Nothing is lost if the wait is
    /// given up.
    pub async fn came(&mut self, listening: bool) -> Result<Came, SocketError> {
        loop {
            match poll_fn(|context| self.poll_came(listening, context)).await? {
                Incoming::Text(text) => {
                    if let Some(frame) = read(text.as_str()) {
                        return Ok(Came::Frame(frame));
                    }
                }
                Incoming::Binary(_) => {}
                Incoming::Alive => {
                    // It may have been a question, whose answer is in line now.
                    self.posted = true;
                    return Ok(Came::Alive);
                }
            }
        }
    }

    /// Writes first: a worker that never stops talking would otherwise never be told to.
    fn poll_came(
        &mut self,
        listening: bool,
        context: &mut Context<'_>,
    ) -> Poll<Result<Incoming, SocketError>> {
        // That it cannot be written shows in reading, too, and there only after the worker's last words.
        if self.posted && self.socket.poll_flush(context).is_ready() {
            self.posted = false;
        }
        if listening { self.socket.poll_next(context) } else { Poll::Pending }
    }

    /// Says goodbye. The worker's run, if one is active, is cancelled.
    pub async fn close(mut self) {
        self.socket.close().await;
    }
}

/// Every frame at once, flat: an enum with its tag inside is read twice, and events come by the million.
#[derive(Deserialize)]
struct Frame {
    kind: Kind,
    event: Option<Map<String, Value>>,
    id: Option<String>,
    body: Option<Approval>,
    status: Option<Status>,
    result: Option<String>,
    error: Option<String>,
    #[serde(default)]
    transcript: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Event,
    ApprovalRequest,
    Terminal,
}

fn read(text: &str) -> Option<FromWorker> {
    let Frame { kind, event, id, body, status, result, error, transcript } =
        serde_json::from_str(text).ok()?;
    match kind {
        Kind::Event => Some(FromWorker::Event { event: event? }),
        Kind::ApprovalRequest => Some(FromWorker::ApprovalRequest { id: id?, body: body? }),
        Kind::Terminal => Some(FromWorker::Terminal { status: status?, result, error, transcript }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quick_way_to_read_a_frame_agrees_with_the_protocol() {
        for text in [
            r#"{"kind":"event","event":{"type":"token","content":"x"},"more":1}"#,
            r#"{"kind":"approval_request","id":"a","body":{"tool_name":"Write","question":"?"}}"#,
            r#"{"kind":"terminal","status":"completed","result":"x"}"#,
            r#"{"kind":"terminal","status":"suspended","transcript":[{"role":"user"}]}"#,
            r#"{"status":"error","error":"no","kind":"terminal"}"#,
            r#"{"kind":"event"}"#,
            r#"{"kind":"event","event":7}"#,
            r#"{"kind":"terminal"}"#,
            r#"{"kind":"terminal","status":"odd"}"#,
            r#"{"kind":"news"}"#,
            r#"{}"#,
            r#"[]"#,
            "",
        ] {
            assert_eq!(read(text), serde_json::from_str(text).ok(), "{text}");
        }
    }
}
