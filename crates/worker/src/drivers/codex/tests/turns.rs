//! Turns as they are heard: words, tools, plans, tokens, ends, and what comes between.

use std::collections::BTreeMap;

use qd_protocol::event::{PlanEntry, Usage};
use qd_protocol::link::{Said, Stop, Up};
use qd_protocol::manifest::Price;
use serde_json::json;

use super::hand::command;
use super::{begun, ready, text, with};
use crate::drivers::stage::{rest, run};

#[tokio::test(start_paused = true)]
async fn words_are_heard_as_they_come_and_none_is_lost_or_said_twice() {
    let (mut stage, mut hand) = ready().await;
    stage.prompt("a", "x");
    assert_eq!(hand.take("u").await, json!([{"type": "text", "text": "x"}]));
    hand.started("u").await;
    let thought = |delta: &str, index: u64| json!({"threadId": "t", "turnId": "u", "itemId": "r", "delta": delta, "summaryIndex": index});
    hand.tell("item/reasoning/summaryPartAdded", thought("", 0)).await;
    hand.tell("item/reasoning/summaryTextDelta", thought("hm", 0)).await;
    hand.tell("item/reasoning/summaryPartAdded", thought("", 1)).await;
    hand.tell("item/reasoning/summaryTextDelta", thought("aha", 1)).await;
    hand.item("item/completed", "u", json!({"type": "reasoning", "id": "r", "summary": ["hm", "aha"]})).await;
    hand.say("u", "m", "look").await;
    hand.say("u", "m", "ing").await;
    let message = |id: &str, text: &str| json!({"type": "agentMessage", "id": id, "text": text});
    hand.item("item/completed", "u", message("m", "looking")).await;
    // One that was not told piece by piece.
    hand.item("item/started", "u", message("n", "")).await;
    hand.item("item/completed", "u", message("n", "found")).await;
    hand.completed("u", "completed").await;
    let ended = stage.ended("a").await;
    assert_eq!(ended.text(), "looking\n\nfound");
    assert_eq!(ended.outcome.text.as_deref(), Some("found"));
    assert_eq!(ended.stop(), Stop::EndTurn);
    let thoughts: String = ended
        .words()
        .into_iter()
        .filter_map(|said| if let Said::Thought { text } = said { Some(text) } else { None })
        .collect();
    assert_eq!(thoughts, "hm\n\naha");
}

#[tokio::test(start_paused = true)]
async fn commands_and_plans_are_heard_and_a_call_that_begins_twice_is_one() {
    let (mut stage, mut hand) = begun().await;
    hand.item("item/started", "u", command("c", "inProgress")).await;
    hand.item("item/started", "u", command("c", "inProgress")).await;
    let output = json!({"threadId": "t", "turnId": "u", "itemId": "c", "delta": "so far\n"});
    hand.tell("item/commandExecution/outputDelta", output).await;
    let mut done = command("c", "failed");
    done["exitCode"] = json!(2);
    done["aggregatedOutput"] = json!("so far\nno further\n");
    hand.item("item/completed", "u", done).await;
    let plan = json!([{"step": "one", "status": "completed"}, {"step": "two", "status": "inProgress"}]);
    hand.tell(
        "turn/plan/updated",
        json!({"threadId": "t", "turnId": "u", "explanation": null, "plan": plan}),
    )
    .await;
    hand.completed("u", "completed").await;
    let ended = stage.ended("a").await;
    let id = || "c".to_owned();
    let entry = |content: &str, status: &str| PlanEntry { content: content.into(), status: status.into() };
    assert_eq!(
        ended.words(),
        [
            Said::ToolStarted {
                call_id: id(),
                name: "Bash".into(),
                input: json!({"command": "make it", "cwd": "/w"})
            },
            Said::ToolOutput { call_id: id(), text: "so far\n".into() },
            Said::ToolFinished {
                call_id: id(),
                name: "Bash".into(),
                output: json!({"status": "failed", "exit_code": 2, "output": "so far\nno further\n"}),
                is_error: true,
            },
            Said::Plan { entries: vec![entry("one", "completed"), entry("two", "in_progress")] },
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn tokens_are_told_as_they_are_used_and_priced_and_calls_of_the_model_are_counted() {
    let (mut stage, mut hand) = with(|spec| {
        spec.prices = BTreeMap::from([("m".to_owned(), Price { input: 1.0, output: 10.0 })]);
    });
    hand.open().await;
    stage.hear().await;
    stage.prompt("a", "x");
    hand.take("u").await;
    hand.started("u").await;
    hand.item("item/started", "u", command("c", "inProgress")).await;
    hand.item("item/completed", "u", command("c", "completed")).await;
    hand.used("t", "u", (100, 7), (100, 7)).await;
    hand.item("item/started", "u", json!({"type": "agentMessage", "id": "m", "text": ""})).await;
    hand.used("t", "u", (250, 17), (150, 10)).await;
    // An agent that ours has started.
    hand.turned("turn/started", "child", "cu", "inProgress").await;
    hand.used("child", "cu", (1000, 0), (1000, 0)).await;
    hand.turned("turn/completed", "child", "cu", "completed").await;
    hand.completed("u", "completed").await;
    let ended = stage.ended("a").await;
    let usage: Vec<Usage> = ended
        .words()
        .into_iter()
        .filter_map(|said| if let Said::Usage { usage } = said { Some(usage) } else { None })
        .collect();
    let used = |input_tokens, output_tokens, cost_usd| Usage { input_tokens, output_tokens, cost_usd };
    assert_eq!(usage, [used(100, 7, 0.000_17), used(150, 10, 0.000_25), used(1000, 0, 0.001)]);
    assert_eq!(ended.turns(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_turn_fails_by_its_status_with_the_servers_words_and_what_is_tried_again_is_a_notice() {
    let (mut stage, mut hand) = begun().await;
    let error = |message: &str, retry: bool| {
        let error = json!({"message": message, "codexErrorInfo": "other", "additionalDetails": null});
        json!({"threadId": "t", "turnId": "u", "error": error, "willRetry": retry})
    };
    hand.tell("error", error("Reconnecting... 1/5", true)).await;
    hand.say("u", "m", "all is well").await;
    hand.tell("error", error(r#"{"error": {"message": "scripted 400"}}"#, false)).await;
    // Its own error is missing; the one before is remembered.
    hand.completed("u", "failed").await;
    let ended = stage.ended("a").await;
    assert_eq!(ended.stop(), Stop::Error);
    let error = ended.outcome.error.clone().unwrap();
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "scripted 400"));
    assert_eq!(ended.words()[0], Said::Notice { text: "Reconnecting... 1/5".to_owned() });

    stage.prompt("b", "y");
    let (id, _) = hand.expect("turn/start").await;
    hand.refuse(id, "the thread is closed").await;
    let ended = stage.ended("b").await;
    assert_eq!(ended.outcome.error.unwrap().message, "the thread is closed");

    stage.prompt("c", "z");
    hand.take("w").await;
    hand.started("w").await;
    hand.completed("w", "vanished").await;
    assert_eq!(stage.ended("c").await.stop(), Stop::Error);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_another_turn_never_ends_ours() {
    let (mut stage, mut hand) = ready().await;
    stage.prompt("a", "x");
    let (start, _) = hand.expect("turn/start").await;
    // Before ours has a name, while it runs, and of a thread that is not ours.
    hand.completed("old", "completed").await;
    hand.name(start, "u").await;
    hand.started("u").await;
    hand.completed("old", "failed").await;
    hand.turned("turn/completed", "child", "u", "completed").await;
    hand.say("u", "m", "still here").await;
    hand.completed("u", "completed").await;
    assert_eq!(stage.ended("a").await.text(), "still here");
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_ends_before_it_has_a_name_has_ended_and_one_that_had_begun_can_be_steered() {
    let (mut stage, mut hand) = ready().await;
    stage.prompt("a", "x");
    let (start, _) = hand.expect("turn/start").await;
    hand.started("u").await;
    hand.say("u", "m", "quick").await;
    hand.completed("u", "completed").await;
    hand.name(start, "u").await;
    assert_eq!(stage.ended("a").await.text(), "quick");

    // The agent has begun a turn by itself, which takes the prompt in.
    hand.started("v").await;
    rest().await;
    stage.prompt("b", "y");
    hand.take("v").await;
    let steer = stage.steer("b", "more");
    let (id, params) = hand.expect("turn/steer").await;
    assert_eq!(params["expectedTurnId"], "v");
    hand.answer(id, json!({"turnId": "v"})).await;
    hand.completed("v", "completed").await;
    assert!(stage.ended("b").await.ups.contains(&Up::SteerTaken { steer }));
}

#[tokio::test(start_paused = true)]
async fn a_steer_waits_for_the_beginning_and_one_that_comes_too_late_is_missed() {
    let (mut stage, mut hand) = ready().await;
    stage.prompt("a", "x");
    hand.take("u").await;
    let early = stage.steer("a", "louder");
    hand.expect_silence().await;
    hand.started("u").await;
    let (id, params) = hand.expect("turn/steer").await;
    let input = json!([{"type": "text", "text": "louder"}]);
    assert_eq!(params, json!({"threadId": "t", "expectedTurnId": "u", "input": input}));
    hand.answer(id, json!({"turnId": "u"})).await;
    assert!(matches!(stage.hear().await, Up::Said { what: Said::Turn, .. }));
    assert_eq!(stage.hear().await, Up::SteerTaken { steer: early });

    let late = stage.steer("a", "softer");
    let (id, _) = hand.expect("turn/steer").await;
    hand.refuse(id, "no active turn to steer").await;
    hand.completed("u", "completed").await;
    let ended = stage.ended("a").await;
    assert_eq!(ended.ups, [Up::SteerMissed { steer: late }]);
}

#[tokio::test(start_paused = true)]
async fn late_words_belong_to_the_turn_before_also_in_the_middle_of_the_next() {
    let (mut stage, mut hand) = begun().await;
    hand.item("item/started", "u", command("c", "inProgress")).await;
    hand.completed("u", "completed").await;
    stage.ended("a").await;
    let output = |delta: &str| json!({"threadId": "t", "turnId": "u", "itemId": "c", "delta": delta});
    hand.tell("item/commandExecution/outputDelta", output("tick")).await;
    let Up::Said { run: of, what: Said::ToolOutput { text, .. } } = stage.hear().await else { panic!() };
    assert_eq!((of, text.as_str()), (run("a"), "tick"));

    stage.prompt("b", "y");
    hand.take("v").await;
    hand.started("v").await;
    hand.tell("item/commandExecution/outputDelta", output("tock")).await;
    hand.item("item/completed", "u", command("c", "completed")).await;
    hand.say("v", "m", "mine").await;
    hand.completed("v", "completed").await;
    let ended = stage.ended("b").await;
    let runs: Vec<(RunName, &Said)> = ended
        .ups
        .iter()
        .filter_map(|up| if let Up::Said { run, what } = up { Some((run.to_string(), what)) } else { None })
        .filter(|(_, what)| !matches!(what, Said::Turn))
        .collect();
    let names: Vec<&str> = runs.iter().map(|(run, _)| run.as_str()).collect();
    assert_eq!(names, ["a", "a", "b"]);
    assert_eq!(*runs[2].1, super::text("mine"));
}

type RunName = String;

#[tokio::test(start_paused = true)]
async fn what_nobody_knows_is_passed_over_and_asked_for_refused_and_never_left_unanswered() {
    let (mut stage, mut hand) = begun().await;
    for line in [
        "npm warn",
        "{",
        "[1]",
        r#"{"method":"dance/started","params":{"threadId":"t"}}"#,
        r#"{"id":999,"result":{}}"#,
    ] {
        hand.write(line).await;
    }
    hand.tell(
        "item/agentMessage/delta",
        json!({"threadId": "child", "turnId": "cu", "itemId": "m", "delta": "not ours"}),
    )
    .await;
    hand.tell("item/agentMessage/delta", json!("not even an object")).await;
    let warning = json!({"threadId": "t", "message": "careful"});
    hand.tell("warning", warning.clone()).await;
    hand.tell("warning", warning).await;
    hand.ask(json!("q"), "item/tool/call", json!({"tool": "x"})).await;
    assert_eq!(hand.expect_answer(json!("q")).await, json!({"error": -32601}));
    hand.ask(json!(5), "item/tool/requestUserInput", json!({"questions": "none"})).await;
    assert_eq!(hand.expect_answer(json!(5)).await, json!({"error": -32602}));
    hand.completed("u", "completed").await;
    let ended = stage.ended("a").await;
    assert_eq!(ended.words(), [Said::Notice { text: "careful".to_owned() }]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_goes_away_in_the_middle_of_a_turn_is_gone() {
    let (mut stage, hand) = begun().await;
    drop(hand);
    assert_eq!(stage.gone().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn an_empty_message_makes_no_gap() {
    let (mut stage, mut hand) = begun().await;
    hand.item("item/completed", "u", json!({"type": "agentMessage", "id": "m", "text": ""})).await;
    hand.say("u", "n", "one").await;
    hand.completed("u", "completed").await;
    assert_eq!(stage.ended("a").await.words(), [text("one")]);
}
