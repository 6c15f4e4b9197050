//! Answers, memory, permissions, questions and failures.

use qd_testkit::model::INPUT_TOKENS;
use qd_testkit::{RealAgent, TestEvent, poll_until};
use serde_json::json;

use super::shown::Behaviour;
use super::{
    RealAgentTest, adoption, answer, assert_ended, ended, failures, permission, say, subsessions, tools,
};

pub(super) async fn scene(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session(json!({})).await;
    let work = test.daemon.home.project_dir();

    let hello = say(&session, "hello").await;
    assert_ended(&hello, "end_turn");
    let text = hello["text"].as_str().unwrap();
    assert!(text.starts_with("ECHO[hello]"), "{hello:#}");
    assert_eq!(text.matches("ECHO[hello]").count(), 1, "once: {text}");
    if test.about["cost"] != "nothing" {
        assert!(hello["usage"]["input_tokens"].as_u64().unwrap() >= 100, "{hello:#}");
    }
    assert!(session.show().await["agent_session_id"].is_string());

    let recall = say(&session, "RECALL").await;
    assert!(recall["text"].as_str().unwrap().contains("hello"), "it remembers: {recall:#}");
    test.shows(Behaviour::Answers);

    let url = test.model.url();
    let path = say(&session, &format!("/etc/hosts is a path, {url} an address, a-key-of-nobody a key")).await;
    assert_ended(&path, "end_turn");
    let text = path["text"].as_str().unwrap();
    assert!(text.contains("/etc/hosts is a path"), "{path:#}");
    test.shows(Behaviour::SlashPrompt);
    // The address is in a variable of the agent too, but it is no secret.
    assert!(text.contains(&format!("{url} an address")), "{path:#}");
    if cli == RealAgent::Opencode {
        test.lacks(Behaviour::HidesKey, "its key is in its own settings, which are not read");
    } else {
        assert!(!text.contains("a-key-of-nobody"), "{path:#}");
        test.shows(Behaviour::HidesKey);
    }

    // Allowed.
    let made = work.join("made.txt");
    let run = session.prompt(&format!("TOOL:run:echo made > {}", made.display())).await;
    let ask = permission(&session, &run).await;
    assert!(ask["input"].to_string().contains("made.txt"), "{ask}");
    assert!(!made.exists());
    answer(&session, &ask, json!({ "decision": "allow_once" })).await;
    let allowed = ended(&session, &run).await;
    assert_ended(&allowed, "end_turn");
    assert_eq!(std::fs::read_to_string(&made).unwrap(), "made\n");
    let events = session.events_of(&run).await;
    let has_command = |event: &TestEvent| {
        event.kind == "tool.started" && event.data["input"].to_string().contains("made.txt")
    };
    assert!(events.iter().any(has_command), "{}", super::describe_events(&events));
    assert!(events.iter().any(|event| event.kind == "tool.finished"), "{}", super::describe_events(&events));
    assert!(events.iter().any(|event| event.kind == "ask.delivered"), "{}", super::describe_events(&events));
    test.shows(Behaviour::Allowed);
    // The call of the tool, and the answer after it.
    assert_eq!(allowed["usage"]["input_tokens"], 2 * INPUT_TOKENS, "{allowed:#}");
    test.shows(Behaviour::CountsCalls);

    tools::check_files(&test, &session).await;
    tools::check_mcp(&test, &session).await;

    // Denied, and the reason reaches the model.
    let denied = work.join("denied.txt");
    let run = session.prompt(&format!("TOOL:run:echo no > {}", denied.display())).await;
    let ask = permission(&session, &run).await;
    answer(&session, &ask, json!({ "decision": "deny", "reason": "not-on-a-monday" })).await;
    assert_ended(&ended(&session, &run).await, "end_turn");
    let after = say(&session, "after").await;
    assert_ended(&after, "end_turn");
    assert!(!denied.exists());
    let recalled = say(&session, "RECALL").await;
    let journal: String = session.events().await.iter().map(|event| event.data.to_string()).collect();
    let reached = journal.contains("last=") && model_received(&test, "not-on-a-monday")
        || recalled["text"].as_str().unwrap().contains("not-on-a-monday")
        || model_repeated_reason(&session.events_of(&run).await);
    assert!(reached, "the reason reaches the model: {recalled:#}");
    test.shows(Behaviour::Denied);

    if test.can("questions") {
        let run = session.prompt("TOOL:ask").await;
        let ask = session.wait_for_run_event(&run, "ask.opened").await.data;
        assert_eq!(ask["kind"], "question", "{ask}");
        assert_eq!(ask["options"], json!(["Red", "Blue"]), "{ask}");
        answer(&session, &ask, json!({ "value": "Blue" })).await;
        let asked = ended(&session, &run).await;
        assert_ended(&asked, "end_turn");
        assert!(asked["text"].as_str().unwrap().contains("Blue"), "the model gets the answer: {asked:#}");
        test.shows(Behaviour::Questions);
    } else {
        test.lacks(
            Behaviour::Questions,
            "it has no tool for this, or not in the way in which it is driven here",
        );
    }

    let failed = say(&session, "ERR:400").await;
    assert_ended(&failed, "error");
    assert!(failed["error"]["message"].as_str().unwrap().contains("400"), "{failed:#}");
    let again = say(&session, "well again").await;
    assert_ended(&again, "end_turn");
    assert!(again["text"].as_str().unwrap().contains("ECHO[well again]"), "{again:#}");
    test.shows(Behaviour::FailedCall);
    failures::check_truncation(&test, &session).await;
    subsessions::check_subsessions(&test, &session).await;
    session.patch(json!({ "policy": "allow" })).await;
    let failed = say(&session, "ERRAFTER:400 TOOL:plain:echo hi").await;
    assert_ended(&failed, "error");
    assert!(failed["error"]["message"].as_str().unwrap().contains("400"), "{failed:#}");
    test.shows(Behaviour::FailedAfterTool);

    if let Some(reason) = adoption::why_not_adoptable(cli) {
        test.lacks(Behaviour::Adopted, reason);
    }
    let phoned = test.model.proxied_hosts();
    let harmless = |host: &String| cli == RealAgent::Opencode && host.contains("npm");
    assert!(phoned.iter().all(harmless), "no other server is called: {phoned:?}");
    session.close().await;
    poll_until("the agent to be gone", async || test.daemon.home.agent_processes().is_empty().then_some(()))
        .await;
}

/// Whether any request to the model contained these words.
fn model_received(test: &RealAgentTest, words: &str) -> bool {
    test.model.turns().iter().any(|seen| seen.texts.iter().any(|text| text.contains(words)))
}

/// Whether the model got the reason as the result of a tool, which it repeats.
fn model_repeated_reason(events: &[TestEvent]) -> bool {
    let text: String = events
        .iter()
        .filter(|event| event.kind == "text.delta")
        .filter_map(|event| event.data["text"].as_str().map(str::to_owned))
        .collect();
    text.contains("not-on-a-monday")
}
