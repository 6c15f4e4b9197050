//! What happens when the worker, the keeper or both are killed. No process may survive, whoever is left to end it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use qd_keeper::{ProcessIdentity, SweepResult, procfs};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde::Deserialize;

use crate::{ESCAPEES, PROGRAM, command, new_mark, start, until_ready};

const KINDS: [&str; 6] = ["stubborn", "setsid", "double_fork", "stopped", "grandchild", "storm"];

fn program(mode: &str, mark: &str, kind: &str) -> Child {
    let mut command = Command::new(PROGRAM);
    command.args([mode, mark, "python3", ESCAPEES, kind, "10"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Starts a worker and returns it with its keeper.
fn worker(mark: &str, kind: &str) -> (Child, ProcessIdentity) {
    let mut worker = program("worker", mark, kind);
    let mut line = String::new();
    BufReader::new(worker.stdout.take().unwrap()).read_line(&mut line).unwrap();
    // In a storm, whoever lives now may be dead when it is looked at.
    let found = (0..1000).any(|_| procfs::find_marked(mark).len() > 1);
    if !found {
        // Its keeper ends the rest. A storm that nobody ends would slow down every other test.
        worker.kill().unwrap();
    }
    assert!(found, "{kind}");
    (worker, ProcessIdentity::find(line.trim().parse().unwrap()).unwrap())
}

/// The ten escapees, besides the agent itself. Those of a storm often exit by themselves before they can be killed.
fn killed_at_least(kind: &str) -> u32 {
    if kind == "storm" { 0 } else { 10 }
}

fn pid(process: &ProcessIdentity) -> Pid {
    Pid::from_raw(process.pid.try_into().unwrap()).unwrap()
}

/// Blocks until a process that is not our child has exited.
fn wait_for_end(process: &ProcessIdentity) {
    if let Ok(pidfd) = pidfd_open(pid(process), PidfdFlags::empty())
        && procfs::is_alive(process)
    {
        poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None).unwrap();
    }
}

#[tokio::test]
async fn a_keeper_that_is_let_go_ends_everything() {
    for kind in KINDS {
        let mark = new_mark();
        let keeper = start(&mark).await;
        let mut child = keeper.spawn(command(&["python3", ESCAPEES, kind, "10"])).await.unwrap();
        until_ready(&mut child).await;
        let pid = keeper.pid();
        keeper.close().await;
        assert_eq!(procfs::find_marked(&mark), [], "{kind}");
        assert!(!procfs::children(std::process::id()).contains(&pid), "{kind}: the keeper is reaped");
        child.exit.wait().await;
    }
}

#[test]
fn the_keeper_of_a_killed_worker_ends_everything_and_itself() {
    for kind in KINDS {
        let mark = new_mark();
        let (mut worker, keeper) = worker(&mark, kind);
        worker.kill().unwrap();
        worker.wait().unwrap();
        wait_for_end(&keeper);
        assert_eq!(procfs::find_marked(&mark), [], "{kind}");
    }
}

#[test]
fn a_stopped_keeper_continues_when_its_worker_is_killed() {
    for kind in ["setsid", "grandchild"] {
        let mark = new_mark();
        let (mut worker, keeper) = worker(&mark, kind);
        kill_process(pid(&keeper), Signal::STOP).unwrap();
        worker.kill().unwrap();
        worker.wait().unwrap();
        wait_for_end(&keeper);
        assert_eq!(procfs::find_marked(&mark), [], "{kind}");
    }
}

#[test]
fn the_worker_of_a_killed_keeper_ends_everything_but_what_it_spares() {
    #[derive(Deserialize)]
    struct LossReport {
        swept: SweepResult,
        children: Vec<u32>,
    }
    for kind in KINDS {
        let mark = new_mark();
        let mut worker = program("bereft", &mark, kind);
        let mut output = String::new();
        worker.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(worker.wait().unwrap().success(), "{kind}");
        let report: LossReport = serde_json::from_str(&output).unwrap();
        assert_eq!(report.swept.survivors, [], "{kind}");
        assert!(report.swept.killed > killed_at_least(kind), "{kind}: {}", report.swept.killed);
        assert_eq!(report.children, [0; 0], "{kind}: no zombie");
        assert_eq!(procfs::find_marked(&mark), [], "{kind}");
    }
}

#[test]
fn where_worker_and_keeper_are_killed_the_mark_finds_everything() {
    for kind in KINDS {
        let mark = new_mark();
        let (mut worker, keeper) = worker(&mark, kind);
        // The keeper first, or it would begin to end everything when its worker dies.
        kill_process(pid(&keeper), Signal::KILL).unwrap();
        worker.kill().unwrap();
        worker.wait().unwrap();
        wait_for_end(&keeper);
        assert!(procfs::find_marked(&mark).len() > 1, "{kind}");

        let other = new_mark();
        assert_eq!(procfs::end_marked(&other, Duration::ZERO), SweepResult::default());
        let swept = procfs::end_marked(&mark, Duration::from_millis(20));
        assert_eq!(swept.survivors, [], "{kind}");
        assert!(swept.killed > killed_at_least(kind), "{kind}: {}", swept.killed);
        assert_eq!(procfs::find_marked(&mark), [], "{kind}");
    }
}
