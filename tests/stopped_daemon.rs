//! `qd` against a daemon that was stopped with SIGSTOP: every verb says so, none hangs, and none starts a second daemon.

use qd_testkit::home::signal;
use qd_testkit::{TestCommand, TestDaemon, script::*};
use rustix::process::Signal;
use serde_json::json;

#[tokio::test]
async fn every_verb_names_the_stopped_daemon_and_gives_up_with_exit_4() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_bash("make")]).await;
    let ask = session.wait_for_ask(&run).await;
    signal(daemon.pid(), Signal::STOP);
    let verbs: [&[&str]; 9] = [
        &["ps"],
        &["run", "--agent", "echo", "hello"],
        &["logs", "-f", &session.id],
        &["wait", &run],
        &["cancel", &session.id],
        &["allow", &ask],
        &["halt"],
        &["stop"],
        &["--json", "ps"],
    ];
    let started: Vec<TestCommand> = verbs.iter().map(|verb| daemon.home.start(verb)).collect();
    let advice = format!("`kill -CONT {}`", daemon.pid());
    for (verb, command) in verbs.iter().zip(started) {
        let output = command.wait().await;
        assert_eq!(output.code, Some(4), "{verb:?}: {output:?}");
        assert!(output.stderr.contains("waiting"), "{verb:?} says at once that it waits: {output:?}");
        assert_eq!(output.stderr.matches(&advice).count(), 2, "{verb:?}: {output:?}");
    }
    signal(daemon.pid(), Signal::CONT);
    assert_eq!(daemon.home.processes_with_role("serve").len(), 1, "no second daemon was started");
    session.client.answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn a_verb_that_waits_goes_on_when_the_daemon_is_continued() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("begun"), question("go on?", &[]), say(" and done")]).await;
    let ask = session.wait_for_ask(&run).await;
    let mut logs = daemon.home.start(&["logs", "-f", &run]);
    logs.wait_for_stdout("begun").await;
    let mut commands = [logs, daemon.home.start(&["wait", &run])];
    for command in &mut commands {
        // Both notice it, unless the first is continued before the second asks.
        signal(daemon.pid(), Signal::STOP);
        command.wait_for_stderr(&format!("`kill -CONT {}`", daemon.pid())).await;
        signal(daemon.pid(), Signal::CONT);
        command.wait_for_stderr("the daemon answers again").await;
    }
    session.client.answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    let [logs, wait] = commands;
    assert!(logs.wait().await.ok().contains("and done"));
    assert!(wait.wait().await.ok().contains("end_turn"));
}

#[tokio::test]
async fn a_live_daemon_may_take_longer_than_the_limit() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[sleep(12_000), say("at last")]).await;
    let output = daemon.qd(&["wait", &run]).await;
    assert!(output.ok().contains("end_turn"));
}

#[tokio::test]
async fn a_stopped_daemon_without_its_socket_is_found_by_its_lock() {
    let daemon = TestDaemon::start().await;
    signal(daemon.pid(), Signal::STOP);
    std::fs::remove_file(daemon.home.socket()).unwrap();
    let output = daemon.qd(&["ps"]).await;
    assert_eq!(output.code, Some(4), "{output:?}");
    assert!(output.stderr.contains(&format!("`kill -CONT {}`", daemon.pid())), "{output:?}");
    assert_eq!(daemon.home.processes_with_role("serve").len(), 1);
    signal(daemon.pid(), Signal::CONT);
}
