//! What is done where the keeper is dead: a worker ends what fell to it, and a daemon, whose worker is dead as well,
//! ends what bears the mark. Both block their thread while they climb the ladder.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::ops::ControlFlow;
use std::time::Duration;

use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpid};

use crate::escalation::{DEAD_MAX, ProcessVisitor, escalate_blocking};
use crate::procfs::{self, ProcessIdentity};
use crate::wire::SweepResult;

/// Of how many looks one asks all that bear the mark for their families, and not only those that are new: what cast off
/// the mark is found below who has it. To ask all of them every time would be too slow for a storm.
const FAMILY_SCAN_EVERY: usize = 8;

/// From now on what a dead child of ours leaves behind falls to this process and not to the first of all.
pub fn become_subreaper() -> io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Ends and reaps all children of this process and what is below them, but for those with these pids and what is below
/// those. To be called after [`crate::Keeper::lost`]: only then have a dead keeper's children fallen to us.
pub async fn end_orphans(spare_pids: &[u32], grace: Duration) -> SweepResult {
    let spared: HashSet<u32> = spare_pids.iter().copied().collect();
    let climbed =
        tokio::task::spawn_blocking(move || escalate_blocking(grace, |seen| visit_orphans(&spared, seen)));
    climbed.await.expect("a climb does not panic, and a task that blocks is not aborted")
}

/// Ends all that bears this mark and what is below it: the last net, for when worker and keeper are dead. Blocks for as
/// long as that takes, at most the grace and [`qd_protocol::limits::KILL_S`] seconds. Neither this process nor one
/// that it descends from is touched.
pub fn end_marked(mark: &str, grace: Duration) -> SweepResult {
    let ours: HashSet<u32> = procfs::ancestry(std::process::id()).flatten().collect();
    let mut known = procfs::MarkScanCache::default();
    let mut looks = 0;
    escalate_blocking(grace, |seen| {
        looks += 1;
        let asks_all = looks % FAMILY_SCAN_EVERY == 0;
        let mut found = BTreeSet::new();
        let mut show = |process: ProcessIdentity| {
            let is_new = !ours.contains(&process.pid) && found.insert(process.clone());
            if is_new { seen(&process) } else { ControlFlow::Continue(()) }
        };
        procfs::walk_marked(mark, &mut known, |process, is_new| {
            let pid = process.pid;
            show(process)?;
            if !is_new && !asks_all {
                return ControlFlow::Continue(());
            }
            procfs::process_tree(pid).into_iter().try_for_each(|node| show(node.process))
        })
    })
}

/// Shows the living ones that fell to us. The dead among our children are reaped, one by one: a wait for any child would
/// take away what others in this process wait for.
fn visit_orphans(spared: &HashSet<u32>, seen: ProcessVisitor<'_>) -> bool {
    let us = std::process::id();
    for pid in procfs::children(us).into_iter().filter(|pid| !spared.contains(pid)) {
        if let Some(child) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            // It fails if somebody else has reaped it.
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
        seen(&node.process)
    })
}
