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

use crate::MARK;
use crate::own::PROGRAM;
use crate::proc::Process;
use crate::wire::{Answer, Command, DESCRIPTORS, Exit, Launch, Lines, Numbered, Sweep, Swept};

/// Requests that may wait to be sent.
const REQUESTS: usize = 16;
/// How much is read at once.
const READ: usize = 16 << 10;

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
pub struct Keeper {
    requests: mpsc::Sender<Request>,
    pid: u32,
    mark: String,
    /// Ends when the keeper process is dead and reaped; it needs no other end, since a keeper dies when nobody speaks to
    /// it any more.
    task: JoinHandle<()>,
}

impl Keeper {
    /// Starts `exe __keeper`. Everything that it is told to start bears the mark. `exe` is best `/proc/self/exe`, which
    /// stays the same program when an upgrade has replaced the file.
    pub async fn start(exe: &Path, mark: &str) -> Result<Self, KeeperError> {
        let (ours, theirs) = StdStream::pair().map_err(KeeperError::NotStarted)?;
        // Its environment is empty: it needs none, and what lies in a worker's may be secret.
        let child = std::process::Command::new(exe)
            .arg0(PROGRAM)
            .arg("__keeper")
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .map_err(KeeperError::NotStarted)?;
        let pid = child.id();
        let (requests, queue) = mpsc::channel(REQUESTS);
        let conversation = Conversation::new(child, ours, queue).map_err(KeeperError::NotStarted)?;
        let task = tokio::spawn(conversation.hold());
        Ok(Self { requests, pid, mark: mark.to_owned(), task })
    }

    /// The keeper's own process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Starts the agent, or another program that no turn owns.
    pub async fn spawn(&self, launch: Launch) -> Result<Kept, KeeperError> {
        self.spawn_as(launch, false).await
    }

    /// Starts a program that is a process of the turn like those that the agent starts. It is for terminals, which are
    /// served to agents that would rather have their client run commands.
    pub async fn spawn_in_turn(&self, launch: Launch) -> Result<Kept, KeeperError> {
        self.spawn_as(launch, true).await
    }

    /// The processes that come from now on are the turn's.
    pub async fn begin_turn(&self) -> Result<(), KeeperError> {
        ask(&self.requests, Command::BeginTurn).await.map(drop)
    }

    /// The turn is over; what it has started and not ended was left on purpose.
    pub async fn end_turn(&self) -> Result<(), KeeperError> {
        ask(&self.requests, Command::EndTurn).await.map(drop)
    }

    /// Ends processes, and comes back when they are gone. A second sweep of the same, or of everything, shortens the
    /// time that an earlier one gives.
    pub async fn sweep(&self, sweep: Sweep) -> Result<Swept, KeeperError> {
        match ask(&self.requests, Command::Sweep(sweep)).await? {
            Answer::Swept(swept) => Ok(swept),
            _ => Err(KeeperError::Lost),
        }
    }

    /// What finished turns have left running.
    pub async fn left(&self) -> Result<Vec<Process>, KeeperError> {
        match ask(&self.requests, Command::Left).await? {
            Answer::Left(processes) => Ok(processes),
            _ => Err(KeeperError::Lost),
        }
    }

    /// Waits until the keeper's process is dead and reaped. What was below it has then fallen to this process, if it
    /// is a subreaper.
    pub async fn lost(&self) {
        self.requests.closed().await;
    }

    /// Lets the keeper end everything and waits until it is dead itself.
    pub async fn close(self) {
        let Self { requests, task, .. } = self;
        drop(requests);
        // It ends with the keeper, and a panic in it has ended the keeper as well.
        let _ = task.await;
    }

    async fn spawn_as(&self, mut launch: Launch, in_turn: bool) -> Result<Kept, KeeperError> {
        if launch.cwd.to_str().is_none() {
            let folder = launch.cwd.display();
            return Err(KeeperError::Refused(format!("the name of the folder {folder} is not UTF-8")));
        }
        launch.env.insert(MARK.to_owned(), self.mark.clone());
        let Pipes { ours: [stdin, stdout, stderr], theirs } = Pipes::open().map_err(KeeperError::NoPipe)?;
        let (exited, exit) = watch::channel(None);
        let start = Start { descriptors: theirs, exited };
        match request(&self.requests, Command::Start { launch, in_turn }, Some(start)).await? {
            Answer::Started { pid } => Ok(Kept {
                pid,
                stdin: pipe::Sender::from_owned_fd(stdin).map_err(KeeperError::NoPipe)?,
                stdout: pipe::Receiver::from_owned_fd(stdout).map_err(KeeperError::NoPipe)?,
                stderr: pipe::Receiver::from_owned_fd(stderr).map_err(KeeperError::NoPipe)?,
                exit: ExitWatch(exit),
            }),
            Answer::Failed { message, not_found: true } => Err(KeeperError::NotFound(message)),
            Answer::Failed { message, not_found: false } => Err(KeeperError::Refused(message)),
            _ => Err(KeeperError::Lost),
        }
    }
}

/// A child that a keeper started and keeps.
#[derive(Debug)]
pub struct Kept {
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
pub struct ExitWatch(watch::Receiver<Option<Exit>>);

impl ExitWatch {
    /// Waits until the child has ended, or its keeper: then nobody can say how.
    pub async fn wait(&self) -> Exit {
        let mut ended = self.0.clone();
        let exit = ended.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
        exit.unwrap_or_default()
    }

    /// How the child has ended, if it has.
    pub fn now(&self) -> Option<Exit> {
        *self.0.borrow()
    }
}

/// Something to be done, and who waits for it.
#[derive(Debug)]
struct Request {
    command: Command,
    start: Option<Start>,
    answer: oneshot::Sender<Answer>,
}

/// What comes with a command to start something.
#[derive(Debug)]
struct Start {
    descriptors: [OwnedFd; DESCRIPTORS],
    exited: watch::Sender<Option<Exit>>,
}

async fn ask(requests: &mpsc::Sender<Request>, command: Command) -> Result<Answer, KeeperError> {
    request(requests, command, None).await
}

/// Has something done, with what comes with it.
async fn request(
    requests: &mpsc::Sender<Request>,
    command: Command,
    start: Option<Start>,
) -> Result<Answer, KeeperError> {
    let (answer, answered) = oneshot::channel();
    requests.send(Request { command, start, answer }).await.map_err(|_| KeeperError::Lost)?;
    answered.await.map_err(|_| KeeperError::Lost)
}

/// A child's standard input, output and error, from both sides.
#[derive(Debug)]
struct Pipes {
    ours: [OwnedFd; DESCRIPTORS],
    theirs: [OwnedFd; DESCRIPTORS],
}

impl Pipes {
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
struct Conversation {
    socket: UnixStream,
    queue: mpsc::Receiver<Request>,
    lines: Lines,
    /// The number of the last request.
    last: u64,
    /// Who waits for an answer.
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    /// Who wants to know the end of a child.
    children: HashMap<u64, watch::Sender<Option<Exit>>>,
    keeper: Child,
}

/// The keeper does not hear or cannot be understood any more.
#[derive(Debug)]
struct Broken;

impl Conversation {
    fn new(keeper: Child, socket: StdStream, queue: mpsc::Receiver<Request>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket: UnixStream::from_std(socket)?,
            queue,
            lines: Lines::default(),
            last: 0,
            waiting: HashMap::new(),
            children: HashMap::new(),
            keeper,
        })
    }

    /// Speaks until nobody has anything more to say, then waits until the keeper is dead. Only its death, and not the
    /// end of the conversation, lets its children fall to us; so who waits is told nothing before.
    async fn hold(mut self) {
        while self.exchange().await.is_ok() {}
        let Self { socket, queue, mut keeper, .. } = self;
        drop(socket);
        // It fails only when the runtime ends, and this task with it.
        let _ = tokio::task::spawn_blocking(move || keeper.wait()).await;
        drop(queue);
    }

    /// Sends one request or takes in what was answered.
    async fn exchange(&mut self) -> Result<(), Broken> {
        tokio::select! {
            request = self.queue.recv() => match request {
                Some(request) => self.tell(request).await,
                None => Err(Broken),
            },
            readable = self.socket.readable() => match readable {
                Ok(()) => self.hear().await,
                Err(_) => Err(Broken),
            },
        }
    }

    async fn tell(&mut self, Request { command, start, answer }: Request) -> Result<(), Broken> {
        self.last += 1;
        let id = self.last;
        self.waiting.insert(id, answer);
        let descriptors = start.map(|Start { descriptors, exited }| {
            self.children.insert(id, exited);
            descriptors
        });
        self.send(&Numbered { id, body: command }.line(), descriptors.as_ref()).await
    }

    async fn hear(&mut self) -> Result<(), Broken> {
        self.read()?;
        while let Some(Numbered { id, body }) = self.lines.next().map_err(|_| Broken)? {
            self.deliver(id, body).await?;
        }
        Ok(())
    }

    /// Takes in what has come, if it has.
    fn read(&mut self) -> Result<(), Broken> {
        let mut bytes = [0; READ];
        match self.socket.try_read(&mut bytes) {
            Ok(0) => Err(Broken),
            Ok(read) => {
                self.lines.push(bytes.get(..read).unwrap_or_default());
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(_) => Err(Broken),
        }
    }

    async fn deliver(&mut self, id: u64, answer: Answer) -> Result<(), Broken> {
        if let Answer::Exited(exit) = answer {
            if let Some(exited) = self.children.remove(&id) {
                exited.send_replace(Some(exit));
            }
            return Ok(());
        }
        if matches!(answer, Answer::Failed { .. }) {
            self.children.remove(&id);
        }
        let Some(waits) = self.waiting.remove(&id) else { return Ok(()) };
        if let Err(Answer::Started { .. }) = waits.send(answer) {
            // Whoever wanted it has gone, and nobody else will ever end it.
            self.last += 1;
            let kill = Command::Signal { child: id, signal: Signal::KILL.as_raw() };
            self.send(&Numbered { id: self.last, body: kill }.line(), None).await?;
        }
        Ok(())
    }

    /// Sends a line, and the descriptors beside its first byte.
    async fn send(&self, line: &[u8], descriptors: Option<&[OwnedFd; DESCRIPTORS]>) -> Result<(), Broken> {
        let mut rest = line;
        let mut beside = descriptors;
        while !rest.is_empty() {
            let write = || send_some(&self.socket, rest, beside);
            let sent = self.socket.async_io(Interest::WRITABLE, write).await.map_err(|_| Broken)?;
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
