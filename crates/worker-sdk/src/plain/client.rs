//! The parent's side of a connection without a subprotocol. It can talk to any worker that knows the frames, ours or
//! not.

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
    /// Whether a queued frame may not be written yet.
    unflushed: bool,
}

/// What a worker has sent.
#[derive(Debug, Clone, PartialEq)]
pub enum PlainClientEvent {
    /// A frame that could be parsed.
    Frame(PlainWorkerFrame),
    /// The worker is alive: a ping or a pong.
    Alive,
}

impl PlainClient {
    /// Connects to `HOST:PORT`, with or without a leading `ws://`.
    pub async fn connect(endpoint: &str, token: Option<&str>) -> Result<Self, SocketError> {
        let host = endpoint.strip_prefix("ws://").unwrap_or(endpoint).trim_end_matches('/');
        let stream = tokio::time::timeout(STEP_TIMEOUT, TcpStream::connect(host));
        let stream = stream.await.map_err(|_| SocketError::TimedOut)?.map_err(SocketError::from)?;
        stream.set_nodelay(true)?;
        Self::connect_over(stream, host, token).await
    }
}

impl<W: ByteStream> PlainClient<W> {
    /// Upgrades an existing stream: TLS, a unix socket, a pipe in a test.
    pub async fn connect_over(stream: W, host: &str, token: Option<&str>) -> Result<Self, SocketError> {
        let upgrade = ClientUpgrade {
            host: host.to_owned(),
            path: "/".to_owned(),
            subprotocol: None,
            token: token.map(str::to_owned),
        };
        Self::connect_with(stream, &upgrade).await
    }

    /// Upgrades an existing stream with these upgrade options.
    pub async fn connect_with(stream: W, upgrade: &ClientUpgrade) -> Result<Self, SocketError> {
        let (socket, _) = Socket::connect(stream, upgrade).await?;
        Ok(Self { socket, unflushed: false })
    }

    /// Starts a run. An active run is cancelled first.
    pub async fn start_run(&mut self, assignment: RunAssignment) -> Result<(), SocketError> {
        let RunAssignment { prompt: assignment, reasoning_effort, messages, .. } = assignment;
        self.socket.send(&PlainParentFrame::Run { assignment, reasoning_effort, messages }).await
    }

    /// Cancels the active run.
    pub async fn cancel(&mut self) -> Result<(), SocketError> {
        self.socket.send(&PlainParentFrame::Cancel).await
    }

    /// Sends a message to the active run.
    pub async fn send_message(&mut self, text: impl Into<String>) -> Result<(), SocketError> {
        self.socket.send(&PlainParentFrame::Message { text: text.into() }).await
    }

    /// Answers an approval request.
    pub async fn reply_to_approval(
        &mut self,
        id: impl Into<String>,
        approved: bool,
    ) -> Result<(), SocketError> {
        self.socket.send(&PlainParentFrame::ApprovalReply { id: id.into(), approved }).await
    }

    /// The next frame that can be parsed. Cancelling the wait loses nothing.
    pub async fn next_frame(&mut self) -> Result<PlainWorkerFrame, SocketError> {
        loop {
            if let IncomingFrame::Text(text) = self.socket.next().await?
                && let Some(frame) = parse_frame(text.as_str())
            {
                return Ok(frame);
            }
        }
    }

    /// Queues a frame without waiting. [`PlainClient::next_event`] writes it, so a worker that does not read cannot
    /// block the caller from reading.
    pub fn queue_frame(&mut self, frame: &PlainParentFrame) -> Result<(), SocketError> {
        let text = serde_json::to_string(frame).map_err(std::io::Error::from)?;
        self.socket.queue_text(text)?;
        self.unflushed = true;
        Ok(())
    }

    /// Queues a ping. When the pong comes, the worker has read everything queued before.
    pub fn queue_ping(&mut self) -> Result<(), SocketError> {
        self.socket.queue_ping()?;
        self.unflushed = true;
        Ok(())
    }

    /// Writes queued frames and waits for the next event. If `listening` is false, it only writes and never returns an
    /// event. Cancelling the wait loses nothing.
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
                    // If this was a ping, our pong is queued now and has to be flushed.
                    self.unflushed = true;
                    return Ok(PlainClientEvent::Alive);
                }
            }
        }
    }

    /// Writes first: a worker that never stops sending could otherwise never be cancelled.
    fn poll_event(
        &mut self,
        listening: bool,
        context: &mut Context<'_>,
    ) -> Poll<Result<IncomingFrame, SocketError>> {
        // A write error also shows up when reading, but there only after the worker's last frames.
        if self.unflushed && self.socket.poll_flush(context).is_ready() {
            self.unflushed = false;
        }
        if listening { self.socket.poll_next(context) } else { Poll::Pending }
    }

    /// Closes the connection. The worker's active run, if any, is cancelled.
    pub async fn close(mut self) {
        self.socket.close().await;
    }
}

/// All kinds of frame in one flat struct. Serde parses an internally tagged enum twice, and events come by the
/// million.
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
