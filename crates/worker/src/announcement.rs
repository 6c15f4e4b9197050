//! How this worker process announces itself: the lock that shows that it is alive, its socket, and the record with the
//! socket's address. The record is renewed while the process lives and removed when it exits.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qd_link::record::{WorkerFiles, WorkerLock, bind_worker_socket};
use qd_protocol::worker::WorkerRecord;
use qd_worker_sdk::announce::{RENEW_EVERY, record_of_this_process, write_record};
use tokio::net::UnixListener;

/// A process that checks whether we are alive holds our lock for a moment, so taking it is tried this often.
const LOCK_TRIES: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(2);
/// Only the owner of a home may find its workers.
const RECORD_MODE: u32 = 0o600;

#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkerAnnounceError {
    #[error("`{0}` is not a valid worker id: it has to be usable as a file name")]
    BadId(String),
    #[error("another worker has the id `{0}`")]
    IdTaken(String),
    #[error("failed to announce the worker: {0}")]
    Io(#[from] io::Error),
}

/// The presence of this process among the workers of its home. Dropping it removes its files.
#[derive(Debug)]
pub(crate) struct WorkerAnnouncement {
    dir: PathBuf,
    files: WorkerFiles,
    record: WorkerRecord,
    _lock: WorkerLock,
}

impl WorkerAnnouncement {
    /// Takes the lock, binds the socket and writes the record, in this order: a process that finds the record can
    /// connect.
    pub(crate) fn publish(dir: &Path, id: &str) -> Result<(Self, UnixListener), WorkerAnnounceError> {
        let files = WorkerFiles::of(dir, id).ok_or_else(|| WorkerAnnounceError::BadId(id.to_owned()))?;
        let lock = take_lock(&files)?.ok_or_else(|| WorkerAnnounceError::IdTaken(id.to_owned()))?;
        let listener = bind_worker_socket(&files)?;
        let record = WorkerRecord {
            start_ticks: qd_keeper::procfs::start_ticks(std::process::id()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..record_of_this_process(id, "worker", &format!("unix:{}", files.socket.display()))
        };
        let mut announcement = Self { dir: dir.to_owned(), files, record, _lock: lock };
        announcement.write_record()?;
        Ok((announcement, listener))
    }

    /// Renews the lease for ever.
    pub(crate) async fn renew_lease(&mut self) {
        loop {
            tokio::time::sleep(RENEW_EVERY).await;
            if let Err(error) = self.write_record() {
                tracing::warn!(%error, "failed to renew the worker's record");
            }
        }
    }

    fn write_record(&mut self) -> io::Result<()> {
        self.record = write_record(&self.dir, &self.record, RECORD_MODE)?;
        Ok(())
    }
}

impl Drop for WorkerAnnouncement {
    fn drop(&mut self) {
        if let Err(error) = self.files.remove() {
            tracing::warn!(%error, "failed to remove the worker's files");
        }
    }
}

fn take_lock(files: &WorkerFiles) -> io::Result<Option<WorkerLock>> {
    for _ in 0..LOCK_TRIES {
        if let Some(lock) = WorkerLock::try_acquire(files)? {
            return Ok(Some(lock));
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    WorkerLock::try_acquire(files)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use qd_link::record::{is_worker_alive, read_records};
    use qd_protocol::Millis;

    use super::*;

    #[tokio::test]
    async fn a_worker_is_announced_while_it_lives_and_leaves_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let (mut announcement, _listener) = WorkerAnnouncement::publish(dir.path(), "wrk_a").unwrap();
        assert!(is_worker_alive(dir.path(), "wrk_a"));
        let found = read_records(dir.path());
        assert_eq!(found, [announcement.record.clone()]);
        assert_eq!(found[0].pid, std::process::id());
        assert!(found[0].start_ticks.is_some() && found[0].lease_expires_at > Millis::now());
        for name in ["wrk_a.json", "wrk_a.sock", "wrk_a.lock"] {
            let mode = std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        announcement.write_record().unwrap();
        drop(announcement);
        assert!(!is_worker_alive(dir.path(), "wrk_a"));
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
    }

    #[tokio::test]
    async fn an_id_that_is_taken_or_invalid_is_a_clear_error() {
        let dir = tempfile::tempdir().unwrap();
        let _first = WorkerAnnouncement::publish(dir.path(), "a").unwrap();
        assert!(matches!(WorkerAnnouncement::publish(dir.path(), "a"), Err(WorkerAnnounceError::IdTaken(_))));
        assert!(matches!(
            WorkerAnnouncement::publish(dir.path(), "../a"),
            Err(WorkerAnnounceError::BadId(_))
        ));
    }
}
