//! Which PID namespaces a process is in. A process cannot leave the namespace that it was started in, whatever becomes
//! of its parents and its environment.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::fstat;

use crate::kernel::parent_namespace;

/// How many namespaces may be inside each other. The kernel allows no more.
const NESTED_MAX: usize = 32;

/// A PID namespace, by the number that the kernel has given it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PidNamespaceId(u64);

impl PidNamespaceId {
    /// The namespace of a process.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        Self::of_descriptor(open_namespace(&pid.to_string())?)
    }

    fn of_descriptor(namespace: impl AsFd) -> io::Result<Self> {
        Ok(Self(fstat(namespace)?.st_ino))
    }
}

/// The PID namespaces that a process is in and this process is not, the innermost first. Empty if both are in the same.
pub fn pid_namespaces_below_ours(pid: u32) -> io::Result<Vec<PidNamespaceId>> {
    let ours = PidNamespaceId::of_descriptor(open_namespace("self")?)?;
    let mut namespace = open_namespace(&pid.to_string())?;
    let mut found = Vec::new();
    for _ in 0..NESTED_MAX {
        let id = PidNamespaceId::of_descriptor(&namespace)?;
        if id == ours {
            return Ok(found);
        }
        found.push(id);
        namespace = parent_namespace(&namespace)?;
    }
    Ok(found)
}

fn open_namespace(process: &str) -> io::Result<OwnedFd> {
    File::open(format!("/proc/{process}/ns/pid")).map(OwnedFd::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_in_its_own_namespace() {
        assert_eq!(pid_namespaces_below_ours(std::process::id()).unwrap(), []);
        assert!(pid_namespaces_below_ours(u32::MAX).is_err());
    }
}
