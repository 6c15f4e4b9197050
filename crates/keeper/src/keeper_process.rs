//! The keeper process, which `qd __keeper` runs. It is one thread around `poll` that starts children, reaps everything
//! that dies below it, and ends it all on request or when its worker is gone. It never blocks on anything else and
//! touches no files except `/proc`.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use qd_sandbox::receive_with_descriptors;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::confinement::KeeperConfinement;
use crate::escalation::{CALM_SCANS, DEAD_MAX, EscalationStep, KillEscalation, ProcessVisitor, poll_until};
use crate::launch::{LaunchError, launch};
use crate::ledger::ProcessLedger;
use crate::process_setup::{self, close_inherited_descriptors, set_process_name};
use crate::procfs::{self, ProcessIdentity};
use crate::wire::{
    ChildExit, DESCRIPTORS, KeeperCommand, KeeperLineBuffer, KeeperReply, NumberedLine, SweepRequest,
    SweepScope,
};

/// The grace period after SIGTERM once the worker is gone.
const CLOSE_GRACE: Duration = Duration::from_millis(500);
/// How many processes are reaped before other work is done. In a fork storm they could die as fast as we reap.
const REAP_BATCH: usize = 512;
/// How often the processes of an ending turn are looked for before it counts as leaving some. Scans are repeated while
/// processes die meanwhile.
const LEFTOVER_SCANS_MAX: usize = 16;
/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// Supervises everything that the worker at the other end of standard input starts, until that end is closed and
/// nothing is left. Must be called before the program does anything else, because the keeper must be the only thread.
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
    /// The connection to the worker.
    socket: OwnedFd,
    /// Becomes readable when a child has died.
    deaths: UnixStream,
    /// Commands received so far, up to an incomplete line.
    lines: KeeperLineBuffer,
    /// Descriptors received with the commands and not used yet.
    descriptors: VecDeque<OwnedFd>,
    /// Replies that the worker has not read yet. Bounded by the number of its requests.
    unsent: Vec<u8>,
    ledger: ProcessLedger,
    /// The sandbox of everything that we start, if the worker has asked for one.
    confinement: Option<KeeperConfinement>,
    sweeps: Vec<ActiveSweep>,
    is_worker_gone: bool,
}

/// A sweep in progress.
struct ActiveSweep {
    /// The request that waits for the sweep. Absent for the sweep that we begin ourselves when the worker is gone.
    id: Option<u64>,
    sweep: SweepRequest,
    escalation: KillEscalation,
    /// What the next step waits for. Absent if it is due.
    wait: Option<SweepWait>,
}

struct SweepWait {
    /// Becomes readable when the watched process has exited.
    pidfd: OwnedFd,
    until: Instant,
}

impl KeeperProcess {
    /// Turns this process into a keeper.
    fn become_keeper() -> io::Result<Self> {
        detach_from_worker()?;
        process_setup::survive_file_size_limit()?;
        // Install a handler for each signal: an ignored signal would stay ignored in every child.
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
        }
        let (deaths, death_signal) = UnixStream::pair()?;
        deaths.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(SIGCHLD, death_signal)?;
        crate::become_subreaper()?;
        Ok(Self {
            socket: io::stdin().as_fd().try_clone_to_owned()?,
            deaths,
            lines: KeeperLineBuffer::default(),
            descriptors: VecDeque::new(),
            unsent: Vec::new(),
            ledger: ProcessLedger::default(),
            confinement: None,
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

    /// Waits until there is something to do, or only polls if `is_idle` is false. Returns whether the worker may have
    /// sent something.
    fn poll_events(&mut self, is_idle: bool) -> bool {
        let writes = if self.unsent.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        let mut descriptors = vec![PollFd::new(&self.deaths, PollFlags::IN)];
        let mut until: Option<Instant> = None;
        for wait in self.sweeps.iter().filter_map(|active| active.wait.as_ref()) {
            descriptors.push(PollFd::new(&wait.pidfd, PollFlags::IN));
            until = Some(until.map_or(wait.until, |until| until.min(wait.until)));
        }
        if !is_idle || self.sweeps.iter().any(|active| active.wait.is_none()) {
            until = Some(Instant::now());
        }
        // A closed socket is always ready, and delivers nothing more.
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
        for active in &mut self.sweeps {
            let due = |wait: &SweepWait| ready.next() == Some(true) || wait.until <= now;
            if active.wait.as_ref().is_some_and(due) {
                active.wait = None;
            }
        }
        ready.next() == Some(true)
    }

    /// Receives and applies the worker's commands. A closed connection means that the worker is gone.
    fn receive_commands(&mut self) {
        let mut bytes = [0; READ_BYTES];
        loop {
            let read = match receive_with_descriptors(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((read, descriptors)) => {
                    self.descriptors.extend(descriptors);
                    read
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => 0,
            };
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
            KeeperCommand::Confine(plan) => {
                let listener_channel = if plan.has_model_proxy { self.descriptors.pop_front() } else { None };
                let reply = match KeeperConfinement::start(*plan, listener_channel) {
                    Ok(confinement) => {
                        self.confinement = Some(confinement);
                        KeeperReply::Done
                    }
                    Err(error) => KeeperReply::Failed { message: error.to_string(), not_found: false },
                };
                self.queue_reply(id, reply);
            }
            KeeperCommand::Start { launch, in_turn } => {
                let reply =
                    self.start_child(id, &launch, in_turn).unwrap_or_else(|error| KeeperReply::Failed {
                        message: error.to_string(),
                        not_found: matches!(error, LaunchError::NotFound(_)),
                    });
                self.queue_reply(id, reply);
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
            KeeperCommand::EndTurn { spare } => {
                let leaves_processes = self.turn_leaves_processes(spare);
                self.ledger.end_turn(&self.process_tree());
                self.queue_reply(id, KeeperReply::TurnEnded { leaves_processes });
            }
            KeeperCommand::Ping => self.queue_reply(id, KeeperReply::Done),
            KeeperCommand::Sweep(sweep) => self.begin_sweep(Some(id), sweep),
            KeeperCommand::ListLeftovers => {
                let leftovers = self.ledger.leftovers(&self.process_tree());
                self.queue_reply(id, KeeperReply::Leftovers(leftovers));
            }
        }
    }

    fn start_child(
        &mut self,
        id: u64,
        spec: &crate::LaunchSpec,
        in_turn: bool,
    ) -> Result<KeeperReply, LaunchError> {
        let descriptors: Vec<OwnedFd> =
            self.descriptors.drain(..DESCRIPTORS.min(self.descriptors.len())).collect();
        let descriptors = descriptors.try_into().map_err(|_| LaunchError::NoDescriptors)?;
        if !in_turn {
            self.ledger.prepare_agent_start(&self.process_tree());
        }
        let pid = launch(spec, descriptors, self.confinement.as_mut())?;
        // The child cannot disappear before we reap it, and even a zombie has a start time.
        let start_ticks = procfs::start_ticks(pid).unwrap_or_default();
        let name = procfs::name(pid).unwrap_or_default();
        self.ledger.record_start(id, ProcessIdentity { pid, start_ticks, name }, in_turn);
        Ok(KeeperReply::Started { pid })
    }

    /// Begins a sweep. Running sweeps whose scope it includes get no more time than this one.
    fn begin_sweep(&mut self, id: Option<u64>, sweep: SweepRequest) {
        let now = Instant::now();
        for earlier in &mut self.sweeps {
            if sweep.scope.includes(earlier.sweep.scope) {
                earlier.escalation.shorten_grace(now + sweep.grace);
                earlier.wait = None;
            }
        }
        let escalation = KillEscalation::new(now, sweep.grace);
        self.sweeps.push(ActiveSweep { id, sweep, escalation, wait: None });
    }

    /// Takes the next step of every sweep that is due.
    fn step_sweeps(&mut self) {
        let mut finished = Vec::new();
        for mut active in std::mem::take(&mut self.sweeps) {
            if active.wait.is_none() {
                let ActiveSweep { sweep, escalation, .. } = &mut active;
                let step = escalation.step(Instant::now(), |visit| self.visit_targets(sweep, visit));
                if sweep.scope == SweepScope::All && escalation.is_killing() {
                    // Whatever the scan has missed dies with the init.
                    self.confinement.iter().for_each(KeeperConfinement::kill);
                }
                match step {
                    EscalationStep::Over(result) => {
                        if sweep.scope == SweepScope::All && result.survivors.is_empty() {
                            self.end_sandbox();
                        }
                        finished.push((active.id, result));
                        continue;
                    }
                    // If the watched process has exited meanwhile, the sweep stays due.
                    EscalationStep::Wait { watch, until } => {
                        active.wait = procfs::open_pidfd(&watch).map(|pidfd| SweepWait { pidfd, until });
                    }
                }
            }
            self.sweeps.push(active);
        }
        // Reap and report the dead before reporting the sweep that ended them.
        while !finished.is_empty() && !self.reap() {}
        for (id, result) in finished {
            if let Some(id) = id {
                self.queue_reply(id, KeeperReply::Swept(result));
            }
        }
    }

    /// Whether the open turn leaves processes. If the scans never come to rest, it may.
    fn turn_leaves_processes(&mut self, spare: Vec<String>) -> bool {
        let sweep = SweepRequest { scope: SweepScope::Turn, grace: Duration::ZERO, spare };
        let mut calm_scans = 0;
        for _ in 0..LEFTOVER_SCANS_MAX {
            let mut found = false;
            let is_calm = self.visit_targets(&sweep, &mut |_| {
                found = true;
                ControlFlow::Break(())
            });
            calm_scans += usize::from(is_calm);
            if found || calm_scans == CALM_SCANS {
                return found;
            }
        }
        true
    }

    /// Visits the targets of a sweep. Returns whether the scan was calm, see [`procfs::walk_descendants`].
    fn visit_targets(
        &mut self,
        SweepRequest { scope, spare, .. }: &SweepRequest,
        visit: ProcessVisitor<'_>,
    ) -> bool {
        self.reap();
        let mut selector = self.ledger.target_selector(*scope, |process| procfs::is_named(process, spare));
        procfs::walk_descendants(std::process::id(), DEAD_MAX, |node| {
            if self.is_sandbox_init(&node) {
                return ControlFlow::Continue(());
            }
            if selector.is_target(&node) { visit(&node.process) } else { ControlFlow::Continue(()) }
        })
    }

    /// Reaps the dead, and reports those that were started on request. Returns false if there may be more.
    fn reap(&mut self) -> bool {
        for _ in 0..REAP_BATCH {
            let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) else { return true };
            self.record_reaped(pid, status);
        }
        false
    }

    fn record_reaped(&mut self, pid: Pid, status: WaitStatus) {
        let pid = pid.as_raw_nonzero().get().unsigned_abs();
        let exit = ChildExit { status: status.exit_status(), signal: status.terminating_signal() };
        if let Some(id) = self.ledger.record_reaped(pid) {
            self.queue_reply(id, KeeperReply::Exited(exit));
        }
        if let Some(confinement) = &mut self.confinement {
            confinement.record_reaped(pid);
        }
    }

    /// Ends the sandbox, in which nothing is left, and waits for its init. The kernel lets an init die only when all
    /// others inside are reaped, so whatever dies meanwhile is reaped too.
    fn end_sandbox(&mut self) {
        self.confinement.iter().for_each(KeeperConfinement::kill);
        while self.confinement.as_ref().is_some_and(KeeperConfinement::is_running) {
            match rustix::process::wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) => self.record_reaped(pid, status),
                Err(Errno::INTR) | Ok(None) => {}
                Err(_) => return,
            }
        }
    }

    /// Everything below us, except the sandbox's init, which is a part of the keeper.
    fn process_tree(&self) -> Vec<procfs::ProcessNode> {
        let mut tree = procfs::process_tree(std::process::id());
        tree.retain(|node| !self.is_sandbox_init(node));
        tree
    }

    fn is_sandbox_init(&self, node: &procfs::ProcessNode) -> bool {
        self.confinement.as_ref().is_some_and(|confinement| confinement.is_init(node.process.pid))
    }

    fn queue_reply(&mut self, id: u64, body: KeeperReply) {
        self.unsent.extend(NumberedLine { id, body }.to_line());
    }

    /// Sends as much as the worker's socket accepts.
    fn send_replies(&mut self) {
        while !self.is_worker_gone && !self.unsent.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, &self.unsent, flags) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(_) => self.on_worker_gone(),
            }
        }
    }

    /// The worker is gone: end everything else.
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

/// Leaves the worker's session and directory, and closes descriptors inherited from it.
fn detach_from_worker() -> io::Result<()> {
    // This fails only if we already lead a process group; then there is nothing to leave.
    let _ = rustix::process::setsid();
    // If somebody stops this process and its worker then dies, nobody else would let it continue and end what is below.
    rustix::process::set_parent_process_death_signal(Some(Signal::CONT))?;
    std::env::set_current_dir("/")?;
    close_inherited_descriptors()
}

/// Discards the notifications of deaths: one call of `reap` handles all of them.
fn drain_deaths(mut deaths: &UnixStream) {
    let mut bytes = [0; 256];
    while deaths.read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
}
