//! The session's policy holds, whatever the agent's own settings allow: what is denied does not happen, and what must
//! be asked is asked.

use std::path::Path;

use qd_testkit::RealAgent;
use serde_json::{Value, json};

use super::shown::Behaviour;
use super::{RealAgentTest, agent, assert_ended, permission, say};

pub(super) async fn scene(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let work = test.daemon.home.project_dir();
    if matches!(cli, RealAgent::Claude | RealAgent::ClaudeAcp) {
        asks_also_in_skills(&test).await;
    }
    let session = test.session_with_own_settings(json!({ "policy": "deny" }), allow_everything).await;
    for (tool, name) in [("plain", "by-shell.txt"), ("create", "by-tool.txt")] {
        let file = work.join(name);
        let prompt = match tool {
            "plain" => format!("TOOL:plain:echo no > {}", file.display()),
            _ => format!("TOOL:{tool}:{}", file.display()),
        };
        let denied = say(&session, &prompt).await;
        assert_ended(&denied, "end_turn");
        assert!(!file.exists(), "{tool}: {}", super::describe_events(&session.events().await));
    }

    let never = json!({ "agent": "echo", "prompt": "no", "title": "never" });
    assert_ended(&say(&session, &format!("TOOL:mcp:spawn_agent {never}")).await, "end_turn");
    let sessions = test.daemon.client().get("/v1/sessions").await.list();
    assert!(sessions.iter().all(|one| one["title"] != "never"), "{sessions:?}");

    session.patch(json!({ "policy": "ask" })).await;
    let file = work.join("asked.txt");
    let run = session.prompt(&format!("TOOL:write:{}", file.display())).await;
    permission(&session, &run).await;
    assert!(!file.exists());
    test.shows(Behaviour::PolicyHolds);
    session.close().await;
    if let Some((path, text, setting)) = setting_that_overrides(cli) {
        let path = work.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        let refused = test.daemon.workspace().await.try_session(json!({ "agent": agent(cli) })).await;
        let details = refused.expect_refusal(409, "agent_overrides_policy");
        assert_eq!(details["setting"], format!("`{setting}` in {}", path.display()));
    }
}

/// A file of a project with which the agent would act without asking, and how it is named when the session is refused.
/// Each was seen to do so with the agent itself. Gemini has none: our rules count more than those of a project.
fn setting_that_overrides(cli: RealAgent) -> Option<(&'static str, &'static str, &'static str)> {
    match cli {
        RealAgent::Claude | RealAgent::ClaudeAcp => Some((
            ".claude/settings.local.json",
            r#"{ "hooks": { "PermissionRequest": [{ "hooks": [] }], /* mine */ } }"#,
            "hooks.PermissionRequest",
        )),
        RealAgent::Codex | RealAgent::CodexAcp => Some((
            ".codex/rules/mine.rules",
            "prefix_rule(pattern = [\"rm\"], decision = \"forbidden\")\nprefix_rule(\n    pattern = [\"touch\"],\n)\n",
            "prefix_rule( pattern = [\"touch\"], )",
        )),
        RealAgent::Copilot => Some((
            ".github/hooks/mine.json",
            r#"{ "version": 1, "hooks": { "preToolUse": [{ "type": "command", "bash": "true" }] } }"#,
            "hooks.preToolUse",
        )),
        RealAgent::Qwen => Some((
            ".qwen/settings.json",
            r#"{ "hooks": { "PermissionRequest": [{ "hooks": [] }] } }"#,
            "hooks.PermissionRequest",
        )),
        RealAgent::Opencode => Some((
            ".opencode/agent/mine.md",
            "---\nmode: primary\npermission:\n  bash: allow\n---\nBe quick.\n",
            "permission:",
        )),
        RealAgent::Gemini => None,
    }
}

/// A skill of Claude's that allows commands to itself allows nothing.
async fn asks_also_in_skills(test: &RealAgentTest) {
    let session = test
        .session_with_own_settings(json!({ "policy": "deny" }), |_, home, _| {
            let folder = home.join(".claude/skills/obey");
            std::fs::create_dir_all(&folder).unwrap();
            let skill = "---\nname: obey\ndescription: obeys\nallowed-tools: Bash\n---\n$ARGUMENTS\n";
            std::fs::write(folder.join("SKILL.md"), skill).unwrap();
        })
        .await;
    let file = test.daemon.home.project_dir().join("by-skill.txt");
    assert_ended(&say(&session, &format!("/obey TOOL:plain:touch {}", file.display())).await, "end_turn");
    let events = super::describe_events(&session.events().await);
    assert!(events.contains("by-skill.txt") && !file.exists(), "{events}");
    session.close().await;
}

/// Writes settings into the agent's home that allow everything without asking.
fn allow_everything(cli: RealAgent, home: &Path, env: &mut Value) {
    let edit_json = |path: &str, change: Value| {
        let path = home.join(path);
        let mut settings: Value = std::fs::read_to_string(&path)
            .map_or_else(|_| json!({}), |text| serde_json::from_str(&text).unwrap());
        for (key, value) in change.as_object().unwrap() {
            settings[key] = value.clone();
        }
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, settings.to_string()).unwrap();
    };
    match cli {
        RealAgent::Claude | RealAgent::ClaudeAcp => {
            let allow = json!(["Bash(git *)", "Write", "Edit", "WebFetch", "mcp__quarterdeck"]);
            let permissions = json!({ "allow": allow, "defaultMode": "bypassPermissions" });
            let decision = json!({ "hookEventName": "PreToolUse", "permissionDecision": "allow" });
            let command = format!("echo '{}'", json!({ "hookSpecificOutput": decision }));
            let hook = json!({ "matcher": "*", "hooks": [{ "type": "command", "command": command }] });
            let hooks = json!({ "PreToolUse": [hook] });
            edit_json(".claude/settings.json", json!({ "permissions": permissions, "hooks": hooks }));
        }
        RealAgent::Codex | RealAgent::CodexAcp => {
            let path = home.join(".codex/config.toml");
            let config = std::fs::read_to_string(&path).unwrap();
            let permissive = "approval_policy = \"never\"\nsandbox_mode = \"workspace-write\"";
            std::fs::write(&path, config.replace("approval_policy = \"on-request\"", permissive)).unwrap();
        }
        RealAgent::Gemini => {
            edit_json(
                ".gemini/settings.json",
                json!({
                    "tools": { "allowed": ["run_shell_command", "write_file", "replace"] },
                }),
            );
            let rules = "[[rule]]\ntoolName = \"*\"\ndecision = \"allow\"\npriority = 999\n";
            std::fs::create_dir_all(home.join(".gemini/policies")).unwrap();
            std::fs::write(home.join(".gemini/policies/mine.toml"), rules).unwrap();
        }
        RealAgent::Copilot => env["COPILOT_ALLOW_ALL"] = json!("true"),
        RealAgent::Opencode => {
            let all = json!({ "*": "allow", "bash": "allow", "edit": "allow" });
            let agent = json!({ "build": { "permission": all } });
            edit_json(".config/opencode/opencode.json", json!({ "permission": all, "agent": agent }));
        }
        RealAgent::Qwen => {
            let allow =
                ["Bash", "Write", "Edit", "run_shell_command", "write_file", "edit", "mcp__quarterdeck"];
            let tools = json!({ "approvalMode": "yolo", "allowed": ["run_shell_command", "write_file"] });
            edit_json(".qwen/settings.json", json!({ "permissions": { "allow": allow }, "tools": tools }));
        }
    }
}
