//! How processes are ended, whoever looks for them: asked and given time, then frozen so that none can fork away, then
//! killed, then looked for again until none is left or the kernel will not let go. It signals what it is shown, and
//! never waits itself: it says for what and how long to wait.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use qd_protocol::limits::KILL_S;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use crate::procfs::{self, ProcessIdentity};
use crate::wire::SweepResult;

/// How often we look in one step. In a storm some slip through every look, and are met on the next step.
const SCANS_PER_STEP: usize = 256;
/// How many processes are frozen in one look before we look again. In a storm the rest of what we saw is old by then.
const FREEZE_BATCH: usize = 32;
/// After how many looks those that were frozen are killed although there are still new ones. In a storm the frozen would
/// only be in our way.
const SCANS_BEFORE_KILL: usize = 8;
/// How many calm looks must find nobody before we believe it. One could have missed a process that moved, by a fork and
/// an exit, from where we had not looked yet to where we had.
const CALM_SCANS: usize = 2;
/// How many dead a look should pass before it is begun anew. In a storm they come faster than they are reaped, and who
/// is alive is younger.
pub(crate) const DEAD_MAX: usize = 512;
/// How long to wait for one that was killed before we look for others again.
const RESCAN_DELAY: Duration = Duration::from_millis(20);

/// What is shown each process that is to end, at the moment that it is found, and may end the look.
pub(crate) type ProcessVisitor<'a> = &'a mut dyn FnMut(&ProcessIdentity) -> ControlFlow<()>;

/// One climb from the polite signal to the last.
#[derive(Debug)]
pub(crate) struct KillEscalation {
    stage: EscalationStage,
    /// All that were ever found.
    found: BTreeSet<ProcessIdentity>,
    /// Those that were struck on this rung: asked, or frozen.
    signalled: BTreeSet<ProcessIdentity>,
    /// Those that were killed.
    killed: BTreeSet<ProcessIdentity>,
}

#[derive(Debug, Clone, Copy)]
enum EscalationStage {
    /// They may go by themselves until then.
    Terminating { until: Instant },
    /// They are killed, and the kernel has until then to let them go.
    Killing { until: Instant },
}

/// What comes next.
#[derive(Debug)]
pub(crate) enum EscalationStep {
    /// Step again when this process has ended, or at this time.
    Wait { watch: ProcessIdentity, until: Instant },
    /// It is over.
    Over(SweepResult),
}

impl KillEscalation {
    pub(crate) fn new(now: Instant, grace: Duration) -> Self {
        let stage = EscalationStage::Terminating { until: now + grace };
        Self { stage, found: BTreeSet::new(), signalled: BTreeSet::new(), killed: BTreeSet::new() }
    }

    /// Those that were asked have at most until then.
    pub(crate) fn shorten_grace(&mut self, limit: Instant) {
        if let EscalationStage::Terminating { until } = &mut self.stage {
            *until = limit.min(*until);
        }
    }

    /// Looks for the processes that are to end and does what their time has come for. `look` shows each of them and
    /// says whether it was calm, see [`proc::walk`].
    pub(crate) fn step(
        &mut self,
        now: Instant,
        look: impl FnMut(ProcessVisitor<'_>) -> bool,
    ) -> EscalationStep {
        if let EscalationStage::Terminating { until } = self.stage
            && until <= now
        {
            self.stage = EscalationStage::Killing { until: now + Duration::from_secs(KILL_S) };
            self.signalled.clear();
        }
        let targets = self.signal_all(look);
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

    /// Strikes everybody who is found, and looks again for as long as one could have forked away meanwhile. Gives those
    /// that are there, or nobody if that is certain enough.
    fn signal_all(&mut self, mut look: impl FnMut(ProcessVisitor<'_>) -> bool) -> Vec<ProcessIdentity> {
        let mut targets = Vec::new();
        let mut calm = 0;
        for turn in 1..=SCANS_PER_STEP {
            targets.clear();
            let mut frozen = 0;
            let is_calm = look(&mut |process| {
                targets.push(process.clone());
                frozen += usize::from(self.terminate_or_freeze(process));
                if frozen < FREEZE_BATCH { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            calm += usize::from(is_calm && targets.is_empty());
            if calm >= CALM_SCANS || (frozen == 0 && !targets.is_empty()) {
                break;
            }
            if turn % SCANS_BEFORE_KILL == 0 {
                self.kill_frozen();
            }
        }
        targets
    }

    /// Asks or freezes one that was not; true if it was frozen. Killing it at once would let its parent, who may be one
    /// that starts the dead again, do so.
    fn terminate_or_freeze(&mut self, process: &ProcessIdentity) -> bool {
        if !self.signalled.insert(process.clone()) {
            return false;
        }
        self.found.insert(process.clone());
        match self.stage {
            EscalationStage::Terminating { .. } => {
                procfs::send_signal(process, Signal::TERM);
                // One that is stopped could not hear it.
                procfs::send_signal(process, Signal::CONT);
                false
            }
            EscalationStage::Killing { .. } => {
                procfs::send_signal(process, Signal::STOP);
                true
            }
        }
    }

    /// Kills the frozen.
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

/// Climbs to the end and blocks meanwhile.
pub(crate) fn escalate_blocking(
    grace: Duration,
    mut look: impl FnMut(ProcessVisitor<'_>) -> bool,
) -> SweepResult {
    let mut ladder = KillEscalation::new(Instant::now(), grace);
    loop {
        match ladder.step(Instant::now(), &mut look) {
            EscalationStep::Over(swept) => return swept,
            EscalationStep::Wait { watch, until } => {
                if let Some(ended) = procfs::open_pidfd(&watch) {
                    poll_until(&mut [PollFd::new(&ended, PollFlags::IN)], Some(until));
                }
            }
        }
    }
}

/// Waits until something is ready or the time has come. An interruption counts as nothing ready.
pub(crate) fn poll_until(descriptors: &mut [PollFd<'_>], until: Option<Instant>) {
    let patience = until.map(|until| until.saturating_duration_since(Instant::now()));
    let patience =
        patience.map(|patience| Timespec::try_from(patience).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 }));
    if rustix::event::poll(descriptors, patience.as_ref()).is_err() {
        for descriptor in descriptors {
            descriptor.clear_revents();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that no signal reaches.
    fn immortal() -> ProcessIdentity {
        ProcessIdentity { pid: u32::MAX, start_ticks: 1, name: "immortal".to_owned() }
    }

    fn visit_immortal(seen: ProcessVisitor<'_>) -> bool {
        let _ = seen(&immortal());
        true
    }

    #[track_caller]
    fn expect_wait(step: EscalationStep) -> Instant {
        match step {
            EscalationStep::Wait { until, .. } => until,
            EscalationStep::Over(swept) => panic!("it is over: {swept:?}"),
        }
    }

    #[track_caller]
    fn expect_over(step: EscalationStep) -> SweepResult {
        match step {
            EscalationStep::Over(swept) => swept,
            EscalationStep::Wait { .. } => panic!("it goes on"),
        }
    }

    #[test]
    fn one_that_the_kernel_will_not_let_die_is_named_after_its_time() {
        let begun = Instant::now();
        let mut ladder = KillEscalation::new(begun, Duration::from_secs(5));
        let killed = expect_wait(ladder.step(begun, visit_immortal));
        assert_eq!(killed, begun + Duration::from_secs(5));
        assert_eq!(expect_wait(ladder.step(killed, visit_immortal)), killed + RESCAN_DELAY);
        let limit = killed + Duration::from_secs(KILL_S);
        let before = limit - Duration::from_millis(1);
        assert_eq!(expect_wait(ladder.step(before, visit_immortal)), limit);
        let swept = expect_over(ladder.step(limit, visit_immortal));
        assert_eq!(swept, SweepResult { killed: 0, survivors: vec![immortal()] });
    }

    #[test]
    fn haste_shortens_the_grace_and_never_lengthens_it() {
        let begun = Instant::now();
        let mut ladder = KillEscalation::new(begun, Duration::from_secs(5));
        ladder.shorten_grace(begun + Duration::from_secs(9));
        assert_eq!(expect_wait(ladder.step(begun, visit_immortal)), begun + Duration::from_secs(5));
        ladder.shorten_grace(begun + Duration::from_secs(1));
        assert_eq!(expect_wait(ladder.step(begun, visit_immortal)), begun + Duration::from_secs(1));
    }

    #[test]
    fn nobody_is_believed_to_be_gone_after_a_look_that_was_not_calm() {
        let begun = Instant::now();
        let mut ladder = KillEscalation::new(begun, Duration::ZERO);
        let mut looks = 0;
        let step = ladder.step(begun, |seen| {
            looks += 1;
            if looks > 3 { visit_immortal(seen) } else { looks == 2 }
        });
        expect_wait(step);
        // It was found on the fourth look and frozen, and there was nobody new on the fifth.
        assert_eq!(looks, 5);
        let swept = expect_over(ladder.step(begun, |_| true));
        assert_eq!(swept, SweepResult { killed: 1, survivors: Vec::new() });
    }
}
