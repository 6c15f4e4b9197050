//! Connections to agents that are elsewhere: plain or by TLS, and watched, so that a machine that is gone is noticed. What is
//! said on them is not known here.

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

/// How long a connection may take to be made.
pub(crate) const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence after which a peer is asked whether it is still there. An agent may think for an hour and say nothing, so
/// silence alone breaks no connection; a machine that is gone does not answer, which does.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// Between two such questions.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
/// Questions without an answer that break a connection.
const KEEPALIVE_TRIES: u32 = 3;

/// Dials agents that are elsewhere.
pub(crate) struct RemoteAgentDialer {
    /// Trusted in place of what the system trusts.
    root_certificates: Option<PathBuf>,
    tls_config: OnceLock<Arc<ClientConfig>>,
}

impl RemoteAgentDialer {
    /// One that trusts the certificates in this file, or those that the system does.
    pub(crate) fn new(root_certificates: Option<PathBuf>) -> Self {
        Self { root_certificates, tls_config: OnceLock::new() }
    }

    /// Connects within [`DIAL`], or says why not.
    pub(crate) async fn dial(&self, host: &str, port: u16, tls: bool) -> Result<Box<dyn ByteStream>, String> {
        let dialled = tokio::time::timeout(DIAL_TIMEOUT, self.connect(host, port, tls)).await;
        dialled.map_err(|_| format!("no connection within {} s", DIAL_TIMEOUT.as_secs()))?
    }

    async fn connect(&self, host: &str, port: u16, tls: bool) -> Result<Box<dyn ByteStream>, String> {
        let stream = TcpStream::connect((host, port)).await.map_err(|cause| cause.to_string())?;
        // Without them all goes on as well, only later.
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
            .map_err(|cause| format!("{cause}; {CERT_FILE_VAR} may name a file of the certificates to trust"))
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
