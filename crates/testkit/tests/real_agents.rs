//! The agents that the suites drive are the ones that are pinned, and run where nothing but their own home is known.

use qd_testkit::real_agents::{InstalledAgents, RealAgent, isolated_environment};
use qd_testkit::{FakeModel, TestHome};

/// The package whose version a program tells.
fn package(cli: RealAgent) -> &'static str {
    match cli {
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
    for cli in RealAgent::ALL {
        let pin = pins["dependencies"][package(cli)].as_str().expect("every agent is pinned");
        let program = InstalledAgents::installed().program(cli);
        let mut command = home.program(&program[0]);
        command.args(&program[1..]).arg("--version").env_clear();
        command.envs(isolated_environment(cli, &home.sibling_path(cli.name()), &model));
        let output = command.output().await.expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains(pin), "{} is to be {pin}, and says {output:?}", cli.name());
        // Under its name in the path it is the same program.
        let named =
            home.program(InstalledAgents::installed().bin().join(cli.name())).arg("--version").output().await;
        assert_eq!(named.expect("it starts").stdout, output.stdout, "{}", cli.name());
    }
    assert!(model.requests().is_empty(), "who only says its version asks no model");
}

#[test]
fn the_lock_names_no_place_that_packages_come_from() {
    let lock = include_str!("../../../tests/agents/package-lock.json");
    assert!(!lock.contains("://"), "run `tests/agents/install lock`");
    assert!(!lock.contains("\"resolved\""), "run `tests/agents/install lock`");
}
