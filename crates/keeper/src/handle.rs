//! The worker's side of a keeper: starts it, sends it commands and receives the replies. One task owns the socket and
//! the pending replies; callers reach it through a queue. Nothing here inspects the processes below the keeper.
//!
//! No caller waits for ever: a keeper that does not reply is told to continue, in case somebody stopped it, and killed
//! if that does not help. Then it is lost, like a keeper that died by itself.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use qd_protocol::limits::KILL_S;
use qd_sandbox::{SandboxPlan, send_with_descriptors};
use rustix::net::SendFlags;
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::MARK_VARIABLE;
use crate::process_setup::PROGRAM_NAME;
use crate::procfs::{self, ProcessIdentity};
use crate::wire::{
    ChildExit, DESCRIPTORS, KeeperCommand, KeeperLineBuffer, KeeperReply, LaunchSpec, NumberedLine,
    SweepRequest, SweepResult,
};

/// Requests that may wait to be sent.
const REQUEST_QUEUE_MAX: usize = 16;
/// Bytes read at once.
const READ_BYTES: usize = 16 << 10;
/// How often a keeper is checked while somebody waits for it.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How many checks in a row a keeper may neither react nor work before it is killed. They are counted instead of timed,
/// because this process may have been stopped itself.
const SILENT_CHECKS_MAX: u32 = 15;
/// How many checks a keeper whose connection is closed may take to end everything below it before it is killed.
const CLOSE_CHECKS_MAX: u32 = KILL_S as u32 + 5;
/// How many checks a killed keeper has to die. After that the kernel does not let it die.
const DEATH_CHECKS_MAX: u32 = 5;

/// Why a keeper did not carry out a command.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    #[error("the keeper could not be started: {0}")]
    NotStarted(#[source] io::Error),
    /// The keeper has died or is about to, and everything below it is ended too.
    #[error("the keeper is gone")]
    Lost,
    /// The program does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The program exists but could not be started.
    #[error("{0}")]
    Refused(String),
    /// The machine cannot confine programs as the plan asks.
    #[error("{0}")]
    NotConfined(String),
    #[error("the pipes to a child process could not be opened: {0}")]
    NoPipe(#[source] io::Error),
}

/// A running keeper. When this is dropped, the keeper ends everything below it and then exits.
#[derive(Debug)]
pub struct KeeperHandle {
    requests: mpsc::Sender<KeeperRequest>,
    pid: u32,
    mark: String,
    /// Ends when the keeper process is dead and reaped. It needs no other way to end, because a keeper exits once its
    /// socket is closed.
    task: JoinHandle<()>,
}

impl KeeperHandle {
    /// Starts `exe __keeper`. Everything that it starts carries the mark. `exe` should be `/proc/self/exe`, which stays
    /// the same program after an upgrade has replaced the file.
    pub async fn start(exe: &Path, mark: &str) -> Result<Self, KeeperError> {
        let (ours, theirs) = StdStream::pair().map_err(KeeperError::NotStarted)?;
        // The environment is empty: the keeper needs none, and the worker's may contain secrets.
        let child = std::process::Command::new(exe)
            .arg0(PROGRAM_NAME)
            .arg("__keeper")
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .map_err(KeeperError::NotStarted)?;
        let pid = child.id();
        let (requests, queue) = mpsc::channel(REQUEST_QUEUE_MAX);
        let connection = KeeperConnection::new(child, ours, queue).map_err(KeeperError::NotStarted)?;
        let task = tokio::spawn(connection.run());
        Ok(Self { requests, pid, mark: mark.to_owned(), task })
    }

    /// Like [`Self::start`], for a keeper that starts everything in a sandbox of this plan. If the plan has a proxy to
    /// the agent's model, the keeper sends the listener of each sandbox to `listener_channel`.
    pub async fn start_confined(
        exe: &Path,
        mark: &str,
        plan: SandboxPlan,
        listener_channel: Option<OwnedFd>,
    ) -> Result<Self, KeeperError> {
        if serde_json::to_value(&plan).is_err() {
            return Err(KeeperError::NotConfined("a path of its sandbox is not UTF-8".to_owned()));
        }
        let keeper = Self::start(exe, mark).await?;
        let confine = KeeperCommand::Confine(Box::new(plan));
        let descriptors = listener_channel.into_iter().collect();
        match send_request(&keeper.requests, confine, descriptors, None).await {
            Ok(KeeperReply::Done) => Ok(keeper),
            Ok(KeeperReply::Failed { message, .. }) => {
                keeper.close().await;
                Err(KeeperError::NotConfined(message))
            }
            _ => Err(KeeperError::Lost),
        }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Starts the agent, or another program that does not belong to a turn.
    pub async fn spawn(&self, launch: LaunchSpec) -> Result<KeeperChild, KeeperError> {
        self.spawn_as(launch, false).await
    }

    /// Starts a program that belongs to the turn, like the processes the agent itself starts. This is for the terminals
    /// of agents that let their client run commands.
    pub async fn spawn_in_turn(&self, launch: LaunchSpec) -> Result<KeeperChild, KeeperError> {
        self.spawn_as(launch, true).await
    }

    /// Begins a turn: every process that appears from now on belongs to it.
    pub async fn begin_turn(&self) -> Result<(), KeeperError> {
        send_command(&self.requests, KeeperCommand::BeginTurn).await.map(drop)
    }

    /// Ends the turn, and returns whether it has left processes running, apart from the helpers with the names in
    /// `spare`. They stay on purpose, unless they are ended by a sweep of the ended turn.
    pub async fn end_turn(&self, spare: Vec<String>) -> Result<bool, KeeperError> {
        match send_command(&self.requests, KeeperCommand::EndTurn { spare }).await? {
            KeeperReply::TurnEnded { leaves_processes } => Ok(leaves_processes),
            _ => Err(KeeperError::Lost),
        }
    }

    /// Ends processes, and returns when they are gone. A second sweep of the same scope, or of everything, can shorten
    /// the grace period of a running one.
    pub async fn sweep(&self, sweep: SweepRequest) -> Result<SweepResult, KeeperError> {
        match send_command(&self.requests, KeeperCommand::Sweep(sweep)).await? {
            KeeperReply::Swept(result) => Ok(result),
            _ => Err(KeeperError::Lost),
        }
    }

    /// Lists what finished turns have left running.
    pub async fn list_leftovers(&self) -> Result<Vec<ProcessIdentity>, KeeperError> {
        match send_command(&self.requests, KeeperCommand::ListLeftovers).await? {
            KeeperReply::Leftovers(processes) => Ok(processes),
            _ => Err(KeeperError::Lost),
        }
    }

    /// Waits until the keeper process is dead and reaped. Its children have then been adopted by this process, if it is
    /// a subreaper. A keeper that the kernel does not let die counts as dead after a while.
    pub async fn wait_until_lost(&self) {
        self.requests.closed().await;
    }

    /// Lets the keeper end everything, and waits until it is dead itself.
    pub async fn close(self) {
        let Self { requests, task, .. } = self;
        drop(requests);
        // The task ends with the keeper. If it panicked, its socket is closed and the keeper exits too.
        let _ = task.await;
    }

    async fn spawn_as(&self, mut launch: LaunchSpec, in_turn: bool) -> Result<KeeperChild, KeeperError> {
        if launch.cwd.to_str().is_none() {
            let directory = launch.cwd.display();
            return Err(KeeperError::Refused(format!("the path of the directory {directory} is not UTF-8")));
        }
        launch.env.insert(MARK_VARIABLE.to_owned(), self.mark.clone());
        let ChildPipes { ours: [stdin, stdout, stderr], theirs } =
            ChildPipes::open().map_err(KeeperError::NoPipe)?;
        let (exited, exit) = watch::channel(None);
        let start = KeeperCommand::Start { launch, in_turn };
        match send_request(&self.requests, start, theirs.into(), Some(exited)).await? {
            KeeperReply::Started { pid } => Ok(KeeperChild {
                pid,
                stdin: pipe::Sender::from_owned_fd(stdin).map_err(KeeperError::NoPipe)?,
                stdout: pipe::Receiver::from_owned_fd(stdout).map_err(KeeperError::NoPipe)?,
                stderr: pipe::Receiver::from_owned_fd(stderr).map_err(KeeperError::NoPipe)?,
                exit: ExitWatch(exit),
            }),
            KeeperReply::Failed { message, not_found: true } => Err(KeeperError::NotFound(message)),
            KeeperReply::Failed { message, not_found: false } => Err(KeeperError::Refused(message)),
            _ => Err(KeeperError::Lost),
        }
    }
}

/// A child process that a keeper started and supervises.
#[derive(Debug)]
pub struct KeeperChild {
    pub pid: u32,
    pub stdin: pipe::Sender,
    pub stdout: pipe::Receiver,
    pub stderr: pipe::Receiver,
    pub exit: ExitWatch,
}

/// The exit of a child, for any number of waiters.
#[derive(Debug, Clone)]
pub struct ExitWatch(watch::Receiver<Option<ChildExit>>);

impl ExitWatch {
    /// Waits until the child has exited. If its keeper dies first, the exit status is unknown.
    pub async fn wait(&self) -> ChildExit {
        let mut receiver = self.0.clone();
        let exit = receiver.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
        exit.unwrap_or_default()
    }

    /// How the child exited, if it has.
    pub fn current(&self) -> Option<ChildExit> {
        *self.0.borrow()
    }
}

/// A command and the channel for its reply.
#[derive(Debug)]
struct KeeperRequest {
    command: KeeperCommand,
    /// What the keeper gets with the command.
    descriptors: Vec<OwnedFd>,
    /// Reports the exit of the child, if the command starts one.
    exited: Option<watch::Sender<Option<ChildExit>>>,
    reply: oneshot::Sender<KeeperReply>,
}

async fn send_command(
    requests: &mpsc::Sender<KeeperRequest>,
    command: KeeperCommand,
) -> Result<KeeperReply, KeeperError> {
    send_request(requests, command, Vec::new(), None).await
}

/// Sends a command with its descriptors, if any, and waits for the reply.
async fn send_request(
    requests: &mpsc::Sender<KeeperRequest>,
    command: KeeperCommand,
    descriptors: Vec<OwnedFd>,
    exited: Option<watch::Sender<Option<ChildExit>>>,
) -> Result<KeeperReply, KeeperError> {
    let (reply, replied) = oneshot::channel();
    let request = KeeperRequest { command, descriptors, exited, reply };
    requests.send(request).await.map_err(|_| KeeperError::Lost)?;
    replied.await.map_err(|_| KeeperError::Lost)
}

/// Both ends of a child's standard input, output and error.
#[derive(Debug)]
struct ChildPipes {
    ours: [OwnedFd; DESCRIPTORS],
    theirs: [OwnedFd; DESCRIPTORS],
}

impl ChildPipes {
    fn open() -> io::Result<Self> {
        let (stdin, our_stdin) = io::pipe()?;
        let (our_stdout, stdout) = io::pipe()?;
        let (our_stderr, stderr) = io::pipe()?;
        Ok(Self {
            ours: [our_stdin.into(), our_stdout.into(), our_stderr.into()],
            theirs: [stdin.into(), stdout.into(), stderr.into()],
        })
    }
}

/// The task that owns the connection to the keeper.
#[derive(Debug)]
struct KeeperConnection {
    socket: UnixStream,
    queue: mpsc::Receiver<KeeperRequest>,
    lines: KeeperLineBuffer,
    last_id: u64,
    /// The requests that wait for a reply, by id.
    pending_replies: HashMap<u64, oneshot::Sender<KeeperReply>>,
    /// The channels that report a child's exit, by the id of the request that started it.
    exit_senders: HashMap<u64, watch::Sender<Option<ChildExit>>>,
    keeper: Child,
    /// The keeper as the kernel knows it, for signals.
    process: Option<ProcessIdentity>,
    /// A turn is open: the keeper is checked even if no reply is pending, because drivers wait for exits that it reports.
    in_turn: bool,
    /// The ping that the keeper has not answered.
    pending_ping: Option<u64>,
    /// Whether anything has arrived since the last check.
    has_received: bool,
    /// The processor time of the keeper at the last check.
    cpu_ticks: Option<u64>,
    /// In how many checks in a row the keeper has neither reacted nor worked.
    silent_checks: u32,
    next_check: Instant,
}

/// The keeper has closed the connection, sent an unreadable line or stopped replying, or no handle is left that could
/// send a request.
#[derive(Debug)]
struct KeeperConnectionBroken;

impl KeeperConnection {
    fn new(keeper: Child, socket: StdStream, queue: mpsc::Receiver<KeeperRequest>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket: UnixStream::from_std(socket)?,
            queue,
            lines: KeeperLineBuffer::default(),
            last_id: 0,
            pending_replies: HashMap::new(),
            exit_senders: HashMap::new(),
            process: ProcessIdentity::find(keeper.id()),
            keeper,
            in_turn: false,
            pending_ping: None,
            has_received: false,
            cpu_ticks: None,
            silent_checks: 0,
            next_check: Instant::now(),
        })
    }

    /// Exchanges messages until every handle is dropped or the connection breaks, then waits until the keeper is dead.
    /// Its children are adopted by us only at its death, not when the connection ends; so `wait_until_lost` returns
    /// only after that.
    async fn run(mut self) {
        while self.exchange().await.is_ok() {}
        let is_hung = self.silent_checks >= SILENT_CHECKS_MAX;
        let Self { socket, queue, keeper, process, .. } = self;
        drop(socket);
        wait_for_death(keeper, process, is_hung).await;
        drop(queue);
    }

    /// Sends one request, receives replies, or checks whether the keeper still replies.
    async fn exchange(&mut self) -> Result<(), KeeperConnectionBroken> {
        let is_awaited = self.in_turn || !self.pending_replies.is_empty();
        tokio::select! {
            // What has arrived is read before the keeper is judged.
            biased;
            readable = self.socket.readable() => match readable {
                Ok(()) => self.receive_replies().await,
                Err(_) => Err(KeeperConnectionBroken),
            },
            request = self.queue.recv() => match request {
                Some(request) => self.forward_request(request).await,
                None => Err(KeeperConnectionBroken),
            },
            () = tokio::time::sleep_until(self.next_check), if is_awaited => {
                self.check(self.pending_ping.is_some() || !self.pending_replies.is_empty())?;
                self.ping().await
            }
        }
    }

    /// Notes whether the keeper has reacted since the last check. If it should have and did not, it may be stopped, so it
    /// is told to continue. One that works is not stopped: in a fork storm it may have no time to reply.
    fn check(&mut self, should_react: bool) -> Result<(), KeeperConnectionBroken> {
        self.next_check = Instant::now() + CHECK_INTERVAL;
        let cpu_ticks = self.process.as_ref().and_then(procfs::cpu_ticks);
        let has_worked = std::mem::replace(&mut self.cpu_ticks, cpu_ticks) != cpu_ticks;
        let has_received = std::mem::take(&mut self.has_received);
        let is_silent = should_react && !has_received && !has_worked;
        self.silent_checks = if is_silent { self.silent_checks + 1 } else { 0 };
        if self.silent_checks == 0 {
            return Ok(());
        }
        if self.silent_checks >= SILENT_CHECKS_MAX {
            return Err(KeeperConnectionBroken);
        }
        signal_keeper(self.process.as_ref(), Signal::CONT);
        Ok(())
    }

    /// Sends a ping, unless one is on its way: a sweep may take long, and shows no sign of life meanwhile.
    async fn ping(&mut self) -> Result<(), KeeperConnectionBroken> {
        if self.pending_ping.is_some() {
            return Ok(());
        }
        self.last_id += 1;
        self.pending_ping = Some(self.last_id);
        let ping = NumberedLine { id: self.last_id, body: KeeperCommand::Ping };
        self.send(&ping.to_line(), &[]).await
    }

    async fn forward_request(
        &mut self,
        KeeperRequest { command, descriptors, exited, reply }: KeeperRequest,
    ) -> Result<(), KeeperConnectionBroken> {
        if !self.in_turn && self.pending_replies.is_empty() {
            // Nobody has waited for a while, so nothing was checked.
            self.next_check = Instant::now() + CHECK_INTERVAL;
            self.has_received = false;
            self.cpu_ticks = self.process.as_ref().and_then(procfs::cpu_ticks);
            self.silent_checks = 0;
        }
        match command {
            KeeperCommand::BeginTurn => self.in_turn = true,
            KeeperCommand::EndTurn { .. } => self.in_turn = false,
            _ => {}
        }
        self.last_id += 1;
        let id = self.last_id;
        self.pending_replies.insert(id, reply);
        self.exit_senders.extend(exited.map(|exited| (id, exited)));
        self.send(&NumberedLine { id, body: command }.to_line(), &descriptors).await
    }

    async fn receive_replies(&mut self) -> Result<(), KeeperConnectionBroken> {
        self.read()?;
        while let Some(NumberedLine { id, body }) = self.lines.next().map_err(|_| KeeperConnectionBroken)? {
            self.deliver_reply(id, body).await?;
        }
        Ok(())
    }

    /// Reads what has arrived, without waiting.
    fn read(&mut self) -> Result<(), KeeperConnectionBroken> {
        let mut bytes = [0; READ_BYTES];
        match self.socket.try_read(&mut bytes) {
            Ok(0) => Err(KeeperConnectionBroken),
            Ok(read) => {
                self.has_received = true;
                self.lines.push(bytes.get(..read).unwrap_or_default());
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(_) => Err(KeeperConnectionBroken),
        }
    }

    async fn deliver_reply(&mut self, id: u64, reply: KeeperReply) -> Result<(), KeeperConnectionBroken> {
        if let KeeperReply::Exited(exit) = reply {
            if let Some(exited) = self.exit_senders.remove(&id) {
                exited.send_replace(Some(exit));
            }
            return Ok(());
        }
        if self.pending_ping == Some(id) {
            self.pending_ping = None;
            return Ok(());
        }
        if matches!(reply, KeeperReply::Failed { .. }) {
            self.exit_senders.remove(&id);
        }
        let Some(waiter) = self.pending_replies.remove(&id) else { return Ok(()) };
        if let Err(KeeperReply::Started { .. }) = waiter.send(reply) {
            // The caller has gone away, and no one else would ever end this child.
            self.last_id += 1;
            let kill = KeeperCommand::Signal { child: id, signal: Signal::KILL.as_raw() };
            self.send(&NumberedLine { id: self.last_id, body: kill }.to_line(), &[]).await?;
        }
        Ok(())
    }

    /// Sends a line. The descriptors travel with its first byte. A keeper that does not read is checked meanwhile.
    async fn send(&mut self, line: &[u8], descriptors: &[OwnedFd]) -> Result<(), KeeperConnectionBroken> {
        let mut rest = line;
        let mut unsent_descriptors = descriptors;
        while !rest.is_empty() {
            let write = || send_with_descriptors(&self.socket, rest, unsent_descriptors, SendFlags::DONTWAIT);
            let written = self.socket.async_io(Interest::WRITABLE, write);
            let Ok(written) = tokio::time::timeout(CHECK_INTERVAL, written).await else {
                self.check(true)?;
                continue;
            };
            let sent = written.map_err(|_| KeeperConnectionBroken)?;
            unsent_descriptors = &[];
            rest = rest.get(sent..).unwrap_or_default();
        }
        Ok(())
    }
}

/// Waits until a keeper without a connection has ended everything below it and is dead itself. A stopped keeper is told
/// to continue; one that takes too long or `is_hung` is killed.
async fn wait_for_death(mut keeper: Child, process: Option<ProcessIdentity>, is_hung: bool) {
    let kill_after = if is_hung { 0 } else { CLOSE_CHECKS_MAX };
    // The wait fails only when the runtime ends, and this task with it.
    let mut death = tokio::task::spawn_blocking(move || keeper.wait());
    for checks in 0..=kill_after + DEATH_CHECKS_MAX {
        if checks >= kill_after {
            signal_keeper(process.as_ref(), Signal::KILL);
        } else {
            signal_keeper(process.as_ref(), Signal::CONT);
        }
        if tokio::time::timeout(CHECK_INTERVAL, &mut death).await.is_ok() {
            return;
        }
    }
}

fn signal_keeper(process: Option<&ProcessIdentity>, signal: Signal) {
    if let Some(process) = process {
        procfs::send_signal(process, signal);
    }
}
