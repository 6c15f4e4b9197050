//! One connection of an endpoint, after the handshake. Waiting updates go out in few large frames, and commands and
//! acknowledgements are read even while a frame is being written.

use std::sync::Arc;

use bytes::Bytes;
use qd_protocol::frame::v1::DaemonLinkFrame;
use qd_protocol::link::UpdateNumber;
use qd_worker_sdk::socket::{ByteStream, Socket, SocketError};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::handshake::{HandshakeRefusal, refuse_daemon};
use super::{EndpointShared, LifecycleRequest};
use crate::link_connection::{ConnectionProgress, LinkConnection};

/// The approximate size of one frame. Larger frames would only delay commands behind them.
const BATCH_MAX: usize = 64 << 10;

/// Serves a daemon that has received everything up to `received`, until the connection ends or a newer one replaces
/// it.
pub(super) async fn serve_daemon<W: ByteStream>(
    shared: &EndpointShared,
    mut socket: Socket<W>,
    received: UpdateNumber,
) -> Result<(), SocketError> {
    let Some(attachment) = DaemonAttachment::new(shared, received) else {
        return Err(refuse_daemon(&mut socket, HandshakeRefusal::bad_number(received)).await);
    };
    let mut connection = LinkConnection::new(socket);
    loop {
        match attachment.next_step(!connection.is_writing())? {
            AttachmentStep::Frame(frame) => connection.queue_text(frame)?,
            AttachmentStep::Nothing => {}
            AttachmentStep::Superseded => return Ok(()),
        }
        tokio::select! {
            progress = connection.progress(true) => if let ConnectionProgress::Frame(text) = progress? {
                attachment.receive_frame(text.as_str());
            },
            () = attachment.wake.notified() => {}
        }
    }
}

/// Marks a daemon as attached. Dropping it detaches the daemon, unless a newer connection has taken over.
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
    /// `None` if the outbox cannot continue after this number.
    fn new(shared: &'a EndpointShared, received: UpdateNumber) -> Option<Self> {
        let wake = Arc::new(Notify::new());
        let mut state = shared.lock();
        if !state.outbox.can_resume_after(received) {
            return None;
        }
        state.outbox.ack(received);
        state.outbox.set_last_sent(Some(received));
        state.attachment_changed_at = Instant::now();
        if let Some(older) = state.connection.replace(Arc::clone(&wake)) {
            older.notify_one();
        }
        shared.notify_changed(&state);
        drop(state);
        Some(Self { shared, wake })
    }

    /// What to do next. Returns a frame only if `can_write`.
    fn next_step(&self, can_write: bool) -> Result<AttachmentStep, SocketError> {
        let mut state = self.shared.lock();
        if !self.is_current(state.connection.as_ref()) {
            return Ok(AttachmentStep::Superseded);
        }
        if !can_write {
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

    /// Handles a frame. One that cannot be parsed is ignored.
    fn receive_frame(&self, text: &str) {
        match serde_json::from_str(text) {
            Ok(DaemonLinkFrame::Ack(upto)) => {
                let mut state = self.shared.lock();
                state.outbox.ack(upto);
                self.shared.notify_changed(&state);
            }
            Ok(DaemonLinkFrame::Command(command)) => self.shared.push_command(command),
            Ok(DaemonLinkFrame::Limits { run, limits }) => self.shared.set_turn_limits(run, limits),
            Ok(DaemonLinkFrame::Start(spec)) => self.shared.push_request(LifecycleRequest::Start(spec)),
            Ok(DaemonLinkFrame::StopIdleAgent) => self.shared.push_request(LifecycleRequest::StopIdleAgent),
            Ok(DaemonLinkFrame::Close) => self.shared.push_request(LifecycleRequest::Close),
            Ok(DaemonLinkFrame::Hello(_) | DaemonLinkFrame::Proof(_)) => {}
            Err(error) => tracing::debug!(%error, "ignoring a frame that cannot be read"),
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

/// Assembles the frame as text, because the lines are JSON already. `said` is the wire name of
/// [`WorkerLinkFrame::Updates`](qd_protocol::frame::v1::WorkerLinkFrame::Updates).
fn updates_frame(first: UpdateNumber, lines: &[Bytes]) -> Result<String, SocketError> {
    let head = format!(r#"{{"said":{{"first":{},"ups":["#, first.0);
    let size = head.len() + lines.iter().map(|line| line.len() + 1).sum::<usize>() + 3;
    let mut frame = Vec::with_capacity(size);
    frame.extend_from_slice(head.as_bytes());
    for (index, line) in lines.iter().enumerate() {
        if index > 0 {
            frame.push(b',');
        }
        frame.extend_from_slice(line);
    }
    frame.extend_from_slice(b"]}}");
    String::from_utf8(frame).map_err(|error| SocketError::from(std::io::Error::other(error)))
}
