//! The task behind a session's link: reaches the worker, makes sure that it is the one, takes what it says and sends
//! what waits for it, and begins again when the connection breaks. It knows the frames and decides nothing.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use qd_protocol::frame::v1::{DaemonHello, Seat, ToDaemon, ToWorker, Versions, WorkerHello};
use qd_protocol::limits::{INLINE_MAX, LINK_WINDOW};
use qd_protocol::link::{Gone, UpNumber};
use tokio::time::Instant;

use super::{LinkOptions, Route, Shared, Unreachable};
use crate::fit;
use crate::line::{Line, Step, frame};
use crate::proof;
use crate::socket::{Socket, SocketError, Wire};
use crate::up::{Numbered, weight};

/// The shortest and the longest wait before a worker is tried again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// How often a worker may say what cannot be read, with nothing in between that can: it would say it for ever.
const UNREADABLE_MAX: u32 = 3;

/// See the module.
pub(super) struct Dialler<R> {
    options: LinkOptions,
    route: R,
    shared: Arc<Shared>,
    backoff: Duration,
    /// What was last logged of this worker, so that it is not logged again with every try.
    complaint: Option<String>,
    /// How often in a row it has said what cannot be read.
    unreadable: u32,
}

/// Why there is no going on with a worker.
enum End {
    /// It is dead, or has lost its agent.
    Lost,
    /// The session has let go.
    Detached,
}

/// Why a worker that was reached is not listened to.
#[derive(Debug, thiserror::Error)]
enum Unfit {
    #[error("the worker refused: {message} ({code})")]
    Refused { code: String, message: String },
    #[error("the worker does not know its secret")]
    Unproven,
    #[error("the worker speaks version {0} of the frames, which we do not")]
    Version(u32),
    #[error("the worker has said less than was heard of it")]
    Forgetful,
    #[error(transparent)]
    Socket(#[from] SocketError),
}

impl<R: Route> Dialler<R> {
    pub(super) fn new(options: LinkOptions, route: R, shared: Arc<Shared>) -> Self {
        Self { options, route, shared, backoff: BACKOFF.0, complaint: None, unreadable: 0 }
    }

    /// Keeps the link until the agent is lost or the session lets go.
    pub(super) async fn run(mut self) {
        let end = loop {
            if let Err(end) = self.attend().await {
                break end;
            }
        };
        if let End::Lost = end {
            self.bury().await;
        }
    }

    /// One connection, from the dialling to its break.
    async fn attend(&mut self) -> Result<(), End> {
        let shared = Arc::clone(&self.shared);
        let reached = tokio::select! {
            () = shared.detach.notified() => return Err(End::Detached),
            reached = self.reach() => reached?,
        };
        if let Some(mut line) = reached {
            let began = (Instant::now(), shared.lock().heard());
            let broken = self.converse(&mut line).await;
            let Err(broken) = broken else {
                line.close().await;
                return Err(End::Detached);
            };
            tracing::debug!(session = %self.options.session, %broken, "the connection to a worker broke");
            shared.lock().lost();
            shared.news.notify_one();
            if shared.lock().heard() > began.1 {
                self.unreadable = 0;
            } else if self.unreadable >= UNREADABLE_MAX {
                tracing::error!(session = %self.options.session, %broken, "a worker is given up: it cannot be understood");
                return Err(End::Lost);
            }
            if began.0.elapsed() >= BACKOFF.1 || shared.lock().heard() > began.1 {
                self.backoff = BACKOFF.0;
                return Ok(());
            }
        }
        tokio::select! {
            () = shared.detach.notified() => return Err(End::Detached),
            () = tokio::time::sleep(self.backoff) => {}
        }
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
        Ok(())
    }

    /// A connection to the worker, proven; none if it has to be tried again.
    async fn reach(&mut self) -> Result<Option<Line<Box<dyn Wire>>>, End> {
        let mut socket = match self.route.dial().await {
            Ok(socket) => socket,
            Err(Unreachable::Later) => return Ok(None),
            Err(Unreachable::Dead) => return Err(End::Lost),
        };
        let taken = self.shared.lock().acked();
        let hello = match self.prove(&mut socket, taken).await {
            Ok(hello) => hello,
            Err(unfit) => {
                self.complain(&unfit);
                return Ok(None);
            }
        };
        self.complaint = None;
        {
            let mut mailbox = self.shared.lock();
            if hello.seat == Seat::Empty && !mailbox.outbox.can_start() {
                return Err(End::Lost);
            }
            mailbox.attached(taken, &hello);
        }
        self.shared.news.notify_one();
        Ok(Some(Line::new(socket)))
    }

    /// Makes sure that the worker is the one, and shows it that we are.
    async fn prove(
        &mut self,
        socket: &mut Socket<Box<dyn Wire>>,
        taken: UpNumber,
    ) -> Result<WorkerHello, Unfit> {
        let LinkOptions { session, worker, secret, software, .. } = &self.options;
        let nonce = proof::nonce();
        let ours = DaemonHello {
            versions: Versions::OURS,
            software: software.clone(),
            capabilities: Vec::new(),
            session: session.clone(),
            worker: worker.clone(),
            nonce: nonce.clone(),
            taken,
        };
        socket.send(&ToWorker::Hello(ours)).await?;
        let theirs = loop {
            match frame(socket).await? {
                ToDaemon::Hello(hello) => break hello,
                ToDaemon::Refused { code, message } => return Err(Unfit::Refused { code, message }),
                ToDaemon::Said { .. } => {}
            }
        };
        if !proof::holds(secret, &proof::of_worker(secret, &nonce, &theirs.nonce), &theirs.proof) {
            return Err(Unfit::Unproven);
        }
        let spoken = Versions { min: theirs.version, max: theirs.version };
        if Versions::OURS.meet(spoken).is_none() {
            return Err(Unfit::Version(theirs.version));
        }
        if theirs.last < self.shared.lock().heard() {
            return Err(Unfit::Forgetful);
        }
        let proof = proof::of_daemon(secret, &theirs.nonce, &nonce);
        socket.send(&ToWorker::Proof(proof)).await?;
        Ok(theirs)
    }

    /// Talks to the worker until the connection breaks, or until the session has let go and all that it wanted said has
    /// been said.
    async fn converse(&mut self, line: &mut Line<Box<dyn Wire>>) -> Result<(), SocketError> {
        let mut leaves = false;
        loop {
            if !line.is_writing() {
                while let Some(frame) = self.shared.lock().next_frame() {
                    line.feed(&frame)?;
                }
                if leaves && !line.is_writing() {
                    return Ok(());
                }
            }
            let reading = self.shared.lock().has_room();
            tokio::select! {
                step = line.step(reading) => if let Step::Frame(text) = step? {
                    self.take(text.as_str())?;
                },
                () = self.shared.wake.notified() => {}
                () = self.shared.detach.notified() => leaves = true,
            }
        }
    }

    fn take(&mut self, text: &str) -> Result<(), SocketError> {
        match serde_json::from_str(text) {
            Ok(ToDaemon::Said { first, mut ups }) => {
                // One that is too large makes its frame too large as well.
                if text.len() > INLINE_MAX {
                    ups = ups.into_iter().map(fit::heard).collect();
                }
                self.shared.lock().said(first, ups, text.len()).map_err(unreadable)?;
                self.shared.news.notify_one();
                Ok(())
            }
            Ok(ToDaemon::Hello(_) | ToDaemon::Refused { .. }) => Ok(()),
            // To go on without it would be to lose it.
            Err(error) if text.starts_with(r#"{"said""#) => {
                self.unreadable += 1;
                Err(unreadable(error))
            }
            Err(error) => {
                tracing::debug!(%error, "a frame that cannot be read");
                Ok(())
            }
        }
    }

    /// What a dead worker left is heard before its end is.
    async fn bury(&mut self) {
        let after = self.shared.lock().heard();
        let mut remains = self.route.remains(after).await.into_iter().peekable();
        while remains.peek().is_some() {
            let some: Vec<Numbered> = remains.by_ref().take(LINK_WINDOW).collect();
            while !self.shared.lock().has_room() {
                self.shared.wake.notified().await;
            }
            let first = some[0].number;
            let bytes = some.iter().map(|thing| weight(&thing.up)).sum();
            let ups = some.into_iter().map(|thing| fit::heard(thing.up)).collect();
            if let Err(hole) = self.shared.lock().said(first, ups, bytes) {
                tracing::error!(session = %self.options.session, %hole, "a spool has a hole; what follows is not used");
                break;
            }
            self.shared.news.notify_one();
        }
        self.shared.lock().gone(Gone::Lost);
        self.shared.news.notify_one();
    }

    fn complain(&mut self, unfit: &Unfit) {
        let complaint = unfit.to_string();
        if self.complaint.as_ref() != Some(&complaint) {
            let LinkOptions { session, worker, .. } = &self.options;
            tracing::warn!(%session, %worker, %complaint, "a worker cannot be used, and is tried again");
            self.complaint = Some(complaint);
        }
    }
}

fn unreadable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> SocketError {
    io::Error::new(io::ErrorKind::InvalidData, error).into()
}
