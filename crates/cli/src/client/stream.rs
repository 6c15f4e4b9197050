//! The stream of events. A background task reads it and, when the connection breaks, reconnects after the last event
//! that it delivered, so the reader gets every event once and in order. If the daemon died, a new one is started; a
//! daemon that was stopped on purpose ends its streams cleanly, and the task only waits for the next one.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::Context;
use http_body_util::BodyExt;
use qd_protocol::sse::{SseFrame, SseParser};
use qd_protocol::{Event, Seq, limits};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::liveness::STREAM_PROBE_AFTER;
use super::{DaemonClient, MAX_DOWNTIME};
use crate::failure::{CliFailure, Result};

/// Events that may wait for the reader. When the queue is full the task stops reading the connection.
const QUEUE_CAPACITY: usize = 256;
/// Delay before the first reconnect; doubled before each further one.
const FIRST_RECONNECT_DELAY: Duration = Duration::from_millis(50);
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(2);
/// A connection that is silent for this long counts as broken: three heartbeats are missing.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3 * limits::HEARTBEAT_S);

/// The longest SSE frame: the largest event data, and ample space for the rest of the frame.
const FRAME_MAX: usize = 2 * limits::EVENT_MAX;

/// One event and the JSON that the daemon sent for it.
#[derive(Debug)]
pub(crate) struct ReceivedEvent {
    pub(crate) event: Event,
    /// The event as JSON on one line, byte for byte as the daemon sent it.
    pub(crate) line: String,
}

#[derive(Debug)]
pub(crate) enum EventStreamItem {
    Event(Box<ReceivedEvent>),
    /// The connection broke before the first event, so there was no cursor to resume from and events may be missing.
    /// The stream continues from now; a caller that must not miss anything has to query the state again.
    Gap,
}

/// A stream of events that survives broken connections and daemon restarts.
#[derive(Debug)]
pub(crate) struct EventStream {
    queue: mpsc::Receiver<StreamReaderMessage>,
    /// Messages that arrived before the stream was ready.
    early: VecDeque<StreamReaderMessage>,
    reader: JoinHandle<()>,
}

#[derive(Debug)]
enum StreamReaderMessage {
    Ready,
    Item(EventStreamItem),
    Failed(CliFailure),
}

impl EventStream {
    /// All events on `path` after `cursor`, then live events.
    pub(crate) fn after(client: &DaemonClient, path: &str, cursor: Seq) -> Self {
        Self::start(client, path, Some(cursor))
    }

    /// Live events from now on. Returns once the daemon has sent `ready`: no later event will be missed.
    pub(crate) async fn from_now(client: &DaemonClient, path: &str) -> Result<Self> {
        let mut stream = Self::start(client, path, None);
        loop {
            match stream.queue.recv().await {
                Some(StreamReaderMessage::Ready) => return Ok(stream),
                Some(StreamReaderMessage::Failed(failure)) => return Err(failure),
                Some(item) => stream.early.push_back(item),
                None => return Err(stream_ended()),
            }
        }
    }

    /// The next event. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<EventStreamItem> {
        loop {
            let item = match self.early.pop_front() {
                Some(item) => Some(item),
                None => self.queue.recv().await,
            };
            match item {
                Some(StreamReaderMessage::Item(next)) => return Ok(next),
                Some(StreamReaderMessage::Ready) => {}
                Some(StreamReaderMessage::Failed(failure)) => return Err(failure),
                None => return Err(stream_ended()),
            }
        }
    }

    fn start(client: &DaemonClient, path: &str, cursor: Option<Seq>) -> Self {
        let (sender, queue) = mpsc::channel(QUEUE_CAPACITY);
        let reader = EventStreamReader {
            client: client.clone(),
            path: path.to_owned(),
            cursor: cursor.map(|seq| seq.to_string()),
            last_seq: cursor,
            ready: false,
            queue: sender,
        };
        Self { queue, early: VecDeque::new(), reader: tokio::spawn(reader.read()) }
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn stream_ended() -> CliFailure {
    CliFailure::Unreachable("the event stream ended".to_owned())
}

/// The background task of an [`EventStream`].
struct EventStreamReader {
    client: DaemonClient,
    path: String,
    /// Where to resume after a broken connection, as an opaque `Last-Event-ID`.
    cursor: Option<String>,
    /// The last event delivered. Events up to it are dropped as repeats.
    last_seq: Option<Seq>,
    /// Whether the daemon has sent `ready` before.
    ready: bool,
    queue: mpsc::Sender<StreamReaderMessage>,
}

/// Why reading one connection ended.
enum StreamReadEnd {
    /// The connection broke; the task reconnects.
    Broken(CliFailure),
    /// The daemon closed the stream because it is shutting down.
    ClosedByDaemon,
    /// The receiver is gone, or the error is permanent.
    Finished,
}

impl EventStreamReader {
    async fn read(mut self) {
        let mut delay = FIRST_RECONNECT_DELAY;
        let mut away_since = Instant::now();
        let mut stopped = false;
        loop {
            let mut connected = false;
            let end = self.read_connection(&mut connected).await;
            if connected {
                (delay, away_since) = (FIRST_RECONNECT_DELAY, Instant::now());
                stopped = matches!(end, StreamReadEnd::ClosedByDaemon);
                if stopped {
                    self.client.note_stopped();
                }
            }
            let failure = match end {
                StreamReadEnd::Finished => return,
                StreamReadEnd::Broken(failure) => failure,
                StreamReadEnd::ClosedByDaemon => stream_ended(),
            };
            let start_failure = if stopped { None } else { self.client.ensure_running().await.err() };
            if let Some(failure) =
                start_failure.or_else(|| (away_since.elapsed() > MAX_DOWNTIME).then_some(failure))
            {
                let _ = self.queue.send(StreamReaderMessage::Failed(failure)).await;
                return;
            }
            sleep(delay).await;
            delay = (delay * 2).min(MAX_RECONNECT_DELAY);
        }
    }

    /// Opens one connection and reads it until it ends. Sets `connected` once the daemon has accepted the stream.
    async fn read_connection(&mut self, connected: &mut bool) -> StreamReadEnd {
        let (connection, response) = match self.client.open_stream(&self.path, self.cursor.as_deref()).await {
            Ok(opened) => opened,
            // 5xx and 429 are temporary: the daemon may be shutting down or failing to read its journal.
            Err(CliFailure::Refused(refusal)) if refusal.status < 500 && refusal.status != 429 => {
                return self.fail(CliFailure::Refused(refusal)).await;
            }
            Err(failure @ CliFailure::Unresponsive(_)) => return self.fail(failure).await,
            Err(failure) => return StreamReadEnd::Broken(failure),
        };
        *connected = true;
        let mut body = response.into_body();
        let mut parser = SseParser::new(FRAME_MAX);
        let end = loop {
            let frame = self.client.while_daemon_lives(STREAM_PROBE_AFTER, body.frame());
            let frame = match timeout(SILENCE_TIMEOUT, frame).await {
                Ok(Ok(Some(Ok(frame)))) => frame,
                Ok(Ok(None)) => break StreamReadEnd::ClosedByDaemon,
                Ok(Ok(Some(Err(_)))) | Err(_) => break StreamReadEnd::Broken(stream_ended()),
                Ok(Err(failure)) => break self.fail(failure).await,
            };
            let Some(bytes) = frame.data_ref() else { continue };
            let Ok(frames) = parser.feed(bytes) else { break StreamReadEnd::Broken(stream_ended()) };
            if let Err(end) = self.deliver_frames(frames).await {
                break end;
            }
        };
        drop(connection);
        end
    }

    /// Reports a permanent failure.
    async fn fail(&self, failure: CliFailure) -> StreamReadEnd {
        let _ = self.queue.send(StreamReaderMessage::Failed(failure)).await;
        StreamReadEnd::Finished
    }

    async fn deliver_frames(&mut self, frames: Vec<SseFrame>) -> Result<(), StreamReadEnd> {
        for frame in frames {
            let item = match frame {
                SseFrame::Comment(comment) if comment == "ready" => Some(self.on_ready()),
                SseFrame::Comment(_) => None,
                SseFrame::Message { id, data } => self.decode_event(id, data),
            };
            let Some(item) = item else { continue };
            let last = matches!(item, StreamReaderMessage::Failed(_));
            if self.queue.send(item).await.is_err() || last {
                return Err(StreamReadEnd::Finished);
            }
        }
        Ok(())
    }

    /// Handles the daemon's `ready`. A repeated `ready` without a cursor means that events may have been missed.
    fn on_ready(&mut self) -> StreamReaderMessage {
        let again = std::mem::replace(&mut self.ready, true);
        if again && self.cursor.is_none() {
            StreamReaderMessage::Item(EventStreamItem::Gap)
        } else {
            StreamReaderMessage::Ready
        }
    }

    /// Decodes the event in a frame. `None` if it was delivered before.
    fn decode_event(&mut self, id: Option<String>, line: String) -> Option<StreamReaderMessage> {
        let event: Event =
            match serde_json::from_str(&line).context("this qd does not understand an event of the daemon") {
                Ok(event) => event,
                Err(error) => return Some(StreamReaderMessage::Failed(error.into())),
            };
        if self.last_seq.is_some_and(|last| event.seq <= last) {
            return None;
        }
        self.last_seq = Some(event.seq);
        self.cursor = Some(id.unwrap_or_else(|| event.seq.to_string()));
        Some(StreamReaderMessage::Item(EventStreamItem::Event(Box::new(ReceivedEvent { event, line }))))
    }
}

#[cfg(test)]
mod tests;
