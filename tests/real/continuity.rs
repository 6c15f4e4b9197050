//! Steers, and what survives: the agent survives its daemon, the conversation survives its agent.

use qd_testkit::{RealAgent, TestSession};
use serde_json::json;

use super::shown::Behaviour;
use super::{RealAgentTest, assert_ended, ended, say};
use crate::workers_loss::process_of;

pub(super) async fn scene(cli: RealAgent) {
    let mut test = RealAgentTest::new(cli).await;
    let session = test.session(json!({ "policy": "allow" })).await;
    // Many words, so that the first turn costs more than all others.
    assert_ended(&say(&session, "BURST:2000 first of all").await, "end_turn");
    let conversation = session.show().await["agent_session_id"].clone();

    let run = session.prompt("TOOL:sleep:3").await;
    session.wait_for_run_event(&run, "tool.started").await;
    if test.can("steers") {
        session.steer("and-turn-left").await;
        let steered = ended(&session, &run).await;
        assert_ended(&steered, "end_turn");
        let events = session.events().await;
        let taken = events.iter().any(|event| event.kind == "steer.taken");
        let missed = events.iter().any(|event| event.kind == "steer.missed");
        assert!(taken != missed, "it is one of the two: {}", super::describe_events(&events));
        test.model
            .wait_for("the steer", |seen| seen.texts.iter().any(|text| text.contains("and-turn-left")))
            .await;
        test.shows(Behaviour::Steered);
    } else {
        session.try_steer("and-turn-left").await.expect_refusal(409, "steer_unsupported");
        assert_ended(&ended(&session, &run).await, "end_turn");
        test.lacks(Behaviour::Steered, "it takes no message while it works; the steer is refused");
    }

    // The daemon dies in the middle of text, and none of it is lost or doubled.
    let run = session.prompt("SLOW:4 through-it-all").await;
    session.wait_for_event("its words", |event| event.is_of_run(&run, "text.delta")).await;
    test.daemon.restart().await;
    let session = session.with_client(test.daemon.client());
    let through = ended(&session, &run).await;
    assert_ended(&through, "end_turn");
    let text = through["text"].as_str().unwrap();
    let words: Vec<&str> = text.split_whitespace().filter(|word| word.starts_with("tok")).collect();
    let wanted: Vec<String> = (0..words.len()).map(|n| format!("tok{n}")).collect();
    assert!(words == wanted && words.len() > 10 && text.contains("SLOWEND"), "{through:#}");
    test.shows(Behaviour::SurvivesDaemon);

    // The worker dies in the middle of text, and the conversation is resumed. What it has cost is not billed again.
    let before = spent(&test, &session).await;
    let run = session.prompt("SLOW:60 cut-short").await;
    session.wait_for_event("its words", |event| event.is_of_run(&run, "text.delta")).await;
    process_of(&session).await.kill9().await;
    assert_ended(&ended(&session, &run).await, "interrupted");
    test.check_dropped("SLOW:60 cut-short").await;
    let recall = say(&session, "RECALL").await;
    assert_ended(&recall, "end_turn");
    assert!(recall["text"].as_str().unwrap().contains("first of all"), "it remembers: {recall:#}");
    assert_eq!(session.show().await["agent_session_id"], conversation, "under the same name");
    test.shows(Behaviour::Resumes);
    let after = spent(&test, &session).await;
    assert!(before > 0.0 && after > before && after - before < before / 2.0, "{before} and then {after}");
    test.shows(Behaviour::BilledOnce);
}

/// What the session has used: money if the agent reports it, else tokens of output.
async fn spent(test: &RealAgentTest, session: &TestSession) -> f64 {
    let key = if test.about["cost"] == "money" { "cost_usd" } else { "output_tokens" };
    session.show().await["usage"][key].as_f64().unwrap()
}
