//! The mode of a session's agent, and how full its context is.

use qd_testkit::{TestDaemon, TestEvent, TestSession, script::*};
use serde_json::{Value, json};

use crate::workers_loss::process_of;

#[tokio::test]
async fn a_mode_is_given_with_the_session_and_changed_for_the_next_prompt() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "mode": "plan" })).await;
    assert_eq!(session.show().await["mode"], "plan");
    assert_eq!(reported_mode(&session).await, "plan");

    assert_eq!(session.patch(json!({ "mode": "default" })).await["mode"], "default");
    let events = session.events().await;
    let changes: Vec<_> = events.iter().filter(|event| event.kind == "mode.changed").collect();
    assert_eq!(changes.len(), 1);
    let change = &changes[0].data;
    assert_eq!(
        (&change["mode"], &change["by"], &changes[0].run_id),
        (&json!("default"), &json!("user"), &None)
    );
    assert_eq!(reported_mode(&session).await, "default");
    session.patch(json!({ "mode": "default" })).await;
    assert_eq!(count_changes(&session).await, 1, "nothing has changed");
}

#[tokio::test]
async fn a_mode_survives_the_agent_and_the_daemon() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "mode": "plan" })).await;
    assert_eq!(reported_mode(&session).await, "plan");
    process_of(&session).await.kill9().await;
    session.wait_for_event("the worker's end", |event| event.kind == "worker.exited").await;
    assert_eq!(reported_mode(&session).await, "plan", "another process of the agent");
    session.patch(json!({ "mode": "default" })).await;
    daemon.restart().await;
    let session = session.with_client(daemon.client());
    assert_eq!(session.show().await["mode"], "default");
    assert_eq!(reported_mode(&session).await, "default", "the same process, which another daemon prompts");
}

#[tokio::test]
async fn a_mode_that_cannot_be_chosen_is_refused_and_says_why() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for (agent, mode, why) in [
        ("echo", "plan", "echo does not support `mode`"),
        ("acp:cat", "plan", "does not support `mode`"),
        ("script", "plain", "script has no mode `plain`; choose one of default, plan"),
        (
            "script",
            "yolo",
            "script acts without asking in mode `yolo`, so the session's policy could not hold",
        ),
    ] {
        let answer = workspace.try_session(json!({ "agent": agent, "mode": mode, "policy": "allow" })).await;
        assert_eq!(answer.expect_refusal(400, "unsupported_setting")["setting"], "mode");
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains(why), "{answer}");
    }
    let session = workspace.session("script").await;
    let answer = daemon.client().patch(&session.path(""), &json!({ "mode": "yolo" })).await;
    answer.expect_refusal(400, "unsupported_setting");
    assert_eq!(session.show().await["mode"], json!(null));
}

#[tokio::test]
async fn an_agent_that_switches_its_mode_shows_it_and_keeps_it() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.run_script(&[mode("plan"), say("done")]).await;
    let run = run["id"].as_str().unwrap();
    let events = session.events_of(run).await;
    let changed = events.iter().find(|event| event.kind == "mode.changed").unwrap();
    assert_eq!(changed.data, json!({ "mode": "plan", "by": "agent" }));
    assert_eq!(session.show().await["mode"], "plan");
    process_of(&session).await.kill9().await;
    session.wait_for_event("the worker's end", |event| event.kind == "worker.exited").await;
    assert_eq!(reported_mode(&session).await, "plan", "a new process is put into it again");
    assert_eq!(count_changes(&session).await, 1);
}

#[tokio::test]
async fn an_agent_that_switches_to_a_mode_without_asking_is_switched_back() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "mode": "plan" })).await;
    let run = session.run_script(&[mode("yolo"), say("done")]).await;
    let events = session.events_of(run["id"].as_str().unwrap()).await;
    let is_notice = |event: &TestEvent| {
        event.kind == "notice.shown"
            && event.data["text"].as_str().unwrap().contains("switched back to `plan`")
    };
    assert!(events.iter().any(is_notice), "{events:?}");
    assert_eq!(session.show().await["mode"], "plan");
    assert_eq!(reported_mode(&session).await, "plan");
    assert_eq!(count_changes(&session).await, 0);
}

#[tokio::test]
async fn the_context_of_an_agent_is_shown_as_it_fills() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    assert_eq!(session.show().await["context"], json!(null));
    let run = session.run_script(&[usage(1000, 200, 0.0), say("x"), usage(500, 0, 0.0)]).await;
    let events = session.events_of(run["id"].as_str().unwrap()).await;
    let reports: Vec<&Value> =
        events.iter().filter(|event| event.kind == "context.updated").map(|event| &event.data).collect();
    let used: Vec<&Value> = reports.iter().map(|report| &report["used"]).collect();
    assert_eq!(used, [&json!(1200), &json!(1700)]);
    assert_eq!(&session.show().await["context"], *reports.last().unwrap());
}

#[tokio::test]
async fn the_command_line_gives_and_changes_a_mode() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[config()]);
    let run = ["run", "--agent", "script", "--title", "planner", "--mode", "plan", &script];
    assert!(daemon.qd(&run).await.ok().contains("mode=plan"));
    daemon.qd(&["set", "planner", "mode=default"]).await.ok();
    let shown = daemon.qd(&["run", "--session", "planner", &script]).await.ok();
    assert!(!shown.contains("mode="), "{shown}");
    assert!(daemon.qd(&["logs", "planner"]).await.ok().contains("mode set to default"));
    let refused = daemon.qd(&["set", "planner", "mode=yolo"]).await;
    assert!(refused.stderr.contains("without asking"), "{refused:?}");
}

/// The mode in which the scripted agent runs its next prompt.
async fn reported_mode(session: &TestSession) -> String {
    let run = session.run_script(&[config()]).await;
    let text = run["text"].as_str().unwrap().to_owned();
    text.split_once("mode=").map_or_else(|| "default".to_owned(), |(_, mode)| mode.to_owned())
}

async fn count_changes(session: &TestSession) -> usize {
    session.events().await.iter().filter(|event| event.kind == "mode.changed").count()
}
