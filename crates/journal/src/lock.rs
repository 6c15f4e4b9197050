//! One daemon owns a home: an exclusive lock on the file `lock` in it, which also names the holder. The kernel lets
//! go of it when the process dies, so there is nothing to clean up and nothing to guess. A child that a dead holder was
//! just about to start has it until it becomes another program: that is waited for.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, test_kill_process};

use crate::error::JournalOpenError;

/// How long a lock may outlive its holder: a child becomes another program in far less, also on a busy machine.
const DEAD_HOLDER_WAIT: Duration = Duration::from_secs(2);

/// Held as long as it lives.
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
        let begun = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let pid = holder(&mut file);
                    // One without a name is about to write it, or to let go.
                    if pid.is_some_and(|pid| !is_dead(pid)) || begun.elapsed() > DEAD_HOLDER_WAIT {
                        return Err(JournalOpenError::HomeLocked { pid });
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(JournalOpenError::io("lock the home")(error.into())),
            }
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

/// Who holds it. A holder that has not written its pid yet, or not all of it, stays unnamed.
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
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        std::fs::write(home.path().join("lock"), format!("{}\n", gone.id())).unwrap();
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
