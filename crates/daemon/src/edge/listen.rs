//! Binding addresses. A socket file is private from its first moment; a stale one is replaced only when
//! nobody answers on it; and an address that other machines can reach is refused without TLS before anything is
//! bound. Nothing is accepted or printed here.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use qd_home::{ListenAddress, UrlHost};
use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{TcpListener, TcpSocket, UnixListener};
use tokio_rustls::TlsAcceptor;

use super::tls::ServerCertificate;

/// The longest path of a socket that the kernel takes, without its final NUL.
pub const SOCKET_PATH_MAX: usize = 107;
/// How many connections the kernel may queue until we accept them.
const BACKLOG: i32 = 1024;
/// The pause between attempts, and how many times the lock is tried while another daemon binds in the same folder.
const FOLDER_LOCK_STEP: Duration = Duration::from_millis(20);
const FOLDER_LOCK_TRIES: u32 = 100;

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// No address was given.
    #[error("there is no address to listen on; give --listen ADDR")]
    NoAddress,
    /// The path is longer than the kernel allows.
    #[error(
        "the socket path {path} is {length} bytes long and the kernel takes {SOCKET_PATH_MAX}; \
         choose a shorter --home DIR or --listen unix:PATH"
    )]
    PathTooLong {
        path: PathBuf,
        /// The length in bytes.
        length: usize,
    },
    /// Another daemon listens there.
    #[error("another daemon answers on unix:{0}")]
    InUse(PathBuf),
    /// There is another kind of file at this path, which is not ours to remove.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// The address can be reached from other machines, and there is no TLS.
    #[error(
        "{0} can be reached from other machines and so needs TLS: \
         give --tls-cert and --tls-key, or --tls self"
    )]
    NeedsTls(ListenAddress),
    /// The host name could not be resolved.
    #[error("could not find the host of {address}: {source}")]
    Unresolved { address: ListenAddress, source: io::Error },
    /// The kernel refused.
    #[error("could not listen on {address}: {source}")]
    Io { address: ListenAddress, source: io::Error },
}

/// An address that was checked and may be bound.
#[derive(Debug)]
pub(super) enum BindTarget {
    Unix(PathBuf),
    Tcp { host: UrlHost, addresses: Vec<SocketAddr> },
}

/// A bound address.
#[derive(Debug)]
pub(super) enum BoundListener {
    Unix(BoundUnixSocket),
    Tcp(BoundTcpPort),
}

/// A bound socket file. The file is removed before the socket closes: in the other order, another daemon could create
/// its own file in between, and we would remove that one.
#[derive(Debug)]
pub(super) struct BoundUnixSocket {
    file: SocketFile,
    pub(super) socket: UnixListener,
}

/// A bound port.
#[derive(Debug)]
pub(super) struct BoundTcpPort {
    pub(super) host: UrlHost,
    pub(super) local: SocketAddr,
    pub(super) socket: TcpListener,
    pub(super) tls: Option<TlsAcceptorDebug>,
}

/// A TLS acceptor with a debug form.
#[derive(Clone)]
pub(super) struct TlsAcceptorDebug(pub(super) TlsAcceptor);

impl fmt::Debug for TlsAcceptorDebug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsAcceptor")
    }
}

impl BoundListener {
    /// The URL of a TCP address. A client cannot dial a wildcard, so an allowed host name stands for it.
    pub(super) fn url(&self, allowed: Option<&UrlHost>) -> Option<String> {
        let Self::Tcp(listener) = self else { return None };
        let scheme = if listener.tls.is_some() { "https" } else { "http" };
        let host = allowed.filter(|_| is_wildcard(listener.local.ip())).unwrap_or(&listener.host);
        Some(format!("{scheme}://{host}:{}", listener.local.port()))
    }

    pub(super) fn announcement(&self) -> String {
        match self {
            Self::Unix(listener) => format!("listening on unix:{}", listener.file.path.display()),
            Self::Tcp(_) => format!("listening on {}", self.url(None).unwrap_or_default()),
        }
    }
}

/// Checks everything that can be checked without binding, and resolves host names.
pub(super) async fn check_addresses(
    addresses: &[ListenAddress],
    tls: bool,
) -> Result<Vec<BindTarget>, ListenError> {
    if addresses.is_empty() {
        return Err(ListenError::NoAddress);
    }
    let mut targets = Vec::new();
    for address in addresses {
        targets.push(match address {
            ListenAddress::Unix(path) => {
                let length = path.as_os_str().as_bytes().len();
                if length > SOCKET_PATH_MAX {
                    return Err(ListenError::PathTooLong { path: path.clone(), length });
                }
                BindTarget::Unix(path.clone())
            }
            ListenAddress::Tcp { host, port } => {
                let resolved = resolve_host(host, *port)
                    .await
                    .map_err(|source| ListenError::Unresolved { address: address.clone(), source })?;
                // A name may have several addresses. All of them must be allowed, because we bind whichever is free.
                if !tls && !resolved.iter().all(|address| address.ip().to_canonical().is_loopback()) {
                    return Err(ListenError::NeedsTls(address.clone()));
                }
                BindTarget::Tcp { host: host.clone(), addresses: resolved }
            }
        });
    }
    Ok(targets)
}

/// Binds all addresses. If one fails, those before it are closed again.
pub(super) fn bind_all(
    targets: Vec<BindTarget>,
    tls: Option<&ServerCertificate>,
) -> Result<Vec<BoundListener>, ListenError> {
    targets
        .into_iter()
        .map(|target| match target {
            BindTarget::Unix(path) => bind_unix(path).map(BoundListener::Unix),
            BindTarget::Tcp { host, addresses } => bind_tcp(host, &addresses, tls).map(BoundListener::Tcp),
        })
        .collect()
}

async fn resolve_host(host: &UrlHost, port: u16) -> io::Result<Vec<SocketAddr>> {
    match host {
        UrlHost::Ip(ip) => Ok(vec![SocketAddr::new(*ip, port)]),
        UrlHost::Name(name) => {
            let mut addresses: Vec<SocketAddr> =
                tokio::net::lookup_host((name.as_str(), port)).await?.collect();
            // IPv4 first, so that clients without IPv6 reach us too.
            addresses.sort_by_key(|address| address.is_ipv6());
            if addresses.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(addresses) }
        }
    }
}

fn bind_tcp(
    host: UrlHost,
    addresses: &[SocketAddr],
    tls: Option<&ServerCertificate>,
) -> Result<BoundTcpPort, ListenError> {
    let port = addresses.first().map_or(0, SocketAddr::port);
    let mut bound = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        bound = bind_port(*address);
        if bound.is_ok() {
            break;
        }
    }
    match bound {
        Ok((socket, local)) => {
            let tls = tls.map(|tls| TlsAcceptorDebug(TlsAcceptor::from(tls.config.clone())));
            Ok(BoundTcpPort { host, local, socket, tls })
        }
        Err(source) => Err(ListenError::Io { address: ListenAddress::Tcp { host, port }, source }),
    }
}

fn bind_port(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Without this, a restart would have to wait until the kernel has forgotten the previous daemon's connections.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let socket = socket.listen(BACKLOG.unsigned_abs())?;
    let local = socket.local_addr()?;
    Ok((socket, local))
}

fn bind_unix(path: PathBuf) -> Result<BoundUnixSocket, ListenError> {
    let failed = |source: io::Error| ListenError::Io { address: ListenAddress::Unix(path.clone()), source };
    // Between our bind and listen, or between finding a stale file and removing it, another daemon could judge or
    // remove the wrong file. The lock is on the folder itself, so that it leaves no file behind.
    let _lock = lock_folder_of(&path).map_err(failed)?;
    remove_stale_socket(&path)?;
    let socket = listen_privately(&path).map_err(failed)?;
    let file = SocketFile::of(path.clone()).map_err(failed)?;
    Ok(BoundUnixSocket { file, socket })
}

/// Binds a socket that only its owner can connect to, and listens on it. There must be nothing at the path.
pub(super) fn listen_privately(path: &Path) -> io::Result<UnixListener> {
    let socket = new_unix_socket()?;
    // On Linux the file gets the mode of the socket that is bound to it, so it is never looser than this, and the
    // umask, which belongs to the whole process, is left alone. Elsewhere this fails, and the folder's mode protects
    // the file.
    let private = rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR);
    if let Err(errno) = private {
        tracing::debug!(%errno, "could not set the mode of the socket before binding it");
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    if fs::symlink_metadata(path)?.permissions().mode() & 0o7777 != 0o600 {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    }
    rustix::net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

fn new_unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn lock_folder_of(path: &Path) -> io::Result<fs::File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = fs::File::open(folder)?;
    for _ in 0..FOLDER_LOCK_TRIES {
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(folder),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(FOLDER_LOCK_STEP),
            // A file system without locks: go on without.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOLCK) => return Ok(folder),
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process holds a lock on its folder"))
}

/// Removes a socket file on which nobody answers.
fn remove_stale_socket(path: &Path) -> Result<(), ListenError> {
    let failed =
        |source: io::Error| ListenError::Io { address: ListenAddress::Unix(path.to_owned()), source };
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {}
        Ok(_) => return Err(ListenError::NotASocket(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    }
    let probe = new_unix_socket().map_err(failed)?;
    match SocketAddrUnix::new(path).and_then(|address| rustix::net::connect(&probe, &address)) {
        // `AGAIN`: the queue of the socket is full, so its daemon is alive.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse(path.to_owned())),
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(failed),
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed(errno.into())),
    }
}

/// The file of a bound socket, removed with it if it is still the same file.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn of(path: PathBuf) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(&path)?;
        Ok(Self { path, device: metadata.dev(), inode: metadata.ino() })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let still_ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| metadata.dev() == self.device && metadata.ino() == self.inode);
        if still_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "could not remove the socket file");
        }
    }
}

/// Whether this stands for every address of the machine.
pub(super) fn is_wildcard(ip: IpAddr) -> bool {
    ip.to_canonical().is_unspecified()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_that_others_can_reach_is_refused_without_tls() {
        for text in ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "[::ffff:192.0.2.1]:80"] {
            let addresses = ["127.0.0.1:0".parse().unwrap(), text.parse().unwrap()];
            let error = check_addresses(&addresses, false).await.unwrap_err();
            assert!(matches!(error, ListenError::NeedsTls(_)), "{error}");
            assert!(error.to_string().contains("--tls self"), "{error}");
            check_addresses(&addresses, true).await.unwrap();
        }
        for text in ["127.0.0.1:0", "127.9.9.9:0", "[::1]:0", "[::ffff:127.0.0.1]:0", "localhost:0"] {
            check_addresses(&[text.parse().unwrap()], false).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_socket_path_too_long_for_the_kernel_is_a_clear_error() {
        let folder = tempfile::tempdir().unwrap();
        let room = SOCKET_PATH_MAX - folder.path().as_os_str().len() - 1;
        let longest = folder.path().join("x".repeat(room));
        drop(bind_unix(longest.clone()).unwrap());
        let longer = ListenAddress::Unix(folder.path().join("x".repeat(room + 1)));
        let error = check_addresses(&[longer], false).await.unwrap_err();
        assert!(error.to_string().contains("is 108 bytes long and the kernel takes 107"), "{error}");
    }

    #[tokio::test]
    async fn a_socket_file_is_private_and_goes_with_its_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qd.sock");
        let listener = bind_unix(path.clone()).unwrap();
        let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        drop(listener);
        assert!(!path.exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qd.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "what a killed daemon leaves behind");
        let first = bind_unix(path.clone()).unwrap();
        let error = bind_unix(path.clone()).unwrap_err();
        assert!(matches!(error, ListenError::InUse(_)), "{error}");
        assert!(error.to_string().contains("another daemon answers"), "{error}");
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        drop(first);
        drop(bind_unix(path).unwrap());
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_is_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qd.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(bind_unix(path.clone()), Err(ListenError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(bind_unix(link), Err(ListenError::NotASocket(_))));
    }

    #[tokio::test]
    async fn a_socket_file_that_somebody_replaced_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qd.sock");
        let listener = bind_unix(path.clone()).unwrap();
        fs::remove_file(&path).unwrap();
        let other = bind_unix(path.clone()).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(other);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn of_many_that_replace_one_stale_socket_exactly_one_gets_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qd.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let runtime = tokio::runtime::Handle::current();
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        let _inside = runtime.enter();
                        bind_unix(path.clone())
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
        assert!(results.iter().all(|result| matches!(result, Ok(_) | Err(ListenError::InUse(_)))));
    }
}
