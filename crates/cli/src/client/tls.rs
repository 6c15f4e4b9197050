//! TLS to a daemon. The certificate must be trusted by the system, or match a given fingerprint, as
//! `qd serve --tls self` prints it.

use std::sync::Arc;

use anyhow::{Context, anyhow};
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

/// Environment variable with the fingerprint of the only certificate to accept.
const FINGERPRINT_VAR: &str = "QD_TLS_FINGERPRINT";

/// Which certificates are accepted.
#[derive(Debug, Clone)]
pub(crate) struct CertificateTrust {
    /// SHA-256 of the only accepted certificate. `None`: certificates that the system trusts.
    pin: Option<[u8; 32]>,
    /// The flag or variable that sets the fingerprint, for error messages.
    named_by: &'static str,
}

impl CertificateTrust {
    /// From `QD_TLS_FINGERPRINT`.
    pub(super) fn from_environment() -> anyhow::Result<Self> {
        let pin = std::env::var(FINGERPRINT_VAR).ok().filter(|pin| !pin.is_empty());
        Self::from_fingerprint(pin.as_deref(), FINGERPRINT_VAR)
    }

    /// Accepts only the certificate with this fingerprint, or without one those that the system trusts.
    pub(crate) fn from_fingerprint(pin: Option<&str>, named_by: &'static str) -> anyhow::Result<Self> {
        let pin = pin.map(parse_fingerprint).transpose();
        Ok(Self { pin: pin.with_context(|| format!("{named_by} is not valid"))?, named_by })
    }

    /// Does the TLS handshake on a TCP connection.
    pub(crate) async fn handshake(
        &self,
        host: &DaemonHost,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, TlsHandshakeError> {
        let config = self.config().map_err(TlsHandshakeError::Failed)?;
        let name = ServerName::try_from(host.server_name().to_owned());
        let name =
            name.context("TLS needs a host name or an IP address").map_err(TlsHandshakeError::Failed)?;
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

    /// What a user should do about a rejected certificate.
    fn advice(&self) -> String {
        let Self { pin, named_by } = self;
        match pin {
            Some(_) => format!("the daemon's certificate does not match {named_by}"),
            None => format!(
                "this machine does not trust the daemon's certificate; if `qd serve --tls self` created it, set \
                 {named_by} to the fingerprint that it printed"
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

/// Why the TLS handshake failed.
#[derive(Debug)]
pub(crate) enum TlsHandshakeError {
    /// The certificate was rejected. Retrying does not help.
    Untrusted(anyhow::Error),
    Failed(anyhow::Error),
}

impl From<TlsHandshakeError> for anyhow::Error {
    fn from(error: TlsHandshakeError) -> Self {
        match error {
            TlsHandshakeError::Untrusted(error) | TlsHandshakeError::Failed(error) => error,
        }
    }
}

/// Whether the handshake failed because the certificate was rejected.
fn is_certificate_error(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// Whether the peer answered with something other than TLS.
fn is_not_tls(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(rustls::Error::InvalidMessage(_)))
}

/// Parses 32 bytes in hexadecimal, with or without colons and a `sha256:` prefix.
fn parse_fingerprint(text: &str) -> anyhow::Result<[u8; 32]> {
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.strip_prefix("sha256:").unwrap_or(&lower).replace(':', "");
    let mut bytes = [0; 32];
    hex::decode_to_slice(&digits, &mut bytes)
        .map_err(|_| anyhow!("`{text}` is not a SHA-256 in hexadecimal"))?;
    Ok(bytes)
}

/// Accepts one certificate and no other. The handshake's signature still proves that the peer holds its key.
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
    fn only_a_rejected_certificate_is_reported_as_untrusted() {
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
