//! Sixteen mebibytes held back as a file, so that cancels and ends still fit when the disk is full. Giving it up is
//! deleting the file; getting it back is tried now and then, and until then ordinary appends are refused.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use qd_protocol::limits::RESERVE_BYTES;
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::JournalOpenError;

/// The space held back.
#[derive(Debug)]
pub(crate) struct DiskReserve {
    path: PathBuf,
    /// How long after a failed attempt the next may be made.
    retry: Duration,
    /// Since when it is spent, or was last tried to be had back.
    spent_since: Option<Instant>,
}

impl DiskReserve {
    /// Finds or makes the file.
    pub(crate) fn open(home: &Path, retry: Duration) -> Result<Self, JournalOpenError> {
        let path = home.join("reserve");
        match create_reserve(&path) {
            Ok(()) => Ok(Self { path, retry, spent_since: None }),
            Err(error) if is_full(&error) => Err(JournalOpenError::DiskFull { needed: RESERVE_BYTES }),
            Err(error) => Err(JournalOpenError::io("make the reserve")(error)),
        }
    }

    /// Whether it has been given up and could not be had back yet.
    pub(crate) fn is_spent(&self) -> bool {
        self.spent_since.is_some()
    }

    /// Gives the space to whoever writes next. False if there is none to give.
    pub(crate) fn spend(&mut self) -> bool {
        if self.spent_since.is_some() {
            return false;
        }
        self.spent_since = Some(Instant::now());
        std::fs::remove_file(&self.path).is_ok()
    }

    /// Tries to have it back, if it is time to. True if it is held afterwards.
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
    let made = allocate_reserve(&mut file);
    if made.is_err() {
        // Half a reserve would only be space that nobody can use.
        let _ = std::fs::remove_file(path);
    }
    made
}

fn allocate_reserve(file: &mut File) -> io::Result<()> {
    let known = file.metadata()?;
    if known.len() == RESERVE_BYTES && known.blocks() * 512 >= RESERVE_BYTES {
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
