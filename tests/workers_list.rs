//! How workers are reported: `worker.started` and `worker.exited` without run ids, and `GET /v1/workers` while a worker
//! lives.

use qd_testkit::{ObservedProcess, TestDaemon, journal_rules, poll_until, script::*};
use serde_json::json;

use crate::workers_loss::{process_of, worker_of};

#[tokio::test]
async fn a_worker_is_announced_listed_and_said_to_be_gone() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    assert!(
        daemon.client().get("/v1/workers").await.list().is_empty(),
        "a session costs nothing until it is used"
    );
    let run = session.prompt_script(&[spawn_detached(&["sleep", "600"]), await_steer(600_000)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let worker = worker_of(&session).await;
    assert_eq!((&worker["session_id"], &worker["agent"]), (&json!(session.id), &json!("script")));
    assert!(worker["id"].as_str().unwrap().starts_with("wrk_"), "{worker}");
    let (started, lease) =
        (worker["started_at"].as_str().unwrap(), worker["lease_expires_at"].as_str().unwrap());
    assert!(started < lease, "{worker}");
    let process = process_of(&session).await;
    assert!(process.has_role("__worker"), "{process:?}");
    let listed = |name: &str| {
        let processes = worker["processes"].as_array().unwrap();
        processes.iter().find(|one| one["name"] == name).map(|one| one["pid"].as_u64().unwrap())
    };
    let below = qd_testkit::processes::descendants(process.pid);
    let find = |which: &dyn Fn(&ObservedProcess) -> bool| {
        below.iter().find(|one| which(one)).map(|one| u64::from(one.pid))
    };
    assert_eq!(listed("sleep"), find(&|one| one.args[0] == "sleep"));
    assert!(worker["processes"].as_array().unwrap().len() >= 2, "the agent and what it started: {worker}");
    assert!(process.args.len() <= 3, "the command line has only the role: {process:?}");

    session.steer("go").await;
    session.wait(&run).await;
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    let events = session.events().await;
    journal_rules::check(&events);
    let of_workers: Vec<_> = events.iter().filter(|event| event.kind.starts_with("worker.")).collect();
    let [began, ended] = of_workers[..] else { panic!("{of_workers:#?}") };
    assert_eq!((began.kind.as_str(), ended.kind.as_str()), ("worker.started", "worker.exited"));
    for event in of_workers {
        assert_eq!((&event.run_id, &event.data["worker_id"]), (&None, &worker["id"]));
    }
    assert_eq!(ended.data["reason"], "stopped");
    let place = |kind: &str| events.iter().position(|event| event.kind == kind).unwrap();
    assert!(place("worker.started") < place("run.started"));
    assert!(place("worker.exited") < place("session.closed"));
    assert!(daemon.client().get("/v1/workers").await.list().is_empty());
}

#[tokio::test]
async fn an_agent_that_fails_is_said_to_have_failed() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[exit(7)]).await;
    assert_eq!(session.wait(&run).await["error"]["exit_status"], 7);
    let exited = session.wait_for_event("its exit", |event| event.kind == "worker.exited").await;
    assert_eq!((&exited.data["reason"], &exited.data["error"]["exit_status"]), (&json!("failed"), &json!(7)));
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_worker_is_in_a_session_of_its_own_and_knows_no_terminal() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("x")]).await;
    let worker = process_of(&session).await;
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", worker.pid)).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    assert_eq!(fields[3], worker.pid.to_string(), "it leads its own session");
    assert_eq!(fields[4], "0", "no terminal controls it");
    let environ = std::fs::read(format!("/proc/{}/environ", worker.pid)).unwrap();
    assert!(!String::from_utf8_lossy(&environ).contains("secret"));
}

#[tokio::test]
async fn sessions_that_share_a_worker_share_it_from_the_first_moment_and_its_age_survives_the_daemon() {
    let mut daemon = TestDaemon::start().await;
    let mut sessions = Vec::new();
    for _ in 0..8 {
        sessions.push(daemon.session("echo").await);
    }
    let prompts = sessions.iter().map(|session| session.prompt("__sleep_ms:600000 x"));
    futures_util::future::join_all(prompts).await;
    let listed = poll_until("all workers", async || {
        let listed = daemon.client().get("/v1/workers").await.list();
        (listed.len() == sessions.len()).then_some(listed)
    })
    .await;
    assert_eq!(daemon.home.processes_with_role("__worker").len(), 1);
    daemon.restart().await;
    for session in &sessions {
        let before = listed.iter().find(|worker| worker["session_id"] == session.id).unwrap();
        assert_eq!(worker_of(session).await["started_at"], before["started_at"]);
    }
}
