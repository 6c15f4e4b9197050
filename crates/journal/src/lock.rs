//! Ensures that one daemon owns a home, by an exclusive lock on the file `lock`, which also contains the owner's pid.
//! The kernel releases the lock when the process dies, so no stale lock needs cleaning up. A child that a dead daemon
//! had just forked still holds the lock until it calls exec; `acquire` waits for that.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, test_kill_process};

use crate::error::JournalOpenError;

/// How long a lock may outlive its dead holder. A forked child calls exec in far less, even on a busy machine.
const DEAD_HOLDER_WAIT: Duration = Duration::from_secs(2);

/// The lock is held as long as this lives.
#[derive(Debug)]
pub(crate) struct HomeLock(File);

impl HomeLock {
    pub(crate) fn acquire(home: &Path) -> Result<Self, JournalOpenError> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(home.join("lock"))
            .map_err(JournalOpenError::io("open the home's lock"))?;
        let started = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let pid = holder(&mut file);
                    // A holder without a pid is about to write it or to release the lock.
                    if pid.is_some_and(|pid| !is_dead(pid)) || started.elapsed() > DEAD_HOLDER_WAIT {
                        return Err(JournalOpenError::HomeLocked { pid });
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(JournalOpenError::io("lock the home")(error.into())),
            }
        }
        // Only the lock matters. On a full disk the pid cannot be written, and the holder stays unnamed.
        let pid_written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        if let Err(error) = pid_written {
            tracing::warn!(%error, "the daemon's pid could not be written to the lock file of its home");
        }
        Ok(Self(file))
    }
}

impl Drop for HomeLock {
    fn drop(&mut self) {
        // Clear the pid, because this process no longer holds the lock.
        let _ = self.0.set_len(0);
    }
}

/// The pid of the holder. Absent if it has not been written completely yet.
fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut text)).ok()?;
    text.trim().parse().ok()
}

fn is_dead(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_outlives_its_holder_for_a_moment_is_waited_for() {
        let home = tempfile::tempdir().unwrap();
        let first = HomeLock::acquire(home.path()).unwrap();
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        std::fs::write(home.path().join("lock"), format!("{}\n", dead.id())).unwrap();
        let home = home.path().to_owned();
        let second = std::thread::spawn(move || HomeLock::acquire(&home));
        std::thread::sleep(Duration::from_millis(20));
        drop(first);
        second.join().unwrap().unwrap();
    }

    #[test]
    fn a_second_holder_is_told_who_the_first_is_and_gets_it_afterwards() {
        let home = tempfile::tempdir().unwrap();
        let first = HomeLock::acquire(home.path()).unwrap();
        match HomeLock::acquire(home.path()) {
            Err(JournalOpenError::HomeLocked { pid }) => assert_eq!(pid, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
        drop(first);
        HomeLock::acquire(home.path()).unwrap();
    }
}
