//! One connection of a seat, once both sides have proven themselves: what waits goes out in few large frames, and
//! commands and acknowledgements are read whatever is being written.

use std::sync::Arc;

use bytes::Bytes;
use qd_protocol::frame::v1::DaemonLinkFrame;
use qd_protocol::link::UpdateNumber;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::handshake::{HandshakeRefusal, refuse_daemon};
use super::{EndpointShared, LifecycleRequest};
use crate::link_connection::{ConnectionProgress, LinkConnection};
use crate::socket::{ByteStream, Socket, SocketError};

/// About how much goes into one frame. More would only make commands wait behind it.
const BATCH_MAX: usize = 64 << 10;

/// Talks to a daemon that has everything up to `taken`, until the connection ends or a newer one comes.
pub(super) async fn serve_daemon<W: ByteStream>(
    shared: &EndpointShared,
    mut socket: Socket<W>,
    taken: UpdateNumber,
) -> Result<(), SocketError> {
    let Some(attached) = DaemonAttachment::new(shared, taken) else {
        return Err(refuse_daemon(&mut socket, HandshakeRefusal::bad_number(taken)).await);
    };
    let mut line = LinkConnection::new(socket);
    loop {
        match attached.next_step(!line.is_writing())? {
            AttachmentStep::Frame(frame) => line.queue_text(frame)?,
            AttachmentStep::Nothing => {}
            AttachmentStep::Superseded => return Ok(()),
        }
        tokio::select! {
            step = line.progress(true) => if let ConnectionProgress::Frame(text) = step? {
                attached.receive_frame(text.as_str());
            },
            () = attached.wake.notified() => {}
        }
    }
}

/// That a daemon is attached. When it is dropped, none is, unless another has come.
struct DaemonAttachment<'a> {
    shared: &'a EndpointShared,
    wake: Arc<Notify>,
}

enum AttachmentStep {
    Frame(String),
    Nothing,
    Superseded,
}

impl<'a> DaemonAttachment<'a> {
    /// `None` if there is no going on from what was taken.
    fn new(shared: &'a EndpointShared, taken: UpdateNumber) -> Option<Self> {
        let wake = Arc::new(Notify::new());
        let mut state = shared.lock();
        if !state.outbox.can_resume_after(taken) {
            return None;
        }
        state.outbox.ack(taken);
        state.outbox.set_last_sent(Some(taken));
        state.attachment_changed_at = Instant::now();
        if let Some(older) = state.connection.replace(Arc::clone(&wake)) {
            older.notify_one();
        }
        shared.notify_changed(&state);
        drop(state);
        Some(Self { shared, wake })
    }

    /// What is to be done next; a frame only if there is room for one.
    fn next_step(&self, room: bool) -> Result<AttachmentStep, SocketError> {
        let mut state = self.shared.lock();
        if !self.is_current(state.connection.as_ref()) {
            return Ok(AttachmentStep::Superseded);
        }
        if !room {
            return Ok(AttachmentStep::Nothing);
        }
        match state.outbox.next_batch(BATCH_MAX)? {
            Some((first, lines)) => {
                drop(state);
                Ok(AttachmentStep::Frame(updates_frame(first, &lines)?))
            }
            None => Ok(AttachmentStep::Nothing),
        }
    }

    /// Does what a frame says; one that cannot be read is nothing to us.
    fn receive_frame(&self, text: &str) {
        match serde_json::from_str(text) {
            Ok(DaemonLinkFrame::Ack(upto)) => {
                let mut state = self.shared.lock();
                state.outbox.ack(upto);
                self.shared.notify_changed(&state);
            }
            Ok(DaemonLinkFrame::Command(down)) => self.shared.push_command(down),
            Ok(DaemonLinkFrame::Limits { run, limits }) => self.shared.set_turn_limits(run, limits),
            Ok(DaemonLinkFrame::Start(spec)) => self.shared.push_request(LifecycleRequest::Start(spec)),
            Ok(DaemonLinkFrame::Rest) => self.shared.push_request(LifecycleRequest::Rest),
            Ok(DaemonLinkFrame::Close) => self.shared.push_request(LifecycleRequest::Close),
            Ok(DaemonLinkFrame::Hello(_) | DaemonLinkFrame::Proof(_)) => {}
            Err(error) => tracing::debug!(%error, "a frame that cannot be read"),
        }
    }

    fn is_current(&self, connection: Option<&Arc<Notify>>) -> bool {
        connection.is_some_and(|connection| Arc::ptr_eq(connection, &self.wake))
    }
}

impl Drop for DaemonAttachment<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if self.is_current(state.connection.as_ref()) {
            state.connection = None;
            state.outbox.set_last_sent(None);
            state.attachment_changed_at = Instant::now();
            self.shared.notify_changed(&state);
        }
    }
}

/// The frame with these lines, put together as text: they are JSON already.
fn updates_frame(first: UpdateNumber, lines: &[Bytes]) -> Result<String, SocketError> {
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
