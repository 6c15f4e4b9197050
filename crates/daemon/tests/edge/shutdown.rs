//! Shutdown: nothing more is accepted, open requests are finished, and no client can hold it up.

use tokio::net::{TcpStream, UnixStream};

use crate::harness::{EdgeHarness, patient};

#[tokio::test]
async fn a_shutdown_ends_idle_connections_and_finishes_requests_on_their_way() {
    let harness = EdgeHarness::new().await;
    let mut idle = harness.unix().await;
    idle.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(idle.answer().await.status, 200);
    let mut fresh = harness.tcp().await;
    let mut working = harness.unix().await;
    working.send("GET /slow HTTP/1.1\r\n\r\n").await;
    harness.begun.notified().await;

    harness.stop.send(true).unwrap();
    idle.closed().await;
    fresh.closed().await;
    assert!(!harness.served.is_finished(), "one request is still open");
    assert!(UnixStream::connect(harness.socket()).await.is_err(), "nothing more is accepted");
    assert!(TcpStream::connect(("127.0.0.1", harness.port())).await.is_err());
    assert!(!harness.socket().exists());

    harness.go.notify_one();
    let answer = working.answer().await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "at last"));
    assert_eq!(answer.header("connection"), Some("close"));
    working.closed().await;
    patient("serve to return", harness.served).await.unwrap();
}

#[tokio::test]
async fn a_client_that_sends_half_a_request_does_not_hold_up_a_shutdown() {
    let harness = EdgeHarness::new().await;
    let mut half = harness.unix().await;
    half.send("GET /healthz HTTP/1.1\r\nX: ").await;
    let mut later = harness.unix().await;
    later.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(later.answer().await.status, 200);
    later.send("GET /heal").await;
    harness.stop.send(true).unwrap();
    patient("serve to return", harness.served).await.unwrap();
    half.closed().await;
    later.closed().await;
}

#[tokio::test]
async fn dropping_the_server_ends_all_that_it_started() {
    let harness = EdgeHarness::new().await;
    let mut working = harness.tcp().await;
    working.send(format!("GET /slow HTTP/1.1\r\nHost: localhost\r\n{}\r\n\r\n", harness.bearer())).await;
    harness.begun.notified().await;
    harness.served.abort();
    working.closed().await;
    drop(harness.served.await);
    assert!(UnixStream::connect(harness.home.socket()).await.is_err());
}

#[tokio::test]
async fn a_server_whose_owner_is_gone_stops_by_itself() {
    let harness = EdgeHarness::new().await;
    drop(harness.stop);
    patient("serve to return", harness.served).await.unwrap();
}

#[tokio::test]
async fn a_home_can_be_served_again_at_once() {
    let harness = EdgeHarness::new().await;
    let mut idle = harness.tcp().await;
    idle.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert_eq!(idle.answer().await.status, 200);
    harness.stop.send(true).unwrap();
    patient("serve to return", harness.served).await.unwrap();
    let listen = vec![
        qd_home::ListenAddress::Unix(harness.home.socket()),
        harness.lines[1].trim_start_matches("listening on http://").parse().unwrap(),
    ];
    let options = qd_daemon::edge::EdgeOptions { listen, ..Default::default() };
    let again = qd_daemon::edge::open(&harness.home, options).await.unwrap();
    assert_eq!(again.announcements(), harness.lines);
}
