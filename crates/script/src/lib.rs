//! The scripted agent: a process of its own that speaks the Agent Client Protocol on its stdio and does in a test what
//! a model would do by itself. It is built on the protocol's own crate, so that our driver is tested against somebody
//! else's implementation of the protocol. It knows no driver and no worker.
//!
//! Layout, in reading order:
//! - `agent`: the requests it answers, and its sessions.
//! - `turn`: one turn, and what it can send and wait for.
//! - `interpreter`: runs the steps of a turn; `steps`: parses them.
//! - `mcp_client`: calls a tool of an MCP server that it was given.
//! - `spawn`: starts processes, including some that try not to be found; `memory`: what it remembers; `flow_control`:
//!   how fast it may send.

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

pub use self::agent::serve;

/// The variable with the delay before the agent is ready.
const READY_MS_VAR: &str = "SCRIPT_READY_MS";
/// The variable with the folder in which it remembers conversations beyond its process.
const STATE_DIR_VAR: &str = "QD_SCRIPT_STATE";

/// Runs `qd __script`. Ends when stdin does.
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
    // A thread may still be blocked on a read of stdin.
    runtime.shutdown_background();
    // Like the kernel, keep only the lowest byte.
    ExitCode::from(status.to_le_bytes()[0])
}

/// Stdin and stdout without a helper thread, which would wake up for every line. They must be pipes that nobody shares.
fn open_stdio_pipes() -> io::Result<(pipe::Receiver, pipe::Sender)> {
    let stdin = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
    let stdout = pipe::Sender::from_owned_fd(io::stdout().as_fd().try_clone_to_owned()?)?;
    Ok((stdin, stdout))
}

/// What the process was given.
#[derive(Debug, Clone, Default)]
pub struct ScriptSetup {
    /// The raw value of `SCRIPT_READY_MS`.
    pub ready_ms: Option<String>,
    /// The folder for remembered conversations; `None` if they are forgotten with the process.
    pub state_dir: Option<PathBuf>,
    /// This program, which starts processes that leave their session or their parent.
    pub exe: PathBuf,
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
