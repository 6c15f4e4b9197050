//! The parent's side of a connection without a subprotocol: speaks to any worker that knows the frames, ours or not.

use std::future::poll_fn;
use std::task::{Context, Poll};

use qd_protocol::frame::plain::{PlainApproval, PlainParentFrame, PlainRunStatus, PlainWorkerFrame};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::net::TcpStream;

use crate::executor::RunAssignment;
use crate::socket::{ByteStream, ClientUpgrade, IncomingFrame, STEP_TIMEOUT, Socket, SocketError};

/// A connection to a worker. Dropping it ends the worker's run.
#[derive(Debug)]
pub struct PlainClient<W = TcpStream> {
    socket: Socket<W>,
    /// Whether something was posted that may not be written.
    unflushed: bool,
}

/// What came from a worker.
#[derive(Debug, Clone, PartialEq)]
pub enum PlainClientEvent {
    /// A frame that means something.
    Frame(PlainWorkerFrame),
    /// A sign of life and no more.
    Alive,
}

impl PlainClient {
    /// Connects to `HOST:PORT`, with or without `ws://` before it.
    pub async fn connect(endpoint: &str, token: Option<&str>) -> Result<Self, SocketError> {
        let host = endpoint.strip_prefix("ws://").unwrap_or(endpoint).trim_end_matches('/');
        let stream = tokio::time::timeout(STEP_TIMEOUT, TcpStream::connect(host));
        let stream = stream.await.map_err(|_| SocketError::TimedOut)?.map_err(SocketError::from)?;
        stream.set_nodelay(true)?;
        Self::connect_over(stream, host, token).await
    }
}

impl<W: ByteStream> PlainClient<W> {
    /// Upgrades a stream that is there already: TLS, a unix socket, a pipe in a test.
    pub async fn connect_over(wire: W, host: &str, token: Option<&str>) -> Result<Self, SocketError> {
        let upgrade = ClientUpgrade {
            host: host.to_owned(),
            path: "/".to_owned(),
            subprotocol: None,
            token: token.map(str::to_owned),
        };
        Self::connect_with(wire, &upgrade).await
    }

    /// The same, as the upgrade says.
    pub async fn connect_with(wire: W, upgrade: &ClientUpgrade) -> Result<Self, SocketError> {
        let (socket, _) = Socket::connect(wire, upgrade).await?;
        Ok(Self { socket, unflushed: false })
    }

    /// Begins a run; one that is active is cancelled first.
    pub async fn start_run(&mut self, job: RunAssignment) -> Result<(), SocketError> {
        let RunAssignment { prompt: assignment, reasoning_effort, messages, .. } = job;
        self.socket.send(&PlainParentFrame::Run { assignment, reasoning_effort, messages }).await
    }

    /// Stops the active run.
    pub async fn cancel(&mut self) -> Result<(), SocketError> {
        self.socket.send(&PlainParentFrame::Cancel).await
    }

    /// Tells the active run something.
    pub async fn send_message(&mut self, text: impl Into<String>) -> Result<(), SocketError> {
        self.socket.send(&PlainParentFrame::Message { text: text.into() }).await
    }

    /// Answers an approval.
    pub async fn reply_to_approval(
        &mut self,
        id: impl Into<String>,
        approved: bool,
    ) -> Result<(), SocketError> {
        self.socket.send(&PlainParentFrame::ApprovalReply { id: id.into(), approved }).await
    }

    /// The next frame that means something. Nothing is lost if the wait is given up.
    pub async fn next_frame(&mut self) -> Result<PlainWorkerFrame, SocketError> {
        loop {
            if let IncomingFrame::Text(text) = self.socket.next().await?
                && let Some(frame) = parse_frame(text.as_str())
            {
                return Ok(frame);
            }
        }
    }

    /// Puts a frame in line and waits for nothing. It goes out while [`PlainClient::came`] is waited for, so that a worker
    /// which does not read keeps nobody from hearing it.
    pub fn queue_frame(&mut self, frame: &PlainParentFrame) -> Result<(), SocketError> {
        let text = serde_json::to_string(frame).map_err(std::io::Error::from)?;
        self.socket.queue_text(text)?;
        self.unflushed = true;
        Ok(())
    }

    /// Asks for a sign of life in the same way. When that comes, the worker has read all that was posted before.
    pub fn queue_ping(&mut self) -> Result<(), SocketError> {
        self.socket.queue_ping()?;
        self.unflushed = true;
        Ok(())
    }

    /// Sends what was posted, and waits for what comes; for ever, if nobody is listening. Nothing is lost if the wait is
    /// given up.
    pub async fn next_event(&mut self, listening: bool) -> Result<PlainClientEvent, SocketError> {
        loop {
            match poll_fn(|context| self.poll_event(listening, context)).await? {
                IncomingFrame::Text(text) => {
                    if let Some(frame) = parse_frame(text.as_str()) {
                        return Ok(PlainClientEvent::Frame(frame));
                    }
                }
                IncomingFrame::Binary(_) => {}
                IncomingFrame::Alive => {
                    // It may have been a question, whose answer is in line now.
                    self.unflushed = true;
                    return Ok(PlainClientEvent::Alive);
                }
            }
        }
    }

    /// Writes first: a worker that never stops talking would otherwise never be told to.
    fn poll_event(
        &mut self,
        listening: bool,
        context: &mut Context<'_>,
    ) -> Poll<Result<IncomingFrame, SocketError>> {
        // That it cannot be written shows in reading, too, and there only after the worker's last words.
        if self.unflushed && self.socket.poll_flush(context).is_ready() {
            self.unflushed = false;
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
struct FlatWorkerFrame {
    kind: WorkerFrameKind,
    event: Option<Map<String, Value>>,
    id: Option<String>,
    body: Option<PlainApproval>,
    status: Option<PlainRunStatus>,
    result: Option<String>,
    error: Option<String>,
    #[serde(default)]
    transcript: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum WorkerFrameKind {
    Event,
    ApprovalRequest,
    Terminal,
}

fn parse_frame(text: &str) -> Option<PlainWorkerFrame> {
    let FlatWorkerFrame { kind, event, id, body, status, result, error, transcript } =
        serde_json::from_str(text).ok()?;
    match kind {
        WorkerFrameKind::Event => Some(PlainWorkerFrame::Event { event: event? }),
        WorkerFrameKind::ApprovalRequest => Some(PlainWorkerFrame::ApprovalRequest { id: id?, body: body? }),
        WorkerFrameKind::Terminal => {
            Some(PlainWorkerFrame::Terminal { status: status?, result, error, transcript })
        }
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
            assert_eq!(parse_frame(text), serde_json::from_str(text).ok(), "{text}");
        }
    }
}
