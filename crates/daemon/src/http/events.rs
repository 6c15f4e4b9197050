//! Event streams, as server-sent events. A stream is a subscription to the journal that its own connection polls: it
//! has no task, nothing waits for it, and it sends the frames that all readers share.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use bytes::{Bytes, BytesMut};
use futures_util::stream;
use qd_journal::{EventFilter, EventTopic, JournalReadError, PublishedEvent, Subscription};
use qd_protocol::limits::HEARTBEAT_S;
use qd_protocol::{ApiError, ErrorCode, Seq, SessionId, WorkspaceId};
use serde::Deserialize;
use tokio::sync::watch;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadQueryResponse, GuardResponses, NotFoundResponse, StreamLimitResponse, WorkspacePath,
};
use super::caller::Caller;
use super::extract::{PathIds, Query};
use super::sessions;
use crate::daemon::Daemon;
use crate::edge::{HttpError, StreamPermit};
use crate::invalid_value;

/// The header with which a reader resumes.
const LAST_EVENT_ID: &str = "last-event-id";
/// Sent once the subscription is active: every later event is on the stream.
const READY_COMMENT: &[u8] = b": ready\n\n";
/// Sent after each period of silence, to keep the connection alive.
const HEARTBEAT_COMMENT: &[u8] = b": quiet\n\n";
/// Frames below this size are copied together, so that many go out in one write; larger ones stay shared.
const JOIN_BELOW: usize = 4 << 10;
/// The most bytes of frames that are copied together.
const JOINED_MAX: usize = 64 << 10;
pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(stream_all)).routes(routes!(stream_workspace))
}

/// Parses a cursor: a seq that the journal has reached.
pub(super) fn parse_cursor(text: &str, head: Seq) -> Result<Seq, ApiError> {
    match text.parse().map(Seq) {
        Ok(seq) if seq <= head => Ok(seq),
        Ok(seq) => {
            let message = format!("the cursor {seq} is ahead of the journal, which ends at {head}");
            Err(ApiError::new(ErrorCode::BadCursor, message))
        }
        Err(_) => {
            Err(ApiError::new(ErrorCode::BadCursor, "a cursor is the id of an event, or 0 for the beginning"))
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StreamQuery {
    /// Replay everything after this cursor, then continue live. 0 replays from the beginning; without it, from now.
    after: Option<String>,
    /// Only events of this session.
    session: Option<String>,
    /// Only events of these kinds, separated by commas.
    kinds: Option<String>,
}

/// The header of a reader that resumes.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "it only describes a header")]
struct CursorHeader {
    /// The id of the last event that the reader has seen. It takes precedence over `after`.
    #[param(rename = "Last-Event-ID")]
    last_event_id: Option<String>,
}

/// Streams the events of all workspaces, or of the one that the caller's token is for.
#[utoipa::path(get, path = "/v1/events", tag = "events", params(StreamQuery, CursorHeader), responses(
    (status = 200, description = "Frames of `id`, `event` and `data` (an `Event`), with no gap and no repeat; the \
        comment `: ready` once attached, a comment after every 15 s of silence", body = String,
        content_type = "text/event-stream"),
    BadQueryResponse, NotFoundResponse, StreamLimitResponse, GuardResponses,
))]
async fn stream_all(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    permit: StreamPermit,
    Query(query): Query<StreamQuery>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, HttpError> {
    let topic = match (&query.session, caller.workspace()) {
        (Some(text), _) => {
            let session = daemon.find_session(&parse_session_id(text)?).await?;
            caller.require_workspace(&session.workspace)?;
            EventTopic::Session(session.key)
        }
        (None, Some(own)) => EventTopic::Workspace(daemon.workspaces.get(own)?.key),
        (None, None) => EventTopic::All,
    };
    Ok(open_stream(&daemon, topic, &query, &headers, permit)?)
}

/// Streams the events of one workspace.
#[utoipa::path(get, path = "/v1/workspaces/{w}/events", tag = "events",
    params(WorkspacePath, StreamQuery, CursorHeader),
    responses(
        (status = 200, description = "As `/v1/events`", body = String, content_type = "text/event-stream"),
        BadQueryResponse, NotFoundResponse, StreamLimitResponse, GuardResponses,
    )
)]
async fn stream_workspace(
    State(daemon): State<Arc<Daemon>>,
    permit: StreamPermit,
    PathIds(workspace): PathIds<WorkspaceId>,
    Query(query): Query<StreamQuery>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, HttpError> {
    let entry = daemon.workspaces.get(&workspace)?;
    let topic = match &query.session {
        Some(text) => EventTopic::Session(
            sessions::find_session(&daemon, &workspace, &parse_session_id(text)?).await?.key,
        ),
        None => EventTopic::Workspace(entry.key),
    };
    Ok(open_stream(&daemon, topic, &query, &headers, permit)?)
}

fn parse_session_id(text: &str) -> Result<SessionId, ApiError> {
    SessionId::parse(text).map_err(|_| ApiError::not_found("session", text))
}

/// Subscribes, and returns a body that ends when the daemon stops or the reader disconnects.
fn open_stream(
    daemon: &Arc<Daemon>,
    topic: EventTopic,
    query: &StreamQuery,
    headers: &HeaderMap,
    permit: StreamPermit,
) -> Result<impl IntoResponse + use<>, ApiError> {
    let kinds = query.kinds.as_deref().map(parse_kinds).transpose()?;
    let after = match headers.get(LAST_EVENT_ID) {
        // A header that is not text is not a cursor either.
        Some(id) => Some(id.to_str().unwrap_or_default()),
        None => query.after.as_deref(),
    };
    let after = after.map(|text| parse_cursor(text, daemon.journal.head())).transpose()?;
    let feed = SseStream {
        subscription: daemon.journal.subscribe(EventFilter { topic, kinds }, after),
        stop: daemon.stop_signal(),
        chunks: VecDeque::from([Bytes::from_static(READY_COMMENT)]),
        _open_stream: OpenStreamGuard::new(Arc::clone(daemon)),
        _permit: permit,
    };
    let body = stream::unfold(feed, |mut feed| async {
        let chunk = feed.next().await?;
        Some((Ok::<Bytes, Infallible>(chunk), feed))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(body)))
}

/// Parses the kinds that a reader wants. Unknown kinds are an error, because a misspelled one would never arrive.
fn parse_kinds(text: &str) -> Result<Arc<[String]>, ApiError> {
    let is_known = |kind: &str| qd_protocol::EventBody::KINDS.contains(&kind);
    let parse = |kind: &str| match is_known(kind) {
        true => Ok(kind.to_owned()),
        false => Err(invalid_value(format!("there is no event kind `{kind}`"))),
    };
    text.split(',').map(parse).collect()
}

struct SseStream {
    subscription: Subscription,
    stop: watch::Receiver<bool>,
    chunks: VecDeque<Bytes>,
    _open_stream: OpenStreamGuard,
    _permit: StreamPermit,
}

impl SseStream {
    /// The next bytes; `None` at the end. On shutdown a reader that is far behind is cut off; it resumes with its
    /// cursor.
    async fn next(&mut self) -> Option<Bytes> {
        if self.chunks.is_empty() {
            let events = tokio::select! {
                biased;
                _ = self.stop.wait_for(|stop| *stop) => return None,
                events = self.subscription.next() => events,
                () = tokio::time::sleep(Duration::from_secs(HEARTBEAT_S)) => {
                    return Some(Bytes::from_static(HEARTBEAT_COMMENT));
                }
            };
            match events {
                Ok(events) => self.chunks = join_frames(&events),
                Err(JournalReadError::Stopped) => return None,
                Err(error) => {
                    tracing::warn!(%error, "a stream ends because the journal could not be read");
                    return None;
                }
            }
        }
        let chunk = self.chunks.pop_front();
        if self.chunks.is_empty() {
            // The capacity of a burst is released, because a quiet stream should cost little.
            self.chunks = VecDeque::new();
        }
        chunk
    }
}

/// The frames of some events, with small neighbours copied together.
fn join_frames(events: &[Arc<PublishedEvent>]) -> VecDeque<Bytes> {
    if let [event] = events {
        return VecDeque::from([event.frame.clone()]);
    }
    let mut chunks = VecDeque::new();
    let mut joined = BytesMut::new();
    for event in events {
        let frame = &event.frame;
        let is_large = frame.len() >= JOIN_BELOW;
        if !joined.is_empty() && (is_large || joined.len() + frame.len() > JOINED_MAX) {
            chunks.push_back(joined.split().freeze());
        }
        match is_large {
            true => chunks.push_back(frame.clone()),
            false => joined.extend_from_slice(frame),
        }
    }
    if !joined.is_empty() {
        chunks.push_back(joined.freeze());
    }
    chunks
}

/// Counts a stream in the metrics while it is open.
struct OpenStreamGuard(Arc<Daemon>);

impl OpenStreamGuard {
    fn new(daemon: Arc<Daemon>) -> Self {
        daemon.metrics.open_streams.fetch_add(1, Ordering::Relaxed);
        Self(daemon)
    }
}

impl Drop for OpenStreamGuard {
    fn drop(&mut self) {
        self.0.metrics.open_streams.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_a_seq_that_the_journal_has_reached() {
        assert_eq!(parse_cursor("0", Seq(7)), Ok(Seq(0)));
        assert_eq!(parse_cursor("7", Seq(7)), Ok(Seq(7)));
        for bad in ["8", "-1", "soon", "", "9223372036854775807", "99999999999999999999"] {
            assert_eq!(parse_cursor(bad, Seq(7)).unwrap_err().code, ErrorCode::BadCursor, "{bad}");
        }
    }

    #[test]
    fn kinds_are_those_of_the_contract() {
        assert_eq!(*parse_kinds("run.finished,text.delta").unwrap(), ["run.finished", "text.delta"]);
        assert!(parse_kinds("worker.exited").is_ok(), "a kind of the contract");
        for bad in ["", "run.finishd", "run.finished,", "run.finished, text.delta", "*"] {
            assert_eq!(parse_kinds(bad).unwrap_err().code, ErrorCode::InvalidValue, "{bad}");
        }
    }
}
