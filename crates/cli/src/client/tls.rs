//! TLS to a daemon: a certificate that the system trusts, or exactly the one whose fingerprint was named, as
//! `qd serve --tls self` printed it.

use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use qd_worker::root_certificates::load_root_certificates;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme};
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::host::DaemonHost;

/// Names the one certificate to trust.
const FINGERPRINT_VAR: &str = "QD_TLS_FINGERPRINT";
/// Whose certificate is taken.
#[derive(Debug, Clone)]
pub(crate) struct CertificateTrust {
    /// The one certificate, if one was named; else those that the system trusts.
    pin: Option<[u8; 32]>,
    /// What names it, for people.
    named_by: &'static str,
}

impl CertificateTrust {
    /// As `QD_TLS_FINGERPRINT` says.
    pub(super) fn from_environment() -> anyhow::Result<Self> {
        let pin = std::env::var(FINGERPRINT_VAR).ok().filter(|pin| !pin.is_empty());
        Self::from_fingerprint(pin.as_deref(), FINGERPRINT_VAR)
    }

    /// This certificate alone, by the fingerprint that `named_by` gives, or those that the system trusts.
    pub(crate) fn from_fingerprint(pin: Option<&str>, named_by: &'static str) -> anyhow::Result<Self> {
        let pin = pin.map(parse_fingerprint).transpose();
        Ok(Self { pin: pin.with_context(|| format!("{named_by} cannot be used"))?, named_by })
    }

    /// Makes a TLS connection out of a TCP one.
    pub(crate) async fn handshake(
        &self,
        host: &DaemonHost,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, TlsHandshakeError> {
        let config = self.config().map_err(TlsHandshakeError::Failed)?;
        let name = ServerName::try_from(host.server_name().to_owned());
        let name = name.context("the host has no name for TLS").map_err(TlsHandshakeError::Failed)?;
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
        stream.map_err(|error| match is_certificate_error(&error) {
            true => TlsHandshakeError::Untrusted(anyhow::Error::from(error).context(self.advice())),
            false if is_not_tls(&error) => TlsHandshakeError::Failed(anyhow!(
                "this port does not speak TLS: use http://{}",
                host.host_header()
            )),
            false => TlsHandshakeError::Failed(error.into()),
        })
    }

    /// What to do about a certificate that was not taken.
    fn advice(&self) -> String {
        let Self { pin, named_by } = self;
        match pin {
            Some(_) => format!("the certificate is not the one that {named_by} names"),
            None => format!(
                "the certificate is not trusted here; if it was made by `qd serve --tls self`, let {named_by} name \
                 the fingerprint that it printed"
            ),
        }
    }

    fn config(&self) -> anyhow::Result<ClientConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?;
        let Some(sha256) = self.pin else {
            return Ok(builder.with_root_certificates(load_root_certificates(None)).with_no_client_auth());
        };
        let pinned = Arc::new(PinnedCertificateVerifier { sha256, provider });
        Ok(builder.dangerous().with_custom_certificate_verifier(pinned).with_no_client_auth())
    }
}

/// Why there is no TLS connection.
#[derive(Debug)]
pub(crate) enum TlsHandshakeError {
    /// Who answers is not the one we look for.
    Untrusted(anyhow::Error),
    /// Something else went wrong.
    Failed(anyhow::Error),
}

impl From<TlsHandshakeError> for anyhow::Error {
    fn from(unshaken: TlsHandshakeError) -> Self {
        match unshaken {
            TlsHandshakeError::Untrusted(error) | TlsHandshakeError::Failed(error) => error,
        }
    }
}

/// Whether it was the certificate that was not taken.
fn is_certificate_error(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// Whether the other side answered with something that is no TLS at all.
fn is_not_tls(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(rustls::Error::InvalidMessage(_)))
}

/// Thirty-two bytes in hexadecimal, with colons or without, `sha256:` before them or not.
fn parse_fingerprint(text: &str) -> anyhow::Result<[u8; 32]> {
    let lower = text.trim().to_ascii_lowercase();
    let hex = lower.strip_prefix("sha256:").unwrap_or(&lower).replace(':', "");
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        bail!("`{text}` is not a SHA-256 in hexadecimal");
    }
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).map_err(|error| anyhow!(error))?;
    }
    Ok(bytes)
}

/// Trusts one certificate and no other. Who holds its key is still proven by the handshake's signature.
#[derive(Debug)]
struct PinnedCertificateVerifier {
    sha256: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedCertificateVerifier {
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
            assert_eq!(parse_fingerprint(&text).unwrap(), [0xab; 32], "{text}");
        }
        for text in ["", "ab", &"zz".repeat(32), &"ä".repeat(32)] {
            assert!(parse_fingerprint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_a_certificate_that_was_not_taken_calls_for_another() {
        let refused = |error: rustls::Error| std::io::Error::new(std::io::ErrorKind::InvalidData, error);
        assert!(is_certificate_error(&refused(CertificateError::UnknownIssuer.into())));
        assert!(!is_certificate_error(&refused(rustls::Error::HandshakeNotComplete)));
        assert!(
            CertificateTrust::from_fingerprint(None, FINGERPRINT_VAR)
                .unwrap()
                .advice()
                .contains("--tls self")
        );
        assert!(
            CertificateTrust::from_fingerprint(Some(&"00".repeat(32)), "--fingerprint")
                .unwrap()
                .advice()
                .contains("--fingerprint")
        );
    }

    #[test]
    fn a_configuration_can_be_made_with_a_pin_and_without() {
        assert!(CertificateTrust::from_fingerprint(None, FINGERPRINT_VAR).unwrap().config().is_ok());
        assert!(
            CertificateTrust::from_fingerprint(Some(&"00".repeat(32)), FINGERPRINT_VAR)
                .unwrap()
                .config()
                .is_ok()
        );
    }
}
