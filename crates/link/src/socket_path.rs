//! Paths of unix sockets below a home. The kernel takes short ones only, and a home may be nested deeply.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;

/// The longest socket path that the kernel accepts.
const SOCKET_PATH_MAX: usize = 107;

/// A path that is short enough for a socket. A long one is replaced by one through `/proc/self/fd`; the returned folder
/// must stay open until the path has been used.
pub fn short_socket_path(socket: &Path) -> io::Result<(PathBuf, Option<File>)> {
    if socket.as_os_str().len() <= SOCKET_PATH_MAX {
        return Ok((socket.to_owned(), None));
    }
    let (Some(folder), Some(name)) = (socket.parent(), socket.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let folder = File::open(folder)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    Ok((path, Some(folder)))
}

/// Connects to a unix socket, however long its path is.
pub async fn connect_to_socket(socket: &Path) -> io::Result<UnixStream> {
    let (path, _folder) = short_socket_path(socket)?;
    UnixStream::connect(path).await
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn a_socket_is_reached_however_long_its_path_is() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("d".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        for directory in [folder.path(), &deep] {
            let socket = directory.join("s");
            let (path, _folder) = short_socket_path(&socket).unwrap();
            let _listener = UnixListener::bind(path).unwrap();
            connect_to_socket(&socket).await.unwrap();
        }
    }
}
