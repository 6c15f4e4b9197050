//! Waits until a session may open one more ask for a call of a tool.

use std::sync::Arc;
use std::time::Duration;

use qd_core::session::SessionCommand;
use qd_journal::{EventFilter, EventTopic};
use qd_protocol::event::EventActor;
use qd_protocol::limits::TOOL_POLL_S;
use qd_protocol::{ApiError, ErrorCode};
use tokio::time::Instant;

use crate::actor::{CommandCompletion, IdempotencyKey};
use crate::daemon::{Daemon, SessionAddress, read_failed, stopping_error};

/// Sends a command that may open an ask. While as many are open as may be, it waits for one of them to be resolved, at
/// most as long as one request may take.
pub(super) async fn send_asking_command(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    actor: &Arc<EventActor>,
    command: SessionCommand,
    key: Option<IdempotencyKey>,
) -> Result<CommandCompletion, ApiError> {
    let deadline = Instant::now() + Duration::from_secs(TOOL_POLL_S);
    let kinds = Arc::from(["ask.resolved".to_owned()]);
    let topic = EventTopic::Session(session.key);
    let mut events = daemon.journal.subscribe(EventFilter { topic, kinds: Some(kinds) }, None);
    let mut stop = daemon.stop_signal();
    loop {
        let sent = daemon.send_command(session, actor, command.clone(), key.clone()).await;
        match sent {
            Err(error) if error.code == ErrorCode::TooManyAsks && Instant::now() < deadline => {
                tokio::select! {
                    biased;
                    _ = stop.wait_for(|stop| *stop) => return Err(stopping_error()),
                    event = events.next() => drop(event.map_err(read_failed)?),
                    () = tokio::time::sleep_until(deadline) => return Err(error),
                }
            }
            sent => return sent,
        }
    }
}
