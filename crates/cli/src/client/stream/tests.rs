//! Broken event streams and retried requests, against a fake daemon.

use std::path::PathBuf;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use super::*;
use crate::client::host::DaemonHost;

/// A unix socket on which the test plays the daemon.
struct FakeHttpDaemon {
    _folder: tempfile::TempDir,
    path: PathBuf,
    listener: UnixListener,
}

impl FakeHttpDaemon {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        Self { _folder: folder, path, listener }
    }

    fn client(&self) -> DaemonClient {
        DaemonClient::new(DaemonHost::Unix(self.path.clone()), None)
    }

    /// Accepts the next connection and reads the head of its request. On a busy machine the client probes whether the
    /// daemon lives; such requests are skipped.
    async fn accept_request(&self) -> (UnixStream, String) {
        loop {
            let (mut stream, _) = self.listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            if !head.starts_with("GET /healthz ") {
                return (stream, head);
            }
        }
    }

    /// Accepts the next connection, starts an event stream on it and returns its `Last-Event-ID`.
    async fn accept_stream(&self) -> (UnixStream, Option<String>) {
        let (mut stream, head) = self.accept_request().await;
        let response_head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: ready\n\n";
        stream.write_all(response_head.as_bytes()).await.unwrap();
        let cursor = head.lines().find_map(|line| line.strip_prefix("last-event-id: ")).map(str::to_owned);
        (stream, cursor)
    }
}

async fn send_event(stream: &mut UnixStream, seq: u64) {
    let ids = r#""workspace_id":null,"session_id":null,"run_id":null"#;
    let data =
        format!(r#"{{"seq":{seq},"ts":"2026-01-01T00:00:00.000Z",{ids},"kind":"halt.lifted","data":{{}}}}"#);
    stream.write_all(format!("id: {seq}\nevent: halt.lifted\ndata: {data}\n\n").as_bytes()).await.unwrap();
}

async fn next_seq(stream: &mut EventStream) -> u64 {
    match stream.next().await.unwrap() {
        EventStreamItem::Event(arrived) => arrived.event.seq.0,
        EventStreamItem::Gap => panic!("no event was missed"),
    }
}

#[tokio::test]
async fn a_broken_stream_goes_on_after_the_last_event_without_gap_or_repeat() {
    let fake = FakeHttpDaemon::new();
    let mut events = EventStream::after(&fake.client(), "/v1/events", Seq(4));
    let (mut first, cursor) = fake.accept_stream().await;
    assert_eq!(cursor.as_deref(), Some("4"));
    send_event(&mut first, 5).await;
    send_event(&mut first, 6).await;
    assert_eq!((next_seq(&mut events).await, next_seq(&mut events).await), (5, 6));
    // The connection breaks in the middle of an event.
    first.write_all(b"id: 7\ndata: {\"seq\":").await.unwrap();
    drop(first);
    let (mut second, cursor) = fake.accept_stream().await;
    assert_eq!(cursor.as_deref(), Some("6"));
    // A repeated event is dropped.
    send_event(&mut second, 6).await;
    send_event(&mut second, 7).await;
    assert_eq!(next_seq(&mut events).await, 7);
}

#[tokio::test]
async fn a_stream_from_now_is_ready_before_it_is_returned() {
    let fake = FakeHttpDaemon::new();
    let client = fake.client();
    let (events, (mut daemon, cursor)) =
        tokio::join!(EventStream::from_now(&client, "/v1/events"), fake.accept_stream());
    assert_eq!(cursor, None);
    let mut events = events.unwrap();
    send_event(&mut daemon, 9).await;
    assert_eq!(next_seq(&mut events).await, 9);
}

#[tokio::test]
async fn a_stream_that_broke_before_its_first_event_reports_a_gap() {
    let fake = FakeHttpDaemon::new();
    let client = fake.client();
    let (events, (daemon, _)) =
        tokio::join!(EventStream::from_now(&client, "/v1/events"), fake.accept_stream());
    let mut events = events.unwrap();
    drop(daemon);
    let (_daemon, cursor) = fake.accept_stream().await;
    assert_eq!(cursor, None);
    assert!(matches!(events.next().await.unwrap(), EventStreamItem::Gap));
}

#[tokio::test]
async fn a_refused_stream_is_not_tried_again() {
    let fake = FakeHttpDaemon::new();
    let client = fake.client();
    let daemon = async {
        let (mut stream, _) = fake.accept_request().await;
        let body = r#"{"error":{"code":"bad_cursor","message":"no such cursor"}}"#;
        let head = format!("HTTP/1.1 400 Bad Request\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        stream
    };
    let (events, _daemon) = tokio::join!(EventStream::from_now(&client, "/v1/events"), daemon);
    assert_eq!(events.unwrap_err().code(), Some("bad_cursor"));
}

#[tokio::test]
async fn a_request_whose_connection_broke_is_sent_again_under_the_same_key() {
    let fake = FakeHttpDaemon::new();
    let client = fake.client();
    let key =
        |head: &str| head.lines().find_map(|line| line.strip_prefix("idempotency-key: ")).unwrap().to_owned();
    let daemon = async {
        let (stream, head) = fake.accept_request().await;
        drop(stream);
        let (mut stream, again) = fake.accept_request().await;
        assert_eq!(key(&head), key(&again));
        stream.write_all(b"HTTP/1.1 202 Accepted\r\ncontent-length: 4\r\n\r\ntrue").await.unwrap();
        stream
    };
    let body = serde_json::json!({});
    let (answer, _daemon) = tokio::join!(client.post::<bool>("/v1/shutdown", &body), daemon);
    assert!(answer.unwrap());
}
