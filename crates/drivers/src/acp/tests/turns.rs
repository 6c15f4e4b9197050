//! Cancels, asks and output in all orders, with an agent whose every line the test writes itself.

use qd_protocol::event::{PermissionDecision, RunError};
use qd_protocol::link::{AgentUpdate, AskResolution, TurnStopReason, TurnUpdate};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::fake_agent::FakeAcpAgent;
use super::{scripted, start_fake_agent, start_with};
use crate::harness::{AgentPipe, assert_ended_well, decision_reply, run_id};

#[tokio::test(start_paused = true)]
async fn a_polite_cancel_ends_a_scripted_turn_wherever_it_waits() {
    let mut agent = scripted().await;
    for (at, step) in [
        r#"{"sleep_ms":99999999}"#,
        r#"{"say":"x","times":3,"every_ms":99999999}"#,
        r#"{"ask":{"tool":"Bash"}}"#,
        r#"{"question":{"prompt":"q"}}"#,
        r#"{"await_steer":99999999}"#,
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("r{at}");
        agent.prompt(&name, &format!(r#"[{{"say":"begun"}},{step},{{"say":"never"}}]"#));
        agent.wait_for_text("begun").await;
        agent.cancel(&name);
        let ended = agent.wait_for_end(&name).await;
        assert_eq!(ended.outcome.stop, TurnStopReason::Cancelled, "{step}");
        assert!(!ended.text().contains("never"));
    }
    assert_eq!(agent.run_turn("after", r#"[{"say":"fine"}]"#).await.text(), "fine");
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_ignores_cancels_goes_on_and_only_that_turn_does() {
    let mut agent = scripted().await;
    agent.prompt("a", r#"[{"ignore_cancel":true},{"say":"x"},{"sleep_ms":1000},{"say":"y"}]"#);
    agent.wait_for_text("x").await;
    agent.cancel("a");
    let ended = agent.wait_for_end("a").await;
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (TurnStopReason::EndTurn, "y"));

    agent.prompt("b", r#"[{"say":"x"},{"sleep_ms":99999999}]"#);
    agent.wait_for_text("x").await;
    agent.cancel("b");
    assert_eq!(agent.wait_for_end("b").await.outcome.stop, TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_once_still_cancels_and_the_next_turn_is_not_poisoned() {
    let mut agent = scripted().await;
    for at in 0..20 {
        let name = format!("r{at}");
        agent.prompt(&name, r#"[{"sleep_ms":99999999}]"#);
        agent.cancel(&name);
        assert_eq!(agent.wait_for_end(&name).await.outcome.stop, TurnStopReason::Cancelled);
        assert_eq!(agent.run_turn(&format!("after{at}"), "fine").await.text(), "fine");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_crossed_the_end_of_its_turn_does_not_end_the_next_one() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        let first = fake.expect_prompt().await;
        fake.send_text("all of it").await;
        fake.expect_method("session/cancel").await;
        fake.end_turn(first, "end_turn").await;
        // The agent applies the cancel to the prompt that follows, but not to a second one.
        let second = fake.expect_prompt().await;
        fake.end_turn(second, "cancelled").await;
        let again = fake.expect_prompt().await;
        fake.send_text("an answer").await;
        fake.end_turn(again, "end_turn").await;
        let third = fake.expect_prompt().await;
        fake.end_turn(third, "cancelled").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.next_update().await;
    agent.cancel("a");
    agent.wait_for_end("a").await;
    let second = agent.run_turn("b", "y").await;
    assert_ended_well(&second);
    assert_eq!(second.text(), "an answer");
    assert_eq!(
        agent.run_turn("c", "z").await.stop(),
        TurnStopReason::Cancelled,
        "no cancel has crossed an end"
    );
}

#[tokio::test(start_paused = true)]
async fn a_repeated_cancel_that_crossed_the_end_of_its_turn_does_not_end_the_next_one() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        let first = fake.expect_prompt().await;
        fake.send_text("all of it").await;
        fake.expect_method("session/cancel").await;
        fake.send_text("and more").await;
        // The first cancel ends the turn. The second one is read only after that, and applied to the next prompt.
        fake.expect_method("session/cancel").await;
        fake.end_turn(first, "cancelled").await;
        let second = fake.expect_prompt().await;
        fake.end_turn(second, "cancelled").await;
        let again = fake.expect_prompt().await;
        fake.send_text("an answer").await;
        fake.end_turn(again, "end_turn").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.next_update().await;
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
    let second = agent.run_turn("b", "y").await;
    assert_ended_well(&second);
    assert_eq!(second.text(), "an answer");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_sent_before_the_turn_began_is_repeated_once_at_its_first_output() {
    let (prompted, mut on_prompt) = mpsc::channel(1);
    let mut agent = start_fake_agent("script", async move |mut fake| {
        let prompt = fake.expect_prompt().await;
        prompted.send(()).await.expect("the test listens");
        fake.expect_method("session/cancel").await;
        // The agent missed the cancel and begins its turn.
        fake.send_text("working").await;
        fake.send_text("on").await;
        fake.expect_method("session/cancel").await;
        fake.end_turn(prompt, "cancelled").await;
        let prompt = fake.expect_prompt().await;
        fake.finish_turn(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    on_prompt.recv().await.expect("it was prompted");
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.outcome.stop, TurnStopReason::Cancelled);
    // There is no third cancel: the agent's next message is a prompt.
    assert_ended_well(&agent.run_turn("b", "x").await);
}

#[tokio::test(start_paused = true)]
async fn two_asks_wait_at_once_and_each_gets_its_own_answer() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.request_permission(json!("one"), "first").await;
        fake.request_permission(json!(2), "second").await;
        let second = fake.next_json().await;
        // The protocol has no field for the reason, so this agent gets it as a steer.
        let (_, reason) = fake.expect_method("_session/steering").await;
        assert_eq!(reason["prompt"][0]["text"], "second was refused: not that");
        let first = fake.next_json().await;
        assert_eq!((&second["id"], &second["result"]["outcome"]["optionId"]), (&json!(2), &json!("never")));
        assert_eq!(second["result"]["_meta"]["quarterdeck"]["reason"], "not that");
        assert_eq!((&first["id"], &first["result"]["outcome"]["optionId"]), (&json!("one"), &json!("once")));
        fake.finish_turn(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    let (first, second) = (agent.wait_for_ask().await, agent.wait_for_ask().await);
    assert_eq!((first.tool.as_deref(), second.tool.as_deref()), (Some("first"), Some("second")));
    agent.answer(&second, decision_reply(PermissionDecision::Deny, Some("not that")));
    agent.answer(&first, decision_reply(PermissionDecision::AllowAlways, None));
    assert_ended_well(&agent.wait_for_end("a").await);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_offers_only_permission_for_ever_is_refused_with_a_notice() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        let options = json!([
            {"optionId": "for-ever", "name": "Always", "kind": "allow_always"},
            {"optionId": "never", "name": "No", "kind": "reject_once"},
        ]);
        let call = json!({"toolCallId": "c", "title": "rm", "rawInput": {"command": "rm"}});
        let params = json!({"sessionId": "s", "toolCall": call, "options": options});
        fake.send(json!({"id": 1, "method": "session/request_permission", "params": params})).await;
        assert_eq!(fake.next_json().await["result"]["outcome"]["optionId"], "never");
        fake.finish_turn(prompt).await;
    })
    .await;
    let ended = agent.run_turn("a", "x").await;
    assert_ended_well(&ended);
    let updates = ended.turn_updates();
    assert!(
        matches!(&updates[..], [TurnUpdate::ToolStarted { .. }, TurnUpdate::Notice { .. }]),
        "{updates:?}"
    );
    assert!(!ended.updates.iter().any(|up| matches!(up, AgentUpdate::Ask { .. })), "nobody is asked");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_answers_every_open_ask_with_cancelled_and_those_that_come_later_too() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.request_permission(json!(1), "first").await;
        fake.request_permission(json!(2), "second").await;
        fake.expect_method("session/cancel").await;
        for id in [1, 2] {
            let answer = fake.next_json().await;
            assert_eq!(
                (&answer["id"], &answer["result"]["outcome"]["outcome"]),
                (&json!(id), &json!("cancelled"))
            );
        }
        fake.request_permission(json!(3), "third").await;
        assert_eq!(fake.next_json().await["result"]["outcome"]["outcome"], "cancelled");
        fake.end_turn(prompt, "cancelled").await;
        fake.wait_for_hang_up().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_ask().await;
    agent.wait_for_ask().await;
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.outcome.stop, TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn an_ask_that_the_agent_gives_up_is_withdrawn() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        let prompt = fake.expect_prompt().await;
        fake.request_permission(json!(1), "first").await;
        fake.send(json!({"method": "$/cancel_request", "params": {"requestId": 1}})).await;
        assert_eq!(fake.next_json().await["error"]["code"], -32800);
        fake.finish_turn(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    let ask = agent.wait_for_ask().await;
    let ended = agent.wait_for_end("a").await;
    assert_eq!(ended.updates, [AgentUpdate::AskWithdrawn { ask: ask.id.clone() }]);
    // This comes too late and does no harm.
    agent.answer(&ask, AskResolution::Withdrawn);
}

#[tokio::test(start_paused = true)]
async fn output_of_an_agent_that_exits_during_its_turn_is_kept() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        fake.expect_prompt().await;
        fake.request_permission(json!(1), "first").await;
        fake.send_text("so far").await;
    })
    .await;
    agent.prompt("a", "x");
    agent.wait_for_ask().await;
    agent.wait_for_text("so far").await;
    assert_eq!(agent.wait_for_failure().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn an_agent_with_much_output_waits_while_nobody_reads_it() {
    const PIECES: usize = 5000;
    let (progress, mut written) = tokio::sync::watch::channel(0);
    let mut agent = start_fake_agent("script", async move |mut fake| {
        let prompt = fake.expect_prompt().await;
        for at in 1..=PIECES {
            fake.send_text(&"x".repeat(60_000)).await;
            progress.send_replace(at);
        }
        fake.finish_turn(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    // Paused time moves on only when every task is idle.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let at = *written.borrow_and_update();
    assert!(at > 0 && at < PIECES / 2, "{at} pieces of {PIECES} were read although nobody took the updates");
    let ended = agent.wait_for_end("a").await;
    assert_eq!(ended.text().len(), PIECES * 60_000);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_overtakes_output_that_nobody_takes() {
    let (cancelled, mut on_cancel) = mpsc::channel(1);
    let mut agent = start_with(
        |_| {},
        async move |pipe| {
            let FakeAcpAgent { far: AgentPipe { mut lines, mut writer } } = {
                let mut fake = FakeAcpAgent::new(pipe);
                fake.handshake().await;
                fake.expect_prompt().await;
                fake
            };
            let update = json!({"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "x".repeat(60_000)}});
            let message = json!({"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "s", "update": update}});
            let speak = async {
                loop {
                    writer.write_all(format!("{message}\n").as_bytes()).await.expect("a pipe in memory");
                }
            };
            let listen = async {
                let line = lines.next_line().await.expect("a pipe in memory").expect("it is open");
                assert!(line.contains("session/cancel"), "{line}");
                cancelled.send(()).await.expect("the test listens");
            };
            tokio::select! { () = speak => {}, () = listen => {} }
        },
    );
    agent.next_update().await;
    agent.prompt("a", "x");
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    agent.cancel("a");
    on_cancel.recv().await.expect("the cancel came through");
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_agent_is_the_error_of_its_turn() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        for error in [
            json!({"code": -32603, "message": "Internal error", "data": {"details": "400 from the model"}}),
            json!({"code": -32000, "message": "Authentication required"}),
            json!({"code": 400, "message": "bad", "data": {"quarterdeck": {"code": "Not A Code"}}}),
        ] {
            let prompt = fake.expect_prompt().await;
            fake.send(json!({"id": prompt, "error": error})).await;
        }
        fake.wait_for_hang_up().await;
    })
    .await;
    for (name, code, message) in [
        ("a", "agent_error", "Internal error: 400 from the model"),
        ("b", "agent_not_signed_in", "Authentication required"),
        ("c", "agent_error", "bad"),
    ] {
        let outcome = agent.run_turn(name, "x").await.outcome;
        assert_eq!(
            (outcome.stop, outcome.error),
            (TurnStopReason::Error, Some(RunError::new(code, message)))
        );
    }
}

#[tokio::test(start_paused = true)]
async fn output_between_turns_belongs_to_the_previous_turn_and_is_dropped_before_the_first() {
    let mut agent = start_fake_agent("script", async |mut fake| {
        fake.send_text("the past, too late").await;
        let prompt = fake.expect_prompt().await;
        fake.end_turn(prompt, "end_turn").await;
        fake.send_text("afterthought").await;
        fake.request_permission(json!(1), "late").await;
        assert_eq!(fake.next_json().await["result"]["outcome"]["outcome"], "cancelled");
        let prompt = fake.expect_prompt().await;
        fake.send_text("answer").await;
        fake.finish_turn(prompt).await;
    })
    .await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert!(agent.run_turn("a", "x").await.updates.is_empty());
    let late =
        AgentUpdate::Turn { run: run_id("a"), update: TurnUpdate::Text { text: "afterthought".to_owned() } };
    assert_eq!(agent.next_update().await, late);
    assert_eq!(agent.run_turn("b", "x").await.text(), "answer");
}
