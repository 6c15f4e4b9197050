//! Starts the processes that a script asks for, some of which leave their session or their parent, as real tools do.
//! That takes an intermediate process, which is this program again: `setsid` cannot be called otherwise without unsafe
//! code.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use tokio::io::AsyncReadExt;

use super::steps::ScriptSpawn;

/// The argument that makes `qd __script` the intermediate process.
pub(super) const SPAWN_COMMAND: &str = "spawn";
const SETSID: &str = "--setsid";
const DOUBLE_FORK: &str = "--double-fork";

/// Starts a process without our stdio, and returns its pid once it runs.
pub(super) async fn start_process(exe: &Path, cwd: &Path, spawn: &ScriptSpawn) -> io::Result<u32> {
    if spawn.setsid || spawn.double_fork {
        return start_detached(exe, cwd, spawn).await;
    }
    let (program, args) = spawn.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = tokio::process::Command::new(program);
    command.args(args).current_dir(cwd);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // Not waited for: tokio reaps it when it exits.
    command.spawn()?.id().ok_or_else(ended_at_once_error)
}

/// Starts the process through the intermediate process.
async fn start_detached(exe: &Path, cwd: &Path, spawn: &ScriptSpawn) -> io::Result<u32> {
    let mut intermediate = tokio::process::Command::new(exe);
    intermediate.arg0(qd_keeper::process_setup::PROGRAM_NAME);
    intermediate.args(["__script", SPAWN_COMMAND]).args(spawn.setsid.then_some(SETSID));
    intermediate.args(spawn.double_fork.then_some(DOUBLE_FORK)).args(&spawn.argv).current_dir(cwd);
    intermediate.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = intermediate.spawn()?;
    let pid = child.id().ok_or_else(ended_at_once_error)?;
    let mut output = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut output).await?;
    }
    if !spawn.double_fork {
        // No output means success: it has become the program.
        return if output.is_empty() { Ok(pid) } else { Err(io::Error::other(output)) };
    }
    child.wait().await?;
    output.parse().map_err(|_| io::Error::other(output))
}

fn ended_at_once_error() -> io::Error {
    io::Error::other("it ended at once")
}

/// The intermediate process.
pub(super) fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut args = args.peekable();
    let setsid = args.next_if(|arg| arg == SETSID).is_some();
    let double_fork = args.next_if(|arg| arg == DOUBLE_FORK).is_some();
    let argv: Vec<OsString> = args.collect();
    // A copy that the program does not inherit: when it is closed, the reader knows that we have become the program.
    let Ok(mut stdout) = io::stdout().as_fd().try_clone_to_owned().map(File::from) else {
        return ExitCode::FAILURE;
    };
    let written = match spawn_or_exec(&argv, setsid, double_fork) {
        Ok(pid) => write!(stdout, "{pid}"),
        Err(error) => write!(stdout, "{error}"),
    };
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Becomes the program, or starts it and returns its pid.
fn spawn_or_exec(argv: &[OsString], setsid: bool, double_fork: bool) -> io::Result<u32> {
    let (program, args) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    if setsid {
        rustix::process::setsid()?;
    }
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if double_fork { Ok(command.spawn()?.id()) } else { Err(command.exec()) }
}
