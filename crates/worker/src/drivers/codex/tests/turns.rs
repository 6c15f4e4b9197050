//! Turns as they are heard: words, tools, plans, tokens, ends, and what comes between.

use std::collections::BTreeMap;

use qd_protocol::event::{PlanEntry, TokenUsage};
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::TokenPrice;
use serde_json::json;

use super::fake_agent::command_item;
use super::{agent_in_turn, ready_agent, start_with, text};
use crate::drivers::harness::{let_all_wait, run_id};

#[tokio::test(start_paused = true)]
async fn words_are_heard_as_they_come_and_none_is_lost_or_said_twice() {
    let (mut stage, mut hand) = ready_agent().await;
    stage.prompt("a", "x");
    assert_eq!(hand.accept_prompt("u").await, json!([{"type": "text", "text": "x"}]));
    hand.start_turn("u").await;
    let thought = |delta: &str, index: u64| json!({"threadId": "t", "turnId": "u", "itemId": "r", "delta": delta, "summaryIndex": index});
    hand.notify("item/reasoning/summaryPartAdded", thought("", 0)).await;
    hand.notify("item/reasoning/summaryTextDelta", thought("hm", 0)).await;
    hand.notify("item/reasoning/summaryPartAdded", thought("", 1)).await;
    hand.notify("item/reasoning/summaryTextDelta", thought("aha", 1)).await;
    hand.send_item("item/completed", "u", json!({"type": "reasoning", "id": "r", "summary": ["hm", "aha"]}))
        .await;
    hand.send_text("u", "m", "look").await;
    hand.send_text("u", "m", "ing").await;
    let message = |id: &str, text: &str| json!({"type": "agentMessage", "id": id, "text": text});
    hand.send_item("item/completed", "u", message("m", "looking")).await;
    // One that was not told piece by piece.
    hand.send_item("item/started", "u", message("n", "")).await;
    hand.send_item("item/completed", "u", message("n", "found")).await;
    hand.complete_turn("u", "completed").await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!(ended.text(), "looking\n\nfound");
    assert_eq!(ended.outcome.text.as_deref(), Some("found"));
    assert_eq!(ended.stop(), TurnStopReason::EndTurn);
    let thoughts: String = ended
        .updates_without_model_calls()
        .into_iter()
        .filter_map(|said| if let TurnUpdate::Thought { text } = said { Some(text) } else { None })
        .collect();
    assert_eq!(thoughts, "hm\n\naha");
}

#[tokio::test(start_paused = true)]
async fn commands_and_plans_are_heard_and_a_call_that_begins_twice_is_one() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_item("item/started", "u", command_item("c", "inProgress")).await;
    hand.send_item("item/started", "u", command_item("c", "inProgress")).await;
    let output = json!({"threadId": "t", "turnId": "u", "itemId": "c", "delta": "so far\n"});
    hand.notify("item/commandExecution/outputDelta", output).await;
    let mut done = command_item("c", "failed");
    done["exitCode"] = json!(2);
    done["aggregatedOutput"] = json!("so far\nno further\n");
    hand.send_item("item/completed", "u", done).await;
    let plan = json!([{"step": "one", "status": "completed"}, {"step": "two", "status": "inProgress"}]);
    hand.notify(
        "turn/plan/updated",
        json!({"threadId": "t", "turnId": "u", "explanation": null, "plan": plan}),
    )
    .await;
    hand.complete_turn("u", "completed").await;
    let ended = stage.wait_for_end("a").await;
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
async fn tokens_are_told_as_they_are_used_and_priced_and_calls_of_the_model_are_counted() {
    let (mut stage, mut hand) = start_with(|spec| {
        spec.prices = BTreeMap::from([("m".to_owned(), TokenPrice { input: 1.0, output: 10.0 })]);
    });
    hand.handshake().await;
    stage.next_update().await;
    stage.prompt("a", "x");
    hand.accept_prompt("u").await;
    hand.start_turn("u").await;
    hand.send_item("item/started", "u", command_item("c", "inProgress")).await;
    hand.send_item("item/completed", "u", command_item("c", "completed")).await;
    hand.send_usage("t", "u", (100, 7), (100, 7)).await;
    hand.send_item("item/started", "u", json!({"type": "agentMessage", "id": "m", "text": ""})).await;
    hand.send_usage("t", "u", (250, 17), (150, 10)).await;
    // An agent that ours has started.
    hand.send_turn_event("turn/started", "child", "cu", "inProgress").await;
    hand.send_usage("child", "cu", (1000, 0), (1000, 0)).await;
    hand.send_turn_event("turn/completed", "child", "cu", "completed").await;
    hand.complete_turn("u", "completed").await;
    let ended = stage.wait_for_end("a").await;
    let usage: Vec<TokenUsage> = ended
        .updates_without_model_calls()
        .into_iter()
        .filter_map(|said| if let TurnUpdate::Usage { usage } = said { Some(usage) } else { None })
        .collect();
    let used = |input_tokens, output_tokens, cost_usd| TokenUsage { input_tokens, output_tokens, cost_usd };
    assert_eq!(usage, [used(100, 7, 0.000_17), used(150, 10, 0.000_25), used(1000, 0, 0.001)]);
    assert_eq!(ended.model_calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_turn_fails_by_its_status_with_the_servers_words_and_what_is_tried_again_is_a_notice() {
    let (mut stage, mut hand) = agent_in_turn().await;
    let error = |message: &str, retry: bool| {
        let error = json!({"message": message, "codexErrorInfo": "other", "additionalDetails": null});
        json!({"threadId": "t", "turnId": "u", "error": error, "willRetry": retry})
    };
    hand.notify("error", error("Reconnecting... 1/5", true)).await;
    hand.send_text("u", "m", "all is well").await;
    hand.notify("error", error(r#"{"error": {"message": "scripted 400"}}"#, false)).await;
    // Its own error is missing; the one before is remembered.
    hand.complete_turn("u", "failed").await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!(ended.stop(), TurnStopReason::Error);
    let error = ended.outcome.error.clone().unwrap();
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "scripted 400"));
    assert_eq!(
        ended.updates_without_model_calls()[0],
        TurnUpdate::Notice { text: "Reconnecting... 1/5".to_owned() }
    );

    stage.prompt("b", "y");
    let (id, _) = hand.expect_method("turn/start").await;
    hand.send_error(id, "the thread is closed").await;
    let ended = stage.wait_for_end("b").await;
    assert_eq!(ended.outcome.error.unwrap().message, "the thread is closed");

    stage.prompt("c", "z");
    hand.accept_prompt("w").await;
    hand.start_turn("w").await;
    hand.complete_turn("w", "vanished").await;
    assert_eq!(stage.wait_for_end("c").await.stop(), TurnStopReason::Error);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_another_turn_never_ends_ours() {
    let (mut stage, mut hand) = ready_agent().await;
    stage.prompt("a", "x");
    let (start, _) = hand.expect_method("turn/start").await;
    // Before ours has a name, while it runs, and of a thread that is not ours.
    hand.complete_turn("old", "completed").await;
    hand.name_turn(start, "u").await;
    hand.start_turn("u").await;
    hand.complete_turn("old", "failed").await;
    hand.send_turn_event("turn/completed", "child", "u", "completed").await;
    hand.send_text("u", "m", "still here").await;
    hand.complete_turn("u", "completed").await;
    assert_eq!(stage.wait_for_end("a").await.text(), "still here");
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_ends_before_it_has_a_name_has_ended_and_one_that_had_begun_can_be_steered() {
    let (mut stage, mut hand) = ready_agent().await;
    stage.prompt("a", "x");
    let (start, _) = hand.expect_method("turn/start").await;
    hand.start_turn("u").await;
    hand.send_text("u", "m", "quick").await;
    hand.complete_turn("u", "completed").await;
    hand.name_turn(start, "u").await;
    assert_eq!(stage.wait_for_end("a").await.text(), "quick");

    // The agent has begun a turn by itself, which takes the prompt in.
    hand.start_turn("v").await;
    let_all_wait().await;
    stage.prompt("b", "y");
    hand.accept_prompt("v").await;
    let steer = stage.steer("b", "more");
    let (id, params) = hand.expect_method("turn/steer").await;
    assert_eq!(params["expectedTurnId"], "v");
    hand.send_response(id, json!({"turnId": "v"})).await;
    hand.complete_turn("v", "completed").await;
    assert!(stage.wait_for_end("b").await.updates.contains(&AgentUpdate::SteerTaken { steer }));
}

#[tokio::test(start_paused = true)]
async fn a_steer_waits_for_the_beginning_and_one_that_comes_too_late_is_missed() {
    let (mut stage, mut hand) = ready_agent().await;
    stage.prompt("a", "x");
    hand.accept_prompt("u").await;
    let early = stage.steer("a", "louder");
    hand.expect_silence().await;
    hand.start_turn("u").await;
    let (id, params) = hand.expect_method("turn/steer").await;
    let input = json!([{"type": "text", "text": "louder"}]);
    assert_eq!(params, json!({"threadId": "t", "expectedTurnId": "u", "input": input}));
    hand.send_response(id, json!({"turnId": "u"})).await;
    assert!(matches!(stage.next_update().await, AgentUpdate::Turn { update: TurnUpdate::ModelCall, .. }));
    assert_eq!(stage.next_update().await, AgentUpdate::SteerTaken { steer: early });

    let late = stage.steer("a", "softer");
    let (id, _) = hand.expect_method("turn/steer").await;
    hand.send_error(id, "no active turn to steer").await;
    hand.complete_turn("u", "completed").await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!(ended.updates, [AgentUpdate::SteerMissed { steer: late }]);
}

#[tokio::test(start_paused = true)]
async fn late_words_belong_to_the_turn_before_also_in_the_middle_of_the_next() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_item("item/started", "u", command_item("c", "inProgress")).await;
    hand.complete_turn("u", "completed").await;
    stage.wait_for_end("a").await;
    let output = |delta: &str| json!({"threadId": "t", "turnId": "u", "itemId": "c", "delta": delta});
    hand.notify("item/commandExecution/outputDelta", output("tick")).await;
    let AgentUpdate::Turn { run: of, update: TurnUpdate::ToolOutput { text, .. } } =
        stage.next_update().await
    else {
        panic!()
    };
    assert_eq!((of, text.as_str()), (run_id("a"), "tick"));

    stage.prompt("b", "y");
    hand.accept_prompt("v").await;
    hand.start_turn("v").await;
    hand.notify("item/commandExecution/outputDelta", output("tock")).await;
    hand.send_item("item/completed", "u", command_item("c", "completed")).await;
    hand.send_text("v", "m", "mine").await;
    hand.complete_turn("v", "completed").await;
    let ended = stage.wait_for_end("b").await;
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
async fn what_nobody_knows_is_passed_over_and_asked_for_refused_and_never_left_unanswered() {
    let (mut stage, mut hand) = agent_in_turn().await;
    for line in [
        "npm warn",
        "{",
        "[1]",
        r#"{"method":"dance/started","params":{"threadId":"t"}}"#,
        r#"{"id":999,"result":{}}"#,
    ] {
        hand.write_line(line).await;
    }
    hand.notify(
        "item/agentMessage/delta",
        json!({"threadId": "child", "turnId": "cu", "itemId": "m", "delta": "not ours"}),
    )
    .await;
    hand.notify("item/agentMessage/delta", json!("not even an object")).await;
    let warning = json!({"threadId": "t", "message": "careful"});
    hand.notify("warning", warning.clone()).await;
    hand.notify("warning", warning).await;
    hand.send_request(json!("q"), "item/tool/call", json!({"tool": "x"})).await;
    assert_eq!(hand.expect_answer(json!("q")).await, json!({"error": -32601}));
    hand.send_request(json!(5), "item/tool/requestUserInput", json!({"questions": "none"})).await;
    assert_eq!(hand.expect_answer(json!(5)).await, json!({"error": -32602}));
    hand.complete_turn("u", "completed").await;
    let ended = stage.wait_for_end("a").await;
    assert_eq!(ended.updates_without_model_calls(), [TurnUpdate::Notice { text: "careful".to_owned() }]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_goes_away_in_the_middle_of_a_turn_is_gone() {
    let (mut stage, hand) = agent_in_turn().await;
    drop(hand);
    assert_eq!(stage.wait_for_failure().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn an_empty_message_makes_no_gap() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_item("item/completed", "u", json!({"type": "agentMessage", "id": "m", "text": ""})).await;
    hand.send_text("u", "n", "one").await;
    hand.complete_turn("u", "completed").await;
    assert_eq!(stage.wait_for_end("a").await.updates_without_model_calls(), [text("one")]);
}
