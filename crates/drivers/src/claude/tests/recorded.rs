//! Recorded exchanges with the real program, played again.

use qd_protocol::event::TokenUsage;
use qd_protocol::link::{AgentUpdate, TurnStopReason};

use super::{ClaudeTestSetup, open_conversation};
use crate::harness::{DriverHarness, FinishedTurn, assert_ended_well, run_id};
use crate::recording::{AgentRecording, ReplayResult};

async fn play_scene(scene: &str) -> ReplayResult {
    let (recording, harness, agent_end) = prepare_scene(scene);
    recording.play(harness, agent_end).await
}

fn prepare_scene(scene: &str) -> (AgentRecording, DriverHarness, tokio::io::DuplexStream) {
    let recording = AgentRecording::read("claude", scene);
    let setup = ClaudeTestSetup { resumed: recording.header.resume.clone(), ..ClaudeTestSetup::default() };
    let (harness, agent_end) = DriverHarness::new(
        "claude",
        |spec| recording.apply_to_spec(spec),
        |_, pipe| open_conversation(setup, pipe),
    );
    (recording, harness, agent_end)
}

/// The tools that finished, and whether with an error.
fn finished_tools(ended: &FinishedTurn) -> Vec<(String, bool)> {
    ended.finished_tools().into_iter().map(|(name, _, is_error)| (name, is_error)).collect()
}

#[tokio::test(start_paused = true)]
async fn hello_and_a_second_prompt_that_remembers() {
    let runs: [FinishedTurn; 2] = play_scene("hello").await.into_runs();
    let answers =
        [("ECHO[hello] users=1 results=0", 3, 0.00046), ("ECHO[and again] users=2 results=0", 4, 0.00048)];
    for (ended, (text, output_tokens, cost_usd)) in runs.iter().zip(answers) {
        assert_ended_well(ended);
        assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), (text, Some(text)));
        assert_eq!(ended.usage(), TokenUsage { input_tokens: 100, output_tokens, cost_usd });
        assert_eq!(ended.model_calls(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_allowed() {
    let ended = play_scene("allowed").await.only_run();
    let [ask] = ended.asks()[..] else { panic!("{ended:?}") };
    assert_eq!(ask.tool.as_deref(), Some("Bash"));
    assert_eq!(ask.input["command"], "echo hi > made.txt");
    assert_ended_well(&ended);
    assert_eq!((finished_tools(&ended), ended.model_calls()), (vec![("Bash".to_owned(), false)], 2));
    assert!(ended.text().contains("results=1"));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_denied() {
    let [ended, after] = play_scene("denied").await.into_runs();
    assert_ended_well(&ended);
    assert_eq!(finished_tools(&ended), [("Bash".to_owned(), true)]);
    assert!(ended.text().contains(r#"last="not on a Friday""#), "the model was told why: {}", ended.text());
    assert_eq!(after.outcome.text.as_deref(), Some("ECHO[after] users=2 results=0"));
}

#[tokio::test(start_paused = true)]
async fn a_question() {
    let ended = play_scene("question").await.only_run();
    let [ask] = ended.asks()[..] else { panic!("{ended:?}") };
    assert_eq!(ask.prompt, "Which colour?");
    assert_eq!(ask.options, ["Red", "Blue"]);
    assert_ended_well(&ended);
    assert!(ended.text().contains("Blue"), "{}", ended.text());
}

#[tokio::test(start_paused = true)]
async fn a_cancel_while_the_model_writes_and_a_prompt_after_it() {
    let [cancelled, after] = play_scene("cancel").await.into_runs();
    assert_eq!(cancelled.stop(), TurnStopReason::Cancelled);
    assert!(cancelled.text().starts_with("tok0 "));
    assert_ended_well(&after);
    assert!(after.outcome.text.unwrap().starts_with("ECHO[after]"));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_while_it_asks_and_a_prompt_after_it() {
    let [cancelled, after] = play_scene("cancel-ask").await.into_runs();
    assert_eq!((cancelled.stop(), cancelled.asks().len()), (TurnStopReason::Cancelled, 1));
    assert!(after.outcome.text.unwrap().starts_with("ECHO[after]"));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_in_plan_mode_and_one_in_its_usual_mode() {
    let recording = AgentRecording::read("claude", "modes");
    assert_eq!(recording.count_sent_lines("set_permission_mode"), 2);
    let runs: [FinishedTurn; 2] = play_scene("modes").await.into_runs();
    runs.iter().for_each(assert_ended_well);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_once_and_a_prompt_after_it() {
    let [cancelled, after] = play_scene("cancel-at-once").await.into_runs();
    assert_eq!(
        (cancelled.stop(), cancelled.model_calls()),
        (TurnStopReason::Cancelled, 0),
        "the model was never called"
    );
    assert!(after.outcome.text.unwrap().starts_with("ECHO[after] users=1"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_during_a_tool() {
    let ended = play_scene("steer").await.only_run();
    assert_ended_well(&ended);
    assert!(ended.updates.iter().any(|up| matches!(up, AgentUpdate::SteerTaken { .. })));
    assert_eq!(ended.outcome.text.as_deref(), Some("ECHO[turn left] users=2 results=0"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_while_the_model_writes() {
    let ended = play_scene("steer-speaking").await.only_run();
    assert_ended_well(&ended);
    assert!(ended.updates.iter().any(|up| matches!(up, AgentUpdate::SteerTaken { .. })));
    assert!(ended.text().contains("SLOWENDECHO[steered]"), "both are its text: {}", ended.text());
    assert_eq!(
        (ended.outcome.text.as_deref(), ended.model_calls()),
        (Some("ECHO[steered] users=2 results=0"), 2)
    );
}

#[tokio::test(start_paused = true)]
async fn a_model_that_fails_and_then_does_not() {
    let [failed, fine] = play_scene("error").await.into_runs();
    assert_eq!(failed.outcome.error.map(|error| error.code).as_deref(), Some("agent_error"));
    assert_ended_well(&fine);
}

#[tokio::test(start_paused = true)]
async fn a_model_that_fails_and_one_that_is_called_again() {
    let [failed, again] = play_scene("retry").await.into_runs();
    let error = failed.outcome.error.as_ref().expect("an error");
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "API Error: 400 scripted 400"));
    assert_eq!(failed.text(), "");
    assert_ended_well(&again);
    assert!(again.notices().iter().any(|text| text.contains("529")));
}

#[tokio::test(start_paused = true)]
async fn a_resumed_conversation_counts_only_new_usage() {
    let ended = play_scene("resume").await.only_run();
    assert_eq!(ended.outcome.text.as_deref(), Some("RECALL[the first]"));
    assert_eq!(ended.usage().cost_usd, 0.00044);
}

#[tokio::test(start_paused = true)]
async fn a_missing_conversation_is_refused() {
    let (recording, harness, agent_end) = prepare_scene("resume-refused");
    let error = recording.play_refused(harness, agent_end).await;
    assert!(error.message.starts_with("No conversation found"), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_the_agent_starts_after_a_background_task() {
    let [begun, after] = play_scene("background").await.into_runs();
    assert_ended_well(&begun);
    // Its output belongs to the previous run.
    let late = |up: &AgentUpdate| matches!(up, AgentUpdate::Turn { run, .. } if *run == run_id("1"));
    let late =
        FinishedTurn { updates: after.updates.into_iter().filter(late).collect(), outcome: begun.outcome };
    assert_eq!(late.text(), "it has ended");
    assert!(after.outcome.text.is_some_and(|text| text.starts_with("ECHO[after]")));
}

#[tokio::test(start_paused = true)]
async fn a_subagent_whose_tools_are_shown_and_whose_text_is_not() {
    let ended = play_scene("helper").await.only_run();
    assert_ended_well(&ended);
    let names: Vec<_> = finished_tools(&ended).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["Bash", "Agent"]);
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("done", Some("done")));
    assert!(ended.usage().input_tokens > 200, "the subagent's calls count, too: {:?}", ended.usage());
}
