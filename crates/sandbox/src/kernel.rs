//! The system calls that rustix does not have. Each is one function that is safe to call, or says what its caller has to
//! guarantee. Nothing here knows what the calls are for.
#![expect(unsafe_code, reason = "the kernel is called directly, where no library has a safe call")]

use std::convert::Infallible;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::path::Arg;

/// What `clone` is to share or make anew. Only the flags that this crate uses.
pub(crate) mod clone_flags {
    pub(crate) const NEW_USER: u64 = libc::CLONE_NEWUSER as u64;
    pub(crate) const NEW_PIDS: u64 = libc::CLONE_NEWPID as u64;
    pub(crate) const NEW_MOUNTS: u64 = libc::CLONE_NEWNS as u64;
    pub(crate) const NEW_NETWORK: u64 = libc::CLONE_NEWNET as u64;
    /// System V's shared memory, semaphores and queues.
    pub(crate) const NEW_IPC: u64 = libc::CLONE_NEWIPC as u64;
    /// The new process is a sibling of the caller, and not its child.
    pub(crate) const SIBLING: u64 = libc::CLONE_PARENT as u64;
}

/// An argument that is not used, as wide as the kernel reads it.
const NONE: libc::c_long = 0;
/// `MOUNT_ATTR_RDONLY`
const READ_ONLY: u64 = 1;
/// More than any descriptor.
const LAST_DESCRIPTOR: u64 = u32::MAX as u64;
/// `LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | LANDLOCK_SCOPE_SIGNAL`
const ALL_SCOPES: u64 = 0b11;
/// The kernel's first version of Landlock with scopes.
const SCOPES_SINCE: i64 = 6;

/// Splits this process in two, like `fork`. Returns the pid of the new process, and `None` in the new process.
///
/// # Safety
///
/// The caller must be the only thread of its process: another one could hold a lock that nobody in the new process
/// releases.
pub(crate) unsafe fn clone_process(flags: u64) -> io::Result<Option<u32>> {
    let flags = flags | libc::SIGCHLD as u64;
    // SAFETY: without a stack of its own the new process continues on a copy of ours, as after `fork`.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone, flags, NONE, NONE, NONE, NONE) })?;
    Ok(u32::try_from(pid).ok().filter(|pid| *pid > 0))
}

/// A program with its arguments and environment, ready for `execve`. Made before a clone, because nothing should be
/// allocated after it.
#[derive(Debug)]
pub(crate) struct ExecArguments {
    program: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl ExecArguments {
    /// Fails if one of them contains a NUL.
    pub(crate) fn new(
        program: &Path,
        arguments: impl IntoIterator<Item = String>,
        environment: impl IntoIterator<Item = String>,
    ) -> io::Result<Self> {
        let strings = |texts: &mut dyn Iterator<Item = String>| {
            texts.map(CString::new).collect::<Result<Vec<_>, _>>().map_err(io::Error::from)
        };
        Ok(Self {
            program: program.into_c_str()?.into_owned(),
            arguments: strings(&mut arguments.into_iter())?,
            environment: strings(&mut environment.into_iter())?,
        })
    }

    /// Replaces this process by the program. Returns only if that failed.
    pub(crate) fn exec(&self) -> io::Result<Infallible> {
        let pointers = |strings: &[CString]| {
            let pointers = strings.iter().map(|string| string.as_ptr());
            pointers.chain([std::ptr::null()]).collect::<Vec<_>>()
        };
        let (arguments, environment) = (pointers(&self.arguments), pointers(&self.environment));
        // SAFETY: both arrays end with a null pointer, and what they point to lives as long as `self`.
        unsafe { libc::execve(self.program.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
        Err(io::Error::last_os_error())
    }
}

/// Ends this process at once, without running anything that the process it was cloned from has registered.
pub(crate) fn exit_now(status: i32) -> ! {
    // SAFETY: the call does not return, and touches no memory.
    unsafe { libc::_exit(status) }
}

/// Lets the kernel reap all children of this process, also those that it adopts.
pub(crate) fn ignore_child_exits() {
    // SAFETY: no handler is installed, so none can be called at a bad moment.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Restores what a program expects of its signals: nothing blocked, and a broken pipe ends it. Rust ignores the latter in
/// its own programs.
pub(crate) fn reset_signals() {
    // SAFETY: the set is initialised by `sigemptyset` before it is read, and no handler is installed.
    unsafe {
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// Keeps these signals from doing anything, so that they can be waited for.
pub(crate) fn block_signals(signals: &[libc::c_int]) {
    let set = signal_set(signals);
    // SAFETY: the set is initialised.
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
}

/// Waits for one of these signals, which must be blocked, and returns it.
pub(crate) fn wait_for_signal(signals: &[libc::c_int]) -> io::Result<libc::c_int> {
    let set = signal_set(signals);
    loop {
        // SAFETY: the set is initialised, and nobody asks for more than the number.
        match check(unsafe { libc::sigwaitinfo(&raw const set, std::ptr::null_mut()) }.into()) {
            Ok(signal) => return Ok(signal as libc::c_int),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: the set is initialised by `sigemptyset` before anything is added.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Closes every descriptor from this number on.
pub(crate) fn close_descriptors_from(first: u32) -> io::Result<()> {
    // SAFETY: callers are about to become another program or keep nothing open, so no descriptor that is closed here is
    // used again.
    check(unsafe { libc::syscall(libc::SYS_close_range, u64::from(first), LAST_DESCRIPTOR, NONE) }).map(drop)
}

/// Closes every descriptor from this number on when the process becomes another program.
pub(crate) fn close_descriptors_on_exec_from(first: u32) -> io::Result<()> {
    let flag = u64::from(libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: nothing is closed yet; only a flag of each descriptor changes.
    check(unsafe { libc::syscall(libc::SYS_close_range, u64::from(first), LAST_DESCRIPTOR, flag) }).map(drop)
}

/// Whether the changed mounts are the one that was named alone, or also those below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MountScope {
    One,
    WithAllBelow,
}

/// Makes a mount read-only or writable. The mount is named by a path, or by a descriptor of its root and an empty path.
pub(crate) fn set_mount_read_only(
    at: BorrowedFd<'_>,
    path: &Path,
    read_only: bool,
    scope: MountScope,
) -> io::Result<()> {
    /// `struct mount_attr`
    #[repr(C)]
    struct MountAttributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let (set, clear) = if read_only { (READ_ONLY, 0) } else { (0, READ_ONLY) };
    let attributes = MountAttributes { set, clear, propagation: 0, user_namespace: 0 };
    let empty_path = if path.as_os_str().is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    let recursive = if scope == MountScope::WithAllBelow { libc::AT_RECURSIVE } else { 0 };
    let path = path.into_c_str()?;
    // SAFETY: the path ends with a NUL, and the attributes have the size that is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            i64::from(at.as_raw_fd()),
            path.as_ptr(),
            i64::from(empty_path | recursive),
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    })
    .map(drop)
}

/// Whether the kernel can keep a process from abstract sockets outside.
pub(crate) fn has_scopes() -> bool {
    const VERSION: u64 = 1;
    let nothing: *const libc::c_void = std::ptr::null();
    // SAFETY: with this flag the kernel reads no attributes.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, VERSION) };
    version >= SCOPES_SINCE
}

/// Keeps this process, and all that it starts, from signalling processes outside and from connecting to their abstract
/// sockets. Returns false if the kernel has no such scopes. No program gains rights by being started from now on.
pub(crate) fn restrict_scope() -> io::Result<bool> {
    /// `struct landlock_ruleset_attr`
    #[repr(C)]
    struct RulesetAttributes {
        handled_access_fs: u64,
        handled_access_net: u64,
        scoped: u64,
    }
    if !has_scopes() {
        return Ok(false);
    }
    let attributes = RulesetAttributes { handled_access_fs: 0, handled_access_net: 0, scoped: ALL_SCOPES };
    let size = size_of::<RulesetAttributes>();
    // SAFETY: the attributes have the size that is passed.
    let ruleset = check(unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attributes, size, NONE)
    })?;
    // SAFETY: the kernel has just opened this descriptor for us alone.
    let ruleset = unsafe { OwnedFd::from_raw_fd(i32::try_from(ruleset).map_err(io::Error::other)?) };
    rustix::thread::set_no_new_privs(true)?;
    // SAFETY: the ruleset is open.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, i64::from(ruleset.as_raw_fd()), NONE) })?;
    Ok(true)
}

/// One step of a filter for system calls. What it compares is what was loaded last.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FilterStep {
    /// Loads four bytes at this offset in the description of the call.
    Load(u32),
    And(u32),
    SkipUnlessEqual(u32, u8),
    SkipIfAtLeast(u32, u8),
    SkipUnlessAtLeast(u32, u8),
    Allow,
    /// The call fails as one that the kernel does not have.
    Refuse,
}

impl FilterStep {
    fn instruction(self) -> libc::sock_filter {
        let (code, k, jt, jf) = match self {
            Self::Load(offset) => (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0),
            Self::And(bits) => (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, bits, 0, 0),
            Self::SkipUnlessEqual(value, steps) => {
                (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, 0, steps)
            }
            Self::SkipIfAtLeast(value, steps) => {
                (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, value, steps, 0)
            }
            Self::SkipUnlessAtLeast(value, steps) => {
                (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, value, 0, steps)
            }
            Self::Allow => (libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
            Self::Refuse => {
                let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
                (libc::BPF_RET | libc::BPF_K, missing, 0, 0)
            }
        };
        libc::sock_filter { code: code as u16, jt, jf, k }
    }
}

/// Judges every system call of this process, and of all that it starts, by a filter. Fails if programs could still gain
/// rights by being started.
pub(crate) fn filter_system_calls(steps: &[FilterStep]) -> io::Result<()> {
    let mut instructions: Vec<libc::sock_filter> = steps.iter().map(|step| step.instruction()).collect();
    let program = libc::sock_fprog {
        len: u16::try_from(instructions.len()).map_err(io::Error::other)?,
        filter: instructions.as_mut_ptr(),
    };
    // SAFETY: the program has as many instructions as it says, and they live until the call returns.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, NONE, &raw const program)
    })
    .map(drop)
}

/// Starts the loopback interface of this process's network namespace.
pub(crate) fn start_loopback() -> io::Result<()> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    // SAFETY: a request of zeroes is valid; its name ends with a NUL.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    // SAFETY: the request has the type that this operation reads, and lives until it returns.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    check(result.into()).map(drop)
}

/// The namespace that contains this one, if both are PID namespaces. Fails for the outermost that we may see.
pub(crate) fn parent_namespace(namespace: impl AsFd) -> io::Result<OwnedFd> {
    /// `NS_GET_PARENT`
    const GET_PARENT: libc::c_ulong = 0xb702;
    // SAFETY: the operation takes no argument.
    let parent = unsafe { libc::ioctl(namespace.as_fd().as_raw_fd(), GET_PARENT as _) };
    let parent = check(parent.into())?;
    // SAFETY: the kernel has just opened this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(parent).map_err(io::Error::other)?) })
}

fn check(result: i64) -> io::Result<i64> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
