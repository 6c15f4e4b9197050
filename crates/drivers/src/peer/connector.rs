//! How a foreign worker is reached: its address, its token, and error messages for the person who has to make it
//! reachable.

use std::fmt;

use qd_catalog::{PeerAddress, WORKER_TOKEN};
use qd_link::PlainClient;
use qd_link::socket::{ByteStream, ClientUpgrade, SocketError};
use qd_protocol::manifest::Manifest;
use qd_protocol::text::escaped_head;
use qd_protocol::worker::AgentSpec;
use tokio::net::UnixStream;

use crate::dialer::RemoteAgentDialer;
use crate::root_certificates::CERT_FILE_VAR;

/// The most bytes shown of a refusal's text.
const SHOWN_MAX: usize = 300;

pub(super) type PeerConnection = PlainClient<Box<dyn ByteStream>>;

/// Connects to one worker.
pub(super) struct PeerConnector {
    address: PeerAddress,
    token: Option<String>,
    dialer: RemoteAgentDialer,
}

impl PeerConnector {
    /// Uses the address of the manifest and the variables of the session.
    pub(super) fn from_spec(spec: &AgentSpec, manifest: &Manifest) -> Result<Self, String> {
        let address = manifest.address().ok_or_else(|| "its manifest has no address".to_owned())?;
        let address = PeerAddress::parse(address).map_err(|error| error.to_string())?;
        // The session's variables take precedence over the manifest's.
        let variable = |name: &str| {
            let value = spec.env.get(name).or_else(|| manifest.startup.env.get(name));
            value.map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let token = variable(WORKER_TOKEN);
        if token.is_none() && !address.is_local() {
            return Err(format!(
                "the worker at {address} is on another machine, which requires a token: give the session \
                 {WORKER_TOKEN}"
            ));
        }
        Ok(Self { address, token, dialer: RemoteAgentDialer::new(variable(CERT_FILE_VAR).map(Into::into)) })
    }

    /// Connects, or returns a message that says what is wrong.
    pub(super) async fn connect(&self) -> Result<PeerConnection, String> {
        let stream: Box<dyn ByteStream> = match &self.address {
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
        PlainClient::connect_with(stream, &upgrade).await.map_err(|error| self.refusal_message(&error))
    }

    fn unreachable_message(&self, cause: &str) -> String {
        format!("the worker at {self} cannot be reached: {cause}; is it running?")
    }

    fn refusal_message(&self, error: &SocketError) -> String {
        match error {
            SocketError::Refused { status: status @ (401 | 403), .. } => match self.token {
                None => format!(
                    "the worker at {self} answered HTTP {status}: it requires a token; give the session {WORKER_TOKEN}"
                ),
                Some(_) => format!(
                    "the worker at {self} answered HTTP {status}: it did not accept the value of {WORKER_TOKEN}"
                ),
            },
            SocketError::Refused { status, reason } => {
                let reason = escaped_head(reason.trim(), SHOWN_MAX);
                format!("{self} answered HTTP {status} {reason}: is that a worker?")
            }
            error => format!("{self} does not answer like a worker: {error}"),
        }
    }
}

impl fmt::Display for PeerConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}
