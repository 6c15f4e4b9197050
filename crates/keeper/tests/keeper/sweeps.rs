//! What a sweep ends and what it leaves alone.

use std::time::Duration;

use qd_keeper::{SweepRequest, SweepResult, SweepScope, procfs};
use tokio::io::AsyncWriteExt;

use crate::{
    FOR_EVER, assert_nothing_below, command, has_not_ended, new_mark, processes_of, shell, start, sweep,
    until_ready,
};

/// An agent that starts a process in another session for every line it reads, and prints its pid.
const AGENT: &str = "echo ready; while read -r line; do setsid sleep 1000 & echo $!; echo ready; done";

#[tokio::test]
async fn what_a_turn_left_survives_an_idle_stop_of_the_agent_and_dies_with_everything() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let mut agent = keeper.spawn(shell(AGENT)).await.unwrap();
    until_ready(&mut agent).await;
    agent.stdin.write_all(b"a helper of its own\n").await.unwrap();
    let helper = processes_of(&mut agent).await;

    keeper.begin_turn().await.unwrap();
    agent.stdin.write_all(b"a server\n").await.unwrap();
    let server = processes_of(&mut agent).await;
    assert_eq!(keeper.list_leftovers().await.unwrap(), [], "the turn is not over");
    keeper.end_turn(Vec::new()).await.unwrap();
    assert_eq!(keeper.list_leftovers().await.unwrap(), server);

    keeper.begin_turn().await.unwrap();
    let swept = sweep(&keeper, SweepScope::Turn, Duration::ZERO).await;
    assert_eq!(swept, SweepResult::default(), "the second turn has started nothing");
    keeper.end_turn(Vec::new()).await.unwrap();

    let swept = sweep(&keeper, SweepScope::Agent, Duration::ZERO).await;
    assert_eq!((swept.killed, swept.survivors), (2, Vec::new()));
    assert_eq!(agent.exit.wait().await.signal, Some(9));
    assert!(!procfs::is_alive(&helper[0]) && procfs::is_alive(&server[0]));
    assert_eq!(keeper.list_leftovers().await.unwrap(), server);

    // A new agent is started and stopped again; the server does not belong to it either.
    let mut agent = keeper.spawn(shell(AGENT)).await.unwrap();
    until_ready(&mut agent).await;
    assert_eq!(sweep(&keeper, SweepScope::Agent, Duration::ZERO).await.killed, 1);
    assert!(procfs::is_alive(&server[0]));

    assert_eq!(sweep(&keeper, SweepScope::All, Duration::ZERO).await.killed, 1);
    assert!(!procfs::is_alive(&server[0]));
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn a_helper_and_what_is_below_it_survive_the_turn() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let directory = tempfile::tempdir().unwrap();
    let helper = directory.path().join("some-language-server");
    std::fs::write(&helper, "sleep 1000 & echo $$; echo $!; echo ready; wait").unwrap();
    let mut agent =
        keeper.spawn(shell("read -r line; sh \"$line\" & sleep 1000 & read -r line")).await.unwrap();
    keeper.begin_turn().await.unwrap();
    agent.stdin.write_all(format!("{}\n", helper.display()).as_bytes()).await.unwrap();
    let mut helpers = processes_of(&mut agent).await;
    helpers.sort();

    let spare = vec!["some-language-server".to_owned()];
    let swept =
        keeper.sweep(SweepRequest { scope: SweepScope::Turn, grace: Duration::ZERO, spare }).await.unwrap();
    assert_eq!(swept.survivors, []);
    assert!(helpers.iter().all(procfs::is_alive), "both helpers live");
    let mut below = procfs::descendants(agent.pid);
    below.sort();
    assert_eq!(below, helpers, "everything else that the turn started is gone");

    let swept = sweep(&keeper, SweepScope::Turn, Duration::ZERO).await;
    assert_eq!(swept.killed, 2, "helpers that are not named belong to the turn");
    assert_eq!(sweep(&keeper, SweepScope::All, Duration::ZERO).await.survivors, []);
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn a_terminal_is_ended_with_its_turn() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let agent = keeper.spawn(command(&["sleep", "1000"])).await.unwrap();
    keeper.begin_turn().await.unwrap();
    let terminal = keeper.spawn_in_turn(command(&["sleep", "1000"])).await.unwrap();
    assert_eq!(sweep(&keeper, SweepScope::Turn, Duration::ZERO).await.killed, 1);
    assert_eq!(terminal.exit.wait().await.signal, Some(9));
    assert!(has_not_ended(&agent).await);
    assert_eq!(sweep(&keeper, SweepScope::All, Duration::ZERO).await.killed, 1);
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn a_process_that_exits_on_sigterm_is_not_killed_and_the_sweep_does_not_wait_longer() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let polite = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done";
    let mut child = keeper.spawn(shell(polite)).await.unwrap();
    until_ready(&mut child).await;
    let swept = sweep(&keeper, SweepScope::All, FOR_EVER).await;
    assert_eq!(swept.survivors, []);
    assert_eq!(child.exit.wait().await.status, Some(7));
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn a_stopped_process_gets_its_sigterm() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let mut child =
        keeper.spawn(shell("trap 'exit 7' TERM; echo ready; kill -STOP $$; exit 1")).await.unwrap();
    until_ready(&mut child).await;
    sweep(&keeper, SweepScope::All, FOR_EVER).await;
    // The result is the same whether SIGTERM comes just before the process stops or while it is stopped.
    assert_eq!(child.exit.wait().await.status, Some(7));
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn a_kill_cuts_the_grace_of_an_earlier_cancel_short() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let mut agent =
        keeper.spawn(shell("trap '' TERM; echo ready; while :; do sleep 1000; done")).await.unwrap();
    keeper.begin_turn().await.unwrap();
    until_ready(&mut agent).await;
    let mut stubborn =
        keeper.spawn_in_turn(shell("trap '' TERM; echo ready; while :; do sleep 1000; done")).await.unwrap();
    until_ready(&mut stubborn).await;

    let cancel = sweep(&keeper, SweepScope::Turn, FOR_EVER);
    let kill = async {
        // Requests are processed in order, so the cancel is now in progress.
        keeper.list_leftovers().await.unwrap();
        sweep(&keeper, SweepScope::Turn, Duration::ZERO).await
    };
    let (cancelled, killed) = tokio::join!(cancel, kill);
    assert_eq!((cancelled.survivors, killed.survivors), (Vec::new(), Vec::new()));
    assert!(cancelled.killed > 0 && !has_not_ended(&stubborn).await);
    assert!(has_not_ended(&agent).await);

    let cancel = sweep(&keeper, SweepScope::Agent, FOR_EVER);
    let close = async {
        keeper.list_leftovers().await.unwrap();
        sweep(&keeper, SweepScope::All, Duration::ZERO).await
    };
    tokio::join!(cancel, close);
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn a_sweep_of_nothing_is_over_at_once() {
    let keeper = start(&new_mark()).await;
    for scope in [SweepScope::Turn, SweepScope::Agent, SweepScope::All] {
        assert_eq!(sweep(&keeper, scope, FOR_EVER).await, SweepResult::default());
    }
}

#[tokio::test]
async fn a_turn_says_whether_it_leaves_something_and_can_be_swept_after_its_end() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let mut agent = keeper.spawn(shell(AGENT)).await.unwrap();
    until_ready(&mut agent).await;
    keeper.begin_turn().await.unwrap();
    assert!(!keeper.end_turn(Vec::new()).await.unwrap());
    keeper.begin_turn().await.unwrap();
    agent.stdin.write_all(b"a server that stays\n").await.unwrap();
    let kept = processes_of(&mut agent).await;
    // Depending on how far it has come, the process has one of these names.
    let helper_names = ["sh", "setsid", "sleep"].map(str::to_owned).to_vec();
    assert!(!keeper.end_turn(helper_names).await.unwrap(), "a helper does not count");

    keeper.begin_turn().await.unwrap();
    agent.stdin.write_all(b"a server\n").await.unwrap();
    let left = processes_of(&mut agent).await;
    assert!(keeper.end_turn(Vec::new()).await.unwrap());
    assert_eq!(sweep(&keeper, SweepScope::Turn, Duration::ZERO).await.killed, 0, "no turn is open");
    assert_eq!(sweep(&keeper, SweepScope::EndedTurn, Duration::ZERO).await.killed, 1);
    assert!(!procfs::is_alive(&left[0]) && procfs::is_alive(&kept[0]) && has_not_ended(&agent).await);

    keeper.begin_turn().await.unwrap();
    assert_eq!(sweep(&keeper, SweepScope::EndedTurn, Duration::ZERO).await.killed, 0, "another has begun");
    assert_eq!(sweep(&keeper, SweepScope::All, Duration::ZERO).await.killed, 2);
    assert_nothing_below(&keeper, &mark);
}
