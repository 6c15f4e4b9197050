//! Cancels: in the middle of text, during a tool call, with an open ask, and before the agent knows of its turn.

use qd_testkit::model::sleeper_name;
use qd_testkit::{RealAgent, TestSession, poll_until, processes};
use serde_json::json;

use super::shown::Behaviour;
use super::{RealAgentTest, answer, assert_ended, ended, permission, say};

/// How often an immediate cancel is tried.
const TRIES: usize = 20;
/// How often a cancel at the end of a turn is tried.
const LATE_TRIES: usize = 6;

pub(super) async fn scene(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session(json!({})).await;
    let work = test.daemon.home.project_dir();
    assert_ended(&say(&session, "hello").await, "end_turn");

    // In the middle of text.
    let run = session.prompt("SLOW:60 words").await;
    session.wait_for_event("its words", |event| event.is_of_run(&run, "text.delta")).await;
    session.cancel().await;
    assert_ended(&ended(&session, &run).await, "cancelled");
    assert!(!test.requests_with("SLOW:60 words").is_empty());
    test.check_dropped("SLOW:60 words").await;
    test.shows(Behaviour::CancelText);

    // During a tool call.
    let run = session.prompt("TOOL:sleep:500").await;
    let sleeps = || {
        let name = sleeper_name("500");
        processes::all_processes().into_iter().find(|one| one.args.first().is_some_and(|arg| *arg == name))
    };
    // Some agents ask for permission before they run the tool.
    let mut opened = session.stream("&after=0").await;
    let asleep = async {
        poll_until("the tool", async || sleeps()).await;
    };
    tokio::select! {
        events = opened.until("an ask", |event| event.is_of_run(&run, "ask.opened")) => {
            let ask = events.last().unwrap().data.clone();
            answer(&session, &ask, json!({ "decision": "allow_once" })).await;
        }
        () = asleep => {}
    }
    let tool = poll_until("the tool", async || sleeps()).await;
    session.cancel().await;
    let run = ended(&session, &run).await;
    assert_ended(&run, "cancelled");
    assert!(!tool.is_alive(), "no process of the turn is left");
    let finished = session.events().await;
    let finished = finished.iter().rev().find(|event| event.kind == "run.finished").unwrap();
    assert_eq!(finished.data["processes"]["survivors"], 0);
    test.shows(Behaviour::CancelTool);

    // With an open ask.
    let file = work.join("never.txt");
    let run = session.prompt(&format!("TOOL:run:echo never > {}", file.display())).await;
    let ask = permission(&session, &run).await;
    session.cancel().await;
    assert_ended(&ended(&session, &run).await, "cancelled");
    let path = format!("/v1/asks/{}", ask["id"].as_str().unwrap());
    assert_eq!(session.client.get(&path).await.expect(200)["state"], "withdrawn");
    test.shows(Behaviour::CancelAsk);

    // A cancel that hits nothing does not affect the next run.
    assert_eq!(session.cancel().await["idle"], true);
    let after = say(&session, "after all that").await;
    assert_ended(&after, "end_turn");
    assert!(after["text"].as_str().unwrap().contains("ECHO[after all that]"), "{after:#}");
    assert!(!file.exists());
    check_late_cancels(&test, &session).await;
    check_cancels_at_once(&test, &session).await;
}

/// Cancels that meet the end of their turn: each run ends in one way or the other, and the next one is not affected.
async fn check_late_cancels(test: &RealAgentTest, session: &TestSession) {
    for n in 0..LATE_TRIES {
        let run = session.prompt(&format!("late-{n}-")).await;
        // The answer is short, so that the turn ends while the cancel is on its way.
        session.wait_for_event("its words", |event| event.is_of_run(&run, "text.delta")).await;
        session.cancel().await;
        let late = ended(session, &run).await;
        assert!(["end_turn", "cancelled"].iter().any(|reason| late["finish_reason"] == *reason), "{late:#}");
        let next = say(session, &format!("after-{n}-")).await;
        assert_ended(&next, "end_turn");
        assert!(next["text"].as_str().unwrap().contains(&format!("ECHO[after-{n}-]")), "{next:#}");
    }
    test.shows(Behaviour::CancelLate);
}

/// Cancels right after the prompt, again and again: none is missed, and none hits the next run.
async fn check_cancels_at_once(test: &RealAgentTest, session: &TestSession) {
    for n in 0..TRIES {
        let words = format!("SLOW:60 try-{n}-");
        let run = session.prompt(&words).await;
        session.cancel().await;
        assert_ended(&ended(session, &run).await, "cancelled");
        test.check_dropped(&words).await;
        // Each answer belongs to its own prompt.
        let next = say(session, &format!("next-{n}-")).await;
        assert_ended(&next, "end_turn");
        let text = next["text"].as_str().unwrap();
        assert!(text.contains(&format!("ECHO[next-{n}-]")) && text.matches("ECHO[").count() == 1, "{next:#}");
    }
    let events = session.events().await;
    let started = events.iter().filter(|event| event.kind == "worker.started").count();
    // Copilot stops responding once it has missed a cancel, and is killed after the grace period.
    assert!(
        started == 1 || test.cli == RealAgent::Copilot,
        "no cancel cost the agent its life: {}",
        super::describe_events(&events)
    );
    test.shows(Behaviour::CancelAtOnce);
}
