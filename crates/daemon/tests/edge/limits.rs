//! The limits on clients, and the responses when they are exceeded.

use qd_daemon::edge::EdgeLimits;
use qd_protocol::limits::{BODY_MAX, HEADERS_MAX};

use crate::harness::{EdgeHarness, short};

#[tokio::test]
async fn an_unknown_route_and_a_wrong_method_are_said_in_json() {
    let harness = EdgeHarness::new().await;
    let mut wire = harness.unix().await;
    wire.send("GET /nowhere HTTP/1.1\r\n\r\n").await;
    assert_eq!(wire.answer().await.refused(), (404, "not_found".to_owned()));
    wire.send("PUT /v1/thing HTTP/1.1\r\n\r\n").await;
    let answer = wire.answer().await;
    assert_eq!(answer.refused(), (405, "method_not_allowed".to_owned()));
    let mut allow: Vec<&str> = answer.header("allow").unwrap().split(',').map(str::trim).collect();
    allow.sort_unstable();
    assert_eq!(allow, ["GET", "HEAD", "POST"]);
    wire.send("GET /v1/page?limit=x HTTP/1.1\r\n\r\n").await;
    let answer = wire.answer().await;
    assert_eq!(answer.refused(), (400, "invalid_request".to_owned()));
    assert!(answer.body.contains("limit"), "it says what is wrong: {answer:?}");
    assert_eq!(answer.header("quarterdeck-version"), Some(env!("CARGO_PKG_VERSION")));
}

#[tokio::test]
async fn a_panic_is_a_500_in_json_and_the_server_goes_on() {
    let harness = EdgeHarness::new().await;
    let mut wire = harness.unix().await;
    wire.send("GET /panic HTTP/1.1\r\n\r\n").await;
    let answer = wire.answer().await;
    assert_eq!(answer.refused(), (500, "internal".to_owned()));
    assert!(!answer.body.contains("on purpose"), "a panic message is not shown to clients");
    wire.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(wire.answer().await.status, 200, "on the same connection");
    let mut wire = harness.unix().await;
    wire.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(wire.answer().await.status, 200, "and on another");
}

#[tokio::test]
async fn a_body_within_the_limit_is_taken_and_one_over_it_is_refused() {
    let harness = EdgeHarness::new().await;
    for target in ["/size", "/v1/thing", "/optional", "/ignore"] {
        let mut wire = harness.unix().await;
        wire.send(format!("POST {target} HTTP/1.1\r\nContent-Length: {}\r\n\r\n", BODY_MAX + 1)).await;
        wire.send(vec![b'x'; BODY_MAX + 1]).await;
        assert_eq!(wire.answer().await.refused(), (413, "body_too_large".to_owned()), "{target}");
    }
    let mut wire = harness.unix().await;
    wire.send(format!("POST /size HTTP/1.1\r\nContent-Length: {BODY_MAX}\r\n\r\n")).await;
    wire.send(vec![b'x'; BODY_MAX]).await;
    assert_eq!(wire.answer().await.body, BODY_MAX.to_string());
}

#[tokio::test]
async fn a_body_without_a_length_is_counted_as_it_comes() {
    let harness = EdgeHarness::new().await;
    for target in ["/size", "/v1/thing", "/optional"] {
        let mut wire = harness.unix().await;
        wire.send(format!("POST {target} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")).await;
        wire.send_chunked(BODY_MAX + 1).await;
        assert_eq!(wire.answer().await.refused(), (413, "body_too_large".to_owned()), "{target}");
    }
    let mut wire = harness.unix().await;
    wire.send("POST /size HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    wire.send_chunked(BODY_MAX).await;
    assert_eq!(wire.answer().await.body, BODY_MAX.to_string());
}

#[tokio::test]
async fn a_client_that_announces_too_much_hears_so_before_it_sends_anything() {
    let harness = EdgeHarness::new().await;
    for line in ["", "Expect: 100-continue\r\n"] {
        for length in [BODY_MAX + 1, usize::MAX / 2] {
            let mut wire = harness.unix().await;
            wire.send(format!("POST /size HTTP/1.1\r\nContent-Length: {length}\r\n{line}\r\n")).await;
            assert_eq!(wire.answer().await.refused(), (413, "body_too_large".to_owned()));
        }
    }
}

#[tokio::test]
async fn a_client_that_writes_before_it_reads_still_sees_why_it_was_refused() {
    let harness = EdgeHarness::new().await;
    let length = 4 << 20;
    for (head, expected) in [("POST /v1/thing", 401), ("POST /nowhere", 401), ("PUT /v1/thing", 401)] {
        let mut wire = harness.tcp().await;
        wire.send(format!("{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n")).await;
        wire.send(vec![b'x'; length]).await;
        assert_eq!(wire.answer().await.status, expected, "{head}");
    }
    for (head, expected) in [("POST /nowhere", 404), ("PUT /v1/thing", 405), ("POST /ignore", 200)] {
        let mut wire = harness.unix().await;
        wire.send(format!("{head} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n")).await;
        wire.send(vec![b'x'; length]).await;
        assert_eq!(wire.answer().await.status, expected, "{head}");
        wire.send("GET /healthz HTTP/1.1\r\n\r\n").await;
        assert_eq!(wire.answer().await.status, 200, "and the connection goes on");
    }
}

#[tokio::test]
async fn headers_over_the_limit_are_refused_and_within_it_taken() {
    let harness = EdgeHarness::new().await;
    let mut wire = harness.unix().await;
    wire.send(format!("GET /healthz HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(HEADERS_MAX - 100))).await;
    assert_eq!(wire.answer().await.status, 200);
    for request in [
        format!("GET /healthz HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(HEADERS_MAX)),
        format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(HEADERS_MAX)),
    ] {
        let mut wire = harness.unix().await;
        wire.send(request).await;
        assert_eq!(wire.answer().await.status, 431);
        wire.closed().await;
    }
}

#[tokio::test]
async fn a_slow_sender_of_headers_is_cut_and_so_is_an_idle_connection() {
    let harness = EdgeHarness::with(|options| options.limits = short()).await;
    let mut slow = harness.tcp().await;
    slow.send("GET /healthz HTTP/1.1\r\nHost: loc").await;
    let mut silent = harness.tcp().await;
    let mut idle = harness.unix().await;
    idle.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(idle.answer().await.status, 200);
    slow.closed().await;
    silent.closed().await;
    idle.closed().await;
}

#[tokio::test]
async fn a_slow_sender_of_a_body_is_told_and_cut() {
    let harness = EdgeHarness::with(|options| options.limits = short()).await;
    let mut wire = harness.unix().await;
    wire.send("POST /size HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc").await;
    let answer = wire.answer().await;
    assert_eq!(answer.refused(), (400, "invalid_request".to_owned()));
    assert!(answer.body.contains("did not arrive"), "{answer:?}");
    wire.closed().await;
}

#[tokio::test]
async fn a_handler_may_take_longer_than_a_client() {
    let harness = EdgeHarness::with(|options| options.limits = short()).await;
    let mut wire = harness.unix().await;
    wire.send("GET /slow HTTP/1.1\r\n\r\n").await;
    harness.begun.notified().await;
    let mut other = harness.unix().await;
    other.closed().await;
    harness.go.notify_one();
    assert_eq!(wire.answer().await.body, "at last", "only reading has a limit");
}

/// So many connections and no more.
fn few_connections(connections: usize) -> EdgeLimits {
    EdgeLimits { connections, ..EdgeLimits::default() }
}

#[tokio::test]
async fn one_connection_too_many_hears_so_and_the_next_that_fits_is_served() {
    let harness = EdgeHarness::with(|options| options.limits = few_connections(2)).await;
    let (mut first, mut second) = (harness.unix().await, harness.unix().await);
    for wire in [&mut first, &mut second] {
        wire.send("GET /slow HTTP/1.1\r\n\r\n").await;
        harness.begun.notified().await;
    }
    for _ in 0..3 {
        let mut third = harness.unix().await;
        third.send("GET /healthz HTTP/1.1\r\n\r\n").await;
        let answer = third.answer().await;
        assert_eq!(answer.refused(), (429, "overloaded".to_owned()));
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(answer.header("quarterdeck-version"), Some(env!("CARGO_PKG_VERSION")));
        third.closed().await;
    }
    // Both wait by now, so both are woken.
    harness.go.notify_waiters();
    for wire in [&mut first, &mut second] {
        assert_eq!(wire.answer().await.status, 200, "requests that are being handled are not affected");
    }
    drop((first, second));
    let mut next = harness.unix().await;
    next.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(next.answer().await.status, 200);
}

#[tokio::test]
async fn an_idle_connection_makes_way_and_a_busy_one_does_not() {
    let harness = EdgeHarness::with(|options| options.limits = few_connections(2)).await;
    let (mut busy, mut idle) = (harness.unix().await, harness.unix().await);
    busy.send("GET /slow HTTP/1.1\r\n\r\n").await;
    harness.begun.notified().await;
    idle.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(idle.answer().await.status, 200);
    let mut next = harness.unix().await;
    next.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(next.answer().await.status, 200);
    idle.closed().await;
    harness.go.notify_one();
    assert_eq!(busy.answer().await.body, "at last");
}

#[tokio::test]
async fn what_is_not_http_ends_its_own_connection_and_no_other() {
    let harness = EdgeHarness::new().await;
    for rubbish in
        ["\0\0\0\0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "\x16\x03\x01\x02"]
    {
        let mut wire = harness.unix().await;
        wire.send(rubbish).await;
        tokio::io::AsyncWriteExt::shutdown(&mut wire.0).await.unwrap();
        wire.closed().await;
    }
    let mut wire = harness.unix().await;
    wire.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(wire.answer().await.status, 200);
}
