//! Limits on time, turns and money. No test measures time: if a limit must have passed, the test waits for another run
//! that reaches the same limit.

use qd_testkit::{TestDaemon, journal_rules, script::*};
use serde_json::json;

#[tokio::test]
async fn a_run_over_its_timeout_ends_as_timeout_and_the_next_one_runs() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "run_timeout_s": 0.2 })).await;
    let slow = session.run_script(&[say("so far"), sleep_forever()]).await;
    assert_eq!((&slow["finish_reason"], &slow["text"]), (&json!("timeout"), &json!("so far")));
    assert_eq!(session.run_script(&[say("quick")]).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_agent_that_ignores_the_stop_of_its_timeout_is_killed_and_the_run_ends_as_timeout() {
    let daemon = TestDaemon::start().await;
    let limits = json!({ "agent": "script", "run_timeout_s": 0.2, "cancel_grace_s": 0.2 });
    let session = daemon.session_with(limits).await;
    assert_eq!(session.run_script(&[ignore_cancel(), sleep_forever()]).await["finish_reason"], "timeout");
    assert_eq!(session.run_script(&[say("fine")]).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn a_timeout_counts_from_the_start_of_a_run_and_not_from_its_place_in_the_queue() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "run_timeout_s": 1.0 })).await;
    let mut runs = Vec::new();
    for _ in 0..4 {
        runs.push(session.prompt_script(&[sleep(400)]).await);
    }
    for run in &runs {
        assert_eq!(session.wait(run).await["finish_reason"], "end_turn");
    }
}

#[tokio::test]
async fn waiting_for_a_person_is_not_run_time() {
    let daemon = TestDaemon::start().await;
    let limits = json!({ "agent": "script", "run_timeout_s": 0.7 });
    let (patient, clock) = (daemon.session_with(limits.clone()).await, daemon.session_with(limits).await);
    let run = patient.prompt_script(&[ask_bash("make"), say(" and done")]).await;
    let ask = patient.wait_for_ask(&run).await;
    assert_eq!(
        clock.run_script(&[sleep_forever()]).await["finish_reason"],
        "timeout",
        "the limit has passed meanwhile"
    );
    patient.client.answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    let ended = patient.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("allowed and done")));
}

#[tokio::test]
async fn time_runs_again_after_the_answer() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "run_timeout_s": 0.4 })).await;
    let run = session.prompt_script(&[ask_bash("make"), sleep_forever()]).await;
    let ask = session.wait_for_ask(&run).await;
    session.client.answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    assert_eq!(session.wait(&run).await["finish_reason"], "timeout");
}

#[tokio::test]
async fn a_run_over_its_turns_ends_as_max_turns() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "max_turns": 2 })).await;
    let call = || tool("Read", json!({}), "x");
    assert_eq!(session.run_script(&[call(), call(), say("ok")]).await["finish_reason"], "end_turn");
    let over = session.run_script(&[call(), call(), call(), sleep_forever()]).await;
    assert_eq!(over["finish_reason"], "max_turns");
    assert_eq!(
        session.run_script(&[call(), call()]).await["finish_reason"],
        "end_turn",
        "each run counts anew"
    );
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_budget_trips_in_the_middle_of_a_turn_and_later_runs_end_so_at_once_until_patch_raises_it() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "budget_usd": 1.0 })).await;
    assert_eq!(session.run_script(&[cost(0.5)]).await["finish_reason"], "end_turn");
    let over = session.run_script(&[cost(0.75), sleep_forever()]).await;
    assert_eq!(over["finish_reason"], "budget_exceeded");
    let refused = session.run_script(&[say("never")]).await;
    assert_eq!(
        (&refused["finish_reason"], &refused["started_at"]),
        (&json!("budget_exceeded"), &json!(null))
    );
    session.patch(json!({ "budget_usd": 5.0 })).await;
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_budget_stop_that_meets_the_end_of_its_turn_does_not_reach_the_next_run() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "budget_usd": 1.0 })).await;
    let spend_and_end = [vec![cost(10.0)], vec![ignore_cancel(), cost(10.0), sleep(20), say("done anyway")]];
    for (spent, steps) in (1..=20).zip(spend_and_end.iter().cycle()) {
        let over = session.run_script(steps).await;
        let reason = over["finish_reason"].as_str().unwrap();
        assert!(["end_turn", "budget_exceeded"].contains(&reason), "{over:#}");
        session.patch(json!({ "budget_usd": 10.0 * f64::from(spent) + 5.0 })).await;
        let next = session.run_script(&[say("untouched")]).await;
        assert_eq!(
            (&next["finish_reason"], &next["text"]),
            (&json!("end_turn"), &json!("untouched")),
            "{next:#}"
        );
    }
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn runs_that_wait_behind_one_that_trips_the_budget_end_so_too() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "budget_usd": 1.0 })).await;
    let first = session.prompt_script(&[question("spend?", &[]), cost(2.0), sleep_forever()]).await;
    let second = session.prompt_script(&[say("never")]).await;
    let ask = session.wait_for_ask(&first).await;
    session.client.answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    for run in [&first, &second] {
        assert_eq!(session.wait(run).await["finish_reason"], "budget_exceeded");
    }
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_budget_counts_the_sessions_below_and_ends_every_live_run_of_the_tree() {
    let daemon = TestDaemon::start().await;
    let top = daemon.session_with(json!({ "agent": "script", "budget_usd": 1.0 })).await;
    let one = top.create_child(json!({ "agent": "script" })).await;
    let two = one.create_child(json!({ "agent": "script" })).await;
    assert_eq!(top.run_script(&[cost(0.5)]).await["finish_reason"], "end_turn");
    let above = top.prompt_script(&[sleep_forever()]).await;
    let beside = one.prompt_script(&[sleep_forever()]).await;
    top.wait_for_start(&above).await;
    one.wait_for_start(&beside).await;
    let spender = two.prompt_script(&[cost(0.75), sleep_forever()]).await;
    for (session, run) in [(&two, &spender), (&one, &beside), (&top, &above)] {
        assert_eq!(session.wait(run).await["finish_reason"], "budget_exceeded");
        journal_rules::check(&session.events().await);
    }
    assert_eq!(two.run_script(&[say("never")]).await["finish_reason"], "budget_exceeded");
    top.patch(json!({ "budget_usd": 10.0 })).await;
    assert_eq!(two.run_script(&[say("again")]).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn a_budget_of_a_session_below_leaves_the_one_above_alone() {
    let daemon = TestDaemon::start().await;
    let top = daemon.session("script").await;
    let below = top.create_child(json!({ "agent": "script", "budget_usd": 0.5 })).await;
    let above = top.prompt_script(&[sleep_forever()]).await;
    top.wait_for_start(&above).await;
    assert_eq!(below.run_script(&[cost(1.0), sleep_forever()]).await["finish_reason"], "budget_exceeded");
    assert_eq!(top.run(&above).await["state"], "running");
}

#[tokio::test]
async fn a_budget_is_remembered_across_a_restart() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "budget_usd": 1.0 })).await;
    assert_eq!(session.run_script(&[cost(2.0), sleep_forever()]).await["finish_reason"], "budget_exceeded");
    daemon.restart().await;
    assert_eq!(session.run_script(&[say("never")]).await["finish_reason"], "budget_exceeded");
    session.patch(json!({ "budget_usd": null })).await;
    assert_eq!(session.run_script(&[say("free")]).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn a_limit_that_makes_no_sense_is_refused() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for (name, value) in [
        ("budget_usd", json!(-1)),
        ("run_timeout_s", json!(-0.5)),
        ("run_timeout_s", json!("soon")),
        ("cancel_grace_s", json!(-1)),
        ("max_turns", json!(-1)),
        ("max_turns", json!(1.5)),
    ] {
        let answer = workspace.try_session(json!({ "agent": "script", name: value })).await;
        assert_eq!(answer.status, 400, "{name} {value}: {answer}");
    }
}
