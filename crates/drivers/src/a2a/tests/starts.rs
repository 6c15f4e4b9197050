//! How an agent is found by its address, and the errors when it is not.

use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::TlsAcceptor;

use super::*;

const SECRET: &str = "t0ken-of-the-session";

async fn wait_ready(url: &str) -> AgentUpdate {
    A2aDriverHarness::start(url, |_| {}).next_update().await
}

#[tokio::test]
async fn a_card_is_found_at_the_old_path_by_its_own_address_and_behind_a_redirect() {
    let server = FakeA2aServer::start().await;
    let card_json = card(A2aVersion::V0_3, true)(&server);
    let ready = AgentUpdate::Ready { agent_session_id: None, steers: false };
    server.set_page("/.well-known/agent.json", 200, "application/json", &card_json);
    assert_eq!(wait_ready(&server.url("")).await, ready);
    server.set_page("/cards/mine.json", 200, "text/plain", &card_json);
    assert_eq!(wait_ready(&server.url("/cards/mine.json")).await, ready);
    server.set_page("/a/.well-known/agent-card.json", 308, "/cards/mine.json", "");
    assert_eq!(wait_ready(&server.url("/a/")).await, ready);
}

#[tokio::test]
async fn an_agent_that_cannot_be_started_says_what_is_wrong() {
    let server = FakeA2aServer::start().await;
    let failure = async |url: &str| {
        let error = A2aDriverHarness::start(url, |_| {}).wait_for_failure().await;
        assert_eq!(error.code, "agent_failed_to_start", "{error:?}");
        error.message
    };
    let message = failure(&server.url("")).await;
    assert!(message.contains("no card") && message.contains("404") && message.contains(".json"), "{message}");
    server.set_page("/html.json", 200, "text/html", "<html>");
    assert!(failure(&server.url("/html.json")).await.contains("not JSON"));
    server.set_page("/grpc.json", 200, "application/json", json!({"url": "x", "preferredTransport": "GRPC"}));
    assert!(failure(&server.url("/grpc.json")).await.contains("it offers GRPC 0.3"));
    server.set_page("/away.json", 302, "http://example.invalid/card.json", "");
    let message = failure(&server.url("/away.json")).await;
    assert!(
        message.contains("another server") && message.contains("http://example.invalid/card.json"),
        "{message}"
    );
    server.set_page("/round.json", 302, "/round.json", "");
    assert!(failure(&server.url("/round.json")).await.contains("circles"));
    server.set_page("/long.json", 200, "application/json", " ".repeat(2 << 20));
    assert!(failure(&server.url("/long.json")).await.contains("longer than"));
    server.set_page("/closed.json", 401, "application/json", "");
    assert!(failure(&server.url("/closed.json")).await.contains("give the session A2A_TOKEN"));
    // A port that was just released: nobody listens there.
    let port = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let message = failure(&format!("http://127.0.0.1:{port}")).await;
    assert!(message.contains("cannot be reached") && message.contains("is the agent running"), "{message}");
}

#[tokio::test]
async fn a_token_goes_with_every_call_and_is_shown_to_nobody_else() {
    let mut server = FakeA2aServer::start().await;
    let mut card_json = card(A2aVersion::V1_0, true)(&server);
    card_json["securitySchemes"] =
        json!({"k": {"apiKeySecurityScheme": {"location": "header", "name": "X-Agent-Key"}}});
    server.set_page("/.well-known/agent-card.json", 401, "application/json", &card_json);
    let mut harness = A2aDriverHarness::start(&server.url(""), |spec| {
        spec.env.insert("A2A_TOKEN".to_owned(), SECRET.to_owned());
    });
    assert!(matches!(harness.next_update().await, AgentUpdate::Ready { .. }));
    harness.prompt("a", "x");
    let call = server.next_call().await;
    assert_eq!(call.headers["x-agent-key"], SECRET);
    assert!(!call.headers.contains_key("authorization"));
    call.send_error(-32000, &format!("what is {SECRET}?"));
    let ended = harness.wait_for_end("a").await;
    assert_eq!(ended.error().message, "what is [A2A_TOKEN redacted]? (-32000)");
    harness.prompt("b", "x");
    server.next_call().await.send_http(403, &json!({ "no": SECRET }));
    let ended = harness.wait_for_end("b").await;
    assert!(!format!("{ended:?}").contains(SECRET), "{ended:?}");
    assert!(ended.error().message.contains("was not accepted"), "{:?}", ended.error());
}

#[tokio::test]
async fn a_conversation_is_resumed_after_a_restart() {
    let format = A2aTestFormat(A2aVersion::V1_0);
    let mut server = FakeA2aServer::start().await;
    server.set_card(&card(A2aVersion::V1_0, true)(&server));
    let mut harness =
        A2aDriverHarness::start(&server.url(""), |spec| spec.agent_session_id = Some("c".to_owned()));
    assert_eq!(
        harness.next_update().await,
        AgentUpdate::Ready { agent_session_id: Some("c".to_owned()), steers: false }
    );
    harness.prompt("a", "what was it?");
    let call = server.next_call().await;
    assert_eq!(call.params["message"]["contextId"], "c");
    call.send_result(format.task_event("completed", Some(("m", "42")), &[]));
    assert_eq!(harness.wait_for_end("a").await.text(), "42");
}

#[tokio::test]
async fn an_agent_behind_tls_is_trusted_by_its_certificate_alone() {
    let certificate = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(certificate.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.cert.der().clone()], key)
        .unwrap();
    let mut server = FakeA2aServer::with(Some(TlsAcceptor::from(Arc::new(config)))).await;
    server.set_card(&card(A2aVersion::V1_0, true)(&server));
    let url = format!("https://127.0.0.1:{}", server.port);
    let error = A2aDriverHarness::start(&url, |_| {}).wait_for_failure().await;
    assert!(
        error.message.contains("cannot be reached") && error.message.contains("SSL_CERT_FILE"),
        "{error:?}"
    );

    let folder = tempfile::tempdir().unwrap();
    let roots = folder.path().join("roots.pem");
    std::fs::write(&roots, certificate.cert.pem()).unwrap();
    let mut harness = A2aDriverHarness::start(&url, |spec| {
        spec.env.insert("SSL_CERT_FILE".to_owned(), roots.display().to_string());
    });
    assert!(matches!(harness.next_update().await, AgentUpdate::Ready { .. }));
    harness.prompt("a", "x");
    server.next_call().await.send_result(A2aTestFormat(A2aVersion::V1_0).task_event(
        "completed",
        Some(("m", "sealed")),
        &[],
    ));
    assert_eq!(harness.wait_for_end("a").await.text(), "sealed");

    // A card that came by TLS asks for the token at an address where it could be read.
    server.set_card(&json!({"url": "http://agents.example/", "capabilities": {}}));
    let mut refused = A2aDriverHarness::start(&url, |spec| {
        spec.env.insert("SSL_CERT_FILE".to_owned(), roots.display().to_string());
        spec.env.insert("A2A_TOKEN".to_owned(), SECRET.to_owned());
    });
    assert!(refused.wait_for_failure().await.message.contains("could read A2A_TOKEN"));
}
