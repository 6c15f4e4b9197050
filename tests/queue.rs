//! The queue of a session: positions, its limit, listing it, clearing it, and removing or moving one run.

use qd_testkit::{TestDaemon, TestResponse, TestSession, journal_rules, script::*};
use serde_json::json;

/// A session whose active run never ends.
async fn stuck(daemon: &TestDaemon) -> (TestSession, String) {
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[sleep_forever()]).await;
    session.wait_for_start(&run).await;
    (session, run)
}

#[tokio::test]
async fn the_queue_shows_what_waits_with_its_place_from_1() {
    let daemon = TestDaemon::start().await;
    let (session, _) = stuck(&daemon).await;
    assert!(session.queue().await.is_empty(), "the active run does not wait");
    for place in 1..=3 {
        let receipt = session.try_prompt(&format!("prompt {place}")).await.expect(202);
        assert_eq!((&receipt["position"], &receipt["state"]), (&json!(place), &json!("queued")));
    }
    let queue = session.queue().await;
    assert_eq!(queue.len(), 3);
    for (place, entry) in (1..).zip(&queue) {
        assert_eq!(
            (&entry["position"], &entry["prompt"]),
            (&json!(place), &json!(format!("prompt {place}")))
        );
        assert!(entry["run_id"].is_string() && entry["accepted_at"].is_string(), "{entry}");
    }
    assert_eq!(session.show().await["queued"], 3);
}

#[tokio::test]
async fn a_run_that_waits_is_queued_because_the_session_is_busy() {
    let daemon = TestDaemon::start().await;
    let (session, _) = stuck(&daemon).await;
    let waiting = session.prompt("later").await;
    let queued = session.wait_for_run_event(&waiting, "run.queued").await;
    assert_eq!(queued.data["reason"], "busy");
}

#[tokio::test]
async fn places_move_up_when_one_before_is_removed() {
    let daemon = TestDaemon::start().await;
    let (session, _) = stuck(&daemon).await;
    let runs = [session.prompt("a").await, session.prompt("b").await, session.prompt("c").await];
    let answer = session.client.delete(&session.agent_path(&format!("/queue/{}", runs[0]))).await;
    assert!(answer.status < 300, "{answer}");
    let queue = session.queue().await;
    let places: Vec<_> = queue.iter().map(|entry| (&entry["run_id"], &entry["position"])).collect();
    assert_eq!(places, [(&json!(runs[1]), &json!(1)), (&json!(runs[2]), &json!(2))]);
    assert_eq!(session.wait(&runs[0]).await["finish_reason"], "cancelled");
}

#[tokio::test]
async fn clearing_the_queue_ends_what_waits_and_not_what_runs() {
    let daemon = TestDaemon::start().await;
    let (session, active) = stuck(&daemon).await;
    let waiting = [session.prompt("a").await, session.prompt("b").await];
    let answer = session.client.delete(&session.agent_path("/queue")).await;
    assert!(answer.status < 300, "{answer}");
    for run in &waiting {
        assert_eq!(session.wait(run).await["finish_reason"], "cancelled");
    }
    assert!(session.queue().await.is_empty());
    assert_eq!(session.run(&active).await["state"], "running");
}

#[tokio::test]
async fn a_run_that_does_not_wait_cannot_be_removed() {
    let daemon = TestDaemon::start().await;
    let (session, active) = stuck(&daemon).await;
    let remove = async |run: &str| session.client.delete(&session.agent_path(&format!("/queue/{run}"))).await;
    remove(&active).await.expect_refusal(409, "not_queued");
    remove("run_nobody").await.expect_refusal(404, "not_found");
    assert_eq!(session.run(&active).await["state"], "running");
}

#[tokio::test]
async fn over_100_waiting_is_429_queue_full_with_retry_after_and_a_known_run_id_is_still_answered() {
    let daemon = TestDaemon::start().await;
    let (session, active) = stuck(&daemon).await;
    let mut first = None;
    for n in 1..=100 {
        let receipt = session.try_prompt_as(&format!("r{n}"), "x").await.expect(202);
        assert_eq!(receipt["position"], n);
        first.get_or_insert(receipt);
    }
    let refused = session.try_prompt("one too many").await;
    refused.expect_refusal(429, "queue_full");
    assert!(
        refused.header("retry-after").is_some_and(|seconds| seconds.parse::<u64>().is_ok()),
        "{refused:?}"
    );
    assert_eq!(session.try_prompt_as("r1", "x").await.expect(202), first.unwrap());
    session.try_prompt_as("r1", "y").await.expect_refusal(409, "run_id_conflict");
    session.cancel_run("r50").await;
    session.wait("r50").await;
    assert_eq!(session.try_prompt_as("fits", "x").await.expect(202)["position"], 100);
    session.cancel_run(&active).await;
    assert_eq!(session.wait("fits").await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn the_queue_survives_a_restart_in_its_order() {
    let mut daemon = TestDaemon::start().await;
    let (session, active) = stuck(&daemon).await;
    let waiting = [session.prompt("a").await, session.prompt("b").await, session.prompt("c").await];
    daemon.restart().await;
    session.cancel_run(&active).await;
    for run in &waiting {
        assert_eq!(session.wait(run).await["finish_reason"], "end_turn");
    }
    assert_eq!(session.wait(&active).await["finish_reason"], "cancelled");
    let events = session.events().await;
    journal_rules::check(&events);
    let started = events.iter().filter(|event| event.kind == "run.started");
    let order: Vec<_> = started.map(|event| event.run_id.clone().unwrap()).collect();
    assert_eq!(order, [&[active], &waiting[..]].concat());
}

async fn move_run(session: &TestSession, run: &str, before: Option<&str>) -> TestResponse {
    let path = session.agent_path(&format!("/queue/{run}"));
    session.client.patch(&path, &json!({ "before": before })).await
}

async fn queued_ids(session: &TestSession) -> Vec<String> {
    session.queue().await.iter().map(|entry| entry["run_id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_moved_run_keeps_its_place_after_kill_9_and_runs_in_the_new_order() {
    let mut daemon = TestDaemon::start().await;
    let (session, active) = stuck(&daemon).await;
    let [a, b, c] = [session.prompt("a").await, session.prompt("b").await, session.prompt("c").await];
    let moved = move_run(&session, &c, Some(&a)).await.expect(200);
    assert_eq!(moved, json!({ "run_id": c, "position": 1 }));
    assert_eq!(move_run(&session, &a, None).await.expect(200)["position"], 3);
    let order = [c.clone(), b.clone(), a.clone()];
    daemon.kill9().await;
    daemon.start_again().await;
    assert_eq!(queued_ids(&session).await, order);
    let event = session.wait_for_run_event(&c, "run.moved").await;
    assert_eq!((&event.data["before"], &event.data["position"]), (&json!(a), &json!(1)));
    session.cancel_run(&active).await;
    session.wait(&a).await;
    let events = session.events().await;
    journal_rules::check(&events);
    let started = events.iter().filter(|event| event.kind == "run.started");
    let started: Vec<_> = started.map(|event| event.run_id.clone().unwrap()).collect();
    assert_eq!(started, [&[active], &order[..]].concat());
}

#[tokio::test]
async fn only_queued_runs_can_be_moved_and_a_refused_move_changes_nothing() {
    let daemon = TestDaemon::start().await;
    let (session, active) = stuck(&daemon).await;
    let [a, b] = [session.prompt("a").await, session.prompt("b").await];
    let elsewhere = daemon.session("echo").await;
    let foreign = elsewhere.prompt("x").await;
    move_run(&session, &active, None).await.expect_refusal(409, "not_queued");
    move_run(&session, &b, Some(&active)).await.expect_refusal(409, "not_queued");
    move_run(&session, "run_nobody", None).await.expect_refusal(404, "not_found");
    move_run(&session, &b, Some("run_nobody")).await.expect_refusal(404, "not_found");
    move_run(&session, &b, Some(&foreign)).await.expect_refusal(404, "not_found");
    let path = session.agent_path(&format!("/queue/{b}"));
    session.client.patch(&path, &json!({ "after": a })).await.expect_refusal(400, "invalid_request");
    assert_eq!(queued_ids(&session).await, [a, b]);
    assert!(session.events().await.iter().all(|event| event.kind != "run.moved"));
}

#[tokio::test]
async fn a_move_that_is_repeated_with_its_key_moves_once() {
    let daemon = TestDaemon::start().await;
    let (session, _) = stuck(&daemon).await;
    let [a, b] = [session.prompt("a").await, session.prompt("b").await];
    let path = session.agent_path(&format!("/queue/{b}"));
    let keyed = session.client.with_key("k");
    let first = keyed.patch(&path, &json!({ "before": a })).await.expect(200);
    move_run(&session, &b, None).await.expect(200);
    assert_eq!(keyed.patch(&path, &json!({ "before": a })).await.expect(200), first);
    assert_eq!(queued_ids(&session).await, [a.clone(), b], "the repeat did not move it again");
    keyed.patch(&path, &json!({})).await.expect_refusal(409, "idempotency_conflict");
}

#[tokio::test]
async fn qd_queue_moves_a_run_to_a_place() {
    let daemon = TestDaemon::start().await;
    let (session, active) = stuck(&daemon).await;
    let [a, b, c] = [session.prompt("a").await, session.prompt("b").await, session.prompt("c").await];
    let id = session.id.as_str();
    let moved = daemon.qd(&["queue", id, "--move", &c, "--to", "1"]).await.ok();
    assert_eq!(moved, format!("{c} moved to place 1\n"));
    assert_eq!(queued_ids(&session).await, [&c, &a, &b].map(Clone::clone));
    daemon.qd(&["queue", id, "--move", &c, "--to", "2"]).await.ok();
    assert_eq!(queued_ids(&session).await, [&a, &c, &b].map(Clone::clone));
    let moved = daemon.qd(&["--json", "queue", id, "--move", &a, "--to", "99"]).await.json();
    assert_eq!(moved, json!({ "run_id": a, "position": 3 }));
    assert_eq!(queued_ids(&session).await, [c, b, a.clone()]);
    for wrong in [&["--move", &a][..], &["--to", "1"], &["--move", &a, "--to", "0"]] {
        assert_eq!(daemon.qd(&[&["queue", id], wrong].concat()).await.code, Some(2), "{wrong:?}");
    }
    let refused = daemon.qd(&["queue", id, "--move", &active, "--to", "1"]).await;
    assert!(refused.code == Some(1) && refused.stderr.contains("does not wait in the queue"), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_of_many_clients_run_in_the_order_of_their_seqs() {
    let daemon = TestDaemon::start().await;
    let (session, active) = stuck(&daemon).await;
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..40 {
        let session = session.clone();
        clients.spawn(async move { session.try_prompt(&format!("p{n}")).await.expect(202) });
    }
    let mut receipts = clients.join_all().await;
    receipts.sort_by_key(|receipt| receipt["seq"].as_u64());
    let places: Vec<_> = receipts.iter().map(|receipt| receipt["position"].as_u64().unwrap()).collect();
    assert_eq!(places, (1..=40).collect::<Vec<_>>());
    session.cancel_run(&active).await;
    session.wait(receipts[39]["run_id"].as_str().unwrap()).await;
    let events = session.events().await;
    journal_rules::check(&events);
    let started: Vec<_> =
        events.iter().filter(|e| e.kind == "run.started").map(|e| json!(e.run_id)).collect();
    assert_eq!(started[1..], receipts.iter().map(|receipt| receipt["run_id"].clone()).collect::<Vec<_>>());
}
