//! How a worker is reached, and the error messages if it cannot be.

use std::sync::Arc;

use qd_protocol::link::AgentUpdate;
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio_rustls::TlsAcceptor;

use super::fake_worker::{FakePeerListener, FakePeerWorker, within};
use crate::harness::{DriverHarness, assert_ended_well};

#[tokio::test]
async fn a_token_goes_with_the_upgrade() {
    let listener = FakePeerListener::start().await;
    let agent = format!("{}/a/b?c=d", listener.agent_name());
    let _harness = DriverHarness::remote(&agent, |spec| {
        spec.env.insert("WORKER_TOKEN".to_owned(), "t0ken-of-mine".to_owned());
    });
    let worker = listener.accept().await;
    assert_eq!((worker.token.as_deref(), worker.path.as_str()), (Some("Bearer t0ken-of-mine"), "/a/b?c=d"));
    let _harness = DriverHarness::remote(&listener.agent_name(), |_| {});
    let worker = listener.accept().await;
    assert_eq!((worker.token, worker.path.as_str()), (None, "/"));
}

#[tokio::test]
async fn a_worker_on_a_socket_of_this_machine_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut harness = DriverHarness::remote(&format!("worker:unix:{}", path.display()), |_| {});
    let mut worker =
        FakePeerWorker::upgrade(within("a connection", listener.accept()).await.unwrap().0).await;
    assert!(matches!(harness.next_update().await, AgentUpdate::Ready { .. }));
    harness.prompt("a", "x");
    worker.expect_run().await;
    worker.complete_run("fine").await;
    assert_ended_well(&harness.wait_for_end("a").await);
}

#[tokio::test]
async fn a_worker_behind_tls_is_trusted_by_its_certificate_alone() {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let folder = tempfile::tempdir().unwrap();
    let pem = folder.path().join("cert.pem");
    std::fs::write(&pem, made.cert.pem()).unwrap();
    let listener = FakePeerListener::start().await;
    let agent = format!("worker:wss://127.0.0.1:{}", listener.port);

    let mut harness = DriverHarness::remote(&agent, |spec| {
        spec.env.insert("SSL_CERT_FILE".to_owned(), pem.display().to_string());
    });
    let stream = acceptor.accept(listener.accept_stream().await).await.unwrap();
    let mut worker = Box::pin(FakePeerWorker::upgrade(stream)).await;
    assert!(matches!(harness.next_update().await, AgentUpdate::Ready { .. }));
    harness.prompt("a", "x");
    worker.expect_run().await;
    worker.complete_run("fine").await;
    assert_ended_well(&harness.wait_for_end("a").await);

    let mut harness = DriverHarness::remote(&agent, |_| {});
    let _refused = acceptor.accept(listener.accept_stream().await).await;
    let error = harness.wait_for_failure().await;
    assert!(error.message.contains("SSL_CERT_FILE"), "{error:?}");
}

#[tokio::test]
async fn an_unreachable_worker_is_named_with_advice() {
    let closed = FakePeerListener::start().await.agent_name();
    let error = DriverHarness::remote(&closed, |_| {}).wait_for_failure().await;
    assert_eq!(error.code, "agent_failed_to_start");
    assert!(
        error.message.contains("cannot be reached") && error.message.contains("is it running?"),
        "{error:?}"
    );
    let error = DriverHarness::remote("worker:unix:/nowhere/w.sock", |_| {}).wait_for_failure().await;
    assert!(error.message.contains("/nowhere/w.sock"), "{error:?}");
    // An address that belongs to nobody; it is never dialled.
    let error = DriverHarness::remote("worker:wss://192.0.2.1:1", |_| {}).wait_for_failure().await;
    assert!(error.message.contains("WORKER_TOKEN"), "{error:?}");
}

#[tokio::test]
async fn each_kind_of_refusal_has_its_own_message() {
    for (status, token, expected) in [
        ("401 Unauthorized", None, "give the session WORKER_TOKEN"),
        ("401 Unauthorized", Some("wrong-token"), "did not accept the value of WORKER_TOKEN"),
        ("404 Not Found", None, "is that a worker?"),
    ] {
        let listener = FakePeerListener::start().await;
        let mut harness = DriverHarness::remote(&listener.agent_name(), |spec| {
            spec.env.extend(token.map(|token| ("WORKER_TOKEN".to_owned(), token.to_owned())));
        });
        let mut stream = listener.accept_stream().await;
        let mut head = [0; 4096];
        let _read = stream.read(&mut head).await.unwrap();
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(answer.as_bytes()).await.unwrap();
        let error = harness.wait_for_failure().await;
        assert_eq!(error.code, "agent_failed_to_start");
        assert!(error.message.contains(expected), "{error:?}");
        assert!(!error.message.contains("wrong-token"), "{error:?}");
    }
    let listener = FakePeerListener::start().await;
    let mut harness = DriverHarness::remote(&listener.agent_name(), |_| {});
    listener.accept_stream().await.write_all(b"220 mail.example ESMTP\r\n").await.unwrap();
    let error = harness.wait_for_failure().await;
    assert!(error.message.contains("does not answer like a worker"), "{error:?}");
}
