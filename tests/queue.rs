//! The queue of a session: positions, its limit, listing it, clearing it, and removing one run.

use qd_testkit::{TestDaemon, TestSession, journal_rules, script::*};
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
