//! The outer edge of the daemon: everything between a socket and a handler. Only admitted requests get past it, and a
//! client cannot use more than its share of resources, whatever it sends or fails to send.
//!
//! In reading order:
//! - [`listen`]: binding addresses. `session_sockets`: sockets that come and go with sessions.
//! - [`tls`]: the certificate for addresses that other machines can reach.
//! - [`guard`]: which requests are admitted; deny by default.
//! - [`mod@serve`]: accept loops, limits, shutdown.
//! - `connection_limit`: how many connections may be open, and how many of them for streams.
//! - `rejection`: the answer to a connection over the limit.
//! - `guarded_router`: one request's path through the guard to the router, and its response.
//! - `body`: reading a request's body within its limits.
//! - [`error`]: errors and JSON on the wire.
//! - `upgrade`: requests that ask for a WebSocket.
//!
//! The edge knows sessions by their ids alone, and no journal.

mod body;
mod connection_limit;
pub mod error;
pub mod guard;
mod guarded_router;
pub mod listen;
mod rejection;
pub mod serve;
mod session_sockets;
pub mod tls;
mod upgrade;

use std::path::PathBuf;
use std::sync::Arc;

pub use body::read_whole_body;
pub(crate) use connection_limit::StreamPermit;
pub(crate) use error::internal_error;
pub use error::{HttpError, Json, OptionalJson, RawBody};
pub(crate) use guard::BearerSession;
pub use guard::ConnectionPeer;
pub use serve::{EdgeLimits, serve};
pub(crate) use session_sockets::SessionSockets;
pub use tls::CertificateFingerprint;
pub(crate) use upgrade::{UpgradedConnection, WebSocketRequest};

use crate::client_tokens::ClientTokenStore;
use crate::workers::{JoinAddress, SessionTokens, WorkerTokenStore};
use guard::{BadHost, RequestGuard};
use listen::{BoundListener, ListenError};
use qd_home::{DaemonHome, HomeError, ListenAddress};
use tls::TlsError;

/// The options of the edge.
#[derive(Debug, Clone, Default)]
pub struct EdgeOptions {
    pub listen: Vec<ListenAddress>,
    /// Names that a `Host` header may have besides our own.
    pub allow_host: Vec<String>,
    /// The certificate for TCP. Without one, only loopback addresses are allowed.
    pub tls: Option<CertificateSource>,
    pub limits: EdgeLimits,
}

/// Where the certificate comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateSource {
    /// `--tls self`: a self-signed certificate, stored in the home.
    SelfSigned,
    /// `--tls-cert` and `--tls-key`.
    Files {
        /// PEM, the leaf certificate first.
        cert: PathBuf,
        /// PEM.
        key: PathBuf,
    },
}

/// Why the edge could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// The token could not be read or created.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// An address could not be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An `--allow-host` is not a valid host.
    #[error(transparent)]
    AllowHost(#[from] BadHost),
}

/// The bound addresses. Nothing is accepted yet. Dropping this closes the sockets and removes their files.
#[derive(Debug)]
pub struct BoundEdge {
    listeners: Vec<BoundListener>,
    guard: RequestGuard,
    limits: EdgeLimits,
    session_sockets: SessionSockets,
    fingerprint: Option<CertificateFingerprint>,
    join_address: Option<JoinAddress>,
}

impl BoundEdge {
    /// One line per address, as the contract has it: `listening on unix:PATH` or `listening on http://HOST:PORT`.
    pub fn announcements(&self) -> Vec<String> {
        self.listeners.iter().map(BoundListener::announcement).collect()
    }

    /// The fingerprint of the certificate that TCP is served with, for people to compare.
    pub fn fingerprint(&self) -> Option<&CertificateFingerprint> {
        self.fingerprint.as_ref()
    }

    /// The address at which a worker on another machine can join, if there is one.
    pub(crate) fn join_address(&self) -> Option<JoinAddress> {
        self.join_address.clone()
    }

    /// Admits requests with a session token to the tools.
    pub(crate) fn with_session_tokens(self, tokens: SessionTokens) -> Self {
        Self { guard: self.guard.with_session_tokens(tokens), ..self }
    }

    /// Serves the sockets of sessions too.
    pub(crate) fn with_session_sockets(self, session_sockets: SessionSockets) -> Self {
        Self { session_sockets, ..self }
    }

    /// Admits requests with the token of a client.
    pub(crate) fn with_client_tokens(self, tokens: Arc<ClientTokenStore>) -> Self {
        Self { guard: self.guard.with_client_tokens(tokens), ..self }
    }

    /// Admits requests with a worker token to the routes for workers.
    pub(crate) fn with_worker_tokens(self, tokens: Arc<WorkerTokenStore>) -> Self {
        Self { guard: self.guard.with_worker_tokens(tokens), ..self }
    }
}

/// Binds every address, or none: everything that can be checked is checked before anything is bound. The home must be
/// prepared.
pub async fn open(home: &DaemonHome, options: EdgeOptions) -> Result<BoundEdge, EdgeError> {
    let EdgeOptions { listen, allow_host, tls, limits } = options;
    let allowed = guard::allowed_hosts(&allow_host)?;
    let targets = listen::check_addresses(&listen, tls.is_some()).await?;
    let token = home.token()?;
    let is_self_signed = tls == Some(CertificateSource::SelfSigned);
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
    let shown_fingerprint = fingerprint.filter(|_| is_self_signed);
    let join_address = url.map(|url| JoinAddress {
        url,
        fingerprint: shown_fingerprint.map(|fingerprint| fingerprint.to_string()),
    });
    let guard = RequestGuard::new(&token, &listeners, allowed);
    Ok(BoundEdge {
        listeners,
        guard,
        limits,
        session_sockets: SessionSockets::default(),
        fingerprint,
        join_address,
    })
}
