//! Every step of a script (section 9 of the contract), through the driver.

use std::time::Duration;

use qd_protocol::event::{AskKind, ContextUsage, PermissionDecision, PlanEntry, TokenUsage};
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::{AgentUpdate, AskResolution, TurnStopReason, TurnUpdate};
use qd_protocol::policy::Risk;
use qd_protocol::text::escaped_len;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{scripted, scripted_with, start_with};
use crate::harness::{assert_ended_well, decision_reply, run_id, value_reply};
use qd_script::ScriptSetup;

#[tokio::test(start_paused = true)]
async fn text_that_is_no_script_is_echoed_without_a_special_result() {
    let mut agent = scripted().await;
    for (name, prompt) in [("a", "plain  words "), ("b", "[not json"), ("c", "{\"say\":\"x\"}")] {
        let ended = agent.run_turn(name, prompt).await;
        assert_ended_well(&ended);
        assert_eq!((ended.text().as_str(), ended.outcome.text), (prompt, None));
    }
}

#[tokio::test(start_paused = true)]
async fn say_says_exactly_so_often_and_so_far_apart() {
    let mut agent = scripted().await;
    let start = Instant::now();
    let ended = agent
        .run_turn("a", r#"[{"say":"x"},{"say":"yz","times":3,"every_ms":100},{"say":"n","times":0}]"#)
        .await;
    assert_ended_well(&ended);
    assert_eq!(ended.text(), "xyzyzyz");
    assert_eq!(start.elapsed().as_millis(), 200);
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_pieces_come_whole_and_in_order_through_a_small_pipe() {
    let mut agent = scripted().await;
    let steps: Vec<_> = (0..10_000).map(|n| json!({"say": format!("{n} ")})).collect();
    let ended = agent.run_turn("a", &Value::from(steps).to_string()).await;
    assert_ended_well(&ended);
    assert_eq!(ended.text(), (0..10_000).map(|n| format!("{n} ")).collect::<String>());
}

#[tokio::test(start_paused = true)]
async fn think_and_sleep() {
    let mut agent = scripted().await;
    let start = Instant::now();
    let ended = agent.run_turn("a", r#"[{"think":"hm"},{"sleep_ms":250},{"say":"done"}]"#).await;
    assert_eq!(start.elapsed().as_millis(), 250);
    let expected =
        [TurnUpdate::Thought { text: "hm".to_owned() }, TurnUpdate::Text { text: "done".to_owned() }];
    assert_eq!(ended.turn_updates(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_tool_starts_gives_out_text_and_finishes() {
    let mut agent = scripted().await;
    let script = r#"[{"tool":{"name":"Bash","input":{"command":"ls"},"output":"a\nb","is_error":true}},
        {"tool":{"name":"Look","output":{"n":1}}}]"#;
    let ended = agent.run_turn("a", script).await;
    let (one, two) = ("call_1_1".to_owned(), "call_1_2".to_owned());
    let (bash, look) = ("Bash".to_owned(), "Look".to_owned());
    let expected = [
        TurnUpdate::ToolStarted { call_id: one.clone(), name: bash.clone(), input: json!({"command": "ls"}) },
        TurnUpdate::ToolOutput { call_id: one.clone(), text: "a\nb".to_owned() },
        TurnUpdate::ToolFinished { call_id: one, name: bash, output: json!("a\nb"), is_error: true },
        TurnUpdate::ToolStarted { call_id: two.clone(), name: look.clone(), input: json!({}) },
        TurnUpdate::ToolFinished { call_id: two, name: look, output: json!({"n": 1}), is_error: false },
    ];
    assert_eq!(ended.turn_updates(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_tool_output_that_no_event_can_hold_is_cut_with_a_note() {
    let mut agent = scripted().await;
    let script = json!([{"tool": {"name": "Big", "output": "x".repeat(3 << 20)}}]).to_string();
    let ended = agent.run_turn("a", &script).await;
    let Some(TurnUpdate::ToolFinished { output: Value::String(text), .. }) = ended.turn_updates().pop()
    else {
        panic!("text")
    };
    assert!(escaped_len(&text) <= INLINE_MAX);
    assert!(text.ends_with("[cut: 3145728 bytes in all]"));
}

#[tokio::test(start_paused = true)]
async fn an_ask_waits_for_its_answer_and_says_it() {
    let mut agent = scripted().await;
    let script = r#"[{"ask":{"tool":"Bash","input":{"command":"rm"},"risk":"high"}}]"#;
    let mut ids = Vec::new();
    for (name, reply, text) in [
        ("a", decision_reply(PermissionDecision::AllowOnce, None), "allowed"),
        ("b", decision_reply(PermissionDecision::AllowAlways, None), "allowed"),
        ("c", decision_reply(PermissionDecision::Deny, Some("too risky")), "denied: too risky"),
        ("d", decision_reply(PermissionDecision::Deny, None), "denied: no reason given"),
    ] {
        agent.prompt(name, script);
        let ask = agent.wait_for_ask().await;
        assert_eq!(
            (ask.kind, ask.tool.as_deref(), ask.risk),
            (AskKind::Permission, Some("Bash"), Some(Risk::High))
        );
        assert_eq!(
            (ask.input.clone(), ask.prompt.as_str()),
            (json!({"command": "rm"}), "May the agent use Bash?")
        );
        assert!(ask.id.as_str().len() >= 30, "too short not to be guessed: {}", ask.id);
        agent.answer(&ask, reply.clone());
        agent.answer(&ask, decision_reply(PermissionDecision::Deny, Some("the first answer wins")));
        let ended = agent.wait_for_end(name).await;
        assert_ended_well(&ended);
        assert_eq!(ended.updates[0], AgentUpdate::AskDelivered { ask: ask.id.clone() });
        assert_eq!((ended.updates.len(), ended.text().as_str()), (2, text));
        ids.push(ask.id);
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_question_says_its_answer() {
    let mut agent = scripted().await;
    agent.prompt("a", r#"[{"question":{"prompt":"Which?","options":["red","blue"]}},{"say":"!"}]"#);
    let ask = agent.wait_for_ask().await;
    assert_eq!((ask.kind, ask.prompt.as_str(), ask.tool.as_deref()), (AskKind::Question, "Which?", None));
    assert_eq!(ask.options, ["red", "blue"]);
    agent.answer(&ask, value_reply("blue"));
    assert_eq!(agent.wait_for_end("a").await.text(), "blue!");

    agent.prompt("b", r#"[{"question":{"prompt":"Name?"}}]"#);
    let ask = agent.wait_for_ask().await;
    assert!(ask.options.is_empty());
    agent.answer(&ask, value_reply("Ada"));
    assert_eq!(agent.wait_for_end("b").await.text(), "Ada");
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_ask_ends_the_turn_unless_it_ignores_cancels() {
    let mut agent = scripted().await;
    for (name, step) in [("a", r#"{"ask":{"tool":"Bash"}}"#), ("b", r#"{"question":{"prompt":"q"}}"#)] {
        agent.prompt(name, &format!(r#"[{step},{{"say":"never"}}]"#));
        let ask = agent.wait_for_ask().await;
        agent.answer(&ask, AskResolution::Withdrawn);
        let ended = agent.wait_for_end(name).await;
        assert_eq!((ended.outcome.stop, ended.updates), (TurnStopReason::Cancelled, vec![]));
    }
    agent.prompt("c", r#"[{"ignore_cancel":true},{"ask":{"tool":"Bash"}},{"say":"goes on"}]"#);
    let _ask = agent.wait_for_ask().await;
    agent.cancel("c");
    let ended = agent.wait_for_end("c").await;
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (TurnStopReason::EndTurn, "goes on"));
}

#[tokio::test(start_paused = true)]
async fn plan_and_usage_are_reported_unchanged() {
    let mut agent = scripted().await;
    let script = r#"[{"plan":[{"content":"one","status":"in_progress"},{"content":"two"},{"content":"three","status":"odd"}]},
        {"usage":{"input_tokens":3,"output_tokens":4,"cost_usd":0.1}},{"usage":{"input_tokens":1,"cost_usd":0.2}}]"#;
    let entry =
        |content: &str, status: &str| PlanEntry { content: content.to_owned(), status: status.to_owned() };
    let usage = |input_tokens, output_tokens, cost_usd, total| TurnUpdate::Usage {
        usage: TokenUsage { input_tokens, output_tokens, cost_usd },
        conversation_cost_usd: Some(total),
    };
    let context = |used| TurnUpdate::Context(ContextUsage { used, size: 1 << 20 });
    let expected = [
        TurnUpdate::Plan {
            entries: vec![entry("one", "in_progress"), entry("two", ""), entry("three", "odd")],
        },
        usage(3, 4, 0.1, 0.1),
        context(7),
        usage(1, 0, 0.2, 0.3),
        context(8),
    ];
    assert_eq!(agent.run_turn("a", script).await.turn_updates(), expected);
}

#[tokio::test(start_paused = true)]
async fn write_and_read_are_relative_to_the_workspace_and_their_errors_fail_the_turn() {
    let mut agent = scripted().await;
    let script = r#"[{"write":{"path":"sub/f.txt","content":"käse"}},{"read":"sub/f.txt"}]"#;
    assert_eq!(agent.run_turn("a", script).await.text(), "käse");
    assert_eq!(std::fs::read_to_string(agent.workspace.path().join("sub/f.txt")).unwrap(), "käse");

    for (name, script) in
        [("b", r#"[{"read":"absent"}]"#), ("c", r#"[{"write":{"path":"sub","content":""}}]"#)]
    {
        let ended = agent.run_turn(name, script).await;
        let error = ended.outcome.error.expect("it must fail");
        assert_eq!((ended.outcome.stop, error.code.as_str()), (TurnStopReason::Error, "agent_error"));
        assert!(error.message.starts_with("cannot "), "{}", error.message);
    }
}

#[tokio::test]
async fn spawn_really_starts_a_process_and_says_its_pid() {
    let mut agent = scripted().await;
    let ended = agent.run_turn("a", r#"[{"spawn":{"argv":["sleep","600"]}}]"#).await;
    let text = ended.text();
    let pid: i32 = text.strip_prefix("pid ").and_then(|pid| pid.parse().ok()).expect("a pid");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)).unwrap();
    assert_eq!(parent, std::process::id().to_string());
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();

    let ended = agent.run_turn("b", r#"[{"spawn":{"argv":["/no/such/program"]}}]"#).await;
    let error = ended.outcome.error.expect("it must fail");
    assert!(error.message.starts_with("cannot start /no/such/program"), "{}", error.message);
}

#[tokio::test(start_paused = true)]
async fn a_steer_is_taken_when_it_is_awaited_early_or_in_time() {
    let mut agent = scripted().await;
    agent.prompt("a", r#"[{"say":"x"},{"sleep_ms":10},{"await_steer":0},{"say":" "},{"await_steer":500}]"#);
    agent.wait_for_text("x").await;
    let early = agent.steer("a", "left");
    assert_eq!(agent.next_update().await, AgentUpdate::SteerTaken { steer: early });
    agent.wait_for_text("steered: left ").await;
    let in_time = agent.steer("a", "right");
    let ended = agent.wait_for_end("a").await;
    assert_eq!(ended.updates[0], AgentUpdate::SteerTaken { steer: in_time });
    assert_eq!(ended.text(), "steered: right");
}

#[tokio::test(start_paused = true)]
async fn without_a_steer_the_wait_ends_and_says_so() {
    let mut agent = scripted().await;
    let start = Instant::now();
    assert_eq!(agent.run_turn("a", r#"[{"await_steer":400}]"#).await.text(), "no steer");
    assert_eq!(start.elapsed().as_millis(), 400);
}

#[tokio::test(start_paused = true)]
async fn steers_that_nobody_awaits_are_missed_before_the_end_also_of_a_cancelled_turn() {
    let mut agent = scripted().await;
    for (name, cancel, stop) in
        [("a", false, TurnStopReason::EndTurn), ("b", true, TurnStopReason::Cancelled)]
    {
        agent.prompt(name, r#"[{"say":"x"},{"sleep_ms":100}]"#);
        agent.wait_for_text("x").await;
        let numbers = [agent.steer(name, "one"), agent.steer(name, "two")];
        // Gives the agent time to receive the steers, because a cancel would overtake them.
        tokio::time::sleep(Duration::from_millis(1)).await;
        if cancel {
            agent.cancel(name);
        }
        let ended = agent.wait_for_end(name).await;
        assert_eq!(ended.outcome.stop, stop);
        assert_eq!(ended.updates, numbers.map(|steer| AgentUpdate::SteerMissed { steer }));
    }
}

#[tokio::test(start_paused = true)]
async fn late_output_comes_after_the_end_under_the_old_run_also_after_a_cancel() {
    let mut agent = scripted().await;
    for (name, script) in [
        ("a", r#"[{"late":"too late"},{"say":"x"}]"#),
        ("b", r#"[{"late":"too late"},{"say":"x"},{"sleep_ms":99999999}]"#),
    ] {
        agent.prompt(name, script);
        agent.wait_for_text("x").await;
        agent.cancel(name);
        assert!(!agent.wait_for_end(name).await.text().contains("late"));
        let late =
            AgentUpdate::Turn { run: run_id(name), update: TurnUpdate::Text { text: "too late".to_owned() } };
        assert_eq!(agent.next_update().await, late);
    }
}

#[tokio::test(start_paused = true)]
async fn config_says_where_and_as_what_it_runs_in_one_line() {
    let mut agent = scripted_with(ScriptSetup::default(), |spec| {
        spec.cwd = "/some/where".into();
        spec.model = Some("m-1".to_owned());
        spec.system_prompt = Some("be\nbrief".to_owned());
    })
    .await;
    let ended = agent.run_turn("a", r#"[{"config":true}]"#).await;
    assert_eq!(ended.text(), r"cwd=/some/where model=m-1 system_prompt=be\nbrief");
}

#[tokio::test(start_paused = true)]
async fn stop_and_fail_end_the_turn_as_they_say() {
    let mut agent = scripted().await;
    for (at, (step, stop)) in [
        (r#"{"stop":"max_tokens"}"#, TurnStopReason::MaxTokens),
        (r#"{"stop":"max_turns"}"#, TurnStopReason::MaxTurns),
        (r#"{"stop":"refused"}"#, TurnStopReason::Refused),
        (r#"{"fail":"no luck"}"#, TurnStopReason::Error),
    ]
    .into_iter()
    .enumerate()
    {
        let ended =
            agent.run_turn(&format!("r{at}"), &format!(r#"[{{"say":"x"}},{step},{{"say":"never"}}]"#)).await;
        assert_eq!((ended.outcome.stop, ended.text().as_str()), (stop, "x"));
        let error = ended.outcome.error.map(|error| (error.code, error.message));
        assert_eq!(
            error,
            (stop == TurnStopReason::Error).then(|| ("agent_error".to_owned(), "no luck".to_owned()))
        );
    }
}

#[tokio::test(start_paused = true)]
async fn exit_ends_the_agent_after_its_last_words() {
    let mut agent = scripted().await;
    agent.prompt("a", r#"[{"say":"last words"},{"exit":3},{"say":"never"}]"#);
    agent.wait_for_text("last words").await;
    assert_eq!(agent.wait_for_failure().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn a_script_with_a_bad_step_fails_before_its_first_step() {
    let mut agent = scripted().await;
    for (at, (script, expected)) in [
        (r#"[{"say":"x"},{"dance":1}]"#, "step 2 of 2 (`dance`)"),
        (r#"[{"say":"x"},{"sleep_ms":"long"}]"#, "step 2 of 2 (`sleep_ms`)"),
    ]
    .into_iter()
    .enumerate()
    {
        let ended = agent.run_turn(&format!("r{at}"), script).await;
        assert_eq!((ended.outcome.stop, ended.updates), (TurnStopReason::Error, vec![]));
        let error = ended.outcome.error.expect("an error");
        assert_eq!(error.code, "invalid_script");
        assert!(error.message.contains(expected), "{}", error.message);
    }
}

#[tokio::test(start_paused = true)]
async fn it_is_ready_after_the_delay_in_its_environment_and_fails_if_that_is_no_number() {
    let start = Instant::now();
    let setup = |ms: &str| ScriptSetup { ready_ms: Some(ms.to_owned()), ..ScriptSetup::default() };
    scripted_with(setup("1500"), |_| {}).await;
    assert_eq!(start.elapsed().as_millis(), 1500);

    let mut agent = start_with(
        |_| {},
        async move |pipe| {
            let (from, to) = tokio::io::split(pipe);
            qd_script::serve(from, to, setup("s3cret")).await;
        },
    );
    let error = agent.wait_for_failure().await;
    assert_eq!(error.message, "SCRIPT_READY_MS must be a whole number of milliseconds");
}
