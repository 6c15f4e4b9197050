//! How turns end and what they cost, with an agent that misbehaves as real agents do: silence, cancels that nobody asked
//! for, answers that are missing, totals that go on across restarts.

use qd_testkit::{TestDaemon, TestEvent, TestSession, script::*};
use serde_json::{Value, json};

use crate::workers_loss::process_of;

/// An agent of the Agent Client Protocol. The word that a prompt begins with says what it does.
const AGENT: &str = r#"
import json, sys
def send(**message): print(json.dumps(dict(message, jsonrpc="2.0")), flush=True)
def update(**fields): send(method="session/update", params={"sessionId": "s", "update": fields})
for line in sys.stdin:
    message = json.loads(line)
    method, params = message.get("method"), message.get("params", {})
    if method == "initialize":
        send(id=message["id"], result={"protocolVersion": 1, "agentCapabilities": {"loadSession": True}})
    elif method == "session/new":
        send(id=message["id"], result={"sessionId": "s"})
    elif method == "session/load":
        send(id=message["id"], result={})
    elif method == "session/prompt":
        word, _, rest = params["prompt"][0]["text"].partition(" ")
        if word == "cost":
            update(sessionUpdate="usage_update", used=1, size=9, cost={"amount": float(rest), "currency": "USD"})
        elif word == "signed-out":
            send(id=message["id"], error={"code": -32000, "message": "Authentication required"})
            continue
        elif word == "die":
            print("\033[31mred\033[0m words", file=sys.stderr, flush=True)
            sys.exit(3)
        elif word == "mutter":
            print("an old line", file=sys.stderr, flush=True)
        if word in ("say", "cost", "mutter"):
            update(sessionUpdate="agent_message_chunk", content={"type": "text", "text": rest})
        reason = "cancelled" if word == "cancel-yourself" else "end_turn"
        send(id=message["id"], result={"stopReason": reason})
"#;

const MANIFEST: &str = r#"
[agent]
name = "odd"
binary = "python3"
driver = "acp"
sign_in = "run `odd login`"

[startup]
command = ["python3", "-I", "-S", "-u", "AGENT"]

[turn]
always_answers = true
"#;

async fn odd_session(daemon: &TestDaemon, settings: Value) -> TestSession {
    let folder = daemon.home.path().join("agents");
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("odd.py");
    std::fs::write(&program, AGENT).unwrap();
    std::fs::write(folder.join("odd.toml"), MANIFEST.replace("AGENT", program.to_str().unwrap())).unwrap();
    let mut all = json!({ "agent": "odd" });
    for (key, value) in settings.as_object().unwrap() {
        all[key] = value.clone();
    }
    daemon.session_with(all).await
}

async fn run(session: &TestSession, prompt: &str) -> Value {
    session.wait(&session.prompt(prompt).await).await
}

#[tokio::test]
async fn only_what_somebody_cancelled_ends_as_cancelled_and_the_next_run_gets_a_new_process() {
    let daemon = TestDaemon::start().await;
    let session = odd_session(&daemon, json!({})).await;
    let ended = run(&session, "cancel-yourself").await;
    assert_eq!(ended["finish_reason"], "error", "{ended:#}");
    assert!(ended["error"]["message"].as_str().unwrap().contains("nobody cancelled it"), "{ended:#}");
    let next = run(&session, "say fine").await;
    assert_eq!((&next["finish_reason"], &next["text"]), (&json!("end_turn"), &json!("fine")), "{next:#}");
    let events = session.events().await;
    assert_eq!(events.iter().filter(|event| event.kind == "worker.started").count(), 2);
}

#[tokio::test]
async fn a_turn_without_an_answer_is_an_error_and_an_error_says_what_to_do() {
    let daemon = TestDaemon::start().await;
    let session = odd_session(&daemon, json!({})).await;
    let ended = run(&session, "nothing").await;
    assert_eq!(ended["finish_reason"], "error", "{ended:#}");
    assert!(ended["error"]["message"].as_str().unwrap().contains("without text"), "{ended:#}");
    let ended = run(&session, "/compact").await;
    assert_eq!(ended["finish_reason"], "end_turn", "a command may have nothing to say: {ended:#}");
    let ended = run(&session, "signed-out").await;
    assert_eq!(ended["error"]["code"], "agent_not_signed_in", "{ended:#}");
    assert_eq!(ended["error"]["message"], "Authentication required; run `odd login`");
    assert_eq!(run(&session, "mutter x").await["finish_reason"], "end_turn");
    let ended = run(&session, "die").await;
    assert_eq!(ended["error"]["stderr"], json!(["red words"]), "neither colours nor old lines: {ended:#}");
}

#[tokio::test]
async fn a_total_that_goes_on_in_another_process_is_billed_once() {
    let daemon = TestDaemon::start().await;
    let session = odd_session(&daemon, json!({ "budget_usd": 0.9 })).await;
    let cost = async || session.show().await["usage"]["cost_usd"].as_f64().unwrap();
    run(&session, "cost 0.5").await;
    process_of(&session).await.kill9().await;
    session.wait_for_event("the loss of the worker", |event| event.kind == "worker.exited").await;
    let resumed = run(&session, "cost 0.6").await;
    assert_eq!(resumed["finish_reason"], "end_turn", "the budget is not exceeded: {resumed:#}");
    assert_eq!(cost().await, 0.6);
    run(&session, "cancel-yourself").await;
    run(&session, "cost 0.8").await;
    assert_eq!(cost().await, 0.8);

    // What an adopted conversation cost elsewhere is not billed here.
    session.close().await;
    session.wait_for_event("the end of the session", |event| event.kind == "session.closed").await;
    let adopted = odd_session(&daemon, json!({ "agent_session_id": "s" })).await;
    run(&adopted, "cost 7.0").await;
    run(&adopted, "cost 7.25").await;
    assert_eq!(adopted.show().await["usage"]["cost_usd"], 0.25);
}

#[tokio::test]
async fn silence_is_shown_again_each_time_it_has_doubled() {
    let daemon = TestDaemon::start_with_settings("silence_notice_s = 1").await;
    let session = daemon.session_with(json!({ "agent": "script" })).await;
    let run = session.prompt_script(&[say("so far"), sleep_forever()]).await;
    for seconds in [1, 2] {
        let is_due = |event: &TestEvent| event.data["silent_s"] == seconds;
        let notice = session.wait_for_event("a notice", is_due).await;
        assert!(notice.is_of_run(&run, "notice.shown"), "{notice:?}");
        let expected = format!("no word from the model for {seconds} s; the agent may be retrying");
        assert_eq!(notice.data["text"], expected);
    }
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
}

#[tokio::test]
async fn silence_ends_the_turn_if_a_setting_says_so() {
    let daemon = TestDaemon::start_with_settings("silence_timeout_s = 2").await;
    let session = daemon.session_with(json!({ "agent": "script" })).await;
    let ended = session.run_script(&[say("so far"), sleep_forever()]).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("error"), &json!("so far")), "{ended:#}");
    assert_eq!(ended["error"]["code"], "agent_silent", "{ended:#}");
    assert_eq!(session.run_script(&[say("next")]).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn a_turn_that_waits_for_a_person_is_not_silent() {
    let daemon = TestDaemon::start_with_settings("silence_notice_s = 5\nsilence_timeout_s = 6").await;
    let waiting = daemon.session_with(json!({ "agent": "script", "policy": "ask" })).await;
    let asked = waiting.prompt_script(&[ask_bash("make"), say("made")]).await;
    let ask = waiting.wait_for_run_event(&asked, "ask.opened").await.data;
    // A silent turn reaches the limit meanwhile.
    let silent = daemon.session_with(json!({ "agent": "script" })).await;
    assert_eq!(silent.run_script(&[sleep_forever()]).await["error"]["code"], "agent_silent");
    waiting
        .client
        .answer_ask(ask["id"].as_str().unwrap(), &json!({ "decision": "allow_once" }))
        .await
        .expect(200);
    assert_eq!(waiting.wait(&asked).await["finish_reason"], "end_turn");
    assert!(waiting.events_of(&asked).await.iter().all(|event| event.kind != "notice.shown"));
}
