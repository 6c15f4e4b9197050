//! One daemon owns a home: an exclusive lock on the file `lock` in it, which also names the holder. The kernel lets
//! go of it when the process dies, so there is nothing to clean up and nothing to guess.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::error::OpenError;

/// Held as long as it lives.
#[derive(Debug)]
pub(crate) struct HomeLock(File);

impl HomeLock {
    pub(crate) fn take(home: &Path) -> Result<Self, OpenError> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(home.join("lock"))
            .map_err(OpenError::io("open the home's lock"))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                // A holder that has not written its pid yet, or not all of it, stays unnamed.
                let _ = file.read_to_string(&mut text);
                return Err(OpenError::Held { pid: text.trim().parse().ok() });
            }
            Err(error) => return Err(OpenError::io("lock the home")(error.into())),
        }
        // The lock is what counts. On a full disk it is held by somebody unnamed.
        let named = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        if let Err(error) = named {
            tracing::warn!(%error, "the pid could not be written into the home's lock");
        }
        Ok(Self(file))
    }
}

impl Drop for HomeLock {
    fn drop(&mut self) {
        // A pid that no longer holds anything should not be shown to anyone.
        let _ = self.0.set_len(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_told_who_the_first_is_and_gets_it_afterwards() {
        let home = tempfile::tempdir().unwrap();
        let first = HomeLock::take(home.path()).unwrap();
        match HomeLock::take(home.path()) {
            Err(OpenError::Held { pid }) => assert_eq!(pid, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
        drop(first);
        HomeLock::take(home.path()).unwrap();
    }
}
