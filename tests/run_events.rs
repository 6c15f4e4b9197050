//! The order of a run's events, its messages and parts, its text, what comes after its end, and when a session is busy.
//! Also the built-in agents. `journal_rules::check` checks the order for every run here.

use qd_testkit::{TestDaemon, TestSession, journal_rules, script::*};
use serde_json::{Value, json};

async fn kinds(session: &TestSession, run: &str) -> Vec<String> {
    let events = session.events().await;
    journal_rules::check(&events);
    events.into_iter().filter(|e| e.run_id.as_deref() == Some(run)).map(|e| e.kind).collect()
}

#[tokio::test]
async fn a_run_that_ends_well_has_its_events_in_order() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("hi")]).await;
    let ended = session.wait(&run).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["text"], &ended["error"]),
        (&json!("end_turn"), &json!("hi"), &json!(null))
    );
    let kinds = kinds(&session, &run).await;
    assert_eq!(kinds.iter().filter(|kind| *kind == "run.started").count(), 1);
    assert!(kinds.contains(&"text.delta".to_owned()));
}

#[tokio::test]
async fn a_run_that_fails_has_its_events_in_order_and_says_why() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let failed = session.run_script(&[say("so far"), fail("the model is on fire")]).await;
    assert_eq!(failed["finish_reason"], "error");
    assert!(failed["error"]["message"].as_str().unwrap().contains("the model is on fire"), "{failed}");
    assert_eq!(failed["text"], "so far");
    kinds(&session, failed["id"].as_str().unwrap()).await;
}

#[tokio::test]
async fn a_run_whose_agent_exits_is_an_error_with_the_exit_status() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let failed = session.run_script(&[exit(7)]).await;
    assert_eq!(failed["finish_reason"], "error");
    assert_eq!(failed["error"]["exit_status"], 7, "{failed}");
    kinds(&session, failed["id"].as_str().unwrap()).await;
    assert_eq!(session.run_script(&[say("alive")]).await["text"], "alive");
}

#[tokio::test]
async fn a_run_cancelled_before_it_started_has_its_events_in_order_and_no_start() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let first = session.prompt_script(&[sleep_forever()]).await;
    let second = session.prompt_script(&[say("never")]).await;
    session.cancel_run(&second).await;
    let ended = session.wait(&second).await;
    assert_eq!((&ended["finish_reason"], &ended["started_at"]), (&json!("cancelled"), &json!(null)));
    session.cancel().await;
    session.wait(&first).await;
    assert!(!kinds(&session, &second).await.contains(&"run.started".to_owned()));
}

#[tokio::test]
async fn a_run_removed_from_the_queue_has_its_events_in_order_and_no_start() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let first = session.prompt_script(&[sleep_forever()]).await;
    let second = session.prompt_script(&[say("never")]).await;
    let removed = session.client.delete(&session.agent_path(&format!("/queue/{second}"))).await;
    assert!(removed.status < 300, "{removed}");
    assert_eq!(session.wait(&second).await["finish_reason"], "cancelled");
    session.cancel().await;
    session.wait(&first).await;
    assert!(!kinds(&session, &second).await.contains(&"run.started".to_owned()));
}

#[tokio::test]
async fn every_other_finish_reason_of_an_agent_is_kept() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    for reason in ["max_tokens", "max_turns", "refused"] {
        assert_eq!(session.run_script(&[say("x"), stop(reason)]).await["finish_reason"], reason);
    }
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn the_text_of_a_run_is_the_agents_result_or_else_all_its_text_joined() {
    let daemon = TestDaemon::start().await;
    let (echo, script) = (daemon.session("echo").await, daemon.session("script").await);
    let run = echo.prompt("one two three").await;
    assert_eq!(echo.wait(&run).await["text"], "echo: one two three");
    let streamed = journal_rules::run_text(&echo.events().await, &run);
    assert_eq!(streamed.trim_end(), "one two three", "what was streamed is the prompt");
    let joined =
        script.run_script(&[say("one "), tool("Read", json!({}), "x"), say("two"), say(" three")]).await;
    assert_eq!(joined["text"], "one two three");
    let echoed = script.prompt("not a script").await;
    assert!(script.wait(&echoed).await["text"].as_str().unwrap().contains("not a script"));
}

#[tokio::test]
async fn echo_streams_word_by_word_and_can_wait_first() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let run = session.prompt("__sleep_ms:20 a b").await;
    assert_eq!(session.wait(&run).await["text"], "echo: a b");
    assert_eq!(journal_rules::run_text(&session.events().await, &run).trim_end(), "a b");
}

#[tokio::test]
async fn a_message_holds_the_parts_of_its_run_in_order() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session
        .run_script(&[
            think("hm"),
            say("a"),
            say("b"),
            tool("Read", json!({ "path": "x" }), "content"),
            failing_tool("Bash", "boom"),
            plan("do it", "pending"),
            say("c"),
        ])
        .await;
    let messages = session.messages().await;
    let [user, assistant] = &messages[..] else { panic!("{messages:?}") };
    assert_eq!((&user["role"], &user["run_id"]), (&json!("user"), &run["id"]));
    assert_eq!(user["parts"][0]["text"], run["prompt"]);
    assert_eq!(
        (&assistant["role"], &assistant["finish"]["reason"]),
        (&json!("assistant"), &json!("end_turn"))
    );
    let parts = assistant["parts"].as_array().unwrap();
    let types: Vec<_> = parts.iter().map(|part| part["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["thought", "text", "tool", "tool", "plan", "text"]);
    assert_eq!(
        (&parts[0]["text"], &parts[1]["text"], &parts[5]["text"]),
        (&json!("hm"), &json!("ab"), &json!("c"))
    );
    assert_eq!(
        (&parts[2]["name"], &parts[2]["input"]["path"], &parts[2]["is_error"]),
        (&json!("Read"), &json!("x"), &json!(false))
    );
    assert_eq!((&parts[3]["name"], &parts[3]["is_error"]), (&json!("Bash"), &json!(true)));
}

#[tokio::test]
async fn a_message_of_a_live_run_has_no_finish_yet() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("so far"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let messages = session.messages().await;
    assert_eq!((&messages[1]["finish"], &messages[1]["parts"][0]["text"]), (&json!(null), &json!("so far")));
}

#[tokio::test]
async fn a_tool_call_has_one_id_from_start_to_finish() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[tool("Read", json!({ "path": "x" }), "out"), failing_tool("Bash", "boom")]).await;
    let events = session.events().await;
    let calls = |kind: &str| -> Vec<Value> {
        events.iter().filter(|e| e.kind == kind).map(|e| e.data["call_id"].clone()).collect()
    };
    assert_eq!(calls("tool.started").len(), 2);
    assert_eq!(calls("tool.started"), calls("tool.finished"));
    assert_ne!(calls("tool.started")[0], calls("tool.started")[1]);
    let started = events.iter().find(|e| e.kind == "tool.started").unwrap();
    assert_eq!((&started.data["name"], &started.data["input"]["path"]), (&json!("Read"), &json!("x")));
}

#[tokio::test]
async fn late_words_have_no_run_id_but_after_run_and_are_nobodys_text() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.run_script(&[late("too late"), say("in time")]).await;
    let id = run["id"].as_str().unwrap();
    let late = session.wait_for_event("late words", |event| event.data["after_run"] == id).await;
    assert_eq!((&late.run_id, &late.data["text"]), (&None, &json!("too late")));
    assert!(late.seq > session.wait_for_run_event(id, "run.finished").await.seq);
    assert_eq!(session.run(id).await["text"], "in time");
    let next = session.run_script(&[say("next")]).await;
    assert_eq!(next["text"], "next", "late text does not become text of the next run");
    let messages = session.messages().await;
    assert!(!json!(messages).to_string().contains("\"text\":\"too late\""), "{messages:?}");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn usage_is_an_increment_and_adds_up_in_run_and_session() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.run_script(&[usage(10, 2, 0.25), usage(5, 1, 0.5)]).await;
    let expected = json!({ "input_tokens": 15, "output_tokens": 3, "cost_usd": 0.75 });
    assert_eq!(run["usage"], expected);
    assert_eq!(session.show().await["usage"], expected);
    session.run_script(&[usage(1, 1, 0.25)]).await;
    let total = json!({ "input_tokens": 16, "output_tokens": 4, "cost_usd": 1.0 });
    assert_eq!(session.show().await["usage"], total);
}

#[tokio::test]
async fn once_run_finished_is_visible_the_session_takes_the_next_prompt_at_once() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let mut stream = session.stream("").await;
    for last in [say("well"), fail("badly"), exit(1), stop("refused")] {
        let run = session.prompt_script(&[last]).await;
        stream.until_run(&run, "run.finished").await;
        let shown = session.show().await;
        assert_eq!((&shown["busy"], &shown["state"]), (&json!(false), &json!("idle")));
        let receipt = session.try_prompt(&steps(&[say("next")])).await.expect(202);
        assert_eq!((&receipt["position"], &receipt["state"]), (&json!(0), &json!("accepted")));
        session.wait(receipt["run_id"].as_str().unwrap()).await;
    }
}

#[tokio::test]
async fn a_session_is_busy_from_accept_until_nothing_is_queued() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let busy = async || session.show().await["busy"].clone();
    assert_eq!(busy().await, false);
    let mut stream = session.stream("").await;
    let first = session.prompt_script(&[question("go on?", &[])]).await;
    assert_eq!(busy().await, true, "at once after the 202");
    let second = session.prompt_script(&[question("and on?", &[])]).await;
    for run in [&first, &second] {
        let ask = session.wait_for_ask(run).await;
        assert_eq!(session.show().await["state"], "waiting");
        session.client.answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
        stream.until_run(run, "run.finished").await;
        assert_eq!(busy().await, run == &first);
    }
}

#[tokio::test]
async fn a_session_and_a_run_show_what_they_do() {
    let daemon = TestDaemon::start().await;
    let settings = json!({ "agent": "script", "env": { "SCRIPT_READY_MS": "400" } });
    let session = daemon.session_with(settings).await;
    assert_eq!(session.show().await["state"], "idle");
    let run = session.prompt_script(&[question("well?", &[])]).await;
    let starting = session.show().await;
    assert_eq!((&starting["state"], &starting["busy"]), (&json!("starting"), &json!(true)));
    assert_eq!(session.run(&run).await["state"], "accepted");
    let ask = session.wait_for_ask(&run).await;
    assert_eq!(
        (session.show().await["state"].clone(), session.run(&run).await["state"].clone()),
        (json!("waiting"), json!("waiting"))
    );
    session.client.answer_ask(&ask, &json!({ "value": "fine" })).await.expect(200);
    let ended = session.wait(&run).await;
    assert_eq!((&ended["state"], &ended["text"]), (&json!("finished"), &json!("fine")));
    for time in ["accepted_at", "started_at", "finished_at"] {
        assert!(ended[time].is_string(), "{time} of {ended}");
    }
    let live = session.prompt_script(&[sleep_forever()]).await;
    session.wait_for_start(&live).await;
    assert_eq!(
        (session.show().await["state"].clone(), session.run(&live).await["state"].clone()),
        (json!("running"), json!("running"))
    );
    let queued = session.prompt_script(&[say("x")]).await;
    assert_eq!(
        (session.run(&queued).await["state"].clone(), session.show().await["queued"].clone()),
        (json!("queued"), json!(1))
    );
}

#[tokio::test]
async fn the_agent_works_in_the_workspace_and_is_told_model_and_system_prompt() {
    let daemon = TestDaemon::start().await;
    let settings = json!({ "agent": "script", "model": "model-x", "system_prompt": "be brief" });
    let session = daemon.session_with(settings).await;
    let text = session.run_script(&[config()]).await["text"].as_str().unwrap().to_owned();
    for word in [daemon.home.project_dir().to_str().unwrap(), "model-x", "be brief"] {
        assert!(text.contains(word), "{word} in {text:?}");
    }
    assert_eq!(session.run_script(&[write("note.txt", "kept"), read("note.txt")]).await["text"], "kept");
    assert_eq!(std::fs::read_to_string(daemon.home.project_dir().join("note.txt")).unwrap(), "kept");
}

#[tokio::test]
async fn one_run_gives_every_event_a_run_id_and_a_time_that_does_not_go_back() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.run_script(&[say("a"), tool("Read", json!({}), "x"), say("b")]).await;
    let events = session.events_of(run["id"].as_str().unwrap()).await;
    assert!(events.windows(2).all(|pair| pair[0].ts <= pair[1].ts));
    assert!(events.iter().all(|event| event.session_id.as_deref() == Some(&session.id)));
    assert!(events.iter().all(|event| event.workspace_id.as_deref() == Some(&session.workspace)));
}
