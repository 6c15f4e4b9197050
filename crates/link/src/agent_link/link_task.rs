//! The task behind a session's link: reaches the worker, makes sure that it is the one, takes what it says and sends
//! what waits for it, and begins again when the connection breaks. It knows the frames and decides nothing.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use qd_protocol::frame::v1::{
    AgentPresence, DaemonHello, DaemonLinkFrame, ProtocolVersions, WorkerHello, WorkerLinkFrame,
};
use qd_protocol::limits::{INLINE_MAX, LINK_WINDOW};
use qd_protocol::link::{AgentExitReason, UpdateNumber};
use tokio::time::Instant;

use super::{AgentLinkShared, LinkOptions, WorkerConnector, WorkerUnreachable};
use crate::event_size;
use crate::link_connection::{ConnectionProgress, LinkConnection, read_frame};
use crate::proof;
use crate::socket::{ByteStream, Socket, SocketError};
use crate::update_window::{NumberedUpdate, approximate_bytes};

/// The shortest and the longest wait before a worker is tried again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// How often a worker may say what cannot be read, with nothing in between that can: it would say it for ever.
const UNREADABLE_MAX: u32 = 3;

/// See the module.
pub(super) struct AgentLinkTask<R> {
    options: LinkOptions,
    connector: R,
    shared: Arc<AgentLinkShared>,
    backoff: Duration,
    /// What was last logged of this worker, so that it is not logged again with every try.
    last_warning: Option<String>,
    /// How often in a row it has said what cannot be read.
    unreadable_count: u32,
}

/// Why there is no going on with a worker.
enum LinkEndReason {
    /// It is dead, or has lost its agent.
    WorkerLost,
    /// The session has let go.
    Detached,
}

/// Why a worker that was reached is not listened to.
#[derive(Debug, thiserror::Error)]
enum WorkerHandshakeError {
    #[error("the worker refused: {message} ({code})")]
    Refused { code: String, message: String },
    #[error("the worker does not know its secret")]
    WrongSecret,
    #[error("the worker speaks version {0} of the frames, which we do not")]
    UnsupportedVersion(u32),
    #[error("the worker has said less than was heard of it")]
    BehindSession,
    #[error(transparent)]
    Socket(#[from] SocketError),
}

impl<R: WorkerConnector> AgentLinkTask<R> {
    pub(super) fn new(options: LinkOptions, connector: R, shared: Arc<AgentLinkShared>) -> Self {
        Self { options, connector, shared, backoff: BACKOFF.0, last_warning: None, unreadable_count: 0 }
    }

    /// Keeps the link until the agent is lost or the session lets go.
    pub(super) async fn run(mut self) {
        let end = loop {
            if let Err(end) = self.run_connection().await {
                break end;
            }
        };
        if let LinkEndReason::WorkerLost = end {
            self.deliver_spool_remains().await;
        }
    }

    /// One connection, from the dialling to its break.
    async fn run_connection(&mut self) -> Result<(), LinkEndReason> {
        let shared = Arc::clone(&self.shared);
        let reached = tokio::select! {
            () = shared.detach.notified() => return Err(LinkEndReason::Detached),
            reached = self.connect() => reached?,
        };
        if let Some(mut line) = reached {
            let began = (Instant::now(), shared.lock().last_received());
            let broken = self.exchange_frames(&mut line).await;
            let Err(broken) = broken else {
                line.close().await;
                return Err(LinkEndReason::Detached);
            };
            tracing::debug!(session = %self.options.session, %broken, "the connection to a worker broke");
            shared.lock().on_disconnected();
            shared.event_ready.notify_one();
            if shared.lock().last_received() > began.1 {
                self.unreadable_count = 0;
            } else if self.unreadable_count >= UNREADABLE_MAX {
                tracing::error!(session = %self.options.session, %broken, "a worker is given up: it cannot be understood");
                return Err(LinkEndReason::WorkerLost);
            }
            if began.0.elapsed() >= BACKOFF.1 || shared.lock().last_received() > began.1 {
                self.backoff = BACKOFF.0;
                return Ok(());
            }
        }
        tokio::select! {
            () = shared.detach.notified() => return Err(LinkEndReason::Detached),
            () = tokio::time::sleep(self.backoff) => {}
        }
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
        Ok(())
    }

    /// A connection to the worker, proven; none if it has to be tried again.
    async fn connect(&mut self) -> Result<Option<LinkConnection<Box<dyn ByteStream>>>, LinkEndReason> {
        let mut socket = match self.connector.dial().await {
            Ok(socket) => socket,
            Err(WorkerUnreachable::RetryLater) => return Ok(None),
            Err(WorkerUnreachable::Dead) => return Err(LinkEndReason::WorkerLost),
        };
        let taken = self.shared.lock().last_acked();
        let hello = match self.shake_hands(&mut socket, taken).await {
            Ok(hello) => hello,
            Err(unfit) => {
                self.warn_once(&unfit);
                return Ok(None);
            }
        };
        self.last_warning = None;
        {
            let mut mailbox = self.shared.lock();
            if hello.presence == AgentPresence::Empty && !mailbox.outbox.can_start() {
                return Err(LinkEndReason::WorkerLost);
            }
            mailbox.on_connected(taken, &hello);
        }
        self.shared.event_ready.notify_one();
        Ok(Some(LinkConnection::new(socket)))
    }

    /// Makes sure that the worker is the one, and shows it that we are.
    async fn shake_hands(
        &mut self,
        socket: &mut Socket<Box<dyn ByteStream>>,
        taken: UpdateNumber,
    ) -> Result<WorkerHello, WorkerHandshakeError> {
        let LinkOptions { session, worker, secret, software, .. } = &self.options;
        let nonce = proof::fresh_nonce();
        let ours = DaemonHello {
            versions: ProtocolVersions::SUPPORTED,
            software: software.clone(),
            capabilities: Vec::new(),
            session: session.clone(),
            worker: worker.clone(),
            nonce: nonce.clone(),
            journalled: taken,
        };
        socket.send(&DaemonLinkFrame::Hello(ours)).await?;
        let theirs = loop {
            match read_frame(socket).await? {
                WorkerLinkFrame::Hello(hello) => break hello,
                WorkerLinkFrame::Refused { code, message } => {
                    return Err(WorkerHandshakeError::Refused { code, message });
                }
                WorkerLinkFrame::Updates { .. } => {}
            }
        };
        if !proof::verify_proof(secret, &proof::worker_proof(secret, &nonce, &theirs.nonce), &theirs.proof) {
            return Err(WorkerHandshakeError::WrongSecret);
        }
        let spoken = ProtocolVersions { min: theirs.version, max: theirs.version };
        if ProtocolVersions::SUPPORTED.newest_common(spoken).is_none() {
            return Err(WorkerHandshakeError::UnsupportedVersion(theirs.version));
        }
        if theirs.last < self.shared.lock().last_received() {
            return Err(WorkerHandshakeError::BehindSession);
        }
        let proof = proof::daemon_proof(secret, &theirs.nonce, &nonce);
        socket.send(&DaemonLinkFrame::Proof(proof)).await?;
        Ok(theirs)
    }

    /// Talks to the worker until the connection breaks, or until the session has let go and all that it wanted said has
    /// been said.
    async fn exchange_frames(
        &mut self,
        line: &mut LinkConnection<Box<dyn ByteStream>>,
    ) -> Result<(), SocketError> {
        let mut leaves = false;
        loop {
            if !line.is_writing() {
                while let Some(frame) = self.shared.lock().next_frame() {
                    line.queue_frame(&frame)?;
                }
                if leaves && !line.is_writing() {
                    return Ok(());
                }
            }
            let reading = self.shared.lock().has_room();
            tokio::select! {
                step = line.progress(reading) => if let ConnectionProgress::Frame(text) = step? {
                    self.receive_frame(text.as_str())?;
                },
                () = self.shared.wake.notified() => {}
                () = self.shared.detach.notified() => leaves = true,
            }
        }
    }

    fn receive_frame(&mut self, text: &str) -> Result<(), SocketError> {
        match serde_json::from_str(text) {
            Ok(WorkerLinkFrame::Updates { first, updates: mut ups }) => {
                // One that is too large makes its frame too large as well.
                if text.len() > INLINE_MAX {
                    ups = ups.into_iter().map(event_size::fit_received).collect();
                }
                self.shared.lock().receive_updates(first, ups, text.len()).map_err(unreadable_error)?;
                self.shared.event_ready.notify_one();
                Ok(())
            }
            Ok(WorkerLinkFrame::Hello(_) | WorkerLinkFrame::Refused { .. }) => Ok(()),
            // To go on without it would be to lose it.
            Err(error) if text.starts_with(r#"{"said""#) => {
                self.unreadable_count += 1;
                Err(unreadable_error(error))
            }
            Err(error) => {
                tracing::debug!(%error, "a frame that cannot be read");
                Ok(())
            }
        }
    }

    /// What a dead worker left is heard before its end is.
    async fn deliver_spool_remains(&mut self) {
        let after = self.shared.lock().last_received();
        let mut remains = self.connector.read_undelivered(after).await.into_iter().peekable();
        while remains.peek().is_some() {
            let some: Vec<NumberedUpdate> = remains.by_ref().take(LINK_WINDOW).collect();
            while !self.shared.lock().has_room() {
                self.shared.wake.notified().await;
            }
            let first = some[0].number;
            let bytes = some.iter().map(|thing| approximate_bytes(&thing.update)).sum();
            let ups = some.into_iter().map(|thing| event_size::fit_received(thing.update)).collect();
            if let Err(hole) = self.shared.lock().receive_updates(first, ups, bytes) {
                tracing::error!(session = %self.options.session, %hole, "a spool has a hole; what follows is not used");
                break;
            }
            self.shared.event_ready.notify_one();
        }
        self.shared.lock().on_agent_gone(AgentExitReason::Lost);
        self.shared.event_ready.notify_one();
    }

    fn warn_once(&mut self, unfit: &WorkerHandshakeError) {
        let complaint = unfit.to_string();
        if self.last_warning.as_ref() != Some(&complaint) {
            let LinkOptions { session, worker, .. } = &self.options;
            tracing::warn!(%session, %worker, %complaint, "a worker cannot be used, and is tried again");
            self.last_warning = Some(complaint);
        }
    }
}

fn unreadable_error(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> SocketError {
    io::Error::new(io::ErrorKind::InvalidData, error).into()
}
