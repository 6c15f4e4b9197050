//! Agents described by the user's manifests, by manifests of a trusted project, and by a name alone.

use qd_testkit::{TestDaemon, TestResponse};
use serde_json::json;

#[tokio::test]
async fn any_command_is_an_agent_and_its_exit_status_decides() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("exec:tr a-z A-Z").await;
    let run = session.wait(&session.prompt("hello").await).await;
    assert_eq!((&run["finish_reason"], &run["text"]), (&json!("end_turn"), &json!("HELLO")));
    let again = session.wait(&session.prompt("more").await).await;
    assert_eq!(again["text"], "MORE", "each prompt is a process of its own");

    let argument = daemon.session("exec:echo <{prompt}>").await;
    assert_eq!(argument.wait(&argument.prompt("a b").await).await["text"], "<a b>\n");

    let fails = daemon.session("exec:sh -c 'cat; echo why >&2; exit 3'").await;
    let run = fails.wait(&fails.prompt("words").await).await;
    assert_eq!((&run["finish_reason"], &run["text"]), (&json!("error"), &json!("words")), "{run}");
    assert_eq!(
        (&run["error"]["exit_status"], &run["error"]["stderr"]),
        (&json!(3), &json!(["why"])),
        "{run}"
    );
}

#[tokio::test]
async fn a_command_that_is_cancelled_is_gone_when_its_run_has_ended() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("exec:sh -c 'trap \"\" TERM; echo on; sleep 600 & wait'").await;
    let run = session.prompt("x").await;
    session.wait_for_event("its words", |event| event.is_of_run(&run, "text.delta")).await;
    session.cancel().await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "cancelled");
    let finished = session.wait_for_run_event(&run, "run.finished").await;
    assert_eq!(finished.data["processes"]["survivors"], 0, "{}", finished.data);
    assert!(daemon.home.agent_processes().is_empty(), "{:?}", daemon.home.agent_processes());
}

#[tokio::test]
async fn what_describes_nobody_is_refused_with_what_to_do() {
    let daemon = TestDaemon::start().await;
    let place = daemon.workspace().await;
    let try_agent = async |agent: &str| place.try_session(json!({ "agent": agent })).await;
    let message = |answer: TestResponse, status, code| {
        answer.expect_refusal(status, code);
        answer.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let unknown = message(try_agent("nobody").await, 400, "unknown_agent");
    assert!(unknown.contains("claude") && unknown.contains("echo"), "{unknown}");
    let empty = message(try_agent("acp:").await, 400, "unknown_agent");
    assert!(empty.contains("after the colon"), "{empty}");
    let quote = message(try_agent("exec:a 'b").await, 400, "unknown_agent");
    assert!(quote.contains("quote"), "{quote}");
    let absent = message(try_agent("acp:there-is-no-such-program").await, 409, "agent_unavailable");
    assert!(absent.contains("PATH"), "{absent}");
    let missing = try_agent("opencode").await.expect_refusal(409, "agent_unavailable");
    assert_eq!(missing["install"], "npm install -g opencode-ai");
}

#[tokio::test]
async fn a_manifest_of_the_users_counts_at_once_and_a_bad_one_is_told_by_doctor() {
    let daemon = TestDaemon::start().await;
    let folder = daemon.home.path().join("agents");
    std::fs::create_dir_all(&folder).unwrap();
    let shout = "[agent]\nname = 'shout'\nbinary = 'tr'\ndriver = 'exec'\ndescription = 'Shouts.'\n[startup]\ncommand = ['tr', 'a-z', 'A-Z']\n";
    std::fs::write(folder.join("shout.toml"), shout).unwrap();
    let session = daemon.session("shout").await;
    assert_eq!(session.wait(&session.prompt("hey").await).await["text"], "HEY");
    let listed = daemon.client().get("/v1/agents").await.list();
    let about = listed.iter().find(|agent| agent["name"] == "shout").unwrap();
    assert!(about["origin"].as_str().unwrap().ends_with("shout.toml"), "{about}");

    std::fs::write(folder.join("bad.toml"), "[agent]\nname = 'bad'\nbinry = 'x'\n").unwrap();
    let output = daemon.qd(&["doctor"]).await.ok();
    assert!(output.contains("bad.toml is ignored") && output.contains("line 3"), "{output}");
    assert!(output.contains("shout ") && output.contains("is installed"), "{output}");
    assert!(
        output.contains("npm install -g @anthropic-ai/claude-code") || output.contains("claude "),
        "{output}"
    );
}

#[tokio::test]
async fn an_agent_that_no_policy_can_hold_is_refused_with_the_setting_that_is_in_the_way() {
    let daemon = TestDaemon::start().await;
    let settings = daemon.home.sibling_path("demo.json");
    let manifest = format!(
        "[agent]\nname = \"demo\"\nbinary = \"cat\"\n[fast_path]\nacp_stdio = [\"cat\"]\n[policy]\n\
         overridden_by = [{{ file = \"{}\", at = \"/mode\", values = [\"yolo\"] }}]\n",
        settings.display()
    );
    let folder = daemon.home.path().join("agents");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("demo.toml"), manifest).unwrap();
    let place = daemon.workspace().await;
    place.try_session(json!({ "agent": "demo" })).await.expect(201);

    std::fs::write(&settings, r#"{"mode": "yolo"}"#).unwrap();
    let refused = place.try_session(json!({ "agent": "demo" })).await;
    let details = refused.expect_refusal(409, "agent_overrides_policy");
    assert_eq!(details["setting"], format!("`mode` in {}", settings.display()));
    std::fs::write(&settings, r#"{"mode": "careful"}"#).unwrap();
    place.try_session(json!({ "agent": "demo" })).await.expect(201);
}

#[tokio::test]
async fn what_a_project_brings_counts_after_qd_trust_and_until_it_changes() {
    let daemon = TestDaemon::start().await;
    let agents = daemon.home.project_dir().join(".quarterdeck/agents");
    std::fs::create_dir_all(&agents).unwrap();
    let manifest = "[agent]\nname = 'ours'\nbinary = 'cat'\ndriver = 'exec'\n";
    std::fs::write(agents.join("ours.toml"), manifest).unwrap();
    let place = daemon.workspace().await;
    let refused = place.try_session(json!({ "agent": "ours" })).await;
    refused.expect_refusal(400, "unknown_agent");
    assert!(refused.to_string().contains("qd trust"), "{refused}");

    let output = daemon.qd(&["trust", "."]).await.ok();
    assert!(output.contains("ours.toml"), "{output}");
    let session = place.session("ours").await;
    assert_eq!(session.wait(&session.prompt("meow").await).await["text"], "meow");

    std::fs::write(agents.join("ours.toml"), format!("{manifest}# changed\n")).unwrap();
    place.try_session(json!({ "agent": "ours" })).await.expect_refusal(400, "unknown_agent");
    let list = daemon.qd(&["trust"]).await.ok();
    assert!(list.contains("changed, not trusted"), "{list}");
    daemon.qd(&["trust", "."]).await.ok();
    place.try_session(json!({ "agent": "ours" })).await.expect(201);
    daemon.qd(&["trust", "--no", "."]).await.ok();
    place.try_session(json!({ "agent": "ours" })).await.expect_refusal(400, "unknown_agent");
    let missing = daemon.home.sibling_path("missing");
    daemon.qd(&["trust", missing.to_str().unwrap()]).await.expect_exit(2);
}
