//! How much the processes below one process use together. Nothing is signalled here.

use std::fs;
use std::ops::ControlFlow;

use crate::procfs;

/// What a tree of processes uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TreeUsage {
    pub processes: u64,
    /// Bytes of memory of their own. Memory that is read from a file, such as programs and libraries, does not count.
    pub memory: u64,
}

/// Adds up what the processes below `root` use, `root` itself not included. Stops counting at `processes_max`.
pub fn tree_usage(root: u32, processes_max: u64) -> TreeUsage {
    let mut usage = TreeUsage::default();
    procfs::walk_descendants(root, usize::MAX, |node| {
        usage.processes += 1;
        usage.memory += anonymous_memory(node.process.pid).unwrap_or_default();
        if usage.processes >= processes_max { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    usage
}

/// Bytes of memory of the machine.
pub fn machine_memory() -> Option<u64> {
    find_size(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// Bytes in memory that a process shares with no file.
fn anonymous_memory(pid: u32) -> Option<u64> {
    find_size(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, "RssAnon:")
}

/// A size in a file of the kernel, in bytes.
fn find_size(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn children_and_what_is_below_them_count() {
        let mut shell = Command::new("sh").args(["-c", "sleep 60 & sleep 60 & wait"]).spawn().unwrap();
        let us = std::process::id();
        let all = loop {
            let usage = tree_usage(shell.id(), u64::MAX);
            if usage.processes == 2 {
                break usage;
            }
            std::thread::yield_now();
        };
        assert!(all.memory > 0);
        assert_eq!(tree_usage(us, 1).processes, 1, "no more is counted than asked for");
        let script = format!("kill $(cat /proc/{0}/task/{0}/children)", shell.id());
        Command::new("sh").args(["-c", &script]).status().unwrap();
        shell.wait().unwrap();
    }

    #[test]
    fn the_machine_has_memory() {
        assert!(machine_memory().unwrap() > 1 << 20);
    }
}
