//! One connection of a seat, once both sides have proven themselves: what waits goes out in few large frames, and
//! commands and acknowledgements are read whatever is being written.

use std::sync::Arc;

use bytes::Bytes;
use qd_protocol::frame::v1::ToWorker;
use qd_protocol::link::UpNumber;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::handshake::{Refusal, refuse};
use super::{Shared, Wanted};
use crate::line::{Line, Step};
use crate::socket::{Socket, SocketError, Wire};

/// About how much goes into one frame. More would only make commands wait behind it.
const BATCH_MAX: usize = 64 << 10;

/// Talks to a daemon that has everything up to `taken`, until the connection ends or a newer one comes.
pub(super) async fn converse<W: Wire>(
    shared: &Shared,
    mut socket: Socket<W>,
    taken: UpNumber,
) -> Result<(), SocketError> {
    let Some(attached) = Attached::new(shared, taken) else {
        return Err(refuse(&mut socket, Refusal::bad_number(taken)).await);
    };
    let mut line = Line::new(socket);
    loop {
        match attached.next(!line.is_writing())? {
            Next::Frame(frame) => line.feed_text(frame)?,
            Next::Nothing => {}
            Next::Superseded => return Ok(()),
        }
        tokio::select! {
            step = line.step(true) => if let Step::Frame(text) = step? {
                attached.take(text.as_str());
            },
            () = attached.wake.notified() => {}
        }
    }
}

/// That a daemon is attached. When it is dropped, none is, unless another has come.
struct Attached<'a> {
    shared: &'a Shared,
    wake: Arc<Notify>,
}

enum Next {
    Frame(String),
    Nothing,
    Superseded,
}

impl<'a> Attached<'a> {
    /// `None` if there is no going on from what was taken.
    fn new(shared: &'a Shared, taken: UpNumber) -> Option<Self> {
        let wake = Arc::new(Notify::new());
        let mut state = shared.lock();
        if !state.store.reaches(taken) {
            return None;
        }
        state.store.ack(taken);
        state.store.give_after(Some(taken));
        state.since = Instant::now();
        if let Some(older) = state.connection.replace(Arc::clone(&wake)) {
            older.notify_one();
        }
        shared.changed(&state);
        drop(state);
        Some(Self { shared, wake })
    }

    /// What is to be done next; a frame only if there is room for one.
    fn next(&self, room: bool) -> Result<Next, SocketError> {
        let mut state = self.shared.lock();
        if !self.is(state.connection.as_ref()) {
            return Ok(Next::Superseded);
        }
        if !room {
            return Ok(Next::Nothing);
        }
        match state.store.give(BATCH_MAX)? {
            Some((first, lines)) => {
                drop(state);
                Ok(Next::Frame(said(first, &lines)?))
            }
            None => Ok(Next::Nothing),
        }
    }

    /// Does what a frame says; one that cannot be read is nothing to us.
    fn take(&self, text: &str) {
        match serde_json::from_str(text) {
            Ok(ToWorker::Ack(upto)) => {
                let mut state = self.shared.lock();
                state.store.ack(upto);
                self.shared.changed(&state);
            }
            Ok(ToWorker::Do(down)) => self.shared.command(down),
            Ok(ToWorker::Limits { run, limits }) => self.shared.limit(run, limits),
            Ok(ToWorker::Start(spec)) => self.shared.want(Wanted::Start(spec)),
            Ok(ToWorker::Rest) => self.shared.want(Wanted::Rest),
            Ok(ToWorker::Close) => self.shared.want(Wanted::Close),
            Ok(ToWorker::Hello(_) | ToWorker::Proof(_)) => {}
            Err(error) => tracing::debug!(%error, "a frame that cannot be read"),
        }
    }

    fn is(&self, connection: Option<&Arc<Notify>>) -> bool {
        connection.is_some_and(|connection| Arc::ptr_eq(connection, &self.wake))
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if self.is(state.connection.as_ref()) {
            state.connection = None;
            state.store.give_after(None);
            state.since = Instant::now();
            self.shared.changed(&state);
        }
    }
}

/// The frame with these lines, put together as text: they are JSON already.
fn said(first: UpNumber, lines: &[Bytes]) -> Result<String, SocketError> {
    let head = format!(r#"{{"said":{{"first":{},"ups":["#, first.0);
    let size = head.len() + lines.iter().map(|line| line.len() + 1).sum::<usize>() + 3;
    let mut frame = Vec::with_capacity(size);
    frame.extend_from_slice(head.as_bytes());
    for (place, line) in lines.iter().enumerate() {
        if place > 0 {
            frame.push(b',');
        }
        frame.extend_from_slice(line);
    }
    frame.extend_from_slice(b"]}}");
    String::from_utf8(frame).map_err(|error| SocketError::from(std::io::Error::other(error)))
}
