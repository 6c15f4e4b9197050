//! Runs one program in a sandbox of its own until it has exited, as `qd __sandbox run PLAN PROGRAM ARGUMENT…`. This is for
//! callers with several threads, which cannot make a sandbox themselves. What the program leaves running ends with it.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process_group, waitpid};

use crate::init::SANDBOX_COMMAND;
use crate::kernel;
use crate::launcher::{ConfinedProgram, Sandbox};
use crate::plan::SandboxPlan;

/// The argument after [`SANDBOX_COMMAND`] that makes `qd` run this.
pub(crate) const RUN_ARGUMENT: &str = "run";
/// What we exit with if the program was not started. Shells use it for commands that cannot be run.
const NOT_STARTED: u8 = 126;
/// What is added to the number of the signal that ended the program. Shells do the same.
const SIGNALLED: i32 = 128;

/// What to put before a program and its arguments, so that it runs in a sandbox of this plan. `exe` is `qd`. The program
/// has to be named by its path; it gets the environment, directory and output of this command, and no input.
pub fn confined_command(exe: &Path, plan: &SandboxPlan) -> io::Result<Vec<OsString>> {
    let plan = serde_json::to_string(plan)?;
    Ok(vec![exe.into(), SANDBOX_COMMAND.into(), RUN_ARGUMENT.into(), plan.into()])
}

pub(crate) fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        // The caller may be gone.
        let _unread = writeln!(io::stderr(), "qd: {error}");
        ExitCode::from(NOT_STARTED)
    })
}

fn run() -> io::Result<ExitCode> {
    let signals = [libc::SIGTERM, libc::SIGCHLD];
    kernel::block_signals(&signals);
    let mut arguments = std::env::args().skip(3);
    let plan: SandboxPlan = serde_json::from_str(&arguments.next().unwrap_or_default())?;
    let arguments: Vec<String> = arguments.collect();
    let program = ConfinedProgram {
        path: arguments.first().map(Into::into).unwrap_or_default(),
        arguments,
        // A variable that is not UTF-8 is of no use to a shell either.
        env: std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect(),
        cwd: std::env::current_dir()?,
    };
    let stdio: [OwnedFd; 3] = [
        std::fs::File::open("/dev/null")?.into(),
        io::stdout().as_fd().try_clone_to_owned()?,
        io::stderr().as_fd().try_clone_to_owned()?,
    ];
    let sandbox = Sandbox::start(&plan).map_err(io::Error::other)?;
    let pid = sandbox.spawn(&program, &stdio)?;
    drop(stdio);
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let status = loop {
        if let Some((_, status)) = waitpid(pid, WaitOptions::NOHANG)? {
            break status;
        }
        if let (libc::SIGTERM, Some(group)) = (kernel::wait_for_signal(&signals)?, pid) {
            // It may have exited meanwhile.
            let _exited = kill_process_group(group, Signal::TERM);
        }
    };
    sandbox.kill();
    let init = i32::try_from(sandbox.init_pid()).ok().and_then(Pid::from_raw);
    waitpid(init, WaitOptions::empty())?;
    Ok(exit_code(status))
}

fn exit_code(status: WaitStatus) -> ExitCode {
    let signalled = status.terminating_signal().map(|signal| SIGNALLED + signal);
    let code = status.exit_status().or(signalled).and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(NOT_STARTED))
}
