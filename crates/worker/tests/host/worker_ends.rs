//! How workers end: killed, abandoned, or asked to. In every case no process of the agent survives and none of its
//! updates are lost.

use qd_keeper::{Signal, procfs};
use qd_link::FileSpool;
use qd_link::record::{is_worker_alive, read_records};
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnStopReason, TurnUpdate};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::harness::{WorkerUnderTest, agent_spec, eventually, host_spec, kill, wait_until_all_exited};

/// Leaves a process behind, then sends text, then waits.
const BUSY: &str = r#"[{"spawn":{"argv":["sh","-c","trap '' TERM; while :; do sleep 1; done"],"setsid":true}},{"say":" begun"},{"sleep_ms":600000}]"#;

#[tokio::test]
async fn a_worker_that_is_killed_leaves_what_it_said_and_nothing_alive() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.wait_for_text("begun").await;
    let journalled = daemon.journalled;
    drop(daemon);
    worker.signal(Signal::KILL);
    worker.wait_for_exit().await;
    wait_until_all_exited(&spec).await;
    assert!(!is_worker_alive(worker.home.path(), "wrk_one"));
    assert_eq!(read_records(worker.home.path()).len(), 1, "its record tells who it was");

    let spooled = worker.spooled_updates(&spec, 0);
    assert!(matches!(spooled[..], [AgentUpdate::Ready { .. }, ..]) || journalled > 0);
    let mut late = worker.attach(&spec, journalled - 1, None);
    let (updates, gone) = late.wait_for_loss().await;
    assert_eq!(gone, AgentExitReason::Lost);
    assert_eq!(updates.len(), 1, "what was not known to be journalled: {updates:?}");
}

#[tokio::test]
async fn a_worker_whose_spool_was_removed_ends_with_its_processes() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.wait_for_text("begun").await;
    drop(daemon);
    FileSpool::remove(&FileSpool::folder(worker.home.path(), &spec.worker)).unwrap();
    worker.wait_for_exit().await;
    wait_until_all_exited(&spec).await;
}

#[tokio::test]
async fn a_run_that_ends_while_no_daemon_lives_has_its_end_in_the_spool_of_a_killed_worker() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", r#"[{"say":"begun "},{"sleep_ms":50},{"say":"done"}]"#);
    daemon.wait_for_text("begun").await;
    let journalled = daemon.journalled;
    drop(daemon);
    eventually(|| {
        worker
            .spooled_updates(&spec, journalled)
            .iter()
            .any(|update| matches!(update, AgentUpdate::TurnEnded { .. }))
    })
    .await;
    worker.signal(Signal::KILL);
    worker.wait_for_exit().await;
    let mut daemon = worker.attach(&spec, journalled, None);
    let (updates, gone) = daemon.wait_for_loss().await;
    assert_eq!(gone, AgentExitReason::Lost);
    assert!(
        matches!(&updates[0], AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } if text == "done"),
        "{updates:?}"
    );
    assert!(matches!(&updates[1], AgentUpdate::TurnEnded { .. }));
}

#[tokio::test]
async fn an_agent_that_nobody_comes_for_is_ended_cleanly_and_its_words_stay() {
    // Where only the idle limit is tested, it leaves the daemon enough time to attach at all.
    for (busy_ms, idle_ms, prompt) in [(100, 600_000, Some(BUSY)), (600_000, 2_000, None)] {
        let (mut worker, spec) = WorkerUnderTest::with("script", |host| {
            host.orphan_busy_ms = busy_ms;
            host.orphan_idle_ms = idle_ms;
        })
        .await;
        let mut daemon = worker.attach(&spec, 0, None);
        daemon.wait_for(|update| matches!(update, AgentUpdate::Ready { .. })).await;
        if let Some(prompt) = prompt {
            daemon.prompt("a", prompt);
            daemon.wait_for_text("begun").await;
        }
        let journalled = daemon.journalled;
        drop(daemon);
        assert!(worker.wait_for_exit().await.success());
        assert!(procfs::find_marked(&spec.mark).is_empty());
        assert_eq!(worker.spooled_updates(&spec, journalled), [AgentUpdate::Gone(AgentExitReason::Stopped)]);
        assert!(
            read_records(worker.home.path()).is_empty() && !is_worker_alive(worker.home.path(), "wrk_one")
        );
        let (updates, gone) = worker.attach(&spec, journalled, None).wait_for_loss().await;
        assert_eq!(
            (updates, gone),
            (vec![AgentUpdate::Gone(AgentExitReason::Stopped)], AgentExitReason::Lost)
        );
    }
}

#[tokio::test]
async fn a_worker_that_is_asked_to_end_ends_everything_and_tells_the_daemon() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.wait_for_text("begun").await;
    worker.signal(Signal::TERM);
    assert_eq!(daemon.wait_for_gone().await, AgentExitReason::Stopped);
    assert!(procfs::find_marked(&spec.mark).is_empty());
    assert!(worker.wait_for_exit().await.success());
    assert_eq!(std::fs::read_dir(worker.home.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_keeper_that_is_killed_is_the_end_of_the_run_and_of_all_that_it_kept() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.wait_for_text("begun").await;
    let keeper = procfs::children(worker.pid())[0];
    kill(keeper, Signal::KILL);
    let AgentExitReason::Failed(error) = daemon.wait_for_gone().await else { panic!("it failed") };
    assert_eq!(error.code, "keeper_lost");
    assert!(procfs::find_marked(&spec.mark).is_empty(), "before it is said");
    assert!(worker.wait_for_exit().await.success());
}

#[tokio::test]
async fn processes_left_by_a_killed_worker_and_keeper_are_found_by_their_mark() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", BUSY);
    daemon.wait_for_text("begun").await;
    let keeper = procfs::children(worker.pid())[0];
    worker.signal(Signal::STOP);
    kill(keeper, Signal::KILL);
    worker.signal(Signal::KILL);
    worker.wait_for_exit().await;
    let mark = spec.mark.clone();
    let ended =
        tokio::task::spawn_blocking(move || procfs::end_marked(&mark, std::time::Duration::from_millis(50)));
    assert!(ended.await.unwrap().survivors.is_empty());
    assert!(procfs::find_marked(&spec.mark).is_empty());
}

/// Makes every write of the worker to a file fail, or lets it write again.
fn limit_file_size(worker: &WorkerUnderTest, bytes: Option<u64>) {
    let pid = Pid::from_raw(i32::try_from(worker.pid()).unwrap());
    prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

#[tokio::test]
async fn a_task_of_a_worker_that_panics_ends_the_session_the_agent_and_the_worker() {
    let home = tempfile::tempdir().unwrap();
    let spec = agent_spec(&home, "script", "one");
    let host = host_spec(&home, "wrk_one", vec![spec.clone()]);
    // The task that forwards the agent's output logs that the spool cannot be written, and panics while it does so.
    let env = [("QD_TEST_PANIC_ON_LOG", "failed to append to the spool")];
    let mut worker = WorkerUnderTest::start_with_env(home, &host, env).await;
    let mut daemon = worker.attach(&spec, 0, None);
    daemon.wait_for(|update| matches!(update, AgentUpdate::Ready { .. })).await;
    limit_file_size(&worker, Some(0));
    daemon.prompt("a", r#"[{"say":"begun","times":1000000,"every_ms":5}]"#);
    let AgentExitReason::Failed(error) = daemon.wait_for_gone().await else { panic!("not a failure") };
    assert_eq!(error.code, "worker_panicked");
    assert!(error.message.contains("agent output"), "{}", error.message);
    assert!(worker.wait_for_exit().await.success());
    assert!(procfs::find_marked(&spec.mark).is_empty());
}

#[tokio::test]
async fn what_a_worker_cannot_spool_waits_in_memory_and_arrives_once() {
    const PIECES: usize = 1200;
    let (worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    limit_file_size(&worker, Some(0));
    // More than may wait in memory, so that the agent has to wait.
    let piece = "x".repeat(16 << 10);
    daemon.prompt("a", &format!(r#"[{{"say":"{piece}","times":{PIECES}}}]"#));
    let mut length = daemon.wait_for_text("x").await.len();
    // The next daemon finds the worker as the last one left it.
    let mut daemon = worker.attach_again(&spec, daemon);
    limit_file_size(&worker, None);
    let ended = daemon.wait_for_end("a").await;
    length += ended.text.len();
    assert_eq!((ended.outcome.stop, length), (TurnStopReason::EndTurn, PIECES * piece.len()));
}
