//! A reader of server-sent events that checks every frame against the contract: one line per field, with id and kind
//! as in the data. A stream that is not polled reads nothing, which makes it a slow reader.

use std::collections::VecDeque;

use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::TestConnection;
use crate::within;

/// One event of the journal, as a client sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TestEvent {
    pub seq: u64,
    pub ts: String,
    pub workspace_id: Option<String>,
    pub session_id: Option<String>,
    pub run_id: Option<String>,
    pub kind: String,
    pub data: Value,
}

impl TestEvent {
    /// Whether the event belongs to this run and is of this kind.
    pub fn is_of_run(&self, run: &str, kind: &str) -> bool {
        self.run_id.as_deref() == Some(run) && self.kind == kind
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum TestStreamItem {
    Event(TestEvent),
    /// A comment, without its colon.
    Comment(String),
}

#[derive(Debug)]
pub struct TestEventStream {
    body: Incoming,
    unparsed: BytesMut,
    /// Events that came while something else was waited for.
    pending: VecDeque<TestEvent>,
    is_ready: bool,
    _connection: TestConnection,
}

impl TestEventStream {
    pub(crate) fn new(connection: TestConnection, response: Response<Incoming>) -> Self {
        let kind =
            response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
        assert!(kind.starts_with("text/event-stream"), "a stream is text/event-stream, not {kind:?}");
        Self {
            body: response.into_body(),
            unparsed: BytesMut::new(),
            pending: VecDeque::new(),
            is_ready: false,
            _connection: connection,
        }
    }

    /// Waits for the comment `ready`. Events that come before it are kept.
    pub async fn wait_until_ready(mut self) -> Self {
        within("`: ready`", async {
            while !self.is_ready {
                match self.next_item().await.expect("the stream breaks before it is ready") {
                    Some(TestStreamItem::Event(event)) => self.pending.push_back(event),
                    Some(TestStreamItem::Comment(_)) => {}
                    None => panic!("the stream ends before it is ready"),
                }
            }
        })
        .await;
        self
    }

    /// The next event or comment. `None` at a clean end, an error if the connection broke.
    pub async fn next_item(&mut self) -> Result<Option<TestStreamItem>, hyper::Error> {
        loop {
            if let Some(end) = self.unparsed.windows(2).position(|pair| pair == b"\n\n") {
                let frame = self.unparsed.split_to(end + 2);
                let item = parse_frame(&String::from_utf8_lossy(&frame[..end]));
                self.is_ready |= matches!(&item, TestStreamItem::Comment(text) if text.trim() == "ready");
                return Ok(Some(item));
            }
            match self.body.frame().await {
                None => {
                    assert!(self.unparsed.is_empty(), "the stream ends within a frame: {:?}", self.unparsed);
                    return Ok(None);
                }
                Some(piece) => {
                    if let Some(data) = piece?.data_ref() {
                        self.unparsed.extend_from_slice(data);
                    }
                }
            }
        }
    }

    /// The next event. `None` at a clean end, an error if the connection broke.
    pub async fn try_next(&mut self) -> Result<Option<TestEvent>, hyper::Error> {
        if let Some(event) = self.pending.pop_front() {
            return Ok(Some(event));
        }
        loop {
            match self.next_item().await? {
                Some(TestStreamItem::Event(event)) => return Ok(Some(event)),
                Some(TestStreamItem::Comment(_)) => {}
                None => return Ok(None),
            }
        }
    }

    /// The next event. Fails at the end of the stream.
    pub async fn next(&mut self) -> TestEvent {
        let next = within("an event", self.try_next()).await.expect("the stream does not break");
        next.expect("the stream does not end")
    }

    /// All events up to and including the first for which `last` is true.
    pub async fn until(&mut self, what: &str, mut last: impl FnMut(&TestEvent) -> bool) -> Vec<TestEvent> {
        let mut received = Vec::new();
        loop {
            let next = tokio::time::timeout(crate::WAIT_LIMIT, self.try_next()).await;
            let Ok(next) = next else {
                panic!("timed out waiting for {what}; received: {}", summarize_events(&received))
            };
            match next.expect("the stream does not break") {
                None => panic!("the stream ended before {what}; received: {}", summarize_events(&received)),
                Some(event) => {
                    let found = last(&event);
                    received.push(event);
                    if found {
                        return received;
                    }
                }
            }
        }
    }

    /// All events up to the first of this run and kind.
    pub async fn until_run(&mut self, run: &str, kind: &str) -> Vec<TestEvent> {
        self.until(&format!("{kind} of {run}"), |event| event.is_of_run(run, kind)).await
    }

    /// All events up to the one with this seq.
    pub async fn until_seq(&mut self, seq: u64) -> Vec<TestEvent> {
        self.until(&format!("seq {seq}"), |event| event.seq >= seq).await
    }

    /// All remaining events up to a clean end.
    pub async fn to_end(&mut self) -> Vec<TestEvent> {
        let mut received = Vec::new();
        while let Some(event) =
            within("the end of the stream", self.try_next()).await.expect("it ends cleanly")
        {
            received.push(event);
        }
        received
    }
}

/// A short list of events, for messages.
pub fn summarize_events(events: &[TestEvent]) -> String {
    let line = |event: &TestEvent| {
        let data: String = event.data.to_string().chars().take(160).collect();
        format!("\n  {} {} {} {data}", event.seq, event.kind, event.run_id.as_deref().unwrap_or("-"))
    };
    let (skipped, shown) = events.split_at(events.len().saturating_sub(60));
    format!("({} earlier){}", skipped.len(), shown.iter().map(line).collect::<String>())
}

fn parse_frame(frame: &str) -> TestStreamItem {
    if let Some(comment) = frame.strip_prefix(':') {
        assert!(!comment.contains('\n'), "a comment stands alone: {frame:?}");
        return TestStreamItem::Comment(comment.trim().to_owned());
    }
    let fields: Vec<_> = frame.lines().map(|line| line.split_once(": ").unwrap_or((line, ""))).collect();
    let [("id", id), ("event", kind), ("data", data)] = fields[..] else {
        panic!("a frame is one line each of id, event and data: {frame:?}")
    };
    let event: TestEvent = serde_json::from_str(data).unwrap_or_else(|error| panic!("{error} in {data:?}"));
    assert_eq!(
        (id, kind),
        (event.seq.to_string().as_str(), event.kind.as_str()),
        "the frame and its data agree"
    );
    TestStreamItem::Event(event)
}
