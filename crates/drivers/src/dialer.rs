//! Connections to remote agents: plain or TLS, with keepalive so that a dead machine is noticed. What is sent over them
//! is up to the driver.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use qd_link::socket::ByteStream;
use rustix::net::sockopt;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::root_certificates::{CERT_FILE_VAR, load_root_certificates};

/// The limit on opening a connection.
pub(crate) const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence after which TCP keepalive probes begin. An agent may think for an hour without sending anything, so silence
/// alone does not break a connection; probes without a reply do.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// The time between two probes.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
/// The number of unanswered probes that break a connection.
const KEEPALIVE_TRIES: u32 = 3;

/// Dials remote agents.
pub(crate) struct RemoteAgentDialer {
    /// A file of certificates to trust instead of the system's.
    root_certificates: Option<PathBuf>,
    tls_config: OnceLock<Arc<ClientConfig>>,
}

impl RemoteAgentDialer {
    /// Trusts the certificates in this file, or else those that the system trusts.
    pub(crate) fn new(root_certificates: Option<PathBuf>) -> Self {
        Self { root_certificates, tls_config: OnceLock::new() }
    }

    /// Connects within [`DIAL_TIMEOUT`]. The error is a message for people.
    pub(crate) async fn dial(&self, host: &str, port: u16, tls: bool) -> Result<Box<dyn ByteStream>, String> {
        let dialled = tokio::time::timeout(DIAL_TIMEOUT, self.connect(host, port, tls)).await;
        dialled.map_err(|_| format!("no connection within {} s", DIAL_TIMEOUT.as_secs()))?
    }

    async fn connect(&self, host: &str, port: u16, tls: bool) -> Result<Box<dyn ByteStream>, String> {
        let stream = TcpStream::connect((host, port)).await.map_err(|cause| cause.to_string())?;
        // Failing to set these options is not fatal: data and failures only arrive later.
        let _undelayed = stream.set_nodelay(true);
        let _watched = set_keepalive(&stream);
        if !tls {
            return Ok(Box::new(stream));
        }
        let name = ServerName::try_from(host.to_owned()).map_err(|cause| cause.to_string())?;
        let config = self.tls_config.get_or_init(|| Arc::new(self.make_tls_config()));
        let stream = TlsConnector::from(Arc::clone(config)).connect(name, stream).await;
        stream
            .map(|stream| Box::new(stream) as Box<dyn ByteStream>)
            .map_err(|cause| format!("{cause}; set {CERT_FILE_VAR} to a file with the certificates to trust"))
    }

    fn make_tls_config(&self) -> ClientConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring has the ciphers of both versions")
            .with_root_certificates(load_root_certificates(self.root_certificates.as_deref()))
            .with_no_client_auth()
    }
}

fn set_keepalive(stream: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_TRIES)
}
