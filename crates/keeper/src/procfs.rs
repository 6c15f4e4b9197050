//! What the kernel says about processes, and signals to exactly the one that was meant. Every reading allows for a
//! process that vanishes meanwhile. It reads `/proc` and sends signals; it decides nothing.

use std::cmp::{Ordering, Reverse};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::MARK_VARIABLE;
pub use crate::orphans::end_marked;

/// How far [`ancestry`] looks. A chain of parents is short, and while it is read it may change.
const ANCESTRY_MAX: usize = 4096;
/// What the kernel keeps of a process's name.
const NAME_MAX: usize = 15;

/// A process that was seen. Two are the same if pid and start time are: a pid is used again, and a name may change.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Its pid.
    pub pid: u32,
    /// When it started, in the kernel's ticks since boot.
    pub start_ticks: u64,
    /// Its name, as the kernel keeps it: the first 15 bytes.
    pub name: String,
}

impl ProcessIdentity {
    /// The living process with this pid.
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

/// When a process started, in the kernel's ticks since boot; with its pid that is who it is.
pub fn start_ticks(pid: u32) -> Option<u64> {
    ProcStat::read(pid).map(|stat| stat.start_ticks)
}

/// The parent of a process; none for the first of all, and for kernel threads.
pub fn parent(pid: u32) -> Option<u32> {
    ProcStat::read(pid).map(|stat| stat.parent).filter(|parent| *parent > 0)
}

/// The name of a process, as the kernel keeps it: the first 15 bytes.
pub fn name(pid: u32) -> Option<String> {
    ProcStat::read(pid).map(|stat| stat.name)
}

/// Whether this very process runs, or is stopped; a zombie is not alive.
pub fn is_alive(process: &ProcessIdentity) -> bool {
    ProcessIdentity::find(process.pid).is_some_and(|now| now == *process)
}

/// The children of a process, zombies too.
pub fn children(pid: u32) -> Vec<u32> {
    ChildLookup::detect().children(pid)
}

/// Every living process below this one, parents before their children. Its order and completeness hold for a family
/// that stands still; in one that forks and dies meanwhile some may be missed, and are found the next time.
pub fn descendants(pid: u32) -> Vec<ProcessIdentity> {
    process_tree(pid).into_iter().map(|node| node.process).collect()
}

/// A process, its parent, that one's parent and so on, up to the first of all. `None` stands for an ancestor that could
/// not be found: one that ended meanwhile, or that is too far away. Then nobody knows who comes after it.
pub fn ancestry(pid: u32) -> impl Iterator<Item = Option<u32>> {
    let next = |known: &Option<u32>| match known.and_then(ProcStat::read) {
        Some(stat) => (stat.parent > 0).then_some(Some(stat.parent)),
        None => known.map(|_| None),
    };
    let depth = |(place, pid)| if place < ANCESTRY_MAX { pid } else { None };
    std::iter::successors(Some(Some(pid)), next).enumerate().take(ANCESTRY_MAX + 1).map(depth)
}

/// Whether a process was started as this part of ours: `qd PART`. Anybody may claim it, so it can cost rights and never
/// give any.
pub fn is_started_as(pid: u32, part: &str) -> bool {
    let Ok(words) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
    words.split(|byte| *byte == 0).nth(1) == Some(part.as_bytes())
}

/// The living processes of our own user that carry this mark in the environment they were started with.
pub fn find_marked(mark: &str) -> Vec<ProcessIdentity> {
    let mut found = Vec::new();
    walk_marked(mark, &mut MarkScanCache::default(), |process, _| {
        found.push(process);
        ControlFlow::Continue(())
    });
    found
}

/// The mark that a process was started with.
pub fn mark_of(pid: u32) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    String::from_utf8(mark_in(&environment)?.to_vec()).ok()
}

/// A process and where it hangs.
#[derive(Debug, Clone)]
pub(crate) struct ProcessNode {
    pub(crate) process: ProcessIdentity,
    pub(crate) parent: u32,
}

/// [`descendants`], each with its parent.
pub(crate) fn process_tree(root: u32) -> Vec<ProcessNode> {
    let mut nodes = Vec::new();
    walk_descendants(root, usize::MAX, |node| {
        nodes.push(node);
        ControlFlow::Continue(())
    });
    nodes
}

/// Shows every living process below this one as soon as it is found, parents before their children. Of several children
/// the youngest comes first, and what is below it before its elders: in a storm those live longest. Ends early if it is
/// told to, or after so many dead children of the root.
///
/// True if it saw everybody and none died meanwhile. One that did may have left a child where we had looked already, so finding nobody
/// proves something only in such a calm. A zombie that its own parent keeps is no sign against it; one of the root is,
/// if the root has reaped just before.
pub(crate) fn walk_descendants(
    root: u32,
    dead_max: usize,
    mut visit: impl FnMut(ProcessNode) -> ControlFlow<()>,
) -> bool {
    let families = ChildLookup::detect();
    let mut is_calm = true;
    let mut dead = 0;
    // Each with the parent that it was found at. The last is the next.
    let mut ahead: Vec<(u32, u32)> = families.children(root).into_iter().map(|pid| (pid, root)).collect();
    while let Some((pid, parent)) = ahead.pop() {
        // Its parent may have died since, and it came to the root. Any other parent means that it died as well and that
        // its pid is somebody else's.
        let found = ProcStat::read(pid).filter(|stat| stat.parent == parent || stat.parent == root);
        match found {
            Some(stat) if !stat.is_dead() => {
                let (parent, threads) = (stat.parent, stat.threads);
                if visit(ProcessNode { parent, process: stat.into_process(pid) }).is_break() {
                    return is_calm;
                }
                ahead.extend(families.children_of(pid, threads).into_iter().map(|child| (child, pid)));
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

/// What looks for a mark have learnt and the next one need not ask again. In a storm a look must be quicker than a
/// process lives, and most of what there is are strangers, zombies and those that were met before.
#[derive(Debug, Default)]
pub(crate) struct MarkScanCache {
    scans: usize,
    /// Pids of those that do not bear the mark, or are dead.
    unmarked: HashSet<u32>,
    /// Those that bear the mark, by pid.
    marked: HashMap<u32, ProcessIdentity>,
    /// Zombies, and those that showed no environment since they were just becoming another program.
    seen_silent: HashSet<ProcessIdentity>,
}

/// What a process is to a look for a mark.
enum MarkScanResult {
    /// One that bears it, and whether it is met for the first time.
    Marked(ProcessIdentity, bool),
    /// One that does not, or is known to be dead.
    Unmarked,
    /// One that died while we looked, or may have left something behind.
    Inconclusive,
}

impl MarkScanCache {
    /// After so many looks everybody is asked again: a pid may be another's by then.
    const SCANS_PER_RESET: usize = 64;

    fn begin_scan(&mut self) {
        if self.scans.is_multiple_of(Self::SCANS_PER_RESET) {
            self.unmarked.clear();
        }
        self.scans += 1;
    }

    fn examine(&mut self, pid: u32, mark: &str, us: u32) -> MarkScanResult {
        let known = self.marked.get(&pid).cloned();
        // Its owner and its environment before its state: a process that is there now was there when they were read.
        let environment = match &known {
            Some(_) => Ok(Vec::new()),
            None => match fs::metadata(format!("/proc/{pid}")) {
                Ok(about) if about.uid() != us => return self.remember_unmarked(pid),
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
            // One that we may not read is not one of ours.
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

/// Shows every living process of our own user with this mark as soon as it is found, and whether it is met for the first
/// time; those come first, and the youngest of them before its elders. Ends early if it is told to.
///
/// True if it was calm, as with [`walk`]. Here a zombie, or one that shows no environment since it is just becoming
/// another program, is a sign against it when it is seen for the first time.
pub(crate) fn walk_marked(
    mark: &str,
    known: &mut MarkScanCache,
    mut visit: impl FnMut(ProcessIdentity, bool) -> ControlFlow<()>,
) -> bool {
    let us = rustix::process::geteuid().as_raw();
    let mut is_calm = true;
    known.begin_scan();
    let mut pids: Vec<u32> = pids().filter(|pid| !known.unmarked.contains(pid)).collect();
    pids.sort_unstable_by_key(|pid| (known.marked.contains_key(pid), Reverse(*pid)));
    for pid in pids {
        match known.examine(pid, mark, us) {
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

/// Whether a process goes by one of these names: its own, that of its program, or that of the script which its program
/// was given by path. Servers are often scripts, and the kernel then knows them as `node`.
pub(crate) fn is_named(process: &ProcessIdentity, names: &[String]) -> bool {
    if names.is_empty() {
        return false;
    }
    let command = fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
    let mut words = command.split(|byte| *byte == 0);
    let program = words.next().unwrap_or_default();
    let script = words.next().filter(|word| word.contains(&b'/')).unwrap_or_default();
    let last = |path: &[u8]| path.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec();
    let (program, script) = (last(program), last(script));
    names.iter().map(String::as_bytes).any(|name| {
        let kept = name.get(..NAME_MAX).unwrap_or(name);
        !name.is_empty() && (process.name.as_bytes() == kept || program == name || script == name)
    })
}

/// Something that becomes readable when this very process has ended; none if it has.
pub(crate) fn open_pidfd(process: &ProcessIdentity) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(process.pid).ok()?)?;
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // Asked after opening: from here on the descriptor means this process, whatever becomes of its pid.
    (start_ticks(process.pid)? == process.start_ticks).then_some(descriptor)
}

/// Sends a signal to this very process and never to another that has its pid now. False if it was gone, or may not
/// be signalled.
pub fn send_signal(process: &ProcessIdentity, signal: Signal) -> bool {
    open_pidfd(process).is_some_and(|descriptor| pidfd_send_signal(descriptor, signal).is_ok())
}

/// What `/proc/PID/stat` says, as far as we need it.
#[derive(Debug)]
struct ProcStat {
    name: String,
    state: char,
    parent: u32,
    threads: u32,
    start_ticks: u64,
}

impl ProcStat {
    fn read(pid: u32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        // The name stands in brackets and may itself hold anything, brackets and blanks too.
        let open = stat.iter().position(|byte| *byte == b'(')?;
        let close = stat.iter().rposition(|byte| *byte == b')')?;
        let name = String::from_utf8_lossy(stat.get(open + 1..close)?).into_owned();
        // proc(5) numbers the fields from 1; the first after the name is the third.
        let mut fields = str::from_utf8(stat.get(close + 1..)?).ok()?.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let threads = fields.nth(20 - 5)?.parse().ok()?;
        let start_ticks = fields.nth(22 - 21)?.parse().ok()?;
        Some(Self { name, state, parent, threads, start_ticks })
    }

    /// A process whose first thread has ended says `Z` too, while its other threads run on.
    fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x') && self.threads <= 1
    }

    fn into_process(self, pid: u32) -> ProcessIdentity {
        ProcessIdentity { pid, start_ticks: self.start_ticks, name: self.name }
    }
}

/// How children are found: the kernel's own lists, or, where it was built without them, all processes by their parent.
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

    /// The children of a process with so many threads. A child hangs on the thread that started it.
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

/// The mark in an environment as the kernel shows it.
fn mark_in(environment: &[u8]) -> Option<&[u8]> {
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| variable.strip_prefix(MARK_VARIABLE.as_bytes())?.strip_prefix(b"="))
}

/// All processes there are.
fn pids() -> impl Iterator<Item = u32> {
    numbers_in("/proc")
}

/// The entries of a folder that are numbers.
fn numbers_in(folder: &str) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Something that waits until it is ended.
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
        let line = b"7 (a) b) (c) S 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 5 0 123456 0 0";
        let stat = ProcStat::parse(line).unwrap();
        assert_eq!((stat.name.as_str(), stat.state, stat.parent), ("a) b) (c", 'S', 3));
        assert_eq!((stat.threads, stat.start_ticks), (5, 123_456));
    }

    #[test]
    fn a_dead_first_thread_is_not_a_dead_process() {
        let stat =
            |state, threads| ProcStat { name: String::new(), state, parent: 1, threads, start_ticks: 1 };
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
        // Until it has become another program a child bears its parent's name, and for a moment then no mark.
        while mark_of(pid).as_deref() != Some("of-the-sleeper") {
            std::thread::yield_now();
        }
        assert_eq!(name(pid).as_deref(), Some("sleep"));
        assert!(find_marked("of-the-sleeper").contains(&process));
        assert!(find_marked("of-the").is_empty());
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
        let ended = open_pidfd(&process).unwrap();
        child.kill().unwrap();
        rustix::event::poll(&mut [rustix::event::PollFd::new(&ended, rustix::event::PollFlags::IN)], None)
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
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("some-language-server");
        fs::write(&script, "sleep 1000").unwrap();
        let child = Command::new("sh").arg(&script).stdin(Stdio::null()).spawn().unwrap();
        let named = |name: &str| is_named(&ProcessIdentity::find(child.id()).unwrap(), &[name.to_owned()]);
        // Until it has become another program a child bears its parent's name, and for a moment then no words.
        while !named("some-language-server") {
            std::thread::yield_now();
        }
        assert!(named("sh"));
        assert!(!named("some-language-serve") && !named("") && !named("sleep"));
        assert!(!is_named(&ProcessIdentity::find(child.id()).unwrap(), &[]));
        for below in descendants(child.id()) {
            send_signal(&below, Signal::KILL);
        }
        kill_and_reap(child);
    }
}
