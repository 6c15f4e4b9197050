//! How the workers of a home are found. Each worker keeps a record and holds a lock on a file beside it for as long as
//! it lives. Only the lock decides whether a worker is alive, whatever the clock, a pid or the record say; the record
//! tells where the worker listens.
//!
//! Design: docs/design/how-a-worker-is-known.md

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use qd_protocol::WorkerId;
/// Every record in a home, of living and dead workers: those of our workers have the form that all workers announce.
pub use qd_worker_sdk::announce::read_records;
use tokio::net::{UnixListener, UnixStream};

use crate::socket_path::{connect_to_socket, short_socket_path};

/// The files of one worker process in its home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerFiles {
    pub record: PathBuf,
    pub lock: PathBuf,
    pub socket: PathBuf,
}

impl WorkerFiles {
    /// The files of the worker process `id`, or `None` if the id cannot be a file name.
    pub fn of(dir: &Path, id: &str) -> Option<Self> {
        // The rule for ids is also the rule for file names: no separator, no leading dot.
        WorkerId::parse(id).ok()?;
        let named = |suffix: &str| dir.join(format!("{id}.{suffix}"));
        Some(Self { record: named("json"), lock: named("lock"), socket: named("sock") })
    }

    /// Removes all files. Missing files are no error.
    pub fn remove(&self) -> io::Result<()> {
        // The lock goes last: while it is held, the others do not count as leftovers.
        for path in [&self.record, &self.socket, &self.lock] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Held by a worker process for its whole life. The kernel releases the lock when the process dies.
#[derive(Debug)]
pub struct WorkerLock {
    _lock: File,
}

impl WorkerLock {
    /// Takes the lock, or returns `None` if another process holds it.
    pub fn try_acquire(files: &WorkerFiles) -> io::Result<Option<Self>> {
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&files.lock)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _lock: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

/// Whether the worker process `id` of this home is alive. If this cannot be determined, the answer is yes, because a
/// worker that counts as dead is cleaned up.
pub fn is_worker_alive(dir: &Path, id: &str) -> bool {
    let Some(files) = WorkerFiles::of(dir, id) else { return false };
    match File::open(&files.lock) {
        // A shared lock, so that two concurrent callers do not mistake each other for the worker. Closing the file
        // releases it.
        Ok(file) => file.try_lock_shared().is_err(),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

pub async fn connect_to_worker(dir: &Path, id: &str) -> io::Result<UnixStream> {
    let files = WorkerFiles::of(dir, id).ok_or(io::ErrorKind::InvalidInput)?;
    connect_to_socket(&files.socket).await
}

/// Binds the worker's socket. A socket that a dead process left there is replaced.
pub fn bind_worker_socket(files: &WorkerFiles) -> io::Result<UnixListener> {
    match fs::remove_file(&files.socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let (path, _folder) = short_socket_path(&files.socket)?;
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(&files.socket, Permissions::from_mode(0o600))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_alive_while_it_holds_its_lock_and_no_longer() {
        let dir = tempfile::tempdir().unwrap();
        let files = WorkerFiles::of(dir.path(), "a").unwrap();
        assert!(!is_worker_alive(dir.path(), "a"));
        assert!(WorkerFiles::of(dir.path(), "../a").is_none() && !is_worker_alive(dir.path(), "../a"));
        let lock = WorkerLock::try_acquire(&files).unwrap().unwrap();
        assert!(is_worker_alive(dir.path(), "a") && is_worker_alive(dir.path(), "a"));
        assert!(WorkerLock::try_acquire(&files).unwrap().is_none());
        drop(lock);
        assert!(!is_worker_alive(dir.path(), "a"));
        files.remove().unwrap();
        assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
    }

    #[tokio::test]
    async fn a_worker_of_a_very_deep_home_can_be_reached() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("x".repeat(120));
        fs::create_dir(&deep).unwrap();
        let listener = bind_worker_socket(&WorkerFiles::of(&deep, "a").unwrap()).unwrap();
        let (connected, accepted) = tokio::join!(connect_to_worker(&deep, "a"), listener.accept());
        connected.unwrap();
        accepted.unwrap();
        drop(listener);
        assert!(connect_to_worker(&deep, "a").await.is_err());
        bind_worker_socket(&WorkerFiles::of(&deep, "a").unwrap()).unwrap();
    }
}
