//! What can be open in a turn: a line on which its task is heard, the task itself, and whatever else takes time. Nothing
//! is decided here.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::client::{A2aClient, A2aEventStream};
use super::http::A2aHttpError;
use super::messages::A2aEvent;

/// How long the last request to stop may take, of a turn that nobody waits for any more.
const FINAL_CANCEL_LIMIT: Duration = Duration::from_secs(5);

/// Something that takes time.
pub(super) type A2aPending<'a, T> = Option<BoxFuture<'a, T>>;

/// Waits for something that is being done, which then is no more; for ever if nothing is.
pub(super) async fn wait_pending<T>(doing: &mut A2aPending<'_, T>) -> T {
    let done = match doing {
        Some(doing) => doing.await,
        None => std::future::pending().await,
    };
    *doing = None;
    done
}

/// Where the task is heard.
pub(super) enum A2aEventSource {
    /// Nowhere: it is looked at, or it waits for an answer.
    Idle,
    /// A line that is being opened.
    Opening(A2aSourcePurpose, BoxFuture<'static, Result<A2aEventStream, A2aHttpError>>),
    Connected(A2aEventStream),
}

/// What a line is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum A2aSourcePurpose {
    /// To tell the agent something.
    SendMessage,
    /// To listen to it again.
    Resubscribe,
}

/// What came from there.
pub(super) enum A2aSourceEvent {
    Opened(A2aSourcePurpose, Result<A2aEventStream, A2aHttpError>),
    Received(Result<Option<A2aEvent>, A2aHttpError>),
}

impl A2aEventSource {
    /// What comes next. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self) -> A2aSourceEvent {
        match self {
            Self::Idle => std::future::pending().await,
            Self::Opening(wanted, opening) => A2aSourceEvent::Opened(*wanted, opening.await),
            Self::Connected(line) => A2aSourceEvent::Received(line.next().await),
        }
    }
}

/// The task of a turn. One that is let go of and is not known to be over is asked to stop: nobody would hear of it again.
pub(super) struct A2aOpenTask {
    pub(super) client: Arc<A2aClient>,
    /// The agent's name for it, once it has one.
    pub(super) id: Option<String>,
    pub(super) over: bool,
}

impl Drop for A2aOpenTask {
    fn drop(&mut self) {
        let Some(id) = self.id.take().filter(|_| !self.over) else { return };
        let remote = Arc::clone(&self.client);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // It ends by its own limit, and with its process, whichever comes first.
            drop(runtime.spawn(async move {
                tokio::time::timeout(FINAL_CANCEL_LIMIT, remote.cancel(&id, None)).await
            }));
        }
    }
}
