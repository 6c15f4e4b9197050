//! 16 MiB of disk space held back as a file, so that cancels and run ends can still be written when the disk is full.
//! The reserve is spent by deleting the file. The writer tries to recreate it from time to time and refuses ordinary
//! appends until it succeeds.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use qd_protocol::limits::RESERVE_BYTES;
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::JournalOpenError;

#[derive(Debug)]
pub(crate) struct DiskReserve {
    path: PathBuf,
    /// How long to wait after a failed attempt to recreate the file before the next attempt.
    retry: Duration,
    /// When the reserve was spent, or when the last attempt to recreate it failed. Absent while it is held.
    spent_since: Option<Instant>,
}

impl DiskReserve {
    /// Finds or creates the file.
    pub(crate) fn open(home: &Path, retry: Duration) -> Result<Self, JournalOpenError> {
        let path = home.join("reserve");
        match create_reserve(&path) {
            Ok(()) => Ok(Self { path, retry, spent_since: None }),
            Err(error) if is_full(&error) => Err(JournalOpenError::DiskFull { needed: RESERVE_BYTES }),
            Err(error) => Err(JournalOpenError::io("create the disk reserve")(error)),
        }
    }

    /// Whether the reserve was spent and not recreated yet.
    pub(crate) fn is_spent(&self) -> bool {
        self.spent_since.is_some()
    }

    /// Deletes the file, so that the next write has space. Returns false if there was no reserve to spend.
    pub(crate) fn spend(&mut self) -> bool {
        if self.spent_since.is_some() {
            return false;
        }
        self.spent_since = Some(Instant::now());
        std::fs::remove_file(&self.path).is_ok()
    }

    /// Tries to recreate the reserve, if enough time has passed. Returns whether it is held now.
    pub(crate) fn regain(&mut self) -> bool {
        let Some(since) = self.spent_since else { return true };
        if since.elapsed() < self.retry {
            return false;
        }
        if create_reserve(&self.path).is_ok() {
            self.spent_since = None;
            return true;
        }
        self.spent_since = Some(Instant::now());
        false
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn create_reserve(path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let allocated = allocate_reserve(&mut file);
    if allocated.is_err() {
        // Half a reserve would only waste disk space.
        let _ = std::fs::remove_file(path);
    }
    allocated
}

fn allocate_reserve(file: &mut File) -> io::Result<()> {
    let metadata = file.metadata()?;
    if metadata.len() == RESERVE_BYTES && metadata.blocks() * 512 >= RESERVE_BYTES {
        return Ok(());
    }
    match fallocate(&*file, FallocateFlags::empty(), 0, RESERVE_BYTES) {
        Ok(()) => file.set_len(RESERVE_BYTES),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            let zeros = vec![0; 1 << 20];
            for _ in 0..RESERVE_BYTES / zeros.len() as u64 {
                file.write_all(&zeros)?;
            }
            file.sync_data()
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_takes_real_blocks_and_gives_them_back_once() {
        let home = tempfile::tempdir().unwrap();
        let mut reserve = DiskReserve::open(home.path(), Duration::ZERO).unwrap();
        let file = home.path().join("reserve");
        assert!(file.metadata().unwrap().blocks() * 512 >= RESERVE_BYTES);
        assert!(reserve.spend());
        assert!(!file.exists());
        assert!(reserve.is_spent());
        assert!(!reserve.spend());
        assert!(reserve.regain());
        assert!(file.exists());
    }

    #[test]
    fn a_spent_reserve_is_not_tried_again_before_its_time() {
        let home = tempfile::tempdir().unwrap();
        let mut reserve = DiskReserve::open(home.path(), Duration::from_secs(3600)).unwrap();
        assert!(reserve.spend());
        assert!(!reserve.regain());
        assert!(!home.path().join("reserve").exists());
    }
}
