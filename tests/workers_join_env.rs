//! The variables of an agent on a joined machine: those that the caller's manifest lists are taken from whoever starts
//! the session, and those that the machine's manifest lists from the machine, where the caller has none.

use qd_testkit::{TestCommand, TestDaemon, TestHome};
use serde_json::json;

use crate::workers_join::{address, daemon_with_tls, token};

/// Writes down which variables it was given. An answer would not show them, because their values are redacted.
const WRITE_VARIABLES: &str =
    "printf '%s|%s|%s' \"${GPU_TOKEN-none}\" \"${GPU_MODEL-none}\" \"${OTHER-none}\" >seen; echo written";

/// The manifest of an agent that is given the variables `GPU_*`.
fn write_manifest(home: &TestHome, name: &str) {
    let text = format!(
        "[agent]\nname = \"{name}\"\nbinary = \"sh\"\ndriver = \"exec\"\n\n\
         [startup]\ncommand = [\"sh\", \"-c\", {}]\npass_env = [\"GPU_*\"]\n",
        json!(WRITE_VARIABLES)
    );
    std::fs::create_dir_all(home.path().join("agents")).unwrap();
    std::fs::write(home.path().join(format!("agents/{name}.toml")), text).unwrap();
}

/// A machine with the label `gpu` that has joined: its own agents, and its own values of the variables.
async fn join_gpu(daemon: &TestDaemon, agents: &[&str]) -> (TestCommand, TestHome) {
    let made = token(daemon, &["gpu"]).await;
    let home = TestHome::new();
    agents.iter().for_each(|name| write_manifest(&home, name));
    let url = format!("https://{}", address(daemon));
    let (token, pin) = (made["token"].as_str().unwrap(), made["fingerprint"].as_str().unwrap());
    let mut command =
        home.command(&["worker", "join", &url, "--token", token, "--fingerprint", pin, "--label", "gpu"]);
    command
        .env("GPU_TOKEN", "of-the-machine")
        .env("GPU_MODEL", "of-the-machine")
        .env("OTHER", "of-the-machine");
    let mut worker = TestCommand::spawn(command);
    worker.wait_for_stdout("joined ").await;
    (worker, home)
}

/// What the agent saw after `qd` was called like this, with these variables set.
async fn seen_after(daemon: &TestDaemon, args: &[&str], variables: &[(&str, &str)]) -> String {
    let seen = daemon.home.project_dir().join("seen");
    let _none_yet = std::fs::remove_file(&seen);
    let mut command = daemon.home.command(args);
    command.envs(variables.iter().copied());
    TestCommand::spawn(command).wait().await.ok();
    std::fs::read_to_string(seen).unwrap()
}

#[tokio::test]
async fn an_agent_on_a_joined_machine_gets_the_callers_variables_and_else_those_of_the_machine() {
    let daemon = daemon_with_tls().await;
    write_manifest(&daemon.home, "shared");
    let _machine = join_gpu(&daemon, &["shared"]).await;
    let run = ["run", "-a", "shared@gpu", "go"];
    let both = seen_after(&daemon, &run, &[("GPU_TOKEN", "of-the-caller"), ("OTHER", "of-the-caller")]).await;
    assert_eq!(both, "of-the-caller|of-the-machine|none", "only what the manifest lists is passed");
    let neither = seen_after(&daemon, &run, &[]).await;
    assert_eq!(neither, "of-the-machine|of-the-machine|none");
    let given = ["run", "-a", "shared@gpu", "--env", "GPU_MODEL=given", "--env", "OTHER", "go"];
    let given = seen_after(&daemon, &given, &[("GPU_TOKEN", ""), ("OTHER", "of-the-caller")]).await;
    assert_eq!(given, "|given|of-the-caller", "an empty value is a value");
}

#[tokio::test]
async fn a_joined_machine_cannot_choose_which_of_the_callers_variables_it_gets() {
    let daemon = daemon_with_tls().await;
    // Only the machine has a manifest of this agent, and what that lists concerns the machine's own variables.
    let _machine = join_gpu(&daemon, &["remote"]).await;
    let caller = [("GPU_TOKEN", "of-the-caller")];
    let run = seen_after(&daemon, &["run", "-a", "remote@gpu", "go"], &caller).await;
    assert_eq!(run, "of-the-machine|of-the-machine|none");
    let given = seen_after(&daemon, &["run", "-a", "remote@gpu", "--env", "GPU_TOKEN", "go"], &caller).await;
    assert_eq!(given, "of-the-caller|of-the-machine|none", "the caller can");
}

#[tokio::test]
async fn a_fleet_passes_its_callers_variables_to_a_joined_machine() {
    let daemon = daemon_with_tls().await;
    write_manifest(&daemon.home, "shared");
    let _machine = join_gpu(&daemon, &["shared"]).await;
    let fleet = "fleet:\n  task: go\n  sessions: { a: { agent: shared@gpu } }\n  start: a\n";
    std::fs::write(daemon.home.project_dir().join("fleet.yaml"), fleet).unwrap();
    let seen = seen_after(&daemon, &["up", "fleet.yaml"], &[("GPU_TOKEN", "of-the-caller")]).await;
    assert_eq!(seen, "of-the-caller|of-the-machine|none");
}

#[tokio::test]
async fn the_same_agent_without_a_label_gets_nothing_of_the_machine() {
    let daemon = daemon_with_tls().await;
    write_manifest(&daemon.home, "shared");
    let _machine = join_gpu(&daemon, &["shared"]).await;
    let seen = seen_after(&daemon, &["run", "-a", "shared", "go"], &[("GPU_TOKEN", "of-the-caller")]).await;
    assert_eq!(seen, "of-the-caller|none|none");
}
