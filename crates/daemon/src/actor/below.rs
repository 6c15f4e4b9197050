//! Errands to the sessions below: a cancel or a close is passed on and confirmed. What is owed is in the journal
//! until then, so a crash on the way only means that it is passed on again.

use std::pin::Pin;
use std::sync::Arc;

use qd_core::session::Command;
use qd_journal::{Filter, Topic};
use qd_protocol::{ApiError, Code, Number, RunId, SessionId};
use tokio::sync::oneshot;

use super::Actor;
use super::reply::{Answer, Done};
use crate::daemon::Daemon;

impl Actor {
    pub(super) fn cancel_below(&self, number: Number, told: Option<oneshot::Sender<Vec<RunId>>>) {
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        let children: Vec<SessionId> = self.state.children.iter().cloned().collect();
        self.daemon.spawn(async move {
            let mut hit = Vec::new();
            for child in children {
                match cancel_child(&daemon, &child, number).await {
                    Ok(runs) => hit.extend(runs),
                    Err(error) if error.code == Code::NotFound => {}
                    Err(error) => {
                        tracing::warn!(%child, %error, "a cancel did not reach a session below; it is owed");
                        return;
                    }
                }
            }
            Self::tell_self(&daemon, &session, Command::BelowCancelled { number });
            if let Some(told) = told {
                // Whoever has gone away does not need the receipt.
                let _gone = told.send(hit);
            }
        });
    }

    pub(super) fn close_below(&self, purge: bool) {
        let (daemon, session) = (Arc::clone(&self.daemon), Arc::clone(&self.session));
        let children: Vec<SessionId> = self.state.children.iter().cloned().collect();
        self.daemon.spawn(async move {
            for child in &children {
                if let Err(error) = close_child(&daemon, child, purge).await
                    && error.code != Code::NotFound
                {
                    tracing::warn!(%child, %error, "a session below could not be closed; it is owed");
                    return;
                }
            }
            for child in &children {
                wait_closed(&daemon, child).await;
            }
            Self::tell_self(&daemon, &session, Command::BelowClosed);
        });
    }
}

/// The runs that were hit in a session and in all below it. Boxed by its caller's depth: trees have no fixed height.
fn cancel_child<'a>(
    daemon: &'a Arc<Daemon>,
    child: &'a SessionId,
    cause: Number,
) -> Pin<Box<dyn Future<Output = Result<Vec<RunId>, ApiError>> + Send + 'a>> {
    Box::pin(async move {
        let session = daemon.find_session(child).await?;
        let Done { answer, below } =
            daemon.command(&session, Command::CancelFromAbove { cause }, None).await?;
        let mut hit = match answer {
            Answer::Cancelled(cancelled) => cancelled.cancelled,
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
    daemon.command(&session, Command::Close { purge }, None).await.map(drop)
}

/// Waits until a session is closed, or gone altogether.
async fn wait_closed(daemon: &Arc<Daemon>, id: &SessionId) {
    let Ok(session) = daemon.find_session(id).await else { return };
    let mut news = daemon.journal.subscribe(Filter::of(Topic::Session(session.key)), None);
    // Subscribed first, then looked: the close cannot fall between the two.
    while let Ok(Some(row)) = daemon.journal.session(id).await
        && row.closed_at.is_none()
    {
        if news.next().await.is_err() {
            return;
        }
    }
}
