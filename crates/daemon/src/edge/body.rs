//! A request's body, read within limits of size and time. What a handler leaves unread is drained before the response
//! is sent, because a client that is still writing would otherwise get a reset and never see the response.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use qd_protocol::{ApiError, ErrorCode};
use tokio::time::Sleep;

use super::serve::EdgeLimits;

/// A client that is silent for this long has sent all that it will send before our response.
const DRAIN_IDLE: Duration = Duration::from_millis(250);
/// How many times the size of an allowed body is drained at most.
const DRAIN_FACTOR: usize = 4;

/// Reads a whole body.
pub async fn read_whole_body(body: Body) -> Result<Bytes, ApiError> {
    match body.collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) => Err(describe_body_error(&error)),
    }
}

/// The error for a body that announces, or turns out to have, too many bytes.
pub(super) fn body_too_large(limit: usize) -> ApiError {
    ApiError::new(ErrorCode::BodyTooLarge, format!("a request body may have at most {limit} bytes"))
        .with_detail("limit_bytes", limit)
}

/// Why a body could not be read completely.
#[derive(Debug, thiserror::Error)]
enum RequestBodyError {
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    #[error("the body did not arrive within {0:?}")]
    TimedOut(Duration),
    #[error("the connection broke: {0}")]
    ConnectionBroken(#[from] hyper::Error),
}

fn describe_body_error(error: &(dyn std::error::Error + 'static)) -> ApiError {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(RequestBodyError::TooLarge(limit)) = error.downcast_ref() {
            return body_too_large(*limit);
        }
        if let Some(error) = error.downcast_ref::<RequestBodyError>() {
            return ApiError::new(ErrorCode::InvalidRequest, error.to_string());
        }
        cause = error.source();
    }
    ApiError::new(ErrorCode::InvalidRequest, format!("the body could not be read: {error}"))
}

/// The rest of a body that its reader dropped before the end.
#[derive(Default, Clone)]
pub(super) struct UnreadBody(Arc<Mutex<Option<Incoming>>>);

impl UnreadBody {
    /// Reads and discards the rest, within limits.
    pub(super) async fn drain(&self, limits: &EdgeLimits) {
        let rest = self.0.lock().take();
        let Some(mut rest) = rest else { return };
        let mut remaining = limits.body_bytes.saturating_mul(DRAIN_FACTOR);
        if usize::try_from(rest.size_hint().lower()).map_or(true, |announced| announced > remaining) {
            return;
        }
        let discard = async {
            while let Ok(Some(Ok(frame))) = tokio::time::timeout(DRAIN_IDLE, rest.frame()).await {
                let length = frame.data_ref().map_or(0, Bytes::len);
                match remaining.checked_sub(length) {
                    Some(left) => remaining = left,
                    None => return,
                }
            }
        };
        // A slower client gets its response, and then perhaps a reset.
        drop(tokio::time::timeout(limits.read_timeout, discard).await);
    }
}

/// A request body that is read within limits.
pub(super) struct LimitedBody {
    /// `None` once nothing more can be read from it.
    incoming: Option<Incoming>,
    limit: usize,
    bytes_read: usize,
    read_timeout: Duration,
    /// Starts with the first read.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Whether the client waits for `100 Continue` before it sends the body.
    awaits_continue: bool,
    unread: UnreadBody,
}

impl LimitedBody {
    pub(super) fn new(
        incoming: Incoming,
        awaits_continue: bool,
        limits: &EdgeLimits,
        unread: UnreadBody,
    ) -> Self {
        let (limit, read_timeout) = (limits.body_bytes, limits.read_timeout);
        Self {
            incoming: Some(incoming),
            limit,
            bytes_read: 0,
            read_timeout,
            deadline: None,
            awaits_continue,
            unread,
        }
    }

    /// Whether the announced length is over the limit.
    pub(super) fn is_too_large(&self) -> bool {
        usize::try_from(self.size_hint().lower()).map_or(true, |announced| announced > self.limit)
    }
}

impl fmt::Debug for LimitedBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Intake").field("taken", &self.bytes_read).finish_non_exhaustive()
    }
}

impl HttpBody for LimitedBody {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        let Some(incoming) = this.incoming.as_mut() else { return Poll::Ready(None) };
        this.awaits_continue = false;
        let within = this.read_timeout;
        let deadline = this.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(within)));
        if deadline.as_mut().poll(cx).is_ready() {
            this.incoming = None;
            return Poll::Ready(Some(Err(RequestBodyError::TimedOut(within).into())));
        }
        match ready!(Pin::new(incoming).poll_frame(cx)) {
            None => {
                this.incoming = None;
                Poll::Ready(None)
            }
            Some(Err(error)) => {
                this.incoming = None;
                Poll::Ready(Some(Err(RequestBodyError::ConnectionBroken(error).into())))
            }
            Some(Ok(frame)) => {
                this.bytes_read = this.bytes_read.saturating_add(frame.data_ref().map_or(0, Bytes::len));
                if this.bytes_read > this.limit {
                    return Poll::Ready(Some(Err(RequestBodyError::TooLarge(this.limit).into())));
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

impl Drop for LimitedBody {
    fn drop(&mut self) {
        let Some(incoming) = self.incoming.take() else { return };
        if !self.awaits_continue && !incoming.is_end_stream() {
            *self.unread.0.lock() = Some(incoming);
        }
    }
}
