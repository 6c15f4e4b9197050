//! What a starting daemon does with the work that the last one left, in order and under one deadline. Lifting a halt and
//! releasing a quota wake the same sessions.

use std::sync::Arc;
use std::time::Duration;

use qd_journal::SessionFilter;
use qd_protocol::{ApiError, ErrorCode};
use tokio::sync::oneshot;

use crate::actor::ActorMessage;
use crate::daemon::{Daemon, SessionAddress, read_failed};

/// How long a starting daemon waits for the recovery before it serves requests. With very many sessions the rest goes on
/// beside them.
const RECOVERY_WAIT: Duration = Duration::from_millis(500);

impl Daemon {
    /// Resumes the work of the last daemon. Usually all of it is done before any client can ask, so a run that died with
    /// the last daemon is never shown as running.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<(), ApiError> {
        let (sender, done) = oneshot::channel();
        let daemon = Arc::clone(self);
        self.spawn(async move {
            if let Err(Err(error)) = sender.send(daemon.resume_open_work().await) {
                tracing::error!(%error, "could not resume all work of the last daemon; restart to try again");
            }
        });
        match tokio::time::timeout(RECOVERY_WAIT, done).await {
            // Without a result the task has panicked, which is reported as such.
            Ok(resumed) => resumed.unwrap_or(Ok(())),
            Err(_) => {
                tracing::info!("still resuming the work of the last daemon");
                Ok(())
            }
        }
    }

    /// The steps of a recovery. Fleets come after the sessions whose runs they wait for.
    async fn resume_open_work(self: &Arc<Self>) -> Result<(), ApiError> {
        self.release_reset_quotas().await;
        self.wake_sessions_with_open_work().await?;
        self.wake_fleets().await?;
        self.wait_for_commits().await;
        Ok(())
    }

    /// Wakes every session that has unfinished runs or open obligations. Sessions with a worker come first and are
    /// waited for, because the others may start an agent only if there is a slot beside them.
    pub(crate) async fn wake_sessions_with_open_work(self: &Arc<Self>) -> Result<(), ApiError> {
        let with_obligations = SessionFilter { open_work_only: true, ..SessionFilter::default() };
        for row in self.journal.sessions(with_obligations, None, usize::MAX).await.map_err(read_failed)? {
            match self.session_address(&row) {
                Ok(session) => self.send_message(&session, ActorMessage::Wake)?,
                Err(error) => tracing::warn!(session = %row.id, %error, "a session has no workspace"),
            }
        }
        self.wait_for_commits().await;
        self.for_each_live_session(|daemon, session| async move {
            daemon.send_message(&session, ActorMessage::Wake)
        })
        .await
    }

    /// Performs an operation for every session that is not closed, also if it fails for some.
    pub(crate) async fn for_each_live_session<F: Future<Output = Result<(), ApiError>>>(
        self: &Arc<Self>,
        operation: impl Fn(Arc<Self>, Arc<SessionAddress>) -> F,
    ) -> Result<(), ApiError> {
        let live = SessionFilter { live_only: true, ..SessionFilter::default() };
        let mut outcome = Ok(());
        for row in self.journal.sessions(live, None, usize::MAX).await.map_err(read_failed)? {
            let done = match self.session_address(&row) {
                Ok(session) => operation(Arc::clone(self), session).await,
                Err(error) => {
                    tracing::warn!(session = %row.id, %error, "a live session has no workspace");
                    Ok(())
                }
            };
            match done {
                // It was purged meanwhile, so nothing of it runs.
                Err(error) if error.code == ErrorCode::NotFound => {}
                // One session that cannot be reached must not keep the others from it.
                done => outcome = outcome.and(done),
            }
        }
        outcome
    }
}
