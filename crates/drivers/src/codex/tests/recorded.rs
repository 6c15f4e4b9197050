//! Recorded exchanges with the real server, played again.

use qd_protocol::event::TokenUsage;
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use serde_json::json;

use super::open_conversation;
use crate::harness::{DriverHarness, FinishedTurn, run_id};
use crate::recording::{AgentRecording, ReplayResult};

async fn play_scene(scene: &str) -> ReplayResult {
    let recording = AgentRecording::read("codex", scene);
    let (harness, agent_end) =
        DriverHarness::new("codex", |spec| recording.apply_to_spec(spec), open_conversation);
    recording.play(harness, agent_end).await
}

/// The tokens that each model call used.
fn used_tokens(ended: &FinishedTurn) -> Vec<(u64, u64)> {
    let usage = ended.turn_updates().into_iter().filter_map(|update| match update {
        TurnUpdate::Usage { usage: TokenUsage { input_tokens, output_tokens, .. }, .. } => {
            Some((input_tokens, output_tokens))
        }
        _ => None,
    });
    usage.collect()
}

#[tokio::test(start_paused = true)]
async fn two_prompts() {
    let [first, second] = play_scene("hello").await.into_runs();
    assert_eq!(
        (first.stop(), first.text().as_str()),
        (TurnStopReason::EndTurn, "ECHO[hello] users=1 results=0")
    );
    assert_eq!(first.outcome.text.as_deref(), Some("ECHO[hello] users=1 results=0"));
    assert_eq!(second.text(), "ECHO[and again] users=2 results=0");
    assert_eq!((used_tokens(&first), used_tokens(&second)), (vec![(100, 3)], vec![(100, 4)]));
    assert_eq!((first.model_calls(), second.model_calls()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_allowed() {
    let only = play_scene("allowed").await.only_run();
    let [ask] = only.asks()[..] else { panic!("{only:?}") };
    let input = json!({"command": "echo hi > made.txt", "cwd": "/w", "reason": "the script wants it"});
    assert_eq!(ask.input, input);
    assert_eq!(only.stop(), TurnStopReason::EndTurn);
    let ended = json!({"status": "completed", "exit_code": 0, "output": null});
    assert_eq!(only.finished_tools(), [("Bash".to_owned(), ended, false)]);
    assert_eq!((used_tokens(&only).len(), only.model_calls()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_denied_with_a_reason() {
    let [only, after] = play_scene("denied").await.into_runs();
    // The turn goes on, and the model got the reason.
    assert_eq!(after.text(), "ECHO[after] users=3 results=0");
    assert_eq!(only.stop(), TurnStopReason::EndTurn);
    assert_eq!(only.text(), "ECHO[This was refused, for the reason: not on a Friday] users=2 results=0");
    let ended = json!({"status": "declined", "exit_code": null, "output": null});
    assert_eq!(only.finished_tools(), [("Bash".to_owned(), ended, true)]);
}

#[tokio::test(start_paused = true)]
async fn a_patch_that_was_allowed() {
    let only = play_scene("patch").await.only_run();
    let started = only.turn_updates().into_iter().find_map(|update| match update {
        TurnUpdate::ToolStarted { name, input, .. } => Some((name, input)),
        _ => None,
    });
    let changes = json!([{"path": "/w/patched.txt", "kind": "add", "diff": "hello\n"}]);
    assert_eq!(started, Some(("Edit".to_owned(), json!({"path": "/w/patched.txt", "changes": changes}))));
    assert_eq!(only.finished_tools(), [("Edit".to_owned(), json!({"status": "completed"}), false)]);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_in_the_middle_of_the_answer() {
    let [cancelled, after] = play_scene("cancel").await.into_runs();
    assert_eq!(cancelled.stop(), TurnStopReason::Cancelled);
    assert!(cancelled.text().starts_with("tok0"));
    assert!(after.text().starts_with("ECHO[after]"));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_while_it_asks() {
    let [cancelled, after] = play_scene("cancel-ask").await.into_runs();
    assert_eq!((cancelled.stop(), cancelled.asks().len()), (TurnStopReason::Cancelled, 1));
    assert!(after.text().starts_with("ECHO[after]"));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_in_plan_mode_and_one_in_its_usual_mode() {
    assert_eq!(AgentRecording::read("codex", "modes").count_sent_lines("collaborationMode"), 2);
    let [planned, after] = play_scene("modes").await.into_runs();
    assert_eq!((planned.stop(), after.stop()), (TurnStopReason::EndTurn, TurnStopReason::EndTurn));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_once_and_the_next_prompt() {
    let runs = play_scene("cancel-at-once").await.runs;
    let stops: Vec<TurnStopReason> = runs.iter().map(FinishedTurn::stop).collect();
    assert_eq!(stops, [TurnStopReason::EndTurn, TurnStopReason::Cancelled, TurnStopReason::EndTurn]);
    assert_eq!(runs[1].text(), "");
    // The server sends a warning with every turn; it is shown once.
    assert_eq!(runs.iter().map(|run| run.notices().len()).collect::<Vec<_>>(), [1, 0, 0]);
    assert!(runs[2].text().starts_with("ECHO[and now?]"));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_the_server_refuses_because_it_has_not_begun() {
    assert!(AgentRecording::read("codex", "cancel-early").agent_says("no active turn to interrupt"));
    let runs = play_scene("cancel-early").await.runs;
    let stops: Vec<TurnStopReason> = runs.iter().map(FinishedTurn::stop).collect();
    assert_eq!(stops, [TurnStopReason::Cancelled, TurnStopReason::EndTurn]);
    assert_eq!(runs[0].text(), "");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_during_a_command() {
    let only = play_scene("cancel-tool").await.only_run();
    assert_eq!(only.stop(), TurnStopReason::Cancelled);
    let [(name, output, true)] = &only.finished_tools()[..] else { panic!("{:?}", only.finished_tools()) };
    assert_eq!((name.as_str(), &output["status"]), ("Bash", &json!("failed")));
}

#[tokio::test(start_paused = true)]
async fn a_steer_during_a_turn() {
    let only = play_scene("steer").await.only_run();
    assert_eq!(only.stop(), TurnStopReason::EndTurn);
    assert!(only.updates.iter().any(|up| matches!(up, AgentUpdate::SteerTaken { .. })));
    assert_eq!(only.outcome.text.as_deref(), Some("ECHO[turn left] users=2 results=0"));
}

#[tokio::test(start_paused = true)]
async fn a_model_that_fails_and_then_does_not() {
    let [failed, fine] = play_scene("error").await.into_runs();
    let error = failed.outcome.error.clone().unwrap();
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("agent_error", "scripted 400: the script wants it")
    );
    assert_eq!((failed.stop(), fine.stop()), (TurnStopReason::Error, TurnStopReason::EndTurn));
}

#[tokio::test(start_paused = true)]
async fn an_old_conversation_in_a_new_process() {
    let only = play_scene("resume").await.only_run();
    assert_eq!(only.text(), "RECALL[the first]");
    assert_eq!(used_tokens(&only), [(100, 2)]);
    assert!(
        only.updates.iter().all(|up| !matches!(up, AgentUpdate::Turn { run, .. } if *run != run_id("1")))
    );
}

#[tokio::test(start_paused = true)]
async fn an_old_conversation_that_is_gone() {
    let only = play_scene("resume-refused").await.only_run();
    assert_eq!(
        (only.stop(), only.text().as_str()),
        (TurnStopReason::EndTurn, "ECHO[the second] users=1 results=0")
    );
    assert!(
        matches!(&only.turn_updates()[0], TurnUpdate::Notice { text, .. } if text.contains("no rollout found"))
    );
}
