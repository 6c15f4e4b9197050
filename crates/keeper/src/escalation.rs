//! How processes are ended, whoever scans for them: they get SIGTERM and a grace period, are then frozen so that none
//! can fork away, then killed; and the scan repeats until none is left or the kernel does not let them die. This module
//! signals the processes it is shown, and never waits itself: it returns what to wait for and how long.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use qd_protocol::limits::KILL_S;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use crate::procfs::{self, ProcessIdentity};
use crate::wire::SweepResult;

/// Scans per step. In a fork storm every scan misses some processes; the next step meets them.
const SCANS_PER_STEP: usize = 256;
/// Processes frozen in one scan before the next scan. In a fork storm the rest of the scan is outdated by then.
const FREEZE_BATCH: usize = 32;
/// After this many scans the frozen processes are killed even if new ones keep appearing. In a fork storm the frozen
/// ones would only slow the scans down.
const SCANS_BEFORE_KILL: usize = 8;
/// Calm scans that must find nothing before we believe it. A single one can miss a process that moved, by a fork and an
/// exit, from a part of the tree not scanned yet to one already scanned.
pub(crate) const CALM_SCANS: usize = 2;
/// Dead processes that a scan passes before it starts over. In a fork storm they appear faster than they are reaped,
/// and the living ones are younger.
pub(crate) const DEAD_MAX: usize = 512;
/// How long to wait for a killed process before scanning for others again.
const RESCAN_DELAY: Duration = Duration::from_millis(20);

/// Called for each target at the moment it is found. It can end the scan.
pub(crate) type ProcessVisitor<'a> = &'a mut dyn FnMut(&ProcessIdentity) -> ControlFlow<()>;

/// One escalation, from SIGTERM to SIGKILL.
#[derive(Debug)]
pub(crate) struct KillEscalation {
    stage: EscalationStage,
    /// All targets ever found.
    found: BTreeSet<ProcessIdentity>,
    /// Targets that were signalled in this stage, by SIGTERM or SIGSTOP.
    signalled: BTreeSet<ProcessIdentity>,
    killed: BTreeSet<ProcessIdentity>,
}

#[derive(Debug, Clone, Copy)]
enum EscalationStage {
    /// The targets have until then to exit on their own.
    Terminating { until: Instant },
    /// The targets are killed, and the kernel has until then to let them die.
    Killing { until: Instant },
}

/// The next action of the caller.
#[derive(Debug)]
pub(crate) enum EscalationStep {
    /// Step again when this process has exited, or at this time.
    Wait {
        watch: ProcessIdentity,
        until: Instant,
    },
    Over(SweepResult),
}

impl KillEscalation {
    pub(crate) fn new(now: Instant, grace: Duration) -> Self {
        let stage = EscalationStage::Terminating { until: now + grace };
        Self { stage, found: BTreeSet::new(), signalled: BTreeSet::new(), killed: BTreeSet::new() }
    }

    /// Ends the grace period at `limit`, unless it already ends earlier.
    pub(crate) fn shorten_grace(&mut self, limit: Instant) {
        if let EscalationStage::Terminating { until } = &mut self.stage {
            *until = limit.min(*until);
        }
    }

    /// Whether the grace period is over.
    pub(crate) fn is_killing(&self) -> bool {
        matches!(self.stage, EscalationStage::Killing { .. })
    }

    /// Scans for the targets and does what is due. `scan` visits each of them and returns whether the scan was calm,
    /// see [`procfs::walk_descendants`].
    pub(crate) fn step(
        &mut self,
        now: Instant,
        scan: impl FnMut(ProcessVisitor<'_>) -> bool,
    ) -> EscalationStep {
        if let EscalationStage::Terminating { until } = self.stage
            && until <= now
        {
            self.stage = EscalationStage::Killing { until: now + Duration::from_secs(KILL_S) };
            self.signalled.clear();
        }
        let targets = self.signal_all(scan);
        let Some(watch) = targets.last().cloned() else {
            return EscalationStep::Over(self.sweep_result(targets));
        };
        match self.stage {
            EscalationStage::Terminating { until } => EscalationStep::Wait { watch, until },
            EscalationStage::Killing { until } if now < until => {
                self.kill_frozen();
                EscalationStep::Wait { watch, until: until.min(now + RESCAN_DELAY) }
            }
            EscalationStage::Killing { .. } => EscalationStep::Over(self.sweep_result(targets)),
        }
    }

    /// Signals every target found, and scans again as long as one could have forked away meanwhile. Returns the living
    /// targets; empty only if it is certain enough that none is left.
    fn signal_all(&mut self, mut scan: impl FnMut(ProcessVisitor<'_>) -> bool) -> Vec<ProcessIdentity> {
        let mut targets = Vec::new();
        let mut calm_scans = 0;
        for scans in 1..=SCANS_PER_STEP {
            targets.clear();
            let mut frozen = 0;
            let is_calm = scan(&mut |process| {
                targets.push(process.clone());
                frozen += usize::from(self.terminate_or_freeze(process));
                if frozen < FREEZE_BATCH { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            calm_scans += usize::from(is_calm && targets.is_empty());
            if calm_scans >= CALM_SCANS || (frozen == 0 && !targets.is_empty()) {
                break;
            }
            if scans % SCANS_BEFORE_KILL == 0 {
                self.kill_frozen();
            }
        }
        targets
    }

    /// Terminates or freezes a target that has not been signalled in this stage. Returns true if it was frozen. It is
    /// not killed at once, because its parent might be a supervisor that restarts what dies.
    fn terminate_or_freeze(&mut self, process: &ProcessIdentity) -> bool {
        if !self.signalled.insert(process.clone()) {
            return false;
        }
        self.found.insert(process.clone());
        match self.stage {
            EscalationStage::Terminating { .. } => {
                procfs::send_signal(process, Signal::TERM);
                // A stopped process could not handle SIGTERM.
                procfs::send_signal(process, Signal::CONT);
                false
            }
            EscalationStage::Killing { .. } => {
                procfs::send_signal(process, Signal::STOP);
                true
            }
        }
    }

    /// Kills the frozen processes.
    fn kill_frozen(&mut self) {
        if matches!(self.stage, EscalationStage::Terminating { .. }) {
            return;
        }
        for process in &self.signalled {
            if self.killed.insert(process.clone()) {
                procfs::send_signal(process, Signal::KILL);
            }
        }
    }

    fn sweep_result(&self, survivors: Vec<ProcessIdentity>) -> SweepResult {
        let killed = self.found.len().saturating_sub(survivors.len());
        SweepResult { killed: u32::try_from(killed).unwrap_or(u32::MAX), survivors }
    }
}

/// Runs the whole escalation, blocking the thread.
pub(crate) fn escalate_blocking(
    grace: Duration,
    mut scan: impl FnMut(ProcessVisitor<'_>) -> bool,
) -> SweepResult {
    let mut escalation = KillEscalation::new(Instant::now(), grace);
    loop {
        match escalation.step(Instant::now(), &mut scan) {
            EscalationStep::Over(result) => return result,
            EscalationStep::Wait { watch, until } => {
                if let Some(pidfd) = procfs::open_pidfd(&watch) {
                    poll_until(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(until));
                }
            }
        }
    }
}

/// Waits until a descriptor is ready or the time has come. An interruption counts as nothing ready.
pub(crate) fn poll_until(descriptors: &mut [PollFd<'_>], until: Option<Instant>) {
    let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
    let timeout =
        timeout.map(|timeout| Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 }));
    if rustix::event::poll(descriptors, timeout.as_ref()).is_err() {
        for descriptor in descriptors {
            descriptor.clear_revents();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that no signal reaches.
    fn immortal() -> ProcessIdentity {
        ProcessIdentity { pid: u32::MAX, start_ticks: 1, name: "immortal".to_owned() }
    }

    fn visit_immortal(visit: ProcessVisitor<'_>) -> bool {
        let _ = visit(&immortal());
        true
    }

    #[track_caller]
    fn expect_wait(step: EscalationStep) -> Instant {
        match step {
            EscalationStep::Wait { until, .. } => until,
            EscalationStep::Over(result) => panic!("it is over: {result:?}"),
        }
    }

    #[track_caller]
    fn expect_over(step: EscalationStep) -> SweepResult {
        match step {
            EscalationStep::Over(result) => result,
            EscalationStep::Wait { .. } => panic!("it goes on"),
        }
    }

    #[test]
    fn one_that_the_kernel_will_not_let_die_is_named_after_its_time() {
        let started = Instant::now();
        let mut escalation = KillEscalation::new(started, Duration::from_secs(5));
        let killed = expect_wait(escalation.step(started, visit_immortal));
        assert_eq!(killed, started + Duration::from_secs(5));
        assert_eq!(expect_wait(escalation.step(killed, visit_immortal)), killed + RESCAN_DELAY);
        let limit = killed + Duration::from_secs(KILL_S);
        let before = limit - Duration::from_millis(1);
        assert_eq!(expect_wait(escalation.step(before, visit_immortal)), limit);
        let result = expect_over(escalation.step(limit, visit_immortal));
        assert_eq!(result, SweepResult { killed: 0, survivors: vec![immortal()] });
    }

    #[test]
    fn haste_shortens_the_grace_and_never_lengthens_it() {
        let started = Instant::now();
        let mut escalation = KillEscalation::new(started, Duration::from_secs(5));
        escalation.shorten_grace(started + Duration::from_secs(9));
        assert_eq!(expect_wait(escalation.step(started, visit_immortal)), started + Duration::from_secs(5));
        escalation.shorten_grace(started + Duration::from_secs(1));
        assert_eq!(expect_wait(escalation.step(started, visit_immortal)), started + Duration::from_secs(1));
    }

    #[test]
    fn an_empty_scan_that_was_not_calm_proves_nothing() {
        let started = Instant::now();
        let mut escalation = KillEscalation::new(started, Duration::ZERO);
        let mut scans = 0;
        let step = escalation.step(started, |visit| {
            scans += 1;
            if scans > 3 { visit_immortal(visit) } else { scans == 2 }
        });
        expect_wait(step);
        // The target was found in the fourth scan and frozen, and the fifth found no new one.
        assert_eq!(scans, 5);
        let result = expect_over(escalation.step(started, |_| true));
        assert_eq!(result, SweepResult { killed: 1, survivors: Vec::new() });
    }
}
