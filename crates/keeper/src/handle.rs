//! The worker's side of a keeper: starts it, tells it what to do, and hears what came of it. One task owns the socket
//! and all that waits for an answer; everybody else has a queue to it. It looks at no process itself.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::MARK_VARIABLE;
use crate::process_setup::PROGRAM_NAME;
use crate::procfs::ProcessIdentity;
use crate::wire::{
    ChildExit, DESCRIPTORS, KeeperCommand, KeeperLineBuffer, KeeperReply, LaunchSpec, NumberedLine,
    SweepRequest, SweepResult,
};

/// Requests that may wait to be sent.
const REQUEST_QUEUE_MAX: usize = 16;
/// How much is read at once.
const READ_BYTES: usize = 16 << 10;

/// Why a keeper did not do what it was told.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// There is no keeper to tell.
    #[error("the keeper could not be started: {0}")]
    NotStarted(#[source] io::Error),
    /// It has died, or is about to, and everything below it with it.
    #[error("the keeper is gone")]
    Lost,
    /// There is no such program.
    #[error("{0}")]
    NotFound(String),
    /// There is one, and it could not be started.
    #[error("{0}")]
    Refused(String),
    /// The pipes to a child could not be made.
    #[error("no pipe to a child could be opened: {0}")]
    NoPipe(#[source] io::Error),
}

/// A keeper process. When this is dropped, the keeper ends everything below it and then itself.
#[derive(Debug)]
pub struct KeeperHandle {
    requests: mpsc::Sender<KeeperRequest>,
    pid: u32,
    mark: String,
    /// Ends when the keeper process is dead and reaped; it needs no other end, since a keeper dies when nobody speaks to
    /// it any more.
    task: JoinHandle<()>,
}

impl KeeperHandle {
    /// Starts `exe __keeper`. Everything that it is told to start bears the mark. `exe` is best `/proc/self/exe`, which
    /// stays the same program when an upgrade has replaced the file.
    pub async fn start(exe: &Path, mark: &str) -> Result<Self, KeeperError> {
        let (ours, theirs) = StdStream::pair().map_err(KeeperError::NotStarted)?;
        // Its environment is empty: it needs none, and what lies in a worker's may be secret.
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
        let conversation = KeeperConnection::new(child, ours, queue).map_err(KeeperError::NotStarted)?;
        let task = tokio::spawn(conversation.run());
        Ok(Self { requests, pid, mark: mark.to_owned(), task })
    }

    /// The keeper's own process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Starts the agent, or another program that no turn owns.
    pub async fn spawn(&self, launch: LaunchSpec) -> Result<KeeperChild, KeeperError> {
        self.spawn_as(launch, false).await
    }

    /// Starts a program that is a process of the turn like those that the agent starts. It is for terminals, which are
    /// served to agents that would rather have their client run commands.
    pub async fn spawn_in_turn(&self, launch: LaunchSpec) -> Result<KeeperChild, KeeperError> {
        self.spawn_as(launch, true).await
    }

    /// The processes that come from now on are the turn's.
    pub async fn begin_turn(&self) -> Result<(), KeeperError> {
        send_command(&self.requests, KeeperCommand::BeginTurn).await.map(drop)
    }

    /// The turn is over; what it has started and not ended was left on purpose.
    pub async fn end_turn(&self) -> Result<(), KeeperError> {
        send_command(&self.requests, KeeperCommand::EndTurn).await.map(drop)
    }

    /// Ends processes, and comes back when they are gone. A second sweep of the same, or of everything, shortens the
    /// time that an earlier one gives.
    pub async fn sweep(&self, sweep: SweepRequest) -> Result<SweepResult, KeeperError> {
        match send_command(&self.requests, KeeperCommand::Sweep(sweep)).await? {
            KeeperReply::Swept(swept) => Ok(swept),
            _ => Err(KeeperError::Lost),
        }
    }

    /// What finished turns have left running.
    pub async fn list_leftovers(&self) -> Result<Vec<ProcessIdentity>, KeeperError> {
        match send_command(&self.requests, KeeperCommand::ListLeftovers).await? {
            KeeperReply::Leftovers(processes) => Ok(processes),
            _ => Err(KeeperError::Lost),
        }
    }

    /// Waits until the keeper's process is dead and reaped. What was below it has then fallen to this process, if it
    /// is a subreaper.
    pub async fn wait_until_lost(&self) {
        self.requests.closed().await;
    }

    /// Lets the keeper end everything and waits until it is dead itself.
    pub async fn close(self) {
        let Self { requests, task, .. } = self;
        drop(requests);
        // It ends with the keeper, and a panic in it has ended the keeper as well.
        let _ = task.await;
    }

    async fn spawn_as(&self, mut launch: LaunchSpec, in_turn: bool) -> Result<KeeperChild, KeeperError> {
        if launch.cwd.to_str().is_none() {
            let folder = launch.cwd.display();
            return Err(KeeperError::Refused(format!("the name of the folder {folder} is not UTF-8")));
        }
        launch.env.insert(MARK_VARIABLE.to_owned(), self.mark.clone());
        let ChildPipes { ours: [stdin, stdout, stderr], theirs } =
            ChildPipes::open().map_err(KeeperError::NoPipe)?;
        let (exited, exit) = watch::channel(None);
        let start = ChildStart { descriptors: theirs, exited };
        match send_request(&self.requests, KeeperCommand::Start { launch, in_turn }, Some(start)).await? {
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

/// A child that a keeper started and keeps.
#[derive(Debug)]
pub struct KeeperChild {
    /// Its pid.
    pub pid: u32,
    /// What it reads.
    pub stdin: pipe::Sender,
    /// What it says.
    pub stdout: pipe::Receiver,
    /// What it complains about.
    pub stderr: pipe::Receiver,
    /// Its end.
    pub exit: ExitWatch,
}

/// The end of a child, for as many as want to wait for it.
#[derive(Debug, Clone)]
pub struct ExitWatch(watch::Receiver<Option<ChildExit>>);

impl ExitWatch {
    /// Waits until the child has ended, or its keeper: then nobody can say how.
    pub async fn wait(&self) -> ChildExit {
        let mut ended = self.0.clone();
        let exit = ended.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
        exit.unwrap_or_default()
    }

    /// How the child has ended, if it has.
    pub fn current(&self) -> Option<ChildExit> {
        *self.0.borrow()
    }
}

/// Something to be done, and who waits for it.
#[derive(Debug)]
struct KeeperRequest {
    command: KeeperCommand,
    start: Option<ChildStart>,
    reply: oneshot::Sender<KeeperReply>,
}

/// What comes with a command to start something.
#[derive(Debug)]
struct ChildStart {
    descriptors: [OwnedFd; DESCRIPTORS],
    exited: watch::Sender<Option<ChildExit>>,
}

async fn send_command(
    requests: &mpsc::Sender<KeeperRequest>,
    command: KeeperCommand,
) -> Result<KeeperReply, KeeperError> {
    send_request(requests, command, None).await
}

/// Has something done, with what comes with it.
async fn send_request(
    requests: &mpsc::Sender<KeeperRequest>,
    command: KeeperCommand,
    start: Option<ChildStart>,
) -> Result<KeeperReply, KeeperError> {
    let (answer, answered) = oneshot::channel();
    requests.send(KeeperRequest { command, start, reply: answer }).await.map_err(|_| KeeperError::Lost)?;
    answered.await.map_err(|_| KeeperError::Lost)
}

/// A child's standard input, output and error, from both sides.
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

/// The task that speaks with the keeper.
#[derive(Debug)]
struct KeeperConnection {
    socket: UnixStream,
    queue: mpsc::Receiver<KeeperRequest>,
    lines: KeeperLineBuffer,
    /// The number of the last request.
    last_id: u64,
    /// Who waits for an answer.
    pending_replies: HashMap<u64, oneshot::Sender<KeeperReply>>,
    /// Who wants to know the end of a child.
    exit_senders: HashMap<u64, watch::Sender<Option<ChildExit>>>,
    keeper: Child,
}

/// The keeper does not hear or cannot be understood any more.
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
            keeper,
        })
    }

    /// Speaks until nobody has anything more to say, then waits until the keeper is dead. Only its death, and not the
    /// end of the conversation, lets its children fall to us; so who waits is told nothing before.
    async fn run(mut self) {
        while self.exchange().await.is_ok() {}
        let Self { socket, queue, mut keeper, .. } = self;
        drop(socket);
        // It fails only when the runtime ends, and this task with it.
        let _ = tokio::task::spawn_blocking(move || keeper.wait()).await;
        drop(queue);
    }

    /// Sends one request or takes in what was answered.
    async fn exchange(&mut self) -> Result<(), KeeperConnectionBroken> {
        tokio::select! {
            request = self.queue.recv() => match request {
                Some(request) => self.forward_request(request).await,
                None => Err(KeeperConnectionBroken),
            },
            readable = self.socket.readable() => match readable {
                Ok(()) => self.receive_replies().await,
                Err(_) => Err(KeeperConnectionBroken),
            },
        }
    }

    async fn forward_request(
        &mut self,
        KeeperRequest { command, start, reply: answer }: KeeperRequest,
    ) -> Result<(), KeeperConnectionBroken> {
        self.last_id += 1;
        let id = self.last_id;
        self.pending_replies.insert(id, answer);
        let descriptors = start.map(|ChildStart { descriptors, exited }| {
            self.exit_senders.insert(id, exited);
            descriptors
        });
        self.send(&NumberedLine { id, body: command }.to_line(), descriptors.as_ref()).await
    }

    async fn receive_replies(&mut self) -> Result<(), KeeperConnectionBroken> {
        self.read()?;
        while let Some(NumberedLine { id, body }) = self.lines.next().map_err(|_| KeeperConnectionBroken)? {
            self.deliver_reply(id, body).await?;
        }
        Ok(())
    }

    /// Takes in what has come, if it has.
    fn read(&mut self) -> Result<(), KeeperConnectionBroken> {
        let mut bytes = [0; READ_BYTES];
        match self.socket.try_read(&mut bytes) {
            Ok(0) => Err(KeeperConnectionBroken),
            Ok(read) => {
                self.lines.push(bytes.get(..read).unwrap_or_default());
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(_) => Err(KeeperConnectionBroken),
        }
    }

    async fn deliver_reply(&mut self, id: u64, answer: KeeperReply) -> Result<(), KeeperConnectionBroken> {
        if let KeeperReply::Exited(exit) = answer {
            if let Some(exited) = self.exit_senders.remove(&id) {
                exited.send_replace(Some(exit));
            }
            return Ok(());
        }
        if matches!(answer, KeeperReply::Failed { .. }) {
            self.exit_senders.remove(&id);
        }
        let Some(waits) = self.pending_replies.remove(&id) else { return Ok(()) };
        if let Err(KeeperReply::Started { .. }) = waits.send(answer) {
            // Whoever wanted it has gone, and nobody else will ever end it.
            self.last_id += 1;
            let kill = KeeperCommand::Signal { child: id, signal: Signal::KILL.as_raw() };
            self.send(&NumberedLine { id: self.last_id, body: kill }.to_line(), None).await?;
        }
        Ok(())
    }

    /// Sends a line, and the descriptors beside its first byte.
    async fn send(
        &self,
        line: &[u8],
        descriptors: Option<&[OwnedFd; DESCRIPTORS]>,
    ) -> Result<(), KeeperConnectionBroken> {
        let mut rest = line;
        let mut beside = descriptors;
        while !rest.is_empty() {
            let write = || send_some(&self.socket, rest, beside);
            let sent =
                self.socket.async_io(Interest::WRITABLE, write).await.map_err(|_| KeeperConnectionBroken)?;
            beside = None;
            rest = rest.get(sent..).unwrap_or_default();
        }
        Ok(())
    }
}

/// Sends what the socket takes at once.
fn send_some(
    socket: &UnixStream,
    bytes: &[u8],
    beside: Option<&[OwnedFd; DESCRIPTORS]>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let borrowed = beside.map(|descriptors| descriptors.each_ref().map(|descriptor| descriptor.as_fd()));
    if let Some(borrowed) = &borrowed {
        let fits = control.push(SendAncillaryMessage::ScmRights(borrowed));
        debug_assert!(fits, "the space is for just as many");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}
