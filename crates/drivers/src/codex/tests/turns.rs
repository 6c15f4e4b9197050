//! Turns: text, tools, plans, usage, ends, and output between turns.

use std::collections::BTreeMap;

use qd_protocol::event::{ContextUsage, PlanEntry, TokenUsage};
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::TokenPrice;
use serde_json::json;

use super::fake_agent::command_item;
use super::{agent_in_turn, ready_agent, start_with, text};
use crate::harness::{let_all_wait, run_id};

#[tokio::test(start_paused = true)]
async fn text_is_emitted_as_it_comes_and_none_is_lost_or_repeated() {
    let (mut harness, mut fake) = ready_agent().await;
    harness.prompt("a", "x");
    assert_eq!(fake.accept_prompt("u").await, json!([{"type": "text", "text": "x"}]));
    fake.start_turn("u").await;
    let thought = |delta: &str, index: u64| json!({"threadId": "t", "turnId": "u", "itemId": "r", "delta": delta, "summaryIndex": index});
    fake.notify("item/reasoning/summaryPartAdded", thought("", 0)).await;
    fake.notify("item/reasoning/summaryTextDelta", thought("hm", 0)).await;
    fake.notify("item/reasoning/summaryPartAdded", thought("", 1)).await;
    fake.notify("item/reasoning/summaryTextDelta", thought("aha", 1)).await;
    fake.send_item("item/completed", "u", json!({"type": "reasoning", "id": "r", "summary": ["hm", "aha"]}))
        .await;
    fake.send_text("u", "m", "look").await;
    fake.send_text("u", "m", "ing").await;
    let message = |id: &str, text: &str| json!({"type": "agentMessage", "id": id, "text": text});
    fake.send_item("item/completed", "u", message("m", "looking")).await;
    // A message that was not streamed.
    fake.send_item("item/started", "u", message("n", "")).await;
    fake.send_item("item/completed", "u", message("n", "found")).await;
    fake.complete_turn("u", "completed").await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!(ended.text(), "looking\n\nfound");
    assert_eq!(ended.outcome.text.as_deref(), Some("found"));
    assert_eq!(ended.stop(), TurnStopReason::EndTurn);
    let thoughts: String = ended
        .updates_without_model_calls()
        .into_iter()
        .filter_map(|update| if let TurnUpdate::Thought { text } = update { Some(text) } else { None })
        .collect();
    assert_eq!(thoughts, "hm\n\naha");
}

#[tokio::test(start_paused = true)]
async fn commands_and_plans_are_emitted_and_a_call_that_starts_twice_is_one() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_item("item/started", "u", command_item("c", "inProgress")).await;
    fake.send_item("item/started", "u", command_item("c", "inProgress")).await;
    let output = json!({"threadId": "t", "turnId": "u", "itemId": "c", "delta": "so far\n"});
    fake.notify("item/commandExecution/outputDelta", output).await;
    let mut done = command_item("c", "failed");
    done["exitCode"] = json!(2);
    done["aggregatedOutput"] = json!("so far\nno further\n");
    fake.send_item("item/completed", "u", done).await;
    let plan = json!([{"step": "one", "status": "completed"}, {"step": "two", "status": "inProgress"}]);
    fake.notify(
        "turn/plan/updated",
        json!({"threadId": "t", "turnId": "u", "explanation": null, "plan": plan}),
    )
    .await;
    fake.complete_turn("u", "completed").await;
    let ended = harness.wait_for_end("a").await;
    let id = || "c".to_owned();
    let entry = |content: &str, status: &str| PlanEntry { content: content.into(), status: status.into() };
    assert_eq!(
        ended.updates_without_model_calls(),
        [
            TurnUpdate::ToolStarted {
                call_id: id(),
                name: "Bash".into(),
                input: json!({"command": "make it", "cwd": "/w"})
            },
            TurnUpdate::ToolOutput { call_id: id(), text: "so far\n".into() },
            TurnUpdate::ToolFinished {
                call_id: id(),
                name: "Bash".into(),
                output: json!({"status": "failed", "exit_code": 2, "output": "so far\nno further\n"}),
                is_error: true,
            },
            TurnUpdate::Plan { entries: vec![entry("one", "completed"), entry("two", "in_progress")] },
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn tokens_are_priced_as_they_are_used_and_model_calls_are_counted() {
    let (mut harness, mut fake) = start_with(|spec| {
        spec.prices = BTreeMap::from([("m".to_owned(), TokenPrice { input: 1.0, output: 10.0 })]);
    });
    fake.handshake().await;
    harness.next_update().await;
    harness.prompt("a", "x");
    fake.accept_prompt("u").await;
    fake.start_turn("u").await;
    fake.send_item("item/started", "u", command_item("c", "inProgress")).await;
    fake.send_item("item/completed", "u", command_item("c", "completed")).await;
    fake.send_usage("t", "u", (100, 7), (100, 7)).await;
    fake.send_item("item/started", "u", json!({"type": "agentMessage", "id": "m", "text": ""})).await;
    fake.send_usage("t", "u", (250, 17), (150, 10)).await;
    // A turn of an agent that ours has started.
    fake.send_turn_event("turn/started", "child", "cu", "inProgress").await;
    fake.send_usage("child", "cu", (1000, 0), (1000, 0)).await;
    fake.send_turn_event("turn/completed", "child", "cu", "completed").await;
    fake.complete_turn("u", "completed").await;
    let ended = harness.wait_for_end("a").await;
    let usage: Vec<TokenUsage> = ended
        .updates_without_model_calls()
        .into_iter()
        .filter_map(|update| if let TurnUpdate::Usage { usage, .. } = update { Some(usage) } else { None })
        .collect();
    let expected =
        |input_tokens, output_tokens, cost_usd| TokenUsage { input_tokens, output_tokens, cost_usd };
    assert_eq!(usage, [expected(100, 7, 0.000_17), expected(150, 10, 0.000_25), expected(1000, 0, 0.001)]);
    assert_eq!(ended.model_calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_failed_turn_has_the_servers_message_and_a_retry_is_a_notice() {
    let (mut harness, mut fake) = agent_in_turn().await;
    let error = |message: &str, retry: bool| {
        let error = json!({"message": message, "codexErrorInfo": "other", "additionalDetails": null});
        json!({"threadId": "t", "turnId": "u", "error": error, "willRetry": retry})
    };
    fake.notify("error", error("Reconnecting... 1/5", true)).await;
    fake.send_text("u", "m", "all is well").await;
    fake.notify("error", error(r#"{"error": {"message": "scripted 400"}}"#, false)).await;
    // The end has no error, so the earlier one counts.
    fake.complete_turn("u", "failed").await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!(ended.stop(), TurnStopReason::Error);
    let error = ended.outcome.error.clone().unwrap();
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "scripted 400"));
    assert_eq!(ended.updates_without_model_calls()[0], TurnUpdate::notice("Reconnecting... 1/5".to_owned()));

    harness.prompt("b", "y");
    let (id, _) = fake.expect_method("turn/start").await;
    fake.send_error(id, "the thread is closed").await;
    let ended = harness.wait_for_end("b").await;
    assert_eq!(ended.outcome.error.unwrap().message, "the thread is closed");

    harness.prompt("c", "z");
    fake.accept_prompt("w").await;
    fake.start_turn("w").await;
    fake.complete_turn("w", "vanished").await;
    assert_eq!(harness.wait_for_end("c").await.stop(), TurnStopReason::Error);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_another_turn_never_ends_ours() {
    let (mut harness, mut fake) = ready_agent().await;
    harness.prompt("a", "x");
    let (start, _) = fake.expect_method("turn/start").await;
    // Ends before the id of our turn is known, while it runs, and of another thread.
    fake.complete_turn("old", "completed").await;
    fake.name_turn(start, "u").await;
    fake.start_turn("u").await;
    fake.complete_turn("old", "failed").await;
    fake.send_turn_event("turn/completed", "child", "u", "completed").await;
    fake.send_text("u", "m", "still here").await;
    fake.complete_turn("u", "completed").await;
    assert_eq!(harness.wait_for_end("a").await.text(), "still here");
}

#[tokio::test(start_paused = true)]
async fn a_turn_may_end_before_its_id_is_known_and_one_already_begun_can_be_steered() {
    let (mut harness, mut fake) = ready_agent().await;
    harness.prompt("a", "x");
    let (start, _) = fake.expect_method("turn/start").await;
    fake.start_turn("u").await;
    fake.send_text("u", "m", "quick").await;
    fake.complete_turn("u", "completed").await;
    fake.name_turn(start, "u").await;
    assert_eq!(harness.wait_for_end("a").await.text(), "quick");

    // The agent has started a turn on its own, which takes the prompt in.
    fake.start_turn("v").await;
    let_all_wait().await;
    harness.prompt("b", "y");
    fake.accept_prompt("v").await;
    let steer = harness.steer("b", "more");
    let (id, params) = fake.expect_method("turn/steer").await;
    assert_eq!(params["expectedTurnId"], "v");
    fake.send_response(id, json!({"turnId": "v"})).await;
    fake.complete_turn("v", "completed").await;
    assert!(harness.wait_for_end("b").await.updates.contains(&AgentUpdate::SteerTaken { steer }));
}

#[tokio::test(start_paused = true)]
async fn a_steer_waits_until_the_turn_begins_and_one_that_comes_too_late_is_missed() {
    let (mut harness, mut fake) = ready_agent().await;
    harness.prompt("a", "x");
    fake.accept_prompt("u").await;
    let early = harness.steer("a", "louder");
    fake.expect_silence().await;
    fake.start_turn("u").await;
    let (id, params) = fake.expect_method("turn/steer").await;
    let input = json!([{"type": "text", "text": "louder"}]);
    assert_eq!(params, json!({"threadId": "t", "expectedTurnId": "u", "input": input}));
    fake.send_response(id, json!({"turnId": "u"})).await;
    assert!(matches!(harness.next_update().await, AgentUpdate::Turn { update: TurnUpdate::ModelCall, .. }));
    assert_eq!(harness.next_update().await, AgentUpdate::SteerTaken { steer: early });

    let late = harness.steer("a", "softer");
    let (id, _) = fake.expect_method("turn/steer").await;
    fake.send_error(id, "no active turn to steer").await;
    fake.complete_turn("u", "completed").await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!(ended.updates, [AgentUpdate::SteerMissed { steer: late }]);
}

#[tokio::test(start_paused = true)]
async fn late_output_belongs_to_its_own_run_even_during_the_next_turn() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_item("item/started", "u", command_item("c", "inProgress")).await;
    fake.complete_turn("u", "completed").await;
    harness.wait_for_end("a").await;
    let output = |delta: &str| json!({"threadId": "t", "turnId": "u", "itemId": "c", "delta": delta});
    fake.notify("item/commandExecution/outputDelta", output("tick")).await;
    let AgentUpdate::Turn { run, update: TurnUpdate::ToolOutput { text, .. } } = harness.next_update().await
    else {
        panic!()
    };
    assert_eq!((run, text.as_str()), (run_id("a"), "tick"));

    harness.prompt("b", "y");
    fake.accept_prompt("v").await;
    fake.start_turn("v").await;
    fake.notify("item/commandExecution/outputDelta", output("tock")).await;
    fake.send_item("item/completed", "u", command_item("c", "completed")).await;
    fake.send_text("v", "m", "mine").await;
    fake.complete_turn("v", "completed").await;
    let ended = harness.wait_for_end("b").await;
    let runs: Vec<(RunName, &TurnUpdate)> = ended
        .updates
        .iter()
        .filter_map(|up| {
            if let AgentUpdate::Turn { run, update } = up { Some((run.to_string(), update)) } else { None }
        })
        .filter(|(_, update)| !matches!(update, TurnUpdate::ModelCall))
        .collect();
    let names: Vec<&str> = runs.iter().map(|(run, _)| run.as_str()).collect();
    assert_eq!(names, ["a", "a", "b"]);
    assert_eq!(*runs[2].1, super::text("mine"));
}

type RunName = String;

#[tokio::test(start_paused = true)]
async fn unknown_messages_are_ignored_and_unknown_requests_refused() {
    let (mut harness, mut fake) = agent_in_turn().await;
    for line in [
        "npm warn",
        "{",
        "[1]",
        r#"{"method":"dance/started","params":{"threadId":"t"}}"#,
        r#"{"id":999,"result":{}}"#,
    ] {
        fake.write_line(line).await;
    }
    fake.notify(
        "item/agentMessage/delta",
        json!({"threadId": "child", "turnId": "cu", "itemId": "m", "delta": "not ours"}),
    )
    .await;
    fake.notify("item/agentMessage/delta", json!("not even an object")).await;
    let warning = json!({"threadId": "t", "message": "careful"});
    fake.notify("warning", warning.clone()).await;
    fake.notify("warning", warning).await;
    fake.send_request(json!("q"), "item/tool/call", json!({"tool": "x"})).await;
    assert_eq!(fake.expect_answer(json!("q")).await, json!({"error": -32601}));
    fake.send_request(json!(5), "item/tool/requestUserInput", json!({"questions": "none"})).await;
    assert_eq!(fake.expect_answer(json!(5)).await, json!({"error": -32602}));
    fake.complete_turn("u", "completed").await;
    let ended = harness.wait_for_end("a").await;
    assert_eq!(ended.updates_without_model_calls(), [TurnUpdate::notice("careful".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_exits_during_a_turn_is_reported() {
    let (mut harness, fake) = agent_in_turn().await;
    drop(fake);
    assert_eq!(harness.wait_for_failure().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn an_empty_message_makes_no_gap() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_item("item/completed", "u", json!({"type": "agentMessage", "id": "m", "text": ""})).await;
    fake.send_text("u", "n", "one").await;
    fake.complete_turn("u", "completed").await;
    assert_eq!(harness.wait_for_end("a").await.updates_without_model_calls(), [text("one")]);
}

#[tokio::test(start_paused = true)]
async fn a_turn_is_started_in_the_mode_of_the_session() {
    let (mut harness, mut fake) = ready_agent().await;
    harness.set_mode("plan");
    harness.prompt("a", "x");
    let (id, params) = fake.expect_method("turn/start").await;
    let settings = json!({"model": "m", "reasoning_effort": null, "developer_instructions": null});
    assert_eq!(params["collaborationMode"], json!({"mode": "plan", "settings": settings}));
    fake.name_turn(id, "u").await;
    fake.start_turn("u").await;
    fake.complete_turn("u", "completed").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::EndTurn);
}

#[tokio::test(start_paused = true)]
async fn the_context_and_its_compaction_are_reported() {
    let (mut harness, mut fake) = agent_in_turn().await;
    let tokens = |input: u64| json!({"inputTokens": input, "outputTokens": 7});
    let usage = json!({"total": tokens(900), "last": tokens(100), "modelContextWindow": 1000});
    let params = json!({"threadId": "t", "turnId": "u", "tokenUsage": usage});
    fake.notify("thread/tokenUsage/updated", params).await;
    fake.send_item("item/completed", "u", json!({"type": "contextCompaction", "id": "k"})).await;
    fake.complete_turn("u", "completed").await;
    let updates = harness.wait_for_end("a").await.turn_updates();
    assert!(updates.contains(&TurnUpdate::Context(ContextUsage { used: 107, size: 1000 })), "{updates:?}");
    assert!(updates.contains(&TurnUpdate::Compacted { used_before: None }), "{updates:?}");
}
