//! Six ways to escape from a sweep, ten rounds of each.

use std::time::Duration;

use qd_keeper::{SweepScope, procfs};

use crate::{ESCAPEES, assert_nothing_below, command, new_mark, start, sweep, until_ready};

/// Processes of one kind at a time, and the number in a fork storm.
const EACH: usize = 10;
const IN_A_STORM: usize = 200;

/// Ten rounds in which a turn starts escapees, and a sweep ends all of them but not the agent.
async fn ten_rounds_of(kind: &str, count: usize) {
    let mark = new_mark();
    let keeper = start(&mark).await;
    for round in 0..10 {
        let launch = command(&["python3", ESCAPEES, kind, &count.to_string()]);
        keeper.begin_turn().await.unwrap();
        let mut child = keeper.spawn(launch).await.unwrap();
        assert_eq!(until_ready(&mut child).await.len(), count);
        // Half of the rounds send SIGTERM first, which all of them ignore.
        let grace = Duration::from_millis(if round % 2 == 0 { 0 } else { 50 });
        let swept = sweep(&keeper, SweepScope::Turn, grace).await;
        assert_eq!(swept.survivors, [], "{kind}, round {round}");
        assert!(swept.killed as usize >= count, "{kind}, round {round}: only {} were killed", swept.killed);
        let alive: Vec<u32> = procfs::find_marked(&mark).iter().map(|process| process.pid).collect();
        assert_eq!(alive, [child.pid], "{kind}, round {round}: only the agent is left");

        let swept = sweep(&keeper, SweepScope::All, Duration::ZERO).await;
        assert_eq!((swept.killed, swept.survivors), (1, Vec::new()));
        assert_nothing_below(&keeper, &mark);
        assert_eq!(child.exit.wait().await.signal, Some(9));
    }
    keeper.close().await;
}

#[tokio::test]
async fn one_that_ignores_sigterm_is_ended() {
    ten_rounds_of("stubborn", EACH).await;
}

#[tokio::test]
async fn one_that_left_its_session_is_ended() {
    ten_rounds_of("setsid", EACH).await;
}

#[tokio::test]
async fn one_that_forked_twice_is_ended() {
    ten_rounds_of("double_fork", EACH).await;
}

#[tokio::test]
async fn one_that_stopped_itself_is_ended() {
    ten_rounds_of("stopped", EACH).await;
}

#[tokio::test]
async fn the_child_of_a_child_is_ended() {
    ten_rounds_of("grandchild", EACH).await;
}

#[tokio::test]
async fn a_storm_of_forks_is_ended() {
    ten_rounds_of("storm", IN_A_STORM).await;
}
