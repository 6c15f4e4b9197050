//! The scripted agent: a process of its own that speaks the Agent Client Protocol on its stdio, and does in a test
//! what a model would do by itself. It is built on the protocol's own crate, so that our driver is tested against
//! somebody else's idea of the protocol.
//!
//! Layout, in reading order:
//! - `agent`: the requests it answers, and its sessions.
//! - `scene`: one turn, and what it can say and wait for.
//! - `interpreter`: plays a turn's `steps`.
//! - `tools`: calls of a server that it was given.
//! - `spawn`: processes, also such that do not want to be found; `memory`: what it remembers; `flow`: how fast it may
//!   speak.

mod agent;
mod flow_control;
mod interpreter;
mod mcp_client;
mod memory;
mod spawn;
mod steps;
mod turn;

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

use tokio::net::unix::pipe;

pub(crate) use self::agent::serve;

/// The variable that delays readiness.
const READY_MS_VAR: &str = "SCRIPT_READY_MS";
/// The variable that names a folder for what it remembers beyond its process.
const STATE_DIR_VAR: &str = "QD_SCRIPT_STATE";

/// What `qd __script` runs. It ends when its stdin does.
pub fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(2);
    if args.next().is_some_and(|arg| arg == spawn::SPAWN_COMMAND) {
        return spawn::main(args);
    }
    qd_keeper::process_setup::set_process_name(c"qd-script");
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(_) => return ExitCode::FAILURE,
    };
    let status = runtime.block_on(async {
        let setup = ScriptSetup::from_env();
        match open_stdio_pipes() {
            Ok((stdin, stdout)) => serve(stdin, stdout, setup).await,
            Err(_) => serve(tokio::io::stdin(), tokio::io::stdout(), setup).await,
        }
    });
    // A thread may still wait for a line of stdin.
    runtime.shutdown_background();
    // As the kernel does it: the lowest byte counts.
    ExitCode::from(status.to_le_bytes()[0])
}

/// Stdin and stdout without a thread between, which would be woken for every line. They must be pipes, and ours alone.
fn open_stdio_pipes() -> io::Result<(pipe::Receiver, pipe::Sender)> {
    let stdin = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
    let stdout = pipe::Sender::from_owned_fd(io::stdout().as_fd().try_clone_to_owned()?)?;
    Ok((stdin, stdout))
}

/// What the process was given.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScriptSetup {
    /// `SCRIPT_READY_MS`, as it was given.
    pub(crate) ready_ms: Option<String>,
    /// Where to remember conversations; `None`: they are forgotten with the process.
    pub(crate) state_dir: Option<PathBuf>,
    /// This program, which starts the processes that leave their session or their parent.
    pub(crate) exe: PathBuf,
}

impl ScriptSetup {
    fn from_env() -> Self {
        Self {
            ready_ms: std::env::var(READY_MS_VAR).ok(),
            state_dir: std::env::var_os(STATE_DIR_VAR).map(PathBuf::from),
            // Not the path: the program may have been replaced since.
            exe: PathBuf::from("/proc/self/exe"),
        }
    }
}
