//! The agent `worker:URL`: a session drives an external worker like any other agent. The workers are `qd worker` and
//! the Python example.

use std::path::Path;

use futures_util::{SinkExt, StreamExt};
use qd_testkit::{TestCommand, TestDaemon, TestHome, TestSession, journal_rules, script::*};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_tungstenite::tungstenite::Message;

/// Starts a worker for this agent, and returns the agent name with which a session uses it.
async fn worker(home: &TestHome, agent: &str) -> (TestCommand, String) {
    worker_on(home, agent, "127.0.0.1:0").await
}

async fn worker_on(home: &TestHome, agent: &str, address: &str) -> (TestCommand, String) {
    let mut running = home.start(&["worker", "--listen", address, "--agent", agent]);
    let agent = worker_agent_name(&mut running).await;
    (running, agent)
}

async fn worker_agent_name(running: &mut TestCommand) -> String {
    running.wait_for_stdout("\n").await;
    format!("worker:{}", running.stdout_so_far().trim().strip_prefix("listening on ").expect("it says where"))
}

/// A session whose agent is a worker with `script`.
async fn scripted(daemon: &TestDaemon) -> (TestCommand, TestSession) {
    let (running, agent) = worker(&daemon.home, "script").await;
    let session = daemon.session(&agent).await;
    (running, session)
}

#[tokio::test]
async fn a_worker_is_run_by_its_address_and_its_answer_is_printed() {
    let daemon = TestDaemon::start().await;
    let (_worker, agent) = worker(&daemon.home, "echo").await;
    let printed = daemon.qd(&["run", "--agent", &agent, "hello there"]).await.ok();
    assert_eq!(printed.trim(), "hello there");
}

#[tokio::test]
async fn more_asks_than_a_worker_may_have_open_wait_and_each_is_judged() {
    const ASKS: usize = 90;
    let daemon = TestDaemon::start().await;
    let (_worker, agent) = worker(&daemon.home, "script").await;
    let session = daemon.session_with(json!({ "agent": agent, "policy": "deny" })).await;
    let run = session.run_script(&[ask_at_once("Bash", ASKS)]).await;
    assert_eq!(run["text"], format!("0 allowed, {ASKS} denied"));
    let events = session.events().await;
    let judged = events.iter().filter(|event| event.kind == "ask.resolved" && event.data["by"] == "policy");
    assert_eq!(judged.count(), ASKS);
    journal_rules::check(&events);
}

#[tokio::test]
async fn one_prompt_follows_another_and_each_has_its_result() {
    let daemon = TestDaemon::start().await;
    let (_worker, agent) = worker(&daemon.home, "echo").await;
    let session = daemon.session(&agent).await;
    for words in ["one two", "three"] {
        let run = session.prompt(words).await;
        let ended = session.wait(&run).await;
        assert_eq!(
            (&ended["finish_reason"], &ended["text"]),
            (&json!("end_turn"), &json!(format!("echo: {words}"))),
            "{ended}"
        );
        let events = session.events_of(&run).await;
        let text = events.iter().filter(|event| event.kind == "text.delta");
        let text: String = text.map(|event| event.data["text"].as_str().unwrap()).collect();
        assert_eq!(text.trim_end(), words);
    }
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn tools_plans_thoughts_and_usage_come_through() {
    let daemon = TestDaemon::start().await;
    let (_worker, session) = scripted(&daemon).await;
    let steps = [
        think("hm"),
        tool("Read", json!({ "path": "a" }), "content"),
        plan("do it", "pending"),
        usage(3, 4, 0.25),
        say("done"),
    ];
    let ended = session.run_script(&steps).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("done")), "{ended}");
    assert_eq!(ended["usage"]["cost_usd"], 0.25, "{ended}");
    let events = session.events().await;
    for kind in ["thought.delta", "tool.started", "tool.finished", "plan.updated", "usage.reported"] {
        assert!(events.iter().any(|event| event.kind == kind), "{kind}");
    }
    journal_rules::check(&events);
}

#[tokio::test]
async fn what_the_worker_wants_leave_for_is_an_ask_and_the_answer_reaches_it() {
    let daemon = TestDaemon::start().await;
    let (_worker, session) = scripted(&daemon).await;
    for (decision, expected) in [("allow_once", "allowed"), ("deny", "denied")] {
        let run = session.prompt_script(&[ask_bash("make clean"), say(" end")]).await;
        let ask = session.wait_for_ask(&run).await;
        let open = daemon.client().pending_asks().await;
        assert_eq!(
            (&open[0]["tool"], &open[0]["input"]["command"], &open[0]["kind"]),
            (&json!("Bash"), &json!("make clean"), &json!("permission")),
            "{open:?}"
        );
        daemon.client().answer_ask(&ask, &json!({ "decision": decision })).await.expect(200);
        let ended = session.wait(&run).await;
        assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
        assert!(ended["text"].as_str().unwrap().starts_with(expected), "{ended}");
    }
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_policy_decides_for_a_worker_as_for_any_agent() {
    let daemon = TestDaemon::start().await;
    let (_worker, agent) = worker(&daemon.home, "script").await;
    let session = daemon.session_with(json!({ "agent": agent, "policy": "allow" })).await;
    assert_eq!(session.run_script(&[ask_bash("make clean")]).await["text"], "allowed");
    let run = session.prompt_script(&[ask_bash("sudo rm -rf /")]).await;
    session.wait_for_ask(&run).await;
    assert_eq!(
        daemon.client().pending_asks().await[0]["risk"],
        "high",
        "high risk is asked under `allow` too"
    );
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
}

#[tokio::test]
async fn a_steer_reaches_the_workers_run() {
    let daemon = TestDaemon::start().await;
    let (_worker, session) = scripted(&daemon).await;
    let run = session.prompt_script(&[say("begun "), await_steer(600_000)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.steer("left").await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["text"], "begun steered: left", "{ended}");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_cancel_reaches_the_worker_and_the_next_prompt_runs() {
    let daemon = TestDaemon::start().await;
    let (_worker, session) = scripted(&daemon).await;
    let run = session.prompt_script(&[say("begun"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.cancel().await;
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["error"]), (&json!("cancelled"), &json!(null)), "{ended}");
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_failure_of_the_worker_is_the_runs() {
    let daemon = TestDaemon::start().await;
    let (_worker, session) = scripted(&daemon).await;
    let ended = session.run_script(&[fail("the model is on fire")]).await;
    assert_eq!(ended["finish_reason"], "error");
    assert!(ended["error"]["message"].as_str().unwrap().contains("the model is on fire"), "{ended}");
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
}

#[tokio::test]
async fn a_worker_that_is_killed_in_a_run_fails_it_and_is_called_again_for_the_next() {
    let daemon = TestDaemon::start().await;
    let (running, session) = scripted(&daemon).await;
    let address =
        session.show().await["agent"].as_str().unwrap().trim_start_matches("worker:ws://").to_owned();
    let run = session.prompt_script(&[say("begun"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    running.signal(Signal::KILL);
    let ended = session.wait(&run).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["error"]["code"]),
        (&json!("error"), &json!("agent_unreachable"))
    );
    let message = ended["error"]["message"].as_str().unwrap();
    assert!(message.contains("broke in the middle of the run"), "{message}");
    running.wait().await;
    let (_again, _) = worker_on(&daemon.home, "script", &address).await;
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_workers_run_outlives_the_daemon_and_nothing_of_it_is_lost_or_doubled() {
    let mut daemon = TestDaemon::start().await;
    let (_worker, session) = scripted(&daemon).await;
    let run = session.prompt_script(&[say("begun "), await_steer(600_000), say(", ended")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.kill9().await;
    daemon.start_again().await;
    session.steer("go").await;
    let ended = session.wait(&run).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["text"]),
        (&json!("end_turn"), &json!("begun steered: go, ended")),
        "{ended}"
    );
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_ask_of_a_worker_survives_the_daemon() {
    let mut daemon = TestDaemon::start().await;
    let (_worker, session) = scripted(&daemon).await;
    let run = session.prompt_script(&[ask_bash("make")]).await;
    let ask = session.wait_for_ask(&run).await;
    daemon.kill9().await;
    daemon.start_again().await;
    daemon.client().answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    assert_eq!(session.wait(&run).await["text"], "allowed");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_suspended_run_of_a_worker_is_resumed_when_its_children_have_ended() {
    let daemon = TestDaemon::start().await;
    let (_worker, session) = scripted(&daemon).await;
    let run = session.prompt_script(&[say("before "), await_steer(600_000), suspend(), say("after")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let child = session.create_child(json!({ "agent": "script" })).await;
    let below = child.prompt_script(&[question("done?", &[])]).await;
    let ask = child.wait_for_ask(&below).await;
    session.steer("go").await;
    session.wait_for_run_event(&run, "run.suspended").await;
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    assert!(ended["text"].as_str().unwrap().ends_with("after"), "{ended}");
    let resumed = session.events_of(&run).await.into_iter().filter(|event| event.kind == "run.resumed");
    assert_eq!(resumed.count(), 1);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn nobody_at_the_address_is_a_failure_that_says_what_to_look_at() {
    let daemon = TestDaemon::start().await;
    let (running, agent) = worker(&daemon.home, "echo").await;
    running.signal(Signal::KILL);
    running.wait().await;
    let session = daemon.session_with(json!({ "agent": agent, "restarts": 0 })).await;
    let ended = session.wait(&session.prompt("x").await).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["error"]["code"]),
        (&json!("error"), &json!("agent_failed_to_start")),
        "{ended}"
    );
    let message = ended["error"]["message"].as_str().unwrap();
    assert!(message.contains("cannot be reached") && message.contains("is it running?"), "{message}");
}

#[tokio::test]
async fn what_is_no_address_and_what_a_worker_cannot_take_is_refused_at_once() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for agent in ["worker:", "worker:http://127.0.0.1:1", "worker:ws://10.0.0.1:1", "worker:unix:relative"] {
        let answer = workspace.try_session(json!({ "agent": agent })).await;
        answer.expect_refusal(400, "unknown_agent");
    }
    for setting in ["model", "system_prompt"] {
        let settings = json!({ "agent": "worker:ws://127.0.0.1:1", setting: "x" });
        workspace.try_session(settings).await.expect_refusal(400, "unsupported_setting");
    }
}

#[tokio::test]
async fn a_token_lets_the_session_in_and_is_never_shown() {
    let daemon = TestDaemon::start().await;
    let mut command = daemon.home.command(&["worker", "--listen", "127.0.0.1:0", "--agent", "echo"]);
    command.env("QD_WORKER_TOKEN", "t0ken-of-the-worker");
    let mut running = TestCommand::spawn(command);
    let agent = worker_agent_name(&mut running).await;
    let mut command = daemon.home.command(&["run", "--agent", &agent, "say t0ken-of-the-worker"]);
    command.env("WORKER_TOKEN", "t0ken-of-the-worker");
    let printed = TestCommand::spawn(command).wait().await.ok();
    assert_eq!(printed.trim(), "say [WORKER_TOKEN redacted]", "variables of the shell are passed on");
    let session = daemon.session_with(json!({ "agent": agent, "restarts": 0 })).await;
    let ended = session.wait(&session.prompt("x").await).await;
    assert!(ended["error"]["message"].as_str().unwrap().contains("WORKER_TOKEN"), "{ended}");
}

#[tokio::test]
async fn a_worker_can_be_described_by_a_manifest_and_stand_in_a_fleet() {
    let daemon = TestDaemon::start().await;
    let (_worker, agent) = worker(&daemon.home, "echo").await;
    let folder = daemon.home.path().join("agents");
    std::fs::create_dir_all(&folder).unwrap();
    let url = agent.trim_start_matches("worker:");
    let manifest = format!("[agent]\nname = 'far'\n[fast_path]\nworker_serve_at = '{url}'\n");
    std::fs::write(folder.join("far.toml"), manifest).unwrap();
    let listed = daemon.qd(&["agents"]).await.ok();
    assert!(listed.lines().any(|line| line.contains("far") && line.contains("worker")), "{listed}");
    let file = format!(
        "fleet:\n  task: hi\n  sessions:\n    a: {{ agent: far }}\n    b: {{ driver: \"{agent}\" }}\n  start: a\n  routes: [{{ when: a.done, route_to: b }}]\n"
    );
    let fleet = daemon.workspace().await.fleet(&file).await;
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "done", "{ended}");
    assert!(ended["result"].as_str().unwrap().contains("echo: hi"), "{ended}");
}

#[tokio::test]
async fn the_example_in_python_is_driven_as_it_is() {
    let daemon = TestDaemon::start().await;
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/worker.py");
    let mut command = daemon.home.program("python3");
    // `-B`: do not write compiled files next to the examples.
    command.arg("-B").arg(example);
    let mut running = TestCommand::spawn(command);
    let agent = worker_agent_name(&mut running).await;
    let session = daemon.session(&agent).await;
    let ended = session.wait(&session.prompt("hello big world").await).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("HELLO BIG WORLD")));
    for (decision, reason, text) in
        [("allow_once", "end_turn", json!("RM IT")), ("deny", "error", json!(null))]
    {
        let run = session.prompt("rm it").await;
        let ask = session.wait_for_ask(&run).await;
        daemon.client().answer_ask(&ask, &json!({ "decision": decision })).await.expect(200);
        let ended = session.wait(&run).await;
        assert_eq!(ended["finish_reason"], reason, "{ended}");
        if !text.is_null() {
            assert_eq!(ended["text"], text, "{ended}");
        }
    }
    let run = session.prompt(&"word ".repeat(10_000)).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert_eq!(session.wait(&session.prompt("again").await).await["text"], "AGAIN");
    journal_rules::check(&session.events().await);
}

/// A worker that answers every run with these usage reports and ends it.
async fn lying_worker(reports: Vec<Value>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut socket) = tokio_tungstenite::accept_async(stream).await else { continue };
            while let Some(Ok(frame)) = socket.next().await {
                let frame: Value =
                    frame.to_text().ok().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
                if frame["kind"] != "run" {
                    continue;
                }
                let events = reports.iter().map(|report| json!({ "kind": "event", "event": report }));
                let end = json!({ "kind": "terminal", "status": "completed", "result": "done" });
                for frame in events.chain([end]) {
                    socket.send(Message::text(frame.to_string())).await.unwrap();
                }
            }
        }
    });
    format!("worker:ws://{address}")
}

#[tokio::test]
async fn a_worker_that_lies_about_its_usage_is_not_believed_and_a_notice_says_so() {
    let daemon = TestDaemon::start().await;
    let report = |input: u64, output: u64, cost: f64| json!({ "type": "usage", "input_tokens": input, "output_tokens": output, "cost_usd": cost });
    let reports = vec![
        report(10, 20, 0.5),
        report(u64::MAX, 0, 0.0),
        report(0, 1 << 50, 0.0),
        report(0, 0, 1e12),
        report(0, 0, -5.0),
        report(1, 2, 0.25),
    ];
    let session = daemon.session(&lying_worker(reports).await).await;
    let run = session.prompt("x").await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    let honest = json!({ "input_tokens": 11, "output_tokens": 22, "cost_usd": 0.75 });
    assert_eq!((&ended["usage"], &session.show().await["usage"]), (&honest, &honest));
    let events = session.events_of(&run).await;
    let notices: Vec<&str> = events
        .iter()
        .filter(|event| event.kind == "notice.shown")
        .map(|event| event.data["text"].as_str().unwrap())
        .collect();
    assert_eq!(notices.len(), 4, "{notices:#?}");
    assert!(notices.iter().all(|text| text.contains(&run) && text.contains("refused")), "{notices:#?}");
    assert!(notices[0].contains(&u64::MAX.to_string()), "{notices:#?}");
    journal_rules::check(&session.events().await);
}
