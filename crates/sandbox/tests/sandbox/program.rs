//! The program that the tests and the benchmark start. `__sandbox` is the init of a sandbox, like `qd __sandbox`. `run`
//! reads a plan and a program, and starts the program in a sandbox, as a keeper does.
#![expect(clippy::unwrap_used, reason = "it serves tests alone, and should stop where it fails")]
#![expect(clippy::print_stdout, reason = "what it prints is what the test reads")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::ExitCode;
use std::time::Instant;

use qd_sandbox::{ConfinedProgram, Sandbox, SandboxPlan};
use rustix::process::{Pid, WaitOptions, WaitStatus, waitpid};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        [qd_sandbox::SANDBOX_COMMAND, ..] => qd_sandbox::main(),
        ["run", plan, cwd, argv @ ..] => run(plan, cwd, argv),
        ["leave", plan, cwd, argv @ ..] => leave(plan, cwd, argv),
        ["connect", name] => connect(name),
        ["keyring"] => look_for_keyring(),
        ["time", rounds, plans @ ..] => measure(rounds.parse().unwrap(), plans),
        _ => ExitCode::FAILURE,
    }
}

/// Runs the program to its end, and everything that it left with it.
fn run(plan: &str, cwd: &str, argv: &[&str]) -> ExitCode {
    let _available = qd_sandbox::restrict_own_scope().unwrap();
    let sandbox = match Sandbox::start(&parse(plan)) {
        Ok(sandbox) => sandbox,
        Err(error) => {
            println!("no sandbox: {error}");
            return ExitCode::FAILURE;
        }
    };
    let status = match sandbox.spawn(&program(argv, cwd), &stdio()) {
        Ok(pid) => wait_for(pid),
        Err(error) => {
            println!("not started: {error}");
            return ExitCode::FAILURE;
        }
    };
    sandbox.kill();
    assert_eq!(wait_for(sandbox.init_pid()).terminating_signal(), Some(9));
    let signal = status.terminating_signal().map(|signal| 128 + signal);
    ExitCode::from(u8::try_from(status.exit_status().or(signal).unwrap()).unwrap())
}

/// Starts the program, prints the pids of the init and the program, reaps them, and waits to be killed.
fn leave(plan: &str, cwd: &str, argv: &[&str]) -> ExitCode {
    let sandbox = Sandbox::start(&parse(plan)).unwrap();
    let pid = sandbox.spawn(&program(argv, cwd), &stdio()).unwrap();
    println!("{} {pid}", sandbox.init_pid());
    while rustix::process::wait(WaitOptions::empty()).is_ok() {}
    loop {
        rustix::event::pause();
    }
}

/// Tries to connect to an abstract socket.
fn connect(name: &str) -> ExitCode {
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let is_connected = UnixStream::connect_addr(&address).is_ok();
    println!("{}", if is_connected { "connected" } else { "refused" });
    ExitCode::SUCCESS
}

/// Looks for the user's keyring, which the kernel makes when it is looked for.
fn look_for_keyring() -> ExitCode {
    const GET_KEYRING_ID: libc::c_long = 0;
    const USER_KEYRING: libc::c_long = -4;
    #[expect(unsafe_code, reason = "no library has a call for keyrings")]
    // SAFETY: the call reads no memory of ours.
    let found = unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, USER_KEYRING, 1_i64) };
    println!("{}", if found > 0 { "keyring" } else { "refused" });
    ExitCode::SUCCESS
}

/// Measures starts of `true`, without and with each of the plans, and prints the microseconds of each.
fn measure(rounds: u32, plans: &[&str]) -> ExitCode {
    let plans: Vec<SandboxPlan> = plans.iter().map(|plan| parse(plan)).collect();
    for _ in 0..rounds {
        let started = Instant::now();
        std::process::Command::new("/bin/true").status().unwrap();
        print!("{}", started.elapsed().as_micros());
        for plan in &plans {
            let started = Instant::now();
            let sandbox = Sandbox::start(plan).unwrap();
            wait_for(sandbox.spawn(&program(&["/bin/true"], "/"), &stdio()).unwrap());
            print!(" {}", started.elapsed().as_micros());
            sandbox.kill();
            wait_for(sandbox.init_pid());
        }
        println!();
    }
    ExitCode::SUCCESS
}

fn parse(plan: &str) -> SandboxPlan {
    serde_json::from_str(plan).unwrap()
}

fn program(argv: &[&str], cwd: &str) -> ConfinedProgram {
    let path = argv[0].into();
    let arguments = argv.iter().map(|&argument| argument.to_owned()).collect();
    ConfinedProgram { path, arguments, env: std::env::vars().collect(), cwd: cwd.into() }
}

fn stdio() -> [OwnedFd; 3] {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()].map(|descriptor| descriptor.try_clone_to_owned().unwrap())
}

fn wait_for(pid: u32) -> WaitStatus {
    let pid = Pid::from_raw(pid.try_into().unwrap());
    waitpid(pid, WaitOptions::empty()).unwrap().unwrap().1
}
