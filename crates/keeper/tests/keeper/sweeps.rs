//! What a sweep ends and what it leaves alone.

use std::time::Duration;

use qd_keeper::{SweepRequest, SweepResult, SweepScope, procfs};
use tokio::io::AsyncWriteExt;

use crate::{
    FOR_EVER, assert_nothing_below, command, has_not_ended, new_mark, processes_of, shell, start, sweep,
    until_ready,
};

/// An agent that, at every line it is sent, starts something in another session and says its pid.
const AGENT: &str = "echo ready; while read -r line; do setsid sleep 1000 & echo $!; echo ready; done";

#[tokio::test]
async fn what_a_turn_left_survives_the_agents_rest_and_dies_with_everything() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let mut agent = keeper.spawn(shell(AGENT)).await.unwrap();
    until_ready(&mut agent).await;
    agent.stdin.write_all(b"a helper of its own\n").await.unwrap();
    let own = processes_of(&mut agent).await;

    keeper.begin_turn().await.unwrap();
    agent.stdin.write_all(b"a server\n").await.unwrap();
    let server = processes_of(&mut agent).await;
    assert_eq!(keeper.list_leftovers().await.unwrap(), [], "the turn is not over");
    keeper.end_turn().await.unwrap();
    assert_eq!(keeper.list_leftovers().await.unwrap(), server);

    keeper.begin_turn().await.unwrap();
    let swept = sweep(&keeper, SweepScope::Turn, Duration::ZERO).await;
    assert_eq!(swept, SweepResult::default(), "the second turn has started nothing");
    keeper.end_turn().await.unwrap();

    let swept = sweep(&keeper, SweepScope::Agent, Duration::ZERO).await;
    assert_eq!((swept.killed, swept.survivors), (2, Vec::new()));
    assert_eq!(agent.exit.wait().await.signal, Some(9));
    assert!(!procfs::is_alive(&own[0]) && procfs::is_alive(&server[0]));
    assert_eq!(keeper.list_leftovers().await.unwrap(), server);

    // The agent comes back, rests again, and the server is still not its own.
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
    let folder = tempfile::tempdir().unwrap();
    let helper = folder.path().join("some-language-server");
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
    assert_eq!(below, helpers, "what else the turn started does not");

    let swept = sweep(&keeper, SweepScope::Turn, Duration::ZERO).await;
    assert_eq!(swept.killed, 2, "without their name they are the turn's");
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
async fn one_that_goes_when_asked_is_not_killed_and_nobody_waits_longer() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let polite = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done";
    let mut kept = keeper.spawn(shell(polite)).await.unwrap();
    until_ready(&mut kept).await;
    let swept = sweep(&keeper, SweepScope::All, FOR_EVER).await;
    assert_eq!(swept.survivors, []);
    assert_eq!(kept.exit.wait().await.status, Some(7));
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn one_that_is_stopped_hears_that_it_is_asked() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let mut kept =
        keeper.spawn(shell("trap 'exit 7' TERM; echo ready; kill -STOP $$; exit 1")).await.unwrap();
    until_ready(&mut kept).await;
    sweep(&keeper, SweepScope::All, FOR_EVER).await;
    // Whether it was asked just before it stopped or while it was.
    assert_eq!(kept.exit.wait().await.status, Some(7));
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
        // The cancel is under way: requests go down in order.
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
    for what in [SweepScope::Turn, SweepScope::Agent, SweepScope::All] {
        assert_eq!(sweep(&keeper, what, FOR_EVER).await, SweepResult::default());
    }
}
