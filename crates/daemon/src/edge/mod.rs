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

mod answer;
mod body;
pub mod error;
pub mod guard;
pub mod listen;
pub mod serve;
pub mod tls;
mod upgrade;

use std::path::PathBuf;
use std::sync::Arc;

pub use body::read_whole;
pub use error::{Json, OptionalJson, Raw, Refusal};
pub use guard::Peer;
pub(crate) use guard::{Holder, is_tool_path};
pub use listen::Address;
pub use serve::{Limits, serve};
pub use tls::Fingerprint;
pub(crate) use upgrade::{Line, Upgrade};

use crate::home::{Home, HomeError};
use crate::workers::{Capabilities, Door, Tokens};
use guard::{BadHost, Guard};
use listen::{ListenError, Listener};
use tls::TlsError;

/// What the edge is asked to be.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Where to listen.
    pub listen: Vec<Address>,
    /// Names, besides ours, that a `Host` header may have.
    pub allow_host: Vec<String>,
    /// The certificate for TCP; without one only loopback addresses are listened on.
    pub tls: Option<Certificate>,
    /// How much a client may take.
    pub limits: Limits,
}

/// Which certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Certificate {
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
pub struct Bound {
    listeners: Vec<Listener>,
    guard: Guard,
    limits: Limits,
    fingerprint: Option<Fingerprint>,
    door: Option<Door>,
}

impl Bound {
    /// One line per address, as the contract has it: `listening on unix:PATH` or `listening on http://HOST:PORT`.
    pub fn lines(&self) -> Vec<String> {
        self.listeners.iter().map(Listener::line).collect()
    }

    /// Of the certificate that TCP is served with, for people to compare.
    pub fn fingerprint(&self) -> Option<&Fingerprint> {
        self.fingerprint.as_ref()
    }

    /// Where a worker on another machine would join, if it can.
    pub(crate) fn door(&self) -> Option<Door> {
        self.door.clone()
    }

    /// Where somebody on this machine finds us without a certificate: a socket, or else a port.
    pub(crate) fn host(&self) -> Option<String> {
        let plain = |listener: &Listener| match listener {
            Listener::Unix(door) => Some((0, format!("unix:{}", door.path().display()))),
            Listener::Tcp(door) if door.tls.is_none() => Some((1, format!("http://{}", door.local))),
            Listener::Tcp(_) => None,
        };
        self.listeners.iter().filter_map(plain).min().map(|(_, host)| host)
    }

    /// Lets sessions in, to their tools, which bear one of these.
    pub(crate) fn with_capabilities(self, capabilities: Capabilities) -> Self {
        Self { guard: self.guard.with_capabilities(capabilities), ..self }
    }

    /// Lets those in, to work, who bear one of these.
    pub(crate) fn with_worker_tokens(self, tokens: Arc<Tokens>) -> Self {
        Self { guard: self.guard.with_worker_tokens(tokens), ..self }
    }
}

/// Binds every address, or none: what can be refused is refused before anything is bound. The home must be prepared.
pub async fn open(home: &Home, options: Options) -> Result<Bound, EdgeError> {
    let Options { listen, allow_host, tls, limits } = options;
    let allowed = guard::allowed_hosts(&allow_host)?;
    let targets = listen::check(&listen, tls.is_some()).await?;
    let token = home.token()?;
    let self_made = tls == Some(Certificate::SelfSigned);
    let tls = match tls {
        None => None,
        Some(Certificate::SelfSigned) => Some(tls::self_signed(home, &tls::names(&listen, &allowed))?),
        Some(Certificate::Files { cert, key }) => Some(tls::from_files(&cert, &key)?),
    };
    let listeners = listen::bind(targets, tls.as_ref())?;
    let fingerprint = tls.map(|tls| tls.fingerprint);
    let url = listeners.iter().find_map(|listener| listener.url(allowed.first()));
    let shown = fingerprint.filter(|_| self_made);
    let door = url.map(|url| Door { url, fingerprint: shown.map(|fingerprint| fingerprint.to_string()) });
    let guard = Guard::new(&token, &listeners, allowed);
    Ok(Bound { listeners, guard, limits, fingerprint, door })
}
