//! Halt: prompts are accepted but nothing starts, in any workspace and across restarts.

use qd_testkit::{TestDaemon, journal_rules, script::*};
use serde_json::json;

#[tokio::test]
async fn while_halted_prompts_are_accepted_and_queued_but_nothing_starts_in_any_workspace() {
    let daemon = TestDaemon::start().await;
    let client = daemon.client();
    let here = daemon.session("script").await;
    let there = client.workspace(std::path::Path::new("/usr")).await.session("echo").await;
    assert_eq!(client.get("/v1/halt").await.expect(200)["halted"], false);
    let set = client.post("/v1/halt", &json!({ "reason": "fire drill" })).await.expect(200);
    assert_eq!((&set["halted"], &set["reason"]), (&json!(true), &json!("fire drill")));
    assert_eq!(client.get("/v1/halt").await.expect(200), set);
    let runs = [here.prompt_script(&[say("a")]).await, there.prompt("b").await];
    for (session, run) in [&here, &there].into_iter().zip(&runs) {
        let queued = session.wait_for_run_event(run, "run.queued").await;
        assert_eq!(queued.data["reason"], "halted");
        assert_eq!(session.run(run).await["state"], "queued");
        assert_eq!(session.show().await["busy"], true);
    }
    client.delete("/v1/halt").await.expect(200);
    for (session, run) in [&here, &there].into_iter().zip(&runs) {
        assert_eq!(session.wait(run).await["finish_reason"], "end_turn");
        let events = session.events().await;
        journal_rules::check(&events);
    }
    let lifted =
        client.stream("/v1/events?after=0").await.until("halt.lifted", |e| e.kind == "halt.lifted").await;
    let first = lifted.iter().find(|event| event.kind == "run.started");
    assert_eq!(first, None, "nothing starts before the halt is lifted");
}

#[tokio::test]
async fn live_runs_go_on_under_a_halt_but_the_next_of_the_queue_does_not_start() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let live = session.prompt_script(&[question("go on?", &[]), say("!")]).await;
    let next = session.prompt_script(&[say("next")]).await;
    let ask = session.wait_for_ask(&live).await;
    daemon.client().post_empty("/v1/halt").await.expect(200);
    session.client.answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    assert_eq!(session.wait(&live).await["text"], "yes!");
    assert_eq!(session.run(&next).await["state"], "queued");
    daemon.client().delete("/v1/halt").await.expect(200);
    assert_eq!(session.wait(&next).await["text"], "next");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_halt_with_cancel_cancels_live_runs() {
    let daemon = TestDaemon::start().await;
    let (one, two) = (daemon.session("script").await, daemon.session("echo").await);
    let runs = [one.prompt_script(&[sleep_forever()]).await, two.prompt("__sleep_ms:600000 x").await];
    one.wait_for_start(&runs[0]).await;
    two.wait_for_start(&runs[1]).await;
    daemon.client().post("/v1/halt", &json!({ "cancel": true })).await.expect(200);
    assert_eq!(one.wait(&runs[0]).await["finish_reason"], "cancelled");
    assert_eq!(two.wait(&runs[1]).await["finish_reason"], "cancelled");
}

#[tokio::test]
async fn a_halt_survives_a_restart() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    daemon.client().post("/v1/halt", &json!({ "reason": "still" })).await.expect(200);
    let run = session.prompt_script(&[say("x")]).await;
    daemon.restart().await;
    let halt = daemon.client().get("/v1/halt").await.expect(200);
    assert_eq!((&halt["halted"], &halt["reason"]), (&json!(true), &json!("still")));
    let later = session.prompt_script(&[say("y")]).await;
    assert_eq!(session.run(&run).await["state"], "queued");
    daemon.client().delete("/v1/halt").await.expect(200);
    assert_eq!(session.wait(&later).await["text"], "y");
    daemon.restart().await;
    assert_eq!(daemon.client().get("/v1/halt").await.expect(200)["halted"], false);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_queued_run_can_be_cancelled_under_a_halt() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    daemon.client().post_empty("/v1/halt").await.expect(200);
    let run = session.prompt_script(&[say("x")]).await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert!(session.events_of(&run).await.iter().all(|event| event.kind != "run.started"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_run_starts_between_halt_set_and_halt_lifted() {
    let daemon = TestDaemon::start().await;
    let mut posters = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let session = daemon.session("script").await;
        posters.spawn(async move {
            for _ in 0..20 {
                session.prompt_script(&[say("x")]).await;
            }
            session
        });
    }
    for _ in 0..5 {
        daemon.client().post_empty("/v1/halt").await.expect(200);
        daemon.client().delete("/v1/halt").await.expect(200);
    }
    let mut last = Vec::new();
    for session in posters.join_all().await {
        for run in session.runs().await {
            last.push(session.wait(run["id"].as_str().unwrap()).await);
        }
    }
    assert_eq!(last.len(), 160);
    daemon.client().post("/v1/halt", &json!({ "reason": "end" })).await.expect(200);
    let mut stream = daemon.client().stream("/v1/events?after=0").await;
    let all = stream.until("the last halt", |e| e.kind == "halt.set" && e.data["reason"] == "end").await;
    journal_rules::check(&all);
    let mut halted = false;
    for event in all {
        match event.kind.as_str() {
            "halt.set" => halted = true,
            "halt.lifted" => halted = false,
            "run.started" => assert!(!halted, "{event:?}"),
            _ => {}
        }
    }
}
