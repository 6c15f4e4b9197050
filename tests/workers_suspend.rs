//! A suspended run waits for the sessions that it started, needs no process meanwhile, and is resumed once with their
//! results.

use qd_testkit::{TestDaemon, TestSession, journal_rules, poll_until, script::*};
use serde_json::json;

/// A run that waits for a steer and then suspends itself, so a test can create children first.
async fn waits_to_suspend(session: &TestSession) -> String {
    let run = session.prompt_script(&[say("before "), await_steer(600_000), suspend(), say("after")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    run
}

/// Two child sessions of a running run, each with a run that waits for a person.
async fn children(session: &TestSession) -> Vec<(TestSession, String, String)> {
    let mut children = Vec::new();
    for _ in 0..2 {
        let child = session.create_child(json!({ "agent": "script" })).await;
        let run = child.prompt_script(&[question("done?", &[]), say(" indeed")]).await;
        let ask = child.wait_for_ask(&run).await;
        children.push((child, run, ask));
    }
    children
}

async fn is_suspended(session: &TestSession, run: &str) {
    session.wait_for_run_event(run, "run.suspended").await;
    assert_eq!(session.show().await["state"], "waiting");
    assert_eq!(session.show().await["busy"], true);
    assert_eq!(session.run(run).await["state"], "suspended");
    session.try_steer("hello?").await.expect_refusal(409, "not_running");
}

/// A suspended run, and the children that it waits for.
async fn suspended_with_children(session: &TestSession) -> (String, Vec<(TestSession, String, String)>) {
    let run = waits_to_suspend(session).await;
    let children = children(session).await;
    session.steer("go").await;
    is_suspended(session, &run).await;
    (run, children)
}

async fn resumes(session: &TestSession, run: &str, children: &[(TestSession, String, String)]) {
    let ended = session.wait(run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    let events = session.events().await;
    journal_rules::check(&events);
    let resumed: Vec<_> = events.iter().filter(|event| event.is_of_run(run, "run.resumed")).collect();
    assert_eq!(resumed.len(), 1, "once, with the same run id");
    let results = resumed[0].data["children"].as_array().unwrap();
    assert_eq!(results.len(), children.len());
    for (child, _, _) in children {
        let result = results.iter().find(|result| result["session_id"] == child.id).unwrap();
        assert_eq!(result["finish_reason"], "end_turn");
        assert_eq!(result["text"], "yes indeed");
    }
    let suspended = events.iter().position(|event| event.is_of_run(run, "run.suspended")).unwrap();
    let resumed = events.iter().position(|event| event.is_of_run(run, "run.resumed")).unwrap();
    assert!(suspended < resumed);
}

#[tokio::test]
async fn it_is_resumed_once_when_every_session_that_it_started_has_ended() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let (run, children) = suspended_with_children(&session).await;
    let behind = session.prompt_script(&[say("behind")]).await;
    daemon.client().answer_ask(&children[0].2, &json!({ "value": "yes" })).await.expect(200);
    children[0].0.wait(&children[0].1).await;
    assert_eq!(session.run(&run).await["state"], "suspended", "one of two has ended");
    daemon.client().answer_ask(&children[1].2, &json!({ "value": "yes" })).await.expect(200);
    assert_eq!(session.wait(&behind).await["text"], "behind");
    resumes(&session, &run, &children).await;
}

#[tokio::test]
async fn it_is_resumed_at_once_if_they_have_ended_already() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = waits_to_suspend(&session).await;
    let children = children(&session).await;
    for (child, run, ask) in &children {
        daemon.client().answer_ask(ask, &json!({ "value": "yes" })).await.expect(200);
        child.wait(run).await;
    }
    session.steer("go").await;
    resumes(&session, &run, &children).await;
}

#[tokio::test]
async fn it_is_resumed_once_although_the_daemon_dies_in_between() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let (run, children) = suspended_with_children(&session).await;
    daemon.restart().await;
    is_suspended(&session, &run).await;
    daemon.client().answer_ask(&children[0].2, &json!({ "value": "yes" })).await.expect(200);
    children[0].0.wait(&children[0].1).await;
    daemon.restart().await;
    daemon.client().answer_ask(&children[1].2, &json!({ "value": "yes" })).await.expect(200);
    daemon.restart().await;
    resumes(&session, &run, &children).await;
}

#[tokio::test]
async fn it_is_resumed_although_its_worker_dies_in_between() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let (run, children) = suspended_with_children(&session).await;
    let workers = daemon.client().get("/v1/workers").await.list();
    if let Some(worker) = workers.iter().find(|worker| worker["session_id"] == session.id) {
        let pid = u32::try_from(worker["pid"].as_u64().unwrap()).unwrap();
        qd_testkit::ObservedProcess::find(pid).unwrap().kill9().await;
        session.wait_for_event("its loss", |event| event.kind == "worker.exited").await;
    }
    assert_eq!(session.run(&run).await["state"], "suspended", "it needs no process");
    for (_, _, ask) in &children {
        daemon.client().answer_ask(ask, &json!({ "value": "yes" })).await.expect(200);
    }
    resumes(&session, &run, &children).await;
}

#[tokio::test]
async fn a_run_with_nothing_to_wait_for_is_an_error() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    // A child session that existed before the run was not started by the run.
    session.create_child(json!({ "agent": "echo" })).await;
    let ended = session.run_script(&[say("x"), suspend()]).await;
    assert_eq!(ended["finish_reason"], "error");
    assert_eq!(ended["error"]["code"], "nothing_to_wait_for");
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_cancel_ends_it_and_its_children_at_once() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let (run, children) = suspended_with_children(&session).await;
    let behind = session.prompt_script(&[say("behind")]).await;
    session.cancel_run(&run).await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert_eq!(session.wait(&behind).await["text"], "behind");
    for (child, run, _) in &children {
        assert_eq!(child.wait(run).await["finish_reason"], "cancelled");
        journal_rules::check(&child.events().await);
    }
    assert_eq!(daemon.client().pending_asks().await, [] as [serde_json::Value; 0]);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn it_leaves_no_process_of_its_own_and_none_of_an_earlier_run_is_ended() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[spawn_detached(&["sleep", "600"])]).await;
    let run = session
        .prompt_script(&[spawn_detached(&["sleep", "601"]), await_steer(600_000), suspend(), say("after")])
        .await;
    let sleeping = async |seconds: &str| {
        poll_until("the process", async || {
            let mut processes = daemon.home.agent_processes().into_iter();
            processes.find(|process| process.args.iter().any(|arg| arg == seconds))
        })
        .await
    };
    let (server, sleeper) = (sleeping("600").await, sleeping("601").await);
    let _children = children(&session).await;
    session.steer("go").await;
    is_suspended(&session, &run).await;
    assert!(!sleeper.is_alive(), "a run that waits has no processes");
    session.cancel_run(&run).await;
    let ended = session.wait_for_run_event(&run, "run.finished").await;
    assert_eq!(ended.data["finish_reason"], "cancelled");
    assert_eq!(ended.data["processes"]["survivors"], 0);
    assert!(server.is_alive(), "what an earlier run left on purpose stays");
}

#[tokio::test]
async fn its_agent_is_put_to_rest_meanwhile_and_costs_no_process() {
    let daemon = TestDaemon::start_with_settings("idle_s = 1\n").await;
    let session = daemon.session("script").await;
    let (run, children) = suspended_with_children(&session).await;
    session.wait_for_event("its rest", |event| event.kind == "worker.exited").await;
    assert_eq!(session.show().await["state"], "waiting");
    for (child, run, ask) in &children {
        daemon.client().answer_ask(ask, &json!({ "value": "yes" })).await.expect(200);
        child.wait(run).await;
    }
    resumes(&session, &run, &children).await;
}
