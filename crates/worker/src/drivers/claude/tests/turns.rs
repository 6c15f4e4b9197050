//! Turns from their prompts to their results: words, tools, asks and figures.

use std::collections::BTreeMap;

use qd_protocol::event::{AskKind, PermissionDecision, TokenUsage};
use qd_protocol::link::{AgentUpdate, AskResolution, PromptFile, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::TokenPrice;
use serde_json::json;

use super::{ClaudeTestSetup, FakeClaudeAgent, start_fake_agent, start_with};
use crate::drivers::harness::{assert_ended_well, decision_reply, run_id, value_reply};
use crate::drivers::pricing::TokenPricing;

#[tokio::test(start_paused = true)]
async fn text_comes_in_pieces_and_once_with_its_tokens_and_its_cost() {
    let mut agent = start_fake_agent(|mut hand| async move {
        for _ in 0..2 {
            let prompt = hand.start_prompt().await;
            hand.send_text("hello there").await;
            hand.end_turn(&prompt, "hello there").await;
        }
        hand.wait_for_hang_up().await;
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
    let mut agent = start_fake_agent(|mut hand| async move {
        let line = hand.next_json().await;
        let content = line["message"]["content"].as_array().expect("blocks");
        assert_eq!((content[0]["text"].as_str(), content[1]["type"].as_str()), (Some("look"), Some("image")));
        assert_eq!(content.len(), 2);
        hand.end_turn(line["uuid"].as_str().expect("a name"), "seen").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    let file =
        |name: &str, mime: &str| PromptFile { name: name.into(), mime: mime.into(), data: "/w==".into() };
    agent.prompt_with("a", "look", vec![file("a.png", "image/png"), file("b.bin", "x/y")], vec![]);
    let said = agent.wait_for_end("a").await.turn_updates();
    assert!(matches!(&said[0], TurnUpdate::Notice { text } if text.contains("b.bin")), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_said_between_two_turns_belongs_to_the_one_before_and_so_does_a_turn_of_its_own() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        hand.end_turn(&prompt, "begun").await;
        // A task in the background has ended: nobody's prompt.
        hand.send_text("it is done").await;
        hand.request_permission("late", "Bash", json!({"command": "ls"})).await;
        assert_eq!(hand.expect_answer("late").await["response"]["behavior"], "deny");
        // The next prompt meets it in the middle, and is taken into it.
        let (prompt, _) = hand.expect_user_message().await;
        hand.send_lifecycle(&prompt, "queued").await;
        hand.send_text("still at it").await;
        hand.send_lifecycle(&prompt, "started").await;
        hand.send_text("for you").await;
        hand.send_lifecycle(&prompt, "completed").await;
        hand.send_result(&[&prompt], json!({"result": "for you"})).await;
        // And one that is not taken into it waits for another result.
        let (prompt, _) = hand.expect_user_message().await;
        hand.send_result(&[], json!({"result": "nobody's"})).await;
        hand.send_lifecycle(&prompt, "queued").await;
        hand.send_lifecycle(&prompt, "started").await;
        hand.send_text("third").await;
        hand.end_turn(&prompt, "third").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    assert_ended_well(&agent.run_turn("a", "x").await);
    agent.wait_for_text("it is done").await;
    agent.prompt("b", "x");
    let ended = agent.wait_for_end("b").await;
    let under = |wanted: &str| {
        let found = ended.updates.iter().find_map(|up| match up {
            AgentUpdate::Turn { run, update: TurnUpdate::Text { text } } if text.contains(wanted) => {
                Some(run.clone())
            }
            _ => None,
        });
        found.expect("it was said")
    };
    assert_eq!((under("still"), under("for")), (run_id("a"), run_id("b")));
    assert_eq!(ended.outcome.text.as_deref(), Some("for you"));
    assert_eq!(agent.run_turn("c", "x").await.outcome.text.as_deref(), Some("third"));
}

#[tokio::test(start_paused = true)]
async fn a_tool_is_used_after_a_yes_that_holds_once_and_a_no_comes_with_its_reason() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        let input = json!({"command": "rm x"});
        hand.send_assistant_message(
            "m",
            json!({"type": "tool_use", "id": "t1", "name": "Bash", "input": input}),
        )
        .await;
        hand.request_permission("one", "Bash", input.clone()).await;
        hand.request_permission("two", "Write", json!({"file_path": "y"})).await;
        let second = hand.expect_answer("two").await;
        assert_eq!(second["response"], json!({"behavior": "deny", "message": "not that"}));
        let first = hand.expect_answer("one").await;
        assert_eq!(first["response"], json!({"behavior": "allow", "updatedInput": input}));
        let gave = json!([{"type": "tool_result", "tool_use_id": "t1", "content": "gone", "is_error": true}]);
        hand.send(json!({"type": "user", "message": {"role": "user", "content": gave}})).await;
        hand.end_turn(&prompt, "done").await;
        hand.wait_for_hang_up().await;
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
    let gone = TurnUpdate::ToolFinished {
        call_id: "t1".to_owned(),
        name: "Bash".to_owned(),
        output: json!("gone"),
        is_error: true,
    };
    assert!(ended.turn_updates().contains(&gone), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn questions_are_asked_one_by_one_and_answered_in_the_tools_arguments() {
    let question = |text: &str, many: bool| {
        let options = json!([{"label": "Red"}, {"label": "Blue"}]);
        json!({"question": text, "header": "h", "options": options, "multiSelect": many})
    };
    let input = json!({"questions": [question("Which?", false), question("And which?", true)]});
    let given = input.clone();
    let mut agent = start_fake_agent(|mut hand| async move {
        for answered in [true, false] {
            let prompt = hand.start_prompt().await;
            hand.request_permission("q", "AskUserQuestion", given.clone()).await;
            let answer = hand.expect_answer("q").await["response"].take();
            if answered {
                let answers = json!({"Which?": "Blue", "And which?": "Red, Blue"});
                assert_eq!(answer["updatedInput"]["answers"], answers);
                assert_eq!(answer["updatedInput"]["questions"], given["questions"]);
            } else {
                assert_eq!(answer["behavior"], "deny");
            }
            hand.end_turn(&prompt, "").await;
        }
        hand.wait_for_hang_up().await;
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
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        hand.request_permission("gone", "Bash", json!({"command": "ls"})).await;
        hand.send(json!({"type": "control_cancel_request", "request_id": "gone"})).await;
        hand.request_permission("stays", "Bash", json!({"command": "ls"})).await;
        hand.expect_answer("stays").await;
        hand.end_turn(&prompt, "").await;
        hand.wait_for_hang_up().await;
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
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        // Of a helper in the background.
        hand.request_permission("q", "Bash", json!({"command": "ls"})).await;
        hand.end_turn(&prompt, "begun").await;
        assert_eq!(hand.expect_answer("q").await["response"]["behavior"], "deny");
        let prompt = hand.start_prompt().await;
        hand.end_turn(&prompt, "next").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    assert_ended_well(&agent.run_turn("a", "x").await);
    assert_eq!(agent.run_turn("b", "x").await.outcome.text.as_deref(), Some("next"));
}

#[tokio::test(start_paused = true)]
async fn what_the_agent_wants_and_nobody_knows_is_refused_and_never_met_with_silence() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        for request in [json!({"subtype": "hook_callback"}), json!({"subtype": "can_use_tool"}), json!({})] {
            hand.send(json!({"type": "control_request", "request_id": "r", "request": request})).await;
            assert_eq!(hand.expect_answer("r").await["subtype"], "error");
        }
        hand.write_line("a library's own words").await;
        hand.send(json!({"type": "rate_limit_event"})).await;
        hand.end_turn(&prompt, "").await;
        hand.send(
            json!({"type": "control_request", "request_id": "i", "request": {"subtype": "mcp_message"}}),
        )
        .await;
        assert_eq!(hand.expect_answer("i").await["subtype"], "error");
        let prompt = hand.start_prompt().await;
        hand.end_turn(&prompt, "").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    assert_ended_well(&agent.run_turn("a", "x").await);
    assert_ended_well(&agent.run_turn("b", "x").await);
}

#[tokio::test(start_paused = true)]
async fn a_failed_call_of_the_model_is_a_failure_and_its_words_are_no_answer() {
    let mut agent = start_fake_agent(|mut hand| async move {
        let prompt = hand.start_prompt().await;
        let message =
            json!({"id": "m", "model": "<synthetic>", "content": [{"type": "text", "text": "API Error"}]});
        hand.send(json!({"type": "assistant", "message": message, "is_api_error_message": true})).await;
        let failed = json!({"is_error": true, "result": "API Error: 400", "terminal_reason": "api_error"});
        hand.send_result(&[&prompt], failed).await;
        hand.send_lifecycle(&prompt, "cancelled").await;
        let prompt = hand.start_prompt().await;
        hand.send_text("fine").await;
        hand.end_turn(&prompt, "fine").await;
        hand.wait_for_hang_up().await;
    })
    .await;
    let ended = agent.run_turn("a", "x").await;
    let error = ended.outcome.error.as_ref().expect("an error");
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "API Error: 400"));
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (TurnStopReason::Error, ""));
    assert_eq!(agent.run_turn("b", "x").await.text(), "fine");
}

#[tokio::test(start_paused = true)]
async fn a_known_price_is_told_in_the_middle_of_a_turn_and_only_the_rest_at_its_end() {
    let prices = BTreeMap::from([("m".to_owned(), TokenPrice { input: 10_000.0, output: 10_000.0 })]);
    let given = ClaudeTestSetup { pricing: TokenPricing::new(prices), ..ClaudeTestSetup::default() };
    let mut agent = start_with(given, |far| async move {
        let mut hand = FakeClaudeAgent::new(far);
        hand.handshake().await;
        let prompt = hand.start_prompt().await;
        hand.send_text("one").await;
        hand.request_permission("wait", "Bash", json!({})).await;
        hand.expect_answer("wait").await;
        hand.end_turn(&prompt, "one").await;
        hand.wait_for_hang_up().await;
    });
    agent.next_update().await;
    agent.prompt("a", "x");
    let mut estimate = 0.0;
    let ask = loop {
        match agent.next_update().await {
            AgentUpdate::Turn { update: TurnUpdate::Usage { usage }, .. } => estimate += usage.cost_usd,
            AgentUpdate::Ask { ask, .. } => break ask,
            _ => {}
        }
    };
    // 10 in, 5 read from the cache at a tenth, 7 out.
    assert!((estimate - 0.175).abs() < 1e-9, "{estimate}");
    agent.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    let rest = agent.wait_for_end("a").await.usage().cost_usd;
    assert!((rest - 0.325).abs() < 1e-9, "{rest}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_ends_in_its_turn_or_before_it_is_ready_is_no_more() {
    let mut agent = start_fake_agent(|mut hand| async move {
        hand.start_prompt().await;
        hand.send_text("half of").await;
    })
    .await;
    agent.prompt("a", "x");
    assert_eq!(agent.wait_for_failure().await.code, "hung_up");
    let mut agent = start_with(ClaudeTestSetup::default(), |far| async move { drop(far) });
    assert_eq!(agent.wait_for_failure().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn a_conversation_that_is_not_there_is_refused_with_the_agents_words() {
    let mut agent = start_with(ClaudeTestSetup::default(), |far| async move {
        let mut hand = FakeClaudeAgent::new(far);
        hand.expect_control_request("initialize").await;
        let refused = json!({"is_error": true, "subtype": "error_during_execution", "errors": ["No conversation found"]});
        hand.send_result(&[], refused).await;
        hand.wait_for_hang_up().await;
    });
    assert_eq!(agent.wait_for_failure().await.message, "No conversation found");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_has_forgotten_says_so_in_its_first_turn_and_no_more() {
    let given = ClaudeTestSetup {
        resume_failure: Some("No conversation found".to_owned()),
        ..ClaudeTestSetup::default()
    };
    let mut agent = start_with(given, |far| async move {
        let mut hand = FakeClaudeAgent::new(far);
        hand.handshake().await;
        for _ in 0..2 {
            let prompt = hand.start_prompt().await;
            hand.end_turn(&prompt, "").await;
        }
        hand.wait_for_hang_up().await;
    });
    agent.next_update().await;
    let said = agent.run_turn("a", "x").await.turn_updates();
    assert!(
        matches!(&said[0], TurnUpdate::Notice { text } if text.contains("No conversation found")),
        "{said:?}"
    );
    assert!(
        !agent
            .run_turn("b", "x")
            .await
            .turn_updates()
            .iter()
            .any(|said| matches!(said, TurnUpdate::Notice { .. }))
    );
}

#[tokio::test(start_paused = true)]
async fn a_resumed_conversation_is_not_charged_again_for_its_past() {
    let mut agent = start_with(
        ClaudeTestSetup { resumed: Some("s".to_owned()), ..ClaudeTestSetup::default() },
        |far| async move {
            let mut hand = FakeClaudeAgent::new(far);
            hand.handshake().await;
            hand.total_cost = 7.0;
            let prompt = hand.start_prompt().await;
            let cost = json!({"m": {"inputTokens": 1, "outputTokens": 1, "costUSD": 0.25}});
            hand.send_result(&[&prompt], json!({"model_usage_since_last_result": cost})).await;
            hand.wait_for_hang_up().await;
        },
    );
    agent.next_update().await;
    assert_eq!(agent.run_turn("a", "x").await.usage().cost_usd, 0.25);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_names_no_messages_is_still_understood() {
    let mut agent = start_fake_agent(|mut hand| async move {
        for text in ["one", "two"] {
            hand.expect_user_message().await;
            hand.send_text(text).await;
            hand.send_result(&[], json!({"result": text})).await;
        }
        hand.wait_for_hang_up().await;
    })
    .await;
    for (name, text) in [("a", "one"), ("b", "two")] {
        let ended = agent.run_turn(name, "x").await;
        assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), (text, Some(text)));
    }
}
