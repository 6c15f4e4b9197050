//! The step between the keeper and a program that wants a terminal, what `qd __tty TERMINAL PROGRAM ARGS…` runs: it
//! makes the terminal its own and becomes the program. Nothing else can do that without unsafe code. The worker holds
//! the other end.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::process::{getpgid, getppid, setpgid, setsid};

/// The argument that makes `qd` this step.
pub const TTY_COMMAND: &str = "__tty";
/// What a shell exits with if it cannot start a program.
const NOT_STARTED: u8 = 127;

/// Becomes the program that is named after the terminal. To be called before anything else of the program has begun.
pub fn main() -> ExitCode {
    // A copy, which the program does not inherit: by the time that it cannot be started, stderr is its terminal.
    let told = io::stderr().as_fd().try_clone_to_owned().map(File::from);
    let mut arguments = std::env::args_os().skip(2);
    let terminal = arguments.next().unwrap_or_default();
    let argv: Vec<OsString> = arguments.collect();
    let name = argv.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Err(error) = become_program(&terminal, &argv);
    if let Ok(mut told) = told {
        // Nobody else can be told.
        let _heard = writeln!(told, "{name} could not be started: {error}");
    }
    ExitCode::from(NOT_STARTED)
}

fn become_program(terminal: &OsString, argv: &[OsString]) -> io::Result<std::convert::Infallible> {
    let (program, arguments) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    // The keeper made us the leader of a group, and no leader can begin a session. So we join the keeper's own, and
    // leave ours empty.
    if let Some(keeper) = getppid() {
        setpgid(None, Some(getpgid(Some(keeper))?))?;
    }
    setsid()?;
    // The first terminal that the leader of a session opens is the session's from then on.
    let terminal = OpenOptions::new().read(true).write(true).open(terminal)?;
    let mut command = Command::new(program);
    command.args(arguments);
    command.stdin(terminal.try_clone()?).stdout(terminal.try_clone()?).stderr(terminal);
    Err(command.exec())
}
