//! Messages between a session and its parent, children and fleet: a cancel or close is passed down and confirmed, an
//! end is reported up. Each obligation stays in the journal until it is met, so after a crash it is simply passed on
//! again.
//!
//! Design: docs/design/mailbox-order-decides-cancels.md

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use qd_core::rows::RunDoc;
use qd_core::session::SessionCommand;
use qd_journal::RunFilter;
use qd_protocol::event::{ChildResult, EventActor};
use qd_protocol::limits::HEAD_MAX;
use qd_protocol::text::escaped_head;
use qd_protocol::{ApiError, ErrorCode, EventNumber, RunId, SessionId};
use tokio::sync::oneshot;

use super::SessionActor;
use super::reply::{ActorReply, CommandCompletion};
use crate::daemon::{Daemon, SessionAddress, read_failed};
use crate::http::unreadable_row;

/// The delay before a message between sessions is sent again, because a mailbox was full or the journal failed.
const DELIVERY_RETRY: Duration = Duration::from_millis(500);

/// A cancel that is being passed on to the child sessions.
pub(super) struct ChildCancelTask {
    number: EventNumber,
    task: tokio::task::AbortHandle,
}

impl SessionActor {
    /// Passes a cancel on to the child sessions until each has applied it. A client that waits for the receipt gets
    /// the runs that were stopped, but does not wait for a child that cannot be reached.
    pub(super) fn cancel_children(
        &mut self,
        number: EventNumber,
        mut receipt: Option<oneshot::Sender<Vec<RunId>>>,
    ) {
        let under_way =
            self.child_cancel.as_ref().is_some_and(|last| last.number == number && !last.task.is_finished());
        if under_way {
            return;
        }
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        let children: Vec<SessionId> = self.state.children.iter().cloned().collect();
        let task = self.daemon.spawn(async move {
            let mut cancelled = Vec::new();
            for child in children {
                let runs = match cancel_child(&daemon, &session.id, &child, number).await {
                    Ok(runs) => Some(runs),
                    Err(_) => {
                        receipt = None;
                        let retry = || cancel_child(&daemon, &session.id, &child, number);
                        retry_delivery(&daemon, retry).await
                    }
                };
                match runs {
                    Some(runs) => cancelled.extend(runs),
                    None => return,
                }
            }
            deliver_command(
                &daemon,
                &session,
                EventActor::DAEMON,
                SessionCommand::ChildrenCancelled { number },
            )
            .await;
            if let Some(receipt) = receipt {
                // A client that has disconnected does not need the receipt.
                let _gone = receipt.send(cancelled);
            }
        });
        self.child_cancel = Some(ChildCancelTask { number, task });
    }

    /// Closes the child sessions, and reports it to our own session once all have closed.
    pub(super) fn close_children(&mut self, purge: bool) {
        if !purge && self.child_close.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        let children: Vec<SessionId> = self.state.children.iter().cloned().collect();
        self.child_close = Some(self.daemon.spawn(async move {
            for child in &children {
                if retry_delivery(&daemon, || close_child(&daemon, &session.id, child, purge)).await.is_none()
                {
                    return;
                }
            }
            for child in &children {
                daemon.wait_closed(child).await;
            }
            deliver_command(&daemon, &session, EventActor::DAEMON, SessionCommand::ChildrenClosed).await;
        }));
    }

    /// Checks which of the children that a suspended run waits for have ended, and reports them to our own session.
    pub(super) fn check_children(&self, children: Vec<SessionId>) {
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        self.daemon.spawn(async move {
            for child in children {
                let result = retry_delivery(&daemon, || child_result(&daemon, &child)).await;
                if let Some(Some(result)) = result {
                    deliver_command(
                        &daemon,
                        &session,
                        for_session(&child),
                        SessionCommand::ChildEnded(result),
                    )
                    .await;
                }
            }
        });
    }

    /// Reports the end of a run to the session's fleet, which knows whether the run is one of its own.
    pub(super) fn notify_fleet(&self, run: RunId) {
        let Some(member) = self.state.settings.fleet.clone() else { return };
        self.daemon.notify_fleet(member.fleet_id, run);
    }

    /// Reports to the parent that nothing runs here any more, in case the parent waits for that.
    pub(super) fn notify_parent(&self) {
        let Some(parent) = self.state.settings.parent.clone() else { return };
        let (daemon, child) = (Arc::clone(&self.daemon), self.session.id.clone());
        self.daemon.spawn(async move {
            let report = || async {
                match child_result(&daemon, &child).await? {
                    Some(result) => Ok(Some((daemon.find_session(&parent).await?, result))),
                    None => Ok(None),
                }
            };
            if let Some(Some((parent, result))) = retry_delivery(&daemon, report).await {
                deliver_command(&daemon, &parent, for_session(&child), SessionCommand::ChildEnded(result))
                    .await;
            }
        });
    }
}

/// Sends a command to a session until it is journalled. Gives up only if the session no longer exists or the daemon
/// stops; then the next daemon sends it again.
async fn deliver_command(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    actor: EventActor,
    command: SessionCommand,
) {
    let actor = Arc::new(actor);
    let _delivered =
        retry_delivery(daemon, || daemon.send_command(session, &actor, command.clone(), None)).await;
}

/// Repeats an operation while mailboxes are full or the journal fails. Without this, a moment without storage could
/// leave a session waiting for a report that nobody repeats. `None` if it fails for good, or the daemon stops.
pub(crate) async fn retry_delivery<T, F>(daemon: &Daemon, operation: impl Fn() -> F) -> Option<T>
where
    F: Future<Output = Result<T, ApiError>>,
{
    let mut reported = false;
    loop {
        match operation().await {
            Ok(value) => return Some(value),
            Err(error) if is_temporary(&error) && !daemon.is_stopping() => {
                if !std::mem::replace(&mut reported, true) {
                    tracing::warn!(%error, "could not pass something on between sessions; trying again until it works");
                }
                tokio::time::sleep(DELIVERY_RETRY).await;
            }
            Err(_) => return None,
        }
    }
}

fn is_temporary(error: &ApiError) -> bool {
    matches!(error.code, ErrorCode::Overloaded | ErrorCode::StorageFailed)
}

/// The result of a session, if nothing of it runs any more. A session that never got a prompt has ended only once it
/// is closed: its creator may be about to send one.
async fn child_result(daemon: &Daemon, id: &SessionId) -> Result<Option<ChildResult>, ApiError> {
    let without_result = || ChildResult { session_id: id.clone(), finish_reason: None, text: String::new() };
    let Some(row) = daemon.journal.session(id).await.map_err(read_failed)? else {
        return Ok(Some(without_result()));
    };
    let filter = RunFilter { session: Some(row.key), ..RunFilter::default() };
    let runs = daemon.journal.runs(filter, None, usize::MAX).await.map_err(read_failed)?;
    if runs.iter().any(|run| !run.finished) {
        return Ok(None);
    }
    match runs.last() {
        None => Ok(row.closed_at.map(|_| without_result())),
        Some(run) => {
            let doc: RunDoc = serde_json::from_slice(&run.doc).map_err(unreadable_row("run", &run.id))?;
            let text = escaped_head(&doc.text.unwrap_or_default(), HEAD_MAX).to_owned();
            Ok(Some(ChildResult { session_id: id.clone(), finish_reason: doc.finish_reason, text }))
        }
    }
}

/// Cancels a session and its descendants, and returns the runs that were stopped. A session that no longer exists has
/// none. Boxed, because it waits for a tree of any height.
fn cancel_child<'a>(
    daemon: &'a Arc<Daemon>,
    parent: &'a SessionId,
    child: &'a SessionId,
    cause: EventNumber,
) -> Pin<Box<dyn Future<Output = Result<Vec<RunId>, ApiError>> + Send + 'a>> {
    Box::pin(async move {
        let Some(session) = find_child(daemon, child).await? else { return Ok(Vec::new()) };
        let actor = Arc::new(for_session(parent));
        let command = SessionCommand::CancelFromParent { cause };
        let CommandCompletion { reply, cancelled_in_children } =
            daemon.send_command(&session, &actor, command, None).await?;
        let mut runs = match reply {
            ActorReply::Cancelled(cancelled) => cancelled.cancelled,
            _ => Vec::new(),
        };
        if let Some(below) = cancelled_in_children {
            runs.extend(below.await.unwrap_or_default());
        }
        Ok(runs)
    })
}

async fn close_child(
    daemon: &Arc<Daemon>,
    parent: &SessionId,
    child: &SessionId,
    purge: bool,
) -> Result<(), ApiError> {
    let Some(session) = find_child(daemon, child).await? else { return Ok(()) };
    let actor = Arc::new(for_session(parent));
    daemon.send_command(&session, &actor, SessionCommand::Close { purge }, None).await.map(drop)
}

/// The daemon, when it passes on what another session did. Who made that session do it is in its own events: after a
/// crash, nothing else is known.
fn for_session(session: &SessionId) -> EventActor {
    EventActor::Daemon { session_id: Some(session.clone()) }
}

/// A child session, unless it was purged.
async fn find_child(daemon: &Daemon, child: &SessionId) -> Result<Option<Arc<SessionAddress>>, ApiError> {
    match daemon.find_session(child).await {
        Err(error) if error.code == ErrorCode::NotFound => Ok(None),
        found => found.map(Some),
    }
}
