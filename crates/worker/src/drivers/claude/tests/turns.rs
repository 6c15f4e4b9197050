//! Turns from their prompts to their results: words, tools, asks and figures.

use std::collections::BTreeMap;

use qd_protocol::event::{AskKind, Decision, Usage};
use qd_protocol::link::{File, Reply, Said, Stop, Up};
use qd_protocol::manifest::Price;
use serde_json::json;

use super::{Given, Hand, staged, with};
use crate::drivers::price::Pricing;
use crate::drivers::stage::{assert_well, choose, decide, run};

#[tokio::test(start_paused = true)]
async fn text_comes_in_pieces_and_once_with_its_tokens_and_its_cost() {
    let mut agent = with(|mut hand| async move {
        for _ in 0..2 {
            let prompt = hand.begin().await;
            hand.say("hello there").await;
            hand.end(&prompt, "hello there").await;
        }
        hand.idle().await;
    })
    .await;
    for name in ["a", "b"] {
        let ended = agent.play(name, "x").await;
        assert_well(&ended);
        assert_eq!(
            (ended.text().as_str(), ended.outcome.text.as_deref()),
            ("hello there", Some("hello there"))
        );
        assert_eq!(ended.usage(), Usage { input_tokens: 15, output_tokens: 7, cost_usd: 0.5 });
        assert_eq!(ended.turns(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_prompt_comes_with_its_files_and_what_cannot_be_taken_is_named() {
    let mut agent = with(|mut hand| async move {
        let line = hand.hear().await;
        let content = line["message"]["content"].as_array().expect("blocks");
        assert_eq!((content[0]["text"].as_str(), content[1]["type"].as_str()), (Some("look"), Some("image")));
        assert_eq!(content.len(), 2);
        hand.end(line["uuid"].as_str().expect("a name"), "seen").await;
        hand.idle().await;
    })
    .await;
    let file = |name: &str, mime: &str| File { name: name.into(), mime: mime.into(), data: "/w==".into() };
    agent.prompt_with("a", "look", vec![file("a.png", "image/png"), file("b.bin", "x/y")], vec![]);
    let said = agent.ended("a").await.said();
    assert!(matches!(&said[0], Said::Notice { text } if text.contains("b.bin")), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_said_between_two_turns_belongs_to_the_one_before_and_so_does_a_turn_of_its_own() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        hand.end(&prompt, "begun").await;
        // A task in the background has ended: nobody's prompt.
        hand.say("it is done").await;
        hand.ask("late", "Bash", json!({"command": "ls"})).await;
        assert_eq!(hand.answered("late").await["response"]["behavior"], "deny");
        // The next prompt meets it in the middle, and is taken into it.
        let (prompt, _) = hand.told().await;
        hand.fate(&prompt, "queued").await;
        hand.say("still at it").await;
        hand.fate(&prompt, "started").await;
        hand.say("for you").await;
        hand.fate(&prompt, "completed").await;
        hand.result(&[&prompt], json!({"result": "for you"})).await;
        // And one that is not taken into it waits for another result.
        let (prompt, _) = hand.told().await;
        hand.result(&[], json!({"result": "nobody's"})).await;
        hand.fate(&prompt, "queued").await;
        hand.fate(&prompt, "started").await;
        hand.say("third").await;
        hand.end(&prompt, "third").await;
        hand.idle().await;
    })
    .await;
    assert_well(&agent.play("a", "x").await);
    agent.until_text("it is done").await;
    agent.prompt("b", "x");
    let ended = agent.ended("b").await;
    let under = |wanted: &str| {
        let found = ended.ups.iter().find_map(|up| match up {
            Up::Said { run, what: Said::Text { text } } if text.contains(wanted) => Some(run.clone()),
            _ => None,
        });
        found.expect("it was said")
    };
    assert_eq!((under("still"), under("for")), (run("a"), run("b")));
    assert_eq!(ended.outcome.text.as_deref(), Some("for you"));
    assert_eq!(agent.play("c", "x").await.outcome.text.as_deref(), Some("third"));
}

#[tokio::test(start_paused = true)]
async fn a_tool_is_used_after_a_yes_that_holds_once_and_a_no_comes_with_its_reason() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        let input = json!({"command": "rm x"});
        hand.message("m", json!({"type": "tool_use", "id": "t1", "name": "Bash", "input": input})).await;
        hand.ask("one", "Bash", input.clone()).await;
        hand.ask("two", "Write", json!({"file_path": "y"})).await;
        let second = hand.answered("two").await;
        assert_eq!(second["response"], json!({"behavior": "deny", "message": "not that"}));
        let first = hand.answered("one").await;
        assert_eq!(first["response"], json!({"behavior": "allow", "updatedInput": input}));
        let gave = json!([{"type": "tool_result", "tool_use_id": "t1", "content": "gone", "is_error": true}]);
        hand.send(json!({"type": "user", "message": {"role": "user", "content": gave}})).await;
        hand.end(&prompt, "done").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    let (one, two) = (agent.until_ask().await, agent.until_ask().await);
    assert_eq!((one.kind, one.tool.as_deref()), (AskKind::Permission, Some("Bash")));
    assert_eq!(one.input, json!({"command": "rm x"}));
    agent.answer(&two, decide(Decision::Deny, Some("not that")));
    let delivered = agent.hear().await;
    assert!(matches!(&delivered, Up::AskDelivered { ask } if *ask == two.id), "{delivered:?}");
    agent.answer(&one, decide(Decision::AllowAlways, None));
    let ended = agent.ended("a").await;
    assert_well(&ended);
    let gone = Said::ToolFinished {
        call_id: "t1".to_owned(),
        name: "Bash".to_owned(),
        output: json!("gone"),
        is_error: true,
    };
    assert!(ended.said().contains(&gone), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn questions_are_asked_one_by_one_and_answered_in_the_tools_arguments() {
    let question = |text: &str, many: bool| {
        let options = json!([{"label": "Red"}, {"label": "Blue"}]);
        json!({"question": text, "header": "h", "options": options, "multiSelect": many})
    };
    let input = json!({"questions": [question("Which?", false), question("And which?", true)]});
    let given = input.clone();
    let mut agent = with(|mut hand| async move {
        for answered in [true, false] {
            let prompt = hand.begin().await;
            hand.ask("q", "AskUserQuestion", given.clone()).await;
            let answer = hand.answered("q").await["response"].take();
            if answered {
                let answers = json!({"Which?": "Blue", "And which?": "Red, Blue"});
                assert_eq!(answer["updatedInput"]["answers"], answers);
                assert_eq!(answer["updatedInput"]["questions"], given["questions"]);
            } else {
                assert_eq!(answer["behavior"], "deny");
            }
            hand.end(&prompt, "").await;
        }
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    let which = agent.until_ask().await;
    assert_eq!((which.kind, which.prompt.as_str()), (AskKind::Question, "Which?"));
    assert_eq!(which.options, ["Red", "Blue"]);
    agent.answer(&which, choose("Blue"));
    let both = agent.until_ask().await;
    agent.answer(&both, choose("Red,Blue"));
    assert_well(&agent.ended("a").await);
    agent.prompt("b", "x");
    let which = agent.until_ask().await;
    agent.answer(&which, decide(Decision::Deny, None));
    assert_well(&agent.ended("b").await);
}

#[tokio::test(start_paused = true)]
async fn an_ask_that_the_agent_gives_up_is_withdrawn_and_its_answer_goes_nowhere() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        hand.ask("gone", "Bash", json!({"command": "ls"})).await;
        hand.send(json!({"type": "control_cancel_request", "request_id": "gone"})).await;
        hand.ask("stays", "Bash", json!({"command": "ls"})).await;
        hand.answered("stays").await;
        hand.end(&prompt, "").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    let gone = agent.until_ask().await;
    let withdrawn = agent.hear().await;
    assert!(matches!(&withdrawn, Up::AskWithdrawn { ask } if *ask == gone.id), "{withdrawn:?}");
    let stays = agent.until_ask().await;
    agent.answer(&gone, decide(Decision::AllowOnce, None));
    agent.answer(&stays, Reply::Withdrawn);
    assert_well(&agent.ended("a").await);
}

#[tokio::test(start_paused = true)]
async fn an_ask_that_outlives_its_turn_is_answered_when_that_ends() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        // Of a helper in the background.
        hand.ask("q", "Bash", json!({"command": "ls"})).await;
        hand.end(&prompt, "begun").await;
        assert_eq!(hand.answered("q").await["response"]["behavior"], "deny");
        let prompt = hand.begin().await;
        hand.end(&prompt, "next").await;
        hand.idle().await;
    })
    .await;
    assert_well(&agent.play("a", "x").await);
    assert_eq!(agent.play("b", "x").await.outcome.text.as_deref(), Some("next"));
}

#[tokio::test(start_paused = true)]
async fn what_the_agent_wants_and_nobody_knows_is_refused_and_never_met_with_silence() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        for request in [json!({"subtype": "hook_callback"}), json!({"subtype": "can_use_tool"}), json!({})] {
            hand.send(json!({"type": "control_request", "request_id": "r", "request": request})).await;
            assert_eq!(hand.answered("r").await["subtype"], "error");
        }
        hand.write("a library's own words").await;
        hand.send(json!({"type": "rate_limit_event"})).await;
        hand.end(&prompt, "").await;
        hand.send(
            json!({"type": "control_request", "request_id": "i", "request": {"subtype": "mcp_message"}}),
        )
        .await;
        assert_eq!(hand.answered("i").await["subtype"], "error");
        let prompt = hand.begin().await;
        hand.end(&prompt, "").await;
        hand.idle().await;
    })
    .await;
    assert_well(&agent.play("a", "x").await);
    assert_well(&agent.play("b", "x").await);
}

#[tokio::test(start_paused = true)]
async fn a_failed_call_of_the_model_is_a_failure_and_its_words_are_no_answer() {
    let mut agent = with(|mut hand| async move {
        let prompt = hand.begin().await;
        let message =
            json!({"id": "m", "model": "<synthetic>", "content": [{"type": "text", "text": "API Error"}]});
        hand.send(json!({"type": "assistant", "message": message, "is_api_error_message": true})).await;
        let failed = json!({"is_error": true, "result": "API Error: 400", "terminal_reason": "api_error"});
        hand.result(&[&prompt], failed).await;
        hand.fate(&prompt, "cancelled").await;
        let prompt = hand.begin().await;
        hand.say("fine").await;
        hand.end(&prompt, "fine").await;
        hand.idle().await;
    })
    .await;
    let ended = agent.play("a", "x").await;
    let error = ended.outcome.error.as_ref().expect("an error");
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "API Error: 400"));
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (Stop::Error, ""));
    assert_eq!(agent.play("b", "x").await.text(), "fine");
}

#[tokio::test(start_paused = true)]
async fn a_known_price_is_told_in_the_middle_of_a_turn_and_only_the_rest_at_its_end() {
    let prices = BTreeMap::from([("m".to_owned(), Price { input: 10_000.0, output: 10_000.0 })]);
    let given = Given { pricing: Pricing::new(prices), ..Given::default() };
    let mut agent = staged(given, |far| async move {
        let mut hand = Hand::new(far);
        hand.open().await;
        let prompt = hand.begin().await;
        hand.say("one").await;
        hand.ask("wait", "Bash", json!({})).await;
        hand.answered("wait").await;
        hand.end(&prompt, "one").await;
        hand.idle().await;
    });
    agent.hear().await;
    agent.prompt("a", "x");
    let mut estimate = 0.0;
    let ask = loop {
        match agent.hear().await {
            Up::Said { what: Said::Usage { usage }, .. } => estimate += usage.cost_usd,
            Up::Ask { ask, .. } => break ask,
            _ => {}
        }
    };
    // 10 in, 5 read from the cache at a tenth, 7 out.
    assert!((estimate - 0.175).abs() < 1e-9, "{estimate}");
    agent.answer(&ask, decide(Decision::AllowOnce, None));
    let rest = agent.ended("a").await.usage().cost_usd;
    assert!((rest - 0.325).abs() < 1e-9, "{rest}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_ends_in_its_turn_or_before_it_is_ready_is_no_more() {
    let mut agent = with(|mut hand| async move {
        hand.begin().await;
        hand.say("half of").await;
    })
    .await;
    agent.prompt("a", "x");
    assert_eq!(agent.gone().await.code, "hung_up");
    let mut agent = staged(Given::default(), |far| async move { drop(far) });
    assert_eq!(agent.gone().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn a_conversation_that_is_not_there_is_refused_with_the_agents_words() {
    let mut agent = staged(Given::default(), |far| async move {
        let mut hand = Hand::new(far);
        hand.wanted("initialize").await;
        let refused = json!({"is_error": true, "subtype": "error_during_execution", "errors": ["No conversation found"]});
        hand.result(&[], refused).await;
        hand.idle().await;
    });
    assert_eq!(agent.gone().await.message, "No conversation found");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_has_forgotten_says_so_in_its_first_turn_and_no_more() {
    let given = Given { forgot: Some("No conversation found".to_owned()), ..Given::default() };
    let mut agent = staged(given, |far| async move {
        let mut hand = Hand::new(far);
        hand.open().await;
        for _ in 0..2 {
            let prompt = hand.begin().await;
            hand.end(&prompt, "").await;
        }
        hand.idle().await;
    });
    agent.hear().await;
    let said = agent.play("a", "x").await.said();
    assert!(matches!(&said[0], Said::Notice { text } if text.contains("No conversation found")), "{said:?}");
    assert!(!agent.play("b", "x").await.said().iter().any(|said| matches!(said, Said::Notice { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_resumed_conversation_is_not_charged_again_for_its_past() {
    let mut agent = staged(Given { resumed: Some("s".to_owned()), ..Given::default() }, |far| async move {
        let mut hand = Hand::new(far);
        hand.open().await;
        hand.total = 7.0;
        let prompt = hand.begin().await;
        let cost = json!({"m": {"inputTokens": 1, "outputTokens": 1, "costUSD": 0.25}});
        hand.result(&[&prompt], json!({"model_usage_since_last_result": cost})).await;
        hand.idle().await;
    });
    agent.hear().await;
    assert_eq!(agent.play("a", "x").await.usage().cost_usd, 0.25);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_names_no_messages_is_still_understood() {
    let mut agent = with(|mut hand| async move {
        for text in ["one", "two"] {
            hand.told().await;
            hand.say(text).await;
            hand.result(&[], json!({"result": text})).await;
        }
        hand.idle().await;
    })
    .await;
    for (name, text) in [("a", "one"), ("b", "two")] {
        let ended = agent.play(name, "x").await;
        assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), (text, Some(text)));
    }
}
