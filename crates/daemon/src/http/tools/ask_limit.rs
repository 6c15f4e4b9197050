//! Waits until a session may open one more ask for a call of a tool.

use std::sync::Arc;

use qd_core::session::SessionCommand;
use qd_protocol::event::EventActor;
use qd_protocol::{ApiError, ErrorCode};

use super::resolved_asks::{AskWait, ResolvedAsks};
use crate::actor::{CommandCompletion, IdempotencyKey};
use crate::daemon::{Daemon, SessionAddress};

/// Sends a command that may open an ask. While as many are open as may be, it waits for one of them to be resolved, at
/// most as long as one request may take.
pub(super) async fn send_asking_command(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    actor: &Arc<EventActor>,
    command: SessionCommand,
    key: Option<IdempotencyKey>,
) -> Result<CommandCompletion, ApiError> {
    let mut resolved = ResolvedAsks::of_session(daemon, session);
    loop {
        match daemon.send_command(session, actor, command.clone(), key.clone()).await {
            Err(error) if error.code == ErrorCode::TooManyAsks => match resolved.wait().await? {
                AskWait::Resolved => {}
                AskWait::TimeIsOver => return Err(error),
            },
            sent => return sent,
        }
    }
}
