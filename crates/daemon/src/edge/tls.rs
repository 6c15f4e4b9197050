//! The certificate that TCP is served with: two PEM files of the user, or a self-signed one that is stored in the
//! home so that its fingerprint stays the same. rustls with the ring provider; only HTTP/1.1 is offered.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qd_home::{DaemonHome, HomeError, ListenAddress, UrlHost, open_private, replace_file};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};

use super::listen::is_wildcard;

/// The SHA-256 of a certificate, by which a client recognizes it. Displayed as `openssl` and browsers do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CertificateFingerprint(pub [u8; 32]);

impl CertificateFingerprint {
    /// The fingerprint of a certificate in DER.
    pub fn of(certificate: &[u8]) -> Self {
        Self(Sha256::digest(certificate).into())
    }
}

impl fmt::Display for CertificateFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map(|byte| hex::encode_upper([byte])).join(":"))
    }
}

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("could not read {path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    /// A file contains something else.
    #[error("{path} does not contain a {what} in PEM form")]
    NotPem {
        path: PathBuf,
        /// What the file should contain.
        what: &'static str,
    },
    /// Certificate and key do not match, or rustls does not accept them.
    #[error("could not use the certificate {path}: {source}")]
    Unusable { path: PathBuf, source: rustls::Error },
    /// The self-signed certificate could not be made.
    #[error("could not make a certificate: {0}")]
    NotGenerated(#[from] rcgen::Error),
    /// The self-signed certificate could not be stored.
    #[error(transparent)]
    Home(#[from] HomeError),
}

pub(super) struct ServerCertificate {
    pub(super) config: Arc<ServerConfig>,
    pub(super) fingerprint: CertificateFingerprint,
}

/// `--tls-cert` and `--tls-key`.
pub(super) fn from_files(cert: &Path, key: &Path) -> Result<ServerCertificate, TlsError> {
    let read =
        |path: &Path| fs::read(path).map_err(|source| TlsError::Unreadable { path: path.to_owned(), source });
    build_server_certificate(cert, &read(cert)?, key, &read(key)?)
}

/// `--tls self`: the certificate in the home, created if there is none. Later starts keep it even if the names change,
/// because clients know it by its fingerprint.
pub(super) fn self_signed(home: &DaemonHome, names: &[String]) -> Result<ServerCertificate, TlsError> {
    let (cert, key) = (home.tls().join("cert.pem"), home.tls().join("key.pem"));
    if !cert.exists() || !key.exists() {
        write_self_signed(&cert, &key, names)?;
    }
    let read = |path: &Path| {
        let mut text = Vec::new();
        open_private(path)?
            .read_to_end(&mut text)
            .map_err(|source| TlsError::Unreadable { path: path.to_owned(), source })?;
        Ok::<_, TlsError>(text)
    };
    build_server_certificate(&cert, &read(&cert)?, &key, &read(&key)?)
}

/// The names in a self-signed certificate.
pub(super) fn certificate_names(listen: &[ListenAddress], allowed: &[UrlHost]) -> Vec<String> {
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    let listened = listen.iter().filter_map(|address| match address {
        ListenAddress::Tcp { host, .. } => Some(host),
        ListenAddress::Unix(_) => None,
    });
    for host in listened.chain(allowed) {
        let name = match host {
            UrlHost::Ip(ip) => ip.to_string(),
            UrlHost::Name(name) => name.clone(),
        };
        if !matches!(host, UrlHost::Ip(ip) if is_wildcard(*ip)) && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn write_self_signed(cert: &Path, key: &Path, names: &[String]) -> Result<(), TlsError> {
    let pair = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::new(names)?;
    params.distinguished_name.push(rcgen::DnType::CommonName, "quarterdeck");
    let certificate = params.self_signed(&pair)?;
    // The certificate is removed first and written last, so that an existing one always matches the key beside it.
    match fs::remove_file(cert) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(TlsError::Unreadable { path: cert.to_owned(), source });
        }
        _ => {}
    }
    replace_file(key, pair.serialize_pem().as_bytes())?;
    replace_file(cert, certificate.pem().as_bytes())?;
    Ok(())
}

fn build_server_certificate(
    cert_path: &Path,
    cert: &[u8],
    key_path: &Path,
    key: &[u8],
) -> Result<ServerCertificate, TlsError> {
    let not_pem = |path: &Path, what| TlsError::NotPem { path: path.to_owned(), what };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(cert)
        .collect::<Result<_, _>>()
        .map_err(|_| not_pem(cert_path, "certificate"))?;
    let leaf = chain.first().ok_or_else(|| not_pem(cert_path, "certificate"))?;
    let fingerprint = CertificateFingerprint::of(leaf);
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| not_pem(key_path, "private key"))?;
    let unusable = |source| TlsError::Unusable { path: cert_path.to_owned(), source };
    // The provider is named here rather than left to a process-wide default that other code might set.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(unusable)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(ServerCertificate { config: Arc::new(config), fingerprint })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::temporary_home::temporary_home;

    #[test]
    fn a_certificate_of_our_own_is_made_once_and_its_key_is_private() {
        let (_folder, home) = temporary_home();
        let first = self_signed(&home, &certificate_names(&[], &[])).unwrap();
        let key = home.tls().join("key.pem");
        assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o7777, 0o600);
        let reopened =
            self_signed(&home, &certificate_names(&["example.test:1".parse().unwrap()], &[])).unwrap();
        assert_eq!(reopened.fingerprint, first.fingerprint, "it is kept for the next start");
        assert_eq!(reopened.config.alpn_protocols, [b"http/1.1".to_vec()]);
        fs::remove_file(&key).unwrap();
        assert_ne!(self_signed(&home, &certificate_names(&[], &[])).unwrap().fingerprint, first.fingerprint);
    }

    #[test]
    fn a_certificate_and_key_of_the_user_are_taken_and_bad_ones_are_named() {
        let (_folder, home) = temporary_home();
        let self_signed = self_signed(&home, &certificate_names(&[], &[])).unwrap();
        let (cert, key) = (home.tls().join("cert.pem"), home.tls().join("key.pem"));
        assert_eq!(from_files(&cert, &key).unwrap().fingerprint, self_signed.fingerprint);
        assert!(matches!(from_files(&key, &key), Err(TlsError::NotPem { what: "certificate", .. })));
        assert!(matches!(from_files(&cert, &cert), Err(TlsError::NotPem { what: "private key", .. })));
        assert!(matches!(from_files(&home.tls().join("none"), &key), Err(TlsError::Unreadable { .. })));
        let other = rcgen::KeyPair::generate().unwrap().serialize_pem();
        fs::write(&key, other).unwrap();
        assert!(matches!(from_files(&cert, &key), Err(TlsError::Unusable { .. })));
    }

    #[test]
    fn a_certificate_is_made_out_to_what_is_listened_on_but_not_to_a_wildcard() {
        let listen = ["unix:/x", "0.0.0.0:1", "192.0.2.7:1", "deck.test:1"].map(|text| text.parse().unwrap());
        let names = certificate_names(
            &listen,
            &["proxy.test", "localhost"].map(|name| UrlHost::Name(name.to_owned())),
        );
        assert_eq!(names, ["localhost", "127.0.0.1", "::1", "192.0.2.7", "deck.test", "proxy.test"]);
    }

    #[test]
    fn a_fingerprint_reads_as_openssl_writes_it() {
        let shown = CertificateFingerprint::of(b"").to_string();
        assert!(shown.starts_with("E3:B0:C4:42:98:FC:1C:14"), "{shown}");
        assert_eq!(shown.len(), 95);
    }
}
