//! How strongly an agent is confined is asked for by sessions, fleets, manifests, projects and settings. What is in force
//! is shown, and what cannot be had is refused.

use qd_testkit::git::make_repository;
use qd_testkit::{TestCommand, TestDaemon, TestHome, TestSession, poll_until, script::*};
use serde_json::{Value, json};

use crate::workers_join::{address, token};

/// A daemon on a machine that can confine nothing.
async fn start_without_support() -> TestDaemon {
    TestDaemon::start_with(|options| {
        options.env("QD_SANDBOX_MAX", "off");
    })
    .await
}

/// The `sandbox` of the last `worker.started`.
pub(crate) async fn started_sandbox(session: &TestSession) -> Value {
    let events = session.events().await;
    let started = events.iter().rev().find(|event| event.kind == "worker.started").unwrap();
    started.data["sandbox"].clone()
}

#[tokio::test]
async fn a_level_by_name_that_cannot_be_had_is_refused_and_auto_says_what_it_gives() {
    let daemon = start_without_support().await;
    let workspace = daemon.workspace().await;
    for (wanted, settings) in [
        ("sandbox: deck", json!({"agent": "script", "sandbox": "deck"})),
        ("sandbox: workspace", json!({"agent": "script", "sandbox": "workspace"})),
        ("network: off", json!({"agent": "script", "network": "off"})),
        ("network: off", json!({"agent": "script", "sandbox": "off", "network": "off"})),
        ("sandbox: deck", json!({"agent": "echo", "sandbox": "deck"})),
    ] {
        let refused = workspace.try_session(settings).await.expect_refusal(409, "sandbox_unavailable");
        assert_eq!(refused["wanted"], wanted);
        assert!(refused["missing"].is_string(), "{refused}");
    }
    let session = workspace.session("script").await;
    assert_eq!(
        session.show().await["sandbox"],
        json!({"asked": "auto", "network": "on"}),
        "before its start"
    );
    session.run_script(&[say("x")]).await;
    let shown = session.show().await["sandbox"].clone();
    assert_eq!(
        (&shown["asked"], &shown["level"], &shown["network"]),
        (&json!("auto"), &json!("off"), &json!("on"))
    );
    assert!(shown["why"].is_string(), "{shown}");
    assert_eq!(started_sandbox(&session).await, shown);
    let refused = session.client.patch(&session.path(""), &json!({"sandbox": "deck"})).await;
    refused.expect_refusal(409, "sandbox_unavailable");
    let unknown = workspace.try_session(json!({"agent": "script", "sandbox": "high"})).await;
    unknown.expect_refusal(400, "invalid_request");
}

#[tokio::test]
async fn auto_confines_agents_at_deck_where_the_machine_can_and_echo_says_that_it_is_not_confined() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let can_confine =
        workspace.try_session(json!({"agent": "script", "sandbox": "deck"})).await.status == 201;
    let session = workspace.session("script").await;
    session.run_script(&[say("x")]).await;
    let started = started_sandbox(&session).await;
    assert_eq!(started["asked"], "auto");
    assert_eq!(started["level"], if can_confine { "deck" } else { "off" }, "{started}");
    assert_eq!(started.get("why").is_some(), !can_confine, "{started}");
    assert_eq!(session.show().await["sandbox"], started);
    let secret = session.run_script(&[json!({ "read": daemon.home.path().join("token") })]).await;
    assert_eq!(secret["finish_reason"] == "end_turn", !can_confine, "{secret}");
    let listed = daemon.qd(&["ps", "-v"]).await.ok();
    assert_eq!(listed.contains("deck"), can_confine, "{listed}");

    let echo = workspace.session("echo").await;
    let run = echo.prompt("x").await;
    echo.wait(&run).await;
    let started = started_sandbox(&echo).await;
    assert_eq!(started["level"], "off");
    assert!(started["why"].as_str().unwrap().contains("part of its worker"), "{started}");
}

#[tokio::test]
async fn a_change_counts_from_the_agents_next_start() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("x")]).await;
    daemon.qd(&["set", &session.id, "sandbox=off"]).await.ok();
    let shown = session.show().await["sandbox"].clone();
    assert_eq!(shown["asked"], "off", "what is asked for is shown at once");
    session.run_script(&[say("y")]).await;
    let started = started_sandbox(&session).await;
    assert_eq!((&started["asked"], &started["level"]), (&json!("off"), &json!("off")));
    assert_eq!(started.get("why"), None, "nobody wonders why");
    assert_eq!(session.show().await["sandbox"], started);
}

#[tokio::test]
async fn a_change_counts_although_the_daemon_is_killed_before_the_agents_next_start() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let first = session.prompt_script(&[await_steer(600_000)]).await;
    session.wait_for_start(&first).await;
    session.patch(json!({"sandbox": "off"})).await;
    daemon.restart().await;
    session.steer("go").await;
    session.wait(&first).await;
    session.run_script(&[say("y")]).await;
    assert_eq!(started_sandbox(&session).await["asked"], "off");

    // The same for an agent that is not ready yet.
    let slow = json!({"agent": "script", "env": {"SCRIPT_READY_MS": "1000"}});
    let session = daemon.session_with(slow).await;
    let first = session.prompt_script(&[say("x")]).await;
    session.wait_for_event("its worker", |event| event.kind == "worker.started").await;
    session.patch(json!({"sandbox": "off"})).await;
    daemon.restart().await;
    session.wait(&first).await;
    session.run_script(&[say("y")]).await;
    assert_eq!(started_sandbox(&session).await["asked"], "off");
}

#[tokio::test]
async fn a_change_is_judged_by_what_earlier_changes_ask_for() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let cut_off = json!({"agent": "script", "sandbox": "deck", "network": "off"});
    if workspace.try_session(cut_off).await.status == 409 {
        // This machine can cut no agent off from the network, so no change asks for it.
        return;
    }
    let session = workspace.session_with(json!({"agent": "script", "sandbox": "deck"})).await;
    session.run_script(&[say("x")]).await;
    let shown = session.patch(json!({"network": "off"})).await["sandbox"].clone();
    assert_eq!((&shown["network"], &shown["network_asked"]), (&json!("on"), &json!("off")), "{shown}");
    let refused = session.try_patch(json!({"sandbox": "off"})).await;
    assert_eq!(refused.expect_refusal(409, "sandbox_unavailable")["wanted"], "network: off");
    session.run_script(&[say("y")]).await;
    let shown = session.show().await["sandbox"].clone();
    assert_eq!((&shown["network"], shown.get("network_asked")), (&json!("off"), None), "{shown}");
    session.patch(json!({"sandbox": "off", "network": "on"})).await;
    assert_eq!(session.run_script(&[say("z")]).await["text"], "z");
}

#[tokio::test]
async fn agents_elsewhere_say_that_they_are_not_confined_and_refuse_a_level_by_name() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for agent in ["a2a:http://127.0.0.1:9", "worker:ws://127.0.0.1:9"] {
        for asked in [json!({"agent": agent, "sandbox": "deck"}), json!({"agent": agent, "network": "off"})] {
            let refused = workspace.try_session(asked).await.expect_refusal(409, "sandbox_unavailable");
            assert!(refused["missing"].as_str().unwrap().contains("elsewhere"), "{refused}");
        }
        let session = workspace.session(agent).await;
        // Nobody listens there, so the run fails; its worker has been started all the same.
        session.prompt("x").await;
        session.wait_for_event("its worker", |event| event.kind == "worker.started").await;
        let started = started_sandbox(&session).await;
        assert_eq!(started["level"], "off");
        assert!(started["why"].as_str().unwrap().contains("elsewhere"), "{started}");
    }
}

#[tokio::test]
async fn the_session_counts_before_the_manifest_and_the_manifest_before_the_settings() {
    let home = TestHome::new();
    home.configure("sandbox = \"off\"\n");
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    let asked = async |settings: Value| {
        let session = daemon.session_with(settings).await;
        session.run_script(&[say("x")]).await;
        started_sandbox(&session).await["asked"].clone()
    };
    assert_eq!(asked(json!({"agent": "script"})).await, "off", "the settings");
    let agents = daemon.home.path().join("agents");
    std::fs::create_dir_all(&agents).unwrap();
    std::fs::write(agents.join("script.toml"), "[agent]\nname = \"script\"\n[sandbox]\nlevel = \"auto\"\n")
        .unwrap();
    assert_eq!(asked(json!({"agent": "script"})).await, "auto", "the manifest");
    assert_eq!(asked(json!({"agent": "script", "sandbox": "off"})).await, "off", "the session");
    let shown = daemon.qd(&["config"]).await.ok();
    assert!(
        shown.lines().any(|line| line.starts_with("sandbox ") && line.contains("config.toml:1")),
        "{shown}"
    );
}

#[tokio::test]
async fn a_trusted_project_only_tightens() {
    let daemon = start_without_support().await;
    let project = daemon.home.project_dir();
    let folder = project.join(".quarterdeck");
    std::fs::create_dir_all(folder.join("agents")).unwrap();
    let workspace = daemon.workspace().await;
    let loose = json!({"agent": "script", "sandbox": "off"});
    let try_loose = async || workspace.try_session(loose.clone()).await;
    std::fs::write(folder.join("project.toml"), "sandbox = \"workspace\"\n").unwrap();
    try_loose().await.expect(201);
    daemon.qd(&["trust", &project.display().to_string()]).await.ok();
    let refused = try_loose().await.expect_refusal(409, "sandbox_unavailable");
    assert_eq!(refused["wanted"], "sandbox: workspace", "the project's level counts once it is trusted");
    std::fs::write(folder.join("project.toml"), "").unwrap();
    let manifest = "[agent]\nname = \"script\"\n[sandbox]\nlevel = \"deck\"\n";
    std::fs::write(folder.join("agents/script.toml"), manifest).unwrap();
    daemon.qd(&["trust", &project.display().to_string()]).await.ok();
    let refused = try_loose().await.expect_refusal(409, "sandbox_unavailable");
    assert_eq!(refused["wanted"], "sandbox: deck", "its own manifest too");
    std::fs::write(folder.join("agents/script.toml"), manifest.replace("deck", "off")).unwrap();
    daemon.qd(&["trust", &project.display().to_string()]).await.ok();
    let strict = json!({"agent": "script", "sandbox": "deck"});
    workspace.try_session(strict).await.expect_refusal(409, "sandbox_unavailable");
}

#[tokio::test]
async fn a_fleet_asks_for_all_its_sessions_and_a_session_for_itself() {
    let daemon = start_without_support().await;
    make_repository(&daemon.home.project_dir());
    let workspace = daemon.workspace().await;
    let file = |rest: &str| {
        format!(
            "fleet:\n  task: x\n  sandbox: off\n  sessions:\n    a: {{ agent: echo }}\n    b: {{ agent: echo{rest} }}\n  start: [a, b]\n"
        )
    };
    let fleet = workspace.fleet(&file(", sandbox: auto")).await;
    for (name, asked) in [("a", "off"), ("b", "auto")] {
        assert_eq!(fleet.session(name).await.show().await["sandbox"]["asked"], asked);
    }
    let refused = workspace.try_fleet(&file(", sandbox: deck")).await;
    refused.expect_refusal(409, "sandbox_unavailable");
    let wrong = workspace.try_fleet(&file(", network: none")).await.expect_refusal(400, "invalid_fleet");
    assert_eq!((&wrong["line"], &wrong["key"]), (&json!(6), &json!("network")), "{wrong}");
}

#[tokio::test]
async fn a_machine_that_loses_its_sandbox_starts_no_agent_that_was_promised_one() {
    let mut daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let created = workspace.try_session(json!({"agent": "script", "sandbox": "deck"})).await;
    if created.status == 409 {
        // Nothing was promised: this machine cannot confine agents.
        return;
    }
    let id = created.expect(201)["id"].as_str().unwrap().to_owned();
    daemon.kill9().await;
    let home = daemon.home.path();
    let mut serve = daemon.home.command(&["serve"]);
    serve.env("QD_SANDBOX_MAX", "off").env("QD_HOME", home);
    let mut second = qd_testkit::home::TestCommand::spawn(serve);
    second.wait_for_stdout("listening on").await;
    daemon.qd(&["send", &id, "[]"]).await.ok();
    let run = poll_until("its end", async || {
        let runs = daemon.client().get(&format!("{}?session={id}", workspace.path("/runs"))).await.list();
        runs.into_iter().find(|run| run["state"] == "finished")
    })
    .await;
    assert_eq!(run["error"]["code"], "sandbox_unavailable", "{run}");
    second.signal(rustix::process::Signal::KILL);
}

#[tokio::test]
async fn a_joined_machine_confines_by_what_it_can_do_itself_and_not_by_what_the_daemon_can() {
    let plain = TestDaemon::start().await;
    let can_confine =
        plain.workspace().await.try_session(json!({"agent": "script", "sandbox": "deck"})).await.status
            == 201;
    for (of_daemon, of_machine, level) in
        [("workspace", "off", "off"), ("off", "workspace", if can_confine { "deck" } else { "off" })]
    {
        let daemon = TestDaemon::start_with(|options| {
            options.tcp().arg("--tls").arg("self").env("QD_SANDBOX_MAX", of_daemon);
        })
        .await;
        let made = token(&daemon, &["box"]).await;
        let (secret, pin) = (made["token"].as_str().unwrap(), made["fingerprint"].as_str().unwrap());
        let (home, url) = (TestHome::new(), format!("https://{}", address(&daemon)));
        let mut join = home.command(&["worker", "join", &url, "--token", secret, "--fingerprint", pin]);
        join.args(["--label", "box"]).env("QD_SANDBOX_MAX", of_machine);
        let mut machine = TestCommand::spawn(join);
        machine.wait_for_stdout("joined ").await;
        let session = daemon.session("script@box").await;
        session.run_script(&[say("x")]).await;
        let shown = session.show().await["sandbox"].clone();
        assert_eq!(shown["level"], level, "the daemon {of_daemon}, the machine {of_machine}: {shown}");
    }
}

#[tokio::test]
async fn run_takes_a_level_and_ps_and_doctor_show_it() {
    let daemon = start_without_support().await;
    daemon.qd(&["run", "--agent", "script", "--sandbox", "off", "--title", "loose", "[]"]).await.ok();
    daemon.qd(&["run", "--agent", "script", "--title", "free", "[]"]).await.ok();
    let listed = daemon.qd(&["ps", "-v"]).await;
    assert!(listed.stderr.contains("not confined: "), "{}", listed.stderr);
    let listed = listed.ok();
    assert!(listed.lines().next().unwrap().contains("SANDBOX"), "{listed}");
    assert!(listed.lines().any(|line| line.contains("loose") && line.contains("off")), "{listed}");
    let refused = daemon.qd(&["run", "--agent", "script", "--sandbox", "deck", "[]"]).await;
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("`sandbox: deck` cannot be had"), "{}", refused.stderr);
    daemon.qd(&["run", "--agent", "script", "--sandbox", "high", "[]"]).await.expect_exit(2);
    let report = daemon.qd(&["doctor", "--json"]).await.json();
    let checks = report["checks"].as_array().unwrap();
    assert_eq!(checks.iter().filter(|check| check["check"] == "sandbox").count(), 3, "{report}");
}
