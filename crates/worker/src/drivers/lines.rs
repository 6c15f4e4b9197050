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
pub(crate) type Exited = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The agent at the other end of two streams.
pub(crate) struct Lines<R, W> {
    incoming: Incoming<R>,
    outgoing: Outgoing<W>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Lines<R, W> {
    /// Reads from one stream and writes to the other, until the first is over or `exited` says so.
    pub(crate) fn new(from: R, to: W, exited: Exited) -> Self {
        Self {
            incoming: Incoming::new(from, exited),
            outgoing: Outgoing { to, waiting: BytesMut::new(), broken: false },
        }
    }

    /// Writes a message as one line, when somebody waits for the next.
    pub(crate) fn put<T: Serialize>(&mut self, message: &T) {
        self.outgoing.put(message);
    }

    /// The agent's next line that is not empty, or `None` when there will be none. Writes what waits to be written
    /// meanwhile, and does only that if not `listening`. Nothing is lost if the wait is given up.
    pub(crate) async fn next(&mut self, listening: bool) -> Option<BytesMut> {
        let Self { incoming, outgoing } = self;
        loop {
            let listening = listening && outgoing.waiting.len() < WAITING_MAX;
            tokio::select! {
                biased;
                () = outgoing.write() => {}
                line = incoming.next(), if listening => return line,
            }
        }
    }

    /// Closes the stream to the agent, and gives the other one up to be emptied.
    pub(crate) fn hang_up(self) -> R {
        self.incoming.from
    }
}

/// A line that is no message: an agent's library may print to stdout, which must harm nobody. What it says is not
/// shown, since it may be anything, a secret too.
pub(crate) fn ignore(line: &[u8]) {
    tracing::warn!("the agent wrote a line of {} bytes that is no message, which is ignored", line.len());
}

/// The stream from the agent.
struct Incoming<R> {
    from: R,
    buffer: BytesMut,
    /// How much of the buffer is known to have no line's end.
    scanned: usize,
    /// Whether the buffer begins within a line that was too long.
    skipping: bool,
    exited: Exited,
    /// How much may still be read, once the agent's process is dead.
    left: Option<usize>,
}

impl<R: AsyncRead + Unpin> Incoming<R> {
    fn new(from: R, exited: Exited) -> Self {
        Self { from, buffer: BytesMut::new(), scanned: 0, skipping: false, exited, left: None }
    }

    async fn next(&mut self) -> Option<BytesMut> {
        loop {
            while let Some(line) = self.line() {
                if !line.trim_ascii().is_empty() {
                    return Some(line);
                }
            }
            if !self.read().await {
                return None;
            }
        }
    }

    /// The next whole line that has been read.
    fn line(&mut self) -> Option<BytesMut> {
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
    async fn read(&mut self) -> bool {
        self.buffer.reserve(READ_SIZE);
        loop {
            tokio::select! {
                biased;
                read = self.from.read_buf(&mut self.buffer) => {
                    // A stream that breaks is over like one that ends.
                    let read = read.unwrap_or_default();
                    self.left = self.left.map(|left| left.saturating_sub(read));
                    return read > 0 && self.left != Some(0);
                }
                () = &mut self.exited, if self.left.is_none() => self.left = Some(DRAIN_MAX),
                () = tokio::time::sleep(DRAIN_SILENCE), if self.left.is_some() => return false,
            }
        }
    }
}

/// The stream to the agent.
struct Outgoing<W> {
    to: W,
    waiting: BytesMut,
    /// The agent has closed its side. That it is over is learned from the other stream.
    broken: bool,
}

impl<W: AsyncWrite + Unpin> Outgoing<W> {
    fn put<T: Serialize>(&mut self, message: &T) {
        if !self.broken {
            serde_json::to_writer((&mut self.waiting).writer(), message).expect("a message is JSON");
            self.waiting.put_u8(b'\n');
        }
    }

    /// Writes some of what waits; for ever if nothing does. What is written is no longer waiting, so that nothing is
    /// written twice if this is given up.
    async fn write(&mut self) {
        if self.waiting.is_empty() {
            return pending().await;
        }
        if !matches!(self.to.write_buf(&mut self.waiting).await, Ok(1..)) {
            self.broken = true;
            self.waiting = BytesMut::new();
        }
    }
}
