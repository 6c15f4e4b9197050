//! Asks on the command line: shown whole, listed, answered, and gone through one by one on a terminal.

use qd_testkit::{TestDaemon, TestSession, TestTerminal, script::*};
use serde_json::{Value, json};

/// A session with this title that waits for an answer to the last of these steps: the session, the run and the ask.
async fn waiting(daemon: &TestDaemon, title: &str, step: Value) -> (TestSession, String, String) {
    let session = daemon.session_with(json!({ "agent": "script", "title": title })).await;
    let run = session.prompt_script(&[step]).await;
    let ask = session.wait_for_ask(&run).await;
    (session, run, ask)
}

const THREE_LINES: &str = "cd build\nrm -rf \u{202e}*\nmake\x1b[2K all";

#[tokio::test]
async fn every_verb_shows_the_whole_ask_and_nothing_hides_in_it() {
    let daemon = TestDaemon::start().await;
    let (session, run, ask) = waiting(&daemon, "tidy", ask_bash(THREE_LINES)).await;
    let lines = ["| cd build", "| rm -rf \\u{202e}*", "| make^[[2K all"];
    let expect_whole = |verb: &str, shown: &str| {
        // The log begins with the prompt, which is the user's own text.
        let shown = &shown[shown.find("ask_").unwrap()..];
        for line in lines {
            assert!(shown.contains(line), "`qd {verb}` does not show {line:?}: {shown}");
        }
        assert!(!shown.contains(['\u{202e}', '\x1b']), "{shown}");
    };
    let one = daemon.qd(&["asks", &ask]).await.ok();
    expect_whole("asks ID", &one);
    assert!(one.contains("of tidy (") && one.contains(&format!("qd allow {ask}")), "{one}");
    expect_whole("logs", &daemon.qd(&["logs", &session.id]).await.ok());
    let list = daemon.qd(&["asks"]).await.ok();
    assert!(list.contains("tidy") && list.contains("Bash: cd build +2 lines"), "{list}");
    let mut follow = daemon.home.start(&["asks", "-f"]);
    follow.wait_for_stdout("make^[[2K all").await;
    expect_whole("allow", &daemon.qd(&["allow", &ask]).await.ok());
    session.wait(&run).await;
    let resolved = daemon.qd(&["asks", &ask]).await.ok();
    assert!(resolved.contains("allowed once, by user"), "{resolved}");
    let watched = daemon.home.start(&[
        "run",
        "--agent",
        "script",
        "--on-ask",
        "deny",
        &steps(&[ask_bash(THREE_LINES)]),
    ]);
    expect_whole("run", &watched.wait().await.stderr);
}

#[tokio::test]
async fn an_edit_shows_what_it_removes_and_adds() {
    let daemon = TestDaemon::start().await;
    let input = json!({ "file_path": "src/lib.rs", "old_string": "a\nb\n", "new_string": "a\nc\n" });
    let (_session, _run, ask) = waiting(&daemon, "edit", ask("Edit", input)).await;
    let shown = daemon.qd(&["asks", &ask]).await.ok();
    for line in ["    file_path: src/lib.rs\n", "      a\n", "    - b\n", "    + c\n"] {
        assert!(shown.contains(line), "{line:?}: {shown}");
    }
}

#[tokio::test]
async fn several_asks_are_allowed_at_once_and_a_mistyped_id_allows_none() {
    let daemon = TestDaemon::start().await;
    let (first, first_run, first_ask) = waiting(&daemon, "one", ask_bash("make one")).await;
    let (second, second_run, second_ask) = waiting(&daemon, "two", ask_bash("make two")).await;
    daemon.qd(&["allow", &first_ask, &second_ask, "ask_zzzz"]).await.expect_exit(3);
    assert_eq!(daemon.client().pending_asks().await.len(), 2);
    let allowed = daemon.qd(&["allow", &first_ask, &second_ask]).await.ok();
    assert!(allowed.contains("Bash: make one") && allowed.contains("Bash: make two"), "{allowed}");
    assert_eq!(first.wait(&first_run).await["text"], "allowed");
    assert_eq!(second.wait(&second_run).await["text"], "allowed");
}

#[tokio::test]
async fn all_asks_up_to_a_risk_are_allowed_and_the_others_stay_open() {
    let daemon = TestDaemon::start().await;
    let (low, low_run, _) = waiting(&daemon, "low", ask_bash("ls")).await;
    let (_high, _, high_ask) = waiting(&daemon, "high", ask_bash("sudo rm -rf /")).await;
    let (_asking, _, question_ask) = waiting(&daemon, "asking", question("which?", &["red"])).await;
    let no_limit = daemon.qd(&["allow", "--all"]).await;
    assert!(no_limit.stderr.contains("--risk low"), "{no_limit:?}");
    no_limit.expect_exit(2);
    assert_eq!(daemon.client().pending_asks().await.len(), 3);
    let allowed = daemon.qd(&["allow", "--all", "--risk", "low"]).await;
    assert!(allowed.stdout.contains("Bash: ls"), "{allowed:?}");
    assert!(allowed.stderr.contains("1 question, 1 of a higher risk"), "{allowed:?}");
    allowed.ok();
    assert_eq!(low.wait(&low_run).await["text"], "allowed");
    let open: Vec<Value> = daemon.client().pending_asks().await.iter().map(|ask| ask["id"].clone()).collect();
    assert_eq!(open, [json!(high_ask), json!(question_ask)]);
    assert_eq!(daemon.qd(&["allow", "--all", "--risk", "low", "--json"]).await.json(), json!([]));
    daemon.qd(&["allow", "--risk", "low", &high_ask]).await.expect_exit(2);
}

#[tokio::test]
async fn an_answer_that_does_not_fit_says_what_to_type_instead() {
    let daemon = TestDaemon::start().await;
    let (_session, _, high) = waiting(&daemon, "high", ask_bash("sudo rm -rf /")).await;
    let (asking, run, question_ask) =
        waiting(&daemon, "asking", question("which?", &["red", "blue", "1"])).await;
    for (args, hint, exit) in [
        (vec!["allow", &high, "--always"], format!("`qd allow {high}`, without --always"), 1),
        (vec!["answer", &high, "yes"], format!("`qd allow {high}` or `qd deny {high} [REASON]`"), 1),
        (vec!["allow", &question_ask], format!("`qd answer {question_ask} VALUE`"), 1),
        (vec!["deny", &question_ask], format!("`qd answer {question_ask} VALUE`"), 1),
        (vec!["answer", &question_ask, "green"], "1. red, 2. blue, 3. 1".to_owned(), 1),
        (vec!["answer", &question_ask, "4"], "1. red, 2. blue, 3. 1".to_owned(), 1),
    ] {
        let refused = daemon.qd(&args).await;
        assert!(refused.stderr.contains(&hint), "{args:?}: {refused:?}");
        refused.expect_exit(exit);
    }
    assert_eq!(daemon.client().pending_asks().await.len(), 2, "both are still open");
    daemon.qd(&["answer", &question_ask, "2"]).await.ok();
    assert_eq!(asking.wait(&run).await["text"], "blue", "a number chooses an option");
    let again = asking.prompt_script(&[question("which?", &["red", "1"])]).await;
    let ask = asking.wait_for_ask(&again).await;
    daemon.qd(&["answer", &ask, "1"]).await.ok();
    assert_eq!(asking.wait(&again).await["text"], "1", "an option wins over a number");
}

#[tokio::test]
async fn the_history_says_what_was_decided_and_by_whom() {
    let daemon = TestDaemon::start().await;
    let session = daemon
        .session_with(json!({ "agent": "script", "title": "tidy", "policy": [
        { "tool": "Bash", "match": "ls*", "decision": "allow" },
    ] }))
        .await;
    session.run_script(&[ask_bash("ls")]).await;
    session.run_with_answer(ask_bash("make"), json!({ "decision": "deny", "reason": "not now" })).await;
    let history = daemon.qd(&["asks", "--history"]).await.ok();
    let lines: Vec<&str> = history.lines().collect();
    assert!(lines[1].contains("denied: not now") && lines[1].contains("user"), "{history}");
    assert!(lines[2].contains("allowed once") && lines[2].contains("policy"), "{history}");
    let newest = daemon.qd(&["asks", "--history", "--limit", "1"]).await;
    assert!(newest.stderr.contains("the newest 1"), "{newest:?}");
    assert_eq!(newest.ok().lines().count(), 2);
    let (_, _, older_ask) = waiting(&daemon, "older", ask_bash("make one")).await;
    let (newer, newer_run, newer_ask) = waiting(&daemon, "newer", ask_bash("make two")).await;
    daemon.qd(&["allow", &newer_ask]).await.ok();
    newer.wait(&newer_run).await;
    daemon.qd(&["allow", &older_ask]).await.ok();
    let history = daemon.qd(&["asks", "--history"]).await.ok();
    let rows: Vec<&str> = history.lines().skip(1).take(2).collect();
    assert!(rows[0].contains(&older_ask) && rows[1].contains(&newer_ask), "by decision: {history}");
    let json = daemon.qd(&["asks", "--history", "--json"]).await.json();
    assert_eq!((&json[2]["by"], &json[3]["by"]), (&json!("user"), &json!("policy")));
}

#[tokio::test]
async fn on_a_terminal_asks_are_gone_through_one_by_one() {
    let daemon = TestDaemon::start().await;
    let (first, first_run, _) = waiting(&daemon, "first", ask_bash("make one\nmake two")).await;
    let (second, second_run, _) = waiting(&daemon, "second", ask_bash("make three")).await;
    let (third, third_run, third_ask) = waiting(&daemon, "third", ask_bash("make four")).await;
    let (asking, asking_run, _) = waiting(&daemon, "asking", question("which?", &["red", "blue"])).await;
    let terminal = TestTerminal::start_qd_sized(&daemon.home, &["asks"], (80, 24)).await;
    let screen = terminal.wait_for_text("1 of 4").await;
    assert!(screen.contains("| make two"), "{screen}");
    let row = screen.lines().find(|line| line.contains("make three")).unwrap();
    let words: Vec<&str> = row.split_whitespace().collect();
    assert_eq!((words[0], words[3]), ("medium", "second"), "{row}");
    assert!(words[1].len() >= 4 && words[1].len() < 10, "a short id: {row}");
    for (typed, shown) in
        [("y", "2 of 4"), ("n use make five", "3 of 4"), ("s", "4 of 4"), ("2", "no more asks")]
    {
        terminal.type_text(typed).await;
        terminal.press_key("Enter").await;
        terminal.wait_for_text(shown).await;
    }
    terminal.wait_for_text("exit 0").await;
    assert_eq!(first.wait(&first_run).await["text"], "allowed");
    assert_eq!(second.wait(&second_run).await["text"], "denied: use make five");
    assert_eq!(asking.wait(&asking_run).await["text"], "blue");
    assert_eq!(third.run(&third_run).await["state"], "waiting", "it was skipped");
    let quitting = TestTerminal::start_qd_sized(&daemon.home, &["asks"], (140, 40)).await;
    quitting.wait_for_text("1 of 1").await;
    quitting.type_text("allow").await;
    quitting.press_key("Enter").await;
    quitting.wait_for_text("none of the letters").await;
    quitting.type_text("q").await;
    quitting.press_key("Enter").await;
    quitting.wait_for_text("exit 0").await;
    assert_eq!(daemon.client().pending_asks().await[0]["id"], third_ask);
}

#[tokio::test]
async fn allowing_everything_is_confirmed_on_a_terminal() {
    let daemon = TestDaemon::start().await;
    let (session, run, _) = waiting(&daemon, "one", ask_bash("sudo make install")).await;
    for (typed, exit) in [("n", "exit 2"), ("y", "exit 0")] {
        assert_eq!(daemon.client().pending_asks().await.len(), 1);
        let terminal = TestTerminal::start_qd(&daemon.home, &["allow", "--all"]).await;
        terminal.wait_for_text("allow it? [y/N]").await;
        terminal.type_text(typed).await;
        terminal.press_key("Enter").await;
        terminal.wait_for_text(exit).await;
    }
    assert_eq!(session.wait(&run).await["text"], "allowed");
}

#[tokio::test]
async fn a_fleet_that_asks_for_its_result_shows_what_it_asks_about() {
    let daemon = TestDaemon::start().await;
    let fleet = daemon.home.sibling_path("fleet.yaml");
    let file = "fleet:\n  sessions:\n    review: { agent: script }\n  start: review\n  task: '[{\"say\":\"line one\\nline two\"}]'\n  routes:\n    - { when: review.done, collect: human }\n";
    std::fs::write(&fleet, file).unwrap();
    let mut up = daemon.home.start(&["up", fleet.to_str().unwrap()]);
    up.wait_for_stderr("qd answer").await;
    let id = daemon.client().pending_asks().await[0]["id"].as_str().unwrap().to_owned();
    let shown = daemon.qd(&["asks", &id]).await.ok();
    assert!(shown.contains("| line one\n") && shown.contains("| line two\n"), "{shown}");
    let list = daemon.qd(&["asks"]).await.ok();
    assert!(list.contains("What is the result? +4 lines"), "{list}");
    assert!(list.contains("fleet: [{\"say\":"), "a fleet is named by its task: {list}");
    daemon.qd(&["answer", &id, "ship it"]).await.ok();
    let ended = up.wait().await;
    assert!(ended.stderr.contains("| line two"), "{ended:?}");
    assert!(ended.ok().contains("ship it"));
}
