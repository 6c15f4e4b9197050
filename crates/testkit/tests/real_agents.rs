//! The agents that the suites drive are the pinned versions, and run in a home of their own.

use qd_testkit::real_agents::{InstalledAgents, RealAgent, isolated_environment};
use qd_testkit::{FakeModel, TestHome};

/// The package whose version a program reports.
fn package(agent: RealAgent) -> &'static str {
    match agent {
        RealAgent::Claude => "@anthropic-ai/claude-code",
        RealAgent::Codex => "@openai/codex",
        RealAgent::ClaudeAcp => "@agentclientprotocol/claude-agent-acp",
        RealAgent::CodexAcp => "@agentclientprotocol/codex-acp",
        RealAgent::Gemini => "@google/gemini-cli",
        RealAgent::Copilot => "@github/copilot",
        RealAgent::Opencode => "opencode-linux-x64-baseline",
        RealAgent::Qwen => "@qwen-code/qwen-code",
    }
}

#[tokio::test]
async fn every_agent_is_there_at_its_pinned_version() {
    let pins = include_str!("../../../tests/agents/package.json");
    let pins: serde_json::Value = serde_json::from_str(pins).expect("a package.json is JSON");
    let (home, model) = (TestHome::new(), FakeModel::start());
    for agent in RealAgent::ALL {
        let pin = pins["dependencies"][package(agent)].as_str().expect("every agent is pinned");
        let program = InstalledAgents::installed().program(agent);
        let mut command = home.program(&program[0]);
        command.args(&program[1..]).arg("--version").env_clear();
        command.envs(isolated_environment(agent, &home.sibling_path(agent.name()), &model));
        let output = command.output().await.expect("it starts");
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(stdout.contains(pin), "{} should report {pin} but reports {output:?}", agent.name());
        // The name in PATH starts the same program.
        let by_name = home
            .program(InstalledAgents::installed().bin().join(agent.name()))
            .arg("--version")
            .output()
            .await;
        assert_eq!(by_name.expect("it starts").stdout, output.stdout, "{}", agent.name());
    }
    assert!(model.requests().is_empty(), "printing the version needs no model");
}

#[test]
fn the_lock_names_no_place_that_packages_come_from() {
    let lock = include_str!("../../../tests/agents/package-lock.json");
    assert!(!lock.contains("://"), "run `tests/agents/install lock`");
    assert!(!lock.contains("\"resolved\""), "run `tests/agents/install lock`");
}
