//! Promises of `echo`.

use std::time::Duration;

use qd_link::Launcher;
use qd_protocol::link::{Said, Stop, Up};
use qd_protocol::text::Blob;
use qd_worker::InProcess;
use tokio::time::Instant;

use crate::{Agent, assert_well};

#[tokio::test(start_paused = true)]
async fn echo_says_the_prompt_exactly_and_gives_its_result() {
    let mut agent = Agent::ready("echo").await;
    let prompt = "  two  words,\n\tand umlauts äöü ";
    let ended = agent.play("a", prompt).await;
    assert_well(&ended);
    assert_eq!(ended.text(), prompt);
    assert_eq!(ended.outcome.text, Some(format!("echo: {prompt}")));
}

#[tokio::test(start_paused = true)]
async fn echo_streams_word_by_word_to_a_session_that_keeps_up() {
    let mut agent = Agent::ready("echo").await;
    // More words than fit the window at once: the session sees the beginning before the end is said.
    let prompt = "word ".repeat(200_000);
    agent.prompt("a", &prompt);
    let first = agent.hear().await;
    let Up::Said { what: Said::Text { text }, .. } = first else { panic!("heard {first:?}") };
    assert!(text.len() < prompt.len() && text.starts_with("word "));
    let rest = agent.ended("a").await;
    assert!(text + &rest.text() == prompt);
}

#[tokio::test(start_paused = true)]
async fn echo_waits_before_it_speaks_if_told_to() {
    let mut agent = Agent::ready("echo").await;
    let start = Instant::now();
    let ended = agent.play("a", "__sleep_ms:1500 later on").await;
    assert_eq!(start.elapsed(), Duration::from_millis(1500), "by the clock of the test, which stands still");
    assert_eq!(ended.text(), "later on");
    assert_eq!(ended.outcome.text.as_deref(), Some("echo: later on"));
}

#[tokio::test(start_paused = true)]
async fn a_waiting_echo_can_be_cancelled_and_takes_the_next_prompt() {
    let mut agent = Agent::ready("echo").await;
    agent.prompt("a", "__sleep_ms:999999999 never");
    agent.cancel("a");
    let ended = agent.ended("a").await;
    assert_eq!((ended.outcome.stop, ended.text()), (Stop::Cancelled, String::new()));
    assert_eq!(agent.play("b", "again").await.outcome.text.as_deref(), Some("echo: again"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_that_echo_cannot_take_is_missed_before_the_end() {
    let mut agent = Agent::ready("echo").await;
    agent.prompt("a", "__sleep_ms:10 x");
    let number = agent.steer("a", "faster");
    let ended = agent.ended("a").await;
    assert_eq!(ended.ups.last(), Some(&Up::SteerMissed { steer: number }));
    assert!(
        InProcess
            .agents()
            .iter()
            .any(|agent| agent.name == "echo" && !agent.steers && agent.settings.is_empty())
    );
}

#[tokio::test(start_paused = true)]
async fn a_prompt_kept_as_a_file_is_read_whole() {
    let mut agent = Agent::ready("echo").await;
    let whole = "a long prompt ".repeat(1000);
    std::fs::write(agent.home.path().join("cafe"), &whole).unwrap();
    let blob = Blob { sha256: "cafe".to_owned(), size: whole.len() as u64 };
    agent.prompt_with("a", "a long", Some(blob));
    let ended = agent.ended("a").await;
    assert!(ended.text() == whole && ended.outcome.text == Some(format!("echo: {whole}")));

    agent.prompt_with("b", "lost", Some(Blob { sha256: "dead".to_owned(), size: 4 }));
    let ended = agent.ended("b").await;
    let error = ended.outcome.error.expect("the file is not there");
    assert_eq!((ended.outcome.stop, error.code.as_str()), (Stop::Error, "prompt_unreadable"));
    assert!(error.message.contains("dead"), "{}", error.message);
    assert_eq!(ended.ups, []);
}
