//! The keeper process: what `qd __keeper` runs. One thread around `poll`, which starts children, reaps whatever dies
//! below it, and ends it all when it is told to or when its worker is gone. It never blocks on anything else, and
//! touches no file but `/proc`.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Signal, WaitOptions};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::ladder::{DEAD_MAX, Ladder, Seen, Step, poll};
use crate::launch::{LaunchError, launch};
use crate::ledger::Ledger;
use crate::own::{close_inherited, take_name};
use crate::proc::{self, Process};
use crate::wire::{Answer, Command, DESCRIPTORS, Exit, Lines, Numbered, Sweep, What};

/// How long everything has after SIGTERM once the worker is gone.
const CLOSE_GRACE: Duration = Duration::from_millis(500);
/// How many are reaped before something else has its turn. In a storm they could die as fast as we reap.
const REAPED_AT_ONCE: usize = 512;
/// How much is read at once.
const READ: usize = 64 << 10;

/// Keeps whatever the worker at the other end of standard input has started, until that end is closed and nothing is
/// left. To be called before anything else of the program has begun: it wants to be the only thread.
pub fn main() -> ExitCode {
    take_name(c"qd-keeper");
    match Keeper::take_over() {
        Ok(mut keeper) => {
            keeper.keep();
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

struct Keeper {
    /// To the worker.
    socket: OwnedFd,
    /// Readable when a child has died.
    deaths: UnixStream,
    /// What came of the commands.
    lines: Lines,
    /// The descriptors that came with them.
    descriptors: VecDeque<OwnedFd>,
    /// What the worker has not taken yet. Bounded by what it asked.
    unsent: Vec<u8>,
    ledger: Ledger,
    sweeps: Vec<Sweeping>,
    /// Whether the worker is gone.
    is_closed: bool,
}

/// A sweep on its way.
struct Sweeping {
    /// The request that waits for it; none if it is our own.
    id: Option<u64>,
    sweep: Sweep,
    ladder: Ladder,
    /// What its next step waits for; none if it is due.
    wait: Option<Wait>,
}

struct Wait {
    /// Readable when a certain process has ended.
    ended: OwnedFd,
    until: Instant,
}

impl Keeper {
    /// Makes this process a keeper.
    fn take_over() -> io::Result<Self> {
        leave_the_worker()?;
        // A handler each, since what is merely ignored would be ignored by every child as well.
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
        }
        let (deaths, told) = UnixStream::pair()?;
        deaths.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(SIGCHLD, told)?;
        crate::become_subreaper()?;
        Ok(Self {
            socket: io::stdin().as_fd().try_clone_to_owned()?,
            deaths,
            lines: Lines::default(),
            descriptors: VecDeque::new(),
            unsent: Vec::new(),
            ledger: Ledger::default(),
            sweeps: Vec::new(),
            is_closed: false,
        })
    }

    fn keep(&mut self) {
        loop {
            let all_reaped = self.reap();
            self.step();
            if self.is_closed && self.sweeps.is_empty() {
                return;
            }
            self.send();
            if self.wait(all_reaped) {
                self.receive();
            }
        }
    }

    /// Waits until there is something to do, or just looks if there is. True if it may be the worker.
    fn wait(&mut self, is_idle: bool) -> bool {
        let writes = if self.unsent.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        let mut descriptors = vec![PollFd::new(&self.deaths, PollFlags::IN)];
        let mut until: Option<Instant> = None;
        for wait in self.sweeps.iter().filter_map(|sweeping| sweeping.wait.as_ref()) {
            descriptors.push(PollFd::new(&wait.ended, PollFlags::IN));
            until = Some(until.map_or(wait.until, |until| until.min(wait.until)));
        }
        if !is_idle || self.sweeps.iter().any(|sweeping| sweeping.wait.is_none()) {
            until = Some(Instant::now());
        }
        // A closed socket is always ready, and has nothing more to say.
        if !self.is_closed {
            descriptors.push(PollFd::new(&self.socket, PollFlags::IN | writes));
        }
        poll(&mut descriptors, until);

        let ready: Vec<bool> =
            descriptors.iter().map(|descriptor| !descriptor.revents().is_empty()).collect();
        drop(descriptors);
        let mut ready = ready.into_iter();
        if ready.next() == Some(true) {
            drain(&self.deaths);
        }
        let now = Instant::now();
        for sweeping in &mut self.sweeps {
            let due = |wait: &Wait| ready.next() == Some(true) || wait.until <= now;
            if sweeping.wait.as_ref().is_some_and(due) {
                sweeping.wait = None;
            }
        }
        ready.next() == Some(true)
    }

    /// Takes in and does what the worker wants. Its end is the last thing that it wants.
    fn receive(&mut self) {
        let mut bytes = [0; READ];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        loop {
            let mut beside = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let read = match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut beside, flags) {
                Ok(message) => message.bytes,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => continue,
                Err(_) => 0,
            };
            for message in beside.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    self.descriptors.extend(descriptors);
                }
            }
            self.lines.push(bytes.get(..read).unwrap_or_default());
            loop {
                match self.lines.next() {
                    Ok(Some(command)) => self.obey(command),
                    Ok(None) => break,
                    Err(_) => return self.close(),
                }
            }
            if read == 0 {
                return self.close();
            }
        }
    }

    fn obey(&mut self, Numbered { id, body }: Numbered<Command>) {
        match body {
            Command::Start { launch, in_turn } => {
                let answer = self.start(id, &launch, in_turn).unwrap_or_else(|error| Answer::Failed {
                    message: error.to_string(),
                    not_found: matches!(error, LaunchError::NotFound(_)),
                });
                self.say(id, answer);
            }
            Command::Signal { child, signal } => {
                if let (Some(process), Some(signal)) =
                    (self.ledger.child(child), Signal::from_named_raw(signal))
                {
                    proc::signal(process, signal);
                }
                self.say(id, Answer::Done);
            }
            Command::BeginTurn => {
                self.ledger.begin_turn(&self.tree());
                self.say(id, Answer::Done);
            }
            Command::EndTurn => {
                self.ledger.end_turn(&self.tree());
                self.say(id, Answer::Done);
            }
            Command::Sweep(sweep) => self.sweep(Some(id), sweep),
            Command::Left => {
                let left = self.ledger.left(&self.tree());
                self.say(id, Answer::Left(left));
            }
        }
    }

    fn start(&mut self, id: u64, what: &crate::Launch, in_turn: bool) -> Result<Answer, LaunchError> {
        let descriptors: Vec<OwnedFd> =
            self.descriptors.drain(..DESCRIPTORS.min(self.descriptors.len())).collect();
        let descriptors = descriptors.try_into().map_err(|_| LaunchError::NoDescriptors)?;
        if !in_turn {
            self.ledger.new_agent(&self.tree());
        }
        let pid = launch(what, descriptors)?;
        // It cannot vanish before we have reaped it, and a zombie has a start time as well.
        let start_ticks = proc::start_ticks(pid).unwrap_or_default();
        let name = proc::name(pid).unwrap_or_default();
        self.ledger.started(id, Process { pid, start_ticks, name }, in_turn);
        Ok(Answer::Started { pid })
    }

    /// Begins a sweep. One on its way that ends no more than this one gets no more time than it.
    fn sweep(&mut self, id: Option<u64>, sweep: Sweep) {
        let now = Instant::now();
        for earlier in &mut self.sweeps {
            if sweep.what.includes(earlier.sweep.what) {
                earlier.ladder.hasten(now + sweep.grace);
                earlier.wait = None;
            }
        }
        let ladder = Ladder::new(now, sweep.grace);
        self.sweeps.push(Sweeping { id, sweep, ladder, wait: None });
    }

    /// Takes the next step of every sweep that is due.
    fn step(&mut self) {
        let mut over = Vec::new();
        for mut sweeping in std::mem::take(&mut self.sweeps) {
            if sweeping.wait.is_none() {
                let Sweeping { sweep, ladder, .. } = &mut sweeping;
                match ladder.step(Instant::now(), |seen| self.look(sweep, seen)) {
                    Step::Over(swept) => {
                        over.push((sweeping.id, swept));
                        continue;
                    }
                    // One that has ended meanwhile leaves the sweep due.
                    Step::Wait { watch, until } => {
                        sweeping.wait = proc::watch(&watch).map(|ended| Wait { ended, until });
                    }
                }
            }
            self.sweeps.push(sweeping);
        }
        // The dead are reaped and told of before the sweep that ended them.
        while !over.is_empty() && !self.reap() {}
        for (id, swept) in over {
            if let Some(id) = id {
                self.say(id, Answer::Swept(swept));
            }
        }
    }

    /// Shows those that a sweep is to end. See [`proc::walk`].
    fn look(&mut self, Sweep { what, spare, .. }: &Sweep, seen: Seen<'_>) -> bool {
        self.reap();
        let mut judge = self.ledger.judge(*what, |process| proc::is_named(process, spare));
        proc::walk(std::process::id(), DEAD_MAX, |node| {
            if judge.is_target(&node) { seen(&node.process) } else { ControlFlow::Continue(()) }
        })
    }

    /// Reaps what has died, and tells of those that were started on request. False if there may be more.
    fn reap(&mut self) -> bool {
        for _ in 0..REAPED_AT_ONCE {
            let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) else { return true };
            let exit = Exit { status: status.exit_status(), signal: status.terminating_signal() };
            if let Some(id) = self.ledger.reaped(pid.as_raw_nonzero().get().unsigned_abs()) {
                self.say(id, Answer::Exited(exit));
            }
        }
        false
    }

    fn tree(&self) -> Vec<proc::Node> {
        proc::tree(std::process::id())
    }

    fn say(&mut self, id: u64, body: Answer) {
        self.unsent.extend(Numbered { id, body }.line());
    }

    /// Sends as much as the worker takes.
    fn send(&mut self) {
        while !self.is_closed && !self.unsent.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let nothing = &mut SendAncillaryBuffer::default();
            match sendmsg(&self.socket, &[IoSlice::new(&self.unsent)], nothing, flags) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(_) => self.close(),
            }
        }
    }

    /// The worker is gone: so is everything else, soon.
    fn close(&mut self) {
        if !self.is_closed {
            self.is_closed = true;
            self.sweep(None, Sweep { what: What::All, grace: CLOSE_GRACE, spare: Vec::new() });
        }
    }
}

/// Leaves the worker's session, its folder, and every descriptor that it may have left open in us.
fn leave_the_worker() -> io::Result<()> {
    // It fails only for a leader of its group, who has nobody to leave.
    let _ = rustix::process::setsid();
    std::env::set_current_dir("/")?;
    close_inherited()
}

/// Forgets how often it was told of a death: one look reaps all.
fn drain(mut deaths: &UnixStream) {
    let mut bytes = [0; 256];
    while deaths.read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
}
