//! How processes are ended, whoever looks for them: asked and given time, then frozen so that none can fork away, then
//! killed, then looked for again until none is left or the kernel will not let go. It signals what it is shown, and
//! never waits itself: it says for what and how long to wait.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use qd_protocol::limits::KILL_S;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use crate::proc::{self, Process};
use crate::wire::Swept;

/// How often we look in one step. In a storm some slip through every look, and are met on the next step.
const LOOKS: usize = 256;
/// How many processes are frozen in one look before we look again. In a storm the rest of what we saw is old by then.
const BATCH: usize = 32;
/// After how many looks those that were frozen are killed although there are still new ones. In a storm the frozen would
/// only be in our way.
const FREEZE_LOOKS: usize = 8;
/// How many calm looks must find nobody before we believe it. One could have missed a process that moved, by a fork and
/// an exit, from where we had not looked yet to where we had.
const CALM_LOOKS: usize = 2;
/// How many dead a look should pass before it is begun anew. In a storm they come faster than they are reaped, and who
/// is alive is younger.
pub(crate) const DEAD_MAX: usize = 512;
/// How long to wait for one that was killed before we look for others again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What is shown each process that is to end, at the moment that it is found, and may end the look.
pub(crate) type Seen<'a> = &'a mut dyn FnMut(&Process) -> ControlFlow<()>;

/// One climb from the polite signal to the last.
#[derive(Debug)]
pub(crate) struct Ladder {
    rung: Rung,
    /// All that were ever found.
    found: BTreeSet<Process>,
    /// Those that were struck on this rung: asked, or frozen.
    struck: BTreeSet<Process>,
    /// Those that were killed.
    shot: BTreeSet<Process>,
}

#[derive(Debug, Clone, Copy)]
enum Rung {
    /// They may go by themselves until then.
    Asking { until: Instant },
    /// They are killed, and the kernel has until then to let them go.
    Killing { until: Instant },
}

/// What comes next.
#[derive(Debug)]
pub(crate) enum Step {
    /// Step again when this process has ended, or at this time.
    Wait { watch: Process, until: Instant },
    /// It is over.
    Over(Swept),
}

impl Ladder {
    pub(crate) fn new(now: Instant, grace: Duration) -> Self {
        let rung = Rung::Asking { until: now + grace };
        Self { rung, found: BTreeSet::new(), struck: BTreeSet::new(), shot: BTreeSet::new() }
    }

    /// Those that were asked have at most until then.
    pub(crate) fn hasten(&mut self, limit: Instant) {
        if let Rung::Asking { until } = &mut self.rung {
            *until = limit.min(*until);
        }
    }

    /// Looks for the processes that are to end and does what their time has come for. `look` shows each of them and
    /// says whether it was calm, see [`proc::walk`].
    pub(crate) fn step(&mut self, now: Instant, look: impl FnMut(Seen<'_>) -> bool) -> Step {
        if let Rung::Asking { until } = self.rung
            && until <= now
        {
            self.rung = Rung::Killing { until: now + Duration::from_secs(KILL_S) };
            self.struck.clear();
        }
        let targets = self.strike_all(look);
        let Some(watch) = targets.last().cloned() else { return Step::Over(self.swept(targets)) };
        match self.rung {
            Rung::Asking { until } => Step::Wait { watch, until },
            Rung::Killing { until } if now < until => {
                self.shoot();
                Step::Wait { watch, until: until.min(now + LOOK_AGAIN) }
            }
            Rung::Killing { .. } => Step::Over(self.swept(targets)),
        }
    }

    /// Strikes everybody who is found, and looks again for as long as one could have forked away meanwhile. Gives those
    /// that are there, or nobody if that is certain enough.
    fn strike_all(&mut self, mut look: impl FnMut(Seen<'_>) -> bool) -> Vec<Process> {
        let mut targets = Vec::new();
        let mut calm = 0;
        for turn in 1..=LOOKS {
            targets.clear();
            let mut frozen = 0;
            let is_calm = look(&mut |process| {
                targets.push(process.clone());
                frozen += usize::from(self.strike(process));
                if frozen < BATCH { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            calm += usize::from(is_calm && targets.is_empty());
            if calm >= CALM_LOOKS || (frozen == 0 && !targets.is_empty()) {
                break;
            }
            if turn % FREEZE_LOOKS == 0 {
                self.shoot();
            }
        }
        targets
    }

    /// Asks or freezes one that was not; true if it was frozen. Killing it at once would let its parent, who may be one
    /// that starts the dead again, do so.
    fn strike(&mut self, process: &Process) -> bool {
        if !self.struck.insert(process.clone()) {
            return false;
        }
        self.found.insert(process.clone());
        match self.rung {
            Rung::Asking { .. } => {
                proc::signal(process, Signal::TERM);
                // One that is stopped could not hear it.
                proc::signal(process, Signal::CONT);
                false
            }
            Rung::Killing { .. } => {
                proc::signal(process, Signal::STOP);
                true
            }
        }
    }

    /// Kills the frozen.
    fn shoot(&mut self) {
        if matches!(self.rung, Rung::Asking { .. }) {
            return;
        }
        for process in &self.struck {
            if self.shot.insert(process.clone()) {
                proc::signal(process, Signal::KILL);
            }
        }
    }

    fn swept(&self, survivors: Vec<Process>) -> Swept {
        let killed = self.found.len().saturating_sub(survivors.len());
        Swept { killed: u32::try_from(killed).unwrap_or(u32::MAX), survivors }
    }
}

/// Climbs to the end and blocks meanwhile.
pub(crate) fn climb(grace: Duration, mut look: impl FnMut(Seen<'_>) -> bool) -> Swept {
    let mut ladder = Ladder::new(Instant::now(), grace);
    loop {
        match ladder.step(Instant::now(), &mut look) {
            Step::Over(swept) => return swept,
            Step::Wait { watch, until } => {
                if let Some(ended) = proc::watch(&watch) {
                    poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(until));
                }
            }
        }
    }
}

/// Waits until something is ready or the time has come. An interruption counts as nothing ready.
pub(crate) fn poll(descriptors: &mut [PollFd<'_>], until: Option<Instant>) {
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
    fn immortal() -> Process {
        Process { pid: u32::MAX, start_ticks: 1, name: "immortal".to_owned() }
    }

    fn shows_it(seen: Seen<'_>) -> bool {
        let _ = seen(&immortal());
        true
    }

    #[track_caller]
    fn waits(step: Step) -> Instant {
        match step {
            Step::Wait { until, .. } => until,
            Step::Over(swept) => panic!("it is over: {swept:?}"),
        }
    }

    #[track_caller]
    fn is_over(step: Step) -> Swept {
        match step {
            Step::Over(swept) => swept,
            Step::Wait { .. } => panic!("it goes on"),
        }
    }

    #[test]
    fn one_that_the_kernel_will_not_let_die_is_named_after_its_time() {
        let begun = Instant::now();
        let mut ladder = Ladder::new(begun, Duration::from_secs(5));
        let killed = waits(ladder.step(begun, shows_it));
        assert_eq!(killed, begun + Duration::from_secs(5));
        assert_eq!(waits(ladder.step(killed, shows_it)), killed + LOOK_AGAIN);
        let limit = killed + Duration::from_secs(KILL_S);
        let before = limit - Duration::from_millis(1);
        assert_eq!(waits(ladder.step(before, shows_it)), limit);
        let swept = is_over(ladder.step(limit, shows_it));
        assert_eq!(swept, Swept { killed: 0, survivors: vec![immortal()] });
    }

    #[test]
    fn haste_shortens_the_grace_and_never_lengthens_it() {
        let begun = Instant::now();
        let mut ladder = Ladder::new(begun, Duration::from_secs(5));
        ladder.hasten(begun + Duration::from_secs(9));
        assert_eq!(waits(ladder.step(begun, shows_it)), begun + Duration::from_secs(5));
        ladder.hasten(begun + Duration::from_secs(1));
        assert_eq!(waits(ladder.step(begun, shows_it)), begun + Duration::from_secs(1));
    }

    #[test]
    fn nobody_is_believed_to_be_gone_after_a_look_that_was_not_calm() {
        let begun = Instant::now();
        let mut ladder = Ladder::new(begun, Duration::ZERO);
        let mut looks = 0;
        let step = ladder.step(begun, |seen| {
            looks += 1;
            if looks > 3 { shows_it(seen) } else { looks == 2 }
        });
        waits(step);
        // It was found on the fourth look and frozen, and there was nobody new on the fifth.
        assert_eq!(looks, 5);
        let swept = is_over(ladder.step(begun, |_| true));
        assert_eq!(swept, Swept { killed: 1, survivors: Vec::new() });
    }
}
