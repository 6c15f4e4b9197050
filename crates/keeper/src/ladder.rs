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
