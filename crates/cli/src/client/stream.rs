//! Events as they happen. A task of its own reads the stream and, when the connection breaks, opens it again after the
//! last event that it gave: the reader sees every event once, in order. A daemon that died is replaced; one that was
//! stopped on purpose ends its streams properly, and is only waited for.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::Context;
use http_body_util::BodyExt;
use qd_protocol::sse::{Frame, Parser};
use qd_protocol::{Event, Seq, limits};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::{AWAY, Client};
use crate::failure::{Failure, Result};

/// Events that may wait for the reader; beyond them the daemon waits, and nobody else.
const WINDOW: usize = 256;
/// Before the first attempt to connect again; doubled before each one after it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Between two attempts at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Silence after which a connection counts as broken: three heartbeats missed.
const SILENCE: Duration = Duration::from_secs(3 * limits::HEARTBEAT_S);

/// The longest frame: an event's data at its limit, and more than enough for all around it.
const FRAME_MAX: usize = 2 * limits::EVENT_MAX;

/// One event with the line that it came as.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// The event.
    pub(crate) event: Event,
    /// The same as JSON, as the daemon sent it.
    pub(crate) line: String,
}

/// What a stream gives next.
#[derive(Debug)]
pub(crate) enum Next {
    /// An event.
    Event(Box<Arrived>),
    /// The connection broke before the first event, so that nobody knows what came meanwhile. The stream goes on from
    /// now; whoever must not miss anything looks again.
    Gap,
}

/// A stream of events.
#[derive(Debug)]
pub(crate) struct EventStream {
    queue: mpsc::Receiver<Item>,
    /// What came while we waited for the stream to be ready.
    early: VecDeque<Item>,
    reader: JoinHandle<()>,
}

#[derive(Debug)]
enum Item {
    Ready,
    Next(Next),
    Failed(Failure),
}

impl EventStream {
    /// Everything on `path` after `cursor`, then whatever happens.
    pub(crate) fn after(client: &Client, path: &str, cursor: Seq) -> Self {
        Self::start(client, path, Some(cursor))
    }

    /// Whatever is accepted from now on: returns once the daemon says that nothing will be missed.
    pub(crate) async fn from_now(client: &Client, path: &str) -> Result<Self> {
        let mut stream = Self::start(client, path, None);
        loop {
            match stream.queue.recv().await {
                Some(Item::Ready) => return Ok(stream),
                Some(Item::Failed(failure)) => return Err(failure),
                Some(item) => stream.early.push_back(item),
                None => return Err(lost()),
            }
        }
    }

    /// The next event. May be given up and called again; nothing is lost by it.
    pub(crate) async fn next(&mut self) -> Result<Next> {
        loop {
            let item = match self.early.pop_front() {
                Some(item) => Some(item),
                None => self.queue.recv().await,
            };
            match item {
                Some(Item::Next(next)) => return Ok(next),
                Some(Item::Ready) => {}
                Some(Item::Failed(failure)) => return Err(failure),
                None => return Err(lost()),
            }
        }
    }

    fn start(client: &Client, path: &str, cursor: Option<Seq>) -> Self {
        let (sender, queue) = mpsc::channel(WINDOW);
        let reader = Reader {
            client: client.clone(),
            path: path.to_owned(),
            cursor: cursor.map(|seq| seq.to_string()),
            last: cursor,
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

fn lost() -> Failure {
    Failure::Unreachable("the event stream ended".to_owned())
}

/// The task behind a stream.
struct Reader {
    client: Client,
    path: String,
    /// Where the stream goes on after a break, in the daemon's words.
    cursor: Option<String>,
    /// The last event given, against a repeat.
    last: Option<Seq>,
    /// Whether the daemon has said `ready` before.
    ready: bool,
    queue: mpsc::Sender<Item>,
}

/// Why one connection's reading ended.
enum Stop {
    /// It broke; another one may go on.
    Broken(Failure),
    /// The daemon ended it: it is being stopped.
    Goodbye,
    /// Nobody listens any more, or nothing can be done.
    Ended,
}

impl Reader {
    async fn read(mut self) {
        let mut pause = FIRST_PAUSE;
        let mut away_since = Instant::now();
        let mut stopped = false;
        loop {
            let mut heard = false;
            let stop = self.connection(&mut heard).await;
            if heard {
                (pause, away_since) = (FIRST_PAUSE, Instant::now());
                stopped = matches!(stop, Stop::Goodbye);
                if stopped {
                    self.client.say_stopped();
                }
            }
            let failure = match stop {
                Stop::Ended => return,
                Stop::Broken(failure) => failure,
                Stop::Goodbye => lost(),
            };
            let hopeless = if stopped { None } else { self.client.stand_in().await.err() };
            if let Some(failure) = hopeless.or_else(|| (away_since.elapsed() > AWAY).then_some(failure)) {
                let _ = self.queue.send(Item::Failed(failure)).await;
                return;
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Reads one connection until it breaks.
    async fn connection(&mut self, heard: &mut bool) -> Stop {
        let (wire, response) = match self.client.open(&self.path, self.cursor.as_deref()).await {
            Ok(opened) => opened,
            // A daemon that is going down or that could not read its journal may do better later.
            Err(Failure::Refused(refusal)) if refusal.status < 500 && refusal.status != 429 => {
                let _ = self.queue.send(Item::Failed(Failure::Refused(refusal))).await;
                return Stop::Ended;
            }
            Err(failure) => return Stop::Broken(failure),
        };
        *heard = true;
        let mut body = response.into_body();
        let mut parser = Parser::new(FRAME_MAX);
        let stop = loop {
            let frame = match timeout(SILENCE, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => break Stop::Goodbye,
                Ok(Some(Err(_))) | Err(_) => break Stop::Broken(lost()),
            };
            let Some(bytes) = frame.data_ref() else { continue };
            let Ok(frames) = parser.feed(bytes) else { break Stop::Broken(lost()) };
            if let Err(stop) = self.give(frames).await {
                break stop;
            }
        };
        drop(wire);
        stop
    }

    async fn give(&mut self, frames: Vec<Frame>) -> Result<(), Stop> {
        for frame in frames {
            let item = match frame {
                Frame::Comment(comment) if comment == "ready" => Some(self.attached()),
                Frame::Comment(_) => None,
                Frame::Message { id, data } => self.event(id, data),
            };
            let Some(item) = item else { continue };
            let last = matches!(item, Item::Failed(_));
            if self.queue.send(item).await.is_err() || last {
                return Err(Stop::Ended);
            }
        }
        Ok(())
    }

    /// The stream is attached. If that happened before and nothing has come since, there is no cursor to go on from.
    fn attached(&mut self) -> Item {
        let again = std::mem::replace(&mut self.ready, true);
        if again && self.cursor.is_none() { Item::Next(Next::Gap) } else { Item::Ready }
    }

    /// The event in a frame; none if it was given before.
    fn event(&mut self, id: Option<String>, line: String) -> Option<Item> {
        let event: Event =
            match serde_json::from_str(&line).context("an event has a shape that this qd does not know") {
                Ok(event) => event,
                Err(error) => return Some(Item::Failed(error.into())),
            };
        if self.last.is_some_and(|last| event.seq <= last) {
            return None;
        }
        self.last = Some(event.seq);
        self.cursor = Some(id.unwrap_or_else(|| event.seq.to_string()));
        Some(Item::Next(Next::Event(Box::new(Arrived { event, line }))))
    }
}

#[cfg(test)]
mod tests;
