//! What Tab offers: the script of `qd completions bash` in a real bash, and what all scripts ask the binary.

use qd_testkit::home::signal;
use qd_testkit::{TestDaemon, TestHome, poll_until, script::*};
use rustix::process::Signal;

/// Presses Tab in bash after these words, the last of which may be empty. `comp_type` says what Tab does: 9 completes, 63
/// lists, 37 goes through the candidates.
async fn press_tab(home: &TestHome, words: &[&str], comp_type: u8) -> Vec<String> {
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let line = format!(
        r#"PATH="$(dirname "$QD"):$PATH"
        source <("$QD" completions bash)
        [[ $(complete -p qd) == *"-F _qd qd" ]] || exit 7
        COMP_WORDS=({}) COMP_CWORD={} COMP_TYPE={comp_type} COLUMNS=120
        _qd || exit 8
        printf '%s\n' "${{COMPREPLY[@]}}""#,
        quoted.join(" "),
        words.len() - 1,
    );
    let output = home.shell(&line).await;
    assert_eq!(output.stderr, "", "Tab prints no error");
    let offered = output.ok();
    offered.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// Presses Tab until something is offered. On a busy machine the daemon may be too slow for one Tab.
async fn press_until_offered(home: &TestHome, words: &[&str]) -> Vec<String> {
    poll_until("candidates", async || {
        let offered = press_tab(home, words, 37).await;
        offered.iter().any(|value| !value.starts_with('-')).then_some(offered)
    })
    .await
}

#[tokio::test]
async fn tab_offers_sessions_by_id_with_their_titles_and_completes_a_title() {
    let daemon = TestDaemon::start().await;
    let one = daemon.session_with(serde_json::json!({ "agent": "echo", "title": "nightly" })).await;
    let two = daemon.session_with(serde_json::json!({ "agent": "echo", "title": "two words" })).await;
    let mut offered = press_until_offered(&daemon.home, &["qd", "attach", ""]).await;
    offered.sort();
    let mut expected = [one.id.clone(), two.id.clone()];
    expected.sort();
    assert_eq!(offered, expected, "whole ids, and no flags among them");
    let listed = poll_until("a list with titles", async || {
        let listed = press_tab(&daemon.home, &["qd", "logs", ""], 63).await;
        (listed.len() == 2).then_some(listed)
    });
    let listed = listed.await;
    assert!(listed.contains(&format!("{}  (nightly (new))", one.id)), "{listed:?}");
    assert!(listed.contains(&format!("{}  (two words (new))", two.id)), "{listed:?}");
    for verb in ["send", "diff", "rm", "cancel", "wait", "queue"] {
        assert_eq!(press_until_offered(&daemon.home, &["qd", verb, &one.id[..10]]).await, [one.id.as_str()]);
    }
    assert_eq!(press_until_offered(&daemon.home, &["qd", "attach", "nig"]).await, ["nightly"]);
    assert_eq!(press_until_offered(&daemon.home, &["qd", "run", "--session", "=", "nig"]).await, ["nightly"]);
}

#[tokio::test]
async fn tab_offers_asks_by_kind_and_the_queued_runs_of_the_session() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.prompt_script(&[ask_bash("make install")]).await;
    let ask = poll_until("the ask", async || {
        Some(daemon.client().pending_asks().await.first()?["id"].as_str()?.to_owned())
    })
    .await;
    assert_eq!(press_until_offered(&daemon.home, &["qd", "allow", ""]).await, [ask.as_str()]);
    assert_eq!(press_until_offered(&daemon.home, &["qd", "deny", ""]).await, [ask.as_str()]);
    let questions = press_tab(&daemon.home, &["qd", "answer", ""], 37).await;
    assert!(!questions.contains(&ask), "it is no question: {questions:?}");
    let (first, second) = (session.prompt("one").await, session.prompt("two").await);
    for flag in ["--move", "--remove"] {
        let offered = press_until_offered(&daemon.home, &["qd", "queue", &session.id, flag, ""]).await;
        assert_eq!(offered, [first.as_str(), second.as_str()]);
    }
}

#[tokio::test]
async fn tab_offers_fleets_where_a_fleet_is_taken() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let file = "fleet:\n  task: port the parser\n  sessions: { lead: { agent: echo } }\n  start: lead\n";
    let fleet = workspace.try_fleet(file).await.expect(201)["id"].as_str().unwrap().to_owned();
    assert_eq!(press_until_offered(&daemon.home, &["qd", "ps", "--fleet", ""]).await, [fleet.as_str()]);
    assert_eq!(press_until_offered(&daemon.home, &["qd", "attach", "flt"]).await, [fleet.as_str()]);
}

#[tokio::test]
async fn tab_starts_no_daemon_and_offers_verbs_and_flags_without_one() {
    let home = TestHome::new();
    assert_eq!(press_tab(&home, &["qd", "att"], 9).await, ["attach"]);
    let flags = press_tab(&home, &["qd", "attach", ""], 37).await;
    assert!(
        flags.contains(&"--raw".to_owned()) && flags.iter().all(|flag| flag.starts_with('-')),
        "{flags:?}"
    );
    let verbs = press_tab(&home, &["qd", ""], 63).await;
    assert!(
        verbs.iter().any(|line| line.starts_with("queue ") && line.contains("(List a session")),
        "{verbs:?}"
    );
    assert!(!home.path().exists(), "a Tab created the home");
}

#[tokio::test]
async fn tab_gives_up_on_a_daemon_that_does_not_answer() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    signal(daemon.pid(), Signal::STOP);
    let offered = press_tab(&daemon.home, &["qd", "attach", ""], 37).await;
    signal(daemon.pid(), Signal::CONT);
    assert!(offered.iter().all(|value| value.starts_with('-')), "{offered:?}");
    assert_eq!(press_until_offered(&daemon.home, &["qd", "attach", ""]).await, [session.id.as_str()]);
}

#[tokio::test]
async fn every_shell_gets_a_script_and_nonsense_is_answered_with_nothing() {
    let home = TestHome::new();
    for (shell, part) in
        [("zsh", "#compdef qd"), ("fish", "complete --command qd"), ("elvish", "qd"), ("powershell", "qd")]
    {
        assert!(home.qd(&["completions", shell]).await.ok().contains(part), "{shell}");
    }
    for nonsense in
        [&["__complete"][..], &["__complete", "bash", "x"], &["__complete", "fish", "999999", "qd"]]
    {
        let output = home.qd(nonsense).await;
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{nonsense:?}");
    }
}
