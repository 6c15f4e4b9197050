//! How it ends: nothing more is accepted, what is on its way is finished, and nobody can hold it up.

use tokio::net::{TcpStream, UnixStream};

use crate::harness::{EdgeHarness, patient};

#[tokio::test]
async fn a_shutdown_ends_idle_connections_and_finishes_requests_on_their_way() {
    let house = EdgeHarness::new().await;
    let mut idle = house.unix().await;
    idle.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(idle.answer().await.status, 200);
    let mut fresh = house.tcp().await;
    let mut working = house.unix().await;
    working.send("GET /slow HTTP/1.1\r\n\r\n").await;
    house.begun.notified().await;

    house.stop.send(true).unwrap();
    idle.closed().await;
    fresh.closed().await;
    assert!(!house.served.is_finished(), "one is still on its way");
    assert!(UnixStream::connect(house.socket()).await.is_err(), "nothing more is accepted");
    assert!(TcpStream::connect(("127.0.0.1", house.port())).await.is_err());
    assert!(!house.socket().exists());

    house.go.notify_one();
    let answer = working.answer().await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "at last"));
    assert_eq!(answer.header("connection"), Some("close"));
    working.closed().await;
    patient("serve to return", house.served).await.unwrap();
}

#[tokio::test]
async fn a_client_that_sends_half_a_request_does_not_hold_up_a_shutdown() {
    let house = EdgeHarness::new().await;
    let mut half = house.unix().await;
    half.send("GET /healthz HTTP/1.1\r\nX: ").await;
    let mut later = house.unix().await;
    later.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(later.answer().await.status, 200);
    later.send("GET /heal").await;
    house.stop.send(true).unwrap();
    patient("serve to return", house.served).await.unwrap();
    half.closed().await;
    later.closed().await;
}

#[tokio::test]
async fn dropping_the_server_ends_all_that_it_started() {
    let house = EdgeHarness::new().await;
    let mut working = house.tcp().await;
    working.send(format!("GET /slow HTTP/1.1\r\nHost: localhost\r\n{}\r\n\r\n", house.bearer())).await;
    house.begun.notified().await;
    house.served.abort();
    working.closed().await;
    drop(house.served.await);
    assert!(UnixStream::connect(house.home.socket()).await.is_err());
}

#[tokio::test]
async fn a_server_whose_owner_is_gone_stops_by_itself() {
    let house = EdgeHarness::new().await;
    drop(house.stop);
    patient("serve to return", house.served).await.unwrap();
}

#[tokio::test]
async fn a_home_can_be_served_again_at_once() {
    let house = EdgeHarness::new().await;
    let mut idle = house.tcp().await;
    idle.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert_eq!(idle.answer().await.status, 200);
    house.stop.send(true).unwrap();
    patient("serve to return", house.served).await.unwrap();
    let listen = vec![
        qd_daemon::edge::ListenAddress::Unix(house.home.socket()),
        house.lines[1].trim_start_matches("listening on http://").parse().unwrap(),
    ];
    let options = qd_daemon::edge::EdgeOptions { listen, ..Default::default() };
    let again = qd_daemon::edge::open(&house.home, options).await.unwrap();
    assert_eq!(again.announcements(), house.lines);
}
