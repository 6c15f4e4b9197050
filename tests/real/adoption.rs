//! A conversation whose files an agent has written itself is found, adopted and continued.

use qd_testkit::real_agents::isolated_environment;
use qd_testkit::{RealAgent, TestCommand, TestCommandOutput, TestSession};
use serde_json::json;

use super::shown::Behaviour;
use super::{RealAgentTest, agent, assert_ended, say};
use crate::adopt::close;

/// Why the conversations of this agent cannot be adopted, if so.
pub(super) fn why_not_adoptable(cli: RealAgent) -> Option<&'static str> {
    match cli {
        RealAgent::Claude | RealAgent::Codex | RealAgent::Gemini | RealAgent::Copilot | RealAgent::Qwen => {
            None
        }
        RealAgent::Opencode => Some("it keeps its conversations in a database, which is not read"),
        RealAgent::ClaudeAcp | RealAgent::CodexAcp => {
            Some("its conversations are those of `claude` or `codex`, with which they are adopted")
        }
    }
}

pub(super) async fn scene(cli: RealAgent) {
    let test = RealAgentTest::new(cli).await;
    // The home directory of the daemon and of the command line.
    let env = isolated_environment(cli, &test.daemon.home.sibling_path("user"), &test.model);
    test.daemon.give_to_user(&test.daemon.home.sibling_path("user"));
    let first = test.daemon.session_with(json!({ "agent": agent(cli), "env": env })).await;
    assert_ended(&say(&first, "first of all").await, "end_turn");
    let conversation = first.show().await["agent_session_id"].as_str().unwrap().to_owned();
    let qd = async |args: &[&str]| -> TestCommandOutput {
        let mut command = test.daemon.home.command(args);
        command.envs(&env);
        TestCommand::spawn(command).wait().await
    };

    let listed = qd(&["adopt", "--json"]).await.json();
    let entry = listed.as_array().unwrap().iter().find(|entry| entry["id"] == conversation.as_str());
    let entry = entry.unwrap_or_else(|| panic!("{conversation} is not listed: {listed:#}"));
    assert_eq!(entry["session_id"], first.id.as_str(), "{entry:#}");
    assert_eq!(entry["agent"], agent(cli), "{entry:#}");
    assert!(entry["title"].is_string() && entry["size"].as_u64().unwrap() > 0, "{entry:#}");
    assert!(qd(&["adopt", &conversation]).await.expect_exit(1).is_empty());
    close(&first).await;

    let id = qd(&["adopt", &conversation[..conversation.len() - 4]]).await.ok().trim().to_owned();
    let second = TestSession { id, ..first };
    let recall = say(&second, "RECALL").await;
    assert_ended(&recall, "end_turn");
    assert!(recall["text"].as_str().unwrap().contains("first of all"), "it remembers: {recall:#}");
    assert_eq!(second.show().await["agent_session_id"], conversation.as_str(), "under the same id");
    test.shows(Behaviour::Adopted);
}
