//! Waits for asks of a session to be resolved, at most as long as one request of a tool may take.

use std::sync::Arc;
use std::time::Duration;

use qd_journal::{EventFilter, EventTopic, Subscription};
use qd_protocol::ApiError;
use qd_protocol::limits::TOOL_POLL_S;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::daemon::{Daemon, SessionAddress, read_failed, stopping_error};

/// What has become of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AskWait {
    /// An ask of the session was resolved.
    Resolved,
    /// The request has taken as long as it may.
    TimeIsOver,
}

/// The asks of a session that are resolved from now on. Made before the state is looked at, so that nothing falls between
/// the two.
pub(super) struct ResolvedAsks {
    events: Subscription,
    stop: watch::Receiver<bool>,
    deadline: Instant,
}

impl ResolvedAsks {
    pub(super) fn of_session(daemon: &Daemon, session: &SessionAddress) -> Self {
        let kinds = Some(Arc::from(["ask.resolved".to_owned()]));
        let filter = EventFilter { topic: EventTopic::Session(session.key), kinds };
        Self {
            events: daemon.journal.subscribe(filter, None),
            stop: daemon.stop_signal(),
            deadline: Instant::now() + Duration::from_secs(TOOL_POLL_S),
        }
    }

    /// Waits for the next one. Fails if the daemon stops.
    pub(super) async fn wait(&mut self) -> Result<AskWait, ApiError> {
        tokio::select! {
            biased;
            _ = self.stop.wait_for(|stop| *stop) => Err(stopping_error()),
            event = self.events.next() => event.map(|_| AskWait::Resolved).map_err(read_failed),
            () = tokio::time::sleep_until(self.deadline) => Ok(AskWait::TimeIsOver),
        }
    }
}
