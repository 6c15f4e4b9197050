//! How workers end: killed, abandoned, asked to. Whatever it is, nothing of the agent lives on and nothing that it said
//! is lost.

use qd_keeper::{Signal, procfs};
use qd_link::record::{is_worker_alive, read_records};
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnUpdate};

use crate::harness::{WorkerUnderTest, agent_spec, eventually, kill, nothing_left_of};

/// Leaves a process of its own behind, then talks, then waits.
const BUSY: &str = r#"[{"spawn":{"argv":["sh","-c","trap '' TERM; while :; do sleep 1; done"],"setsid":true}},{"say":" begun"},{"sleep_ms":600000}]"#;

#[tokio::test]
async fn a_worker_that_is_killed_leaves_what_it_said_and_nothing_alive() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.until_text("begun").await;
    let taken = daemon.taken;
    drop(daemon);
    worker.signal(Signal::KILL);
    worker.ended().await;
    nothing_left_of(&spec).await;
    assert!(!is_worker_alive(worker.home.path(), "wrk_one"));
    assert_eq!(read_records(worker.home.path()).len(), 1, "its record tells who it was");

    let said = worker.remains(&spec, 0);
    assert!(matches!(said[..], [AgentUpdate::Ready { .. }, ..]) || taken > 0);
    let mut late = worker.attach(&spec, taken - 1, None);
    let (ups, gone) = late.lost().await;
    assert_eq!(gone, AgentExitReason::Lost);
    assert_eq!(ups.len(), 1, "what was not known to be journalled: {ups:?}");
}

#[tokio::test]
async fn a_run_that_ends_while_no_daemon_lives_has_its_end_in_the_spool_of_a_killed_worker() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", r#"[{"say":"begun "},{"sleep_ms":50},{"say":"done"}]"#);
    daemon.until_text("begun").await;
    let taken = daemon.taken;
    drop(daemon);
    eventually(|| worker.remains(&spec, taken).iter().any(|up| matches!(up, AgentUpdate::Terminal { .. })))
        .await;
    worker.signal(Signal::KILL);
    worker.ended().await;
    let mut daemon = worker.attach(&spec, taken, None);
    let (ups, gone) = daemon.lost().await;
    assert_eq!(gone, AgentExitReason::Lost);
    assert!(
        matches!(&ups[0], AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } if text == "done"),
        "{ups:?}"
    );
    assert!(matches!(&ups[1], AgentUpdate::Terminal { .. }));
}

#[tokio::test]
async fn an_agent_that_nobody_comes_for_is_ended_cleanly_and_its_words_stay() {
    // Time enough for the daemon to come at all, where only that is waited for.
    for (busy_ms, idle_ms, prompt) in [(100, 600_000, Some(BUSY)), (600_000, 2_000, None)] {
        let (mut worker, spec) = WorkerUnderTest::with("script", |host| {
            host.orphan_busy_ms = busy_ms;
            host.orphan_idle_ms = idle_ms;
        })
        .await;
        let mut daemon = worker.attach(&spec, 0, None);
        daemon.until(|up| matches!(up, AgentUpdate::Ready { .. })).await;
        if let Some(prompt) = prompt {
            daemon.prompt("a", prompt);
            daemon.until_text("begun").await;
        }
        let taken = daemon.taken;
        drop(daemon);
        assert!(worker.ended().await.success());
        assert!(procfs::find_marked(&spec.mark).is_empty());
        assert_eq!(worker.remains(&spec, taken), [AgentUpdate::Gone(AgentExitReason::Stopped)]);
        assert!(
            read_records(worker.home.path()).is_empty() && !is_worker_alive(worker.home.path(), "wrk_one")
        );
        let (ups, gone) = worker.attach(&spec, taken, None).lost().await;
        assert_eq!((ups, gone), (vec![AgentUpdate::Gone(AgentExitReason::Stopped)], AgentExitReason::Lost));
    }
}

#[tokio::test]
async fn a_worker_that_is_asked_to_end_ends_everything_and_tells_the_daemon() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.until_text("begun").await;
    worker.signal(Signal::TERM);
    assert_eq!(daemon.gone().await, AgentExitReason::Stopped);
    assert!(procfs::find_marked(&spec.mark).is_empty());
    assert!(worker.ended().await.success());
    assert_eq!(std::fs::read_dir(worker.home.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_keeper_that_is_killed_is_the_end_of_the_run_and_of_all_that_it_kept() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.until_text("begun").await;
    let keeper = procfs::children(worker.pid())[0];
    kill(keeper, Signal::KILL);
    let AgentExitReason::Failed(error) = daemon.gone().await else { panic!("it failed") };
    assert_eq!(error.code, "keeper_lost");
    assert!(procfs::find_marked(&spec.mark).is_empty(), "before it is said");
    assert!(worker.ended().await.success());
}

#[tokio::test]
async fn worker_and_keeper_killed_together_leave_only_what_the_last_net_catches() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.until_text("begun").await;
    let keeper = procfs::children(worker.pid())[0];
    worker.signal(Signal::STOP);
    kill(keeper, Signal::KILL);
    worker.signal(Signal::KILL);
    worker.ended().await;
    let mark = spec.mark.clone();
    let ended =
        tokio::task::spawn_blocking(move || procfs::end_marked(&mark, std::time::Duration::from_millis(50)));
    assert!(ended.await.unwrap().survivors.is_empty());
    assert!(procfs::find_marked(&spec.mark).is_empty());
}
