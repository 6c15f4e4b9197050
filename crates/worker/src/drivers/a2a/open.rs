//! What can be open in a turn: a line on which its task is heard, the task itself, and whatever else takes time. Nothing
//! is decided here.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::http::Fault;
use super::remote::{Line, Remote};
use super::words::Heard;

/// How long the last request to stop may take, of a turn that nobody waits for any more.
const PARTING: Duration = Duration::from_secs(5);

/// Something that takes time.
pub(super) type Doing<'a, T> = Option<BoxFuture<'a, T>>;

/// Waits for something that is being done, which then is no more; for ever if nothing is.
pub(super) async fn next<T>(doing: &mut Doing<'_, T>) -> T {
    let done = match doing {
        Some(doing) => doing.await,
        None => std::future::pending().await,
    };
    *doing = None;
    done
}

/// Where the task is heard.
pub(super) enum Source {
    /// Nowhere: it is looked at, or it waits for an answer.
    Silent,
    /// A line that is being opened.
    Opening(Wanted, BoxFuture<'static, Result<Line, Fault>>),
    Line(Line),
}

/// What a line is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// To tell the agent something.
    Telling,
    /// To listen to it again.
    Hearing,
}

/// What came from there.
pub(super) enum Came {
    Opened(Wanted, Result<Line, Fault>),
    Heard(Result<Option<Heard>, Fault>),
}

impl Source {
    /// What comes next. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self) -> Came {
        match self {
            Self::Silent => std::future::pending().await,
            Self::Opening(wanted, opening) => Came::Opened(*wanted, opening.await),
            Self::Line(line) => Came::Heard(line.next().await),
        }
    }
}

/// The task of a turn. One that is let go of and is not known to be over is asked to stop: nobody would hear of it again.
pub(super) struct OpenTask {
    pub(super) remote: Arc<Remote>,
    /// The agent's name for it, once it has one.
    pub(super) id: Option<String>,
    pub(super) over: bool,
}

impl Drop for OpenTask {
    fn drop(&mut self) {
        let Some(id) = self.id.take().filter(|_| !self.over) else { return };
        let remote = Arc::clone(&self.remote);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // It ends by its own limit, and with its process, whichever comes first.
            drop(runtime.spawn(async move { tokio::time::timeout(PARTING, remote.cancel(&id, None)).await }));
        }
    }
}
