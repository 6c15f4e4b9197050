//! The task behind a session's link. It connects to the worker, authenticates it, exchanges frames with it, and
//! reconnects when the connection breaks. A worker that cannot be reached for too long is given up and ended, so every
//! disconnected session learns in a bounded time what became of its agent. The task knows the frames but makes no
//! decisions about the session.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use qd_protocol::event::RunError;
use qd_protocol::frame::v1::{
    AgentPresence, DaemonHello, DaemonLinkFrame, ProtocolVersions, WorkerHello, WorkerLinkFrame,
};
use qd_protocol::limits::{INLINE_MAX, LINK_WINDOW};
use qd_protocol::link::{AgentExitReason, UpdateNumber};
use qd_worker_sdk::socket::{ByteStream, STEP_TIMEOUT, Socket, SocketError};
use tokio::time::Instant;

use super::{AgentLinkShared, LinkOptions, WorkerConnector, WorkerEnding, WorkerUnreachable};
use crate::event_size;
use crate::link_connection::{ConnectionProgress, LinkConnection, read_frame};
use crate::proof;
use crate::update_window::{NumberedUpdate, approximate_bytes};

/// The shortest and the longest pause before the worker is tried again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// How many unreadable frames in a row a worker may send before it is given up. It would resend them for ever.
const UNREADABLE_MAX: u32 = 3;

pub(super) struct AgentLinkTask<R> {
    options: LinkOptions,
    connector: R,
    shared: Arc<AgentLinkShared>,
    backoff: Duration,
    /// Since when the worker has not been reached: since the link was opened, or since a connection broke that had
    /// held.
    unreached_since: Instant,
    /// Why the last attempt to reach the worker failed.
    last_failure: String,
    /// The last warning about this worker, so that it is not repeated with every retry.
    last_warning: Option<String>,
    /// Unreadable frames in a row.
    unreadable_count: u32,
}

enum LinkEndReason {
    /// The worker is dead.
    WorkerDead,
    /// The worker lives but has no agent for the session.
    AgentLost,
    /// The worker is not known to be dead, but waiting any longer makes no sense, for this reason.
    WorkerGivenUp(String),
    /// The session closed its agent before the worker had been told to start it.
    ClosedBeforeStart,
    /// The session has closed the link.
    Detached,
}

/// The result of one attempt to connect.
enum ConnectAttempt {
    Connected(Box<LinkConnection<Box<dyn ByteStream>>>),
    /// It has to be tried again after a pause.
    Failed,
    /// The worker's machine is away. The attempt has waited for it, and the wait does not count.
    MachineAway,
}

/// Why the handshake with a worker failed. The connection is retried.
#[derive(Debug, thiserror::Error)]
enum WorkerHandshakeError {
    #[error("the worker refused the connection: {message} ({code})")]
    Refused { code: String, message: String },
    #[error("the worker does not know its secret")]
    WrongSecret,
    #[error("the worker uses protocol version {0}, which this daemon does not support")]
    UnsupportedVersion(u32),
    #[error("the worker has fewer updates than the daemon already received from it")]
    BehindSession,
    #[error(transparent)]
    Socket(#[from] SocketError),
}

impl<R: WorkerConnector> AgentLinkTask<R> {
    pub(super) fn new(options: LinkOptions, connector: R, shared: Arc<AgentLinkShared>) -> Self {
        Self {
            options,
            connector,
            shared,
            backoff: BACKOFF.0,
            unreached_since: Instant::now(),
            last_failure: String::new(),
            last_warning: None,
            unreadable_count: 0,
        }
    }

    /// Keeps the link up until the agent is lost or the session detaches.
    pub(super) async fn run(mut self) {
        let end = loop {
            if let Err(end) = self.run_connection().await {
                break end;
            }
        };
        if let LinkEndReason::Detached = end {
            return;
        }
        // The worker is ended before its spool is read, so that it can add nothing more.
        let ending = self.connector.end_worker().await;
        self.deliver_spool_remains().await;
        let gone = match end {
            LinkEndReason::WorkerGivenUp(reason) => unreachable_worker(&reason, &ending),
            // It counted as dead, but was still running.
            LinkEndReason::WorkerDead if ending == WorkerEnding::Ended => unreachable_worker(
                "the files by which the worker is found were removed while it was running",
                &ending,
            ),
            LinkEndReason::ClosedBeforeStart => AgentExitReason::Stopped,
            LinkEndReason::WorkerDead | LinkEndReason::AgentLost | LinkEndReason::Detached => match ending {
                WorkerEnding::Survived(_) => unreachable_worker("the worker is lost", &ending),
                _ => AgentExitReason::Lost,
            },
        };
        if let AgentExitReason::Unreachable(error) = &gone {
            let LinkOptions { session, worker, .. } = &self.options;
            tracing::error!(%session, %worker, message = error.message, "gave up a worker");
        }
        self.shared.lock().on_agent_gone(gone);
        self.shared.event_ready.notify_one();
    }

    /// One connection, from dialling until it breaks.
    async fn run_connection(&mut self) -> Result<(), LinkEndReason> {
        let shared = Arc::clone(&self.shared);
        let began = Instant::now();
        let attempt = tokio::select! {
            () = shared.detach.notified() => return Err(LinkEndReason::Detached),
            attempt = self.connect() => attempt?,
        };
        let connection = match attempt {
            ConnectAttempt::Connected(connection) => Some(*connection),
            ConnectAttempt::Failed => None,
            ConnectAttempt::MachineAway => {
                self.unreached_since += began.elapsed();
                return Ok(());
            }
        };
        if let Some(mut connection) = connection {
            let (connected_at, received_before) = (Instant::now(), shared.lock().last_received());
            let broken = match self.exchange_frames(&mut connection).await {
                Ok(end) => {
                    connection.close().await;
                    return Err(end);
                }
                Err(broken) => broken,
            };
            tracing::debug!(session = %self.options.session, %broken, "lost the connection to a worker");
            shared.lock().on_disconnected();
            shared.event_ready.notify_one();
            self.last_failure = format!("the connection broke: {broken}");
            if shared.lock().last_received() > received_before {
                self.unreadable_count = 0;
            } else if self.unreadable_count >= UNREADABLE_MAX {
                return Err(LinkEndReason::WorkerGivenUp(format!(
                    "the worker sends frames that cannot be read ({broken})"
                )));
            }
            if connected_at.elapsed() >= BACKOFF.1 || shared.lock().last_received() > received_before {
                self.backoff = BACKOFF.0;
                self.unreached_since = Instant::now();
                return Ok(());
            }
        }
        // Only an attempt that began after the limit decides: a daemon that was itself stopped for a while must not
        // end workers that it has not tried to reach since.
        let reach_timeout = self.options.reach_timeout;
        if began >= self.unreached_since + reach_timeout {
            let (seconds, failure) = (reach_timeout.as_secs(), &self.last_failure);
            let reason = format!("the worker lives but could not be reached for {seconds} s ({failure})");
            return Err(LinkEndReason::WorkerGivenUp(reason));
        }
        tokio::select! {
            () = shared.detach.notified() => return Err(LinkEndReason::Detached),
            () = tokio::time::sleep(self.backoff) => {}
        }
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
        Ok(())
    }

    /// Connects and authenticates.
    async fn connect(&mut self) -> Result<ConnectAttempt, LinkEndReason> {
        let mut socket = match self.connector.dial().await {
            Ok(socket) => socket,
            Err(WorkerUnreachable::RetryLater(reason)) => {
                self.last_failure = reason;
                return Ok(ConnectAttempt::Failed);
            }
            Err(WorkerUnreachable::MachineAway) => return Ok(ConnectAttempt::MachineAway),
            Err(WorkerUnreachable::Dead) => return Err(LinkEndReason::WorkerDead),
        };
        let acked = self.shared.lock().last_acked();
        // A peer that keeps sending something else instead of its hello must not hold the handshake up.
        let handshake = tokio::time::timeout(STEP_TIMEOUT, self.shake_hands(&mut socket, acked)).await;
        let hello = match handshake.unwrap_or(Err(SocketError::TimedOut.into())) {
            Ok(hello) => hello,
            Err(error) => {
                self.last_failure = error.to_string();
                self.warn_once(&error);
                return Ok(ConnectAttempt::Failed);
            }
        };
        self.last_warning = None;
        {
            let mut inbox = self.shared.lock();
            if hello.presence == AgentPresence::Empty && !inbox.outbox.can_start() {
                return Err(LinkEndReason::AgentLost);
            }
            inbox.on_connected(acked, &hello);
        }
        self.shared.event_ready.notify_one();
        Ok(ConnectAttempt::Connected(Box::new(LinkConnection::new(socket))))
    }

    /// Checks that this is the expected worker, and proves to it that we know the secret.
    async fn shake_hands(
        &mut self,
        socket: &mut Socket<Box<dyn ByteStream>>,
        acked: UpdateNumber,
    ) -> Result<WorkerHello, WorkerHandshakeError> {
        let LinkOptions { session, worker, secret, software, .. } = &self.options;
        let nonce = proof::fresh_nonce();
        let our_hello = DaemonHello {
            versions: ProtocolVersions::SUPPORTED,
            software: software.clone(),
            capabilities: Vec::new(),
            session: session.clone(),
            worker: worker.clone(),
            nonce: nonce.clone(),
            journalled: acked,
        };
        socket.send(&DaemonLinkFrame::Hello(our_hello)).await?;
        let worker_hello = loop {
            match read_frame(socket).await? {
                WorkerLinkFrame::Hello(hello) => break hello,
                WorkerLinkFrame::Refused { code, message } => {
                    return Err(WorkerHandshakeError::Refused { code, message });
                }
                WorkerLinkFrame::Updates { .. } => {}
            }
        };
        if !proof::verify_proof(
            secret,
            &proof::worker_proof(secret, &nonce, &worker_hello.nonce),
            &worker_hello.proof,
        ) {
            return Err(WorkerHandshakeError::WrongSecret);
        }
        let version = ProtocolVersions { min: worker_hello.version, max: worker_hello.version };
        if ProtocolVersions::SUPPORTED.newest_common(version).is_none() {
            return Err(WorkerHandshakeError::UnsupportedVersion(worker_hello.version));
        }
        if worker_hello.last < self.shared.lock().last_received() {
            return Err(WorkerHandshakeError::BehindSession);
        }
        let proof = proof::daemon_proof(secret, &worker_hello.nonce, &nonce);
        socket.send(&DaemonLinkFrame::Proof(proof)).await?;
        Ok(worker_hello)
    }

    /// Exchanges frames until the connection breaks, or until the session has detached and everything queued is
    /// written, or has nothing to expect from this worker.
    async fn exchange_frames(
        &mut self,
        connection: &mut LinkConnection<Box<dyn ByteStream>>,
    ) -> Result<LinkEndReason, SocketError> {
        let mut detaching = false;
        loop {
            if self.shared.lock().outbox.is_closed_before_start() {
                return Ok(LinkEndReason::ClosedBeforeStart);
            }
            if !connection.is_writing() {
                while let Some(frame) = self.shared.lock().next_frame() {
                    connection.queue_frame(&frame)?;
                }
                if detaching && !connection.is_writing() {
                    return Ok(LinkEndReason::Detached);
                }
            }
            let reading = self.shared.lock().has_room();
            tokio::select! {
                progress = connection.progress(reading) => if let ConnectionProgress::Frame(text) = progress? {
                    self.receive_frame(text.as_str())?;
                },
                () = self.shared.wake.notified() => {}
                () = self.shared.detach.notified() => detaching = true,
            }
        }
    }

    fn receive_frame(&mut self, text: &str) -> Result<(), SocketError> {
        match serde_json::from_str(text) {
            Ok(WorkerLinkFrame::Updates { first, mut updates }) => {
                // An update that is too large makes its frame too large as well, so small frames need no check.
                if text.len() > INLINE_MAX {
                    updates = updates.into_iter().map(event_size::fit_received).collect();
                }
                let received = self.shared.lock().receive_updates(first, updates, text.len());
                received.map_err(|gap| {
                    self.unreadable_count += 1;
                    unreadable_error(gap)
                })?;
                self.shared.event_ready.notify_one();
                Ok(())
            }
            Ok(WorkerLinkFrame::Hello(_) | WorkerLinkFrame::Refused { .. }) => Ok(()),
            // `said` is the wire name of `WorkerLinkFrame::Updates`. Skipping such a frame would lose updates, so the
            // connection is dropped and they are sent again.
            Err(error) if text.starts_with(r#"{"said""#) => {
                self.unreadable_count += 1;
                Err(unreadable_error(error))
            }
            Err(error) => {
                tracing::debug!(%error, "ignoring a frame that cannot be read");
                Ok(())
            }
        }
    }

    /// Delivers what a dead worker left in its spool.
    async fn deliver_spool_remains(&mut self) {
        let after = self.shared.lock().last_received();
        let mut undelivered = self.connector.read_undelivered(after).await.into_iter().peekable();
        while undelivered.peek().is_some() {
            let batch: Vec<NumberedUpdate> = undelivered.by_ref().take(LINK_WINDOW).collect();
            while !self.shared.lock().has_room() {
                self.shared.wake.notified().await;
            }
            let first = batch[0].number;
            let bytes = batch.iter().map(|numbered| approximate_bytes(&numbered.update)).sum();
            let updates =
                batch.into_iter().map(|numbered| event_size::fit_received(numbered.update)).collect();
            if let Err(gap) = self.shared.lock().receive_updates(first, updates, bytes) {
                tracing::error!(session = %self.options.session, %gap, "gap in a worker's spool: ignoring the rest");
                break;
            }
            self.shared.event_ready.notify_one();
        }
    }

    fn warn_once(&mut self, error: &WorkerHandshakeError) {
        let warning = error.to_string();
        if self.last_warning.as_ref() != Some(&warning) {
            let LinkOptions { session, worker, .. } = &self.options;
            tracing::warn!(%session, %worker, %warning, "the handshake with a worker failed; retrying");
            self.last_warning = Some(warning);
        }
    }
}

/// What the session is told about a worker that was given up for this reason.
fn unreachable_worker(reason: &str, ending: &WorkerEnding) -> AgentExitReason {
    let outcome = match ending {
        WorkerEnding::Ended => "it was ended, with everything that its agent had started".to_owned(),
        WorkerEnding::NotFound => "no process of it was found to end".to_owned(),
        WorkerEnding::Requested => "its machine was told to end it".to_owned(),
        WorkerEnding::LeftRunning => "its process holds other sessions too and was left running".to_owned(),
        WorkerEnding::Survived(pids) => {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            format!("some of its processes could not be ended, end them with `kill -9 {}`", pids.join(" "))
        }
    };
    let advice = "look at what was done so far, then send a new prompt: it gets a new worker";
    AgentExitReason::Unreachable(RunError::new(
        "worker_unreachable",
        format!("{reason}; {outcome}; {advice}"),
    ))
}

fn unreadable_error(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> SocketError {
    io::Error::new(io::ErrorKind::InvalidData, error).into()
}
