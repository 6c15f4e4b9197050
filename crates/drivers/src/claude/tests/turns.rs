//! Turns from prompt to result: text, tools, asks and usage.

use std::collections::BTreeMap;

use qd_protocol::event::{AskKind, PermissionDecision, TokenUsage};
use qd_protocol::link::{AgentUpdate, AskResolution, PromptFile, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::TokenPrice;
use serde_json::json;

use super::{ClaudeTestSetup, FakeClaudeAgent, start_fake_agent, start_with};
use crate::harness::{assert_ended_well, decision_reply, run_id, value_reply};
use crate::pricing::TokenPricing;

#[tokio::test(start_paused = true)]
async fn text_comes_in_pieces_and_once_with_its_tokens_and_its_cost() {
    let mut agent = start_fake_agent(|mut fake| async move {
        for _ in 0..2 {
            let prompt = fake.start_prompt().await;
            fake.send_text("hello there").await;
            fake.end_turn(&prompt, "hello there").await;
        }
        fake.wait_for_hang_up().await;
    })
    .await;
    for name in ["a", "b"] {
        let ended = agent.run_turn(name, "x").await;
        assert_ended_well(&ended);
        assert_eq!(
            (ended.text().as_str(), ended.outcome.text.as_deref()),
            ("hello there", Some("hello there"))
        );
        assert_eq!(ended.usage(), TokenUsage { input_tokens: 15, output_tokens: 7, cost_usd: 0.5 });
        assert_eq!(ended.model_calls(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_prompt_comes_with_its_files_and_what_cannot_be_taken_is_named() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let line = fake.next_json().await;
        let content = line["message"]["content"].as_array().expect("blocks");
        assert_eq!((content[0]["text"].as_str(), content[1]["type"].as_str()), (Some("look"), Some("image")));
        assert_eq!(content.len(), 2);
        fake.end_turn(line["uuid"].as_str().expect("a UUID"), "seen").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    let file =
        |name: &str, mime: &str| PromptFile { name: name.into(), mime: mime.into(), data: "/w==".into() };
    agent.prompt_with("a", "look", vec![file("a.png", "image/png"), file("b.bin", "x/y")], vec![]);
    let updates = agent.wait_for_end("a").await.turn_updates();
    assert!(matches!(&updates[0], TurnUpdate::Notice { text, .. } if text.contains("b.bin")), "{updates:?}");
}

#[tokio::test(start_paused = true)]
async fn output_between_turns_and_of_turns_the_agent_starts_itself_belongs_to_the_previous_run() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        fake.end_turn(&prompt, "begun").await;
        // A background task has ended. This output belongs to no prompt.
        fake.send_text("it is done").await;
        fake.request_permission("late", "Bash", json!({"command": "ls"})).await;
        assert_eq!(fake.expect_answer("late").await["response"]["behavior"], "deny");
        // The next prompt arrives meanwhile and is taken into that turn.
        let (prompt, _) = fake.expect_user_message().await;
        fake.send_lifecycle(&prompt, "queued").await;
        fake.send_text("still at it").await;
        fake.send_lifecycle(&prompt, "started").await;
        fake.send_text("for you").await;
        fake.send_lifecycle(&prompt, "completed").await;
        fake.send_result(&[&prompt], json!({"result": "for you"})).await;
        // A prompt that is not taken into such a turn waits for another result.
        let (prompt, _) = fake.expect_user_message().await;
        fake.send_result(&[], json!({"result": "nobody's"})).await;
        fake.send_lifecycle(&prompt, "queued").await;
        fake.send_lifecycle(&prompt, "started").await;
        fake.send_text("third").await;
        fake.end_turn(&prompt, "third").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    assert_ended_well(&agent.run_turn("a", "x").await);
    agent.wait_for_text("it is done").await;
    agent.prompt("b", "x");
    let ended = agent.wait_for_end("b").await;
    let run_of = |text_part: &str| {
        let found = ended.updates.iter().find_map(|up| match up {
            AgentUpdate::Turn { run, update: TurnUpdate::Text { text } } if text.contains(text_part) => {
                Some(run.clone())
            }
            _ => None,
        });
        found.expect("it was emitted")
    };
    assert_eq!((run_of("still"), run_of("for")), (run_id("a"), run_id("b")));
    assert_eq!(ended.outcome.text.as_deref(), Some("for you"));
    assert_eq!(agent.run_turn("c", "x").await.outcome.text.as_deref(), Some("third"));
}

#[tokio::test(start_paused = true)]
async fn a_tool_is_allowed_once_and_a_denial_comes_with_its_reason() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        let input = json!({"command": "rm x"});
        fake.send_assistant_message(
            "m",
            json!({"type": "tool_use", "id": "t1", "name": "Bash", "input": input}),
        )
        .await;
        fake.request_permission("one", "Bash", input.clone()).await;
        fake.request_permission("two", "Write", json!({"file_path": "y"})).await;
        let second = fake.expect_answer("two").await;
        assert_eq!(second["response"], json!({"behavior": "deny", "message": "not that"}));
        let first = fake.expect_answer("one").await;
        assert_eq!(first["response"], json!({"behavior": "allow", "updatedInput": input}));
        let tool_result =
            json!([{"type": "tool_result", "tool_use_id": "t1", "content": "gone", "is_error": true}]);
        fake.send(json!({"type": "user", "message": {"role": "user", "content": tool_result}})).await;
        fake.end_turn(&prompt, "done").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    let (one, two) = (agent.wait_for_ask().await, agent.wait_for_ask().await);
    assert_eq!((one.kind, one.tool.as_deref()), (AskKind::Permission, Some("Bash")));
    assert_eq!(one.input, json!({"command": "rm x"}));
    agent.answer(&two, decision_reply(PermissionDecision::Deny, Some("not that")));
    let delivered = agent.next_update().await;
    assert!(matches!(&delivered, AgentUpdate::AskDelivered { ask } if *ask == two.id), "{delivered:?}");
    agent.answer(&one, decision_reply(PermissionDecision::AllowAlways, None));
    let ended = agent.wait_for_end("a").await;
    assert_ended_well(&ended);
    let finished = TurnUpdate::ToolFinished {
        call_id: "t1".to_owned(),
        name: "Bash".to_owned(),
        output: json!("gone"),
        is_error: true,
    };
    assert!(ended.turn_updates().contains(&finished), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn questions_are_asked_one_by_one_and_answered_in_the_tools_arguments() {
    let question = |text: &str, many: bool| {
        let options = json!([{"label": "Red"}, {"label": "Blue"}]);
        json!({"question": text, "header": "h", "options": options, "multiSelect": many})
    };
    let input = json!({"questions": [question("Which?", false), question("And which?", true)]});
    let sent_input = input.clone();
    let mut agent = start_fake_agent(|mut fake| async move {
        for answered in [true, false] {
            let prompt = fake.start_prompt().await;
            fake.request_permission("q", "AskUserQuestion", sent_input.clone()).await;
            let answer = fake.expect_answer("q").await["response"].take();
            if answered {
                let answers = json!({"Which?": "Blue", "And which?": "Red, Blue"});
                assert_eq!(answer["updatedInput"]["answers"], answers);
                assert_eq!(answer["updatedInput"]["questions"], sent_input["questions"]);
            } else {
                assert_eq!(answer["behavior"], "deny");
            }
            fake.end_turn(&prompt, "").await;
        }
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    let which = agent.wait_for_ask().await;
    assert_eq!((which.kind, which.prompt.as_str()), (AskKind::Question, "Which?"));
    assert_eq!(which.options, ["Red", "Blue"]);
    agent.answer(&which, value_reply("Blue"));
    let both = agent.wait_for_ask().await;
    agent.answer(&both, value_reply("Red,Blue"));
    assert_ended_well(&agent.wait_for_end("a").await);
    agent.prompt("b", "x");
    let which = agent.wait_for_ask().await;
    agent.answer(&which, decision_reply(PermissionDecision::Deny, None));
    assert_ended_well(&agent.wait_for_end("b").await);
}

#[tokio::test(start_paused = true)]
async fn an_ask_that_the_agent_gives_up_is_withdrawn_and_its_answer_goes_nowhere() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        fake.request_permission("gone", "Bash", json!({"command": "ls"})).await;
        fake.send(json!({"type": "control_cancel_request", "request_id": "gone"})).await;
        fake.request_permission("stays", "Bash", json!({"command": "ls"})).await;
        fake.expect_answer("stays").await;
        fake.end_turn(&prompt, "").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    let gone = agent.wait_for_ask().await;
    let withdrawn = agent.next_update().await;
    assert!(matches!(&withdrawn, AgentUpdate::AskWithdrawn { ask } if *ask == gone.id), "{withdrawn:?}");
    let stays = agent.wait_for_ask().await;
    agent.answer(&gone, decision_reply(PermissionDecision::AllowOnce, None));
    agent.answer(&stays, AskResolution::Withdrawn);
    assert_ended_well(&agent.wait_for_end("a").await);
}

#[tokio::test(start_paused = true)]
async fn an_ask_that_outlives_its_turn_is_answered_when_that_ends() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        // The ask is from a subagent in the background.
        fake.request_permission("q", "Bash", json!({"command": "ls"})).await;
        fake.end_turn(&prompt, "begun").await;
        assert_eq!(fake.expect_answer("q").await["response"]["behavior"], "deny");
        let prompt = fake.start_prompt().await;
        fake.end_turn(&prompt, "next").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    assert_ended_well(&agent.run_turn("a", "x").await);
    assert_eq!(agent.run_turn("b", "x").await.outcome.text.as_deref(), Some("next"));
}

#[tokio::test(start_paused = true)]
async fn unknown_requests_of_the_agent_are_refused_and_never_ignored() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        for request in [json!({"subtype": "hook_callback"}), json!({"subtype": "can_use_tool"}), json!({})] {
            fake.send(json!({"type": "control_request", "request_id": "r", "request": request})).await;
            assert_eq!(fake.expect_answer("r").await["subtype"], "error");
        }
        fake.write_line("a library's own words").await;
        fake.send(json!({"type": "rate_limit_event"})).await;
        fake.end_turn(&prompt, "").await;
        fake.send(
            json!({"type": "control_request", "request_id": "i", "request": {"subtype": "mcp_message"}}),
        )
        .await;
        assert_eq!(fake.expect_answer("i").await["subtype"], "error");
        let prompt = fake.start_prompt().await;
        fake.end_turn(&prompt, "").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    assert_ended_well(&agent.run_turn("a", "x").await);
    assert_ended_well(&agent.run_turn("b", "x").await);
}

#[tokio::test(start_paused = true)]
async fn a_failed_model_call_fails_the_turn_and_its_text_is_no_answer() {
    let mut agent = start_fake_agent(|mut fake| async move {
        let prompt = fake.start_prompt().await;
        let message =
            json!({"id": "m", "model": "<synthetic>", "content": [{"type": "text", "text": "API Error"}]});
        fake.send(json!({"type": "assistant", "message": message, "is_api_error_message": true})).await;
        let failed = json!({"is_error": true, "result": "API Error: 400", "terminal_reason": "api_error"});
        fake.send_result(&[&prompt], failed).await;
        fake.send_lifecycle(&prompt, "cancelled").await;
        let prompt = fake.start_prompt().await;
        fake.send_text("fine").await;
        fake.end_turn(&prompt, "fine").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    let ended = agent.run_turn("a", "x").await;
    let error = ended.outcome.error.as_ref().expect("an error");
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "API Error: 400"));
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (TurnStopReason::Error, ""));
    assert_eq!(agent.run_turn("b", "x").await.text(), "fine");
}

#[tokio::test(start_paused = true)]
async fn cost_is_estimated_during_a_turn_and_only_the_rest_is_added_at_its_end() {
    let prices = BTreeMap::from([("m".to_owned(), TokenPrice { input: 10_000.0, output: 10_000.0 })]);
    let setup = ClaudeTestSetup { pricing: TokenPricing::new(prices), ..ClaudeTestSetup::default() };
    let mut agent = start_with(setup, |pipe| async move {
        let mut fake = FakeClaudeAgent::new(pipe);
        fake.handshake().await;
        let prompt = fake.start_prompt().await;
        fake.send_text("one").await;
        fake.request_permission("wait", "Bash", json!({})).await;
        fake.expect_answer("wait").await;
        fake.end_turn(&prompt, "one").await;
        fake.wait_for_hang_up().await;
    });
    agent.next_update().await;
    agent.prompt("a", "x");
    let mut estimate = 0.0;
    let ask = loop {
        match agent.next_update().await {
            AgentUpdate::Turn { update: TurnUpdate::Usage { usage, .. }, .. } => estimate += usage.cost_usd,
            AgentUpdate::Ask { ask, .. } => break ask,
            _ => {}
        }
    };
    // 10 tokens in, 5 read from the cache at a tenth, 7 out.
    assert!((estimate - 0.175).abs() < 1e-9, "{estimate}");
    agent.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    let rest = agent.wait_for_end("a").await.usage().cost_usd;
    assert!((rest - 0.325).abs() < 1e-9, "{rest}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_exits_during_a_turn_or_before_it_is_ready_is_reported() {
    let mut agent = start_fake_agent(|mut fake| async move {
        fake.start_prompt().await;
        fake.send_text("half of").await;
    })
    .await;
    agent.prompt("a", "x");
    assert_eq!(agent.wait_for_failure().await.code, "hung_up");
    let mut agent = start_with(ClaudeTestSetup::default(), |pipe| async move { drop(pipe) });
    assert_eq!(agent.wait_for_failure().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn a_missing_conversation_is_refused_with_the_agents_message() {
    let mut agent = start_with(ClaudeTestSetup::default(), |pipe| async move {
        let mut fake = FakeClaudeAgent::new(pipe);
        fake.expect_control_request("initialize").await;
        let refused = json!({"is_error": true, "subtype": "error_during_execution", "errors": ["No conversation found"]});
        fake.send_result(&[], refused).await;
        fake.wait_for_hang_up().await;
    });
    assert_eq!(agent.wait_for_failure().await.message, "No conversation found");
}

#[tokio::test(start_paused = true)]
async fn a_failed_resume_is_reported_in_the_first_turn_only() {
    let setup = ClaudeTestSetup {
        resume_failure: Some("No conversation found".to_owned()),
        ..ClaudeTestSetup::default()
    };
    let mut agent = start_with(setup, |pipe| async move {
        let mut fake = FakeClaudeAgent::new(pipe);
        fake.handshake().await;
        for _ in 0..2 {
            let prompt = fake.start_prompt().await;
            fake.end_turn(&prompt, "").await;
        }
        fake.wait_for_hang_up().await;
    });
    agent.next_update().await;
    let updates = agent.run_turn("a", "x").await.turn_updates();
    assert!(
        matches!(&updates[0], TurnUpdate::Notice { text, .. } if text.contains("No conversation found")),
        "{updates:?}"
    );
    assert!(
        !agent
            .run_turn("b", "x")
            .await
            .turn_updates()
            .iter()
            .any(|update| matches!(update, TurnUpdate::Notice { .. }))
    );
}

#[tokio::test(start_paused = true)]
async fn a_resumed_conversation_is_not_charged_again_for_its_past() {
    let mut agent = start_with(
        ClaudeTestSetup { resumed: Some("s".to_owned()), ..ClaudeTestSetup::default() },
        |pipe| async move {
            let mut fake = FakeClaudeAgent::new(pipe);
            fake.handshake().await;
            fake.total_cost = 7.0;
            let prompt = fake.start_prompt().await;
            let cost = json!({"m": {"inputTokens": 1, "outputTokens": 1, "costUSD": 0.25}});
            fake.send_result(&[&prompt], json!({"model_usage_since_last_result": cost})).await;
            fake.wait_for_hang_up().await;
        },
    );
    agent.next_update().await;
    assert_eq!(agent.run_turn("a", "x").await.usage().cost_usd, 0.25);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_names_no_messages_is_still_understood() {
    let mut agent = start_fake_agent(|mut fake| async move {
        for text in ["one", "two"] {
            fake.expect_user_message().await;
            fake.send_text(text).await;
            fake.send_result(&[], json!({"result": text})).await;
        }
        fake.wait_for_hang_up().await;
    })
    .await;
    for (name, text) in [("a", "one"), ("b", "two")] {
        let ended = agent.run_turn(name, "x").await;
        assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), (text, Some(text)));
    }
}
