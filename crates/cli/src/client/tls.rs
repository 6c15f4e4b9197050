//! TLS to a daemon: a certificate that the system trusts, or exactly the one whose fingerprint `QD_TLS_FINGERPRINT`
//! names, as `qd serve --tls self` printed it.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::host::Host;

/// Names the one certificate to trust.
const PIN: &str = "QD_TLS_FINGERPRINT";
/// Where systems keep the certificates they trust; `SSL_CERT_FILE` goes before them.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// Makes a TLS connection out of a TCP one.
pub(super) async fn shake_hands(host: &Host, stream: TcpStream) -> anyhow::Result<TlsStream<TcpStream>> {
    let pin = std::env::var(PIN).ok().filter(|pin| !pin.is_empty());
    let pinned = pin.is_some();
    let config = config(pin.as_deref())?;
    let name = ServerName::try_from(host.server_name().to_owned()).context("the host has no name for TLS")?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    stream.map_err(|error| {
        let advice = advice(&error, pinned);
        advice.into_iter().fold(anyhow::Error::from(error), |error, advice| error.context(advice))
    })
}

/// What to do about a certificate that was not taken; nothing, if something else went wrong.
fn advice(error: &std::io::Error, pinned: bool) -> Option<String> {
    let inner = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    if !matches!(inner, rustls::Error::InvalidCertificate(_)) {
        return None;
    }
    Some(if pinned {
        format!("the certificate is not the one that {PIN} names")
    } else {
        format!(
            "the certificate is not trusted here; if it was made by `qd serve --tls self`, set {PIN} to the \
             fingerprint that it printed"
        )
    })
}

fn config(pin: Option<&str>) -> anyhow::Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    let Some(pin) = pin else { return Ok(builder.with_root_certificates(roots()).with_no_client_auth()) };
    let pinned = Pinned { sha256: fingerprint(pin)?, provider };
    Ok(builder.dangerous().with_custom_certificate_verifier(Arc::new(pinned)).with_no_client_auth())
}

/// The certificates that the system trusts; none, if it keeps them where we do not look.
fn roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let named = std::env::var_os("SSL_CERT_FILE").map(std::path::PathBuf::from);
    let mut files = named.iter().map(std::path::PathBuf::as_path).chain(BUNDLES.iter().map(Path::new));
    if let Some(file) = files.find(|file| file.exists()) {
        let found = CertificateDer::pem_file_iter(file).into_iter().flatten().flatten();
        roots.add_parsable_certificates(found);
    }
    roots
}

/// Thirty-two bytes in hexadecimal, with colons or without, `sha256:` before them or not.
fn fingerprint(text: &str) -> anyhow::Result<[u8; 32]> {
    let lower = text.trim().to_ascii_lowercase();
    let hex = lower.strip_prefix("sha256:").unwrap_or(&lower).replace(':', "");
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        bail!("{PIN} is not a SHA-256 in hexadecimal");
    }
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).map_err(|error| anyhow!(error))?;
    }
    Ok(bytes)
}

/// Trusts one certificate and no other. Who holds its key is still proven by the handshake's signature.
#[derive(Debug)]
struct Pinned {
    sha256: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if Sha256::digest(certificate.as_ref())[..] == self.sha256 {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_read_as_tools_write_it() {
        let plain = "ab".repeat(32);
        let colons = vec!["AB"; 32].join(":");
        for text in [plain.clone(), colons.clone(), format!("SHA256:{colons}"), format!("sha256:{plain}\n")] {
            assert_eq!(fingerprint(&text).unwrap(), [0xab; 32], "{text}");
        }
        for text in ["", "ab", &"zz".repeat(32), &"ä".repeat(32)] {
            assert!(fingerprint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_a_certificate_that_was_not_taken_calls_for_another() {
        let refused = |error: rustls::Error| std::io::Error::new(std::io::ErrorKind::InvalidData, error);
        let stranger = refused(CertificateError::UnknownIssuer.into());
        assert!(advice(&stranger, false).unwrap().contains("--tls self"));
        assert!(advice(&stranger, true).unwrap().contains("not the one"));
        assert_eq!(advice(&refused(rustls::Error::HandshakeNotComplete), false), None);
    }

    #[test]
    fn a_configuration_can_be_made_with_a_pin_and_without() {
        assert!(config(None).is_ok());
        assert!(config(Some(&"00".repeat(32))).is_ok());
    }
}
