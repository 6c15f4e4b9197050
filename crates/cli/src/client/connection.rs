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

use super::host::DaemonHost;
use super::tls::CertificateTrust;

/// How long a connection may take to be made. A daemon on this machine takes less than a millisecond.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// An open connection.
#[derive(Debug)]
pub(super) struct DaemonHttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// Moves the bytes; ended with us.
    connection_task: JoinHandle<()>,
}

impl DaemonHttpConnection {
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

impl Drop for DaemonHttpConnection {
    fn drop(&mut self) {
        self.connection_task.abort();
    }
}

/// Connects.
pub(super) async fn connect_with_timeout(host: &DaemonHost) -> anyhow::Result<DaemonHttpConnection> {
    match tokio::time::timeout(CONNECT_TIMEOUT, connect(host)).await {
        Ok(wire) => wire,
        Err(_) => bail!("no connection within {} s", CONNECT_TIMEOUT.as_secs()),
    }
}

async fn connect(host: &DaemonHost) -> anyhow::Result<DaemonHttpConnection> {
    match host {
        DaemonHost::Unix(path) => http_handshake(UnixStream::connect(path).await?).await,
        DaemonHost::Tcp { authority, tls } => {
            let stream = TcpStream::connect(authority).await?;
            stream.set_nodelay(true)?;
            match tls {
                true => {
                    http_handshake(CertificateTrust::from_environment()?.handshake(host, stream).await?).await
                }
                false => http_handshake(stream).await,
            }
        }
    }
}

async fn http_handshake(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> anyhow::Result<DaemonHttpConnection> {
    let (sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.context("the peer does not speak HTTP")?;
    // A broken connection is told to whoever waits on the sender or the body; there is nobody else to tell.
    let mover = tokio::spawn(async move { drop(connection.with_upgrades().await) });
    Ok(DaemonHttpConnection { sender, connection_task: mover })
}
