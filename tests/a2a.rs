//! Remote agents over the Agent2Agent protocol: runs, asks, cancels, resumed conversations, and surviving the daemon.

use qd_testkit::home::TestCommand;
use qd_testkit::{FakeRemoteAgent, TestDaemon, journal_rules};
use serde_json::json;

#[tokio::test]
async fn a_remote_agent_is_run_by_its_address_and_its_answer_is_printed() {
    let daemon = TestDaemon::start().await;
    let remote = FakeRemoteAgent::start().await;
    let mut command = daemon.home.command(&["run", "--agent", &remote.agent(), "hello"]);
    command.env("A2A_TOKEN", "t0ken-of-mine");
    let printed = TestCommand::spawn(command).wait().await.ok();
    assert_eq!(printed.trim(), "hello, prompt 1");
    assert_eq!(remote.tokens(), ["Bearer t0ken-of-mine"], "variables of the shell are passed on");
    assert!(daemon.home.agent_processes().is_empty(), "no local process");
}

#[tokio::test]
async fn a_remote_agent_can_be_described_by_a_manifest() {
    let daemon = TestDaemon::start().await;
    let remote = FakeRemoteAgent::start().await;
    let folder = daemon.home.path().join("agents");
    std::fs::create_dir_all(&folder).unwrap();
    let url = remote.url();
    let manifest = format!(
        "[agent]\nname = 'far'\ndriver = 'a2a'\n[fast_path]\na2a_serve_at = '{url}'\n[startup]\nenv = {{ A2A_TOKEN = 'k-123456' }}\n"
    );
    std::fs::write(folder.join("far.toml"), manifest).unwrap();
    let session = daemon.session("far").await;
    let run = session.wait(&session.prompt("hi").await).await;
    assert_eq!((&run["finish_reason"], &run["text"]), (&json!("end_turn"), &json!("hi, prompt 1")), "{run}");
    assert_eq!(remote.tokens(), ["Bearer k-123456"]);
    let listed = daemon.qd(&["agents"]).await.ok();
    assert!(listed.lines().any(|line| line.contains("far") && line.contains("a2a")), "{listed}");
}

#[tokio::test]
async fn a_remote_agents_question_is_an_ask() {
    let daemon = TestDaemon::start().await;
    let remote = FakeRemoteAgent::start().await;
    let session = daemon.session(&remote.agent()).await;
    let run = session.prompt("ask").await;
    let ask = session.wait_for_ask(&run).await;
    let open = daemon.client().pending_asks().await;
    assert_eq!(
        (&open[0]["kind"], &open[0]["prompt"]),
        (&json!("question"), &json!("Which one?")),
        "{open:?}"
    );
    daemon.client().answer_ask(&ask, &json!({ "value": "the red one" })).await.expect(200);
    assert_eq!(session.wait(&run).await["text"], "you said the red one");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_cancel_reaches_the_remote_agent_and_the_next_prompt_runs() {
    let daemon = TestDaemon::start().await;
    let remote = FakeRemoteAgent::start().await;
    let session = daemon.session(&remote.agent()).await;
    let run = session.prompt("wait").await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert_eq!(remote.calls(), ["SendStreamingMessage", "CancelTask"]);
    let next = session.wait(&session.prompt("next").await).await;
    assert_eq!((&next["finish_reason"], &next["text"]), (&json!("end_turn"), &json!("next, prompt 2")));
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_remote_conversation_is_gone_on_with_by_another_worker() {
    let daemon = TestDaemon::start().await;
    let remote = FakeRemoteAgent::start().await;
    let session = daemon.session(&remote.agent()).await;
    assert_eq!(session.wait(&session.prompt("one").await).await["text"], "one, prompt 1");
    assert_eq!(session.wait(&session.prompt("two").await).await["text"], "two, prompt 2");
    daemon.home.kill_workers();
    session.wait_for_event("the end of the worker", |event| event.kind == "worker.exited").await;
    assert_eq!(session.wait(&session.prompt("three").await).await["text"], "three, prompt 3");
}

#[tokio::test]
async fn a_remote_turn_outlives_the_daemon_and_nothing_of_it_is_lost_or_doubled() {
    let mut daemon = TestDaemon::start().await;
    let remote = FakeRemoteAgent::start().await;
    let session = daemon.session(&remote.agent()).await;
    let run = session.prompt("wait").await;
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.kill9().await;
    remote.complete_waiting_tasks();
    daemon.start_again().await;
    let ended = session.wait(&run).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["text"]),
        (&json!("end_turn"), &json!("begun and ended")),
        "{ended}"
    );
    assert_eq!(remote.calls(), ["SendStreamingMessage"], "the prompt was sent once");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_remote_agent_that_is_not_there_fails_with_what_to_look_at() {
    let daemon = TestDaemon::start().await;
    // The address of an agent that has been stopped.
    let agent = FakeRemoteAgent::start().await.agent();
    let session = daemon.session_with(json!({ "agent": agent, "restarts": 0 })).await;
    let run = session.wait(&session.prompt("x").await).await;
    assert_eq!(
        (&run["finish_reason"], &run["error"]["code"]),
        (&json!("error"), &json!("agent_failed_to_start"))
    );
    let message = run["error"]["message"].as_str().unwrap();
    assert!(message.contains("cannot be reached") && message.contains("is the agent running"), "{message}");
}
