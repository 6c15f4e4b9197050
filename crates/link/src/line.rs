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

use crate::socket::{Incoming, STEP, Socket, SocketError, Text, Wire};

/// Silence before the peer is asked for a sign of life.
const PING: Duration = Duration::from_secs(PING_S);
/// Silence before it counts as gone.
const GONE: Duration = Duration::from_secs(3 * PING_S);

/// A connection.
#[derive(Debug)]
pub(crate) struct Line<W> {
    socket: Socket<W>,
    /// Something was fed and not all of it is written.
    writing: bool,
    /// When the peer last gave a sign of life.
    heard: Instant,
    /// When to look whether it still does. Boxed: it may not be moved, and the line must.
    alarm: Pin<Box<Sleep>>,
}

/// What has come of waiting.
#[derive(Debug)]
pub(crate) enum Step {
    /// A frame.
    Frame(Text),
    /// All that was fed is written.
    Written,
}

impl<W: Wire> Line<W> {
    pub(crate) fn new(socket: Socket<W>) -> Self {
        let alarm = Box::pin(tokio::time::sleep(PING));
        Self { socket, writing: false, heard: Instant::now(), alarm }
    }

    /// Whether what was fed is still being written. Feeding more before it is only fills memory.
    pub(crate) fn is_writing(&self) -> bool {
        self.writing
    }

    /// Takes a frame, to be written by [`Line::step`].
    pub(crate) fn feed(&mut self, frame: &impl Serialize) -> Result<(), SocketError> {
        self.feed_text(json(frame)?)
    }

    /// See [`Line::feed`]; the frame is JSON already.
    pub(crate) fn feed_text(&mut self, text: String) -> Result<(), SocketError> {
        self.writing = true;
        self.socket.start(text)
    }

    /// Writes what was fed and, if `reading`, waits for a frame. Nothing is lost if the wait is given up.
    pub(crate) async fn step(&mut self, reading: bool) -> Result<Step, SocketError> {
        poll_fn(|context| self.poll_step(context, reading)).await
    }

    /// Says goodbye.
    pub(crate) async fn close(mut self) {
        self.socket.close().await;
    }

    fn poll_step(&mut self, context: &mut Context<'_>, reading: bool) -> Poll<Result<Step, SocketError>> {
        loop {
            if self.writing
                && let Poll::Ready(written) = self.socket.poll_flush(context)
            {
                self.writing = false;
                return Poll::Ready(written.map(|()| Step::Written));
            }
            while reading && let Poll::Ready(incoming) = self.socket.poll_next(context)? {
                self.heard = Instant::now();
                if let Incoming::Text(text) = incoming {
                    return Poll::Ready(Ok(Step::Frame(text)));
                }
            }
            if self.alarm.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            self.look(reading)?;
        }
    }

    /// Asks a silent peer for a sign of life, or gives it up.
    fn look(&mut self, reading: bool) -> Result<(), SocketError> {
        let now = Instant::now();
        if !reading {
            // Who does not listen cannot complain of silence, but owes the peer a sign that somebody is there.
            self.heard = now;
        }
        let silence = now.duration_since(self.heard);
        if silence >= GONE {
            return Err(SocketError::TimedOut);
        }
        if silence >= PING || !reading {
            self.socket.start_ping()?;
            self.writing = true;
            self.alarm.as_mut().reset(now + PING);
        } else {
            self.alarm.as_mut().reset(self.heard + PING);
        }
        Ok(())
    }
}

/// The next frame of a handshake, in time; what cannot be read is nothing to us.
pub(crate) async fn frame<W: Wire, F: DeserializeOwned>(socket: &mut Socket<W>) -> Result<F, SocketError> {
    let read = async {
        loop {
            if let Incoming::Text(text) = socket.next().await?
                && let Ok(frame) = serde_json::from_str(text.as_str())
            {
                return Ok(frame);
            }
        }
    };
    tokio::time::timeout(STEP, read).await.unwrap_or(Err(SocketError::TimedOut))
}

/// A frame as text.
fn json(frame: &impl Serialize) -> Result<String, SocketError> {
    serde_json::to_string(frame).map_err(|error| SocketError::from(io::Error::from(error)))
}
