//! Recorded exchanges with the real agents, played again. Every agent goes through the same scenes, and the session
//! gets the same updates whatever the agent's habits. Each exception has a test of its own.

use qd_catalog::Catalog;
use qd_protocol::event::{AskKind, PlanEntry, TokenUsage};
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use serde_json::Value;

use super::open_conversation;
use crate::harness::{DriverHarness, FinishedTurn, assert_ended_well, run_id};
use crate::recording::{AgentRecording, ReplayResult};

/// The scenes that all agents play.
macro_rules! agents {
    ($($name:ident: $agent:literal),* $(,)?) => {$(
        mod $name {
            #[tokio::test(start_paused = true)]
            async fn answers_two_prompts_and_reports_the_usage_of_each() {
                super::hello($agent).await;
            }

            #[tokio::test(start_paused = true)]
            async fn asks_before_it_uses_a_tool_and_reports_the_result() {
                super::allowed($agent).await;
            }

            #[tokio::test(start_paused = true)]
            async fn goes_on_after_a_denial_and_gets_its_reason() {
                super::denied($agent).await;
            }

            #[tokio::test(start_paused = true)]
            async fn stops_in_the_middle_of_its_answer_and_takes_the_next_prompt() {
                super::cancel($agent).await;
            }

            #[tokio::test(start_paused = true)]
            async fn stops_while_it_asks_and_takes_the_next_prompt() {
                super::cancel_ask($agent).await;
            }

            #[tokio::test(start_paused = true)]
            async fn fails_if_its_model_fails_and_then_recovers() {
                super::error($agent).await;
            }

            #[tokio::test(start_paused = true)]
            async fn works_in_plan_mode_and_then_in_its_usual_mode() {
                super::modes($agent).await;
            }

            #[tokio::test(start_paused = true)]
            async fn resumes_in_another_process_without_a_replay() {
                super::resume($agent).await;
            }
        }
    )*};
}

agents! {
    claude_acp: "claude-acp",
    codex_acp: "codex-acp",
    copilot: "copilot",
    gemini: "gemini",
    opencode: "opencode",
    qwen: "qwen",
}

async fn play_scene(agent: &str, scene: &str) -> ReplayResult {
    let recording = AgentRecording::read(agent, scene);
    let change_spec = |spec: &mut _| recording.apply_to_spec(spec);
    // They were recorded with a keeper, so the driver offered to run commands.
    let (harness, agent_end) =
        DriverHarness::new(agent, change_spec, |spec, pipe| open_conversation(spec, pipe, true));
    recording.play(harness, agent_end).await
}

async fn hello(agent: &str) {
    let played = play_scene(agent, "hello").await;
    let AgentUpdate::Ready { agent_session_id: Some(session), .. } = &played.ready else {
        panic!("{played:?}")
    };
    assert!(AgentRecording::read(agent, "hello").agent_says(session), "the agent's own id");
    let runs: [FinishedTurn; 2] = played.into_runs();
    for (ended, text) in
        runs.iter().zip(["ECHO[hello] users=1 results=0", "ECHO[and again] users=2 results=0"])
    {
        assert_ended_well(ended);
        assert_eq!(ended.text(), text);
        let words = u64::try_from(text.split(' ').count()).unwrap();
        assert_eq!(used_tokens(ended), (100, words), "of the turn, not of the conversation");
    }
}

async fn allowed(agent: &str) {
    let ended = play_scene(agent, "allowed").await.only_run();
    assert_asked(&ended, "echo hi > made.txt");
    assert!(ended.updates.iter().any(|up| matches!(up, AgentUpdate::AskDelivered { .. })));
    assert_ended_well(&ended);
    let [(name, _)] = &started_tools(&ended)[..] else { panic!("{ended:?}") };
    assert_eq!(name, "Bash");
    let [(_, _, false)] = &ended.finished_tools()[..] else { panic!("{ended:?}") };
    assert!(ended.text().starts_with("ECHO[TOOL:write:made.txt] users=1 results=1"), "{}", ended.text());
}

async fn denied(agent: &str) {
    // The recording shows that the agent gets the reason, and when.
    assert!(AgentRecording::read(agent, "denied").agent_is_sent("Bash was refused: not on a Friday"));
    let [denied, after] = play_scene(agent, "denied").await.into_runs();
    assert_asked(&denied, "echo hi > denied.txt");
    assert_ended_well(&denied);
    assert_ended_well(&after);
    assert!(after.text().contains("after] "), "{}", after.text());
}

async fn cancel(agent: &str) {
    let [cancelled, after] = play_scene(agent, "cancel").await.into_runs();
    assert_eq!(cancelled.stop(), TurnStopReason::Cancelled);
    assert!(cancelled.text().starts_with("tok0 "), "{}", cancelled.text());
    assert_ended_well(&after);
    assert!(after.text().starts_with("ECHO[after] "), "{}", after.text());
}

async fn cancel_ask(agent: &str) {
    let [cancelled, after] = play_scene(agent, "cancel-ask").await.into_runs();
    assert_asked(&cancelled, "echo hi > never.txt");
    assert_eq!(cancelled.stop(), TurnStopReason::Cancelled);
    assert!(
        !cancelled.updates.iter().any(|up| matches!(up, AgentUpdate::AskDelivered { .. })),
        "nobody has answered"
    );
    assert!(cancelled.finished_tools().iter().all(|(_, _, is_error)| *is_error), "{cancelled:?}");
    assert_ended_well(&after);
    assert!(after.text().starts_with("ECHO[after] "), "{}", after.text());
}

async fn error(agent: &str) {
    let [failed, again] = play_scene(agent, "error").await.into_runs();
    let error = failed.outcome.error.as_ref().expect("an error");
    assert_eq!((failed.stop(), error.code.as_str()), (TurnStopReason::Error, "agent_error"));
    assert!(error.message.contains("scripted 400"), "{}", error.message);
    assert_ended_well(&again);
    assert!(again.text().starts_with("ECHO[well again] "), "{}", again.text());
}

async fn modes(agent: &str) {
    let runs: [FinishedTurn; 2] = play_scene(agent, "modes").await.into_runs();
    for (ended, text) in runs.iter().zip(["think about it", "and now"]) {
        assert_ended_well(ended);
        assert!(ended.text().contains(text), "{}", ended.text());
        // Some agents report the mode that they are put into before they grant it.
        let is_planned = text.starts_with("think");
        let reported = ended.turn_updates().into_iter().filter_map(|update| match update {
            TurnUpdate::Mode { mode } => Some(mode),
            _ => None,
        });
        assert!(reported.into_iter().all(|mode| (mode == "plan") == is_planned), "{agent}: {ended:?}");
    }
}

async fn resume(agent: &str) {
    let recording = AgentRecording::read(agent, "resume");
    let played = play_scene(agent, "resume").await;
    let AgentUpdate::Ready { agent_session_id, .. } = &played.ready else { panic!("{played:?}") };
    assert_eq!(*agent_session_id, recording.header.resume, "under the same id");
    let ended = played.only_run();
    assert_ended_well(&ended);
    assert_eq!(ended.text(), "RECALL[the first]");
    assert_eq!(used_tokens(&ended), (100, 2), "the past does not count again");
    assert_eq!(ended.notices(), Vec::<String>::new());
    assert!(
        ended.updates.iter().all(|up| !matches!(up, AgentUpdate::Turn { run, .. } if *run != run_id("1")))
    );
}

async fn steer(agent: &str) -> AgentRecording {
    let recording = AgentRecording::read(agent, "steer");
    let ended = play_scene(agent, "steer").await.only_run();
    assert!(ended.updates.iter().any(|up| matches!(up, AgentUpdate::SteerTaken { .. })));
    assert_ended_well(&ended);
    let [(_, _, false)] = &ended.finished_tools()[..] else { panic!("{ended:?}") };
    assert!(ended.text().ends_with("turn left] users=2 results=0"), "{}", ended.text());
    recording
}

async fn question(agent: &str) -> AgentRecording {
    let recording = AgentRecording::read(agent, "question");
    let ended = play_scene(agent, "question").await.only_run();
    let [ask] = ended.asks()[..] else { panic!("{ended:?}") };
    assert_eq!((ask.kind, ask.prompt.as_str()), (AskKind::Question, "Which colour?"));
    assert_eq!(ask.options, ["Red", "Blue"]);
    assert_ended_well(&ended);
    assert!(ended.text().contains("Blue"), "{}", ended.text());
    recording
}

#[test]
fn the_recordings_are_of_the_versions_that_the_manifests_name() {
    for agent in ["claude-acp", "codex-acp", "copilot", "gemini", "opencode", "qwen"] {
        let manifest = Catalog::built_in().get(agent).expect("it is built in");
        let recorded = AgentRecording::read(agent, "hello").header.version;
        assert_eq!(Some(recorded), manifest.agent.tested, "{agent} must be recorded again");
    }
}

#[tokio::test(start_paused = true)]
async fn each_agent_is_steered_by_its_own_method() {
    for agent in ["claude-acp", "codex-acp"] {
        assert!(steer(agent).await.agent_is_sent("_session/steering"), "{agent}");
    }
    let opencode = steer("opencode").await;
    assert!(
        opencode.agent_is_sent(r#""id":4,"jsonrpc":"2.0","method":"session/prompt""#),
        "by a second prompt"
    );
    let qwen = steer("qwen").await;
    assert!(qwen.agent_says("craft/drainMidTurnQueue"), "it pulls its steers");
    assert!(qwen.agent_is_sent(r#"{"messages":["turn left"]}"#));
}

#[tokio::test(start_paused = true)]
async fn a_question_is_one_whether_it_comes_as_a_form_or_as_a_permission() {
    assert!(question("claude-acp").await.agent_says("elicitation/create"));
    assert!(question("qwen").await.agent_says(r#""qwenInteractionKind":"user_question""#));
}

#[tokio::test(start_paused = true)]
async fn permission_is_given_once_wherever_that_option_is_listed() {
    for (agent, once) in [
        ("claude-acp", "allow-once"),
        ("codex-acp", "allow_once"),
        ("copilot", "allow_once"),
        ("gemini", "proceed_once"),
        ("opencode", "once"),
        ("qwen", "proceed_once"),
    ] {
        let recording = AgentRecording::read(agent, "allowed");
        assert!(
            recording.agent_is_sent(&format!(r#"{{"optionId":"{once}","outcome":"selected"}}"#)),
            "{agent}"
        );
    }
    // With our settings, Qwen offers no such option.
    let always = r#""options":[{"kind":"allow_always""#;
    assert!(
        AgentRecording::read("gemini", "allowed").agent_says(always),
        "the first option would be for ever"
    );
}

#[tokio::test(start_paused = true)]
async fn a_tool_start_has_the_command_wherever_the_agent_gives_it() {
    // Gemini gives the command only as the title of its permission request, and OpenCode announces the directory alone.
    for agent in ["claude-acp", "codex-acp", "copilot", "gemini", "opencode", "qwen"] {
        let ended = play_scene(agent, "allowed").await.only_run();
        assert_eq!(started_tools(&ended)[0].1["command"], "echo hi > made.txt", "{agent}");
    }
    let gemini = play_scene("gemini", "allowed").await.only_run();
    let outputs = gemini.turn_updates().into_iter().filter(|up| matches!(up, TurnUpdate::ToolOutput { .. }));
    assert_eq!(outputs.count(), 0, "what its permission request shows is no output");
}

#[tokio::test(start_paused = true)]
async fn a_shell_tool_is_called_bash_unless_the_agent_renames_it() {
    for agent in ["claude-acp", "copilot", "gemini", "opencode", "qwen"] {
        assert_eq!(play_scene(agent, "allowed").await.only_run().finished_tools()[0].0, "Bash", "{agent}");
    }
    assert_eq!(play_scene("codex-acp", "allowed").await.only_run().finished_tools()[0].0, "exec_command");
}

#[tokio::test(start_paused = true)]
async fn usage_is_summed_over_all_calls_of_a_turn() {
    for agent in ["claude-acp", "codex-acp", "copilot", "gemini", "opencode", "qwen"] {
        assert_eq!(used_tokens(&play_scene(agent, "allowed").await.only_run()).0, 200, "{agent}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_to_do_list_that_is_the_argument_of_a_tool_is_a_plan() {
    let ended = play_scene("opencode", "plan").await.only_run();
    let plans = ended.turn_updates().into_iter().filter_map(|update| match update {
        TurnUpdate::Plan { entries } => Some(entries),
        _ => None,
    });
    let plans: Vec<Vec<PlanEntry>> = plans.collect();
    let entry =
        |content: &str, status: &str| PlanEntry { content: content.to_owned(), status: status.to_owned() };
    assert_eq!(plans, [[entry("read it", "completed"), entry("change it", "in_progress")]]);
}

#[tokio::test(start_paused = true)]
async fn an_error_sent_as_an_answer_is_not_the_answer() {
    for agent in ["codex-acp", "copilot"] {
        assert!(
            !AgentRecording::read(agent, "error").agent_says(r#""error":{"code":-32"#),
            "{agent} calls it end_turn"
        );
        let [failed, _] = play_scene(agent, "error").await.into_runs();
        assert_eq!(failed.outcome.text, None, "{agent}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_ends_at_a_denial_ends_well_whatever_its_stop_reason() {
    assert!(AgentRecording::read("codex-acp", "denied").agent_says(r#""stopReason":"cancelled""#));
    let [codex, _] = play_scene("codex-acp", "denied").await.into_runs();
    assert_eq!((codex.stop(), codex.text().as_str()), (TurnStopReason::EndTurn, ""));
    for agent in ["opencode", "qwen"] {
        let [silent, _] = play_scene(agent, "denied").await.into_runs();
        assert_eq!((silent.stop(), silent.text().as_str()), (TurnStopReason::EndTurn, ""), "{agent}");
    }
    // The model goes on with these two agents.
    for agent in ["claude-acp", "gemini"] {
        let [goes_on, _] = play_scene(agent, "denied").await.into_runs();
        assert!(goes_on.text().starts_with("ECHO["), "{agent}: {}", goes_on.text());
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_stops_at_a_denial_gets_the_reason_with_the_next_prompt() {
    // A steer at that point would make the agent start another turn.
    assert_eq!(AgentRecording::read("codex-acp", "denied").count_sent_lines("_session/steering"), 0);
    let [_, after] = play_scene("codex-acp", "denied").await.into_runs();
    // The reason was sent: the model counts three user messages.
    assert_eq!(after.text(), "ECHO[after] users=3 results=0");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_is_repeated_to_an_agent_that_goes_on() {
    for agent in ["claude-acp", "codex-acp", "opencode", "qwen"] {
        assert_eq!(
            AgentRecording::read(agent, "cancel-ask").count_sent_lines("session/cancel"),
            2,
            "{agent}"
        );
    }
    for agent in ["copilot", "gemini"] {
        assert_eq!(
            AgentRecording::read(agent, "cancel-ask").count_sent_lines("session/cancel"),
            1,
            "{agent}"
        );
    }
}

/// Asserts that there was one permission request, for this shell command.
#[track_caller]
fn assert_asked(ended: &FinishedTurn, command: &str) {
    let [ask] = ended.asks()[..] else { panic!("{ended:?}") };
    assert_eq!((ask.kind, ask.tool.as_deref()), (AskKind::Permission, Some("Bash")));
    assert_eq!(ask.input["command"], command);
    assert!(!ask.implicit);
}

/// The names and inputs of the tools that started.
fn started_tools(ended: &FinishedTurn) -> Vec<(String, Value)> {
    let started = ended.turn_updates().into_iter().filter_map(|update| match update {
        TurnUpdate::ToolStarted { name, input, .. } => Some((name, input)),
        _ => None,
    });
    started.collect()
}

fn used_tokens(ended: &FinishedTurn) -> (u64, u64) {
    let TokenUsage { input_tokens, output_tokens, .. } = ended.usage();
    (input_tokens, output_tokens)
}
