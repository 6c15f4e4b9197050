//! The step between the keeper and a program that needs a terminal, run as `qd __tty TERMINAL PROGRAM ARGS…`: makes the
//! terminal its controlling terminal and becomes the program. A process of its own is the only way to do this without
//! unsafe code. The worker holds the other end of the terminal.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::process::{Pid, getpgid, getppid, setpgid, setsid};

/// The argument that makes `qd` run this step.
pub const TTY_COMMAND: &str = "__tty";
/// The status a shell exits with if it cannot start a program.
const NOT_STARTED: u8 = 127;

/// Becomes the program that is named after the terminal. Must be called before the program starts anything else.
pub fn main() -> ExitCode {
    // A copy that the program does not inherit: if the program cannot be started, stderr is already its terminal.
    let stderr = io::stderr().as_fd().try_clone_to_owned().map(File::from);
    let mut arguments = std::env::args_os().skip(2);
    let terminal = arguments.next().unwrap_or_default();
    let argv: Vec<OsString> = arguments.collect();
    let name = argv.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Err(error) = become_program(&terminal, &argv);
    if let Ok(mut stderr) = stderr {
        // There is nobody else to report to.
        let _written = writeln!(stderr, "{name} could not be started: {error}");
    }
    ExitCode::from(NOT_STARTED)
}

fn become_program(terminal: &OsString, argv: &[OsString]) -> io::Result<std::convert::Infallible> {
    let (program, arguments) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    // The keeper made us the leader of a process group, and a group leader cannot begin a session. So we join the
    // keeper's own group and leave ours empty.
    //
    // In a sandbox the keeper cannot be seen; there the init has a group in the keeper's session.
    let keeper = getppid().unwrap_or(Pid::INIT);
    setpgid(None, Some(getpgid(Some(keeper))?))?;
    setsid()?;
    // The first terminal that a session leader opens becomes the session's controlling terminal.
    let terminal = OpenOptions::new().read(true).write(true).open(terminal)?;
    let mut command = Command::new(program);
    command.args(arguments);
    command.stdin(terminal.try_clone()?).stdout(terminal.try_clone()?).stderr(terminal);
    Err(command.exec())
}
