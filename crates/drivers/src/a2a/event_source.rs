//! What can be open in a turn: the source of its task's events, the task itself, and other pending calls. Nothing is
//! decided here.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::client::{A2aClient, A2aEventStream};
use super::http::A2aHttpError;
use super::messages::A2aEvent;

/// The time limit for the final cancel of a turn that nobody waits for any more.
const FINAL_CANCEL_LIMIT: Duration = Duration::from_secs(5);

/// A call that may be pending.
pub(super) type A2aPending<'a, T> = Option<BoxFuture<'a, T>>;

/// Waits for a pending call and clears it. Waits for ever if there is none.
pub(super) async fn wait_pending<T>(pending: &mut A2aPending<'_, T>) -> T {
    let result = match pending {
        Some(pending) => pending.await,
        None => std::future::pending().await,
    };
    *pending = None;
    result
}

/// Where the events of the task come from.
pub(super) enum A2aEventSource {
    /// There is no stream: the task is polled, or it waits for an answer.
    Idle,
    /// A stream that is being opened.
    Opening(A2aSourcePurpose, BoxFuture<'static, Result<A2aEventStream, A2aHttpError>>),
    Connected(A2aEventStream),
}

/// What a stream is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum A2aSourcePurpose {
    /// To send a message; the stream is the response.
    SendMessage,
    /// To receive events of the task again after a break.
    Resubscribe,
}

/// An event of the source.
pub(super) enum A2aSourceEvent {
    Opened(A2aSourcePurpose, Result<A2aEventStream, A2aHttpError>),
    Received(Result<Option<A2aEvent>, A2aHttpError>),
}

impl A2aEventSource {
    /// Returns the next event of the source. Cancel safe.
    pub(super) async fn next(&mut self) -> A2aSourceEvent {
        match self {
            Self::Idle => std::future::pending().await,
            Self::Opening(purpose, opening) => A2aSourceEvent::Opened(*purpose, opening.await),
            Self::Connected(stream) => A2aSourceEvent::Received(stream.next().await),
        }
    }
}

/// The task of a turn. If it is dropped while it may still run, it is cancelled: nobody would hear of it again.
pub(super) struct A2aOpenTask {
    pub(super) client: Arc<A2aClient>,
    /// The task's id, once it is known.
    pub(super) id: Option<String>,
    pub(super) is_over: bool,
}

impl Drop for A2aOpenTask {
    fn drop(&mut self) {
        let Some(id) = self.id.take().filter(|_| !self.is_over) else { return };
        let client = Arc::clone(&self.client);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // The spawned task ends by its own time limit or with the process.
            drop(runtime.spawn(async move {
                tokio::time::timeout(FINAL_CANCEL_LIMIT, client.cancel(&id, None)).await
            }));
        }
    }
}
