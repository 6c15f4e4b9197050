//! Idle agents: a dev server that a turn left running on purpose lives as long as its session. An idle agent is
//! stopped, and the next prompt resumes its conversation.

use std::time::Duration;

use qd_testkit::faulty_libc::ENOSPC;
use qd_testkit::{
    FaultyLibc, ObservedProcess, TestDaemon, TestHome, TestSession, journal_rules, poll_until, script::*,
};
use serde_json::{Value, json};

use crate::workers_loss::{process_of, remembering, worker_of};

/// A daemon with an idle timeout of one second.
async fn daemon_with_short_idle() -> TestDaemon {
    TestDaemon::start_with_settings("idle_s = 1\n").await
}

/// The process that a `spawn` step started, from the pid in the run's text.
fn spawned(run: &Value) -> ObservedProcess {
    let text = run["text"].as_str().unwrap();
    let (_, pid) = text.rsplit_once("pid ").unwrap_or_else(|| panic!("the text has no pid: {run}"));
    ObservedProcess::find(pid.trim().parse().unwrap())
        .unwrap_or_else(|| panic!("there is no such process: {run}"))
}

/// The pids that the daemon lists for a session's worker.
async fn listed(session: &TestSession) -> Vec<u64> {
    let worker = worker_of(session).await;
    worker["processes"].as_array().unwrap().iter().map(|one| one["pid"].as_u64().unwrap()).collect()
}

async fn wait_until_agent_stopped(home: &TestHome) {
    poll_until("the idle agent to be stopped", async || {
        home.processes_with_role("__script").is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_a_turn_left_on_purpose_lives_until_its_session_closes() {
    let daemon = daemon_with_short_idle().await;
    let session = daemon.session_with(remembering(&daemon)).await;
    let server = spawned(&session.run_script(&[spawn_detached(&["sleep", "600"])]).await);
    assert!(server.is_alive(), "its turn ended by itself, so it stays");
    let pid = u64::from(server.pid);
    assert!(listed(&session).await.contains(&pid), "and it is listed");

    assert_eq!(session.run_script(&[say("next")]).await["finish_reason"], "end_turn");
    let run = session.prompt_script(&[spawn_detached(&["sleep", "601"]), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert!(server.is_alive(), "a later cancel does not hit it");
    assert!(!daemon.home.agent_processes().iter().any(|one| one.args.contains(&"601".to_owned())));

    wait_until_agent_stopped(&daemon.home).await;
    assert!(server.is_alive(), "it survives the stop of the idle agent");
    let shown = daemon.qd(&["workers", "--json"]).await.json();
    let shown = shown.as_array().unwrap().iter().find(|worker| worker["session_id"] == session.id).unwrap();
    assert_eq!(shown["processes"], json!([{ "pid": pid, "name": "sleep" }]));
    assert_eq!(session.show().await["state"], "idle");

    assert_eq!(session.run_script(&[say("awake")]).await["text"], "awake");
    assert!(server.is_alive(), "and the agent's next start");
    session.close().await;
    session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    assert!(!server.is_alive(), "it dies with its session, before `session.closed` is written");
    assert_eq!(daemon.home.agent_processes(), []);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn what_a_turn_left_on_purpose_survives_the_daemon_and_dies_with_the_worker() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let server = spawned(&session.run_script(&[spawn_detached(&["sleep", "600"])]).await);
    daemon.restart().await;
    assert_eq!(session.run_script(&[say("next")]).await["finish_reason"], "end_turn");
    assert!(listed(&session).await.contains(&u64::from(server.pid)));
    process_of(&session).await.kill9().await;
    poll_until("its end", async || (!server.is_alive()).then_some(())).await;
    session.wait_for_event("the worker's end", |event| event.kind == "worker.exited").await;
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn what_a_turn_left_on_purpose_outlives_a_killed_run_a_crash_and_an_agent_that_dies_idle() {
    let daemon = TestDaemon::start().await;
    let mut settings = remembering(&daemon);
    settings["cancel_grace_s"] = json!(0.2);
    let session = daemon.session_with(settings).await;
    let server = spawned(&session.run_script(&[spawn_detached(&["sleep", "600"])]).await);
    let run =
        session.prompt_script(&[ignore_cancel(), spawn_detached(&["sleep", "601"]), sleep_forever()]).await;
    let next = session.prompt_script(&[say("next")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.cancel_run(&run).await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "cancelled");
    let finished = session.wait_for_run_event(&run, "run.finished").await;
    assert_eq!(
        finished.data["processes"],
        json!({ "killed": 1, "survivors": 0 }),
        "the processes of this turn"
    );
    assert!(server.is_alive());
    assert_eq!(session.wait(&next).await["text"], "next", "the queue goes on");

    let ended = session.run_script(&[spawn_detached(&["sleep", "601"]), exit(3)]).await;
    assert_eq!((&ended["finish_reason"], &ended["error"]["exit_status"]), (&json!("error"), &json!(3)));
    assert!(server.is_alive());
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");

    daemon.home.processes_with_role("__script")[0].kill9().await;
    session.wait_for_event("a word about it", |event| event.kind == "notice.shown").await;
    assert_eq!(session.run_script(&[say("and again")]).await["text"], "and again");
    assert!(server.is_alive());
    assert!(!daemon.home.agent_processes().iter().any(|one| one.args.contains(&"601".to_owned())));
    session.close().await;
    session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    assert!(!server.is_alive());
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_idle_agent_is_stopped_and_its_session_sleeps_and_is_woken_with_its_conversation() {
    let daemon = daemon_with_short_idle().await;
    let session = daemon.session_with(remembering(&daemon)).await;
    assert_eq!(session.run_script(&[say("first")]).await["text"], "first");
    let conversation = session.show().await["agent_session_id"].clone();
    assert!(conversation.is_string());
    let exited = session.wait_for_event("its rest", |event| event.kind == "worker.exited").await;
    assert_eq!(exited.data["reason"], "stopped");
    wait_until_agent_stopped(&daemon.home).await;
    let shown = session.show().await;
    assert_eq!((&shown["state"], &shown["busy"]), (&json!("idle"), &json!(false)));
    assert!(daemon.client().get("/v1/workers").await.list().is_empty());

    assert_eq!(session.run_script(&[say("second")]).await["text"], "second");
    assert_eq!(session.show().await["agent_session_id"], conversation);
    let events = session.events().await;
    journal_rules::check(&events);
    let started = events.iter().filter(|event| event.kind == "worker.started").count();
    assert_eq!(started, 2);
    assert!(events.iter().all(|event| event.kind != "notice.shown"), "the resume succeeds: {events:#?}");
}

#[tokio::test]
async fn a_prompt_that_meets_the_stopping_runs() {
    const MS: [u64; 12] = [900, 960, 980, 990, 1000, 1005, 1010, 1020, 1030, 1040, 1060, 1100];
    let daemon = daemon_with_short_idle().await;
    let mut lanes = tokio::task::JoinSet::new();
    for ms in MS {
        let session = daemon.session_with(remembering(&daemon)).await;
        lanes.spawn(async move {
            for _ in 0..2 {
                assert_eq!(session.run_script(&[say("x")]).await["text"], "x");
                // No event announces that an agent is about to be stopped, so the test varies the time.
                tokio::time::sleep(Duration::from_millis(ms)).await;
            }
            assert_eq!(session.run_script(&[say("y")]).await["text"], "y");
            journal_rules::check(&session.events().await);
        });
    }
    lanes.join_all().await;
}

#[tokio::test]
async fn an_agent_that_waits_for_a_person_is_not_idle() {
    let daemon = daemon_with_short_idle().await;
    let session = daemon.session("script").await;
    let other = daemon.session("script").await;
    let run = session.prompt_script(&[question("go on?", &[]), say(" done")]).await;
    let ask = session.wait_for_ask(&run).await;
    other.run_script(&[say("x")]).await;
    other.wait_for_event("the other's rest", |event| event.kind == "worker.exited").await;
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    assert_eq!(session.wait(&run).await["text"], "yes done");
}

#[tokio::test]
async fn a_sleeping_session_can_be_closed() {
    let daemon = daemon_with_short_idle().await;
    for leaves_something in [false, true] {
        let session = daemon.session("script").await;
        let step = if leaves_something { spawn_detached(&["sleep", "600"]) } else { say("x") };
        session.run_script(&[step]).await;
        wait_until_agent_stopped(&daemon.home).await;
        session.close().await;
        session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
        assert_eq!(daemon.home.agent_processes(), []);
        journal_rules::check(&session.events().await);
    }
}

#[tokio::test]
async fn a_sleeping_session_with_something_left_is_found_by_the_next_daemon() {
    let mut daemon = daemon_with_short_idle().await;
    let session = daemon.session_with(remembering(&daemon)).await;
    let server = spawned(&session.run_script(&[spawn_detached(&["sleep", "600"])]).await);
    wait_until_agent_stopped(&daemon.home).await;
    daemon.restart().await;
    assert!(listed(&session).await.contains(&u64::from(server.pid)));
    assert_eq!(session.run_script(&[say("awake")]).await["text"], "awake");
    assert!(server.is_alive());
    session.close().await;
    session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    assert!(!server.is_alive());
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_agent_rests_and_wakes_again_and_again_beside_what_was_left() {
    let daemon = daemon_with_short_idle().await;
    let session = daemon.session_with(remembering(&daemon)).await;
    let server = spawned(&session.run_script(&[spawn_detached(&["sleep", "600"])]).await);
    for round in 0..3 {
        wait_until_agent_stopped(&daemon.home).await;
        assert_eq!(session.run_script(&[say("awake")]).await["text"], "awake", "round {round}");
    }
    assert!(server.is_alive());
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_agent_whose_stop_meets_a_full_disk_is_released_once_that_is_journalled() {
    let home = TestHome::new();
    home.configure("idle_s = 1\n");
    let faults = FaultyLibc::below(&home.path());
    let daemon = TestDaemon::start_in(home, |options| {
        options.faulty_libc(&faults);
    })
    .await;
    let session = daemon.session("script").await;
    assert_eq!(session.run_script(&[say("one")]).await["text"], "one");
    faults.fail_writes(ENOSPC);
    wait_until_agent_stopped(&daemon.home).await;
    // The daemon tries again and again to journal the end of the agent. Between two attempts it handles requests that
    // need no space.
    let before = faults.failed_writes();
    poll_until("a few more attempts", async || {
        session.cancel().await;
        (faults.failed_writes() > before + 5).then_some(())
    })
    .await;
    faults.heal();
    let exited = session.wait_for_event("the end of the worker", |event| event.kind == "worker.exited").await;
    assert_eq!(exited.data["reason"], "stopped", "it was neither lost nor did it fail");
    let run = poll_until("the journal to take prompts again", async || {
        let accepted = session.try_prompt(&steps(&[say("two")])).await;
        (accepted.status == 202).then(|| accepted.json()["run_id"].as_str().unwrap().to_owned())
    })
    .await;
    assert_eq!(session.wait(&run).await["text"], "two");
    let events = session.events().await;
    let reattached = events.iter().filter(|event| event.kind == "worker.reattached").count();
    assert_eq!(reattached, 0, "nobody looks for a worker that has ended");
    journal_rules::check(&events);
}
