//! `qd up`, `qd down` and `qd ps --fleet`, with their exit codes.

use qd_testkit::{TestCommand, TestDaemon, TestTerminal, script::*};
use rustix::process::Signal;
use serde_json::json;

/// Writes a fleet file into the daemon's project directory.
fn write(daemon: &TestDaemon, text: &str) -> String {
    let path = daemon.home.project_dir().join("fleet.yaml");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn pair(task: &str) -> String {
    format!(
        "fleet:\n  task: {}\n  sessions: {{ a: {{ agent: script }}, b: {{ agent: echo }} }}\n  start: a\n  routes: [{{ when: a.done, route_to: b }}]\n",
        json!(task)
    )
}

#[tokio::test]
async fn up_shows_plain_lines_off_a_terminal_and_exits_by_how_it_ended() {
    let daemon = TestDaemon::start().await;
    let file = write(&daemon, &pair("hello"));
    let output = daemon.qd(&["up", &file]).await;
    for line in ["a: works", "a: done: hello", "a → b", "b: done: echo: hello"] {
        assert!(output.stdout.contains(line), "{line}: {output:?}");
    }
    output.ok();
    let failing = daemon.qd(&["up", &file, "--task", &steps(&[fail("no")])]).await;
    assert!(failing.stdout.contains("a: failed: no"), "{failing:?}");
    failing.expect_exit(1);
}

#[tokio::test]
async fn a_plan_starts_nothing() {
    let daemon = TestDaemon::start().await;
    let file = write(&daemon, &pair("hello"));
    let plan = daemon.qd(&["up", &file, "--plan"]).await.ok();
    assert!(plan.contains("a.done → b"), "{plan}");
    assert!(daemon.client().get("/v1/sessions").await.list().is_empty());
}

#[tokio::test]
async fn a_plan_checks_agents_and_branch_with_line_and_column() {
    let daemon = TestDaemon::start().await;
    for (lines, position, hint) in [
        ("sessions: { a: { agent: nobody } }", "3:", "unknown agent nobody"),
        ("sessions: { a: { agent: echo, worktree: true } }", "3:33", "not in a git repository"),
        ("base_branch: release\n  sessions: { a: { agent: echo } }", "3:3", "not in a git repository"),
    ] {
        let file = write(&daemon, &format!("fleet:\n  task: t\n  {lines}\n  start: a\n"));
        for args in [&["up", &file, "--plan"][..], &["up", &file]] {
            let output = daemon.qd(args).await;
            assert!(output.stderr.contains(&format!("{file}:{position}")), "{output:?}");
            assert!(output.stderr.contains(hint), "{output:?}");
            output.expect_exit(1);
        }
    }
    assert!(daemon.client().get("/v1/sessions").await.list().is_empty());
}

#[tokio::test]
async fn an_error_that_quotes_a_fleet_file_cannot_control_the_terminal() {
    let daemon = TestDaemon::start().await;
    // The file may come from a repository that somebody else wrote. YAML writes control characters as escapes.
    let file =
        write(&daemon, "fleet:\n  task: t\n  sessions: { a: { agent: \"no\\e[2K\\u202e\" } }\n  start: a\n");
    let refused = daemon.qd(&["up", &file]).await;
    assert!(refused.stderr.contains("no^[[2K\\u{202e}"), "the daemon's words, made visible: {refused:?}");
    assert!(!refused.stderr.contains(['\u{202e}', '\x1b']), "{refused:?}");
    // A program gets the daemon's message unchanged.
    let error = daemon.qd(&["--json", "up", &file]).await.stderr;
    let error: serde_json::Value = serde_json::from_str(&error).unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("no\x1b[2K\u{202e}"), "{error}");
    let terminal = TestTerminal::start_qd(&daemon.home, &["up", &file]).await;
    let screen = terminal.wait_for_text("exit 1").await;
    assert!(screen.contains("no^[[2K"), "{screen}");
}

#[tokio::test]
async fn a_mistake_is_told_with_file_line_and_column() {
    let daemon = TestDaemon::start().await;
    let file = write(&daemon, "fleet:\n  task: t\n  sessions: { a: { agent: echo } }\n  strat: a\n");
    let output = daemon.qd(&["up", &file]).await;
    assert!(output.stderr.contains(&format!("{file}:4:3: ")), "{output:?}");
    assert!(output.stderr.contains("did you mean `start`?"), "{output:?}");
    output.expect_exit(2);
}

#[tokio::test]
async fn a_detached_fleet_is_listed_and_taken_down() {
    let daemon = TestDaemon::start().await;
    let file = write(&daemon, &pair(&steps(&[sleep_forever()])));
    let id = daemon.qd(&["up", &file, "--detach"]).await.ok().trim().to_owned();
    assert!(id.starts_with("flt_"), "{id}");
    let listed = daemon.qd(&["ps", "--fleet"]).await.ok();
    assert!(listed.contains(&id) && listed.contains("running"), "{listed}");
    let one = daemon.qd(&["ps", "--fleet", &id[..10]]).await.ok();
    assert!(one.contains("script") && one.contains("echo"), "{one}");
    let down = daemon.qd(&["down", &id]).await.ok();
    assert!(down.contains("cancelled, 1 run"), "{down}");
    let mut stream = daemon.client().stream("/v1/events?after=0").await;
    let events = stream.until("the end", |event| event.kind == "fleet.finished").await;
    assert_eq!(events.last().unwrap().data["state"], "cancelled");
    daemon.qd(&["down", "flt_nobody"]).await.expect_exit(3);
}

#[tokio::test]
async fn ctrl_c_cancels_the_fleet_and_waits_for_its_end() {
    let daemon = TestDaemon::start().await;
    let file = write(&daemon, &pair(&steps(&[say("begun"), sleep_forever()])));
    let mut running: TestCommand = daemon.home.start(&["up", &file]);
    running.wait_for_stdout("a: works").await;
    running.signal(Signal::INT);
    let output = running.wait().await;
    assert!(output.stderr.contains("cancelled"), "{output:?}");
    output.expect_exit(130);
}

#[tokio::test]
async fn it_ends_with_its_fleet_whether_stdin_is_closed_or_stays_open() {
    let daemon = TestDaemon::start().await;
    let file = write(&daemon, &pair("hello"));
    // Nobody writes to the pipe, and nobody closes it.
    let open = format!("mkfifo pipe; exec 3<>pipe; \"$QD\" up '{file}' <&3");
    for line in [open, format!("\"$QD\" up '{file}' <&-"), format!("\"$QD\" up '{file}' </dev/null")] {
        let ended = daemon.home.shell(&line).await;
        assert!(ended.stdout.contains("b: done"), "{line}: {ended:?}");
        ended.ok();
    }
}

#[tokio::test]
async fn on_a_terminal_it_is_a_picture_and_asks_are_answered_in_place() {
    let daemon = TestDaemon::start().await;
    let file = write(&daemon, &pair(&steps(&[ask_bash("make test"), say(" and done")])));
    let terminal = TestTerminal::start_qd(&daemon.home, &["up", &file]).await;
    terminal.wait_for_text("a asks").await;
    terminal.wait_for_text("allow?").await;
    terminal.type_text("y\n").await;
    terminal.wait_for_text("done").await;
    let screen = terminal.wait_for_text("flt_").await;
    assert!(screen.contains("allowed and done"), "{screen}");
}
