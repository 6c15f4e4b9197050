//! What a 202 means, who owns a run, and what a run id is. The order of a run's events is in `run_events.rs`, the queue
//! in `queue.rs`.

use qd_testkit::{TestDaemon, base64, journal_rules, script::*};
use serde_json::json;

#[tokio::test]
async fn a_202_means_that_the_prompt_is_in_the_journal() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let receipt = session.try_prompt("__sleep_ms:600000 still here").await.expect(202);
    daemon.restart().await;
    let run = receipt["run_id"].as_str().unwrap();
    assert_eq!(session.run(run).await["prompt"], "__sleep_ms:600000 still here");
    let accepted = session.wait_for_run_event(run, "run.accepted").await;
    assert_eq!(receipt["seq"], accepted.seq);
}

#[tokio::test]
async fn a_receipt_has_run_id_state_position_and_seq() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let receipt = session.try_prompt("__sleep_ms:600000 x").await.expect(202);
    assert!(receipt["run_id"].as_str().unwrap().starts_with("run_"), "{receipt}");
    assert_eq!((&receipt["state"], &receipt["position"]), (&json!("accepted"), &json!(0)));
    assert!(receipt["seq"].as_u64().unwrap() > 0);
    let second = session.try_prompt("y").await.expect(202);
    assert_eq!((&second["state"], &second["position"]), (&json!("queued"), &json!(1)));
    assert!(second["seq"].as_u64() > receipt["seq"].as_u64());
}

#[tokio::test]
async fn no_client_that_leaves_ends_a_run() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let watcher = session.stream("").await;
    let run = session.prompt_script(&[say_times("word ", 20, 10)]).await;
    session.wait_for_start(&run).await;
    drop(watcher);
    let body =
        json!({ "session_id": session.id, "prompt": steps(&[say("hidden")]), "run_id": "left" }).to_string();
    let request = format!(
        "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{body}",
        session.workspace_path("/agent"),
        body.len()
    );
    assert!(daemon.client().exchange_raw(request.as_bytes()).await.starts_with("HTTP/1.1 202"));
    assert_eq!(session.wait(&run).await["text"], "word ".repeat(20));
    assert_eq!(session.wait("left").await["text"], "hidden");
}

#[tokio::test]
async fn one_run_of_a_session_is_active_at_a_time_and_the_others_wait_in_order() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let mut runs = Vec::new();
    for n in 0..8 {
        runs.push(session.prompt_script(&[sleep(10), say(&n.to_string())]).await);
    }
    session.wait(runs.last().unwrap()).await;
    let events = session.events().await;
    journal_rules::check(&events);
    let ends = events.iter().filter(|event| event.kind == "run.finished");
    assert_eq!(ends.map(|event| event.run_id.clone().unwrap()).collect::<Vec<_>>(), runs);
}

#[tokio::test]
async fn runs_of_two_sessions_do_not_wait_for_each_other() {
    let daemon = TestDaemon::start().await;
    let (stuck, free) = (daemon.session("script").await, daemon.session("script").await);
    let run = stuck.prompt_script(&[sleep_forever()]).await;
    stuck.wait_for_start(&run).await;
    assert_eq!(free.run_script(&[say("through")]).await["text"], "through");
    assert_eq!(stuck.run(&run).await["state"], "running");
}

#[tokio::test]
async fn the_same_run_id_with_the_same_words_answers_the_first_receipt_and_runs_once() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let prompt = steps(&[sleep(20), say("once")]);
    let first = session.try_prompt_as("mine", &prompt).await.expect(202);
    assert_eq!(first["run_id"], "mine");
    assert_eq!(session.try_prompt_as("mine", &prompt).await.expect(202), first, "while the run is live");
    session.wait("mine").await;
    assert_eq!(session.try_prompt_as("mine", &prompt).await.expect(202), first, "after its end");
    assert_eq!(session.runs().await.len(), 1);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_repeated_run_with_attachments_is_known_by_them() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let with = |content: &str| {
        let file = json!({ "name": "a.txt", "mime": "text/plain", "data": base64(content.as_bytes()) });
        json!({ "prompt": "look", "run_id": "mine", "attachments": [file] })
    };
    let first = session.post_run(&with("one")).await.expect(202);
    assert_eq!(session.post_run(&with("one")).await.expect(202), first);
    session.post_run(&with("two")).await.expect_refusal(409, "run_id_conflict");
    session.try_prompt_as("mine", "look").await.expect_refusal(409, "run_id_conflict");
}

#[tokio::test]
async fn the_same_run_id_with_anything_else_is_a_conflict() {
    let mut daemon = TestDaemon::start().await;
    let (session, other) = (daemon.session("echo").await, daemon.session("echo").await);
    session.try_prompt_as("mine", "a").await.expect(202);
    session.try_prompt_as("mine", "b").await.expect_refusal(409, "run_id_conflict");
    other.try_prompt_as("mine", "a").await.expect_refusal(409, "run_id_conflict");
    session.wait("mine").await;
    daemon.restart().await;
    session.try_prompt_as("mine", "b").await.expect_refusal(409, "run_id_conflict");
    other.try_prompt_as("mine", "a").await.expect_refusal(409, "run_id_conflict");
    assert!(other.runs().await.is_empty());
}

#[tokio::test]
async fn a_run_id_is_one_run_of_the_whole_daemon_across_workspaces() {
    let daemon = TestDaemon::start().await;
    let here = daemon.session("echo").await;
    let elsewhere = daemon.client().workspace(std::path::Path::new("/usr")).await.session("echo").await;
    here.try_prompt_as("mine", "a").await.expect(202);
    elsewhere.try_prompt_as("mine", "a").await.expect_refusal(409, "run_id_conflict");
}

#[tokio::test]
async fn a_run_id_is_answered_again_after_a_restart() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let first = session.try_prompt_as("mine", "hello").await.expect(202);
    let ended = session.wait("mine").await;
    daemon.restart().await;
    assert_eq!(session.try_prompt_as("mine", "hello").await.expect(202), first);
    assert_eq!(session.run("mine").await, ended);
    journal_rules::check(&session.events().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_id_that_twenty_clients_race_for_is_one_run() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let mut racers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let session = session.clone();
        racers.spawn(async move { session.try_prompt_as("mine", "go").await.expect(202) });
    }
    let receipts = racers.join_all().await;
    assert!(receipts.windows(2).all(|pair| pair[0] == pair[1]), "{receipts:?}");
    session.wait("mine").await;
    journal_rules::check(&session.events().await);
    assert_eq!(session.runs().await.len(), 1);
}

#[tokio::test]
async fn a_run_id_is_1_to_128_of_its_characters_and_begins_with_a_letter_or_digit() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    for good in ["a", "7", "A.b:c-d_e", &"x".repeat(128)] {
        assert_eq!(session.try_prompt_as(good, "x").await.expect(202)["run_id"], good);
        session.wait(good).await;
    }
    for bad in ["", "_a", "-a", ".a", ":a", "a b", "a/b", "ä", "a\n", &"x".repeat(129)] {
        let answer = session.try_prompt_as(bad, "x").await;
        assert_eq!(answer.status, 400, "{bad:?}: {answer}");
    }
    assert_eq!(session.runs().await.len(), 4);
}

#[tokio::test]
async fn a_run_that_ends_however_it_ends_lets_the_next_one_start() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "run_timeout_s": 0.4 })).await;
    let mut runs = vec![
        (session.prompt_script(&[sleep(50), fail("no")]).await, "error"),
        (session.prompt_script(&[exit(3)]).await, "error"),
        (session.prompt_script(&[stop("refused")]).await, "refused"),
        (session.prompt_script(&[stop("max_tokens")]).await, "max_tokens"),
        (session.prompt_script(&[stop("max_turns")]).await, "max_turns"),
        (session.prompt_script(&[sleep_forever()]).await, "timeout"),
        (session.prompt_script(&[ignore_cancel(), sleep(800)]).await, "timeout"),
        (session.prompt_script(&[say("fine")]).await, "end_turn"),
    ];
    let cancelled = session.prompt_script(&[say("never")]).await;
    session.cancel_run(&cancelled).await;
    runs.push((cancelled, "cancelled"));
    runs.push((session.prompt_script(&[say("last")]).await, "end_turn"));
    for (run, reason) in &runs {
        assert_eq!(session.wait(run).await["finish_reason"], *reason);
    }
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_run_whose_worker_was_killed_is_interrupted_and_the_queue_goes_on() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let lost = session.prompt_script(&[say("half"), sleep_forever()]).await;
    let waiting = session.prompt_script(&[say("whole")]).await;
    session.wait_for_run_event(&lost, "text.delta").await;
    daemon.home.kill_workers();
    assert_eq!(session.wait(&lost).await["finish_reason"], "interrupted");
    assert_eq!(session.wait(&waiting).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_run_without_run_started_is_simply_started_after_a_crash() {
    let mut daemon = TestDaemon::start().await;
    let settings = json!({ "agent": "script", "env": { "SCRIPT_READY_MS": "1500" } });
    let session = daemon.session_with(settings).await;
    let run = session.prompt_script(&[say("after all")]).await;
    daemon.restart().await;
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("after all")));
    journal_rules::check(&session.events().await);
}
