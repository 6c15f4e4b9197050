//! A request's body, read within its limits of size and time. What a handler left unread is taken off the line before
//! the answer goes out, because a client that is still writing would otherwise meet a reset and never see the answer.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use qd_protocol::{ApiError, Code};
use tokio::time::Sleep;

use super::serve::Limits;

/// A client that is silent for so long has sent all that it wanted to send before our answer.
const DRAIN_IDLE: Duration = Duration::from_millis(250);
/// How many times the size of an allowed body is read and thrown away.
const DRAIN_FACTOR: usize = 4;

/// Reads a whole body, or says why it cannot be had.
pub async fn read_whole(body: Body) -> Result<Bytes, ApiError> {
    match body.collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) => Err(explain(&error)),
    }
}

/// Too large: the answer to a body that says so itself, and to one that turns out to be.
pub(super) fn too_large(limit: usize) -> ApiError {
    ApiError::new(Code::BodyTooLarge, format!("a request's body can have {limit} bytes and no more"))
        .with("limit_bytes", limit)
}

/// Why a body broke off.
#[derive(Debug, thiserror::Error)]
enum BodyError {
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    #[error("the body did not arrive within {0:?}")]
    Slow(Duration),
    #[error("the connection broke: {0}")]
    Broken(#[from] hyper::Error),
}

fn explain(error: &(dyn std::error::Error + 'static)) -> ApiError {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(BodyError::TooLarge(limit)) = error.downcast_ref() {
            return too_large(*limit);
        }
        if let Some(error) = error.downcast_ref::<BodyError>() {
            return ApiError::new(Code::InvalidRequest, error.to_string());
        }
        cause = error.source();
    }
    ApiError::new(Code::InvalidRequest, format!("the body could not be read: {error}"))
}

/// Where the rest of a body is put when its reader lets go of it.
#[derive(Default, Clone)]
pub(super) struct Leftover(Arc<Mutex<Option<Incoming>>>);

impl Leftover {
    /// Reads and throws away what is left, within limits.
    pub(super) async fn drain(&self, limits: &Limits) {
        let rest = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut rest) = rest else { return };
        let mut room = limits.body.saturating_mul(DRAIN_FACTOR);
        if usize::try_from(rest.size_hint().lower()).map_or(true, |coming| coming > room) {
            return;
        }
        let thrown_away = async {
            while let Ok(Some(Ok(frame))) = tokio::time::timeout(DRAIN_IDLE, rest.frame()).await {
                let length = frame.data_ref().map_or(0, Bytes::len);
                match room.checked_sub(length) {
                    Some(left) => room = left,
                    None => return,
                }
            }
        };
        // A client that is slower than this gets its answer, and then perhaps a reset.
        drop(tokio::time::timeout(limits.read, thrown_away).await);
    }
}

/// A body on its way in.
pub(super) struct Intake {
    /// Gone once it is of no further use to anybody.
    incoming: Option<Incoming>,
    limit: usize,
    taken: usize,
    within: Duration,
    /// Starts with the first read.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Whether the client waits for a word from us before it sends anything.
    held_back: bool,
    leftover: Leftover,
}

impl Intake {
    pub(super) fn new(incoming: Incoming, held_back: bool, limits: &Limits, leftover: Leftover) -> Self {
        let (limit, within) = (limits.body, limits.read);
        Self { incoming: Some(incoming), limit, taken: 0, within, deadline: None, held_back, leftover }
    }

    /// Whether it says itself that it is too large.
    pub(super) fn is_too_large(&self) -> bool {
        usize::try_from(self.size_hint().lower()).map_or(true, |coming| coming > self.limit)
    }
}

impl fmt::Debug for Intake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Intake").field("taken", &self.taken).finish_non_exhaustive()
    }
}

impl HttpBody for Intake {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        let Some(incoming) = this.incoming.as_mut() else { return Poll::Ready(None) };
        this.held_back = false;
        let within = this.within;
        let deadline = this.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(within)));
        if deadline.as_mut().poll(cx).is_ready() {
            this.incoming = None;
            return Poll::Ready(Some(Err(BodyError::Slow(within).into())));
        }
        match ready!(Pin::new(incoming).poll_frame(cx)) {
            None => {
                this.incoming = None;
                Poll::Ready(None)
            }
            Some(Err(error)) => {
                this.incoming = None;
                Poll::Ready(Some(Err(BodyError::Broken(error).into())))
            }
            Some(Ok(frame)) => {
                this.taken = this.taken.saturating_add(frame.data_ref().map_or(0, Bytes::len));
                if this.taken > this.limit {
                    return Poll::Ready(Some(Err(BodyError::TooLarge(this.limit).into())));
                }
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or(SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        let Some(incoming) = self.incoming.take() else { return };
        if !self.held_back && !incoming.is_end_stream() {
            *self.leftover.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(incoming);
        }
    }
}
