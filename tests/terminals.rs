//! Programs in terminals with the real binary: a shell without a manifest, a program whose end of turn cannot be
//! detected, and people who watch the screen and type.

use std::time::Duration;

use qd_testkit::{TestDaemon, TestHome, TestTerminal, journal_rules, poll_until, processes};
use serde_json::json;

use crate::workers_loss::process_of;

/// A shell without the user's settings.
const BASH: &str = "pty:bash --norc --noprofile";

/// Adds a manifest of the user.
fn add_manifest(home: &TestHome, name: &str, manifest: &str) {
    let agents = home.path().join("agents");
    std::fs::create_dir_all(&agents).unwrap();
    std::fs::write(agents.join(format!("{name}.toml")), manifest).unwrap();
}

#[tokio::test]
async fn a_shell_answers_like_any_agent() {
    let daemon = TestDaemon::start().await;
    let ran = daemon.qd(&["run", "--agent", BASH, "echo hi"]).await;
    assert_eq!(ran.ok().trim(), "hi");
}

#[tokio::test]
async fn a_shell_keeps_its_memory_from_prompt_to_prompt_and_is_never_put_to_rest() {
    let mut daemon = TestDaemon::start_with_settings("idle_s = 1\n").await;
    let session = daemon.session(BASH).await;
    let run = session.prompt("X=1").await;
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    let worker = process_of(&session).await;
    // Three times the idle timeout.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(worker.is_alive(), "an agent that cannot resume is not stopped when idle");
    let run = session.prompt("echo $X").await;
    assert_eq!(session.wait(&run).await["text"], "1");
    daemon.restart().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let run = session.prompt("echo still $X").await;
    assert_eq!(session.wait(&run).await["text"], "still 1");
    journal_rules::check(&session.events().await);
}

/// Runs a turn of `script`, and waits until its agent is stopped for being idle.
async fn expect_idle_stop(daemon: &TestDaemon) {
    let session = daemon.session("script").await;
    let run = session.prompt("hello").await;
    session.wait(&run).await;
    poll_until("the idle agent to be stopped", async || {
        daemon.home.processes_with_role("__script").is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_manifest_says_after_how_long_an_agent_rests() {
    let home = TestHome::new();
    add_manifest(&home, "script", "[agent]\nname = 'script'\n[idle]\nrest_after_s = 1\n");
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    expect_idle_stop(&daemon).await;
}

#[tokio::test]
async fn the_users_idle_time_counts_over_a_manifests() {
    let home = TestHome::new();
    add_manifest(&home, "script", "[agent]\nname = 'script'\n[idle]\nrest_after_s = 86400\n");
    home.configure("idle_s = 1\n");
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    expect_idle_stop(&daemon).await;
}

#[tokio::test]
async fn a_cancelled_command_leaves_nothing_and_the_shell_goes_on() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session(BASH).await;
    let run = session.prompt("X=1; setsid -f sleep 601; echo begun; sleep 600").await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.cancel().await;
    let ended = session.wait(&run).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["processes"]["survivors"]),
        (&json!("cancelled"), &json!(null))
    );
    let worker = process_of(&session).await;
    let sleeps = processes::descendants(worker.pid).into_iter().filter(|one| one.args[0] == "sleep").count();
    assert_eq!(sleeps, 0);
    let run = session.prompt("echo $X").await;
    assert_eq!(session.wait(&run).await["text"], "1");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_program_of_which_nothing_can_be_told_ends_with_a_clear_error() {
    let daemon = TestDaemon::start().await;
    let ran = daemon.qd(&["run", "--agent", "pty:cat", "hello"]).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("cannot tell when cat has finished"), "{ran:?}");
}

#[tokio::test]
async fn a_person_sees_the_screen_types_and_leaves_while_the_session_goes_on() {
    let home = TestHome::new();
    // Smaller than the viewer's terminal, whose size it takes over.
    let manifest = "[agent]\nname = 'small'\nbinary = 'bash'\ndriver = 'pty'\n\
        [startup]\ncommand = ['bash', '--norc', '--noprofile']\n[pty]\ncols = 70\nrows = 15\n";
    add_manifest(&home, "small", manifest);
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    let session = daemon.session_with(json!({ "agent": "small", "title": "shell" })).await;
    let run = session.prompt("echo what was before; stty size").await;
    assert_eq!(session.wait(&run).await["text"], "what was before\n15 70");
    let terminal = TestTerminal::start_qd(&daemon.home, &["attach", "--raw", "shell"]).await;
    terminal.wait_for_text("what was before").await;
    terminal.type_text("Y=typed; stty size").await;
    terminal.press_key("Enter").await;
    terminal.wait_for_text("40 120").await;
    let run = session.prompt("echo meanwhile $Y").await;
    assert_eq!(session.wait(&run).await["text"], "meanwhile typed");
    terminal.wait_for_text("meanwhile typed").await;
    terminal.press_key("C-]").await;
    terminal.wait_for_text("exit 0").await;
    let run = session.prompt("echo after").await;
    assert_eq!(session.wait(&run).await["text"], "after");
    let events =
        serde_json::to_string(&session.events().await.iter().map(|one| &one.data).collect::<Vec<_>>());
    assert!(!events.unwrap().contains("Y=typed"), "typed keys appear in no event");
}

#[tokio::test]
async fn a_session_without_a_terminal_says_so() {
    let daemon = TestDaemon::start().await;
    let idle = daemon.session(BASH).await;
    let terminal = TestTerminal::start_qd(&daemon.home, &["attach", "--raw", &idle.id]).await;
    terminal.wait_for_text("exit 1").await;
    let session = daemon.session("script").await;
    let run = session.prompt("hello").await;
    session.wait(&run).await;
    drop(terminal);
    let terminal = TestTerminal::start_qd(&daemon.home, &["attach", "--raw", &session.id]).await;
    let screen = terminal.wait_for_text("exit 1").await;
    assert!(screen.contains("no terminal"), "{screen}");
    let refused = session.client.get(&session.path("/terminal")).await;
    refused.expect_refusal(400, "invalid_request");
    let ran = daemon.qd(&["attach", "--raw", &session.id]).await;
    assert_eq!(ran.code, Some(2), "without a terminal: {ran:?}");
}

#[tokio::test]
async fn an_agent_cannot_type_into_its_own_terminal() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session(BASH).await;
    let (qd, home) = (qd_testkit::home::binary(), daemon.home.path());
    let command =
        format!("{} --home {} attach --raw {}; echo exit $?", qd.display(), home.display(), session.id);
    let run = session.prompt(&command).await;
    let text = session.wait(&run).await["text"].as_str().unwrap().to_owned();
    assert!(text.contains("belongs to the agent of") && text.ends_with("exit 1"), "{text}");
}
