//! Cancels, and several things at once, with an agent whose every line the test writes itself.

use qd_protocol::event::{Decision, RunError};
use qd_protocol::link::{Reply, Said, Stop, Up};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::hand::Hand;
use super::{by_hand, scripted, with};
use crate::drivers::stage::{Far, assert_well, decide, run};

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
        agent.until_text("begun").await;
        agent.cancel(&name);
        let ended = agent.ended(&name).await;
        assert_eq!(ended.outcome.stop, Stop::Cancelled, "{step}");
        assert!(!ended.text().contains("never"));
    }
    assert_eq!(agent.play("after", r#"[{"say":"fine"}]"#).await.text(), "fine");
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_ignores_cancels_goes_on_and_only_that_turn_does() {
    let mut agent = scripted().await;
    agent.prompt("a", r#"[{"ignore_cancel":true},{"say":"x"},{"sleep_ms":1000},{"say":"y"}]"#);
    agent.until_text("x").await;
    agent.cancel("a");
    let ended = agent.ended("a").await;
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (Stop::EndTurn, "y"));

    agent.prompt("b", r#"[{"say":"x"},{"sleep_ms":99999999}]"#);
    agent.until_text("x").await;
    agent.cancel("b");
    assert_eq!(agent.ended("b").await.outcome.stop, Stop::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_once_still_cancels_and_the_next_turn_is_not_poisoned() {
    let mut agent = scripted().await;
    for at in 0..20 {
        let name = format!("r{at}");
        agent.prompt(&name, r#"[{"sleep_ms":99999999}]"#);
        agent.cancel(&name);
        assert_eq!(agent.ended(&name).await.outcome.stop, Stop::Cancelled);
        assert_eq!(agent.play(&format!("after{at}"), "fine").await.text(), "fine");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_came_before_the_turn_had_begun_is_said_again_at_its_first_word_and_no_more() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = by_hand("script", async move |mut hand| {
        let prompt = hand.prompted().await;
        seen.send(()).await.expect("the test listens");
        hand.expect("session/cancel").await;
        // It has missed that, and begins.
        hand.say("working").await;
        hand.say("on").await;
        hand.expect("session/cancel").await;
        hand.end(prompt, "cancelled").await;
        let prompt = hand.prompted().await;
        hand.finish(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    sees.recv().await.expect("it was prompted");
    agent.cancel("a");
    assert_eq!(agent.ended("a").await.outcome.stop, Stop::Cancelled);
    // No third cancel: the next thing that the agent hears is a prompt.
    assert_well(&agent.play("b", "x").await);
}

#[tokio::test(start_paused = true)]
async fn two_asks_wait_at_once_and_each_gets_its_own_answer() {
    let mut agent = by_hand("script", async |mut hand| {
        let prompt = hand.prompted().await;
        hand.ask(json!("one"), "first").await;
        hand.ask(json!(2), "second").await;
        let second = hand.hear().await;
        // The protocol has no word for the reason, and this agent one for what it is told on its way.
        let (_, reason) = hand.expect("_session/steering").await;
        assert_eq!(reason["prompt"][0]["text"], "second was refused: not that");
        let first = hand.hear().await;
        assert_eq!((&second["id"], &second["result"]["outcome"]["optionId"]), (&json!(2), &json!("never")));
        assert_eq!(second["result"]["_meta"]["quarterdeck"]["reason"], "not that");
        assert_eq!((&first["id"], &first["result"]["outcome"]["optionId"]), (&json!("one"), &json!("once")));
        hand.finish(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    let (first, second) = (agent.until_ask().await, agent.until_ask().await);
    assert_eq!((first.tool.as_deref(), second.tool.as_deref()), (Some("first"), Some("second")));
    agent.answer(&second, decide(Decision::Deny, Some("not that")));
    agent.answer(&first, decide(Decision::AllowAlways, None));
    assert_well(&agent.ended("a").await);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_would_only_take_a_yes_for_ever_is_refused_with_a_notice() {
    let mut agent = by_hand("script", async |mut hand| {
        let prompt = hand.prompted().await;
        let options = json!([
            {"optionId": "for-ever", "name": "Always", "kind": "allow_always"},
            {"optionId": "never", "name": "No", "kind": "reject_once"},
        ]);
        let call = json!({"toolCallId": "c", "title": "rm", "rawInput": {"command": "rm"}});
        let params = json!({"sessionId": "s", "toolCall": call, "options": options});
        hand.send(json!({"id": 1, "method": "session/request_permission", "params": params})).await;
        assert_eq!(hand.hear().await["result"]["outcome"]["optionId"], "never");
        hand.finish(prompt).await;
    })
    .await;
    let ended = agent.play("a", "x").await;
    assert_well(&ended);
    let said = ended.said();
    assert!(matches!(&said[..], [Said::ToolStarted { .. }, Said::Notice { .. }]), "{said:?}");
    assert!(!ended.ups.iter().any(|up| matches!(up, Up::Ask { .. })), "nobody is asked");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_answers_every_open_ask_with_cancelled_and_those_that_come_later_too() {
    let mut agent = by_hand("script", async |mut hand| {
        let prompt = hand.prompted().await;
        hand.ask(json!(1), "first").await;
        hand.ask(json!(2), "second").await;
        hand.expect("session/cancel").await;
        for id in [1, 2] {
            let answer = hand.hear().await;
            assert_eq!(
                (&answer["id"], &answer["result"]["outcome"]["outcome"]),
                (&json!(id), &json!("cancelled"))
            );
        }
        hand.ask(json!(3), "third").await;
        assert_eq!(hand.hear().await["result"]["outcome"]["outcome"], "cancelled");
        hand.end(prompt, "cancelled").await;
        hand.idle().await;
    })
    .await;
    agent.prompt("a", "x");
    agent.until_ask().await;
    agent.until_ask().await;
    agent.cancel("a");
    assert_eq!(agent.ended("a").await.outcome.stop, Stop::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn an_ask_that_the_agent_gives_up_is_withdrawn() {
    let mut agent = by_hand("script", async |mut hand| {
        let prompt = hand.prompted().await;
        hand.ask(json!(1), "first").await;
        hand.send(json!({"method": "$/cancel_request", "params": {"requestId": 1}})).await;
        assert_eq!(hand.hear().await["error"]["code"], -32800);
        hand.finish(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    let ask = agent.until_ask().await;
    let ended = agent.ended("a").await;
    assert_eq!(ended.ups, [Up::AskWithdrawn { ask: ask.id.clone() }]);
    // Too late, and harmless.
    agent.answer(&ask, Reply::Withdrawn);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_goes_in_the_middle_of_its_turn_has_said_what_it_said() {
    let mut agent = by_hand("script", async |mut hand| {
        hand.prompted().await;
        hand.ask(json!(1), "first").await;
        hand.say("so far").await;
    })
    .await;
    agent.prompt("a", "x");
    agent.until_ask().await;
    agent.until_text("so far").await;
    assert_eq!(agent.gone().await.code, "hung_up");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_says_much_waits_while_nobody_listens() {
    const PIECES: usize = 5000;
    let (progress, mut written) = tokio::sync::watch::channel(0);
    let mut agent = by_hand("script", async move |mut hand| {
        let prompt = hand.prompted().await;
        for at in 1..=PIECES {
            hand.say(&"x".repeat(60_000)).await;
            progress.send_replace(at);
        }
        hand.finish(prompt).await;
    })
    .await;
    agent.prompt("a", "x");
    // Time moves on only when nothing else can.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let at = *written.borrow_and_update();
    assert!(at > 0 && at < PIECES / 2, "{at} pieces of {PIECES} were taken with nobody listening");
    let ended = agent.ended("a").await;
    assert_eq!(ended.text().len(), PIECES * 60_000);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_overtakes_words_that_nobody_takes() {
    let (seen, mut sees) = mpsc::channel(1);
    let mut agent = with(
        |_| {},
        async move |far| {
            let Hand { far: Far { mut lines, mut to } } = {
                let mut hand = Hand::new(far);
                hand.open().await;
                hand.prompted().await;
                hand
            };
            let update = json!({"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "x".repeat(60_000)}});
            let message = json!({"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "s", "update": update}});
            let speak = async {
                loop {
                    to.write_all(format!("{message}\n").as_bytes()).await.expect("a pipe in memory");
                }
            };
            let listen = async {
                let line = lines.next_line().await.expect("a pipe in memory").expect("it is open");
                assert!(line.contains("session/cancel"), "{line}");
                seen.send(()).await.expect("the test listens");
            };
            tokio::select! { () = speak => {}, () = listen => {} }
        },
    );
    agent.hear().await;
    agent.prompt("a", "x");
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    agent.cancel("a");
    sees.recv().await.expect("the cancel came through");
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_agent_is_the_error_of_its_turn() {
    let mut agent = by_hand("script", async |mut hand| {
        for error in [
            json!({"code": -32603, "message": "Internal error", "data": {"details": "400 from the model"}}),
            json!({"code": -32000, "message": "Authentication required"}),
            json!({"code": 400, "message": "bad", "data": {"quarterdeck": {"code": "Not A Code"}}}),
        ] {
            let prompt = hand.prompted().await;
            hand.send(json!({"id": prompt, "error": error})).await;
        }
        hand.idle().await;
    })
    .await;
    for (name, code, message) in [
        ("a", "agent_error", "Internal error: 400 from the model"),
        ("b", "agent_not_signed_in", "Authentication required"),
        ("c", "agent_error", "bad"),
    ] {
        let outcome = agent.play(name, "x").await.outcome;
        assert_eq!((outcome.stop, outcome.error), (Stop::Error, Some(RunError::new(code, message))));
    }
}

#[tokio::test(start_paused = true)]
async fn words_between_turns_belong_to_the_turn_before_and_those_before_the_first_to_none() {
    let mut agent = by_hand("script", async |mut hand| {
        hand.say("the past, too late").await;
        let prompt = hand.prompted().await;
        hand.end(prompt, "end_turn").await;
        hand.say("afterthought").await;
        hand.ask(json!(1), "late").await;
        assert_eq!(hand.hear().await["result"]["outcome"]["outcome"], "cancelled");
        let prompt = hand.prompted().await;
        hand.say("answer").await;
        hand.finish(prompt).await;
    })
    .await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert!(agent.play("a", "x").await.ups.is_empty());
    let late = Up::Said { run: run("a"), what: Said::Text { text: "afterthought".to_owned() } };
    assert_eq!(agent.hear().await, late);
    assert_eq!(agent.play("b", "x").await.text(), "answer");
}
