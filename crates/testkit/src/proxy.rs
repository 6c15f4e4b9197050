//! A TCP proxy that misbehaves on command: it passes, holds or cuts all connections. It knows nothing of the traffic.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProxyMode {
    /// Traffic is passed on.
    Pass,
    /// Connections stay open, but nothing passes; new ones are accepted and never answered. This simulates a lost
    /// network.
    Hold,
    /// Connections are closed at once, and so are new ones. This simulates a lost machine.
    Cut,
}

/// A proxy in front of one address. Dropping it ends the proxy.
#[derive(Debug)]
pub struct TestProxy {
    address: SocketAddr,
    mode: watch::Sender<ProxyMode>,
    target: watch::Sender<SocketAddr>,
    accept: JoinHandle<()>,
}

impl TestProxy {
    /// Starts a proxy that passes everything on.
    pub async fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let address = listener.local_addr().expect("it is bound");
        let (mode_sender, mode) = watch::channel(ProxyMode::Pass);
        let (target, targets) = watch::channel(target);
        let accept = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(relay_connection(client, *targets.borrow(), mode.clone()));
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, mode: mode_sender, target, accept }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Redirects new connections, for a restarted daemon that may have another port.
    pub fn set_target(&self, target: SocketAddr) {
        self.target.send_replace(target);
    }

    /// Passes everything on.
    pub fn pass(&self) {
        self.mode.send_replace(ProxyMode::Pass);
    }

    /// Holds all traffic, without either end noticing.
    pub fn hold(&self) {
        self.mode.send_replace(ProxyMode::Hold);
    }

    /// Closes every connection, and every new one.
    pub fn cut(&self) {
        self.mode.send_replace(ProxyMode::Cut);
    }
}

impl Drop for TestProxy {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn relay_connection(client: TcpStream, target: SocketAddr, mode: watch::Receiver<ProxyMode>) {
    let mut cut = mode.clone();
    let relay = async {
        wait_until_passing(&mut mode.clone()).await;
        let Ok(server) = TcpStream::connect(target).await else { return };
        // The proxy must not delay small packets.
        let _undelayed = (client.set_nodelay(true), server.set_nodelay(true));
        let ((client_reader, client_writer), (server_reader, server_writer)) =
            (client.into_split(), server.into_split());
        tokio::join!(
            copy(client_reader, server_writer, mode.clone()),
            copy(server_reader, client_writer, mode.clone()),
        );
    };
    tokio::select! {
        () = relay => {}
        _ = cut.wait_for(|current| *current == ProxyMode::Cut) => {}
    }
}

/// Copies one direction, until either end closes.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut mode: watch::Receiver<ProxyMode>,
) {
    let mut piece = vec![0; 16 << 10];
    loop {
        wait_until_passing(&mut mode).await;
        let Ok(read) = from.read(&mut piece).await else { break };
        // Data that was read while the proxy holds is held too.
        wait_until_passing(&mut mode).await;
        if read == 0 || to.write_all(&piece[..read]).await.is_err() {
            break;
        }
    }
    let _closed = to.shutdown().await;
}

async fn wait_until_passing(mode: &mut watch::Receiver<ProxyMode>) {
    if mode.wait_for(|current| *current == ProxyMode::Pass).await.is_err() {
        // The proxy is dropped, and its connections end with it.
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that echoes everything.
    async fn echo_server() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut reader, mut writer) = stream.into_split();
                    tokio::io::copy(&mut reader, &mut writer).await
                });
            }
        });
        address
    }

    #[tokio::test]
    async fn it_passes_holds_and_cuts() {
        let proxy = TestProxy::start(echo_server().await).await;
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        let mut buffer = [0; 2];
        stream.write_all(b"hi").await.unwrap();
        stream.read_exact(&mut buffer).await.unwrap();
        proxy.hold();
        stream.write_all(b"ho").await.unwrap();
        let mut held = TcpStream::connect(proxy.address()).await.unwrap();
        held.write_all(b"ha").await.unwrap();
        proxy.pass();
        stream.read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"ho", "what was held is not lost");
        held.read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"ha");
        proxy.cut();
        assert!(matches!(stream.read(&mut buffer).await, Ok(0) | Err(_)));
        let mut late = TcpStream::connect(proxy.address()).await.unwrap();
        assert!(matches!(late.read(&mut buffer).await, Ok(0) | Err(_)));
    }
}
