//! Who may talk to the daemon. Sockets and files are protected by their modes, TCP by Host, Origin and token, in this
//! order and on every route.

use std::os::unix::fs::PermissionsExt;

use qd_testkit::{TestDaemon, TestHome};
use serde_json::json;

use crate::openapi::{filled, operations};

fn mode(path: &std::path::Path) -> u32 {
    path.metadata().unwrap_or_else(|error| panic!("{}: {error}", path.display())).permissions().mode() & 0o777
}

#[tokio::test]
async fn home_socket_and_token_are_for_their_user_alone() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    assert_eq!(mode(&daemon.home.path()), 0o700);
    assert_eq!(mode(&daemon.home.socket()), 0o600);
    assert_eq!(mode(&daemon.home.path().join("token")), 0o600);
    assert!(daemon.home.path().join("log").is_dir());
}

#[tokio::test]
async fn a_home_that_was_open_to_others_is_closed_to_them() {
    let home = TestHome::new();
    std::fs::create_dir(home.path()).unwrap();
    std::fs::set_permissions(home.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    assert_eq!(mode(&daemon.home.path()), 0o700);
}

#[tokio::test]
async fn the_daemon_says_where_it_listens() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let lines = daemon.listening();
    assert!(lines.contains(&format!("listening on unix:{}", daemon.home.socket().display())), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("listening on http://127.0.0.1:")), "{lines:?}");
    assert_eq!(daemon.client().get("/healthz").await.status, 200);
    assert_eq!(daemon.tcp_without_token().get("/healthz").await.status, 200);
}

#[tokio::test]
async fn a_tcp_address_adds_to_the_socket_and_is_printed_first() {
    let home = TestHome::new();
    let mut serve = home.start(&["serve", "--listen", "127.0.0.1:0"]);
    serve.wait_for_stdout("listening on unix:").await;
    let lines: Vec<&str> = serve.stdout_so_far().lines().collect();
    assert!(lines[0].starts_with("listening on http://127.0.0.1:"), "{lines:?}");
    assert_eq!(lines[1], format!("listening on unix:{}", home.socket().display()));
    home.qd(&["ps"]).await.ok();
    serve.signal(rustix::process::Signal::TERM);
    serve.wait().await.ok();
}

#[tokio::test]
async fn a_named_socket_replaces_the_usual_one() {
    let home = TestHome::new();
    let other = home.sibling_path("other.sock");
    let address = format!("unix:{}", other.display());
    let mut serve = home.start(&["serve", "--listen", "127.0.0.1:0", "--listen", &address]);
    serve.wait_for_stdout(&format!("listening on {address}")).await;
    assert!(!home.socket().exists());
    home.qd(&["--host", &address, "ps"]).await.ok();
    serve.signal(rustix::process::Signal::TERM);
    serve.wait().await.ok();
}

#[tokio::test]
async fn by_default_it_listens_on_the_socket_alone() {
    let daemon = TestDaemon::start().await;
    assert_eq!(daemon.listening(), [format!("listening on unix:{}", daemon.home.socket().display())]);
    assert_eq!(daemon.client().get("/v1/version").await.status, 200, "and asks for no token there");
}

#[tokio::test]
async fn every_route_but_healthz_is_401_on_tcp_without_the_token() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let operations = operations(&daemon.client()).await;
    assert!(operations.len() > 30);
    let token = daemon.token();
    for (method, path) in operations {
        let path = filled(&path, "nobody");
        for authorization in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            &format!("Basic {token}"),
            &format!("Bearer {token}x"),
            &token,
        ] {
            let client = daemon.tcp_without_token();
            let client = if authorization.is_empty() {
                client
            } else {
                client.with_header("authorization", authorization)
            };
            let status = client.status(method.clone(), &path, None).await;
            let expected = if path == "/healthz" { 200 } else { 401 };
            assert_eq!(status, expected, "{method} {path} with {authorization:?}");
        }
    }
    daemon.tcp_without_token().get("/v1/nothing").await.expect_refusal(401, "unauthorized");
    assert_eq!(daemon.tcp().get("/v1/workspaces").await.status, 200);
}

#[tokio::test]
async fn a_foreign_host_is_403_before_the_token_is_looked_at() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    for client in [daemon.tcp(), daemon.tcp_without_token()] {
        for host in
            ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0"]
        {
            client.with_header("host", host).get("/v1/version").await.expect_refusal(403, "host_not_allowed");
            assert_eq!(client.with_header("host", host).get("/healthz").await.status, 403, "{host}");
        }
    }
    let port = daemon
        .listening()
        .iter()
        .find_map(|line| line.strip_prefix("listening on http://127.0.0.1:"))
        .unwrap();
    for host in [
        "localhost".to_owned(),
        format!("localhost:{port}"),
        format!("127.0.0.1:{port}"),
        "LOCALHOST".to_owned(),
    ] {
        assert_eq!(daemon.tcp().with_header("host", &host).get("/v1/version").await.status, 200, "{host}");
    }
    let answer = daemon.tcp_without_token().exchange_raw(b"GET /healthz HTTP/1.0\r\n\r\n").await;
    assert!(answer.contains(" 403 ") || answer.contains(" 400 "), "no Host at all: {answer}");
}

#[tokio::test]
async fn a_host_that_was_allowed_is_served() {
    let daemon = TestDaemon::start_with(|options| {
        options.tcp().arg("--allow-host").arg("deck.example");
    })
    .await;
    assert_eq!(daemon.tcp().with_header("host", "deck.example").get("/v1/version").await.status, 200);
    daemon
        .tcp()
        .with_header("host", "other.example")
        .get("/v1/version")
        .await
        .expect_refusal(403, "host_not_allowed");
}

#[tokio::test]
async fn a_foreign_origin_is_403_before_the_token_is_looked_at() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    for client in [daemon.tcp(), daemon.tcp_without_token()] {
        for origin in ["https://evil.example", "null", "http://localhost.evil.example", "file://"] {
            client
                .with_header("origin", origin)
                .get("/v1/version")
                .await
                .expect_refusal(403, "origin_not_allowed");
            let posted =
                client.with_header("origin", origin).post("/v1/workspaces", &json!({ "path": "/usr" })).await;
            posted.expect_refusal(403, "origin_not_allowed");
        }
    }
    assert!(daemon.client().get("/v1/workspaces").await.list().is_empty());
}

#[tokio::test]
async fn the_token_is_made_once_and_kept() {
    let mut daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let token = daemon.token();
    assert!(token.len() >= 32, "{token:?} cannot be guessed");
    daemon.restart().await;
    assert_eq!(daemon.token(), token);
    assert_eq!(daemon.tcp().get("/v1/version").await.status, 200);
    let other = TestDaemon::start_with(|options| _ = options.tcp()).await;
    assert_ne!(other.token(), token);
    assert_eq!(other.tcp_without_token().with_token(&token).get("/v1/version").await.status, 401);
}

#[tokio::test]
async fn the_token_is_in_no_log() {
    let mut daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    daemon.tcp().get("/v1/version").await.expect(200);
    daemon
        .tcp()
        .with_token(&format!("{}x", daemon.token()))
        .get("/v1/version")
        .await
        .expect_refusal(401, "unauthorized");
    let token = daemon.token();
    assert_eq!(daemon.terminate().await, Some(0));
    assert!(!daemon.stderr().contains(&token));
    for (path, content) in daemon.home.files() {
        let found = String::from_utf8_lossy(&content).contains(&token);
        assert!(!found || path.ends_with("token"), "{} holds the token", path.display());
    }
}

#[tokio::test]
async fn an_address_that_is_not_loopback_needs_tls_or_the_daemon_does_not_start() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let home = TestHome::new();
        let output = home.qd(&["serve", "--listen", address]).await;
        assert!(output.stderr.to_lowercase().contains("tls"), "{output:?}");
        assert!(!output.stdout.contains("listening"), "{output:?}");
        output.expect_exit(1);
    }
}

#[tokio::test]
async fn tls_self_makes_a_certificate_and_prints_its_fingerprint() {
    let home = TestHome::new();
    let mut serve = home.start(&["serve", "--listen", "127.0.0.1:0", "--tls", "self"]);
    serve.wait_for_stdout("listening on https://127.0.0.1:").await;
    serve.signal(rustix::process::Signal::TERM);
    let output = serve.wait().await;
    let output_text = format!("{}{}", output.stdout, output.stderr).to_lowercase();
    assert!(output_text.contains("fingerprint"), "{output_text}");
    output.ok();
}

#[tokio::test]
async fn a_second_daemon_on_a_home_exits_1_and_says_who_holds_it() {
    let daemon = TestDaemon::start().await;
    let output = daemon.qd(&["serve"]).await;
    assert!(output.stderr.contains(&daemon.pid().to_string()), "{output:?}");
    output.expect_exit(1);
    assert_eq!(daemon.client().get("/healthz").await.status, 200, "the first daemon still works");
    assert!(daemon.home.socket().exists());
}
