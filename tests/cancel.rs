//! What a cancel hits and what it does not, how the cancelled runs end, and the same for child sessions. Processes that
//! survive a cancel are in `workers_escapees.rs`.

use qd_testkit::{TestDaemon, TestSession, journal_rules, script::*};
use serde_json::{Value, json};

fn hit(answer: &Value) -> Vec<&str> {
    let mut runs: Vec<_> =
        answer["cancelled"].as_array().unwrap().iter().map(|run| run.as_str().unwrap()).collect();
    runs.sort_unstable();
    runs
}

async fn no_error_was_raised(session: &TestSession) {
    let events = session.events().await;
    journal_rules::check(&events);
    assert!(events.iter().all(|event| event.kind != "error.raised"), "{events:?}");
}

#[tokio::test]
async fn a_cancel_hits_every_run_accepted_before_it_and_none_accepted_after_it() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let mut before = vec![session.prompt_script(&[sleep_forever()]).await];
    before.push(session.prompt_script(&[sleep_forever()]).await);
    before.push(session.prompt_script(&[sleep_forever()]).await);
    let answer = session.cancel().await;
    let after = session.prompt_script(&[say("spared")]).await;
    before.sort_unstable();
    assert_eq!(hit(&answer), before);
    assert_eq!(answer["idle"], false);
    for run in &before {
        assert_eq!(session.wait(run).await["finish_reason"], "cancelled");
    }
    assert_eq!(session.wait(&after).await["finish_reason"], "end_turn");
    no_error_was_raised(&session).await;
}

#[tokio::test]
async fn a_cancel_is_journalled_before_it_is_answered() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let active = session.prompt_script(&[ignore_cancel(), sleep_forever()]).await;
    let waiting = session.prompt_script(&[say("never")]).await;
    session.wait_for_start(&active).await;
    session.cancel().await;
    daemon.restart().await;
    for run in [&active, &waiting] {
        assert_eq!(session.wait(run).await["finish_reason"], "cancelled", "{run}");
    }
    no_error_was_raised(&session).await;
}

#[tokio::test]
async fn a_cancel_with_run_id_hits_that_run_alone() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let active = session.prompt_script(&[sleep_forever()]).await;
    let middle = session.prompt_script(&[say("never")]).await;
    let last = session.prompt_script(&[say("last")]).await;
    session.wait_for_start(&active).await;
    assert_eq!(session.cancel_run(&middle).await, json!({ "cancelled": [middle], "idle": false }));
    assert_eq!(session.wait(&middle).await["finish_reason"], "cancelled");
    assert_eq!(session.run(&active).await["state"], "running");
    assert_eq!(hit(&session.cancel_run(&active).await), [&active]);
    assert_eq!(session.wait(&active).await["finish_reason"], "cancelled");
    assert_eq!(session.wait(&last).await["finish_reason"], "end_turn");
    no_error_was_raised(&session).await;
}

#[tokio::test]
async fn a_run_that_is_starting_is_cancelled_and_never_starts() {
    let daemon = TestDaemon::start().await;
    let settings = json!({ "agent": "script", "env": { "SCRIPT_READY_MS": "600000" } });
    let session = daemon.session_with(settings).await;
    let run = session.prompt_script(&[say("never")]).await;
    assert_eq!(session.show().await["state"], "starting");
    assert_eq!(hit(&session.cancel().await), [&run]);
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert!(session.events_of(&run).await.iter().all(|event| event.kind != "run.started"));
    no_error_was_raised(&session).await;
}

#[tokio::test]
async fn a_cancelled_run_ends_as_cancelled_whatever_the_agent_says_a_moment_later() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "cancel_grace_s": 20 })).await;
    for last in [say("done"), fail("no"), exit(1), stop("refused")] {
        let run = session.prompt_script(&[ignore_cancel(), say("working"), sleep(300), last]).await;
        session.wait_for_run_event(&run, "text.delta").await;
        session.cancel().await;
        assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    }
    no_error_was_raised(&session).await;
    assert_eq!(session.run_script(&[say("fine")]).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn an_agent_that_ignores_a_cancel_is_killed_after_the_grace() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "cancel_grace_s": 0.2 })).await;
    let run = session.prompt_script(&[ignore_cancel(), say("deaf"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    let ended = session.wait_for_run_event(&run, "run.finished").await;
    assert_eq!(ended.data["processes"]["survivors"], 0);
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
    no_error_was_raised(&session).await;
}

#[tokio::test]
async fn a_cancel_that_hits_nothing_changes_nothing_and_does_not_poison_the_next_prompt() {
    let daemon = TestDaemon::start().await;
    for agent in ["echo", "script"] {
        let session = daemon.session(agent).await;
        let nothing = json!({ "cancelled": [], "idle": true });
        let events = session.events().await;
        assert_eq!(session.cancel().await, nothing, "before any prompt");
        assert_eq!(session.events().await, events);
        let first = session.prompt("hello").await;
        assert_eq!(session.wait(&first).await["finish_reason"], "end_turn");
        let events = session.events().await;
        assert_eq!(session.cancel().await, nothing, "after one");
        assert_eq!(session.cancel_run(&first).await, nothing, "a cancel of a finished run");
        assert_eq!(session.events().await, events);
        let second = session.prompt("hello").await;
        assert_eq!(session.wait(&second).await["finish_reason"], "end_turn");
    }
}

#[tokio::test]
async fn a_cancel_takes_an_empty_body_and_keeps_its_reason() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[sleep_forever()]).await;
    session.client.post(&session.agent_path("/cancel"), &json!({ "reason": "enough" })).await.expect(200);
    let requested = session.wait_for_run_event(&run, "run.cancel_requested").await;
    assert_eq!(requested.data["reason"], "enough");
    session.wait(&run).await;
    let again = session.prompt_script(&[sleep_forever()]).await;
    session.client.post(&session.agent_path("/cancel"), &json!({})).await.expect(200);
    assert_eq!(session.wait(&again).await["finish_reason"], "cancelled");
}

#[tokio::test]
async fn a_prompt_posted_while_a_cancelled_run_unwinds_runs_after_it() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "cancel_grace_s": 0.3 })).await;
    let dying = session.prompt_script(&[ignore_cancel(), say("x"), sleep_forever()]).await;
    session.wait_for_run_event(&dying, "text.delta").await;
    session.cancel().await;
    let next = session.prompt_script(&[say("next")]).await;
    assert_eq!(session.wait(&next).await["finish_reason"], "end_turn");
    assert_eq!(session.run(&dying).await["finish_reason"], "cancelled");
    no_error_was_raised(&session).await;
}

#[tokio::test]
async fn a_second_cancel_while_the_first_unwinds_leaves_one_end() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "cancel_grace_s": 0.3 })).await;
    let run = session.prompt_script(&[ignore_cancel(), say("x"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    for _ in 0..5 {
        session.cancel().await;
    }
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    no_error_was_raised(&session).await;
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
}

#[tokio::test]
async fn a_cancel_hits_the_runs_of_the_sessions_below_too() {
    let daemon = TestDaemon::start().await;
    let script = json!({ "agent": "script" });
    let top = daemon.session_with(script.clone()).await;
    let (below, beside) = (top.create_child(script.clone()).await, daemon.session("script").await);
    let deep = below.create_child(script).await;
    let mut runs = Vec::new();
    for session in [&top, &below, &deep, &beside] {
        let run = session.prompt_script(&[sleep_forever()]).await;
        session.wait_for_start(&run).await;
        runs.push(run);
    }
    top.cancel().await;
    for (session, run) in [&top, &below, &deep].into_iter().zip(&runs) {
        assert_eq!(session.wait(run).await["finish_reason"], "cancelled");
        no_error_was_raised(session).await;
    }
    assert_eq!(beside.run(&runs[3]).await["state"], "running");
    assert_eq!(
        deep.run_script(&[say("later")]).await["finish_reason"],
        "end_turn",
        "one accepted after it is not hit"
    );
}

#[tokio::test]
async fn a_cancel_of_an_idle_parent_hits_the_runs_below() {
    let daemon = TestDaemon::start().await;
    let top = daemon.session("script").await;
    let below = top.create_child(json!({ "agent": "script" })).await;
    let run = below.prompt_script(&[sleep_forever()]).await;
    below.wait_for_start(&run).await;
    top.cancel().await;
    assert_eq!(below.wait(&run).await["finish_reason"], "cancelled");
}

#[tokio::test]
async fn a_cancel_below_or_with_run_id_leaves_the_others_of_the_tree_alone() {
    let daemon = TestDaemon::start().await;
    let top = daemon.session("script").await;
    let (one, two) = (
        top.create_child(json!({ "agent": "script" })).await,
        top.create_child(json!({ "agent": "script" })).await,
    );
    let runs = [
        top.prompt_script(&[sleep_forever()]).await,
        one.prompt_script(&[sleep_forever()]).await,
        two.prompt_script(&[sleep_forever()]).await,
    ];
    for (session, run) in [&top, &one, &two].into_iter().zip(&runs) {
        session.wait_for_start(run).await;
    }
    one.cancel().await;
    assert_eq!(one.wait(&runs[1]).await["finish_reason"], "cancelled");
    top.cancel_run(&runs[0]).await;
    assert_eq!(top.wait(&runs[0]).await["finish_reason"], "cancelled");
    assert_eq!(two.run(&runs[2]).await["state"], "running");
}

#[tokio::test]
async fn a_cancel_of_a_parent_reaches_below_after_a_crash_too() {
    let mut daemon = TestDaemon::start().await;
    let top = daemon.session("script").await;
    let below = top.create_child(json!({ "agent": "script" })).await;
    let settings = [ignore_cancel(), say("x"), sleep_forever()];
    let (above, under) = (top.prompt_script(&settings).await, below.prompt_script(&settings).await);
    top.wait_for_run_event(&above, "text.delta").await;
    below.wait_for_run_event(&under, "text.delta").await;
    top.cancel().await;
    daemon.restart().await;
    assert_eq!(top.wait(&above).await["finish_reason"], "cancelled");
    assert_eq!(below.wait(&under).await["finish_reason"], "cancelled");
}
