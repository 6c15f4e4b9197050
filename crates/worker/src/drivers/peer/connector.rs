//! How a worker is reached: its address, what lets us in there, and the words for whoever has to see to it that it can
//! be reached.

use std::fmt;

use qd_catalog::{PeerAddress, WORKER_TOKEN};
use qd_link::PlainClient;
use qd_link::socket::{ByteStream, ClientUpgrade, SocketError};
use qd_protocol::manifest::Manifest;
use qd_protocol::text::escaped_head;
use qd_protocol::worker::AgentSpec;
use tokio::net::UnixStream;

use crate::drivers::dialer::RemoteAgentDialer;
use crate::root_certificates::CERT_FILE_VAR;

/// What is shown of the words with which an upgrade is refused.
const SHOWN_MAX: usize = 300;

/// A connection to a worker.
pub(super) type PeerConnection = PlainClient<Box<dyn ByteStream>>;

/// How a worker is reached.
pub(super) struct PeerConnector {
    address: PeerAddress,
    token: Option<String>,
    dialer: RemoteAgentDialer,
}

impl PeerConnector {
    /// As the manifest says, with what came with the session.
    pub(super) fn from_spec(spec: &AgentSpec, manifest: &Manifest) -> Result<Self, String> {
        let address = manifest.address().ok_or_else(|| "its manifest has no address".to_owned())?;
        let address = PeerAddress::parse(address).map_err(|error| error.to_string())?;
        // What comes with the session wins over what every session gets.
        let variable = |name: &str| {
            let value = spec.env.get(name).or_else(|| manifest.startup.env.get(name));
            value.map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let token = variable(WORKER_TOKEN);
        if token.is_none() && !address.is_local() {
            return Err(format!(
                "the worker at {address} is on another machine, where everybody needs a token: give the session \
                 {WORKER_TOKEN}"
            ));
        }
        Ok(Self { address, token, dialer: RemoteAgentDialer::new(variable(CERT_FILE_VAR).map(Into::into)) })
    }

    /// Connects, or says what is in the way.
    pub(super) async fn connect(&self) -> Result<PeerConnection, String> {
        let wire: Box<dyn ByteStream> = match &self.address {
            PeerAddress::Port { tls, host, port, .. } => {
                self.dialer.dial(host, *port, *tls).await.map_err(|cause| self.unreachable_message(&cause))?
            }
            PeerAddress::Socket(path) => {
                let stream = UnixStream::connect(path).await;
                Box::new(stream.map_err(|cause| self.unreachable_message(&cause.to_string()))?)
            }
        };
        let upgrade = ClientUpgrade {
            host: self.address.authority(),
            path: self.address.path().to_owned(),
            subprotocol: None,
            token: self.token.clone(),
        };
        PlainClient::connect_with(wire, &upgrade).await.map_err(|error| self.refusal_message(&error))
    }

    fn unreachable_message(&self, cause: &str) -> String {
        format!("the worker at {self} cannot be reached: {cause}; is it running?")
    }

    fn refusal_message(&self, error: &SocketError) -> String {
        match error {
            SocketError::Refused { status: status @ (401 | 403), .. } => match self.token {
                None => format!(
                    "the worker at {self} answered HTTP {status}: it wants a token; give the session {WORKER_TOKEN}"
                ),
                Some(_) => format!(
                    "the worker at {self} answered HTTP {status}: the value of {WORKER_TOKEN} was not taken"
                ),
            },
            SocketError::Refused { status, reason } => {
                let reason = escaped_head(reason.trim(), SHOWN_MAX);
                format!("{self} answered HTTP {status} {reason}: is that a worker?")
            }
            error => format!("{self} does not answer as a worker does: {error}"),
        }
    }
}

impl fmt::Display for PeerConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}
