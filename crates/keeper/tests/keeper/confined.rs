//! A keeper that starts everything in a sandbox. On a machine that cannot make one, it has to say so and start nothing.

use std::path::Path;
use std::time::Duration;

use qd_keeper::{ChildExit, KeeperError, KeeperHandle, ProcessIdentity, SweepResult, SweepScope, procfs};
use qd_protocol::sandbox::SandboxLevel;
use qd_sandbox::{PidNamespaceId, SandboxPlan, probe_sandbox};
use tokio::io::AsyncWriteExt;

use crate::{PROGRAM, assert_nothing_below, new_mark, output, shell, sweep, until_ready};

/// An agent that starts a process in another session for every line it reads.
const AGENT: &str = "echo ready; while read -r line; do setsid sleep 1000 & echo ready; done";

/// A confined keeper, unless this machine cannot confine anything.
async fn start_confined(mark: &str, home: &Path) -> Option<KeeperHandle> {
    std::fs::write(home.join("token"), "secret").unwrap();
    let plan = SandboxPlan { level: SandboxLevel::Deck, home: home.to_owned(), ..SandboxPlan::default() };
    let support = probe_sandbox(Path::new(PROGRAM));
    match KeeperHandle::start_confined(Path::new(PROGRAM), mark, plan, None).await {
        Ok(keeper) => {
            assert!(support.strongest >= SandboxLevel::Deck, "it works although {:?}", support.missing);
            Some(keeper)
        }
        Err(error) => {
            assert!(matches!(error, KeeperError::NotConfined(_)), "{error}");
            assert_eq!(support.strongest, SandboxLevel::Off, "{error}");
            None
        }
    }
}

/// The living processes below a keeper that are called `sleep`.
/// The sleepers below the keeper, once there is one: a shell goes on before its child has become the program.
async fn sleepers(keeper: &KeeperHandle) -> Vec<ProcessIdentity> {
    loop {
        let below = procfs::descendants(keeper.pid()).into_iter();
        let sleepers: Vec<_> = below.filter(|process| process.name == "sleep").collect();
        if !sleepers.is_empty() {
            return sleepers;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_confined_child_sees_no_home_and_its_exit_is_reported() {
    let (mark, home) = (new_mark(), tempfile::tempdir().unwrap());
    let Some(keeper) = start_confined(&mark, home.path()).await else { return };
    let script = format!("cat {}/token 2>/dev/null || echo hidden; echo $QD_MARK", home.path().display());
    let child = keeper.spawn(shell(&script)).await.unwrap();
    let namespace = PidNamespaceId::of_process(child.pid);
    assert_ne!(namespace.ok(), PidNamespaceId::of_process(std::process::id()).ok());
    let exit = child.exit.clone();
    assert_eq!(output(child).await, format!("hidden\n{mark}\n"));
    assert_eq!(exit.wait().await, ChildExit { status: Some(0), signal: None });
    let missing = keeper.spawn(crate::command(&["no-such-program"])).await;
    assert!(matches!(missing, Err(KeeperError::NotFound(_))));
    keeper.close().await;
}

#[tokio::test]
async fn what_a_turn_left_survives_its_confined_agent_and_dies_with_everything() {
    let (mark, home) = (new_mark(), tempfile::tempdir().unwrap());
    let Some(keeper) = start_confined(&mark, home.path()).await else { return };
    let mut agent = keeper.spawn(shell(AGENT)).await.unwrap();
    until_ready(&mut agent).await;
    keeper.begin_turn().await.unwrap();
    agent.stdin.write_all(b"a server\n").await.unwrap();
    until_ready(&mut agent).await;
    let server = sleepers(&keeper).await;
    assert_eq!(server.len(), 1);
    assert!(keeper.end_turn(Vec::new()).await.unwrap());
    assert_eq!(keeper.list_leftovers().await.unwrap(), server, "the sandbox's init is not one of them");

    let swept = sweep(&keeper, SweepScope::Agent, Duration::ZERO).await;
    assert_eq!((swept.killed, swept.survivors), (1, Vec::new()));
    assert_eq!(agent.exit.wait().await.signal, Some(9));
    assert!(procfs::is_alive(&server[0]));

    // A new agent is in the same sandbox as what the first one left.
    let mut agent = keeper.spawn(shell(AGENT)).await.unwrap();
    until_ready(&mut agent).await;
    let namespace = |pid| PidNamespaceId::of_process(pid).unwrap();
    assert_eq!(namespace(agent.pid), namespace(server[0].pid));
    let swept = sweep(&keeper, SweepScope::All, Duration::ZERO).await;
    assert_eq!((swept.killed, swept.survivors), (2, Vec::new()));
    assert_nothing_below(&keeper, &mark);
    keeper.close().await;
}

#[tokio::test]
async fn a_cancelled_turn_ends_what_it_started_and_not_the_confined_agent() {
    let (mark, home) = (new_mark(), tempfile::tempdir().unwrap());
    let Some(keeper) = start_confined(&mark, home.path()).await else { return };
    let mut agent = keeper.spawn(shell(AGENT)).await.unwrap();
    until_ready(&mut agent).await;
    keeper.begin_turn().await.unwrap();
    agent.stdin.write_all(b"one\n").await.unwrap();
    until_ready(&mut agent).await;
    let started = sleepers(&keeper).await;
    let swept = sweep(&keeper, SweepScope::Turn, Duration::ZERO).await;
    assert_eq!(swept, SweepResult { killed: 1, survivors: Vec::new() });
    assert!(!started.iter().any(procfs::is_alive));
    agent.stdin.write_all(b"two\n").await.unwrap();
    until_ready(&mut agent).await;
    assert_eq!(sleepers(&keeper).await.len(), 1, "the agent goes on");
    keeper.close().await;
    assert_eq!(procfs::find_marked(&mark), []);
}

#[tokio::test]
async fn when_a_confined_keeper_is_killed_the_kernel_ends_everything() {
    let (mark, home) = (new_mark(), tempfile::tempdir().unwrap());
    let Some(keeper) = start_confined(&mark, home.path()).await else { return };
    let script = "trap '' TERM HUP; (env -i setsid sleep 1000 &) ; echo ready; exec sleep 1000";
    let mut agent = keeper.spawn(shell(script)).await.unwrap();
    until_ready(&mut agent).await;
    // The second has no mark and no parent but the sandbox's init.
    while sleepers(&keeper).await.len() != 2 {
        tokio::task::yield_now().await;
    }
    let started = sleepers(&keeper).await;
    let process = ProcessIdentity::find(keeper.pid()).unwrap();
    assert!(procfs::send_signal(&process, qd_keeper::Signal::KILL));
    keeper.wait_until_lost().await;
    while started.iter().any(procfs::is_alive) {
        tokio::task::yield_now().await;
    }
}
