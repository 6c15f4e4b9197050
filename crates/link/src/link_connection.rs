//! One connection of a link, as both of its ends use it: writing never keeps it from reading, and a peer that is gone
//! is told from one that has nothing to say. What the frames mean is not known here.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use qd_protocol::limits::PING_S;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, Sleep};

use crate::socket::{ByteStream, IncomingFrame, STEP_TIMEOUT, Socket, SocketError, TextFrame};

/// Silence before the peer is asked for a sign of life.
const PING_AFTER: Duration = Duration::from_secs(PING_S);
/// Silence before it counts as gone.
const GIVE_UP_AFTER: Duration = Duration::from_secs(3 * PING_S);

/// A connection.
#[derive(Debug)]
pub(crate) struct LinkConnection<W> {
    socket: Socket<W>,
    /// Something was fed and not all of it is written.
    writing: bool,
    /// When the peer last gave a sign of life.
    last_heard: Instant,
    /// When to look whether it still does. Boxed: it may not be moved, and the line must.
    liveness_timer: Pin<Box<Sleep>>,
}

/// What has come of waiting.
#[derive(Debug)]
pub(crate) enum ConnectionProgress {
    /// A frame.
    Frame(TextFrame),
    /// All that was fed is written.
    Written,
}

impl<W: ByteStream> LinkConnection<W> {
    pub(crate) fn new(socket: Socket<W>) -> Self {
        let liveness_timer = Box::pin(tokio::time::sleep(PING_AFTER));
        Self { socket, writing: false, last_heard: Instant::now(), liveness_timer }
    }

    /// Whether what was fed is still being written. Feeding more before it is only fills memory.
    pub(crate) fn is_writing(&self) -> bool {
        self.writing
    }

    /// Takes a frame, to be written by [`Line::step`].
    pub(crate) fn queue_frame(&mut self, frame: &impl Serialize) -> Result<(), SocketError> {
        self.queue_text(frame_json(frame)?)
    }

    /// See [`Line::feed`]; the frame is JSON already.
    pub(crate) fn queue_text(&mut self, text: String) -> Result<(), SocketError> {
        self.writing = true;
        self.socket.queue_text(text)
    }

    /// Writes what was fed and, if `reading`, waits for a frame. Nothing is lost if the wait is given up.
    pub(crate) async fn progress(&mut self, reading: bool) -> Result<ConnectionProgress, SocketError> {
        poll_fn(|context| self.poll_progress(context, reading)).await
    }

    /// Says goodbye.
    pub(crate) async fn close(mut self) {
        self.socket.close().await;
    }

    fn poll_progress(
        &mut self,
        context: &mut Context<'_>,
        reading: bool,
    ) -> Poll<Result<ConnectionProgress, SocketError>> {
        loop {
            if self.writing
                && let Poll::Ready(written) = self.socket.poll_flush(context)
            {
                self.writing = false;
                return Poll::Ready(written.map(|()| ConnectionProgress::Written));
            }
            while reading && let Poll::Ready(incoming) = self.socket.poll_next(context)? {
                self.last_heard = Instant::now();
                if let IncomingFrame::Text(text) = incoming {
                    return Poll::Ready(Ok(ConnectionProgress::Frame(text)));
                }
            }
            if self.liveness_timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            self.check_liveness(reading)?;
        }
    }

    /// Asks a silent peer for a sign of life, or gives it up.
    fn check_liveness(&mut self, reading: bool) -> Result<(), SocketError> {
        let now = Instant::now();
        if !reading {
            // Who does not listen cannot complain of silence, but owes the peer a sign that somebody is there.
            self.last_heard = now;
        }
        let silence = now.duration_since(self.last_heard);
        if silence >= GIVE_UP_AFTER {
            return Err(SocketError::TimedOut);
        }
        if silence >= PING_AFTER || !reading {
            self.socket.queue_ping()?;
            self.writing = true;
            self.liveness_timer.as_mut().reset(now + PING_AFTER);
        } else {
            self.liveness_timer.as_mut().reset(self.last_heard + PING_AFTER);
        }
        Ok(())
    }
}

/// The next frame of a handshake, in time; what cannot be read is nothing to us.
pub(crate) async fn read_frame<W: ByteStream, F: DeserializeOwned>(
    socket: &mut Socket<W>,
) -> Result<F, SocketError> {
    let read = async {
        loop {
            if let IncomingFrame::Text(text) = socket.next().await?
                && let Ok(frame) = serde_json::from_str(text.as_str())
            {
                return Ok(frame);
            }
        }
    };
    tokio::time::timeout(STEP_TIMEOUT, read).await.unwrap_or(Err(SocketError::TimedOut))
}

/// A frame as text.
fn frame_json(frame: &impl Serialize) -> Result<String, SocketError> {
    serde_json::to_string(frame).map_err(|error| SocketError::from(io::Error::from(error)))
}
