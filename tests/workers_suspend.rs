//! Section 8, its end: a run that suspends itself waits for the sessions that it started, costs nothing meanwhile, and
//! is resumed once, with what became of them.

use qd_testkit::{Daemon, Home, Session, rules, script::*};
use serde_json::json;

/// A run that waits for a steer and then suspends itself, so that a test can give it children first.
async fn waits_to_suspend(session: &Session) -> String {
    let run = session.script(&[say("before "), await_steer(600_000), suspend(), say("after")]).await;
    session.seen_of(&run, "text.delta").await;
    run
}

/// Two children of a running run, each of which has a run that waits for a person.
async fn children(session: &Session) -> Vec<(Session, String, String)> {
    let mut children = Vec::new();
    for _ in 0..2 {
        let child = session.child(json!({ "agent": "script" })).await;
        let run = child.script(&[question("done?", &[]), say(" indeed")]).await;
        let ask = child.asked(&run).await;
        children.push((child, run, ask));
    }
    children
}

async fn is_suspended(session: &Session, run: &str) {
    session.seen_of(run, "run.suspended").await;
    assert_eq!(session.show().await["state"], "waiting");
    assert_eq!(session.show().await["busy"], true);
    assert_eq!(session.run(run).await["state"], "suspended");
    session.try_steer("hello?").await.refused(409, "not_running");
}

async fn resumes(session: &Session, run: &str, children: &[(Session, String, String)]) {
    let ended = session.wait(run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    let events = session.events().await;
    rules::check(&events);
    let resumed: Vec<_> = events.iter().filter(|event| event.is(run, "run.resumed")).collect();
    assert_eq!(resumed.len(), 1, "once, with the same run id");
    let results = resumed[0].data["children"].as_array().unwrap();
    assert_eq!(results.len(), children.len());
    for (child, _, _) in children {
        let result = results.iter().find(|result| result["session_id"] == child.id).unwrap();
        assert_eq!(result["finish_reason"], "end_turn");
        assert_eq!(result["text"], "yes indeed");
    }
    let suspended = events.iter().position(|event| event.is(run, "run.suspended")).unwrap();
    let resumed = events.iter().position(|event| event.is(run, "run.resumed")).unwrap();
    assert!(suspended < resumed);
}

#[tokio::test]
async fn it_is_resumed_once_when_every_session_that_it_started_has_ended() {
    let daemon = Daemon::start().await;
    let session = daemon.session("script").await;
    let run = waits_to_suspend(&session).await;
    let children = children(&session).await;
    session.steer("go").await;
    is_suspended(&session, &run).await;
    let behind = session.script(&[say("behind")]).await;
    daemon.client().answer(&children[0].2, &json!({ "value": "yes" })).await.expect(200);
    children[0].0.wait(&children[0].1).await;
    assert_eq!(session.run(&run).await["state"], "suspended", "one of two has ended");
    daemon.client().answer(&children[1].2, &json!({ "value": "yes" })).await.expect(200);
    assert_eq!(session.wait(&behind).await["text"], "behind");
    resumes(&session, &run, &children).await;
}

#[tokio::test]
async fn it_is_resumed_at_once_if_they_have_ended_already() {
    let daemon = Daemon::start().await;
    let session = daemon.session("script").await;
    let run = waits_to_suspend(&session).await;
    let children = children(&session).await;
    for (child, run, ask) in &children {
        daemon.client().answer(ask, &json!({ "value": "yes" })).await.expect(200);
        child.wait(run).await;
    }
    session.steer("go").await;
    resumes(&session, &run, &children).await;
}

#[tokio::test]
async fn it_is_resumed_once_although_the_daemon_dies_in_between() {
    let mut daemon = Daemon::start().await;
    let session = daemon.session("script").await;
    let run = waits_to_suspend(&session).await;
    let children = children(&session).await;
    session.steer("go").await;
    is_suspended(&session, &run).await;
    daemon.restart().await;
    is_suspended(&session, &run).await;
    daemon.client().answer(&children[0].2, &json!({ "value": "yes" })).await.expect(200);
    children[0].0.wait(&children[0].1).await;
    daemon.restart().await;
    daemon.client().answer(&children[1].2, &json!({ "value": "yes" })).await.expect(200);
    daemon.restart().await;
    resumes(&session, &run, &children).await;
}

#[tokio::test]
async fn it_is_resumed_although_its_worker_dies_in_between() {
    let daemon = Daemon::start().await;
    let session = daemon.session("script").await;
    let run = waits_to_suspend(&session).await;
    let children = children(&session).await;
    session.steer("go").await;
    is_suspended(&session, &run).await;
    let workers = daemon.client().get("/v1/workers").await.list();
    if let Some(worker) = workers.iter().find(|worker| worker["session_id"] == session.id) {
        let pid = u32::try_from(worker["pid"].as_u64().unwrap()).unwrap();
        qd_testkit::Process::find(pid).unwrap().kill9().await;
        session.seen("its loss", |event| event.kind == "worker.exited").await;
    }
    assert_eq!(session.run(&run).await["state"], "suspended", "it costs no process");
    for (_, _, ask) in &children {
        daemon.client().answer(ask, &json!({ "value": "yes" })).await.expect(200);
    }
    resumes(&session, &run, &children).await;
}

#[tokio::test]
async fn a_run_with_nothing_to_wait_for_is_an_error() {
    let daemon = Daemon::start().await;
    let session = daemon.session("script").await;
    // A session that was below it before the run is none that the run started.
    session.child(json!({ "agent": "echo" })).await;
    let ended = session.play(&[say("x"), suspend()]).await;
    assert_eq!(ended["finish_reason"], "error");
    assert_eq!(ended["error"]["code"], "nothing_to_wait_for");
    assert_eq!(session.play(&[say("fine")]).await["text"], "fine");
    rules::check(&session.events().await);
}

#[tokio::test]
async fn a_cancel_ends_it_and_its_children_at_once() {
    let daemon = Daemon::start().await;
    let session = daemon.session("script").await;
    let run = waits_to_suspend(&session).await;
    let children = children(&session).await;
    session.steer("go").await;
    is_suspended(&session, &run).await;
    let behind = session.script(&[say("behind")]).await;
    session.cancel_run(&run).await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert_eq!(session.wait(&behind).await["text"], "behind");
    for (child, run, _) in &children {
        assert_eq!(child.wait(run).await["finish_reason"], "cancelled");
        rules::check(&child.events().await);
    }
    assert_eq!(daemon.client().asks().await, [] as [serde_json::Value; 0]);
    rules::check(&session.events().await);
}

#[tokio::test]
async fn its_agent_is_put_to_rest_meanwhile_and_costs_no_process() {
    let home = Home::new();
    home.configure("idle_s = 1\n");
    let daemon = Daemon::start_in(home, |_| {}).await;
    let session = daemon.session("script").await;
    let run = waits_to_suspend(&session).await;
    let children = children(&session).await;
    session.steer("go").await;
    is_suspended(&session, &run).await;
    session.seen("its rest", |event| event.kind == "worker.exited").await;
    assert_eq!(session.show().await["state"], "waiting");
    for (child, run, ask) in &children {
        daemon.client().answer(ask, &json!({ "value": "yes" })).await.expect(200);
        child.wait(run).await;
    }
    resumes(&session, &run, &children).await;
}
