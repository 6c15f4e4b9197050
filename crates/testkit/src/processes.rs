//! The processes of one home, as seen in `/proc`: what runs below them, and what they hold. It only reads and signals.
//! A process that vanishes while it is read counts as absent.

use std::collections::BTreeSet;
use std::fs;

use rustix::process::Signal;

use crate::home::{TestHome, signal};
use crate::poll_until;

/// The kernel's flag for a process that has begun to exit.
const PF_EXITING: u32 = 4;

/// A process, as it was when it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedProcess {
    pub pid: u32,
    /// The start time in ticks since boot. Together with the pid it identifies the process.
    pub start_ticks: u64,
    /// The parent's pid.
    pub parent: u32,
    /// The kernel's letter for the state: `Z` is a zombie, `T` is stopped.
    pub state: char,
    /// The process has begun to exit. It no longer runs code of its own and may have no command line.
    pub is_exiting: bool,
    pub args: Vec<String>,
}

impl ObservedProcess {
    /// The process with this pid, even a zombie.
    pub fn find(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may contain spaces and brackets; the fields after it do not.
        let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let cmdline = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let flags: u32 = fields.get(6)?.parse().ok()?;
        let args = cmdline.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned());
        Some(Self {
            pid,
            start_ticks: fields.get(19)?.parse().ok()?,
            parent: fields.get(1)?.parse().ok()?,
            state: fields.first()?.chars().next()?,
            is_exiting: flags & PF_EXITING != 0,
            args: args.collect(),
        })
    }

    /// The processor time that it has used, in the kernel's ticks of 10 ms.
    pub fn used_ticks(&self) -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
    }

    /// Whether this same process is still running or stopped.
    pub fn is_alive(&self) -> bool {
        Self::find(self.pid).is_some_and(|now| now.start_ticks == self.start_ticks && !now.is_dead())
    }

    /// Whether the process is a zombie, or about to be one.
    fn is_dead(&self) -> bool {
        self.is_exiting || self.state == 'Z'
    }

    /// Whether this is `qd` in this role: `serve`, `__worker`, `__keeper` or `__script`.
    pub fn has_role(&self, role: &str) -> bool {
        self.args.get(1).is_some_and(|arg| arg == role)
    }

    /// Kills the process with SIGKILL, and waits until it is dead.
    pub async fn kill9(&self) {
        signal(self.pid, Signal::KILL);
        poll_until("the death of a process", async || (!self.is_alive()).then_some(())).await;
    }

    /// How many file descriptors the process holds.
    pub fn open_descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count)
    }

    /// Children that have ended and were not reaped.
    pub fn zombies(&self) -> Vec<Self> {
        all_processes().into_iter().filter(|child| child.parent == self.pid && child.state == 'Z').collect()
    }

    /// Whether the directory occurs in the command line, the environment or the working directory.
    fn belongs_to(&self, directory: &str) -> bool {
        let file = |name: &str| fs::read(format!("/proc/{}/{name}", self.pid)).unwrap_or_default();
        let cwd = fs::read_link(format!("/proc/{}/cwd", self.pid)).unwrap_or_default();
        let sources = [file("cmdline"), file("environ"), cwd.into_os_string().into_encoded_bytes()];
        sources.iter().any(|source| String::from_utf8_lossy(source).contains(directory))
    }
}

/// The resident memory of a living process, in KiB.
pub fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has a size");
    line.trim().trim_end_matches(" kB").parse().expect("the kernel writes numbers")
}

/// All processes, zombies included.
pub fn all_processes() -> Vec<ObservedProcess> {
    let entries = fs::read_dir("/proc").expect("there is a /proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // Each is read as soon as its pid is found, because a pid may be another process a moment later.
    pids.filter_map(ObservedProcess::find).collect()
}

/// All living descendants of a process.
pub fn descendants(pid: u32) -> Vec<ObservedProcess> {
    let mut family = living_family(BTreeSet::from([pid]), all_processes());
    family.retain(|process| process.pid != pid);
    family
}

/// The living processes of `all` that have one of these pids, or descend from one.
fn living_family(mut pids: BTreeSet<u32>, all: Vec<ObservedProcess>) -> Vec<ObservedProcess> {
    loop {
        let before = pids.len();
        let children: Vec<_> =
            all.iter().filter(|process| pids.contains(&process.parent)).map(|process| process.pid).collect();
        pids.extend(children);
        if pids.len() == before {
            return all
                .into_iter()
                .filter(|process| pids.contains(&process.pid) && !process.is_dead())
                .collect();
        }
    }
}

/// All living processes with this worker's mark in their environment.
pub fn marked_processes(worker: &str) -> Vec<ObservedProcess> {
    let mark = format!("QD_MARK={worker}.");
    let has_mark = |process: &ObservedProcess| {
        let environ = fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable.starts_with(mark.as_bytes()))
    };
    all_processes().into_iter().filter(|process| !process.is_dead() && has_mark(process)).collect()
}

impl TestHome {
    /// All living processes that belong to this home: those with its directory in their command line, environment or
    /// working directory, and all their descendants.
    pub fn processes(&self) -> Vec<ObservedProcess> {
        let directory = self.sibling_path("");
        let directory = directory.to_str().expect("a temporary directory has a plain name");
        let all = all_processes();
        let own_pids =
            all.iter().filter(|process| process.belongs_to(directory)).map(|process| process.pid).collect();
        living_family(own_pids, all)
    }

    /// Those of them that are `qd` in this role.
    pub fn processes_with_role(&self, role: &str) -> Vec<ObservedProcess> {
        self.processes().into_iter().filter(|process| process.has_role(role)).collect()
    }

    /// Those of them that are agents, or were started by agents.
    pub fn agent_processes(&self) -> Vec<ObservedProcess> {
        let is_ours = |process: &ObservedProcess| {
            ["serve", "__worker", "__keeper", "__sandbox"].iter().any(|role| process.has_role(role))
        };
        self.processes().into_iter().filter(|process| !is_ours(process)).collect()
    }

    /// Waits until no agent process is left.
    pub async fn wait_for_no_agents(&self) {
        poll_until("the end of every agent and its processes", async || {
            self.agent_processes().is_empty().then_some(())
        })
        .await;
    }
}
