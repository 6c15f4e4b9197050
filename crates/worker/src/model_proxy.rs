//! Lets an agent without network reach its model, and nothing else. The sandbox's init opens a port on the loopback
//! interface inside, and the keeper sends us the listener. We stand outside, so a connection that we accept there can go
//! on to the model. The agent finds the port in `HTTP_PROXY` and `HTTPS_PROXY`.
//!
//! - `forward`: one request of the agent.
//! - `upstream`: the way to the model, which may lead through the user's own proxy.
//!
//! Design: docs/design/agents-are-confined.md

mod forward;
mod upstream;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use qd_protocol::limits::{MODEL_CONNECTIONS_MAX, REQUEST_READ_S};
use qd_protocol::model_host::ModelHost;
use qd_protocol::sandbox_spec::SandboxSpec;
use qd_sandbox::receive_with_descriptors;
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use self::upstream::ModelUpstream;

/// The pause after the kernel failed to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves one agent.
#[derive(Debug)]
struct ModelProxy {
    hosts: Vec<ModelHost>,
    upstream: ModelUpstream,
    connections: Arc<Semaphore>,
}

/// Starts the proxy of an agent, if it is to have one. Returns the socket to which its keeper has to send the listener of
/// each sandbox. The proxy ends with the keeper.
pub(crate) fn start_model_proxy(
    sandbox: &SandboxSpec,
    variable: impl Fn(&str) -> Option<String>,
) -> io::Result<Option<OwnedFd>> {
    if !sandbox.has_model_proxy() {
        return Ok(None);
    }
    let hosts = sandbox.resolve_model_hosts(&variable);
    let connections = Arc::new(Semaphore::new(MODEL_CONNECTIONS_MAX));
    let proxy = Arc::new(ModelProxy { hosts, upstream: ModelUpstream::new(variable), connections });
    let (ours, theirs) = StdUnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let channel = UnixStream::from_std(ours)?;
    tokio::spawn(serve_sandboxes(proxy, channel));
    Ok(Some(theirs.into()))
}

/// Serves each sandbox whose listener arrives, until the keeper is gone.
async fn serve_sandboxes(proxy: Arc<ModelProxy>, channel: UnixStream) {
    let mut listener = JoinSet::new();
    loop {
        let receive = || receive_with_descriptors(&channel, &mut [0; 1], RecvFlags::DONTWAIT);
        match channel.async_io(Interest::READABLE, receive).await {
            Ok((0, _)) | Err(_) => return,
            Ok((_, descriptors)) => {
                for descriptor in descriptors {
                    // The sandbox before it has ended.
                    listener.shutdown().await;
                    listener.spawn(serve_listener(Arc::clone(&proxy), descriptor));
                }
            }
        }
    }
}

async fn serve_listener(proxy: Arc<ModelProxy>, descriptor: OwnedFd) {
    let listener = std::net::TcpListener::from(descriptor);
    let listener = listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener));
    let listener = match listener {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "the proxy to an agent's model could not be started"),
    };
    loop {
        let connections = Arc::clone(&proxy.connections);
        let Ok(permit) = connections.acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(serve_connection(Arc::clone(&proxy), stream, permit))),
            Err(error) => {
                tracing::warn!(%error, "an agent's connection to its model could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves one connection of the agent. It ends with either of its ends.
async fn serve_connection(proxy: Arc<ModelProxy>, stream: TcpStream, permit: OwnedSemaphorePermit) {
    // Without it, data only arrives later.
    let _undelayed = stream.set_nodelay(true);
    let permit = Arc::new(permit);
    let service = service_fn(move |request| {
        let (proxy, permit) = (Arc::clone(&proxy), Arc::clone(&permit));
        async move { Ok::<_, std::convert::Infallible>(proxy.answer(request, permit).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(REQUEST_READ_S))
        .preserve_header_case(true)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "an agent's connection to its model has ended");
    }
}
