//! One HTTP connection to a daemon. [`DaemonHttpConnection`] owns the task that moves the bytes; dropping it ends the
//! task.

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

/// Time limit for connecting. A daemon on this machine takes less than a millisecond.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct DaemonHttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// Moves the bytes. Aborted on drop.
    connection_task: JoinHandle<()>,
}

impl DaemonHttpConnection {
    /// Whether the connection accepts another request.
    pub(super) fn is_open(&self) -> bool {
        self.sender.is_ready()
    }

    /// Sends a request and waits for the head of the response.
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

pub(super) async fn connect_with_timeout(host: &DaemonHost) -> anyhow::Result<DaemonHttpConnection> {
    match tokio::time::timeout(CONNECT_TIMEOUT, connect(host)).await {
        Ok(connection) => connection,
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
    // The error can be dropped: a broken connection also fails the sender and the response body.
    let connection_task = tokio::spawn(async move { drop(connection.with_upgrades().await) });
    Ok(DaemonHttpConnection { sender, connection_task })
}
