//! What happens when the keeper is dead: its worker ends the processes that it adopted, and if the worker is dead too,
//! the daemon ends everything that carries the mark. Both block their thread during the escalation.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::ops::ControlFlow;
use std::time::Duration;

use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpid};

use crate::escalation::{DEAD_MAX, ProcessVisitor, escalate_blocking};
use crate::procfs::{self, ProcessIdentity};
use crate::wire::SweepResult;

/// In every eighth scan, the descendants of all marked processes are listed, not only those of new ones: a process that
/// has removed the mark from its environment is found below one that still carries it. Listing all of them every time
/// would be too slow in a fork storm.
const FAMILY_SCAN_EVERY: usize = 8;

/// Makes this process a subreaper: from now on it, instead of pid 1, adopts what its dead children leave behind.
pub fn become_subreaper() -> io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Ends and reaps all children of this process and everything below them, except for the given pids and everything
/// below those. Must be called after [`KeeperHandle::wait_until_lost`](crate::KeeperHandle::wait_until_lost), because
/// only then have we adopted a dead keeper's children.
pub async fn end_orphans(spare_pids: &[u32], grace: Duration) -> SweepResult {
    let spared_pids: HashSet<u32> = spare_pids.iter().copied().collect();
    let task = tokio::task::spawn_blocking(move || {
        escalate_blocking(grace, |visit| visit_orphans(&spared_pids, visit))
    });
    task.await.expect("the escalation does not panic, and a blocking task is not aborted")
}

/// Ends everything that carries this mark and everything below it. This is the last resort, for when worker and keeper
/// are dead. It blocks for at most the grace period plus [`qd_protocol::limits::KILL_S`] seconds. It never touches this
/// process or its ancestors.
pub fn end_marked(mark: &str, grace: Duration) -> SweepResult {
    let own_ancestry: HashSet<u32> = procfs::ancestry(std::process::id()).flatten().collect();
    let mut cache = procfs::MarkScanCache::default();
    let mut scans = 0;
    escalate_blocking(grace, |visit| {
        scans += 1;
        let list_all = scans % FAMILY_SCAN_EVERY == 0;
        let mut found = BTreeSet::new();
        let mut visit_new = |process: ProcessIdentity| {
            let is_new = !own_ancestry.contains(&process.pid) && found.insert(process.clone());
            if is_new { visit(&process) } else { ControlFlow::Continue(()) }
        };
        procfs::walk_marked(mark, &mut cache, |process, is_new| {
            let pid = process.pid;
            visit_new(process)?;
            if !is_new && !list_all {
                return ControlFlow::Continue(());
            }
            procfs::process_tree(pid).into_iter().try_for_each(|node| visit_new(node.process))
        })
    })
}

/// Visits the living processes that we adopted. Our dead children are reaped one by one, because waiting for any child
/// would steal the exit status of children that other code in this process waits for.
fn visit_orphans(spared: &HashSet<u32>, visit: ProcessVisitor<'_>) -> bool {
    let us = std::process::id();
    for pid in procfs::children(us).into_iter().filter(|pid| !spared.contains(pid)) {
        if let Some(child) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            // This fails if other code has already reaped the child.
            let _ = waitpid(Some(child), WaitOptions::NOHANG);
        }
    }
    let mut below_spared = HashSet::new();
    procfs::walk_descendants(us, DEAD_MAX, |node| {
        let pid = node.process.pid;
        if spared.contains(&pid) || below_spared.contains(&node.parent) {
            below_spared.insert(pid);
            return ControlFlow::Continue(());
        }
        visit(&node.process)
    })
}
