//! The modes of the agents, their to-do lists, and how full their contexts are.

use std::path::Path;

use qd_testkit::{RealAgent, TestEvent, TestSession};
use serde_json::{Value, json};

use super::quota::why_not_parked;
use super::shown::Behaviour;
use super::{RealAgentTest, answer, assert_ended, describe_events, ended, permission, say};
use crate::workers_loss::process_of;

/// A mode is set with the session, survives the agent's process, and is changed for the next prompt. Modes in which the
/// agent would not ask are refused.
pub(super) async fn scene(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let modes: Vec<&str> =
        test.about["modes"].as_array().unwrap().iter().map(|mode| mode.as_str().unwrap()).collect();
    let usual = *modes.iter().find(|mode| **mode != "plan").unwrap();
    assert!(modes.contains(&"plan"), "{modes:?}");
    for refused in test.about["refused_modes"].as_array().into_iter().flatten() {
        let settings = json!({ "agent": super::agent(cli), "mode": refused });
        let refusal = test.daemon.workspace().await.try_session(settings).await;
        refusal.expect_refusal(400, "unsupported_setting");
    }

    let session = test.session(json!({ "mode": "plan" })).await;
    assert_ended(&say(&session, "think-about-it").await, "end_turn");
    assert!(is_told_to_plan(&test, "think-about-it"), "the agent is in plan mode");
    process_of(&session).await.kill9().await;
    session.wait_for_event("the worker's end", |event| event.kind == "worker.exited").await;
    assert_ended(&say(&session, "think-about-it-again").await, "end_turn");
    assert!(is_told_to_plan(&test, "think-about-it-again"), "another process is in plan mode too");
    assert_eq!(mode_changes(&session).await, [] as [Value; 0]);

    // In its usual mode it asks before it acts, also after it was in another.
    session.patch(json!({ "mode": usual })).await;
    let file = test.daemon.home.project_dir().join("asked.txt");
    let run = session.prompt(&format!("TOOL:write:{}", file.display())).await;
    let ask = permission(&session, &run).await;
    assert!(!file.exists());
    answer(&session, &ask, json!({ "decision": "allow_once" })).await;
    assert_ended(&ended(&session, &run).await, "end_turn");
    assert!(file.exists(), "{}", describe_events(&session.events_of(&run).await));
    assert_eq!(mode_changes(&session).await, [json!({ "mode": usual, "by": "user" })]);
    test.shows(Behaviour::Modes);
    session.close().await;
}

/// The agent's to-do list becomes a plan of the session, whether one tool has all of it or another adds one task.
pub(super) async fn plans(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session_with_own_settings(json!({ "policy": "allow" }), enable_tasks).await;
    let (prompts, entries): (&[&str], Value) = match cli {
        RealAgent::Claude | RealAgent::ClaudeAcp => (
            &[
                r#"TOOL:call:ToolSearch {"query":"select:TaskCreate,TaskUpdate","max_results":5}"#,
                r#"TOOL:call:TaskCreate {"subject":"read it","description":"all of it"}"#,
                r#"TOOL:call:TaskUpdate {"taskId":"1","status":"in_progress"}"#,
            ],
            json!([{ "content": "read it", "status": "in_progress" }]),
        ),
        _ => (
            &["TOOL:todo"],
            json!([
                { "content": "read it", "status": "completed" },
                { "content": "change it", "status": "in_progress" },
            ]),
        ),
    };
    for prompt in prompts {
        assert_ended(&say(&session, prompt).await, "end_turn");
    }
    let events = session.events().await;
    let plan = events.iter().rfind(|event| event.kind == "plan.updated");
    let plan = plan.unwrap_or_else(|| panic!("{}", describe_events(&events)));
    assert_eq!(plan.data["entries"], entries);
    test.shows(Behaviour::Plans);
    session.close().await;
}

/// Claude offers its tools for tasks only to those who want them.
fn enable_tasks(cli: RealAgent, _home: &Path, env: &mut Value) {
    if matches!(cli, RealAgent::Claude | RealAgent::ClaudeAcp) {
        env["CLAUDE_CODE_ENABLE_TODO_TOOLS"] = json!("1");
    }
}

/// The agent reports how full its context is. One agent does not tell.
pub(super) async fn context(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session(json!({})).await;
    assert_ended(&say(&session, "hello").await, "end_turn");
    assert_ended(&say(&session, "and again").await, "end_turn");
    let context = &session.show().await["context"];
    if cli == RealAgent::Gemini {
        assert_eq!(context, &json!(null));
        test.lacks(Behaviour::Context, "it does not report it");
    } else {
        let (used, size) = (context["used"].as_u64(), context["size"].as_u64());
        let used = used.unwrap_or_else(|| panic!("the agent reports no context"));
        assert!(used >= 100 && size.unwrap() > used, "{context}");
        test.shows(Behaviour::Context);
    }
    session.close().await;
    for (behaviour, reason) in [
        (Behaviour::OwnSwitch, why_no_own_switch(cli)),
        (Behaviour::Plans, why_no_plan(cli)),
        (Behaviour::Compacted, why_not_compacted(cli)),
        (Behaviour::Quota, why_not_parked(cli)),
    ] {
        if let Some(reason) = reason {
            test.lacks(behaviour, reason);
        }
    }
}

fn why_no_own_switch(cli: RealAgent) -> Option<&'static str> {
    match cli {
        RealAgent::Codex | RealAgent::Opencode => {
            Some("it has no tool for this, and no command in the way in which it is driven here")
        }
        _ => None,
    }
}

fn why_no_plan(cli: RealAgent) -> Option<&'static str> {
    match cli {
        RealAgent::Codex | RealAgent::CodexAcp | RealAgent::Qwen => {
            Some("it offers its model no tool for this in this version")
        }
        RealAgent::Gemini => Some("it reports only how many entries its list has"),
        RealAgent::Copilot => Some("it keeps its list in a database of its own"),
        _ => None,
    }
}

fn why_not_compacted(cli: RealAgent) -> Option<&'static str> {
    match cli {
        RealAgent::Gemini | RealAgent::Copilot | RealAgent::Opencode | RealAgent::Qwen => {
            Some("it does not report it")
        }
        _ => None,
    }
}

/// The agent compacts its conversation when its user says so, and the session is told. Codex has no command for it in the
/// way in which it is driven here; it does so by itself, at a limit that its user can set.
pub(super) async fn compaction(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session_with_own_settings(json!({}), limit_context).await;
    assert_ended(&say(&session, "hello").await, "end_turn");
    let prompt = if cli == RealAgent::Codex { "and again" } else { "/compact" };
    assert_ended(&say(&session, prompt).await, "end_turn");
    let events = session.events().await;
    let count = events.iter().filter(|event| event.kind == "context.compacted").count();
    assert_eq!(count, 1, "{}", describe_events(&events));
    test.shows(Behaviour::Compacted);
    session.close().await;
}

/// Less than what the scripted model says that a call has used.
fn limit_context(cli: RealAgent, home: &Path, _env: &mut Value) {
    if cli == RealAgent::Codex {
        let path = home.join(".codex/config.toml");
        let settings = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("model_auto_compact_token_limit = 50\n{settings}")).unwrap();
    }
}

/// The agent switches its mode by itself: its model calls a tool, or its user sends a command of the agent's own.
pub(super) async fn own_switch(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let session = test.session(json!({ "policy": "allow" })).await;
    let prompts: &[&str] = match cli {
        RealAgent::Claude | RealAgent::ClaudeAcp => &[
            r#"TOOL:call:ToolSearch {"query":"select:EnterPlanMode","max_results":5}"#,
            "TOOL:call:EnterPlanMode {}",
        ],
        RealAgent::Gemini => &[r#"TOOL:call:enter_plan_mode {"reason":"it is large"}"#],
        RealAgent::Qwen => &["TOOL:call:enter_plan_mode {}"],
        _ => &["/plan"],
    };
    for prompt in prompts {
        assert_ended(&say(&session, prompt).await, "end_turn");
    }
    let changes = mode_changes(&session).await;
    let events = session.events().await;
    assert_eq!(changes, [json!({ "mode": "plan", "by": "agent" })], "{}", describe_events(&events));
    assert_eq!(session.show().await["mode"], "plan");
    test.shows(Behaviour::OwnSwitch);
    session.close().await;
}

/// Copilot has a command that allows everything. Its policy holds all the same.
pub(super) async fn copilot_allows_all() {
    let test = RealAgentTest::new(RealAgent::Copilot).await;
    let session = test.session(json!({})).await;
    assert_ended(&say(&session, "/allow-all on").await, "end_turn");
    let file = test.daemon.home.project_dir().join("asked.txt");
    let run = session.prompt(&format!("TOOL:write:{}", file.display())).await;
    permission(&session, &run).await;
    assert!(!file.exists(), "{}", describe_events(&session.events_of(&run).await));
    session.close().await;
}

/// Whether the agent told its model, with these words of the user, that it is in plan mode.
fn is_told_to_plan(test: &RealAgentTest, words: &str) -> bool {
    test.requests_with(words).iter().any(|seen| seen.told.to_lowercase().contains("plan mode"))
}

async fn mode_changes(session: &TestSession) -> Vec<Value> {
    let is_change = |event: &TestEvent| event.kind == "mode.changed";
    let events = session.events().await.into_iter().filter(is_change);
    events.map(|event| json!({ "mode": event.data["mode"], "by": event.data["by"] })).collect()
}
