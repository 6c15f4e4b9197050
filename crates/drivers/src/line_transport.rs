//! Messages as lines over an agent's stdin and stdout. This module knows the size limits and nothing about what the
//! lines mean. There is no task behind it: waiting for the next line also writes the queued messages.

use std::future::pending;
use std::pin::Pin;
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The longest line that an agent may write, in bytes. A longer line is skipped.
const LINE_MAX: usize = 64 << 20;
/// The most bytes that may wait to be written before the agent is no longer read: an agent that asks must also read.
const WAITING_MAX: usize = 1 << 20;
/// The most bytes read at a time.
const READ_SIZE: usize = 64 << 10;
/// Silence after which a dead agent's stdout counts as closed, even if a leftover process holds it open.
const DRAIN_SILENCE: Duration = Duration::from_millis(200);
/// The most bytes still read from a dead agent's stdout: more than any pipe holds.
const DRAIN_MAX: usize = 2 << 20;

pub(crate) type ExitFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The connection to an agent over its stdout and stdin.
pub(crate) struct LineTransport<R, W> {
    reader: AgentLineReader<R>,
    writer: AgentLineWriter<W>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> LineTransport<R, W> {
    /// Reads from one stream and writes to the other, until the first ends or the process has exited.
    pub(crate) fn new(from: R, to: W, exited: ExitFuture) -> Self {
        Self {
            reader: AgentLineReader::new(from, exited),
            writer: AgentLineWriter { sink: to, unwritten: BytesMut::new(), broken: false },
        }
    }

    /// Queues a message, which is written as one line while [`Self::next_line`] waits.
    pub(crate) fn queue_message<T: Serialize>(&mut self, message: &T) {
        self.writer.queue_message(message);
    }

    /// The agent's next line that is not empty, or `None` at the end. Writes queued messages meanwhile, and only that
    /// if not `listening`. Dropping the wait loses nothing.
    pub(crate) async fn next_line(&mut self, listening: bool) -> Option<BytesMut> {
        let Self { reader, writer } = self;
        loop {
            let listening = listening && writer.unwritten.len() < WAITING_MAX;
            tokio::select! {
                biased;
                () = writer.write_some() => {}
                line = reader.next_line(), if listening => return line,
            }
        }
    }

    /// Closes the agent's stdin, and returns its stdout so that the caller can drain it.
    pub(crate) fn close_stdin(self) -> R {
        self.reader.source
    }
}

/// Logs a line that is not a message: a library of the agent may print to stdout, which does no harm. The content is
/// not logged, since it may contain a secret.
pub(crate) fn log_ignored_line(line: &[u8]) {
    tracing::warn!("ignored a line of {} bytes on the agent's stdout that is not a message", line.len());
}

struct AgentLineReader<R> {
    source: R,
    buffer: BytesMut,
    /// The length of the buffer's beginning that is known to have no newline.
    scanned: usize,
    /// Whether the buffer begins inside a line that is being skipped.
    skipping: bool,
    exited: ExitFuture,
    /// How many bytes may still be read, once the agent's process has exited.
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

    /// Takes the next complete line out of the buffer.
    fn take_line(&mut self) -> Option<BytesMut> {
        loop {
            let Some(at) = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n') else {
                self.scanned = self.buffer.len();
                if self.scanned > LINE_MAX {
                    tracing::warn!("skipped a line of more than {LINE_MAX} bytes on the agent's stdout");
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

    /// Reads more; returns false at the end.
    async fn read_more(&mut self) -> bool {
        self.buffer.reserve(READ_SIZE);
        loop {
            tokio::select! {
                biased;
                read = self.source.read_buf(&mut self.buffer) => {
                    // A read error ends the stream as well.
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

struct AgentLineWriter<W> {
    sink: W,
    unwritten: BytesMut,
    /// The agent has closed its stdin. Its end is noticed on stdout.
    broken: bool,
}

impl<W: AsyncWrite + Unpin> AgentLineWriter<W> {
    fn queue_message<T: Serialize>(&mut self, message: &T) {
        if !self.broken {
            serde_json::to_writer((&mut self.unwritten).writer(), message).expect("a message is JSON");
            self.unwritten.put_u8(b'\n');
        }
    }

    /// Writes some of the queued bytes; waits for ever if there are none. Written bytes leave the queue at once, so
    /// nothing is written twice if the wait is dropped.
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
