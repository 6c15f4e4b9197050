//! Starts the processes that a script asks for, some of which leave their session or their parent, as real tools do.
//! That takes a process in between, which is this program again: nothing else can call `setsid` without unsafe code.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use tokio::io::AsyncReadExt;

use super::steps::ScriptSpawn;

/// The argument that makes `qd __script` the process in between.
pub(super) const SPAWN_COMMAND: &str = "spawn";
const SETSID: &str = "--setsid";
const DOUBLE_FORK: &str = "--double-fork";

/// Starts a process with nothing of our stdio; gives its pid when it is what was asked for.
pub(super) async fn start_process(exe: &Path, cwd: &Path, spawn: &ScriptSpawn) -> io::Result<u32> {
    if spawn.setsid || spawn.double_fork {
        return start_detached(exe, cwd, spawn).await;
    }
    let (program, args) = spawn.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = tokio::process::Command::new(program);
    command.args(args).current_dir(cwd);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // Not waited for: tokio reaps it when it ends.
    command.spawn()?.id().ok_or_else(ended_at_once_error)
}

/// Through the process in between.
async fn start_detached(exe: &Path, cwd: &Path, spawn: &ScriptSpawn) -> io::Result<u32> {
    let mut between = tokio::process::Command::new(exe);
    between.arg0(qd_keeper::process_setup::PROGRAM_NAME);
    between.args(["__script", SPAWN_COMMAND]).args(spawn.setsid.then_some(SETSID));
    between.args(spawn.double_fork.then_some(DOUBLE_FORK)).args(&spawn.argv).current_dir(cwd);
    between.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = between.spawn()?;
    let pid = child.id().ok_or_else(ended_at_once_error)?;
    let mut told = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut told).await?;
    }
    if !spawn.double_fork {
        // Silence is success: it has become what was asked for.
        return if told.is_empty() { Ok(pid) } else { Err(io::Error::other(told)) };
    }
    child.wait().await?;
    told.parse().map_err(|_| io::Error::other(told))
}

fn ended_at_once_error() -> io::Error {
    io::Error::other("it ended at once")
}

/// The process in between.
pub(super) fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut args = args.peekable();
    let setsid = args.next_if(|arg| arg == SETSID).is_some();
    let double_fork = args.next_if(|arg| arg == DOUBLE_FORK).is_some();
    let argv: Vec<OsString> = args.collect();
    // A copy, which the process that we become does not inherit: its end tells that we are that.
    let Ok(mut told) = io::stdout().as_fd().try_clone_to_owned().map(File::from) else {
        return ExitCode::FAILURE;
    };
    let written = match spawn_or_exec(&argv, setsid, double_fork) {
        Ok(pid) => write!(told, "{pid}"),
        Err(error) => write!(told, "{error}"),
    };
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Becomes the process, or starts it and gives its pid.
fn spawn_or_exec(argv: &[OsString], setsid: bool, double_fork: bool) -> io::Result<u32> {
    let (program, args) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    if setsid {
        rustix::process::setsid()?;
    }
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if double_fork { Ok(command.spawn()?.id()) } else { Err(command.exec()) }
}
