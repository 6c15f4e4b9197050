//! Promises of the task that owns an agent: ready, commands, the end.

use std::time::Duration;

use qd_link::{Heard, Launcher, SessionEnd};
use qd_protocol::AskId;
use qd_protocol::event::{Answer, Decision, RunError};
use qd_protocol::limits::{LINK_WINDOW, QUEUE_MAX, START_S};
use qd_protocol::link::{Gone, Reply, Stop, Up, UpNumber};
use qd_worker::InProcess;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::{Agent, assert_well, decide, spec};

#[tokio::test(start_paused = true)]
async fn ready_comes_first_numbered_after_what_the_session_has_heard() {
    for (name, steers) in [("echo", false), ("script", true)] {
        let mut agent = Agent::launch_with(name, |spec| {
            spec.after = UpNumber(77);
            spec.agent_session_id = Some("conversation".to_owned());
        });
        let Heard::Said(said) = agent.end.hear().await else { panic!("something is said") };
        assert_eq!(said.len(), 1);
        assert_eq!(said[0].number, UpNumber(78));
        assert_eq!(said[0].up, Up::Ready { agent_session_id: Some("conversation".to_owned()), steers });
        assert!(
            InProcess
                .agents()
                .iter()
                .any(|agent| agent.name == name && agent.available && agent.steers == steers)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_name_that_nobody_knows_is_gone_at_once() {
    let (ups, gone) = Agent::launch("nobody").gone().await;
    assert_eq!(ups, []);
    assert!(
        matches!(gone, Gone::Failed(error) if error.code == "unknown_agent" && error.message.contains("nobody"))
    );
}

#[tokio::test(start_paused = true)]
async fn script_is_ready_only_after_as_long_as_it_was_told() {
    let start = Instant::now();
    let mut agent = Agent::launch_with("script", |spec| {
        spec.env.insert("SCRIPT_READY_MS".to_owned(), "3000".to_owned());
    });
    assert!(matches!(agent.hear().await, Up::Ready { .. }));
    assert_eq!(start.elapsed(), Duration::from_millis(3000));
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_is_not_ready_in_time_has_failed() {
    let start = Instant::now();
    let mut agent = Agent::launch_with("script", |spec| {
        spec.env.insert("SCRIPT_READY_MS".to_owned(), "99999999".to_owned());
    });
    assert!(matches!(agent.gone().await, (_, Gone::Failed(error)) if error.code == "agent_not_ready"));
    assert_eq!(start.elapsed(), Duration::from_secs(START_S));

    let mut agent = Agent::launch_with("script", |spec| {
        spec.env.insert("SCRIPT_READY_MS".to_owned(), "soon".to_owned());
    });
    let (_, gone) = agent.gone().await;
    assert!(
        matches!(gone, Gone::Failed(error) if error.message.contains("SCRIPT_READY_MS") && !error.message.contains("soon"))
    );
}

#[tokio::test(start_paused = true)]
async fn an_agent_can_be_stopped_before_it_is_ready_and_in_its_turn() {
    let agent = Agent::launch_with("script", |spec| {
        spec.env.insert("SCRIPT_READY_MS".to_owned(), "3000".to_owned());
    });
    agent.end.stop().await;

    let mut agent = Agent::ready("script").await;
    agent.prompt("a", r#"[{"ignore_cancel":true},{"say":"x"},{"sleep_ms":99999999}]"#);
    agent.until_text("x").await;
    agent.end.stop().await;
}

#[tokio::test(start_paused = true)]
async fn commands_of_another_run_change_nothing() {
    let mut agent = Agent::ready("script").await;
    agent.cancel("a");
    agent.kill("a");
    agent.prompt("a", r#"[{"say":"x"},{"await_steer":50},{"question":{"prompt":"q"}}]"#);
    agent.cancel("b");
    agent.kill("b");
    let strange = agent.steer("b", "not for you");
    let ask = agent.until_ask().await;
    let mut other = ask.clone();
    other.id = AskId::parse("ask_unknown").unwrap();
    agent.answer(&other, decide(Decision::Deny, None));
    let answer = Answer { value: Some("42".to_owned()), ..Answer::default() };
    agent.answer(&ask, Reply::Answered(answer));
    let ended = agent.ended("a").await;
    assert_well(&ended);
    assert_eq!(ended.ups[0], Up::AskDelivered { ask: ask.id });
    assert_eq!(ended.text(), "42");
    assert!(!ended.ups.contains(&Up::SteerTaken { steer: strange }));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_is_sent_twice_is_one_turn() {
    let mut agent = Agent::ready("echo").await;
    agent.prompt("a", "once");
    agent.number = 0;
    agent.prompt("a", "once");
    assert_eq!(agent.ended("a").await.text(), "once");
    let ended = agent.play("b", "twice").await;
    assert_eq!(ended.text(), "twice");
}

#[tokio::test(start_paused = true)]
async fn a_prompt_in_the_middle_of_a_turn_is_refused_and_the_turn_goes_on() {
    let mut agent = Agent::ready("script").await;
    agent.prompt("a", r#"[{"sleep_ms":100},{"say":"done"}]"#);
    agent.prompt("b", "[]");
    let refused = agent.ended("b").await;
    assert_eq!(refused.outcome.error.map(|error| error.code).as_deref(), Some("agent_busy"));
    assert_eq!(agent.ended("a").await.text(), "done");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_reaches_a_turn_that_never_stops_talking() {
    let mut agent = Agent::ready("script").await;
    agent.prompt("a", r#"[{"say":"more ","times":18446744073709551615}]"#);
    agent.until_text("more ").await;
    agent.cancel("a");
    assert_eq!(agent.ended("a").await.outcome.stop, Stop::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_reaches_a_turn_whose_words_nobody_takes() {
    let mut agent = Agent::ready("script").await;
    let plan = r#"{"plan":[]},"#.repeat(2 * LINK_WINDOW);
    agent.prompt("a", &format!(r#"[{plan}{{"say":"never"}}]"#));
    // Time moves on only when the agent can do nothing but wait.
    tokio::time::sleep(Duration::from_secs(1)).await;
    agent.cancel("a");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let Heard::Said(said) = agent.end.hear().await else { panic!("something is said") };
    assert_eq!(said.len(), LINK_WINDOW + 1);
    assert!(matches!(&said[LINK_WINDOW].up, Up::Terminal { outcome, .. } if outcome.stop == Stop::Cancelled));
}

#[tokio::test(start_paused = true)]
async fn steers_beyond_the_bound_are_missed_at_once() {
    let mut agent = Agent::ready("script").await;
    agent.prompt("a", r#"[{"sleep_ms":10},{"await_steer":0}]"#);
    let first = agent.steer("a", "0");
    let numbers: Vec<_> = (1..=QUEUE_MAX).map(|n| agent.steer("a", &n.to_string())).collect();
    let ended = agent.ended("a").await;
    assert_eq!(ended.ups[0], Up::SteerMissed { steer: numbers[QUEUE_MAX - 1] });
    assert_eq!(ended.ups[1], Up::SteerTaken { steer: first });
    assert_eq!(ended.text(), "steered: 0");
    assert_eq!(ended.ups.len(), 1 + 1 + 1 + QUEUE_MAX - 1);
}

#[tokio::test(start_paused = true)]
async fn a_steer_that_comes_after_the_end_is_missed() {
    let mut agent = Agent::ready("script").await;
    agent.play("a", "[]").await;
    let number = agent.steer("a", "late");
    assert_eq!(agent.hear().await, Up::SteerMissed { steer: number });
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_exits_is_gone_without_a_terminal() {
    let mut agent = Agent::ready("script").await;
    agent.prompt("a", r#"[{"say":"bye"},{"exit":3},{"say":"never"}]"#);
    let (ups, gone) = agent.gone().await;
    assert_eq!(ups.len(), 1);
    let Gone::Failed(RunError { code, exit_status, .. }) = gone else { panic!("{gone:?}") };
    assert_eq!((code.as_str(), exit_status), ("agent_exited", Some(3)));
}

/// The resident memory of this process in bytes.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number of pages") * 4096
}

#[tokio::test]
async fn an_idle_agent_with_its_link_costs_about_a_kibibyte() {
    const MANY: usize = 10_000;
    let home = TempDir::new().unwrap();
    let mut ends: Vec<SessionEnd> = Vec::with_capacity(MANY);
    let before = resident();
    for _ in 0..MANY {
        ends.push(InProcess.launch(spec("echo", &home)));
    }
    for end in &mut ends {
        assert!(matches!(end.hear().await, Heard::Said(_)));
        end.ack(UpNumber(1));
    }
    let each = (resident() - before) / MANY;
    println!("an idle agent with its link: {each} bytes resident");
    assert!(each < 2048, "{each} bytes");
    for end in ends {
        end.stop().await;
    }
}
