//! Differences between agents that the driver evens out. Each test fakes one agent as it was seen to behave.

use qd_protocol::event::{AskKind, PermissionDecision};
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use serde_json::json;

use super::fake_agent::FakeAcpAgent;
use super::{start_fake_agent, start_with};
use crate::harness::{DriverHarness, assert_ended_well, decision_reply, value_reply};

/// A fake agent that behaves as its manifest says, before its handshake.
fn start_fake_profile<A>(
    agent: &'static str,
    model: Option<&'static str>,
    play: impl FnOnce(FakeAcpAgent) -> A,
) -> DriverHarness
where
    A: Future<Output = ()> + Send + 'static,
{
    let change = move |spec: &mut qd_protocol::worker::AgentSpec| {
        spec.agent = agent.to_owned();
        spec.model = model.map(str::to_owned);
    };
    start_with(change, |pipe| play(FakeAcpAgent::new(pipe)))
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_would_decide_by_itself_is_put_into_the_mode_in_which_it_asks() {
    let mut agent = start_fake_profile("qwen", None, async |mut fake| {
        let modes = json!({"currentModeId": "auto", "availableModes": [{"id": "auto", "name": "Auto"}, {"id": "default", "name": "Ask"}]});
        fake.handshake_with(json!({"sessionId": "s", "modes": modes})).await;
        let (id, params) = fake.expect_method("session/set_mode").await;
        assert_eq!(params["modeId"], "default");
        fake.send_response(id, json!({})).await;
        let prompt = fake.expect_prompt().await;
        fake.finish_turn(prompt).await;
    });
    assert!(matches!(agent.next_update().await, AgentUpdate::Ready { .. }));
    assert_ended_well(&agent.run_turn("a", "x").await);
}

#[tokio::test(start_paused = true)]
async fn a_model_is_chosen_by_the_agents_setting_and_one_that_it_refuses_is_an_error() {
    let play = async |mut fake: FakeAcpAgent, refuses: bool| {
        let setting = json!({"id": "m", "name": "Model", "category": "model", "type": "select", "currentValue": "a",
            "options": [{"value": "a", "name": "A"}]});
        fake.handshake_with(json!({"sessionId": "s", "configOptions": [setting]})).await;
        let (id, params) = fake.expect_method("session/set_config_option").await;
        assert_eq!((&params["configId"], &params["value"]), (&json!("m"), &json!("b")));
        match refuses {
            true => fake.send(json!({"id": id, "error": {"code": -32602, "message": "no such model"}})).await,
            false => fake.send_response(id, json!({"configOptions": []})).await,
        }
        fake.wait_for_hang_up().await;
    };
    let mut agent = start_fake_profile("opencode", Some("b"), move |fake| play(fake, false));
    assert!(matches!(agent.next_update().await, AgentUpdate::Ready { .. }));
    let mut agent = start_fake_profile("opencode", Some("b"), move |fake| play(fake, true));
    assert!(agent.wait_for_failure().await.message.contains("no such model"));
}

#[tokio::test(start_paused = true)]
async fn an_operation_is_not_asked_about_again_after_its_permission_request_was_allowed() {
    let mut agent = start_fake_agent("gemini", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        let options = json!([{"optionId": "y", "name": "Yes", "kind": "allow_once"}, {"optionId": "n", "name": "No", "kind": "reject_once"}]);
        let call =
            json!({"toolCallId": "c", "title": "Write f", "kind": "edit", "locations": [{"path": "f"}]});
        fake.request_permission_for(json!(1), call, options).await;
        assert_eq!(fake.next_json().await["result"]["outcome"]["optionId"], "y");
        let cwd = std::env::temp_dir();
        let outside = json!({"sessionId": "s", "path": cwd.join("outside"), "content": ""});
        fake.send(json!({"id": 2, "method": "fs/write_text_file", "params": outside})).await;
        assert!(fake.next_json().await["error"]["message"].as_str().is_some_and(|it| it.contains("refused: no")));
        fake.finish_turn(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    let first = agent.wait_for_ask().await;
    assert_eq!((first.tool.as_deref(), &first.input), (Some("Edit"), &json!({"path": "f"})));
    agent.answer(&first, decision_reply(PermissionDecision::AllowOnce, None));
    let second = agent.wait_for_ask().await;
    assert_eq!(second.tool.as_deref(), Some("Write"), "another file is another ask");
    assert!(!second.implicit);
    agent.answer(&second, decision_reply(PermissionDecision::Deny, Some("no")));
    assert_ended_well(&agent.wait_for_end("a").await);
}

#[tokio::test(start_paused = true)]
async fn questions_that_come_as_a_permission_are_questions() {
    let mut agent = start_fake_agent("qwen", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        let options = json!([{"optionId": "ok", "name": "Submit", "kind": "allow_once"}, {"optionId": "no", "name": "Cancel", "kind": "reject_once"}]);
        let questions = json!([{"question": "Which?", "options": [{"label": "Red"}, {"label": "Blue"}], "multiSelect": false}]);
        let call =
            json!({"toolCallId": "c", "title": "Ask", "kind": "think", "rawInput": {"questions": questions}});
        fake.request_permission_for(json!(1), call, options).await;
        let answer = fake.next_json().await;
        assert_eq!(answer["result"]["outcome"]["optionId"], "ok", "{answer}");
        assert_eq!(answer["result"]["answers"], json!({"0": "Blue"}));
        fake.finish_turn(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    let ask = agent.wait_for_ask().await;
    assert_eq!((ask.kind, ask.prompt.as_str()), (AskKind::Question, "Which?"));
    assert_eq!(ask.options, ["Red", "Blue"]);
    agent.answer(&ask, value_reply("Blue"));
    assert_ended_well(&agent.wait_for_end("a").await);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_pulls_its_steers_gets_each_once() {
    let mut agent = start_fake_agent("qwen", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.send_text("working").await;
        let mut id = 0;
        loop {
            id += 1;
            fake.send(json!({"id": id, "method": "craft/drainMidTurnQueue", "params": {"sessionId": "s"}}))
                .await;
            let answer = fake.next_json().await;
            let messages = answer["result"]["messages"].as_array().expect("messages").clone();
            if let Some(text) = messages.first() {
                fake.send_text(text.as_str().expect("text")).await;
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        fake.finish_turn(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_text("working").await;
    let steer = agent.steer("a", "left");
    let ended = agent.wait_for_end("a").await;
    assert!(ended.updates.contains(&AgentUpdate::SteerTaken { steer }), "{:?}", ended.updates);
    assert_eq!(ended.text(), "left");
}

#[tokio::test(start_paused = true)]
async fn a_steer_that_is_a_second_prompt_is_part_of_the_turn_until_both_are_answered() {
    let mut agent = start_fake_agent("opencode", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.send_text("working").await;
        let steer = fake.expect_prompt().await;
        fake.end_turn(prompt, "end_turn").await;
        fake.send_text(" and more").await;
        fake.finish_turn(steer).await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_text("working").await;
    let steer = agent.steer("a", "left");
    let ended = agent.wait_for_end("a").await;
    assert!(ended.updates.contains(&AgentUpdate::SteerTaken { steer }), "{:?}", ended.updates);
    assert_eq!(ended.text(), " and more");
    assert_ended_well(&ended);
}

#[tokio::test(start_paused = true)]
async fn a_failed_model_call_is_an_error_even_if_the_agent_ends_its_turn_normally() {
    let mut agent = start_fake_agent("codex-acp", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.send_text("Warning: no metadata\n\n").await;
        fake.send_update(json!({"sessionUpdate": "session_info_update", "_meta": {"codex": {"threadStatus": {"type": "systemError"}}}})).await;
        fake.send_text("scripted 400\n\n").await;
        fake.finish_turn(prompt).await;
    })
    .await;
    let ended = agent.run_turn("a", "x").await;
    assert_eq!(ended.outcome.stop, TurnStopReason::Error);
    assert_eq!(ended.outcome.error.as_ref().map(|error| error.message.as_str()), Some("scripted 400"));
    assert!(ended.turn_updates().contains(&TurnUpdate::notice("Warning: no metadata".to_owned())));
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_ends_because_a_tool_was_refused_is_no_cancel_and_the_reason_comes_with_the_next_prompt()
{
    let mut agent = start_fake_agent("copilot", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.request_permission(json!(1), "rm").await;
        assert_eq!(fake.next_json().await["result"]["outcome"]["optionId"], "never");
        fake.end_turn(prompt, "cancelled").await;
        let (id, params) = fake.expect_method("session/prompt").await;
        let texts: Vec<&str> = params["prompt"]
            .as_array()
            .expect("blocks")
            .iter()
            .filter_map(|it| it["text"].as_str())
            .collect();
        assert_eq!(texts, ["rm was refused: not today", "again"]);
        fake.finish_turn(id).await;
    })
    .await;
    agent.prompt("a", "x");
    let ask = agent.wait_for_ask().await;
    agent.answer(&ask, decision_reply(PermissionDecision::Deny, Some("not today")));
    assert_ended_well(&agent.wait_for_end("a").await);
    assert_ended_well(&agent.run_turn("b", "again").await);
}

#[tokio::test(start_paused = true)]
async fn a_replay_after_the_agent_is_ready_is_not_its_next_answer() {
    let play = async |mut fake: FakeAcpAgent| {
        fake.initialize(json!({"loadSession": true})).await;
        let (id, _) = fake.expect_method("session/load").await;
        fake.send_response(id, json!({})).await;
        for piece in ["old ", "words"] {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            fake.send_text(piece).await;
        }
        let prompt = fake.expect_prompt().await;
        fake.send_text("new").await;
        fake.finish_turn(prompt).await;
    };
    let change = |spec: &mut qd_protocol::worker::AgentSpec| {
        spec.agent = "gemini".to_owned();
        spec.agent_session_id = Some("s".to_owned());
    };
    let mut agent = start_with(change, |pipe| play(FakeAcpAgent::new(pipe)));
    assert!(matches!(agent.next_update().await, AgentUpdate::Ready { .. }));
    assert_eq!(agent.run_turn("a", "x").await.text(), "new");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_is_repeated_until_the_turn_stops() {
    let mut agent = start_fake_agent("copilot", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.expect_method("session/cancel").await;
        // The cancel came too early for the agent: it keeps working and gets another.
        fake.send_update(json!({"sessionUpdate": "usage_update", "used": 1, "size": 2})).await;
        fake.send_text("one ").await;
        fake.expect_method("session/cancel").await;
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        fake.send_text("two").await;
        fake.expect_method("session/cancel").await;
        fake.end_turn(prompt, "cancelled").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.outcome.stop, TurnStopReason::Cancelled);
}
