//! The program that the tests start. `__keeper` is a keeper, like `qd __keeper`. `worker` and `bereft` are workers that
//! are killed or lose their keeper, which the test process itself cannot do without disturbing other tests.
#![expect(clippy::unwrap_used, reason = "it serves tests alone, and should stop where it fails")]
#![expect(clippy::print_stdout, reason = "what it prints is what the test reads")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use qd_keeper::{KeeperChild, KeeperHandle, LaunchSpec, become_subreaper, end_orphans};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match arguments.as_slice() {
        ["__keeper"] => return qd_keeper::keeper_process::main(),
        [qd_sandbox::SANDBOX_COMMAND, ..] => return qd_sandbox::main(),
        ["worker", mark, command @ ..] => runtime().block_on(worker(mark, command)),
        ["bereft", mark, command @ ..] => runtime().block_on(bereft(mark, command)),
        _ => return ExitCode::FAILURE,
    }
    ExitCode::SUCCESS
}

/// Starts the command under a keeper, prints the keeper's pid once the command is ready, and waits for ever.
async fn worker(mark: &str, command: &[&str]) {
    let (keeper, _child) = start_under_keeper(mark, command).await;
    println!("{}", keeper.pid());
    std::future::pending::<()>().await;
}

/// Starts the command under a keeper, kills the keeper, ends the processes it adopted except one child of its own, and
/// prints the result.
async fn bereft(mark: &str, command: &[&str]) {
    become_subreaper().unwrap();
    let mut own = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let (keeper, child) = start_under_keeper(mark, command).await;
    kill_process(Pid::from_raw(keeper.pid().try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
    keeper.wait_until_lost().await;
    assert_eq!(child.exit.wait().await, qd_keeper::ChildExit::default());
    assert!(keeper.begin_turn().await.is_err());
    let swept = end_orphans(&[own.id()], Duration::ZERO).await;
    assert!(own.try_wait().unwrap().is_none(), "the spared one was ended");
    own.kill().unwrap();
    own.wait().unwrap();
    let children = qd_keeper::procfs::children(std::process::id());
    println!("{}", serde_json::json!({ "swept": swept, "children": children }));
}

async fn start_under_keeper(mark: &str, command: &[&str]) -> (KeeperHandle, KeeperChild) {
    let keeper = KeeperHandle::start(Path::new("/proc/self/exe"), mark).await.unwrap();
    let argv = command.iter().map(|&word| word.to_owned()).collect();
    let launch = LaunchSpec { argv, env: BTreeMap::new(), cwd: "/".into(), arg0: None };
    let mut child = keeper.spawn(launch).await.unwrap();
    let mut lines = BufReader::new(&mut child.stdout).lines();
    while lines.next_line().await.unwrap().is_some_and(|line| line != "ready") {}
    (keeper, child)
}
