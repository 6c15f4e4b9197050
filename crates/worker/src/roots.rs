//! The certificates that this system trusts, for whoever dials out by TLS.

use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// The variable that names them; it goes before the places below.
pub const NAMED_BY: &str = "SSL_CERT_FILE";
/// Where systems keep them.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// The certificates in this file, or those that the system trusts; none, if it keeps them where we do not look.
pub fn roots(named: Option<&Path>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let own = std::env::var_os(NAMED_BY).map(PathBuf::from);
    let mut files = named.into_iter().chain(own.as_deref()).chain(BUNDLES.iter().map(Path::new));
    if let Some(file) = files.find(|file| file.exists()) {
        let found = CertificateDer::pem_file_iter(file).into_iter().flatten().flatten();
        roots.add_parsable_certificates(found);
    }
    roots
}
