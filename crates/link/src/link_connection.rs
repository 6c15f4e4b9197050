//! One connection of a link, as both ends use it. Writing never blocks reading, and pings tell a dead peer from one
//! that is merely silent. The meaning of the frames is not known here.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use qd_protocol::limits::PING_S;
use qd_worker_sdk::socket::{ByteStream, IncomingFrame, STEP_TIMEOUT, Socket, SocketError, TextFrame};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, Sleep};

/// How long the peer may be silent before it is pinged.
const PING_AFTER: Duration = Duration::from_secs(PING_S);
/// How long the peer may be silent before the connection counts as dead.
const GIVE_UP_AFTER: Duration = Duration::from_secs(3 * PING_S);

#[derive(Debug)]
pub(crate) struct LinkConnection<W> {
    socket: Socket<W>,
    /// A queued frame is not completely written yet.
    writing: bool,
    /// When the peer last sent anything, a pong included.
    last_received_at: Instant,
    /// When the peer's liveness is checked next. Boxed, because a `Sleep` must stay pinned while the connection moves.
    liveness_timer: Pin<Box<Sleep>>,
}

#[derive(Debug)]
pub(crate) enum ConnectionProgress {
    Frame(TextFrame),
    /// Everything that was queued is written.
    Written,
}

impl<W: ByteStream> LinkConnection<W> {
    pub(crate) fn new(socket: Socket<W>) -> Self {
        let liveness_timer = Box::pin(tokio::time::sleep(PING_AFTER));
        Self { socket, writing: false, last_received_at: Instant::now(), liveness_timer }
    }

    /// Whether queued frames are still being written. Queueing more meanwhile only fills memory.
    pub(crate) fn is_writing(&self) -> bool {
        self.writing
    }

    /// Queues a frame; [`LinkConnection::progress`] writes it.
    pub(crate) fn queue_frame(&mut self, frame: &impl Serialize) -> Result<(), SocketError> {
        self.queue_text(frame_json(frame)?)
    }

    /// Like [`LinkConnection::queue_frame`], for a frame that is JSON already.
    pub(crate) fn queue_text(&mut self, text: String) -> Result<(), SocketError> {
        self.writing = true;
        self.socket.queue_text(text)
    }

    /// Writes queued frames and, if `reading`, waits for the next frame. Cancelling the wait loses nothing.
    pub(crate) async fn progress(&mut self, reading: bool) -> Result<ConnectionProgress, SocketError> {
        poll_fn(|context| self.poll_progress(context, reading)).await
    }

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
                self.last_received_at = Instant::now();
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

    /// Pings a silent peer, or fails with a timeout if it has been silent for too long.
    fn check_liveness(&mut self, reading: bool) -> Result<(), SocketError> {
        let now = Instant::now();
        if !reading {
            // While we do not read, the peer's silence proves nothing. The peer still needs a sign that we are alive.
            self.last_received_at = now;
        }
        let silence = now.duration_since(self.last_received_at);
        if silence >= GIVE_UP_AFTER {
            return Err(SocketError::TimedOut);
        }
        if silence >= PING_AFTER || !reading {
            self.socket.queue_ping()?;
            self.writing = true;
            self.liveness_timer.as_mut().reset(now + PING_AFTER);
        } else {
            self.liveness_timer.as_mut().reset(self.last_received_at + PING_AFTER);
        }
        Ok(())
    }
}

/// Reads the next frame of a handshake within [`STEP_TIMEOUT`]. Frames that cannot be parsed are skipped.
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

fn frame_json(frame: &impl Serialize) -> Result<String, SocketError> {
    serde_json::to_string(frame).map_err(|error| SocketError::from(io::Error::from(error)))
}
