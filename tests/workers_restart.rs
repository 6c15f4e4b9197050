//! The daemon dies and agents keep working. However the daemon ends, the next one reattaches every worker, and the
//! journal then has all text of every agent exactly once. Limits are enforced also while no daemon runs.

use std::time::Duration;

use qd_testkit::{SeededRandom, TestDaemon, TestEvent, TestSession, journal_rules, poll_until, script::*};
use serde_json::{Value, json};

const SESSIONS: usize = 10;
const KILLS: usize = 10;
const CHUNKS: u64 = 160;
const EVERY_MS: u64 = 20;

fn reattached(events: &[TestEvent]) -> usize {
    events.iter().filter(|event| event.kind == "worker.reattached").count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_kills_of_the_daemon_under_ten_agents_lose_and_double_no_word() {
    let seed = SeededRandom::choose_seed();
    println!("QD_SEED={seed}");
    let mut random = SeededRandom::new(seed);
    let mut daemon = TestDaemon::start().await;
    let mut streaming = Vec::new();
    for _ in 0..SESSIONS {
        let session = daemon.session("script").await;
        let run = session.prompt_script(&count(CHUNKS, EVERY_MS)).await;
        let next = session.prompt_script(&[say("next")]).await;
        streaming.push((session, run, next));
    }
    let asking = daemon.session("script").await;
    let asks = asking.prompt_script(&[say("may I? "), ask_bash("make"), say(" thanks")]).await;
    let ask = asking.wait_for_ask(&asks).await;
    let behind = asking.prompt_script(&[say("behind")]).await;
    for (session, run, _) in &streaming {
        session.wait_for_run_event(run, "text.delta").await;
    }

    for _ in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(50 + random.below(200))).await;
        daemon.restart().await;
    }

    let still_open = daemon.client().pending_asks().await;
    assert_eq!(still_open.iter().map(|ask| &ask["id"]).collect::<Vec<_>>(), [&json!(ask)]);
    daemon.client().answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    for (session, run, text) in [(&asking, &asks, "may I? allowed thanks"), (&asking, &behind, "behind")] {
        let ended = session.wait(run).await;
        assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!(text)));
    }
    let events = asking.events().await;
    journal_rules::check(&events);
    assert!(events.iter().any(|event| event.kind == "ask.delivered" && event.data["ask_id"] == ask));

    let mut found_again = 0;
    for (session, run, next) in &streaming {
        assert_eq!(session.wait(run).await["finish_reason"], "end_turn");
        assert_eq!(session.wait(next).await["finish_reason"], "end_turn");
        let events = session.events().await;
        journal_rules::check(&events);
        assert_eq!(
            journal_rules::run_text(&events, run),
            counted_text(CHUNKS),
            "every chunk once and in order"
        );
        assert_eq!(journal_rules::run_text(&events, next), "next");
        found_again += reattached(&events);
    }
    println!("{KILLS} kills, {} chunks, {found_again} reattachments", CHUNKS * SESSIONS as u64);
    assert!(found_again >= SESSIONS, "the workers were reattached, not replaced");
}

#[tokio::test]
async fn an_agent_goes_on_and_ends_its_turn_while_no_daemon_is_there() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[count(20, 10), vec![write("done", "x")]].concat()).await;
    // `run.started` is not enough: the prompt goes to the agent only after it is journalled.
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.kill9().await;
    poll_until("the agent's last step", async || {
        daemon.home.project_dir().join("done").exists().then_some(())
    })
    .await;
    daemon.start_again().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    let events = session.events().await;
    journal_rules::check(&events);
    assert_eq!(journal_rules::run_text(&events, &run), counted_text(20));
    assert_eq!(reattached(&events), 1);
}

#[tokio::test]
async fn the_sessions_of_a_shared_worker_are_found_again_too() {
    let mut daemon = TestDaemon::start().await;
    let mut sessions = Vec::new();
    for n in 0..10 {
        let session = daemon.session("echo").await;
        let run = session.prompt(&format!("__sleep_ms:{} a b c", 40 * n)).await;
        let next = session.prompt("next").await;
        session.wait_for_start(&run).await;
        sessions.push((session, run, next));
    }
    daemon.restart().await;
    for (session, run, next) in &sessions {
        assert_eq!(session.wait(run).await["text"], "echo: a b c");
        assert_eq!(session.wait(next).await["finish_reason"], "end_turn");
        let events = session.events().await;
        journal_rules::check(&events);
        assert_eq!(journal_rules::run_text(&events, run).trim_end(), "a b c");
    }
    assert_eq!(daemon.home.processes_with_role("__worker").len(), 1);
}

#[tokio::test]
async fn a_steer_and_a_cancel_reach_a_turn_that_another_daemon_began() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("x "), await_steer(600_000), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.restart().await;
    session.steer("left").await;
    let expected = "x steered: left";
    session
        .wait_for_event("the steer's words", |event| {
            event.is_of_run(&run, "text.delta") && event.data["text"] == "steered: left"
        })
        .await;
    daemon.restart().await;
    session.cancel().await;
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("cancelled"), &json!(expected)));
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_answer_that_was_acknowledged_before_the_kill_reaches_the_agent_once() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    for n in 0..5 {
        let run = session.prompt_script(&[question("go on?", &[]), say(" done")]).await;
        let ask = session.wait_for_ask(&run).await;
        session.client.answer_ask(&ask, &json!({ "value": format!("yes {n}") })).await.expect(200);
        daemon.restart().await;
        assert_eq!(session.wait(&run).await["text"], format!("yes {n} done"));
    }
    let events = session.events().await;
    journal_rules::check(&events);
    let delivered = events.iter().filter(|event| event.kind == "ask.delivered").count();
    assert_eq!(delivered, 5);
}

#[tokio::test]
async fn a_stop_and_a_sigterm_leave_the_workers_to_their_work() {
    let mut daemon = TestDaemon::start().await;
    for end in ["stop", "SIGTERM"] {
        let session = daemon.session("script").await;
        let run = session.prompt_script(&count(50, 20)).await;
        session.wait_for_run_event(&run, "text.delta").await;
        let workers = daemon.home.processes_with_role("__worker");
        assert!(!workers.is_empty());
        match end {
            "stop" => {
                daemon.qd(&["stop"]).await.ok();
                assert_eq!(daemon.wait_for_exit().await, Some(0));
            }
            _ => assert_eq!(daemon.terminate().await, Some(0)),
        }
        assert!(workers.iter().all(qd_testkit::ObservedProcess::is_alive), "after {end}: {workers:?}");
        daemon.start_again().await;
        assert_eq!(session.wait(&run).await["finish_reason"], "end_turn", "after {end}");
        let events = session.events().await;
        journal_rules::check(&events);
        assert_eq!(journal_rules::run_text(&events, &run), counted_text(50));
    }
}

#[tokio::test]
async fn stop_with_workers_ends_them_and_all_that_their_agents_started() {
    let mut daemon = TestDaemon::start().await;
    let busy = daemon.session("script").await;
    let run = busy.prompt_script(&[spawn_detached(&["sleep", "600"]), sleep_forever()]).await;
    busy.wait_for_run_event(&run, "text.delta").await;
    let idle = daemon.session("echo").await;
    idle.wait(&idle.prompt("hello").await).await;
    let queued = busy.prompt_script(&[say("later")]).await;
    daemon.qd(&["stop", "--workers"]).await.ok();
    assert_eq!(daemon.wait_for_exit().await, Some(0));
    let left = daemon.home.processes();
    assert!(left.is_empty(), "{left:#?}");
    daemon.start_again().await;
    let ended = busy.wait(&run).await["finish_reason"].clone();
    assert!(ended == "interrupted" || ended == "cancelled", "{ended}");
    assert_eq!(busy.wait(&queued).await["finish_reason"], "end_turn", "the queue goes on");
    journal_rules::check(&busy.events().await);
}

/// Runs a script with a limit, kills the daemon after the first text, and starts another only when the turn's processes
/// are dead. So it was not the daemon that stopped the turn.
async fn reach_limit_without_daemon(
    limits: Value,
    over: Vec<Value>,
) -> (TestSession, TestDaemon, String, Value) {
    let mut daemon = TestDaemon::start().await;
    let mut settings = json!({ "agent": "script", "cancel_grace_s": 0.2 });
    settings.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
    let session = daemon.session_with(settings).await;
    let script = [vec![spawn_detached(&["sleep", "600"]), sleep(500)], over, vec![sleep_forever()]].concat();
    let run = session.prompt_script(&script).await;
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.kill9().await;
    poll_until("the end of what the turn started", async || {
        let left = daemon.home.agent_processes().into_iter().any(|one| one.args[0].ends_with("sleep"));
        (!left).then_some(())
    })
    .await;
    daemon.start_again().await;
    let ended = session.wait(&run).await;
    (session, daemon, run, ended)
}

#[tokio::test]
async fn a_time_limit_holds_while_no_daemon_lives() {
    let (session, _daemon, run, ended) =
        reach_limit_without_daemon(json!({ "run_timeout_s": 1.0 }), vec![]).await;
    assert_eq!(ended["finish_reason"], "timeout");
    let events = session.events().await;
    journal_rules::check(&events);
    let times: Vec<_> = events.iter().map(|event| event.ts.clone()).collect();
    assert!(times.is_sorted(), "time does not run backwards in the journal: {times:?}");
    let started = events.iter().find(|event| event.is_of_run(&run, "run.started")).unwrap();
    assert_eq!(ended["started_at"], started.ts.as_str());
    assert!(ended["finished_at"].as_str() > ended["started_at"].as_str());
    assert_eq!(session.run_script(&[say("next")]).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn a_limit_on_turns_holds_while_no_daemon_lives() {
    let calls = vec![tool("Read", json!({}), "x"); 3];
    let (session, _daemon, _, ended) = reach_limit_without_daemon(json!({ "max_turns": 2 }), calls).await;
    assert_eq!(ended["finish_reason"], "max_turns");
    assert_eq!(session.run_script(&[say("next")]).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_budget_holds_while_no_daemon_lives() {
    let (session, _daemon, _, ended) =
        reach_limit_without_daemon(json!({ "budget_usd": 1.0 }), vec![cost(0.6), cost(0.6)]).await;
    assert_eq!(ended["finish_reason"], "budget_exceeded");
    assert_eq!(session.run_script(&[say("never")]).await["finish_reason"], "budget_exceeded");
    assert_eq!(session.show().await["usage"]["cost_usd"], 1.2);
    session.patch(json!({ "budget_usd": 5.0 })).await;
    assert_eq!(session.run_script(&[say("again")]).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

/// A run that waits or has ended while no daemon runs, for longer than its time limit.
async fn in_an_outage(limit_s: f64, script: &[Value]) -> (TestSession, TestDaemon, String) {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "run_timeout_s": limit_s })).await;
    let run = session.prompt_script(&[&[say("begun ")], script].concat()).await;
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.kill9().await;
    tokio::time::sleep(Duration::from_secs_f64(limit_s + 0.5)).await;
    daemon.start_again().await;
    (session, daemon, run)
}

#[tokio::test]
async fn a_turn_that_ended_in_time_is_no_timeout_because_nobody_saw_it() {
    let (session, _daemon, run) = in_an_outage(2.0, &[sleep(200), say("done")]).await;
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("begun done")));
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_wait_for_a_person_is_no_run_time_while_no_daemon_lives_either() {
    let (session, daemon, run) = in_an_outage(2.0, &[sleep(200), ask_bash("make")]).await;
    let ask = session.wait_for_ask(&run).await;
    daemon.client().answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("begun allowed")));
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn limits_that_were_raised_in_mid_turn_count_while_no_daemon_lives() {
    let mut daemon = TestDaemon::start().await;
    let limits = json!({ "agent": "script", "run_timeout_s": 6.0, "budget_usd": 1.0 });
    let session = daemon.session_with(limits).await;
    let run = session.prompt_script(&[say("begun "), sleep(6500), cost(2.0), say("done")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.patch(json!({ "run_timeout_s": 60.0, "budget_usd": 50.0 })).await;
    // The new limits go to the worker only after they are journalled.
    tokio::time::sleep(Duration::from_secs(1)).await;
    daemon.kill9().await;
    tokio::time::sleep(Duration::from_millis(6500)).await;
    daemon.start_again().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_model_that_was_changed_before_the_kill_is_the_next_run_s() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "model": "m1" })).await;
    let run = session.prompt_script(&[say("busy"), await_steer(600_000)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.patch(json!({ "model": "m2" })).await;
    daemon.restart().await;
    session.steer("go").await;
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    let ended = session.run_script(&[config()]).await;
    assert!(ended["text"].as_str().unwrap().contains("m2"), "{ended}");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_agent_for_which_no_daemon_comes_is_ended_after_the_time_that_is_set() {
    let mut daemon = TestDaemon::start_with_settings("orphan_busy_s = 1\norphan_idle_s = 1\n").await;
    let (busy, idle) = (daemon.session("script").await, daemon.session("script").await);
    let run = busy.prompt_script(&[spawn_detached(&["sleep", "600"]), sleep_forever()]).await;
    busy.wait_for_run_event(&run, "text.delta").await;
    idle.run_script(&[spawn_detached(&["sleep", "601"])]).await;
    daemon.kill9().await;
    daemon.home.wait_for_no_agents().await;
    daemon.start_again().await;
    assert_eq!(busy.wait(&run).await["finish_reason"], "interrupted");
    for session in [&busy, &idle] {
        assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
        journal_rules::check(&session.events().await);
    }
}
