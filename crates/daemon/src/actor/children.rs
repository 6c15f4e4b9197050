//! Messages between a session and its parent, children and fleet: a cancel or close is passed down and confirmed, an
//! end is reported up. Each obligation stays in the journal until it is met, so after a crash it is simply passed on
//! again.
//!
//! Design: docs/design/mailbox-order-decides-cancels.md

use std::pin::Pin;
use std::sync::Arc;

use qd_core::rows::RunDoc;
use qd_core::session::SessionCommand;
use qd_journal::RunFilter;
use qd_protocol::event::ChildResult;
use qd_protocol::limits::HEAD_MAX;
use qd_protocol::text::escaped_head;
use qd_protocol::{ApiError, ErrorCode, EventNumber, RunId, SessionId};
use tokio::sync::oneshot;

use super::SessionActor;
use super::reply::{ActorReply, CommandCompletion};
use crate::daemon::{Daemon, read_failed};
use crate::http::unreadable_row;

impl SessionActor {
    pub(super) fn cancel_children(&self, number: EventNumber, receipt: Option<oneshot::Sender<Vec<RunId>>>) {
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        let children: Vec<SessionId> = self.state.children.iter().cloned().collect();
        self.daemon.spawn(async move {
            let mut cancelled = Vec::new();
            for child in children {
                match cancel_child(&daemon, &child, number).await {
                    Ok(runs) => cancelled.extend(runs),
                    Err(error) if error.code == ErrorCode::NotFound => {}
                    Err(error) => {
                        tracing::warn!(%child, %error, "a cancel did not reach a child session; it is sent again later");
                        return;
                    }
                }
            }
            Self::post_command(&daemon, &session, SessionCommand::ChildrenCancelled { number });
            if let Some(receipt) = receipt {
                // A client that has disconnected does not need the receipt.
                let _gone = receipt.send(cancelled);
            }
        });
    }

    pub(super) fn close_children(&self, purge: bool) {
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        let children: Vec<SessionId> = self.state.children.iter().cloned().collect();
        self.daemon.spawn(async move {
            for child in &children {
                if let Err(error) = close_child(&daemon, child, purge).await
                    && error.code != ErrorCode::NotFound
                {
                    tracing::warn!(%child, %error, "could not close a child session; trying again later");
                    return;
                }
            }
            for child in &children {
                daemon.wait_closed(child).await;
            }
            Self::post_command(&daemon, &session, SessionCommand::ChildrenClosed);
        });
    }

    /// Checks which of the children that a suspended run waits for have ended, and reports them to our own session.
    pub(super) fn check_children(&self, children: Vec<SessionId>) {
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        self.daemon.spawn(async move {
            for child in children {
                match child_result(&daemon, &child).await {
                    Ok(Some(result)) => Self::post_command(&daemon, &session, SessionCommand::ChildEnded(result)),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::warn!(%child, %error, "could not read a child session; it reports its end itself");
                    }
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
            let report = async {
                if let Some(result) = child_result(&daemon, &child).await? {
                    let parent = daemon.find_session(&parent).await?;
                    Self::post_command(&daemon, &parent, SessionCommand::ChildEnded(result));
                }
                Ok::<_, ApiError>(())
            };
            if let Err(error) = report.await {
                tracing::debug!(%parent, %error, "could not report an end to the parent; it asks when it wakes");
            }
        });
    }
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

/// Cancels a session and its descendants, and returns the runs that were stopped. Boxed, because it waits for a tree
/// of any height.
fn cancel_child<'a>(
    daemon: &'a Arc<Daemon>,
    child: &'a SessionId,
    cause: EventNumber,
) -> Pin<Box<dyn Future<Output = Result<Vec<RunId>, ApiError>> + Send + 'a>> {
    Box::pin(async move {
        let session = daemon.find_session(child).await?;
        let CommandCompletion { reply, cancelled_in_children } =
            daemon.send_command(&session, SessionCommand::CancelFromParent { cause }, None).await?;
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

async fn close_child(daemon: &Arc<Daemon>, child: &SessionId, purge: bool) -> Result<(), ApiError> {
    let session = daemon.find_session(child).await?;
    daemon.send_command(&session, SessionCommand::Close { purge }, None).await.map(drop)
}
