//! Events as they happen. A task of its own reads the stream and, when the connection breaks, opens it again after the
//! last event that it gave: the reader sees every event once, in order. A daemon that died is replaced; one that was
//! stopped on purpose ends its streams properly, and is only waited for.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::Context;
use http_body_util::BodyExt;
use qd_protocol::sse::{SseFrame, SseParser};
use qd_protocol::{Event, Seq, limits};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::{DaemonClient, MAX_DOWNTIME};
use crate::failure::{CliFailure, Result};

/// Events that may wait for the reader; beyond them the daemon waits, and nobody else.
const QUEUE_CAPACITY: usize = 256;
/// Before the first attempt to connect again; doubled before each one after it.
const FIRST_RECONNECT_DELAY: Duration = Duration::from_millis(50);
/// Between two attempts at most.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(2);
/// Silence after which a connection counts as broken: three heartbeats missed.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3 * limits::HEARTBEAT_S);

/// The longest frame: an event's data at its limit, and more than enough for all around it.
const FRAME_MAX: usize = 2 * limits::EVENT_MAX;

/// One event with the line that it came as.
#[derive(Debug)]
pub(crate) struct ReceivedEvent {
    /// The event.
    pub(crate) event: Event,
    /// The same as JSON, as the daemon sent it.
    pub(crate) line: String,
}

/// What a stream gives next.
#[derive(Debug)]
pub(crate) enum EventStreamItem {
    /// An event.
    Event(Box<ReceivedEvent>),
    /// The connection broke before the first event, so that nobody knows what came meanwhile. The stream goes on from
    /// now; whoever must not miss anything looks again.
    Gap,
}

/// A stream of events.
#[derive(Debug)]
pub(crate) struct EventStream {
    queue: mpsc::Receiver<StreamReaderMessage>,
    /// What came while we waited for the stream to be ready.
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
    /// Everything on `path` after `cursor`, then whatever happens.
    pub(crate) fn after(client: &DaemonClient, path: &str, cursor: Seq) -> Self {
        Self::start(client, path, Some(cursor))
    }

    /// Whatever is accepted from now on: returns once the daemon says that nothing will be missed.
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

    /// The next event. May be given up and called again; nothing is lost by it.
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

/// The task behind a stream.
struct EventStreamReader {
    client: DaemonClient,
    path: String,
    /// Where the stream goes on after a break, in the daemon's words.
    cursor: Option<String>,
    /// The last event given, against a repeat.
    last_seq: Option<Seq>,
    /// Whether the daemon has said `ready` before.
    ready: bool,
    queue: mpsc::Sender<StreamReaderMessage>,
}

/// Why one connection's reading ended.
enum StreamReadEnd {
    /// It broke; another one may go on.
    Broken(CliFailure),
    /// The daemon ended it: it is being stopped.
    ClosedByDaemon,
    /// Nobody listens any more, or nothing can be done.
    Finished,
}

impl EventStreamReader {
    async fn read(mut self) {
        let mut pause = FIRST_RECONNECT_DELAY;
        let mut away_since = Instant::now();
        let mut stopped = false;
        loop {
            let mut heard = false;
            let stop = self.read_connection(&mut heard).await;
            if heard {
                (pause, away_since) = (FIRST_RECONNECT_DELAY, Instant::now());
                stopped = matches!(stop, StreamReadEnd::ClosedByDaemon);
                if stopped {
                    self.client.note_stopped();
                }
            }
            let failure = match stop {
                StreamReadEnd::Finished => return,
                StreamReadEnd::Broken(failure) => failure,
                StreamReadEnd::ClosedByDaemon => stream_ended(),
            };
            let hopeless = if stopped { None } else { self.client.ensure_running().await.err() };
            if let Some(failure) =
                hopeless.or_else(|| (away_since.elapsed() > MAX_DOWNTIME).then_some(failure))
            {
                let _ = self.queue.send(StreamReaderMessage::Failed(failure)).await;
                return;
            }
            sleep(pause).await;
            pause = (pause * 2).min(MAX_RECONNECT_DELAY);
        }
    }

    /// Reads one connection until it breaks.
    async fn read_connection(&mut self, heard: &mut bool) -> StreamReadEnd {
        let (wire, response) = match self.client.open_stream(&self.path, self.cursor.as_deref()).await {
            Ok(opened) => opened,
            // A daemon that is going down or that could not read its journal may do better later.
            Err(CliFailure::Refused(refusal)) if refusal.status < 500 && refusal.status != 429 => {
                let _ = self.queue.send(StreamReaderMessage::Failed(CliFailure::Refused(refusal))).await;
                return StreamReadEnd::Finished;
            }
            Err(failure) => return StreamReadEnd::Broken(failure),
        };
        *heard = true;
        let mut body = response.into_body();
        let mut parser = SseParser::new(FRAME_MAX);
        let stop = loop {
            let frame = match timeout(SILENCE_TIMEOUT, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => break StreamReadEnd::ClosedByDaemon,
                Ok(Some(Err(_))) | Err(_) => break StreamReadEnd::Broken(stream_ended()),
            };
            let Some(bytes) = frame.data_ref() else { continue };
            let Ok(frames) = parser.feed(bytes) else { break StreamReadEnd::Broken(stream_ended()) };
            if let Err(stop) = self.deliver_frames(frames).await {
                break stop;
            }
        };
        drop(wire);
        stop
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

    /// The stream is attached. If that happened before and nothing has come since, there is no cursor to go on from.
    fn on_ready(&mut self) -> StreamReaderMessage {
        let again = std::mem::replace(&mut self.ready, true);
        if again && self.cursor.is_none() {
            StreamReaderMessage::Item(EventStreamItem::Gap)
        } else {
            StreamReaderMessage::Ready
        }
    }

    /// The event in a frame; none if it was given before.
    fn decode_event(&mut self, id: Option<String>, line: String) -> Option<StreamReaderMessage> {
        let event: Event =
            match serde_json::from_str(&line).context("an event has a shape that this qd does not know") {
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
