//! A TCP proxy that misbehaves when told to: it passes, holds or cuts whatever goes through it. It knows nothing of
//! what that is.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// What becomes of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProxyMode {
    /// They are passed on.
    Pass,
    /// They stay, and nothing gets through; new ones are taken and never answered. So looks a network that is gone.
    Hold,
    /// They end at once, and so do new ones. So looks a machine that is gone.
    Cut,
}

/// A proxy in front of one address. It ends with its value.
#[derive(Debug)]
pub struct TestProxy {
    address: SocketAddr,
    mode: watch::Sender<ProxyMode>,
    target: watch::Sender<SocketAddr>,
    accept: JoinHandle<()>,
}

impl TestProxy {
    /// One that passes everything on.
    pub async fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let address = listener.local_addr().expect("it is bound");
        let (mood, moods) = watch::channel(ProxyMode::Pass);
        let (target, targets) = watch::channel(target);
        let accept = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((caller, _)) = listener.accept().await {
                connections.spawn(relay_connection(caller, *targets.borrow(), moods.clone()));
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, mode: mood, target, accept }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on it leads elsewhere: a daemon that was started again may have another port.
    pub fn set_target(&self, target: SocketAddr) {
        self.target.send_replace(target);
    }

    /// Passes everything on.
    pub fn pass(&self) {
        self.mode.send_replace(ProxyMode::Pass);
    }

    /// Lets nothing through, and tells nobody.
    pub fn hold(&self) {
        self.mode.send_replace(ProxyMode::Hold);
    }

    /// Ends every connection, and every new one.
    pub fn cut(&self) {
        self.mode.send_replace(ProxyMode::Cut);
    }
}

impl Drop for TestProxy {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn relay_connection(caller: TcpStream, target: SocketAddr, moods: watch::Receiver<ProxyMode>) {
    let mut cut = moods.clone();
    let both = async {
        wait_until_passing(&mut moods.clone()).await;
        let Ok(callee) = TcpStream::connect(target).await else { return };
        // Who measures nothing here still must not be slowed down by us.
        let _undelayed = (caller.set_nodelay(true), callee.set_nodelay(true));
        let ((caller_reads, caller_writes), (callee_reads, callee_writes)) =
            (caller.into_split(), callee.into_split());
        tokio::join!(
            copy(caller_reads, callee_writes, moods.clone()),
            copy(callee_reads, caller_writes, moods.clone()),
        );
    };
    tokio::select! {
        () = both => {}
        _ = cut.wait_for(|mood| *mood == ProxyMode::Cut) => {}
    }
}

/// One direction, until either end has had enough.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut moods: watch::Receiver<ProxyMode>,
) {
    let mut piece = vec![0; 16 << 10];
    loop {
        wait_until_passing(&mut moods).await;
        let Ok(read) = from.read(&mut piece).await else { break };
        // What was read while it held is held too.
        wait_until_passing(&mut moods).await;
        if read == 0 || to.write_all(&piece[..read]).await.is_err() {
            break;
        }
    }
    let _closed = to.shutdown().await;
}

async fn wait_until_passing(moods: &mut watch::Receiver<ProxyMode>) {
    if moods.wait_for(|mood| *mood == ProxyMode::Pass).await.is_err() {
        // The proxy is gone, and its connections with it.
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that says everything again.
    async fn echo_server() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut reads, mut writes) = stream.into_split();
                    tokio::io::copy(&mut reads, &mut writes).await
                });
            }
        });
        address
    }

    #[tokio::test]
    async fn it_passes_holds_and_cuts() {
        let proxy = TestProxy::start(echo_server().await).await;
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        let mut word = [0; 2];
        stream.write_all(b"hi").await.unwrap();
        stream.read_exact(&mut word).await.unwrap();
        proxy.hold();
        stream.write_all(b"ho").await.unwrap();
        let mut held = TcpStream::connect(proxy.address()).await.unwrap();
        held.write_all(b"ha").await.unwrap();
        proxy.pass();
        stream.read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"ho", "what was held is not lost");
        held.read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"ha");
        proxy.cut();
        assert!(matches!(stream.read(&mut word).await, Ok(0) | Err(_)));
        let mut late = TcpStream::connect(proxy.address()).await.unwrap();
        assert!(matches!(late.read(&mut word).await, Ok(0) | Err(_)));
    }
}
