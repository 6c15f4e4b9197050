//! A keeper that does not reply: it is told to continue, because somebody may have stopped it, and killed if that does
//! not help. Nobody waits for it for ever.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use qd_keeper::{KeeperError, KeeperHandle, ProcessIdentity, SweepScope, procfs};
use rustix::process::{Pid, Signal, kill_process};

use crate::{assert_nothing_below, new_mark, shell, start, sweep, until_ready};

fn stop(keeper: &KeeperHandle) {
    let pid = Pid::from_raw(keeper.pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
}

#[tokio::test]
async fn a_stopped_keeper_continues_for_whatever_is_asked_of_it() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    stop(&keeper);
    let mut agent = keeper.spawn(shell("setsid sleep 1000 & echo ready; exec sleep 1000")).await.unwrap();
    until_ready(&mut agent).await;
    stop(&keeper);
    keeper.begin_turn().await.unwrap();
    stop(&keeper);
    assert!(!keeper.end_turn(Vec::new()).await.unwrap());
    stop(&keeper);
    assert_eq!(keeper.list_leftovers().await.unwrap(), []);
    stop(&keeper);
    assert_eq!(sweep(&keeper, SweepScope::All, Duration::ZERO).await.survivors, []);
    assert_nothing_below(&keeper, &mark);
    stop(&keeper);
    keeper.close().await;
}

#[tokio::test]
async fn an_exit_during_a_turn_is_reported_although_the_keeper_was_stopped() {
    let keeper = start(&new_mark()).await;
    let mut agent = keeper.spawn(shell("echo ready; read -r line; exit 7")).await.unwrap();
    until_ready(&mut agent).await;
    keeper.begin_turn().await.unwrap();
    stop(&keeper);
    drop(agent.stdin);
    assert_eq!(agent.exit.wait().await.status, Some(7));
}

#[tokio::test]
async fn a_keeper_that_never_replies_is_killed_and_counts_as_lost() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("deaf");
    std::fs::write(&program, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let keeper = KeeperHandle::start(&program, &new_mark()).await.unwrap();
    let process = ProcessIdentity::find(keeper.pid()).unwrap();
    assert!(matches!(keeper.begin_turn().await, Err(KeeperError::Lost)));
    keeper.wait_until_lost().await;
    assert!(!procfs::is_alive(&process));
    assert!(matches!(keeper.list_leftovers().await, Err(KeeperError::Lost)));
}
