//! What the kernel reports about processes, and signals to exactly the intended process. Every read expects that a
//! process can vanish meanwhile. This module reads `/proc` and sends signals; it decides nothing.

use std::cmp::{Ordering, Reverse};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::MARK_VARIABLE;
pub use crate::orphans::end_marked;

/// How many ancestors [`ancestry`] follows at most. Chains of parents are short, but can change while they are read.
const ANCESTRY_MAX: usize = 4096;
/// The length to which the kernel truncates a process's name.
const NAME_MAX: usize = 15;

/// A process that was seen. Two are equal if pid and start time are equal: pids are reused, and a name may change.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub pid: u32,
    /// The start time, in kernel ticks since boot.
    pub start_ticks: u64,
    /// The first 15 bytes of the name, as the kernel keeps it.
    pub name: String,
}

impl ProcessIdentity {
    /// Finds the living process with this pid.
    pub fn find(pid: u32) -> Option<Self> {
        ProcStat::read(pid).filter(|stat| !stat.is_dead()).map(|stat| stat.into_process(pid))
    }

    fn identity(&self) -> (u32, u64) {
        (self.pid, self.start_ticks)
    }
}

impl PartialEq for ProcessIdentity {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for ProcessIdentity {}

impl Ord for ProcessIdentity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.identity().cmp(&other.identity())
    }
}

impl PartialOrd for ProcessIdentity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Hash for ProcessIdentity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

/// The start time of a process, in kernel ticks since boot. Together with the pid it identifies the process.
pub fn start_ticks(pid: u32) -> Option<u64> {
    ProcStat::read(pid).map(|stat| stat.start_ticks)
}

/// The processor time that a process has used so far, in kernel ticks.
pub(crate) fn cpu_ticks(process: &ProcessIdentity) -> Option<u64> {
    let stat = ProcStat::read(process.pid).filter(|stat| stat.start_ticks == process.start_ticks)?;
    Some(stat.cpu_ticks)
}

/// The parent of a process. Absent for pid 1 and for kernel threads.
pub fn parent(pid: u32) -> Option<u32> {
    ProcStat::read(pid).map(|stat| stat.parent).filter(|parent| *parent > 0)
}

/// The first 15 bytes of a process's name, as the kernel keeps it.
pub fn name(pid: u32) -> Option<String> {
    ProcStat::read(pid).map(|stat| stat.name)
}

/// Whether exactly this process is running or stopped. A zombie is not alive.
pub fn is_alive(process: &ProcessIdentity) -> bool {
    ProcessIdentity::find(process.pid).is_some_and(|found| found == *process)
}

/// The children of a process, including zombies.
pub fn children(pid: u32) -> Vec<u32> {
    ChildLookup::detect().children(pid)
}

/// The process below this one that has the given pid in its own PID namespace.
pub fn find_by_inner_pid(root: u32, inner: u32) -> Option<u32> {
    let inner = inner.to_string();
    let is_known_as = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        // One pid for each namespace, the innermost last.
        let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        let pids: Vec<&str> = pids.split_whitespace().collect();
        matches!(pids[..], [_, .., last] if last == inner).then_some(pid)
    };
    descendants(root).into_iter().find_map(|process| is_known_as(process.pid))
}

/// All living processes below this one, parents before their children. Order and completeness are guaranteed only if no
/// process forks or dies meanwhile; otherwise some may be missed, and are found the next time.
pub fn descendants(pid: u32) -> Vec<ProcessIdentity> {
    process_tree(pid).into_iter().map(|node| node.process).collect()
}

/// A process, its parent, that one's parent and so on, up to pid 1. `None` stands for an ancestor that could not be
/// found, because it exited meanwhile or the chain is too long. Nothing is known about the ancestors beyond it.
pub fn ancestry(pid: u32) -> impl Iterator<Item = Option<u32>> {
    let next = |current: &Option<u32>| match current.and_then(ProcStat::read) {
        Some(stat) => (stat.parent > 0).then_some(Some(stat.parent)),
        None => current.map(|_| None),
    };
    let limited = |(depth, pid)| if depth < ANCESTRY_MAX { pid } else { None };
    std::iter::successors(Some(Some(pid)), next).enumerate().take(ANCESTRY_MAX + 1).map(limited)
}

/// Whether a process was started as this part of our program: `qd PART`. Any process can claim that, so it may only
/// ever take rights away, never grant any.
pub fn is_started_as(pid: u32, part: &str) -> bool {
    let Ok(arguments) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
    arguments.split(|byte| *byte == 0).nth(1) == Some(part.as_bytes())
}

/// The arguments that a process was started with, its program first, as far as they are in the first `max` bytes. Any
/// process can write what it likes there, so they are only ever shown.
pub fn arguments(pid: u32, max: u64) -> Option<Vec<String>> {
    let mut bytes = Vec::new();
    fs::File::open(format!("/proc/{pid}/cmdline")).ok()?.take(max).read_to_end(&mut bytes).ok()?;
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
    let arguments = bytes.split(|byte| *byte == 0).map(|part| String::from_utf8_lossy(part).into_owned());
    (!bytes.is_empty()).then(|| arguments.collect())
}

/// The living processes of our own user that were started with this mark in their environment.
pub fn find_marked(mark: &str) -> Vec<ProcessIdentity> {
    let mut found = Vec::new();
    walk_marked(mark, &mut MarkScanCache::default(), |process, _| {
        found.push(process);
        ControlFlow::Continue(())
    });
    found
}

/// The living processes of our own user that were started as this part of our program; see [`is_started_as`].
pub fn find_started_as(part: &str) -> Vec<ProcessIdentity> {
    own_pids().filter(|pid| is_started_as(*pid, part)).filter_map(ProcessIdentity::find).collect()
}

/// The living processes of our own user whose mark matches, each with its mark.
pub fn find_marks(matches: impl Fn(&str) -> bool) -> Vec<(ProcessIdentity, String)> {
    let marked = own_pids().filter_map(|pid| Some((pid, mark_of(pid).filter(|mark| matches(mark))?)));
    marked.filter_map(|(pid, mark)| Some((ProcessIdentity::find(pid)?, mark))).collect()
}

/// The mark that a process was started with.
pub fn mark_of(pid: u32) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    String::from_utf8(mark_in(&environment)?.to_vec()).ok()
}

/// A process and its parent.
#[derive(Debug, Clone)]
pub(crate) struct ProcessNode {
    pub(crate) process: ProcessIdentity,
    pub(crate) parent: u32,
}

/// Like [`descendants`], each with its parent.
pub(crate) fn process_tree(root: u32) -> Vec<ProcessNode> {
    let mut nodes = Vec::new();
    walk_descendants(root, usize::MAX, |node| {
        nodes.push(node);
        ControlFlow::Continue(())
    });
    nodes
}

/// Visits every living process below this one as soon as it is found, parents before their children. Of several
/// children the youngest comes first, with everything below it: in a fork storm the youngest live longest. Stops early
/// if `visit` breaks, or after `dead_max` dead children of the root.
///
/// Returns whether the walk was calm: it saw everything, and nothing died meanwhile. A process that dies may have moved
/// a child to a part of the tree that was already scanned, so finding nothing proves something only in a calm walk. A
/// zombie whose own parent has not reaped it does not disturb the calm. A zombie child of the root does, provided that
/// the root has reaped just before.
pub(crate) fn walk_descendants(
    root: u32,
    dead_max: usize,
    mut visit: impl FnMut(ProcessNode) -> ControlFlow<()>,
) -> bool {
    let lookup = ChildLookup::detect();
    let mut is_calm = true;
    let mut dead = 0;
    // Pids to visit, each with the parent that listed it. The last is visited next.
    let mut pending: Vec<(u32, u32)> = lookup.children(root).into_iter().map(|pid| (pid, root)).collect();
    while let Some((pid, parent)) = pending.pop() {
        // The parent may have died since; then the root has adopted the process. Any other parent means that the
        // process died too and its pid was reused.
        let stat = ProcStat::read(pid).filter(|stat| stat.parent == parent || stat.parent == root);
        match stat {
            Some(stat) if !stat.is_dead() => {
                let (parent, threads) = (stat.parent, stat.threads);
                if visit(ProcessNode { parent, process: stat.into_process(pid) }).is_break() {
                    return is_calm;
                }
                pending.extend(lookup.children_of(pid, threads).into_iter().map(|child| (child, pid)));
            }
            Some(zombie) if zombie.parent == root => {
                is_calm = false;
                dead += 1;
                if dead == dead_max {
                    return is_calm;
                }
            }
            Some(_) => {}
            None => is_calm = false,
        }
    }
    is_calm
}

/// What earlier scans for a mark have learned, so that the next one need not read it again. In a fork storm a scan must
/// be faster than a process's lifetime, and most processes are unmarked, zombies or already known.
#[derive(Debug, Default)]
pub(crate) struct MarkScanCache {
    scans: usize,
    /// Pids of processes that do not carry the mark or are dead.
    unmarked: HashSet<u32>,
    /// Processes that carry the mark, by pid.
    marked: HashMap<u32, ProcessIdentity>,
    /// Zombies, and processes that showed an empty environment because they were in the middle of an exec.
    seen_silent: HashSet<ProcessIdentity>,
}

/// The result of examining one process for a mark.
enum MarkScanResult {
    /// The process carries the mark. The flag says whether it was seen for the first time.
    Marked(ProcessIdentity, bool),
    /// The process does not carry the mark, or is known to be dead.
    Unmarked,
    /// The process died during the scan, or may have left something behind.
    Inconclusive,
}

impl MarkScanCache {
    /// After this many scans every process is examined again, because its pid may have been reused.
    const SCANS_PER_RESET: usize = 64;

    fn begin_scan(&mut self) {
        if self.scans.is_multiple_of(Self::SCANS_PER_RESET) {
            self.unmarked.clear();
        }
        self.scans += 1;
    }

    fn examine(&mut self, pid: u32, mark: &str, uid: u32) -> MarkScanResult {
        let known = self.marked.get(&pid).cloned();
        // Owner and environment are read before the state: a process that still exists then existed while they were
        // read.
        let environment = match &known {
            Some(_) => Ok(Vec::new()),
            None => match fs::metadata(format!("/proc/{pid}")) {
                Ok(metadata) if metadata.uid() != uid => return self.remember_unmarked(pid),
                _ => fs::read(format!("/proc/{pid}/environ")),
            },
        };
        let Some(stat) = ProcStat::read(pid) else { return MarkScanResult::Inconclusive };
        let is_dead = stat.is_dead();
        let process = stat.into_process(pid);
        if known.is_some_and(|known| known == process) && !is_dead {
            return MarkScanResult::Marked(process, false);
        }
        self.marked.remove(&pid);
        match environment {
            // An environment that we may not read is not one of ours.
            Err(_) => self.remember_unmarked(pid),
            Ok(environment) if environment.is_empty() || is_dead => {
                if is_dead {
                    self.unmarked.insert(pid);
                }
                if self.seen_silent.insert(process) {
                    MarkScanResult::Inconclusive
                } else {
                    MarkScanResult::Unmarked
                }
            }
            Ok(environment) if mark_in(&environment) == Some(mark.as_bytes()) => {
                self.marked.insert(pid, process.clone());
                MarkScanResult::Marked(process, true)
            }
            Ok(_) => self.remember_unmarked(pid),
        }
    }

    fn remember_unmarked(&mut self, pid: u32) -> MarkScanResult {
        self.unmarked.insert(pid);
        MarkScanResult::Unmarked
    }
}

/// Visits every living process of our own user with this mark as soon as it is found, with a flag for those seen for
/// the first time. Those come first, the youngest before the older ones. Stops early if `visit` breaks.
///
/// Returns whether the scan was calm, as in [`walk_descendants`]. Here a zombie, or a process that shows no environment
/// because it is in the middle of an exec, disturbs the calm only when it is seen for the first time.
pub(crate) fn walk_marked(
    mark: &str,
    cache: &mut MarkScanCache,
    mut visit: impl FnMut(ProcessIdentity, bool) -> ControlFlow<()>,
) -> bool {
    let uid = rustix::process::geteuid().as_raw();
    let mut is_calm = true;
    cache.begin_scan();
    let mut pids: Vec<u32> = pids().filter(|pid| !cache.unmarked.contains(pid)).collect();
    pids.sort_unstable_by_key(|pid| (cache.marked.contains_key(pid), Reverse(*pid)));
    for pid in pids {
        match cache.examine(pid, mark, uid) {
            MarkScanResult::Marked(process, is_new) => {
                if visit(process, is_new).is_break() {
                    break;
                }
            }
            MarkScanResult::Unmarked => {}
            MarkScanResult::Inconclusive => is_calm = false,
        }
    }
    is_calm
}

/// Whether a process has one of these names: its own, that of its program, or that of the script whose path its program
/// was given. Servers are often scripts, which the kernel knows as `node`.
pub(crate) fn is_named(process: &ProcessIdentity, names: &[String]) -> bool {
    if names.is_empty() {
        return false;
    }
    let command = fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
    let mut arguments = command.split(|byte| *byte == 0);
    let program = arguments.next().unwrap_or_default();
    let script = arguments.next().filter(|argument| argument.contains(&b'/')).unwrap_or_default();
    let file_name = |path: &[u8]| path.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec();
    let (program, script) = (file_name(program), file_name(script));
    names.iter().map(String::as_bytes).any(|name| {
        let truncated = name.get(..NAME_MAX).unwrap_or(name);
        !name.is_empty() && (process.name.as_bytes() == truncated || program == name || script == name)
    })
}

/// Opens a descriptor that becomes readable when exactly this process has exited. Absent if it has already exited.
pub(crate) fn open_pidfd(process: &ProcessIdentity) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(process.pid).ok()?)?;
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // Compared after opening: from here on the descriptor refers to this process, even if its pid is reused.
    (start_ticks(process.pid)? == process.start_ticks).then_some(descriptor)
}

/// Sends a signal to exactly this process, and never to another one that has its pid now. Returns false if it is gone
/// or may not be signalled.
pub fn send_signal(process: &ProcessIdentity, signal: Signal) -> bool {
    open_pidfd(process).is_some_and(|descriptor| pidfd_send_signal(descriptor, signal).is_ok())
}

/// The fields of `/proc/PID/stat` that we need.
#[derive(Debug)]
struct ProcStat {
    name: String,
    state: char,
    parent: u32,
    cpu_ticks: u64,
    threads: u32,
    start_ticks: u64,
}

impl ProcStat {
    fn read(pid: u32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        // The name is in parentheses and can contain anything, including parentheses and spaces.
        let open = stat.iter().position(|byte| *byte == b'(')?;
        let close = stat.iter().rposition(|byte| *byte == b')')?;
        let name = String::from_utf8_lossy(stat.get(open + 1..close)?).into_owned();
        // proc(5) numbers the fields from 1; the first one after the name is the third.
        let mut fields = str::from_utf8(stat.get(close + 1..)?).ok()?.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let user_ticks: u64 = fields.nth(14 - 5)?.parse().ok()?;
        let system_ticks: u64 = fields.next()?.parse().ok()?;
        let threads = fields.nth(20 - 16)?.parse().ok()?;
        let start_ticks = fields.nth(22 - 21)?.parse().ok()?;
        Some(Self { name, state, parent, cpu_ticks: user_ticks + system_ticks, threads, start_ticks })
    }

    /// A process whose main thread has exited is also in state `Z` while its other threads keep running.
    fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x') && self.threads <= 1
    }

    fn into_process(self, pid: u32) -> ProcessIdentity {
        ProcessIdentity { pid, start_ticks: self.start_ticks, name: self.name }
    }
}

/// How children are found: from the kernel's lists or, if the kernel was built without them, by scanning the parents of
/// all processes.
#[derive(Debug)]
enum ChildLookup {
    Listed,
    Scanned(HashMap<u32, Vec<u32>>),
}

impl ChildLookup {
    fn detect() -> Self {
        if fs::exists("/proc/thread-self/children").unwrap_or(false) {
            Self::Listed
        } else {
            Self::scan_all()
        }
    }

    fn scan_all() -> Self {
        let mut by_parent: HashMap<u32, Vec<u32>> = HashMap::new();
        for pid in pids() {
            if let Some(stat) = ProcStat::read(pid) {
                by_parent.entry(stat.parent).or_default().push(pid);
            }
        }
        Self::Scanned(by_parent)
    }

    fn children(&self, pid: u32) -> Vec<u32> {
        self.children_of(pid, u32::MAX)
    }

    /// The children of a process with this many threads. The kernel lists a child under the thread that started it.
    fn children_of(&self, pid: u32, threads: u32) -> Vec<u32> {
        match self {
            Self::Scanned(by_parent) => by_parent.get(&pid).cloned().unwrap_or_default(),
            Self::Listed if threads == 1 => listed_children(pid, pid),
            Self::Listed => numbers_in(&format!("/proc/{pid}/task"))
                .flat_map(|thread| listed_children(pid, thread))
                .collect(),
        }
    }
}

/// The children that the kernel lists for one thread.
fn listed_children(pid: u32, thread: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).unwrap_or_default();
    list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The value of the mark in an environment block.
fn mark_in(environment: &[u8]) -> Option<&[u8]> {
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| variable.strip_prefix(MARK_VARIABLE.as_bytes())?.strip_prefix(b"="))
}

/// The pids of all processes.
fn pids() -> impl Iterator<Item = u32> {
    numbers_in("/proc")
}

/// The pids of the processes of our own user.
fn own_pids() -> impl Iterator<Item = u32> {
    let uid = rustix::process::geteuid().as_raw();
    pids().filter(move |pid| fs::metadata(format!("/proc/{pid}")).is_ok_and(|metadata| metadata.uid() == uid))
}

/// The entries of a directory that are numbers.
fn numbers_in(directory: &str) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that runs until it is killed.
    fn spawn_sleeper() -> Child {
        Command::new("sleep")
            .arg("1000")
            .env(MARK_VARIABLE, "of-the-sleeper")
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn kill_and_reap(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_name_with_brackets_and_blanks_does_not_shift_the_fields() {
        let line = b"7 (a) b) (c) S 3 7 7 0 -1 0 0 0 0 0 40 2 0 0 20 0 5 0 123456 0 0";
        let stat = ProcStat::parse(line).unwrap();
        assert_eq!((stat.name.as_str(), stat.state, stat.parent), ("a) b) (c", 'S', 3));
        assert_eq!((stat.cpu_ticks, stat.threads, stat.start_ticks), (42, 5, 123_456));
    }

    #[test]
    fn a_dead_first_thread_is_not_a_dead_process() {
        let stat = |state, threads| ProcStat {
            name: String::new(),
            state,
            parent: 1,
            threads,
            start_ticks: 1,
            cpu_ticks: 0,
        };
        assert!(stat('Z', 1).is_dead());
        assert!(!stat('Z', 2).is_dead());
        assert!(!stat('T', 1).is_dead());
    }

    #[test]
    fn a_child_is_found_with_its_parent_name_and_mark() {
        let us = std::process::id();
        let child = spawn_sleeper();
        let pid = child.id();
        assert_eq!(parent(pid), Some(us));
        assert!(ancestry(pid).take(2).eq([Some(pid), Some(us)]));
        assert!(children(us).contains(&pid));
        let process = ProcessIdentity::find(pid).unwrap();
        assert!(descendants(us).contains(&process) && is_alive(&process));
        // Until exec a child has its parent's name, and during exec it shows no environment for a moment.
        while mark_of(pid).as_deref() != Some("of-the-sleeper") {
            std::thread::yield_now();
        }
        assert_eq!(name(pid).as_deref(), Some("sleep"));
        assert!(find_marked("of-the-sleeper").contains(&process));
        assert!(find_marked("of-the").is_empty());
        let with_mark = (process.clone(), "of-the-sleeper".to_owned());
        assert!(find_marks(|mark| mark.starts_with("of-the-")).contains(&with_mark));
        assert!(find_started_as("1000").contains(&process) && !find_started_as("sleep").contains(&process));
        kill_and_reap(child);
        assert!(!is_alive(&process) && start_ticks(pid).is_none());
    }

    #[test]
    fn without_the_kernels_lists_the_same_children_are_found() {
        let us = std::process::id();
        let child = spawn_sleeper();
        assert!(ChildLookup::Listed.children(us).contains(&child.id()));
        assert!(ChildLookup::scan_all().children(us).contains(&child.id()));
        kill_and_reap(child);
    }

    #[test]
    fn a_zombie_is_told_from_the_living() {
        let mut child = spawn_sleeper();
        let process = ProcessIdentity::find(child.id()).unwrap();
        let pidfd = open_pidfd(&process).unwrap();
        child.kill().unwrap();
        rustix::event::poll(&mut [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)], None)
            .unwrap();
        assert!(ProcStat::read(process.pid).unwrap().is_dead() && !is_alive(&process));
        assert!(children(std::process::id()).contains(&process.pid));
        assert!(!descendants(std::process::id()).contains(&process));
        child.wait().unwrap();
    }

    #[test]
    fn a_pid_that_was_used_again_is_never_signalled() {
        let mut child = spawn_sleeper();
        let real = ProcessIdentity::find(child.id()).unwrap();
        let earlier = ProcessIdentity { start_ticks: real.start_ticks - 1, ..real.clone() };
        assert!(!is_alive(&earlier) && !send_signal(&earlier, Signal::KILL));
        assert!(child.try_wait().unwrap().is_none());
        assert!(send_signal(&real, Signal::KILL));
        child.wait().unwrap();
    }

    #[test]
    fn a_name_fits_the_program_or_the_script_it_runs() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("some-language-server");
        fs::write(&script, "sleep 1000").unwrap();
        let child = Command::new("sh").arg(&script).stdin(Stdio::null()).spawn().unwrap();
        let named = |name: &str| is_named(&ProcessIdentity::find(child.id()).unwrap(), &[name.to_owned()]);
        // Until exec a child has its parent's name, and during exec it shows no arguments for a moment.
        while !named("some-language-server") {
            std::thread::yield_now();
        }
        assert!(named("sh"));
        assert!(!named("some-language-serve") && !named("") && !named("sleep"));
        assert!(!is_named(&ProcessIdentity::find(child.id()).unwrap(), &[]));
        for descendant in descendants(child.id()) {
            send_signal(&descendant, Signal::KILL);
        }
        kill_and_reap(child);
    }
}
