//! Which connections are accepted, and how they are served.

use std::time::Duration;

use qd_protocol::frame::plain::PlainRunStatus;
use qd_worker_sdk::socket::SocketError;
use qd_worker_sdk::{
    PlainClient, RunAssignment, RunHandle, ServeMode, TurnOutcome, WorkerServeError, WorkerServer,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::support::{ANY, read_run, run, serve, token, within};

async fn done(_: RunAssignment, _: RunHandle) -> TurnOutcome {
    TurnOutcome::completed("done")
}

const REUSABLE: ServeMode = ServeMode::Reusable { idle_timeout: Duration::from_millis(300) };

#[tokio::test]
async fn one_serves_the_first_connection_and_ends_with_it() {
    let (endpoint, ended) = serve(done, ServeMode::One { accept_timeout: None }).await;
    let mut client = PlainClient::connect(&endpoint, None).await.unwrap();
    assert_eq!(run(&mut client, "").await.status, Some(PlainRunStatus::Completed));
    assert!(PlainClient::connect(&endpoint, None).await.is_err());
    assert_eq!(run(&mut client, "").await.status, Some(PlainRunStatus::Completed));
    client.close().await;
    within(ended).await.unwrap().unwrap();
}

#[tokio::test]
async fn one_does_not_wait_for_ever_if_it_is_told_not_to() {
    let timeout = Some(Duration::from_millis(50));
    let (_, ended) = serve(done, ServeMode::One { accept_timeout: timeout }).await;
    assert!(matches!(within(ended).await.unwrap(), Err(WorkerServeError::NoConnection(_))));
}

#[tokio::test]
async fn who_is_not_let_in_does_not_count_as_the_one() {
    let server = WorkerServer::bind(ANY).await.unwrap().with_token("right");
    let endpoint = server.endpoint();
    let ended = tokio::spawn(server.serve(done, ServeMode::One { accept_timeout: None }));
    assert!(PlainClient::connect(&endpoint, Some("wrong")).await.is_err());
    let mut client = PlainClient::connect(&endpoint, Some("right")).await.unwrap();
    assert_eq!(run(&mut client, "").await.status, Some(PlainRunStatus::Completed));
    drop(client);
    within(ended).await.unwrap().unwrap();
}

#[tokio::test]
async fn reusable_serves_one_after_another_and_ends_when_idle() {
    let (endpoint, ended) = serve(done, REUSABLE).await;
    let mut first = PlainClient::connect(&endpoint, None).await.unwrap();
    // The second connection reaches the kernel, but is not upgraded while the first is open.
    let second = tokio::spawn({
        let endpoint = endpoint.clone();
        async move { PlainClient::connect(&endpoint, None).await.unwrap() }
    });
    for _ in 0..3 {
        assert_eq!(run(&mut first, "").await.status, Some(PlainRunStatus::Completed));
    }
    assert!(!second.is_finished());
    first.close().await;
    let mut second = within(second).await.unwrap();
    assert_eq!(run(&mut second, "").await.status, Some(PlainRunStatus::Completed));
    drop(second);
    within(ended).await.unwrap().unwrap();
}

#[tokio::test]
async fn many_serves_all_at_once() {
    let (endpoint, _ended) = serve(
        async |_: RunAssignment, run_handle: RunHandle| {
            run_handle.send_text("here").await.unwrap();
            run_handle.cancelled().await;
            TurnOutcome::cancelled()
        },
        ServeMode::Many,
    )
    .await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = PlainClient::connect(&endpoint, None).await.unwrap();
        client.start_run(RunAssignment::from("")).await.unwrap();
        assert_eq!(token(&mut client).await, "here");
        clients.push(client);
    }
    for client in &mut clients {
        client.cancel().await.unwrap();
        assert_eq!(read_run(client).await.status, Some(PlainRunStatus::Cancelled));
    }
}

#[tokio::test]
async fn only_the_right_token_opens_the_door() {
    let server = WorkerServer::bind(ANY).await.unwrap().with_token("right");
    let endpoint = server.endpoint();
    let _ended = tokio::spawn(server.serve(done, ServeMode::Many));
    for wrong in [None, Some("wrong"), Some("righ"), Some("rightx"), Some("")] {
        match PlainClient::connect(&endpoint, wrong).await {
            Err(SocketError::Refused { status, .. }) => assert_eq!(status, 401),
            other => panic!("{wrong:?} was accepted: {other:?}"),
        }
    }
    assert!(PlainClient::connect(&endpoint, Some("right")).await.is_ok());
}

#[tokio::test]
async fn a_web_page_is_never_let_in() {
    let (endpoint, _ended) = serve(done, ServeMode::Many).await;
    let mut stream = TcpStream::connect(endpoint.strip_prefix("ws://").unwrap()).await.unwrap();
    stream
        .write_all(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\nConnection: Upgrade\r\n\
              Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        )
        .await
        .unwrap();
    let mut response = vec![0; 12];
    within(stream.read_exact(&mut response)).await.unwrap();
    assert_eq!(response, b"HTTP/1.1 403");
}

#[tokio::test]
async fn an_address_that_others_reach_needs_a_token_and_tls() {
    for token in [None, Some("token")] {
        let server = WorkerServer::bind("0.0.0.0:0").await.unwrap();
        let server = match token {
            Some(token) => server.with_token(token),
            None => server,
        };
        assert!(matches!(
            within(server.serve(done, ServeMode::Many)).await,
            Err(WorkerServeError::Exposed(_))
        ));
    }
}

#[tokio::test]
async fn a_server_that_is_stopped_ends_its_runs_and_says_so() {
    let stop = CancellationToken::new();
    let server = WorkerServer::bind(ANY).await.unwrap().with_shutdown(stop.clone());
    let endpoint = server.endpoint();
    let executor = async |_: RunAssignment, run_handle: RunHandle| {
        run_handle.send_text("here").await.unwrap();
        run_handle.cancelled().await;
        run_handle.send_text("bye").await.unwrap();
        TurnOutcome::completed("")
    };
    let ended = tokio::spawn(server.serve(executor, ServeMode::Many));
    let mut client = PlainClient::connect(&endpoint, None).await.unwrap();
    client.start_run(RunAssignment::from("")).await.unwrap();
    token(&mut client).await;
    stop.cancel();
    let run = read_run(&mut client).await;
    assert_eq!((run.tokens(), run.status), (vec!["bye"], Some(PlainRunStatus::Cancelled)));
    assert!(matches!(within(client.next_frame()).await, Err(SocketError::Closed)));
    within(ended).await.unwrap().unwrap();
}
