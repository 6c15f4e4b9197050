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

use crate::escalation::{DEAD_MAX, EscalationStep, KillEscalation, ProcessVisitor, poll_until};
use crate::launch::{LaunchError, launch};
use crate::ledger::ProcessLedger;
use crate::process_setup::{close_inherited_descriptors, set_process_name};
use crate::procfs::{self, ProcessIdentity};
use crate::wire::{
    ChildExit, DESCRIPTORS, KeeperCommand, KeeperLineBuffer, KeeperReply, NumberedLine, SweepRequest,
    SweepScope,
};

/// How long everything has after SIGTERM once the worker is gone.
const CLOSE_GRACE: Duration = Duration::from_millis(500);
/// How many are reaped before something else has its turn. In a storm they could die as fast as we reap.
const REAP_BATCH: usize = 512;
/// How much is read at once.
const READ_BYTES: usize = 64 << 10;

/// Keeps whatever the worker at the other end of standard input has started, until that end is closed and nothing is
/// left. To be called before anything else of the program has begun: it wants to be the only thread.
pub fn main() -> ExitCode {
    set_process_name(c"qd-keeper");
    match KeeperProcess::become_keeper() {
        Ok(mut keeper) => {
            keeper.run();
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

struct KeeperProcess {
    /// To the worker.
    socket: OwnedFd,
    /// Readable when a child has died.
    deaths: UnixStream,
    /// What came of the commands.
    lines: KeeperLineBuffer,
    /// The descriptors that came with them.
    descriptors: VecDeque<OwnedFd>,
    /// What the worker has not taken yet. Bounded by what it asked.
    unsent: Vec<u8>,
    ledger: ProcessLedger,
    sweeps: Vec<ActiveSweep>,
    /// Whether the worker is gone.
    is_worker_gone: bool,
}

/// A sweep on its way.
struct ActiveSweep {
    /// The request that waits for it; none if it is our own.
    id: Option<u64>,
    sweep: SweepRequest,
    escalation: KillEscalation,
    /// What its next step waits for; none if it is due.
    wait: Option<SweepWait>,
}

struct SweepWait {
    /// Readable when a certain process has ended.
    pidfd: OwnedFd,
    until: Instant,
}

impl KeeperProcess {
    /// Makes this process a keeper.
    fn become_keeper() -> io::Result<Self> {
        detach_from_worker()?;
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
            lines: KeeperLineBuffer::default(),
            descriptors: VecDeque::new(),
            unsent: Vec::new(),
            ledger: ProcessLedger::default(),
            sweeps: Vec::new(),
            is_worker_gone: false,
        })
    }

    fn run(&mut self) {
        loop {
            let all_reaped = self.reap();
            self.step_sweeps();
            if self.is_worker_gone && self.sweeps.is_empty() {
                return;
            }
            self.send_replies();
            if self.poll_events(all_reaped) {
                self.receive_commands();
            }
        }
    }

    /// Waits until there is something to do, or just looks if there is. True if it may be the worker.
    fn poll_events(&mut self, is_idle: bool) -> bool {
        let writes = if self.unsent.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        let mut descriptors = vec![PollFd::new(&self.deaths, PollFlags::IN)];
        let mut until: Option<Instant> = None;
        for wait in self.sweeps.iter().filter_map(|sweeping| sweeping.wait.as_ref()) {
            descriptors.push(PollFd::new(&wait.pidfd, PollFlags::IN));
            until = Some(until.map_or(wait.until, |until| until.min(wait.until)));
        }
        if !is_idle || self.sweeps.iter().any(|sweeping| sweeping.wait.is_none()) {
            until = Some(Instant::now());
        }
        // A closed socket is always ready, and has nothing more to say.
        if !self.is_worker_gone {
            descriptors.push(PollFd::new(&self.socket, PollFlags::IN | writes));
        }
        poll_until(&mut descriptors, until);

        let ready: Vec<bool> =
            descriptors.iter().map(|descriptor| !descriptor.revents().is_empty()).collect();
        drop(descriptors);
        let mut ready = ready.into_iter();
        if ready.next() == Some(true) {
            drain_deaths(&self.deaths);
        }
        let now = Instant::now();
        for sweeping in &mut self.sweeps {
            let due = |wait: &SweepWait| ready.next() == Some(true) || wait.until <= now;
            if sweeping.wait.as_ref().is_some_and(due) {
                sweeping.wait = None;
            }
        }
        ready.next() == Some(true)
    }

    /// Takes in and does what the worker wants. Its end is the last thing that it wants.
    fn receive_commands(&mut self) {
        let mut bytes = [0; READ_BYTES];
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
                    Ok(Some(command)) => self.apply_command(command),
                    Ok(None) => break,
                    Err(_) => return self.on_worker_gone(),
                }
            }
            if read == 0 {
                return self.on_worker_gone();
            }
        }
    }

    fn apply_command(&mut self, NumberedLine { id, body }: NumberedLine<KeeperCommand>) {
        match body {
            KeeperCommand::Start { launch, in_turn } => {
                let answer =
                    self.start_child(id, &launch, in_turn).unwrap_or_else(|error| KeeperReply::Failed {
                        message: error.to_string(),
                        not_found: matches!(error, LaunchError::NotFound(_)),
                    });
                self.queue_reply(id, answer);
            }
            KeeperCommand::Signal { child, signal } => {
                if let (Some(process), Some(signal)) =
                    (self.ledger.child(child), Signal::from_named_raw(signal))
                {
                    procfs::send_signal(process, signal);
                }
                self.queue_reply(id, KeeperReply::Done);
            }
            KeeperCommand::BeginTurn => {
                self.ledger.begin_turn(&self.process_tree());
                self.queue_reply(id, KeeperReply::Done);
            }
            KeeperCommand::EndTurn => {
                self.ledger.end_turn(&self.process_tree());
                self.queue_reply(id, KeeperReply::Done);
            }
            KeeperCommand::Sweep(sweep) => self.begin_sweep(Some(id), sweep),
            KeeperCommand::ListLeftovers => {
                let left = self.ledger.leftovers(&self.process_tree());
                self.queue_reply(id, KeeperReply::Leftovers(left));
            }
        }
    }

    fn start_child(
        &mut self,
        id: u64,
        what: &crate::LaunchSpec,
        in_turn: bool,
    ) -> Result<KeeperReply, LaunchError> {
        let descriptors: Vec<OwnedFd> =
            self.descriptors.drain(..DESCRIPTORS.min(self.descriptors.len())).collect();
        let descriptors = descriptors.try_into().map_err(|_| LaunchError::NoDescriptors)?;
        if !in_turn {
            self.ledger.prepare_agent_start(&self.process_tree());
        }
        let pid = launch(what, descriptors)?;
        // It cannot vanish before we have reaped it, and a zombie has a start time as well.
        let start_ticks = procfs::start_ticks(pid).unwrap_or_default();
        let name = procfs::name(pid).unwrap_or_default();
        self.ledger.record_start(id, ProcessIdentity { pid, start_ticks, name }, in_turn);
        Ok(KeeperReply::Started { pid })
    }

    /// Begins a sweep. One on its way that ends no more than this one gets no more time than it.
    fn begin_sweep(&mut self, id: Option<u64>, sweep: SweepRequest) {
        let now = Instant::now();
        for earlier in &mut self.sweeps {
            if sweep.scope.includes(earlier.sweep.scope) {
                earlier.escalation.shorten_grace(now + sweep.grace);
                earlier.wait = None;
            }
        }
        let ladder = KillEscalation::new(now, sweep.grace);
        self.sweeps.push(ActiveSweep { id, sweep, escalation: ladder, wait: None });
    }

    /// Takes the next step of every sweep that is due.
    fn step_sweeps(&mut self) {
        let mut over = Vec::new();
        for mut sweeping in std::mem::take(&mut self.sweeps) {
            if sweeping.wait.is_none() {
                let ActiveSweep { sweep, escalation: ladder, .. } = &mut sweeping;
                match ladder.step(Instant::now(), |seen| self.visit_targets(sweep, seen)) {
                    EscalationStep::Over(swept) => {
                        over.push((sweeping.id, swept));
                        continue;
                    }
                    // One that has ended meanwhile leaves the sweep due.
                    EscalationStep::Wait { watch, until } => {
                        sweeping.wait =
                            procfs::open_pidfd(&watch).map(|ended| SweepWait { pidfd: ended, until });
                    }
                }
            }
            self.sweeps.push(sweeping);
        }
        // The dead are reaped and told of before the sweep that ended them.
        while !over.is_empty() && !self.reap() {}
        for (id, swept) in over {
            if let Some(id) = id {
                self.queue_reply(id, KeeperReply::Swept(swept));
            }
        }
    }

    /// Shows those that a sweep is to end. See [`proc::walk`].
    fn visit_targets(
        &mut self,
        SweepRequest { scope: what, spare, .. }: &SweepRequest,
        seen: ProcessVisitor<'_>,
    ) -> bool {
        self.reap();
        let mut judge = self.ledger.target_selector(*what, |process| procfs::is_named(process, spare));
        procfs::walk_descendants(std::process::id(), DEAD_MAX, |node| {
            if judge.is_target(&node) { seen(&node.process) } else { ControlFlow::Continue(()) }
        })
    }

    /// Reaps what has died, and tells of those that were started on request. False if there may be more.
    fn reap(&mut self) -> bool {
        for _ in 0..REAP_BATCH {
            let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) else { return true };
            let exit = ChildExit { status: status.exit_status(), signal: status.terminating_signal() };
            if let Some(id) = self.ledger.record_reaped(pid.as_raw_nonzero().get().unsigned_abs()) {
                self.queue_reply(id, KeeperReply::Exited(exit));
            }
        }
        false
    }

    fn process_tree(&self) -> Vec<procfs::ProcessNode> {
        procfs::process_tree(std::process::id())
    }

    fn queue_reply(&mut self, id: u64, body: KeeperReply) {
        self.unsent.extend(NumberedLine { id, body }.to_line());
    }

    /// Sends as much as the worker takes.
    fn send_replies(&mut self) {
        while !self.is_worker_gone && !self.unsent.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let nothing = &mut SendAncillaryBuffer::default();
            match sendmsg(&self.socket, &[IoSlice::new(&self.unsent)], nothing, flags) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(_) => self.on_worker_gone(),
            }
        }
    }

    /// The worker is gone: so is everything else, soon.
    fn on_worker_gone(&mut self) {
        if !self.is_worker_gone {
            self.is_worker_gone = true;
            self.begin_sweep(
                None,
                SweepRequest { scope: SweepScope::All, grace: CLOSE_GRACE, spare: Vec::new() },
            );
        }
    }
}

/// Leaves the worker's session, its folder, and every descriptor that it may have left open in us.
fn detach_from_worker() -> io::Result<()> {
    // It fails only for a leader of its group, who has nobody to leave.
    let _ = rustix::process::setsid();
    std::env::set_current_dir("/")?;
    close_inherited_descriptors()
}

/// Forgets how often it was told of a death: one look reaps all.
fn drain_deaths(mut deaths: &UnixStream) {
    let mut bytes = [0; 256];
    while deaths.read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
}
