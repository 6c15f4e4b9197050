//! One connection to a daemon. Whoever holds the [`Wire`] owns the task that moves its bytes, and ends it by dropping
//! it.

use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;

use super::host::Host;
use super::tls::Trust;

/// How long a connection may take to be made. A daemon on this machine takes less than a millisecond.
const DIAL: Duration = Duration::from_secs(10);

/// An open connection.
#[derive(Debug)]
pub(super) struct Wire {
    sender: SendRequest<Full<Bytes>>,
    /// Moves the bytes; ended with us.
    mover: JoinHandle<()>,
}

impl Wire {
    /// Whether it still takes a request.
    pub(super) fn is_open(&self) -> bool {
        self.sender.is_ready()
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        self.sender.ready().await?;
        self.sender.send_request(request).await
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.mover.abort();
    }
}

/// Connects.
pub(super) async fn dial(host: &Host) -> anyhow::Result<Wire> {
    match tokio::time::timeout(DIAL, connect(host)).await {
        Ok(wire) => wire,
        Err(_) => bail!("no connection within {} s", DIAL.as_secs()),
    }
}

async fn connect(host: &Host) -> anyhow::Result<Wire> {
    match host {
        Host::Unix(path) => wire(UnixStream::connect(path).await?).await,
        Host::Tcp { authority, tls } => {
            let stream = TcpStream::connect(authority).await?;
            stream.set_nodelay(true)?;
            match tls {
                true => wire(Trust::from_environment()?.shake_hands(host, stream).await?).await,
                false => wire(stream).await,
            }
        }
    }
}

async fn wire(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> anyhow::Result<Wire> {
    let (sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.context("the peer does not speak HTTP")?;
    // A broken connection is told to whoever waits on the sender or the body; there is nobody else to tell.
    let mover = tokio::spawn(async move { drop(connection.with_upgrades().await) });
    Ok(Wire { sender, mover })
}
