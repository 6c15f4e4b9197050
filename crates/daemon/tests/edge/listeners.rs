//! Listening: socket files, ports and TLS.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use qd_daemon::edge::{
    self, CertificateFingerprint, CertificateSource, EdgeError, EdgeOptions, listen::ListenError,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::net::TcpStream;

use crate::harness::{EdgeHarness, RawHttpConnection, home, short};

#[tokio::test]
async fn every_address_has_its_line_and_a_port_of_0_is_a_free_one() {
    let harness = EdgeHarness::with(|options| options.listen.push("[::1]:0".parse().unwrap())).await;
    assert_eq!(harness.lines[0], format!("listening on unix:{}", harness.socket().display()));
    assert!(harness.lines[1].starts_with("listening on http://127.0.0.1:"), "{:?}", harness.lines);
    assert!(harness.lines[2].starts_with("listening on http://[::1]:"), "{:?}", harness.lines);
    assert!(harness.lines[1..].iter().all(|line| !line.ends_with(":0")));
    let mut wire = RawHttpConnection(TcpStream::connect(("::1", harness.port())).await.unwrap());
    wire.send(format!("GET /healthz HTTP/1.1\r\nHost: [::1]:{}\r\n\r\n", harness.port())).await;
    assert_eq!(wire.answer().await.status, 200);
}

#[tokio::test]
async fn the_socket_and_the_home_are_for_their_owner_only() {
    let harness = EdgeHarness::new().await;
    let mode = |path| std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(harness.socket()), 0o600);
    assert_eq!(mode(harness.home.path().to_owned()), 0o700);
    assert_eq!(mode(harness.home.token_file()), 0o600);
}

#[tokio::test]
async fn a_second_edge_on_a_live_socket_is_refused_and_the_first_goes_on() {
    let harness = EdgeHarness::new().await;
    let options = EdgeOptions {
        listen: vec![qd_home::ListenAddress::Unix(harness.socket())],
        ..EdgeOptions::default()
    };
    let error = edge::open(&harness.home, options).await.unwrap_err();
    assert!(matches!(error, EdgeError::Listen(ListenError::InUse(_))), "{error}");
    let mut wire = harness.unix().await;
    wire.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(wire.answer().await.status, 200);
}

#[tokio::test]
async fn nothing_is_bound_if_one_address_cannot_be() {
    let (_folder, home) = home();
    for bad in ["0.0.0.0:0", "192.0.2.1:0"] {
        let listen = vec![qd_home::ListenAddress::Unix(home.socket()), bad.parse().unwrap()];
        let error = edge::open(&home, EdgeOptions { listen, ..EdgeOptions::default() }).await.unwrap_err();
        assert!(matches!(error, EdgeError::Listen(ListenError::NeedsTls(_))), "{error}");
        assert!(!home.socket().exists());
    }
    let error = edge::open(&home, EdgeOptions::default()).await.unwrap_err();
    assert!(matches!(error, EdgeError::Listen(ListenError::NoAddress)));
    let options = EdgeOptions {
        listen: vec![qd_home::ListenAddress::Unix(home.socket())],
        allow_host: vec!["http://x".to_owned()],
        ..EdgeOptions::default()
    };
    assert!(matches!(edge::open(&home, options).await, Err(EdgeError::AllowHost(_))));
    assert!(!home.socket().exists());
}

#[tokio::test]
async fn a_port_that_is_taken_is_a_clear_error() {
    let (_folder, home) = home();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let listen = vec![qd_home::ListenAddress::Unix(home.socket()), address.parse().unwrap()];
    let error = edge::open(&home, EdgeOptions { listen, ..EdgeOptions::default() }).await.unwrap_err();
    assert!(error.to_string().contains(&address) && error.to_string().contains("in use"), "{error}");
    assert!(!home.socket().exists());
}

/// Trusts one certificate by its fingerprint, whatever its issuer and names are.
#[derive(Debug)]
struct FingerprintVerifier(CertificateFingerprint);

impl ServerCertVerifier for FingerprintVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if CertificateFingerprint::of(leaf) == self.0 {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(rustls::Error::General("another certificate".to_owned()))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = rustls::crypto::ring::default_provider().signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, signed, &known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = rustls::crypto::ring::default_provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, signed, &known)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

async fn tls(
    port: u16,
    fingerprint: CertificateFingerprint,
) -> std::io::Result<RawHttpConnection<tokio_rustls::client::TlsStream<TcpStream>>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(FingerprintVerifier(fingerprint)))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let name = ServerName::try_from("localhost").unwrap();
    tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.map(RawHttpConnection)
}

#[tokio::test]
async fn a_wildcard_with_a_certificate_of_our_own_is_known_by_its_fingerprint() {
    let harness = EdgeHarness::with(|options| {
        options.listen = vec!["0.0.0.0:0".parse().unwrap()];
        options.tls = Some(CertificateSource::SelfSigned);
    })
    .await;
    assert!(harness.lines[0].starts_with("listening on https://0.0.0.0:"), "{:?}", harness.lines);
    let mut wire = tls(harness.port(), harness.fingerprint.unwrap()).await.unwrap();
    assert_eq!(wire.0.get_ref().1.alpn_protocol(), Some(b"http/1.1".as_slice()));
    let (host, bearer) = (format!("127.0.0.1:{}", harness.port()), harness.bearer());
    let ask = |lines: &str| format!("GET /peer HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n");
    wire.send(ask(&format!("{bearer}\r\nOrigin: https://{host}\r\n"))).await;
    let answer = wire.answer().await;
    assert!(answer.status == 200 && answer.body.contains("tls: true"), "{answer:?}");
    wire.send(ask("")).await;
    assert_eq!(wire.answer().await.refused(), (401, "unauthorized".to_owned()));
    wire.send(ask(&format!("{bearer}\r\nOrigin: http://{host}\r\n"))).await;
    assert_eq!(wire.answer().await.refused(), (403, "origin_not_allowed".to_owned()));
    assert!(
        tls(harness.port(), CertificateFingerprint([7; 32])).await.is_err(),
        "another one is not trusted"
    );
}

#[tokio::test]
async fn a_client_that_never_finishes_its_handshake_is_cut() {
    let harness = EdgeHarness::with(|options| {
        options.tls = Some(CertificateSource::SelfSigned);
        options.limits = short();
    })
    .await;
    let mut wire = harness.tcp().await;
    wire.closed().await;
    let mut wire = harness.tcp().await;
    wire.send("GET /healthz HTTP/1.1\r\n\r\n").await;
    wire.closed().await;
    let mut wire = tls(harness.port(), harness.fingerprint.unwrap()).await.unwrap();
    wire.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert_eq!(wire.answer().await.status, 200, "and the others are served");
}
