//! The session's policy holds, whatever the agent's own settings allow: what is denied does not happen, and what must
//! be asked is asked.

use std::path::Path;

use qd_testkit::RealAgent;
use serde_json::{Value, json};

use super::{RealAgentTest, assert_ended, permission, say};

pub(super) async fn scene(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    let work = test.daemon.home.project_dir();
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

    session.patch(json!({ "policy": "ask" })).await;
    let file = work.join("asked.txt");
    let run = session.prompt(&format!("TOOL:write:{}", file.display())).await;
    permission(&session, &run).await;
    assert!(!file.exists());
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
            let allow = json!(["Bash", "Write", "Edit", "WebFetch", "mcp__quarterdeck"]);
            let permissions = json!({ "allow": allow, "defaultMode": "bypassPermissions" });
            edit_json(".claude/settings.json", json!({ "permissions": permissions }));
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
            let allow = json!(["Bash", "Write", "Edit", "run_shell_command", "write_file", "edit"]);
            let tools = json!({ "approvalMode": "yolo", "allowed": ["run_shell_command", "write_file"] });
            edit_json(".qwen/settings.json", json!({ "permissions": { "allow": allow }, "tools": tools }));
        }
    }
}
