//! One HTTP connection to a daemon. [`DaemonHttpConnection`] owns the task that moves the bytes; dropping it ends the
//! task.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use qd_link::socket_path::connect_to_socket;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::host::DaemonHost;
use super::tls::CertificateTrust;

/// Time limit for connecting. A daemon on this machine takes less than a millisecond. A request gives up earlier, because
/// the daemon shows no sign of life.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Between two attempts to connect to a daemon that has not accepted so many connections that the kernel takes no more.
const FULL_QUEUE_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct DaemonHttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// Moves the bytes. Aborted on drop.
    connection_task: JoinHandle<()>,
    /// The process that listens, if it is on this machine.
    peer_pid: Option<u32>,
}

impl DaemonHttpConnection {
    /// The pid of the daemon, known over a unix socket.
    pub(super) fn peer_pid(&self) -> Option<u32> {
        self.peer_pid
    }

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
        DaemonHost::Unix(path) => {
            let stream = connect_unix(path).await?;
            let pid = stream.peer_cred().ok().and_then(|credentials| credentials.pid());
            let peer_pid = pid.and_then(|pid| u32::try_from(pid).ok());
            http_handshake(stream, peer_pid).await
        }
        DaemonHost::Tcp { authority, tls } => {
            let stream = TcpStream::connect(authority).await?;
            stream.set_nodelay(true)?;
            match tls {
                true => {
                    let stream = CertificateTrust::from_environment()?.handshake(host, stream).await?;
                    http_handshake(stream, None).await
                }
                false => http_handshake(stream, None).await,
            }
        }
    }
}

/// Connects to a socket. If its queue is full, the daemon lives but does not accept connections at the moment.
async fn connect_unix(path: &Path) -> std::io::Result<UnixStream> {
    loop {
        match connect_to_socket(path).await {
            Err(error) if error.kind() == ErrorKind::WouldBlock => sleep(FULL_QUEUE_INTERVAL).await,
            connected => return connected,
        }
    }
}

async fn http_handshake(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer_pid: Option<u32>,
) -> anyhow::Result<DaemonHttpConnection> {
    let (sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.context("the peer does not speak HTTP")?;
    // The error can be dropped: a broken connection also fails the sender and the response body.
    let connection_task = tokio::spawn(async move { drop(connection.with_upgrades().await) });
    Ok(DaemonHttpConnection { sender, connection_task, peer_pid })
}
