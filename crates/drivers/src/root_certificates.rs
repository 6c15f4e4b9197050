//! The certificates that this system trusts, for outgoing TLS connections.

use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// The variable that names a file of certificates. It takes precedence over the paths below.
pub const CERT_FILE_VAR: &str = "SSL_CERT_FILE";
/// Where systems keep them.
const CA_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// Loads the certificates in `named`, or else those that the system trusts. The store is empty if none are found.
pub fn load_root_certificates(named: Option<&Path>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let own = std::env::var_os(CERT_FILE_VAR).map(PathBuf::from);
    let mut files = named.into_iter().chain(own.as_deref()).chain(CA_BUNDLES.iter().map(Path::new));
    if let Some(file) = files.find(|file| file.exists()) {
        let found = CertificateDer::pem_file_iter(file).into_iter().flatten().flatten();
        roots.add_parsable_certificates(found);
    }
    roots
}
