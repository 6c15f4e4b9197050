//! What `/proc` says of the processes of one home, of what runs below them, and of what they hold. It reads and
//! signals; a process that vanishes while it is looked at is not there.

use std::collections::BTreeSet;
use std::fs;

use rustix::process::Signal;

use crate::home::{TestHome, signal};
use crate::poll_until;

/// The kernel's flag of a process that has begun to exit.
const PF_EXITING: u32 = 4;

/// A process, as it was when it was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedProcess {
    /// Its pid.
    pub pid: u32,
    /// When it started, in ticks since boot: with the pid, who it is.
    pub start_ticks: u64,
    /// Its parent's pid.
    pub parent: u32,
    /// The kernel's letter for what it does: `Z` is a zombie, `T` is stopped.
    pub state: char,
    /// Whether it has begun to exit: it runs nothing of its own any more, and may have no command line left.
    pub is_exiting: bool,
    /// Its command line.
    pub args: Vec<String>,
}

impl ObservedProcess {
    /// The process with this pid, zombies too.
    pub fn find(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may hold anything, also spaces and brackets; the fields after it do not.
        let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let flags: u32 = fields.get(6)?.parse().ok()?;
        let args = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        Some(Self {
            pid,
            start_ticks: fields.get(19)?.parse().ok()?,
            parent: fields.get(1)?.parse().ok()?,
            state: fields.first()?.chars().next()?,
            is_exiting: flags & PF_EXITING != 0,
            args: args.collect(),
        })
    }

    /// Whether this very process still runs, or is stopped.
    pub fn is_alive(&self) -> bool {
        Self::find(self.pid).is_some_and(|now| now.start_ticks == self.start_ticks && !now.is_dead())
    }

    /// Whether it is a zombie, or is becoming one.
    fn is_dead(&self) -> bool {
        self.is_exiting || self.state == 'Z'
    }

    /// Whether it is `qd` as this part of itself: `serve`, `__worker`, `__keeper`, `__script`.
    pub fn has_role(&self, part: &str) -> bool {
        self.args.get(1).is_some_and(|arg| arg == part)
    }

    /// Kills it without a word, and waits until it runs no more.
    pub async fn kill9(&self) {
        signal(self.pid, Signal::KILL);
        poll_until("the death of a process", async || (!self.is_alive()).then_some(())).await;
    }

    /// What it holds open.
    pub fn open_descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count)
    }

    /// Its children that have ended and that it has not heard of.
    pub fn zombies(&self) -> Vec<Self> {
        all_processes().into_iter().filter(|child| child.parent == self.pid && child.state == 'Z').collect()
    }

    /// Whether the home's directory is in its command line, its environment or its working directory.
    fn belongs_to(&self, directory: &str) -> bool {
        let file = |name: &str| fs::read(format!("/proc/{}/{name}", self.pid)).unwrap_or_default();
        let cwd = fs::read_link(format!("/proc/{}/cwd", self.pid)).unwrap_or_default();
        let places = [file("cmdline"), file("environ"), cwd.into_os_string().into_encoded_bytes()];
        places.iter().any(|place| String::from_utf8_lossy(place).contains(directory))
    }
}

/// How much memory a living process has, in KiB.
pub fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has a size");
    line.trim().trim_end_matches(" kB").parse().expect("the kernel writes numbers")
}

/// Everything that there is, zombies too.
pub fn all_processes() -> Vec<ObservedProcess> {
    let entries = fs::read_dir("/proc").expect("there is a /proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // At once, each as it is found: some are another process a moment later.
    pids.filter_map(ObservedProcess::find).collect()
}

/// Everything alive below a process.
pub fn descendants(pid: u32) -> Vec<ObservedProcess> {
    let mut family = living_family(BTreeSet::from([pid]), all_processes());
    family.retain(|one| one.pid != pid);
    family
}

/// Those of `all` that are alive and have one of these pids, or descend from one that has.
fn living_family(mut pids: BTreeSet<u32>, all: Vec<ObservedProcess>) -> Vec<ObservedProcess> {
    loop {
        let before = pids.len();
        let children: Vec<_> =
            all.iter().filter(|one| pids.contains(&one.parent)).map(|one| one.pid).collect();
        pids.extend(children);
        if pids.len() == before {
            return all.into_iter().filter(|one| pids.contains(&one.pid) && !one.is_dead()).collect();
        }
    }
}

/// Everything alive that was started with this worker's mark in its environment.
pub fn marked_processes(worker: &str) -> Vec<ObservedProcess> {
    let mark = format!("QD_MARK={worker}.");
    let bears_it = |one: &ObservedProcess| {
        let environ = fs::read(format!("/proc/{}/environ", one.pid)).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable.starts_with(mark.as_bytes()))
    };
    all_processes().into_iter().filter(|one| !one.is_dead() && bears_it(one)).collect()
}

impl TestHome {
    /// Everything alive that has to do with this home: what has its directory in its command line, its environment or
    /// its working directory, and all that is below that.
    pub fn processes(&self) -> Vec<ObservedProcess> {
        let directory = self.sibling_path("");
        let directory = directory.to_str().expect("a temporary directory has a plain name");
        let all = all_processes();
        let own = all.iter().filter(|one| one.belongs_to(directory)).map(|one| one.pid).collect();
        living_family(own, all)
    }

    /// Those of them that play a part of `qd`.
    pub fn processes_with_role(&self, part: &str) -> Vec<ObservedProcess> {
        self.processes().into_iter().filter(|one| one.has_role(part)).collect()
    }

    /// Those of them that are agents, or that agents have started.
    pub fn agent_processes(&self) -> Vec<ObservedProcess> {
        let is_ours =
            |one: &ObservedProcess| ["serve", "__worker", "__keeper"].iter().any(|part| one.has_role(part));
        self.processes().into_iter().filter(|one| !is_ours(one)).collect()
    }

    /// Waits until there is nothing left of any agent.
    pub async fn wait_for_no_agents(&self) {
        poll_until("the end of every agent and all that it started", async || {
            self.agent_processes().is_empty().then_some(())
        })
        .await;
    }
}
