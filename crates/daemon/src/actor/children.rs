//! Errands between a session and those below and above it: a cancel or a close is passed on and confirmed, an end is
//! told. What is owed is in the journal until then, so a crash on the way only means that it is passed on again.

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

use super::reply::{ActorReply, CommandCompletion};
use super::{SessionActor, encode_failed};
use crate::daemon::{Daemon, read_failed};

impl SessionActor {
    pub(super) fn cancel_children(&self, number: EventNumber, told: Option<oneshot::Sender<Vec<RunId>>>) {
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        let children: Vec<SessionId> = self.state.children.iter().cloned().collect();
        self.daemon.spawn(async move {
            let mut hit = Vec::new();
            for child in children {
                match cancel_child(&daemon, &child, number).await {
                    Ok(runs) => hit.extend(runs),
                    Err(error) if error.code == ErrorCode::NotFound => {}
                    Err(error) => {
                        tracing::warn!(%child, %error, "a cancel did not reach a session below; it is owed");
                        return;
                    }
                }
            }
            Self::post_command(&daemon, &session, SessionCommand::ChildrenCancelled { number });
            if let Some(told) = told {
                // Whoever has gone away does not need the receipt.
                let _gone = told.send(hit);
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
                    tracing::warn!(%child, %error, "a session below could not be closed; it is owed");
                    return;
                }
            }
            for child in &children {
                daemon.wait_closed(child).await;
            }
            Self::post_command(&daemon, &session, SessionCommand::ChildrenClosed);
        });
    }

    /// Looks which of the sessions that a suspended run waits for have ended, and tells ourselves.
    pub(super) fn check_children(&self, children: Vec<SessionId>) {
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        self.daemon.spawn(async move {
            for child in children {
                match child_result(&daemon, &child).await {
                    Ok(Some(result)) => Self::post_command(&daemon, &session, SessionCommand::ChildEnded(result)),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::warn!(%child, %error, "a session below could not be looked at; it tells itself when it ends");
                    }
                }
            }
        });
    }

    /// Tells our fleet that a run has ended; it knows whether it is one of its own.
    pub(super) fn notify_fleet(&self, run: RunId) {
        let Some(member) = self.state.settings.fleet.clone() else { return };
        self.daemon.notify_fleet(member.fleet_id, run);
    }

    /// Tells the session above that nothing runs here any more, in case it waits for that.
    pub(super) fn notify_parent(&self) {
        let Some(parent) = self.state.settings.parent.clone() else { return };
        let (daemon, child) = (Arc::clone(&self.daemon), self.session.id.clone());
        self.daemon.spawn(async move {
            let told = async {
                if let Some(result) = child_result(&daemon, &child).await? {
                    let parent = daemon.find_session(&parent).await?;
                    Self::post_command(&daemon, &parent, SessionCommand::ChildEnded(result));
                }
                Ok::<_, ApiError>(())
            };
            if let Err(error) = told.await {
                tracing::debug!(%parent, %error, "a session above was not told; it asks when it wakes");
            }
        });
    }
}

/// What became of a session, if nothing of it runs any more. One that was never given anything has not ended before it
/// is closed: whoever made it may be about to.
async fn child_result(daemon: &Daemon, id: &SessionId) -> Result<Option<ChildResult>, ApiError> {
    let nothing = || ChildResult { session_id: id.clone(), finish_reason: None, text: String::new() };
    let Some(row) = daemon.journal.session(id).await.map_err(read_failed)? else {
        return Ok(Some(nothing()));
    };
    let of = RunFilter { session: Some(row.key), ..RunFilter::default() };
    let runs = daemon.journal.runs(of, None, usize::MAX).await.map_err(read_failed)?;
    if runs.iter().any(|run| !run.finished) {
        return Ok(None);
    }
    match runs.last() {
        None => Ok(row.closed_at.map(|_| nothing())),
        Some(run) => {
            let doc: RunDoc = serde_json::from_slice(&run.doc).map_err(encode_failed)?;
            let text = escaped_head(&doc.text.unwrap_or_default(), HEAD_MAX).to_owned();
            Ok(Some(ChildResult { session_id: id.clone(), finish_reason: doc.finish_reason, text }))
        }
    }
}

/// The runs that were hit in a session and in all below it. Boxed by its caller's depth: trees have no fixed height.
fn cancel_child<'a>(
    daemon: &'a Arc<Daemon>,
    child: &'a SessionId,
    cause: EventNumber,
) -> Pin<Box<dyn Future<Output = Result<Vec<RunId>, ApiError>> + Send + 'a>> {
    Box::pin(async move {
        let session = daemon.find_session(child).await?;
        let CommandCompletion { reply: answer, cancelled_in_children: below } =
            daemon.send_command(&session, SessionCommand::CancelFromParent { cause }, None).await?;
        let mut hit = match answer {
            ActorReply::Cancelled(cancelled) => cancelled.cancelled,
            _ => Vec::new(),
        };
        if let Some(below) = below {
            hit.extend(below.await.unwrap_or_default());
        }
        Ok(hit)
    })
}

async fn close_child(daemon: &Arc<Daemon>, child: &SessionId, purge: bool) -> Result<(), ApiError> {
    let session = daemon.find_session(child).await?;
    daemon.send_command(&session, SessionCommand::Close { purge }, None).await.map(drop)
}
