//! Steering: text for the running turn.

use qd_testkit::{TestDaemon, journal_rules, poll_until, script::*};
use serde_json::json;

#[tokio::test]
async fn a_steer_reaches_the_running_turn() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("waiting "), await_steer(20_000)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let steered = session.steer("to the left").await;
    assert_eq!(steered["run_id"], run);
    let ended = session.wait(&run).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["text"]),
        (&json!("end_turn"), &json!("waiting steered: to the left"))
    );
    let accepted = session.wait_for_run_event(&run, "steer.accepted").await;
    assert_eq!((&steered["seq"], &accepted.data["text"]), (&json!(accepted.seq), &json!("to the left")));
    let parts = session.messages().await[1]["parts"].clone();
    let steer = parts.as_array().unwrap().iter().find(|part| part["type"] == "steer");
    assert_eq!(steer.map(|part| &part["text"]), Some(&json!("to the left")), "{parts}");
    assert_eq!(session.runs().await.len(), 1);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_steer_to_a_starting_run_waits_for_its_start() {
    let daemon = TestDaemon::start().await;
    let settings = json!({ "agent": "script", "env": { "SCRIPT_READY_MS": "500" } });
    let session = daemon.session_with(settings).await;
    let run = session.prompt_script(&[await_steer(20_000)]).await;
    assert_eq!(session.show().await["state"], "starting");
    assert_eq!(session.steer("early").await["run_id"], run);
    assert_eq!(session.wait(&run).await["text"], "steered: early");
    let events = session.events().await;
    assert!(events.iter().all(|event| event.kind != "steer.missed"));
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_steer_that_the_turn_did_not_take_runs_next_as_a_prompt() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("busy"), sleep(400)]).await;
    let queued = session.prompt_script(&[say("queued before")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let words = steps(&[say("not lost")]);
    session.steer(&words).await;
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    session.wait(&queued).await;
    let missed = session.wait_for_event("steer.missed", |event| event.kind == "steer.missed").await;
    assert!(
        missed.seq < session.wait_for_run_event(&run, "run.finished").await.seq || missed.run_id.is_none()
    );
    let runs = session.runs().await;
    let became = runs.iter().find(|run| run["prompt"] == words).unwrap_or_else(|| panic!("{runs:?}"));
    let became = session.wait(became["id"].as_str().unwrap()).await;
    assert_eq!((&became["finish_reason"], &became["text"]), (&json!("end_turn"), &json!("not lost")));
    let start = async |run: &str| session.wait_for_run_event(run, "run.started").await.seq;
    assert!(start(became["id"].as_str().unwrap()).await < start(&queued).await, "it runs next");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_steer_is_lost_neither_by_an_error_nor_by_a_crash() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let words = |n: u8| steps(&[say(&format!("kept {n}"))]);
    let run = session.prompt_script(&[say("x"), sleep(300), fail("no")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.steer(&words(1)).await;
    session
        .wait_for_event("the steer's own run", |event| {
            event.data["text"] == "kept 1" && event.kind == "run.finished"
        })
        .await;
    let run = session.prompt_script(&[say("x"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.steer(&words(2)).await;
    daemon.home.kill_workers();
    session
        .wait_for_event("the steer's own run", |event| {
            event.data["text"] == "kept 2" && event.kind == "run.finished"
        })
        .await;
    assert_eq!(session.run(&run).await["finish_reason"], "interrupted");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_steer_without_a_run_is_409_not_running() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.try_steer("hello?").await.expect_refusal(409, "not_running");
    session.run_script(&[say("x")]).await;
    session.try_steer("hello?").await.expect_refusal(409, "not_running");
    assert!(session.events().await.iter().all(|event| event.kind != "steer.accepted"));
    assert_eq!(session.runs().await.len(), 1);
}

#[tokio::test]
async fn a_steer_to_an_agent_that_takes_none_is_409_steer_unsupported() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let run = session.prompt("__sleep_ms:600000 x").await;
    session.wait_for_start(&run).await;
    session.try_steer("faster").await.expect_refusal(409, "steer_unsupported");
    assert_eq!(session.run(&run).await["state"], "running");
}

#[tokio::test]
async fn several_steers_reach_the_turn_in_their_order() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("go "), await_steer(20_000), say(" "), await_steer(20_000)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.steer("one").await;
    session.steer("two").await;
    assert_eq!(session.wait(&run).await["text"], "go steered: one steered: two");
}

#[tokio::test]
async fn no_steer_is_said_when_none_came() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    assert_eq!(session.run_script(&[await_steer(20)]).await["text"], "no steer");
}

#[tokio::test]
async fn steers_that_nobody_takes_are_bounded_like_prompts_that_wait() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("busy"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let mut taken = 0;
    while session.try_steer("more").await.status == 202 {
        taken += 1;
        assert!(taken <= 101, "as many as may wait, and no more");
    }
    session.try_steer("more").await.expect_refusal(429, "queue_full");
    session.cancel().await;
    session.wait(&run).await;
    // Each of the steers is its own run now.
    poll_until("the last of them", async || (session.show().await["busy"] == false).then_some(())).await;
    journal_rules::check(&session.events().await);
}
