//! Admission: Host, Origin and token over TCP, the peer's user on a socket.

use crate::harness::EdgeHarness;

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test]
async fn a_request_with_our_host_and_token_gets_in() {
    let harness = EdgeHarness::new().await;
    let (token, port) = (harness.bearer(), harness.port());
    for host in ["localhost", "LocalHost", "127.0.0.1", "[::1]", "[::1]:1", &format!("127.0.0.1:{port}")] {
        let answer = harness.over_tcp("/v1/thing", &[&format!("Host: {host}"), &token]).await;
        assert_eq!((answer.status, answer.body.as_str()), (200, "[]"), "{host}");
        assert_eq!(answer.header("quarterdeck-version"), Some(env!("CARGO_PKG_VERSION")));
        assert!(!answer.head.to_ascii_lowercase().contains("access-control"), "no CORS header, ever");
    }
}

#[tokio::test]
async fn a_host_that_is_not_ours_is_refused_on_every_route_whatever_the_token() {
    let harness = EdgeHarness::new().await;
    let token = harness.bearer();
    for target in ["/healthz", "/v1/thing", "/nowhere"] {
        for host in
            ["evil.test", "127.0.0.1.evil.test", "localhost.", "localhost.:80", "0.0.0.0", "localhost:x", ""]
        {
            let answer = harness.over_tcp(target, &[&format!("Host: {host}"), &token]).await;
            assert_eq!(answer.refused(), refused(403, "host_not_allowed"), "{target} {host}");
        }
        let answer = harness.over_tcp(target, &[&token]).await;
        assert_eq!(answer.refused(), refused(403, "host_not_allowed"), "no Host");
        let answer = harness.over_tcp(target, &["Host: localhost", "Host: localhost", &token]).await;
        assert_eq!(answer.refused(), refused(403, "host_not_allowed"), "two of them");
        let absolute = format!("http://evil.test{target}");
        let answer = harness.over_tcp(&absolute, &["Host: localhost", &token]).await;
        assert_eq!(answer.refused(), refused(403, "host_not_allowed"), "the target says otherwise");
    }
}

#[tokio::test]
async fn a_host_that_was_allowed_by_name_gets_in() {
    let harness = EdgeHarness::with(|options| options.allow_host = vec!["deck.test".to_owned()]).await;
    let token = harness.bearer();
    assert_eq!(harness.over_tcp("/v1/thing", &["Host: deck.test:9", &token]).await.status, 200);
    assert_eq!(harness.over_tcp("/v1/thing", &["Host: x.deck.test", &token]).await.status, 403);
}

#[tokio::test]
async fn a_page_from_elsewhere_is_refused_on_every_route_whatever_the_token() {
    let harness = EdgeHarness::new().await;
    let (token, host) = (harness.bearer(), format!("localhost:{}", harness.port()));
    let host_line = format!("Host: {host}");
    for target in ["/healthz", "/v1/thing", "/nowhere"] {
        for line in [
            "Origin: http://evil.test",
            "Origin: null",
            "Origin: http://localhost:1",
            &format!("Origin: https://{host}"),
            "Sec-Fetch-Site: cross-site",
        ] {
            let answer = harness.over_tcp(target, &[&host_line, line, &token]).await;
            assert_eq!(answer.refused(), refused(403, "origin_not_allowed"), "{target} {line}");
        }
    }
    let ours = format!("Origin: http://{host}");
    assert_eq!(harness.over_tcp("/v1/thing", &[&host_line, &ours, &token]).await.status, 200);
    assert_eq!(
        harness.over_tcp("/v1/thing", &[&host_line, &ours]).await.status,
        401,
        "our own page still needs a token"
    );
    assert_eq!(harness.over_tcp("/healthz", &[&host_line, &ours]).await.status, 200);
}

#[tokio::test]
async fn a_preflight_is_refused_and_gets_no_cors_header() {
    let harness = EdgeHarness::new().await;
    let mut wire = harness.tcp().await;
    wire.send(
        "OPTIONS /v1/thing HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.test\r\n\
         Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n",
    )
    .await;
    let answer = wire.answer().await;
    assert_eq!(answer.refused(), refused(403, "origin_not_allowed"));
    assert!(!answer.head.to_ascii_lowercase().contains("access-control"));
}

#[tokio::test]
async fn only_the_right_token_opens_and_only_in_its_header() {
    let harness = EdgeHarness::new().await;
    let token = harness.token.clone();
    for line in [
        format!("Authorization: Bearer {token}"),
        format!("authorization: bearer {token}"),
        format!("AUTHORIZATION: BEARER   {token}  "),
    ] {
        assert_eq!(harness.over_tcp("/v1/thing", &["Host: localhost", &line]).await.status, 200, "{line}");
    }
    let wrong = format!("{}{}", &token[..63], if token.ends_with('0') { '1' } else { '0' });
    for line in [
        "X-Nothing: here".to_owned(),
        "Authorization:".to_owned(),
        "Authorization: Bearer".to_owned(),
        "Authorization: Bearer ".to_owned(),
        format!("Authorization: Bearer {wrong}"),
        format!("Authorization: Bearer {}", &token[..63]),
        format!("Authorization: Bearer {token}0"),
        format!("Authorization: {token}"),
        format!("Authorization: Basic {token}"),
        format!("Authorization: Bearer {token}\r\nAuthorization: Bearer {token}"),
        format!("Cookie: token={token}"),
    ] {
        let answer = harness.over_tcp("/v1/thing", &["Host: localhost", &line]).await;
        assert_eq!(answer.refused(), refused(401, "unauthorized"), "{line}");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        assert!(!answer.body.contains(&token));
    }
    for query in ["token", "access_token", "authorization"] {
        let answer = harness.over_tcp(&format!("/v1/thing?{query}={token}"), &["Host: localhost"]).await;
        assert_eq!(answer.refused(), refused(401, "unauthorized"), "a query ends up in logs");
    }
}

#[tokio::test]
async fn no_route_but_healthz_is_open_to_those_without_a_token() {
    let harness = EdgeHarness::new().await;
    for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "WEIRD"] {
        for target in [
            "/",
            "/v1/thing",
            "/v1/thing/7",
            "/v1/page?limit=1",
            "/peer",
            "/panic",
            "/nowhere",
            "/healthz/",
            "//healthz",
            "/healthz/../v1/thing",
            "/%68ealthz",
            "/HEALTHZ",
            "/v1/../healthz",
            "*",
        ] {
            if target == "*" && method != "OPTIONS" {
                continue;
            }
            let mut wire = harness.tcp().await;
            wire.send(format!("{method} {target} HTTP/1.1\r\nHost: localhost\r\n\r\n")).await;
            if method == "HEAD" {
                // A HEAD response has no body, whatever its headers say.
                let mut status = [0; 12];
                tokio::io::AsyncReadExt::read_exact(&mut wire.0, &mut status).await.unwrap();
                assert_eq!(&status, b"HTTP/1.1 401", "{target}");
            } else {
                assert_eq!(wire.answer().await.refused(), refused(401, "unauthorized"), "{method} {target}");
            }
        }
    }
    let answer = harness.over_tcp("/healthz", &["Host: localhost"]).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, r#"{"status":"ok"}"#));
    assert_eq!(harness.over_tcp("/healthz?x=1", &["Host: localhost"]).await.status, 200);
}

#[tokio::test]
async fn a_socket_asks_for_no_token_and_looks_at_no_host_but_serves_no_page() {
    let harness = EdgeHarness::new().await;
    for lines in ["Host: localhost\r\n", "Host: evil.test\r\n", ""] {
        let mut wire = harness.unix().await;
        wire.send(format!("GET /v1/thing HTTP/1.1\r\n{lines}\r\n")).await;
        assert_eq!(wire.answer().await.status, 200, "{lines}");
    }
    for line in ["Origin: http://localhost", "Origin: null", "Sec-Fetch-Site: cross-site"] {
        let mut wire = harness.unix().await;
        wire.send(format!("GET /v1/thing HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n")).await;
        assert_eq!(wire.answer().await.refused(), refused(403, "origin_not_allowed"), "{line}");
    }
}

#[tokio::test]
async fn a_handler_learns_who_asks() {
    let harness = EdgeHarness::new().await;
    let mut wire = harness.unix().await;
    wire.send("GET /peer HTTP/1.1\r\n\r\n").await;
    let (pid, uid) = (std::process::id(), rustix::process::geteuid().as_raw());
    let start = qd_keeper::procfs::start_ticks(pid).unwrap();
    let expected = format!("Unix {{ process: Some(({pid}, {start})), uid: {uid} }}");
    assert_eq!(wire.answer().await.body, expected);
    let mut wire = harness.tcp().await;
    let from = wire.0.local_addr().unwrap();
    wire.send(format!("GET /peer HTTP/1.1\r\nHost: localhost\r\n{}\r\n\r\n", harness.bearer())).await;
    let answer = wire.answer().await;
    assert!(answer.body.contains(&from.to_string()) && answer.body.contains("tls: false"), "{answer:?}");
}
