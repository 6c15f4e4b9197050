//! Lines over an agent's two streams, one message each. It knows their bounds and nothing of what they mean; there is no
//! task behind it, so whoever waits for a line also drives what is to be written.

use std::future::pending;
use std::pin::Pin;
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The longest line that an agent may write; a longer one is skipped.
const LINE_MAX: usize = 64 << 20;
/// What may wait to be written before the agent is no longer listened to: one that asks must also read.
const WAITING_MAX: usize = 1 << 20;
/// How much is read at once.
const READ_SIZE: usize = 64 << 10;
/// Silence after which a dead agent's stream is over, even if a process that it left behind holds it open.
const DRAIN_SILENCE: Duration = Duration::from_millis(200);
/// What is still read of a dead agent's stream: more than any pipe holds.
const DRAIN_MAX: usize = 2 << 20;

/// Resolves when the agent's process is dead.
pub(crate) type ExitFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The agent at the other end of two streams.
pub(crate) struct LineTransport<R, W> {
    reader: AgentLineReader<R>,
    writer: AgentLineWriter<W>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> LineTransport<R, W> {
    /// Reads from one stream and writes to the other, until the first is over or `exited` says so.
    pub(crate) fn new(from: R, to: W, exited: ExitFuture) -> Self {
        Self {
            reader: AgentLineReader::new(from, exited),
            writer: AgentLineWriter { sink: to, unwritten: BytesMut::new(), broken: false },
        }
    }

    /// Writes a message as one line, when somebody waits for the next.
    pub(crate) fn queue_message<T: Serialize>(&mut self, message: &T) {
        self.writer.queue_message(message);
    }

    /// The agent's next line that is not empty, or `None` when there will be none. Writes what waits to be written
    /// meanwhile, and does only that if not `listening`. Nothing is lost if the wait is given up.
    pub(crate) async fn next_line(&mut self, listening: bool) -> Option<BytesMut> {
        let Self { reader: incoming, writer: outgoing } = self;
        loop {
            let listening = listening && outgoing.unwritten.len() < WAITING_MAX;
            tokio::select! {
                biased;
                () = outgoing.write_some() => {}
                line = incoming.next_line(), if listening => return line,
            }
        }
    }

    /// Closes the stream to the agent, and gives the other one up to be emptied.
    pub(crate) fn hang_up(self) -> R {
        self.reader.source
    }
}

/// A line that is no message: an agent's library may print to stdout, which must harm nobody. What it says is not
/// shown, since it may be anything, a secret too.
pub(crate) fn log_ignored_line(line: &[u8]) {
    tracing::warn!("the agent wrote a line of {} bytes that is no message, which is ignored", line.len());
}

/// The stream from the agent.
struct AgentLineReader<R> {
    source: R,
    buffer: BytesMut,
    /// How much of the buffer is known to have no line's end.
    scanned: usize,
    /// Whether the buffer begins within a line that was too long.
    skipping: bool,
    exited: ExitFuture,
    /// How much may still be read, once the agent's process is dead.
    drain_left: Option<usize>,
}

impl<R: AsyncRead + Unpin> AgentLineReader<R> {
    fn new(source: R, exited: ExitFuture) -> Self {
        Self { source, buffer: BytesMut::new(), scanned: 0, skipping: false, exited, drain_left: None }
    }

    async fn next_line(&mut self) -> Option<BytesMut> {
        loop {
            while let Some(line) = self.take_line() {
                if !line.trim_ascii().is_empty() {
                    return Some(line);
                }
            }
            if !self.read_more().await {
                return None;
            }
        }
    }

    /// The next whole line that has been read.
    fn take_line(&mut self) -> Option<BytesMut> {
        loop {
            let Some(at) = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n') else {
                self.scanned = self.buffer.len();
                if self.scanned > LINE_MAX {
                    tracing::warn!("the agent wrote a line of more than {LINE_MAX} bytes, which is skipped");
                    self.buffer = BytesMut::new();
                    self.scanned = 0;
                    self.skipping = true;
                }
                return None;
            };
            let line = self.buffer.split_to(self.scanned + at + 1);
            self.scanned = 0;
            if !std::mem::take(&mut self.skipping) {
                return Some(line);
            }
        }
    }

    /// Reads more; false if there is no more.
    async fn read_more(&mut self) -> bool {
        self.buffer.reserve(READ_SIZE);
        loop {
            tokio::select! {
                biased;
                read = self.source.read_buf(&mut self.buffer) => {
                    // A stream that breaks is over like one that ends.
                    let read = read.unwrap_or_default();
                    self.drain_left = self.drain_left.map(|left| left.saturating_sub(read));
                    return read > 0 && self.drain_left != Some(0);
                }
                () = &mut self.exited, if self.drain_left.is_none() => self.drain_left = Some(DRAIN_MAX),
                () = tokio::time::sleep(DRAIN_SILENCE), if self.drain_left.is_some() => return false,
            }
        }
    }
}

/// The stream to the agent.
struct AgentLineWriter<W> {
    sink: W,
    unwritten: BytesMut,
    /// The agent has closed its side. That it is over is learned from the other stream.
    broken: bool,
}

impl<W: AsyncWrite + Unpin> AgentLineWriter<W> {
    fn queue_message<T: Serialize>(&mut self, message: &T) {
        if !self.broken {
            serde_json::to_writer((&mut self.unwritten).writer(), message).expect("a message is JSON");
            self.unwritten.put_u8(b'\n');
        }
    }

    /// Writes some of what waits; for ever if nothing does. What is written is no longer waiting, so that nothing is
    /// written twice if this is given up.
    async fn write_some(&mut self) {
        if self.unwritten.is_empty() {
            return pending().await;
        }
        if !matches!(self.sink.write_buf(&mut self.unwritten).await, Ok(1..)) {
            self.broken = true;
            self.unwritten = BytesMut::new();
        }
    }
}
