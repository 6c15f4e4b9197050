//! An agent in a sandbox works as it does outside: it runs commands, is cancelled, and continues its conversation after
//! daemon and agent were killed. At `workspace` it writes nothing outside its project. Without network it still reaches its
//! model.

use std::os::unix::fs::PermissionsExt;

use qd_testkit::{InstalledAgents, RealAgent};
use serde_json::json;

use super::conditions::SceneConditions;
use super::shown::Behaviour;
use super::{RealAgentTest, assert_ended, describe_events, ended, say};

/// At `workspace` and without network, for whoever runs the tests. OpenCode has a server of its own on loopback, and cannot
/// reach that directly if its model is on loopback too.
pub(super) async fn at_workspace(cli: RealAgent) {
    let network = if cli == RealAgent::Opencode { "on" } else { "off" };
    let test = scene(cli, SceneConditions::default(), "workspace", network).await;
    test.shows(Behaviour::AtWorkspace);
}

/// At `workspace`, for an ordinary user.
pub(super) async fn at_workspace_of_user(cli: RealAgent) {
    let test = scene(cli, SceneConditions::ordinary_user(), "workspace", "on").await;
    test.shows(Behaviour::OfOrdinaryUser);
}

/// At `deck` and without network, for an ordinary user.
pub(super) async fn at_deck_of_user(cli: RealAgent) {
    scene(cli, SceneConditions::ordinary_user(), "deck", "off").await;
}

async fn scene(cli: RealAgent, conditions: SceneConditions, level: &str, network: &str) -> RealAgentTest {
    let mut test = RealAgentTest::under(cli, &conditions.at(level), "").await;
    // A write outside the project is of high risk. The sandbox must prevent it, and not the policy.
    let policy = json!([{ "tool": "*", "decision": "allow", "risk": "high" }]);
    let session = test.session(json!({ "policy": policy, "network": network })).await;
    let inside = test.daemon.home.project_dir().join("inside.txt");
    let run = say(&session, &format!("TOOL:write:{}", inside.display())).await;
    assert_ended(&run, "end_turn");
    assert!(inside.exists(), "{}", describe_events(&session.events().await));
    let shown = session.show().await;
    assert_eq!((&shown["sandbox"]["level"], &shown["sandbox"]["network"]), (&json!(level), &json!(network)));

    // Not in a temporary directory, because each sandbox has its own.
    let folder = InstalledAgents::installed().folder();
    let folder = tempfile::Builder::new().prefix("outside-").tempdir_in(folder).unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    test.daemon.give_to_user(folder.path());
    // By the shell, and by the agent's own tool, which may be carried out by the worker.
    for tool in ["write", "create"] {
        let outside = folder.path().join(tool);
        let run = say(&session, &format!("TOOL:{tool}:{}", outside.display())).await;
        assert_ended(&run, "end_turn");
        let events = session.events_of(run["id"].as_str().unwrap()).await;
        let shown = describe_events(&events);
        assert!(events.iter().any(|event| event.kind == "tool.finished"), "{shown}");
        // Some agents themselves refuse to use their tool outside their project.
        assert!(
            outside.exists() == (level != "workspace") || tool == "create" && !outside.exists(),
            "{shown}"
        );
    }

    let run = session.prompt("SLOW:60 words").await;
    session.wait_for_event("its words", |event| event.is_of_run(&run, "text.delta")).await;
    session.cancel().await;
    assert_ended(&ended(&session, &run).await, "cancelled");
    test.check_dropped("SLOW:60 words").await;

    // What the agent has stored of the conversation is outside the sandbox, and another sandbox has it too.
    let conversation = session.show().await["agent_session_id"].clone();
    test.daemon.kill9().await;
    test.daemon.home.kill_workers();
    test.daemon.start_again().await;
    let session = session.with_client(test.daemon.client());
    let recall = say(&session, "RECALL").await;
    assert_ended(&recall, "end_turn");
    assert!(recall["text"].as_str().unwrap().contains("inside.txt"), "it remembers: {recall:#}");
    let shown = session.show().await;
    assert_eq!(shown["agent_session_id"], conversation, "under the same name");
    assert_eq!(shown["sandbox"]["level"], level, "{shown:#}");
    session.close().await;
    test
}
