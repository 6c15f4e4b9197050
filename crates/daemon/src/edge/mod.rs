//! The outer edge of the daemon: everything between a socket and a handler. Nobody gets past it without being
//! allowed to, and nothing that a client sends or fails to send can take more than its share.
//!
//! In reading order:
//! - [`listen`]: addresses, and binding them.
//! - [`tls`]: the certificate for addresses that other machines can reach.
//! - [`guard`]: who may come in; deny by default.
//! - [`serve`]: accept loops, limits, shutdown.
//! - `answer`: the way of one request to the router and back.
//! - `body`: reading a request's body within its limits.
//! - [`error`]: refusals and JSON on the wire.
//! - `upgrade`: requests that ask for a WebSocket.
//!
//! It knows no session and no journal.

mod body;
pub mod error;
pub mod guard;
mod guarded_router;
pub mod listen;
pub mod serve;
pub mod tls;
mod upgrade;

use std::path::PathBuf;
use std::sync::Arc;

pub use body::read_whole_body;
pub use error::{HttpError, Json, OptionalJson, RawBody};
pub use guard::ConnectionPeer;
pub(crate) use guard::{BearerSession, is_tool_path};
pub use listen::ListenAddress;
pub use serve::{EdgeLimits, serve};
pub use tls::CertificateFingerprint;
pub(crate) use upgrade::{UpgradedConnection, WebSocketRequest};

use crate::home::{DaemonHome, HomeError};
use crate::workers::{JoinAddress, SessionTokens, WorkerTokenStore};
use guard::{BadHost, RequestGuard};
use listen::{BoundListener, ListenError};
use tls::TlsError;

/// What the edge is asked to be.
#[derive(Debug, Clone, Default)]
pub struct EdgeOptions {
    /// Where to listen.
    pub listen: Vec<ListenAddress>,
    /// Names, besides ours, that a `Host` header may have.
    pub allow_host: Vec<String>,
    /// The certificate for TCP; without one only loopback addresses are listened on.
    pub tls: Option<CertificateSource>,
    /// How much a client may take.
    pub limits: EdgeLimits,
}

/// Which certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateSource {
    /// `--tls self`: one of our own making, kept in the home.
    SelfSigned,
    /// `--tls-cert` and `--tls-key`.
    Files {
        /// PEM, the leaf first.
        cert: PathBuf,
        /// PEM.
        key: PathBuf,
    },
}

/// Why the edge could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// The token could not be had.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// An address could not be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An `--allow-host` that no `Host` header could ever have.
    #[error(transparent)]
    AllowHost(#[from] BadHost),
}

/// Everything bound and nothing accepted yet. Dropping it closes the sockets and removes their files.
#[derive(Debug)]
pub struct BoundEdge {
    listeners: Vec<BoundListener>,
    guard: RequestGuard,
    limits: EdgeLimits,
    fingerprint: Option<CertificateFingerprint>,
    join_address: Option<JoinAddress>,
}

impl BoundEdge {
    /// One line per address, as the contract has it: `listening on unix:PATH` or `listening on http://HOST:PORT`.
    pub fn announcements(&self) -> Vec<String> {
        self.listeners.iter().map(BoundListener::announcement).collect()
    }

    /// Of the certificate that TCP is served with, for people to compare.
    pub fn fingerprint(&self) -> Option<&CertificateFingerprint> {
        self.fingerprint.as_ref()
    }

    /// Where a worker on another machine would join, if it can.
    pub(crate) fn join_address(&self) -> Option<JoinAddress> {
        self.join_address.clone()
    }

    /// Where somebody on this machine finds us without a certificate: a socket, or else a port.
    pub(crate) fn local_address(&self) -> Option<String> {
        let plain = |listener: &BoundListener| match listener {
            BoundListener::Unix(door) => Some((0, format!("unix:{}", door.path().display()))),
            BoundListener::Tcp(door) if door.tls.is_none() => Some((1, format!("http://{}", door.local))),
            BoundListener::Tcp(_) => None,
        };
        self.listeners.iter().filter_map(plain).min().map(|(_, host)| host)
    }

    /// Lets sessions in, to their tools, which bear one of these.
    pub(crate) fn with_session_tokens(self, capabilities: SessionTokens) -> Self {
        Self { guard: self.guard.with_session_tokens(capabilities), ..self }
    }

    /// Lets those in, to work, who bear one of these.
    pub(crate) fn with_worker_tokens(self, tokens: Arc<WorkerTokenStore>) -> Self {
        Self { guard: self.guard.with_worker_tokens(tokens), ..self }
    }
}

/// Binds every address, or none: what can be refused is refused before anything is bound. The home must be prepared.
pub async fn open(home: &DaemonHome, options: EdgeOptions) -> Result<BoundEdge, EdgeError> {
    let EdgeOptions { listen, allow_host, tls, limits } = options;
    let allowed = guard::allowed_hosts(&allow_host)?;
    let targets = listen::check_addresses(&listen, tls.is_some()).await?;
    let token = home.token()?;
    let self_made = tls == Some(CertificateSource::SelfSigned);
    let tls = match tls {
        None => None,
        Some(CertificateSource::SelfSigned) => {
            Some(tls::self_signed(home, &tls::certificate_names(&listen, &allowed))?)
        }
        Some(CertificateSource::Files { cert, key }) => Some(tls::from_files(&cert, &key)?),
    };
    let listeners = listen::bind_all(targets, tls.as_ref())?;
    let fingerprint = tls.map(|tls| tls.fingerprint);
    let url = listeners.iter().find_map(|listener| listener.url(allowed.first()));
    let shown = fingerprint.filter(|_| self_made);
    let door =
        url.map(|url| JoinAddress { url, fingerprint: shown.map(|fingerprint| fingerprint.to_string()) });
    let guard = RequestGuard::new(&token, &listeners, allowed);
    Ok(BoundEdge { listeners, guard, limits, fingerprint, join_address: door })
}
