//! The command line in a real terminal: what the user sees and types.

use qd_testkit::{TestDaemon, TestTerminal, home::signal, poll_until, script::*};
use rustix::process::Signal;
use serde_json::json;

#[tokio::test]
async fn run_shows_an_ask_and_takes_its_answer_in_place() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[say("before "), ask_bash("make install"), say(" after")]);
    let terminal = TestTerminal::start_qd(&daemon.home, &["run", "--agent", "script", &script]).await;
    terminal.wait_for_text("make install").await;
    let mut asked = daemon.client().stream("/v1/events?after=0&kinds=ask.opened").await;
    asked.next().await;
    terminal.type_text("y").await;
    terminal.press_key("Enter").await;
    let screen = terminal.wait_for_text("exit 0").await;
    assert!(screen.contains("allowed"), "{screen}");
    assert!(daemon.client().pending_asks().await.is_empty());
}

#[tokio::test]
async fn a_pause_in_the_middle_of_a_line_erases_nothing_of_it() {
    let daemon = TestDaemon::start().await;
    // Longer than the silence after which the spinner appears.
    let script = steps(&[say("Hello dear "), sleep(1500), say("reader.")]);
    let terminal = TestTerminal::start_qd(&daemon.home, &["run", "--agent", "script", &script]).await;
    let screen = terminal.wait_for_text("exit 0").await;
    assert!(screen.contains("Hello dear reader."), "{screen}");
}

#[tokio::test]
async fn that_the_daemon_was_killed_is_said_on_a_line_of_its_own() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[say("Half of it. "), sleep(3000), say("The other half.")]);
    let terminal = TestTerminal::start_qd(&daemon.home, &["run", "--agent", "script", &script]).await;
    terminal.wait_for_text("Half of it.").await;
    signal(daemon.pid(), Signal::KILL);
    let screen = terminal.wait_for_text("exit 0").await;
    let lines: Vec<&str> = screen.lines().map(str::trim_end).take(3).collect();
    let note = "the daemon was gone; another one has been started";
    assert_eq!(lines, ["Half of it.", note, "The other half."], "{screen}");
}

#[tokio::test]
async fn that_the_daemon_was_killed_leaves_no_blank_line() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[
        say("Half of it."),
        sleep(3000),
        tool("Bash", json!({ "command": "make" }), "ok"),
        say("Done."),
    ]);
    let terminal = TestTerminal::start_qd(&daemon.home, &["run", "--agent", "script", &script]).await;
    terminal.wait_for_text("Half of it.").await;
    signal(daemon.pid(), Signal::KILL);
    let screen = terminal.wait_for_text("exit 0").await;
    let lines: Vec<&str> = screen.lines().map(str::trim_end).take(5).collect();
    let note = "the daemon was gone; another one has been started";
    assert_eq!(lines, ["Half of it.", note, "tool Bash: make", "  = ok", "Done."], "{screen}");
}

#[tokio::test]
async fn an_answer_from_elsewhere_is_shown_below_the_prompt() {
    let daemon = TestDaemon::start().await;
    let fleet = json!({ "fleet": {
        "task": steps(&[ask_bash("make")]), "sessions": { "a": { "agent": "script" } }, "start": "a",
    } });
    // JSON is YAML.
    std::fs::write(daemon.home.project_dir().join("fleet.yaml"), fleet.to_string()).unwrap();
    let script = steps(&[ask_bash("make")]);
    for args in [&["run", "--agent", "script", &script][..], &["up", "fleet.yaml"]] {
        let terminal = TestTerminal::start_qd(&daemon.home, args).await;
        terminal.wait_for_text("say why not:").await;
        let open = daemon.client().pending_asks().await;
        let answer = json!({ "decision": "allow_once" });
        daemon.client().answer_ask(open[0]["id"].as_str().unwrap(), &answer).await.expect(200);
        let screen = terminal.wait_for_text("exit 0").await;
        let prompt = screen.lines().find(|line| line.contains("say why not:")).unwrap();
        assert!(prompt.trim_end().ends_with("say why not:"), "{screen}");
        assert!(screen.contains("allowed"), "{screen}");
    }
}

/// The id of the ask that a screen names last.
fn last_named_ask(screen: &str) -> String {
    let at = screen.rfind("ask_").unwrap_or(screen.len());
    screen[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
}

#[tokio::test]
async fn of_several_open_asks_a_line_answers_the_one_that_the_screen_names_last() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[ask_at_once("Bash", 2)]);
    for verb in ["run", "attach"] {
        let session = daemon.session_with(json!({ "agent": "script" })).await;
        let terminal = if verb == "run" {
            TestTerminal::start_qd(&daemon.home, &["run", "--session", &session.id, &script]).await
        } else {
            session.prompt(&script).await;
            TestTerminal::start_qd(&daemon.home, &["attach", &session.id]).await
        };
        poll_until("two open asks", async || (daemon.client().pending_asks().await.len() == 2).then_some(()))
            .await;
        let open = daemon.client().pending_asks().await;
        let open: Vec<&str> = open.iter().map(|ask| ask["id"].as_str().unwrap()).collect();
        let is_prompt = |screen: &str| screen.trim_end().ends_with("say why not:");
        let screen = terminal
            .wait_for_screen("a prompt below both", |screen| {
                is_prompt(screen) && open.iter().all(|id| screen.contains(id))
            })
            .await;
        let first = last_named_ask(&screen);
        terminal.type_text("y").await;
        terminal.press_key("Enter").await;
        let answered = format!("ask {first}: allowed once");
        let screen = terminal
            .wait_for_screen("the next ask", |screen| screen.contains(&answered) && is_prompt(screen))
            .await;
        let left = daemon.client().pending_asks().await;
        assert_eq!((left.len(), left[0]["id"].as_str()), (1, Some(&last_named_ask(&screen)[..])), "{screen}");
        terminal.type_text("n").await;
        terminal.press_key("Enter").await;
        terminal.wait_for_text("1 allowed, 1 denied").await;
    }
}

#[tokio::test]
async fn attach_replays_goes_live_and_sends_what_is_typed() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "title": "typed to" })).await;
    session.run_script(&[say("what was before")]).await;
    let terminal = TestTerminal::start_qd(&daemon.home, &["attach", "typed to"]).await;
    terminal.wait_for_text("what was before").await;
    session.run_script(&[say("what came live")]).await;
    terminal.wait_for_text("what came live").await;
    terminal.type_text(r#"[{"say":"answer to a line"}]"#).await;
    terminal.press_key("Enter").await;
    let run = session.wait_for_event("a run of the typed line", |event| {
        event.kind == "run.finished" && event.data["text"] == "answer to a line"
    });
    run.await;
    terminal
        .wait_for_screen("the answer itself", |screen| screen.matches("answer to a line").count() > 1)
        .await;
    assert_eq!(session.runs().await.len(), 3);
}

#[tokio::test]
async fn ctrl_z_detaches_from_a_run_and_the_run_goes_on() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[say("here"), await_steer(600_000)]);
    let terminal = TestTerminal::start_qd(&daemon.home, &["run", "--agent", "script", &script]).await;
    terminal.wait_for_text("here").await;
    terminal.press_key("C-z").await;
    let screen = terminal.wait_for_text("exit 0").await;
    assert!(screen.contains("qd attach ses_"), "{screen}");
    let sessions = daemon.client().get("/v1/sessions").await.list();
    assert_eq!(sessions[0]["state"], "running");
}

#[tokio::test]
async fn ctrl_c_in_a_terminal_cancels_the_run() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[say("here"), sleep_forever()]);
    let terminal = TestTerminal::start_qd(&daemon.home, &["run", "--agent", "script", &script]).await;
    terminal.wait_for_text("here").await;
    terminal.press_key("C-c").await;
    terminal.wait_for_text("exit 130").await;
}
