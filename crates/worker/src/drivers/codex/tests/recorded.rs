//! Exchanges with the real server, played again.

use qd_protocol::event::Usage;
use qd_protocol::link::{Said, Stop, Up};
use serde_json::json;

use super::opened;
use crate::drivers::recorded::{Played, Recording};
use crate::drivers::stage::{Ended, Stage, run};

async fn play(scene: &str) -> Played {
    let recording = Recording::read("codex", scene);
    let (stage, far) = Stage::new("codex", |spec| recording.give(spec), opened);
    recording.play(stage, far).await
}

/// What each call of the model used.
fn usage(ended: &Ended) -> Vec<(u64, u64)> {
    let usage = ended.said().into_iter().filter_map(|said| match said {
        Said::Usage { usage: Usage { input_tokens, output_tokens, .. } } => {
            Some((input_tokens, output_tokens))
        }
        _ => None,
    });
    usage.collect()
}

#[tokio::test(start_paused = true)]
async fn two_prompts() {
    let [first, second] = play("hello").await.runs();
    assert_eq!((first.stop(), first.text().as_str()), (Stop::EndTurn, "ECHO[hello] users=1 results=0"));
    assert_eq!(first.outcome.text.as_deref(), Some("ECHO[hello] users=1 results=0"));
    assert_eq!(second.text(), "ECHO[and again] users=2 results=0");
    assert_eq!((usage(&first), usage(&second)), (vec![(100, 7)], vec![(100, 7)]));
    assert_eq!((first.turns(), second.turns()), (1, 1));
    // A warning comes with every turn, and is shown once.
    assert_eq!((first.notices().len(), second.notices().len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_allowed() {
    let only = play("allowed").await.only();
    let [ask] = only.asks()[..] else { panic!("{only:?}") };
    let input = json!({"command": "echo hi > made", "cwd": "/w", "reason": "scripted: allow?"});
    assert_eq!(ask.input, input);
    assert_eq!(only.stop(), Stop::EndTurn);
    let ended = json!({"status": "completed", "exit_code": 0, "output": null});
    assert_eq!(only.tools(), [("Bash".to_owned(), ended, false)]);
    assert_eq!((usage(&only).len(), only.turns()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_denied_with_a_reason() {
    let only = play("denied").await.only();
    // The turn goes on, and the model has heard why.
    assert_eq!(only.stop(), Stop::EndTurn);
    assert_eq!(only.text(), "ECHO[This was refused, for the reason: not on a Friday] users=2 results=0");
    let ended = json!({"status": "declined", "exit_code": null, "output": null});
    assert_eq!(only.tools(), [("Bash".to_owned(), ended, true)]);
}

#[tokio::test(start_paused = true)]
async fn a_patch_that_was_allowed() {
    let only = play("patch").await.only();
    let started = only.said().into_iter().find_map(|said| match said {
        Said::ToolStarted { name, input, .. } => Some((name, input)),
        _ => None,
    });
    let changes = json!([{"path": "/w/patched.txt", "kind": "add", "diff": "hello\n"}]);
    assert_eq!(started, Some(("Edit".to_owned(), json!({"path": "/w/patched.txt", "changes": changes}))));
    assert_eq!(only.tools(), [("Edit".to_owned(), json!({"status": "completed"}), false)]);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_in_the_middle_of_the_words() {
    let only = play("cancel").await.only();
    assert_eq!(only.stop(), Stop::Cancelled);
    assert!(only.text().starts_with("tok0"));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_once_and_the_next_prompt() {
    let runs = play("cancel-at-once").await.runs;
    let stops: Vec<Stop> = runs.iter().map(Ended::stop).collect();
    assert_eq!(stops, [Stop::EndTurn, Stop::Cancelled, Stop::EndTurn]);
    assert_eq!(runs[1].text(), "");
    assert!(runs[2].text().starts_with("ECHO[and now?]"));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_the_server_refuses_because_it_has_not_begun() {
    assert!(Recording::read("codex", "cancel-early").says("no active turn to interrupt"));
    let runs = play("cancel-early").await.runs;
    let stops: Vec<Stop> = runs.iter().map(Ended::stop).collect();
    assert_eq!(stops, [Stop::Cancelled, Stop::EndTurn]);
    assert_eq!(runs[0].text(), "");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_in_a_command() {
    let only = play("cancel-tool").await.only();
    assert_eq!(only.stop(), Stop::Cancelled);
    let [(name, output, true)] = &only.tools()[..] else { panic!("{:?}", only.tools()) };
    assert_eq!((name.as_str(), &output["status"]), ("Bash", &json!("failed")));
}

#[tokio::test(start_paused = true)]
async fn a_word_on_the_way() {
    let only = play("steer").await.only();
    assert_eq!(only.stop(), Stop::EndTurn);
    assert!(only.ups.iter().any(|up| matches!(up, Up::SteerTaken { .. })));
    assert_eq!(only.outcome.text.as_deref(), Some("ECHO[turn left] users=2 results=0"));
}

#[tokio::test(start_paused = true)]
async fn a_model_that_fails_and_then_does_not() {
    let [failed, fine] = play("error").await.runs();
    let error = failed.outcome.error.clone().unwrap();
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "scripted 400"));
    assert_eq!((failed.stop(), fine.stop()), (Stop::Error, Stop::EndTurn));
}

#[tokio::test(start_paused = true)]
async fn an_old_conversation_in_a_new_process() {
    let only = play("resume").await.only();
    assert_eq!(only.text(), "ECHO[the second] users=2 results=0");
    assert_eq!(usage(&only), [(100, 7)]);
    assert!(only.ups.iter().all(|up| !matches!(up, Up::Said { run: of, .. } if *of != run("1"))));
}

#[tokio::test(start_paused = true)]
async fn an_old_conversation_that_is_no_more() {
    let only = play("resume-refused").await.only();
    assert_eq!((only.stop(), only.text().as_str()), (Stop::EndTurn, "ECHO[the second] users=1 results=0"));
    assert!(matches!(&only.said()[0], Said::Notice { text } if text.contains("no rollout found")));
}
