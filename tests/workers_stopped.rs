//! Somebody stops a keeper or a worker with SIGSTOP, at the worst moment. Turns, cancels and starts go on regardless: the
//! stopped process is told to continue, and no process of an agent is left behind.

use std::time::Duration;

use qd_testkit::home::signal;
use qd_testkit::{ObservedProcess, TestDaemon, TestSession, journal_rules, poll_until, processes, script::*};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::workers_loss::{process_of, remembering, worker_of};

/// The keeper of the session's agent.
async fn keeper_of(session: &TestSession) -> ObservedProcess {
    let worker = process_of(session).await;
    let family = processes::descendants(worker.pid);
    family.into_iter().find(|one| one.has_role("__keeper")).expect("there is a keeper")
}

/// Stops a process, and waits until the kernel has.
async fn stop(process: &ObservedProcess) {
    signal(process.pid, Signal::STOP);
    poll_until("the process to be stopped", async || {
        ObservedProcess::find(process.pid).filter(|one| one.state == 'T')
    })
    .await;
}

/// A session whose agent has had a turn, and its keeper.
async fn session_with_keeper(daemon: &TestDaemon) -> (TestSession, ObservedProcess) {
    let session = daemon.session_with(json!({ "agent": "script", "cancel_grace_s": 1.0 })).await;
    assert_eq!(session.run_script(&[say("ready")]).await["text"], "ready");
    let keeper = keeper_of(&session).await;
    (session, keeper)
}

/// Starts a run that leaves its process group and never ends, and waits until it has started its process.
async fn run_with_escapee(session: &TestSession) -> String {
    let script =
        [spawn_detached(&["sh", "-c", "trap '' TERM; sleep 600 & wait; sleep 600"]), sleep_forever()];
    let run = session.prompt_script(&script).await;
    session.wait_for_run_event(&run, "text.delta").await;
    run
}

/// The processes that agents have started, without the agents themselves.
fn agents_children(daemon: &TestDaemon) -> Vec<ObservedProcess> {
    daemon.home.agent_processes().into_iter().filter(|one| !one.has_role("__script")).collect()
}

/// Waits for the end of a cancelled run. It must be true that nothing of it is left, and the session must go on.
async fn expect_clean_cancel(daemon: &TestDaemon, session: &TestSession, run: &str) -> Value {
    let finished = session.wait_for_run_event(run, "run.finished").await.data;
    let left = agents_children(daemon);
    assert_eq!(finished["finish_reason"], "cancelled", "{finished}");
    assert_eq!(finished["processes"]["survivors"], 0, "{finished}");
    assert_eq!(left, [], "{finished} is not true");
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
    journal_rules::check(&session.events().await);
    finished
}

#[tokio::test]
async fn a_turn_that_begins_below_a_stopped_keeper_ends() {
    let daemon = TestDaemon::start().await;
    let (session, keeper) = session_with_keeper(&daemon).await;
    stop(&keeper).await;
    let ended = session.run_script(&[say("a word")]).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("a word")));
    assert_eq!(keeper_of(&session).await.pid, keeper.pid, "the keeper was not replaced");
}

#[tokio::test]
async fn a_cancel_of_a_turn_that_begins_below_a_stopped_keeper_ends_it() {
    let daemon = TestDaemon::start().await;
    let (session, keeper) = session_with_keeper(&daemon).await;
    stop(&keeper).await;
    let run = session.prompt_script(&[spawn_detached(&["sleep", "600"]), sleep_forever()]).await;
    session.wait_for_start(&run).await;
    session.cancel().await;
    expect_clean_cancel(&daemon, &session, &run).await;
}

#[tokio::test]
async fn a_cancel_ends_what_a_turn_started_below_a_stopped_keeper() {
    let daemon = TestDaemon::start().await;
    let (session, keeper) = session_with_keeper(&daemon).await;
    let run = run_with_escapee(&session).await;
    stop(&keeper).await;
    session.cancel().await;
    let finished = expect_clean_cancel(&daemon, &session, &run).await;
    assert!(finished["processes"]["killed"].as_u64().unwrap() >= 1, "{finished}");
}

#[tokio::test]
async fn a_cancel_ends_although_the_keeper_is_stopped_in_the_middle_of_its_sweep() {
    let daemon = TestDaemon::start().await;
    let (session, keeper) = session_with_keeper(&daemon).await;
    let run = run_with_escapee(&session).await;
    session.cancel().await;
    session.wait_for_run_event(&run, "run.cancel_requested").await;
    signal(keeper.pid, Signal::STOP);
    expect_clean_cancel(&daemon, &session, &run).await;
}

#[tokio::test]
async fn a_cancel_ends_although_somebody_stops_the_keeper_again_and_again() {
    let daemon = TestDaemon::start().await;
    let (session, keeper) = session_with_keeper(&daemon).await;
    let run = run_with_escapee(&session).await;
    let pid = keeper.pid;
    let stopper = tokio::spawn(async move {
        while keeper.is_alive() {
            signal(pid, Signal::STOP);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    session.cancel().await;
    let finished = session.wait_for_run_event(&run, "run.finished").await.data;
    let left = agents_children(&daemon);
    stopper.abort();
    assert_eq!((&finished["finish_reason"], left), (&json!("cancelled"), Vec::new()), "{finished}");
}

#[tokio::test]
async fn a_keeper_that_is_killed_while_it_is_stopped_leaves_nothing() {
    let daemon = TestDaemon::start().await;
    let (session, keeper) = session_with_keeper(&daemon).await;
    let run = run_with_escapee(&session).await;
    let next = session.prompt_script(&[say("next")]).await;
    stop(&keeper).await;
    signal(keeper.pid, Signal::KILL);
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["error"]["code"]), (&json!("error"), &json!("keeper_lost")));
    assert_eq!(session.wait(&next).await["text"], "next");
    assert_eq!(agents_children(&daemon), []);

    let run = run_with_escapee(&session).await;
    let keeper = keeper_of(&session).await;
    stop(&keeper).await;
    session.cancel_run(&run).await;
    signal(keeper.pid, Signal::KILL);
    expect_clean_cancel(&daemon, &session, &run).await;
}

#[tokio::test]
async fn a_stopped_keeper_whose_worker_dies_ends_everything_and_itself() {
    let daemon = TestDaemon::start().await;
    let (session, keeper) = session_with_keeper(&daemon).await;
    let run = run_with_escapee(&session).await;
    let (worker, mark) = (process_of(&session).await, worker_of(&session).await["id"].clone());
    stop(&keeper).await;
    worker.kill9().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "interrupted");
    assert_eq!(processes::marked_processes(mark.as_str().unwrap()), []);
    poll_until("the keeper to end", async || (!keeper.is_alive()).then_some(())).await;
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
}

#[tokio::test]
async fn an_agent_is_started_through_a_keeper_that_was_stopped() {
    let daemon = TestDaemon::start_with_settings("idle_s = 1\n").await;
    let session = daemon.session_with(remembering(&daemon)).await;
    // What the turn leaves running keeps worker and keeper alive when the idle agent is stopped.
    session.run_script(&[spawn_detached(&["sleep", "600"])]).await;
    let keeper = keeper_of(&session).await;
    poll_until("the idle agent to be stopped", async || {
        daemon.home.processes_with_role("__script").is_empty().then_some(())
    })
    .await;
    stop(&keeper).await;
    assert_eq!(session.run_script(&[say("awake")]).await["text"], "awake");
    assert_eq!(keeper_of(&session).await.pid, keeper.pid, "the keeper was not replaced");
}

#[tokio::test]
async fn a_keeper_that_dies_before_it_has_started_the_agent_ends_the_run_and_leaves_nothing() {
    let daemon = TestDaemon::start_with_settings("idle_s = 1\n").await;
    let session = daemon.session_with(remembering(&daemon)).await;
    let server = session.run_script(&[spawn_detached(&["sleep", "600"])]).await;
    let keeper = keeper_of(&session).await;
    poll_until("the idle agent to be stopped", async || {
        daemon.home.processes_with_role("__script").is_empty().then_some(())
    })
    .await;
    stop(&keeper).await;
    let run = session.prompt_script(&[spawn_detached(&["sleep", "601"]), say("started")]).await;
    signal(keeper.pid, Signal::KILL);
    // The worker may notice before it has received the prompt; then another worker serves it.
    let ended = session.wait(&run).await;
    match ended["finish_reason"].as_str() {
        Some("end_turn") => assert!(ended["text"].as_str().unwrap().ends_with("started"), "{ended}"),
        _ => assert_eq!(ended["error"]["code"], "keeper_lost", "{ended} after {server}"),
    }
    let has_survived = |one: &ObservedProcess| one.args.contains(&"600".to_owned());
    assert!(!agents_children(&daemon).iter().any(has_survived), "what the lost keeper held is gone");
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    assert_eq!(daemon.home.agent_processes(), []);
}

#[tokio::test]
async fn a_session_closes_although_its_keeper_is_stopped() {
    let daemon = TestDaemon::start().await;
    let (session, keeper) = session_with_keeper(&daemon).await;
    run_with_escapee(&session).await;
    stop(&keeper).await;
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    assert_eq!(daemon.home.agent_processes(), []);
}

#[tokio::test]
async fn a_cancel_reaches_a_worker_that_was_stopped() {
    let daemon = TestDaemon::start().await;
    let (session, _) = session_with_keeper(&daemon).await;
    let run = run_with_escapee(&session).await;
    stop(&process_of(&session).await).await;
    session.cancel().await;
    expect_clean_cancel(&daemon, &session, &run).await;
}
