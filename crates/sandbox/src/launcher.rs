//! Makes a sandbox, and starts programs in it. A sandbox is a user, a PID and a mount namespace whose first process, the
//! init, is a child of the caller. The programs are children of the caller as well, so that it learns how they end; what
//! they leave behind is adopted by the init. If the caller dies, the kernel ends the init and with it everything.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qd_protocol::sandbox::{NetworkSetting, SandboxLevel};
use rustix::net::RecvFlags;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, geteuid, pidfd_open, pidfd_send_signal, setpgid, waitpid,
};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use rustix::thread::{
    CapabilitySet, CapabilitySets, ThreadNameSpaceType, capabilities, configure_capability_in_ambient_set,
    move_into_thread_name_spaces, set_capabilities,
};

use crate::descriptor_passing::receive_with_descriptors;
use crate::error::SandboxError;
use crate::id_map::write_id_maps;
use crate::init::{InitReply, SANDBOX_COMMAND};
use crate::kernel::{self, ExecArguments, clone_flags};
use crate::keyrings::refuse_keyrings;
use crate::plan::SandboxPlan;

/// This very program, even if its file has been replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// `argv[0]` of our processes.
const PROGRAM_NAME: &str = "qd";
/// How long an init may take to arrange the files. Only a very busy machine takes so long.
const SET_UP_TIMEOUT: Duration = Duration::from_secs(20);
/// Sent to the init once its user namespace has users.
const USERS_EXIST: u8 = b'u';
/// What a process exits with that could not become the program.
const NOT_STARTED: i32 = 127;

/// A sandbox that programs can be started in. Dropping it does not end it.
#[derive(Debug)]
pub struct Sandbox {
    init: Pid,
    pidfd: OwnedFd,
    namespaces: ThreadNameSpaceType,
    level: SandboxLevel,
    model_listener: Option<OwnedFd>,
    /// The mounts that the init has made, if it has moved to a copy of them. Without this, the init would have to wait
    /// until the kernel has ended them, which takes longer than the rest of its work.
    _first_mounts: Option<File>,
}

/// A program to start in a sandbox.
#[derive(Debug, Clone)]
pub struct ConfinedProgram {
    /// The path of the program, inside.
    pub path: PathBuf,
    /// Its arguments, with the name that it sees as the first.
    pub arguments: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: PathBuf,
}

impl Sandbox {
    /// Makes a sandbox. Fails if this process has more than one thread.
    pub fn start(plan: &SandboxPlan) -> Result<Self, SandboxError> {
        let internal = |error: io::Error| SandboxError::internal(&error);
        let arguments = [PROGRAM_NAME, SANDBOX_COMMAND].map(str::to_owned);
        let program = ExecArguments::new(Path::new(OWN_PROGRAM), arguments, []).map_err(internal)?;
        let (ours, theirs) = UnixStream::pair().map_err(internal)?;
        let mut flags = clone_flags::NEW_USER | clone_flags::NEW_PIDS | clone_flags::NEW_MOUNTS;
        let mut namespaces =
            ThreadNameSpaceType::USER | ThreadNameSpaceType::PROCESS_ID | ThreadNameSpaceType::MOUNT;
        if plan.network == NetworkSetting::Off {
            flags |= clone_flags::NEW_NETWORK;
            namespaces |= ThreadNameSpaceType::NETWORK;
        }
        if plan.level == SandboxLevel::Workspace {
            flags |= clone_flags::NEW_IPC;
            namespaces |= ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION;
        }
        let Some(pid) = fork(flags).map_err(|error| SandboxError::user_namespace(&error))? else {
            let Err(_failed) = become_init(&theirs, &program);
            kernel::exit_now(NOT_STARTED);
        };
        drop(theirs);
        let init = process(pid).map_err(internal)?;
        let started = pidfd_open(init, PidfdFlags::empty()).map_err(|error| internal(error.into()));
        // The init does nothing before it is told that its users exist.
        let first_mounts =
            geteuid().is_root().then(|| File::open(format!("/proc/{pid}/ns/mnt")).ok()).flatten();
        let started = started.and_then(|pidfd| {
            write_id_maps(pid).map_err(|error| SandboxError::user_namespace(&error))?;
            (&ours).write_all(&[USERS_EXIST]).map_err(internal)?;
            let model_listener = send_plan(&ours, plan)?;
            Ok(Self {
                init,
                pidfd,
                namespaces,
                level: plan.level,
                model_listener,
                _first_mounts: first_mounts,
            })
        });
        started.inspect_err(|_| {
            // It may have exited by itself. It cannot be anybody else: it is our child, and not reaped yet.
            let _exited = rustix::process::kill_process(init, Signal::KILL);
            let _reaped = waitpid(Some(init), WaitOptions::empty());
        })
    }

    /// The pid of the init, which is a child of the process that made the sandbox.
    pub fn init_pid(&self) -> u32 {
        self.init.as_raw_nonzero().get().unsigned_abs()
    }

    /// The listener on the sandbox's loopback interface, for whoever serves as a proxy to the agent's model. It is there
    /// once, if the plan has a proxy.
    pub fn take_model_listener(&mut self) -> Option<OwnedFd> {
        self.model_listener.take()
    }

    /// Starts a program as a child of this process, with these descriptors as its standard input, output and error, and
    /// returns its pid. It leads a process group of its own. Fails if this process has more than one thread.
    pub fn spawn(&self, program: &ConfinedProgram, stdio: &[OwnedFd; 3]) -> io::Result<u32> {
        let ConfinedProgram { path, arguments, env, cwd } = program;
        let environment = env.iter().map(|(name, value)| format!("{name}={value}"));
        let program = ExecArguments::new(path, arguments.iter().cloned(), environment)?;
        let (mut reports, reporter) = io::pipe()?;
        // A process that is in the sandbox's PID namespace has to be started by one that has entered it.
        let Some(helper) = fork(0)? else {
            let started = self.enter().and_then(|()| {
                #[expect(unsafe_code, reason = "see `fork`, which has checked it")]
                // SAFETY: this process was made by a process with one thread, so it has one.
                unsafe {
                    kernel::clone_process(clone_flags::SIBLING)
                }
            });
            match started {
                Ok(Some(pid)) => StartReport::Started(pid).send(&reporter),
                Ok(None) => {
                    let Err(error) = become_program(&program, stdio, cwd, self.level);
                    StartReport::Failed(error).send(&reporter);
                }
                Err(error) => StartReport::Failed(error).send(&reporter),
            }
            kernel::exit_now(NOT_STARTED);
        };
        drop(reporter);
        let mut bytes = Vec::new();
        let read = reports.read_to_end(&mut bytes);
        waitpid(Some(process(helper)?), WaitOptions::empty())?;
        read?;
        let mut pid = None;
        let mut failure = None;
        for report in bytes.chunks_exact(StartReport::BYTES).map(StartReport::parse) {
            match report {
                StartReport::Started(started) => pid = Some(started),
                StartReport::Failed(error) => failure = Some(error),
            }
        }
        match (pid, failure) {
            (Some(pid), None) => Ok(pid),
            (started, failure) => {
                if let Some(pid) = started {
                    waitpid(Some(process(pid)?), WaitOptions::empty())?;
                }
                Err(failure.unwrap_or_else(|| io::ErrorKind::BrokenPipe.into()))
            }
        }
    }

    /// Ends everything in the sandbox, at once.
    pub fn kill(&self) {
        // Fails only if it is dead already.
        let _dead = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    fn enter(&self) -> io::Result<()> {
        Ok(move_into_thread_name_spaces(self.pidfd.as_fd(), self.namespaces)?)
    }
}

/// Keeps this process, and everything that it starts, from signalling processes outside and from connecting to their
/// abstract sockets, where the kernel can. Called before [`Sandbox::start`], so that the init can be signalled.
pub fn restrict_own_scope() -> io::Result<bool> {
    kernel::restrict_scope()
}

/// What becomes of a start, as the processes involved report it.
#[derive(Debug)]
enum StartReport {
    Started(u32),
    Failed(io::Error),
}

impl StartReport {
    const BYTES: usize = 8;

    /// Sends it as two numbers, of which one is zero. The kernel never cuts so short a text.
    fn send(&self, mut reporter: &PipeWriter) {
        let (pid, error) = match self {
            Self::Started(pid) => (*pid, 0),
            Self::Failed(error) => (0, error.raw_os_error().unwrap_or(libc::EIO)),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&pid.to_ne_bytes());
        bytes[4..].copy_from_slice(&error.to_ne_bytes());
        // Nobody reads it if the process that waits has died, and then there is nothing to report.
        let _unread = reporter.write_all(&bytes);
    }

    fn parse(bytes: &[u8]) -> Self {
        let number = |at: usize| {
            let bytes = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            u32::from_ne_bytes(bytes.unwrap_or_default())
        };
        match (number(0), number(4)) {
            (pid, 0) => Self::Started(pid),
            (_, error) => Self::Failed(io::Error::from_raw_os_error(error.cast_signed())),
        }
    }
}

/// Splits this process in two, if it has one thread.
fn fork(flags: u64) -> io::Result<Option<u32>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("a process with several threads cannot start a sandbox"));
    }
    #[expect(unsafe_code, reason = "no safe call clones a process into new namespaces")]
    // SAFETY: there is one thread, and it is here.
    unsafe {
        kernel::clone_process(flags)
    }
}

/// Becomes the init, with all rights over its namespaces. A program that is started keeps them only if its user exists
/// in the namespace, and an ordinary user's only if it is told to.
fn become_init(mut socket: &UnixStream, program: &ExecArguments) -> io::Result<Infallible> {
    socket.read_exact(&mut [0])?;
    let rights = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
    let own = capabilities(None)?;
    set_capabilities(None, CapabilitySets { inheritable: rights, ..own })?;
    for right in rights.iter() {
        configure_capability_in_ambient_set(right, true)?;
    }
    dup2_stdin(socket)?;
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    kernel::close_descriptors_on_exec_from(3)?;
    kernel::reset_signals();
    program.exec()
}

fn become_program(
    program: &ExecArguments,
    stdio: &[OwnedFd; 3],
    cwd: &Path,
    level: SandboxLevel,
) -> io::Result<Infallible> {
    kernel::reset_signals();
    setpgid(None, None)?;
    let [stdin, stdout, stderr] = stdio;
    dup2_stdin(stdin)?;
    dup2_stdout(stdout)?;
    dup2_stderr(stderr)?;
    kernel::close_descriptors_on_exec_from(3)?;
    rustix::process::chdir(cwd)?;
    if level == SandboxLevel::Workspace {
        refuse_keyrings()?;
    }
    program.exec()
}

/// Gives the init its plan, and waits until it has carried it out. Returns the listener for the proxy to the model.
fn send_plan(mut socket: &UnixStream, plan: &SandboxPlan) -> Result<Option<OwnedFd>, SandboxError> {
    let mut exchange = || -> io::Result<(InitReply, Option<OwnedFd>)> {
        socket.set_read_timeout(Some(SET_UP_TIMEOUT))?;
        let mut line = serde_json::to_vec(plan)?;
        line.push(b'\n');
        socket.write_all(&line)?;
        let (line, descriptor) = receive_line(socket)?;
        Ok((serde_json::from_slice(&line)?, descriptor))
    };
    match exchange().map_err(|error| SandboxError::internal(&error))? {
        (InitReply::Ready, model_listener) => Ok(model_listener),
        (InitReply::Failed(error), _) => Err(error),
    }
}

/// Receives one line, and the descriptor that came with it.
fn receive_line(socket: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut line = Vec::new();
    let mut descriptor = None;
    while !line.ends_with(b"\n") {
        let mut bytes = [0; 1024];
        let (received, descriptors) = receive_with_descriptors(socket, &mut bytes, RecvFlags::empty())?;
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend(bytes.iter().take(received));
        descriptor = descriptors.into_iter().next().or(descriptor);
    }
    Ok((line, descriptor))
}

fn process(pid: u32) -> io::Result<Pid> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| io::ErrorKind::InvalidData.into())
}
