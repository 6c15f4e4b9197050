//! No run is forgotten: where two features meet, something still wakes the session. The daemon watches this itself, and
//! every test of this suite fails if it finds a session that nothing would have woken.

use std::time::Duration;

use qd_testkit::{ObservedProcess, TestDaemon, TestSession, journal_rules, poll_until, script::*};
use serde_json::json;

use crate::workers_slots::{is_queued_for_capacity, start_working};
use crate::worktrees::repository;

#[tokio::test]
async fn first_prompts_of_a_worktree_session_that_arrive_together_all_run() {
    let daemon = TestDaemon::start().await;
    repository(&daemon);
    for _ in 0..4 {
        let session = daemon.session_with(json!({ "agent": "script", "worktree": true })).await;
        let prompts = (0..4).map(|n| {
            let session = session.clone();
            tokio::spawn(async move { session.prompt_script(&[say(&n.to_string())]).await })
        });
        let prompts: Vec<_> = prompts.collect();
        for prompt in prompts {
            let run = prompt.await.unwrap();
            assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
        }
        let events = session.events().await;
        journal_rules::check(&events);
        assert_eq!(events.iter().filter(|event| event.kind == "worker.started").count(), 1);
    }
}

/// A suspended run whose agent was stopped, and whose child has ended while `busy` had the only slot.
async fn suspended_without_slot(daemon: &TestDaemon) -> (TestSession, String, TestSession, String) {
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("before "), await_steer(600_000), suspend(), say("after")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let child = session.create_child(json!({ "agent": "script" })).await;
    let child_run = child.prompt_script(&[question("done?", &[]), say(" indeed")]).await;
    session.steer("go").await;
    let ask = child.wait_for_ask(&child_run).await;
    session.wait_for_run_event(&run, "run.suspended").await;
    session.wait_for_event("its rest", |event| event.kind == "worker.exited").await;
    let busy = daemon.session("script").await;
    let working = start_working(&busy).await;
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    child.wait(&child_run).await;
    is_queued_for_capacity(&session, &run).await;
    (session, run, busy, working)
}

#[tokio::test]
async fn a_suspended_run_whose_children_end_while_no_slot_is_free_is_resumed_later() {
    let daemon = TestDaemon::start_with_settings("max_agents = 1\nidle_s = 1\n").await;
    let (session, run, busy, working) = suspended_without_slot(&daemon).await;
    assert_eq!(session.show().await["state"], "waiting");
    busy.steer("go").await;
    assert_eq!(busy.wait(&working).await["finish_reason"], "end_turn");
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_suspended_run_that_waits_for_a_slot_survives_a_kill_of_the_daemon() {
    let mut daemon = TestDaemon::start_with_settings("max_agents = 1\nidle_s = 1\n").await;
    let (session, run, busy, working) = suspended_without_slot(&daemon).await;
    daemon.restart().await;
    busy.steer("go").await;
    assert_eq!(busy.wait(&working).await["finish_reason"], "end_turn");
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_suspended_run_gets_an_agent_with_the_model_that_was_set_meanwhile() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "model": "old" })).await;
    let run = session.prompt_script(&[say("before "), await_steer(600_000), suspend(), config()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let child = session.create_child(json!({ "agent": "script" })).await;
    let child_run = child.prompt_script(&[question("done?", &[])]).await;
    let ask = child.wait_for_ask(&child_run).await;
    session.steer("go").await;
    session.wait_for_run_event(&run, "run.suspended").await;
    session.patch(json!({ "model": "new" })).await;
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    assert!(ended["text"].as_str().unwrap().contains("new"), "{ended}");
}

#[tokio::test]
async fn an_agent_that_rests_beside_a_leftover_starts_again_when_a_slot_is_free() {
    let daemon = TestDaemon::start_with_settings("max_agents = 2\nidle_s = 1\n").await;
    let env = json!({ "SCRIPT_READY_MS": "6000" });
    let rests = daemon.session_with(json!({ "agent": "script", "env": env })).await;
    let left = rests.run_script(&[spawn(&["sleep", "600"])]).await;
    let text = left["text"].as_str().unwrap();
    let sleeper: u32 = text.trim_start_matches("pid ").trim().parse().unwrap();
    let (one, two) = (daemon.session("script").await, daemon.session("script").await);
    let (first, second) = (start_working(&one).await, start_working(&two).await);
    let run = rests.prompt_script(&[say("back")]).await;
    is_queued_for_capacity(&rests, &run).await;
    assert!(ObservedProcess::find(sleeper).is_some(), "what a turn left running is not stopped");
    let process = ObservedProcess::find(daemon.pid()).unwrap();
    let before = process.used_ticks().unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let used = process.used_ticks().unwrap() - before;
    assert!(used < 50, "a session that waits costs nothing, but its daemon used {used} ticks");
    // The first slot that becomes free starts its agent, which takes its time. The second becomes free meanwhile, and
    // then something wakes the session: it must not wait for a slot any more.
    one.steer("go").await;
    assert_eq!(one.wait(&first).await["finish_reason"], "end_turn");
    two.steer("go").await;
    assert_eq!(two.wait(&second).await["finish_reason"], "end_turn");
    two.wait_for_event("its rest", |event| event.kind == "worker.exited").await;
    let next = rests.prompt_script(&[say("again")]).await;
    assert_eq!(rests.wait(&run).await["text"], "back");
    assert_eq!(rests.wait(&next).await["text"], "again");
    journal_rules::check(&rests.events().await);
}

#[tokio::test]
async fn a_session_that_nothing_would_wake_is_reported_counted_and_woken() {
    let daemon = TestDaemon::start_with_settings("idle_s = 1\n").await;
    daemon.home.expect_stuck_sessions();
    let session = daemon.session("echo").await;
    session.wait(&session.prompt("hello").await).await;
    session.wait_for_event("its rest", |event| event.kind == "worker.exited").await;
    // As if its actor had died: the journal says that a run is unfinished, and nobody is awake.
    let journal = rusqlite::Connection::open(daemon.home.path().join("journal.db")).unwrap();
    journal.busy_timeout(std::time::Duration::from_secs(60)).unwrap();
    journal.execute("UPDATE sessions SET live = 1 WHERE id = ?1", [&session.id]).unwrap();
    let is_counted = async || {
        let metrics = daemon.client().get("/metrics").await;
        String::from_utf8_lossy(&metrics.body).lines().any(|line| {
            line.strip_prefix("quarterdeck_stuck_sessions_total ").is_some_and(|count| count != "0")
        })
    };
    poll_until("the report", async || is_counted().await.then_some(())).await;
    assert!(!daemon.home.stuck_sessions().is_empty(), "it is logged");
    assert_eq!(session.wait(&session.prompt("again").await).await["text"], "echo: again");
}
