//! The processes behind the workers of this machine, as the kernel knows them: a worker process holds its lock file
//! open, and everything that its agent starts carries its mark. So they are found and ended even if their record, lock
//! or socket was deleted, or the key of the home was replaced. All functions here block.
//!
//! Design: docs/design/how-a-worker-is-known.md

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use qd_keeper::{ProcessIdentity, Signal, procfs};
use qd_link::WorkerEnding;
use qd_protocol::WorkerId;
use qd_protocol::limits::KILL_S;

/// How long processes of a lost agent have between SIGTERM and SIGKILL.
const KILL_GRACE: Duration = Duration::from_millis(200);
/// How long the keeper of a killed worker has to end what is left, before that is killed directly.
const KEEPER_WAIT: Duration = Duration::from_secs(2);
/// The pause between two checks whether processes are gone.
const EXIT_POLL: Duration = Duration::from_millis(5);
/// How the link of an open file ends if the file was deleted.
const DELETED_SUFFIX: &[u8] = b" (deleted)";

/// A living worker process of this home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostProcess {
    /// The id by which it was started, from the name of its lock file.
    pub(super) id: String,
    pub(super) process: ProcessIdentity,
}

/// Which worker to end.
#[derive(Debug, Clone)]
pub(super) struct DoomedWorker {
    /// The folder of the home's workers.
    pub(super) dir: PathBuf,
    /// The id of the process that holds the worker.
    pub(super) host: String,
    pub(super) worker: WorkerId,
    /// The mark that this home gives the worker. Processes that were started under another key have another one.
    pub(super) mark: String,
    /// How long the process may take to exit by itself, if it seems to be doing so.
    pub(super) exit_wait: Duration,
}

/// All living worker processes that hold a lock in this folder, even a deleted one. Our own ancestors are left out: this
/// daemon may have been started by the agent of another one.
pub(super) fn find_host_processes(dir: &Path) -> Vec<HostProcess> {
    let dir = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    let ancestors = own_ancestry();
    let workers = procfs::find_started_as("__worker");
    let found = workers.into_iter().filter(|process| !ancestors.contains(&process.pid));
    let in_dir = |path: &Path| path.parent() == Some(dir.as_path());
    found.filter_map(|process| Some(HostProcess { id: held_lock(process.pid, in_dir)?, process })).collect()
}

/// Ends a worker process and everything that its agent has started. Each process is signalled through a pidfd, and only
/// if pid and start time are those that were found.
pub(super) fn end_worker(doomed: &DoomedWorker) -> WorkerEnding {
    let DoomedWorker { dir, host, worker, mark, exit_wait } = doomed;
    let ancestors = own_ancestry();
    let mut marked = procfs::find_marks(|mark| worker_named_in(mark).is_some_and(|named| named == *worker));
    marked.retain(|(process, _)| !ancestors.contains(&process.pid));
    let held = find_host_processes(dir).into_iter().filter(|found| found.id == *host);
    let mut hosts: BTreeSet<ProcessIdentity> = held.map(|found| found.process).collect();
    hosts.extend(marked.iter().filter_map(|(process, _)| host_above(process.pid, host)));
    hosts.retain(|process| !ancestors.contains(&process.pid));
    wait_until_gone(&hosts, *exit_wait);
    hosts.retain(procfs::is_alive);

    // Collected before the worker is killed: afterwards its children are no longer below it.
    let mut family = hosts.clone();
    family.extend(hosts.iter().flat_map(|host| procfs::descendants(host.pid)));
    family.extend(marked.iter().map(|(process, _)| process.clone()));
    family.retain(|process| !ancestors.contains(&process.pid));
    for host in &hosts {
        procfs::send_signal(host, Signal::KILL);
    }
    let marks: BTreeSet<&str> = marked.iter().map(|(_, mark)| mark.as_str()).chain([mark.as_str()]).collect();
    for mark in marks {
        let swept = procfs::end_marked(mark, KILL_GRACE);
        tracing::debug!(%worker, ?swept, "ended the processes of an agent");
        family.extend(swept.survivors);
    }
    wait_until_gone(&family, KEEPER_WAIT);
    // A stopped keeper ends nothing.
    for process in family.iter().filter(|process| procfs::is_alive(process)) {
        procfs::send_signal(process, Signal::KILL);
    }
    wait_until_gone(&family, Duration::from_secs(KILL_S));
    let survivors: Vec<u32> =
        family.iter().filter(|process| procfs::is_alive(process)).map(|process| process.pid).collect();
    match (survivors.is_empty(), hosts.is_empty()) {
        (false, _) => WorkerEnding::Survived(survivors),
        (true, false) => WorkerEnding::Ended,
        (true, true) => WorkerEnding::NotFound,
    }
}

/// The worker that a mark names. Whether our home made the mark is not checked.
pub(super) fn worker_named_in(mark: &str) -> Option<WorkerId> {
    WorkerId::parse(mark.rsplit_once('.')?.0).ok()
}

/// The nearest worker process above this process, if it has this id. Its folder may have been moved elsewhere.
fn host_above(pid: u32, host: &str) -> Option<ProcessIdentity> {
    let mut ancestors = procfs::ancestry(pid).skip(1).map_while(|ancestor| ancestor);
    let nearest = ancestors.find(|ancestor| procfs::is_started_as(*ancestor, "__worker"))?;
    let process = ProcessIdentity::find(nearest)?;
    held_lock(process.pid, |_| true).is_some_and(|id| id == host).then_some(process)
}

/// The id in the name of the worker's lock file that the process has open, if the file's path is accepted.
fn held_lock(pid: u32, accepts: impl Fn(&Path) -> bool) -> Option<String> {
    let open_files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    open_files.flatten().find_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let target = target.as_os_str().as_bytes();
        let path = Path::new(OsStr::from_bytes(target.strip_suffix(DELETED_SUFFIX).unwrap_or(target)));
        let id = path.file_name()?.to_str()?.strip_suffix(".lock")?;
        (accepts(path) && WorkerId::parse(id).is_ok()).then(|| id.to_owned())
    })
}

fn own_ancestry() -> HashSet<u32> {
    procfs::ancestry(std::process::id()).flatten().collect()
}

fn wait_until_gone(processes: &BTreeSet<ProcessIdentity>, limit: Duration) {
    let until = Instant::now() + limit;
    while processes.iter().any(procfs::is_alive) && Instant::now() < until {
        std::thread::sleep(EXIT_POLL);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that looks like the worker process `id`: it was started as one, holds its lock, and has a child.
    fn start_pretended_worker(dir: &Path, id: &str) -> Child {
        fs::write(dir.join("__worker"), "exec 9>\"$1.lock\"; sleep 600 9>&- & echo > \"$1.ready\"; wait")
            .unwrap();
        let child = Command::new("sh").args(["__worker", id]).current_dir(dir).stdin(Stdio::null()).spawn();
        // For a moment its child has the lock open as well, and looks the same.
        let processes = || find_host_processes(dir).iter().filter(|found| found.id == id).count();
        while !dir.join(format!("{id}.ready")).exists() || processes() != 1 {
            std::thread::sleep(EXIT_POLL);
        }
        child.unwrap()
    }

    fn doomed(dir: &Path, id: &str) -> DoomedWorker {
        DoomedWorker {
            dir: dir.to_owned(),
            host: id.to_owned(),
            worker: WorkerId::parse(id).unwrap(),
            mark: format!("{id}.00"),
            exit_wait: Duration::ZERO,
        }
    }

    #[test]
    fn a_worker_is_found_by_the_lock_it_holds_and_ended_with_everything_below_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut kept = start_pretended_worker(dir.path(), "wrk_kept");
        let mut lost = start_pretended_worker(dir.path(), "wrk_lost");
        let ids = || {
            let mut ids: Vec<_> = find_host_processes(dir.path()).into_iter().map(|found| found.id).collect();
            ids.sort();
            ids
        };
        assert_eq!(ids(), ["wrk_kept", "wrk_lost"]);
        fs::remove_file(dir.path().join("wrk_lost.lock")).unwrap();
        assert_eq!(ids(), ["wrk_kept", "wrk_lost"], "also by a lock that was deleted");
        let below = procfs::descendants(lost.id());
        assert!(!below.is_empty());
        assert_eq!(end_worker(&doomed(dir.path(), "wrk_lost")), WorkerEnding::Ended);
        assert!(!below.iter().any(procfs::is_alive), "{below:?}");
        lost.wait().unwrap();
        assert_eq!(ids(), ["wrk_kept"]);
        assert_eq!(end_worker(&doomed(dir.path(), "wrk_lost")), WorkerEnding::NotFound);
        assert_eq!(end_worker(&doomed(dir.path(), "wrk_kept")), WorkerEnding::Ended);
        kept.wait().unwrap();
    }

    #[test]
    fn a_process_that_has_a_lock_open_and_is_no_worker_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let _lock = File::create(dir.path().join("wrk_a.lock")).unwrap();
        assert_eq!(find_host_processes(dir.path()), []);
        assert_eq!(end_worker(&doomed(dir.path(), "wrk_a")), WorkerEnding::NotFound);
    }

    #[test]
    fn a_mark_names_its_worker_whoever_made_it() {
        assert_eq!(worker_named_in("wrk_a_1.00ff"), WorkerId::parse("wrk_a_1").ok());
        assert_eq!(worker_named_in("wrk_a_1"), None);
        assert_eq!(worker_named_in("../a.00"), None);
    }
}
