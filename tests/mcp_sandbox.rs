//! A session that an agent starts through the tools is confined at least as strictly as the agent's own session: by
//! level and by network, whatever the call, the manifest or a change in the middle of the turn asks for.

use qd_testkit::mcp::session_token;
use qd_testkit::{TestDaemon, TestMcpClient, TestSession, script::*};
use serde_json::{Value, json};

use crate::mcp_http;
use crate::sandbox_settings::started_sandbox;

/// The levels, the laxest first.
const LEVELS: [&str; 3] = ["off", "deck", "workspace"];

/// Whether this machine can confine agents at every level and cut them off from the network. Otherwise sessions that ask
/// for it are refused, and there is nothing to inherit.
async fn can_confine(daemon: &TestDaemon) -> bool {
    let strictest = json!({ "agent": "script", "sandbox": "workspace", "network": "off" });
    daemon.workspace().await.try_session(strictest).await.status == 201
}

/// A session whose agent is in a long turn.
async fn at_work(daemon: &TestDaemon, mut settings: Value) -> TestSession {
    settings["agent"] = json!("script");
    settings["policy"] = json!("allow");
    let session = daemon.session_with(settings).await;
    let run = session.prompt_script(&[say("at work"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session
}

/// The level and the network of the session's last start.
async fn confinement(session: &TestSession) -> (String, String) {
    let started = started_sandbox(session).await;
    (started["level"].as_str().unwrap().to_owned(), started["network"].as_str().unwrap().to_owned())
}

/// Calls `spawn_agent` with the rights of a session, over HTTP and on stdio, and waits for both children.
async fn spawn_over_both_transports(
    daemon: &TestDaemon,
    parent: &TestSession,
    settings: &Value,
    prompt: &[Value],
) -> Vec<TestSession> {
    let mut arguments = settings.clone();
    arguments["agent"] = json!("script");
    arguments["prompt"] = json!(steps(prompt));
    arguments["wait"] = json!(true);
    let token = session_token(&daemon.home, &parent.id);
    let over_http =
        mcp_http::call(&daemon.client().with_token(&token), "spawn_agent", arguments.clone()).await;
    let on_stdio = TestMcpClient::as_session(&daemon.home, parent).await.call("spawn_agent", arguments).await;
    let child = |made: &Value| TestSession {
        id: made["session"].as_str().unwrap_or_else(|| panic!("{made}")).to_owned(),
        ..parent.clone()
    };
    [&over_http, &on_stdio].map(child).into()
}

#[tokio::test]
async fn asking_for_less_gets_the_parents_confinement_and_asking_for_more_is_given() {
    let daemon = TestDaemon::start().await;
    if !can_confine(&daemon).await {
        return;
    }
    let grandchild = mcp(
        "spawn_agent",
        json!({ "agent": "script", "prompt": "[]", "sandbox": "off", "network": "on", "wait": true }),
    );
    for (own, level, network) in [
        (json!({}), "deck", "on"),
        (json!({ "sandbox": "deck", "network": "off" }), "deck", "off"),
        (json!({ "sandbox": "workspace" }), "workspace", "on"),
    ] {
        let parent = at_work(&daemon, own).await;
        assert_eq!(confinement(&parent).await, (level.to_owned(), network.to_owned()));
        for asked in [
            json!({}),
            json!({ "sandbox": "off", "network": "on" }),
            json!({ "sandbox": "workspace", "network": "off" }),
        ] {
            let at_least = |one: &str, other: &str| {
                let strictness = |level: &str| LEVELS.iter().position(|known| *known == level);
                if strictness(one) < strictness(other) { other.to_owned() } else { one.to_owned() }
            };
            let given = at_least(level, asked["sandbox"].as_str().unwrap_or("off"));
            let cut_off = network == "off" || asked["network"] == "off";
            let expected = (given, if cut_off { "off" } else { "on" }.to_owned());
            let children =
                spawn_over_both_transports(&daemon, &parent, &asked, std::slice::from_ref(&grandchild)).await;
            for child in children {
                assert_eq!(confinement(&child).await, expected, "{asked} below {level}");
                let made: Value =
                    serde_json::from_str(child.runs().await[0]["text"].as_str().unwrap()).unwrap();
                let below = TestSession { id: made["session"].as_str().unwrap().to_owned(), ..child };
                assert_eq!(confinement(&below).await, expected, "two generations below {level}");
            }
        }
    }
}

#[tokio::test]
async fn neither_a_manifest_nor_a_change_in_mid_turn_loosens_what_an_agent_starts() {
    let daemon = TestDaemon::start().await;
    if !can_confine(&daemon).await {
        return;
    }
    let agents = daemon.home.path().join("agents");
    std::fs::create_dir_all(&agents).unwrap();
    let write_manifest = |level: &str| {
        let text = format!("[agent]\nname = \"script\"\n[sandbox]\nlevel = \"{level}\"\n");
        std::fs::write(agents.join("script.toml"), text).unwrap();
    };
    let parent = at_work(&daemon, json!({ "sandbox": "deck", "network": "off" })).await;
    write_manifest("off");
    for child in spawn_over_both_transports(&daemon, &parent, &json!({}), &[]).await {
        assert_eq!(confinement(&child).await, ("deck".into(), "off".into()), "the manifest asks for less");
    }
    write_manifest("workspace");
    let asked = json!({ "sandbox": "off" });
    for child in spawn_over_both_transports(&daemon, &parent, &asked, &[]).await {
        assert_eq!(confinement(&child).await.0, "workspace", "the call asks for less than the manifest");
    }
    write_manifest("auto");

    // What is in force counts as long as it is stricter than what the session asks for, and the other way round.
    parent.patch(json!({ "sandbox": "off", "network": "on" })).await;
    for child in spawn_over_both_transports(&daemon, &parent, &json!({}), &[]).await {
        assert_eq!(confinement(&child).await, ("deck".into(), "off".into()), "the agent is still cut off");
    }
    let parent = at_work(&daemon, json!({ "sandbox": "off" })).await;
    parent.patch(json!({ "sandbox": "workspace", "network": "off" })).await;
    for child in spawn_over_both_transports(&daemon, &parent, &json!({}), &[]).await {
        assert_eq!(confinement(&child).await, ("workspace".into(), "off".into()), "the change counts");
    }
}
