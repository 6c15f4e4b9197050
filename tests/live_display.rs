//! The live display of `qd up` and `qd attach FLEET` in a real terminal: whatever happens to the window or to the daemon,
//! every session is on the screen once.

use qd_testkit::{TestDaemon, TestTerminal, home::signal, script::*};
use rustix::process::Signal;
use serde_json::json;

const WIDE: (u16, u16) = (140, 40);
const NARROW: (u16, u16) = (44, 40);
/// Less than one row per session.
const TINY: (u16, u16) = (24, 4);

/// Five sessions that say one long line and go on working.
const NAMES: [&str; 5] = ["alpha", "bravo", "carol", "delta", "ember"];

/// How the terminal came to show the fleet.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ShownBy {
    Up,
    Attach,
}

/// Starts the fleet in a terminal of this size and waits until all its sessions work.
async fn show_fleet(daemon: &TestDaemon, verb: ShownBy, size: (u16, u16)) -> TestTerminal<'_> {
    let long_line = "The quick brown fox jumps over the lazy dog and comes back for more. ".repeat(2);
    let task = steps(&[say(long_line.trim_end()), await_steer(600_000)]);
    let sessions: serde_json::Map<_, _> =
        NAMES.iter().map(|name| ((*name).to_owned(), json!({ "agent": "script" }))).collect();
    let fleet = json!({ "fleet": { "task": task, "sessions": sessions, "start": NAMES, "routes": [] } });
    // JSON is YAML.
    let path = daemon.home.project_dir().join("fleet.yaml");
    std::fs::write(&path, fleet.to_string()).unwrap();
    let file = path.to_str().unwrap();
    let terminal = match verb {
        ShownBy::Up => TestTerminal::start_qd_sized(&daemon.home, &["up", file], size).await,
        ShownBy::Attach => {
            let id = daemon.qd(&["up", file, "--detach"]).await.ok();
            TestTerminal::start_qd_sized(&daemon.home, &["attach", id.trim()], size).await
        }
    };
    terminal
        .wait_for_visible("five that work", |screen| screen.matches("works").count() == NAMES.len())
        .await;
    terminal
}

/// The seconds that the title shows, if it is on the screen exactly once.
fn shown_seconds(screen: &str) -> Option<u64> {
    let mut titles = screen.lines().filter_map(|line| line.strip_prefix("running  "));
    let (minutes, rest) = titles.next()?.split_once(':')?;
    let seconds: u64 = rest.get(..2)?.parse().ok()?;
    titles.next().is_none().then_some(minutes.parse::<u64>().ok()? * 60 + seconds)
}

/// The screen after it has been redrawn at least once more: the clock has moved on.
async fn redrawn(terminal: &TestTerminal<'_>) -> String {
    let first = terminal.wait_for_visible("a title", |screen| shown_seconds(screen).is_some()).await;
    let before = shown_seconds(&first).unwrap();
    let moved_on = |screen: &str| shown_seconds(screen).is_some_and(|now| now > before + 1);
    terminal.wait_for_visible("the clock to move on", moved_on).await
}

/// Checks that the screen shows nothing but the title, each session once, and these lines before them.
#[track_caller]
fn assert_once(screen: &str, notes: &[&str]) {
    let lines: Vec<&str> = screen.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let starts: Vec<&str> = lines.iter().map(|line| line.split("  ").next().unwrap()).collect();
    assert_eq!(starts, [notes, &["running"], &NAMES].concat(), "{screen}");
}

async fn resized_display_is_clean(verb: ShownBy, from: (u16, u16), to: &[(u16, u16)]) {
    let daemon = TestDaemon::start().await;
    let terminal = show_fleet(&daemon, verb, from).await;
    for size in to {
        terminal.resize(*size).await;
        let screen = redrawn(&terminal).await;
        if *size == TINY {
            assert!(screen.lines().all(|line| line.chars().count() < usize::from(TINY.0)), "{screen}");
            assert_eq!(screen.matches("more").count(), 1, "it says how many are left out: {screen}");
        } else {
            assert_once(&screen, &[]);
        }
    }
}

#[tokio::test]
async fn up_is_drawn_over_cleanly_when_the_window_becomes_narrower() {
    resized_display_is_clean(ShownBy::Up, WIDE, &[NARROW]).await;
}

#[tokio::test]
async fn up_is_drawn_over_cleanly_when_the_window_becomes_wider() {
    resized_display_is_clean(ShownBy::Up, NARROW, &[WIDE, NARROW]).await;
}

#[tokio::test]
async fn up_leaves_nothing_behind_in_a_tiny_window_that_grows_again() {
    resized_display_is_clean(ShownBy::Up, WIDE, &[TINY, WIDE]).await;
}

#[tokio::test]
async fn attach_is_drawn_over_cleanly_whatever_the_size_of_the_window() {
    resized_display_is_clean(ShownBy::Attach, WIDE, &[NARROW, WIDE, TINY, WIDE]).await;
}

#[tokio::test]
async fn a_fleet_with_more_sessions_than_rows_does_not_scroll() {
    let daemon = TestDaemon::start().await;
    let terminal = show_fleet(&daemon, ShownBy::Up, (80, 7)).await;
    terminal.resize((80, 5)).await;
    redrawn(&terminal).await;
    let with_history = terminal.wait_for_text("more").await;
    assert!(
        with_history.matches("running").count() <= 2,
        "one title may have left the screen: {with_history}"
    );
}

#[tokio::test]
async fn typed_keys_do_not_shift_the_display() {
    let daemon = TestDaemon::start().await;
    let terminal = show_fleet(&daemon, ShownBy::Up, WIDE).await;
    for _ in 0..3 {
        terminal.press_key("Enter").await;
        terminal.type_text("y").await;
    }
    assert_once(&redrawn(&terminal).await, &[]);
    // The shell that follows has its echo back.
    terminal.press_key("C-z").await;
    terminal.wait_for_text("exit 0").await;
    terminal.type_text("visible").await;
    terminal.wait_for_text("visible").await;
}

async fn display_survives_a_killed_daemon(verb: ShownBy) {
    let daemon = TestDaemon::start().await;
    let terminal = show_fleet(&daemon, verb, WIDE).await;
    signal(daemon.pid(), Signal::KILL);
    let note = "the daemon was gone; another one has been started";
    terminal.wait_for_text(note).await;
    assert_once(&redrawn(&terminal).await, &[note]);
}

#[tokio::test]
async fn up_shows_every_session_once_after_the_daemon_was_killed() {
    display_survives_a_killed_daemon(ShownBy::Up).await;
}

#[tokio::test]
async fn attach_shows_every_session_once_after_the_daemon_was_killed() {
    display_survives_a_killed_daemon(ShownBy::Attach).await;
}
