//! The tool directory of a session: its own socket and its token. Whoever calls on the socket acts for the session, the
//! agent reaches its tools at every level of confinement, and nothing in its environment would let others speak for it.

use qd_testkit::home::signal;
use qd_testkit::mcp::{session_token, tool_directory};
use qd_testkit::{TestClient, TestDaemon, TestSession, poll_until, script::*};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::workers_loss::process_of;

/// A session at each level that this machine can give, with the level.
async fn session_at_each_level(daemon: &TestDaemon) -> Vec<(&'static str, TestSession)> {
    let workspace = daemon.workspace().await;
    let mut sessions = Vec::new();
    for level in ["off", "deck", "workspace"] {
        let created = workspace.try_session(json!({"agent": "script", "sandbox": level})).await;
        if created.status == 409 {
            created.expect_refusal(409, "sandbox_unavailable");
            continue;
        }
        let id = created.expect(201)["id"].as_str().unwrap().to_owned();
        sessions.push((level, TestSession { client: daemon.client(), workspace: workspace.id.clone(), id }));
    }
    sessions
}

#[tokio::test]
async fn whoever_calls_on_the_socket_of_a_session_has_its_rights_and_no_more() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let (session, other) = (daemon.session("script").await, daemon.session("script").await);
    for one in [&session, &other] {
        one.run_script(&[say("x")]).await;
    }
    let run = other.prompt_script(&[ask_bash("make")]).await;
    let ask = other.wait_for_ask(&run).await;
    let socket = tool_directory(&daemon.home, &session.id).join("qd.sock");
    // We are no agent, and on the daemon's own socket we may do everything.
    let plain = TestClient::unix(&socket);
    for client in [plain.clone(), plain.with_token(&daemon.token())] {
        assert_eq!(client.get(&session.path("")).await.expect(200)["id"], session.id);
        client.get(&session.path("/messages")).await.expect(200);
        for path in
            [other.path(""), other.path("/messages"), "/v1/asks".to_owned(), "/v1/sessions".to_owned()]
        {
            let refused = client.get(&path).await.expect_refusal(403, "agent_not_allowed");
            assert_eq!(refused["session_id"], session.id, "{path}");
        }
        let answered = client.answer_ask(&ask, &json!({ "decision": "allow_once" })).await;
        answered.expect_refusal(403, "agent_not_allowed");
        client.post_empty("/v1/tools/list").await.expect_refusal(403, "agent_not_allowed");
    }
    let own = plain.with_token(&session_token(&daemon.home, &session.id));
    own.post_empty("/v1/tools/list").await.expect(200);
    let foreign = plain.with_token(&session_token(&daemon.home, &other.id));
    foreign.post_empty("/v1/tools/list").await.expect_refusal(403, "agent_not_allowed");
    other.cancel().await;
}

#[tokio::test]
async fn an_agent_reaches_its_tools_at_every_level_also_after_its_daemon_was_killed() {
    let mut daemon = TestDaemon::start().await;
    let sessions = session_at_each_level(&daemon).await;
    let uses = [mcp("status", json!({}))];
    let mut workers = Vec::new();
    for (level, session) in &sessions {
        let run = session.run_script(&uses).await;
        assert_eq!(run["finish_reason"], "end_turn", "{level}: {run}");
        assert!(run["text"].as_str().unwrap().contains(&session.id), "{level}: {run}");
        workers.push(process_of(session).await.pid);
    }
    daemon.kill9().await;
    daemon.start_again().await;
    for ((level, session), worker) in sessions.iter().zip(workers) {
        let run = session.run_script(&uses).await;
        assert_eq!(run["finish_reason"], "end_turn", "{level}: {run}");
        assert_eq!(process_of(session).await.pid, worker, "its agent was not started again");
    }
}

#[tokio::test]
async fn inside_a_sandbox_the_path_of_the_daemons_socket_leads_to_the_sessions_own() {
    let daemon = TestDaemon::start().await;
    let work = daemon.home.project_dir();
    for (level, session) in session_at_each_level(&daemon).await {
        let line = format!(
            "at() {{ curl -s -o /dev/null -w '%{{http_code}} ' --unix-socket {socket} \"http://localhost$1\"; }}; \
             {{ at {own}; at /v1/asks; QD_HOME={home} $QD asks >/dev/null 2>&1; echo $?; }} >{level}.new; \
             mv {level}.new {level}",
            socket = daemon.home.socket().display(),
            home = daemon.home.path().display(),
            own = session.path(""),
        );
        let line = line.replace("$QD ", &format!("{} ", qd_testkit::home::binary().display()));
        let path = format!("PATH={}", std::env::var("PATH").unwrap());
        session.prompt_script(&[spawn(&["env", &path, "sh", "-c", &line]), sleep_forever()]).await;
        let tried = poll_until("the attempts", async || std::fs::read_to_string(work.join(level)).ok()).await;
        assert_eq!(tried, "200 403 1\n", "{level}");
    }
}

#[tokio::test]
async fn no_secret_that_speaks_for_a_session_is_in_an_agents_environment() {
    let daemon = TestDaemon::start().await;
    for (level, session) in session_at_each_level(&daemon).await {
        session.run_script(&[say("x")]).await;
        let directory = tool_directory(&daemon.home, &session.id);
        let worker = daemon.client().get("/v1/workers").await.list();
        let worker = worker.into_iter().find(|worker| worker["session_id"] == session.id).unwrap();
        let agent = worker["processes"][0]["pid"].as_u64().unwrap();
        let environ = std::fs::read_to_string(format!("/proc/{agent}/environ")).unwrap();
        let variable = environ.split('\0').find_map(|item| item.strip_prefix("QD_SESSION_TOKEN="));
        assert_eq!(variable, Some(format!("file:{}", directory.join("token").display()).as_str()));
        for secret in [session_token(&daemon.home, &session.id), daemon.token()] {
            let secret = secret.rsplit('.').next().unwrap();
            assert!(!environ.contains(secret), "{level}");
        }
        let read = session.run_script(&[json!({ "read": directory.join("token") })]).await;
        assert_eq!(read["finish_reason"], "end_turn", "its own token can be read at {level}: {read}");
        assert!(read["text"].as_str().unwrap().contains("redacted"), "{read}");
        assert_eq!(mode(&directory), 0o700);
        assert_eq!((mode(&directory.join("token")), mode(&directory.join("qd.sock"))), (0o600, 0o600));
        session.close().await;
        session.wait_for_event("its end", |event| event.kind == "session.closed").await;
        poll_until("the end of its tools", async || (!directory.exists()).then_some(())).await;
    }
}

fn mode(path: &std::path::Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

#[tokio::test]
async fn a_copied_mark_does_not_make_a_process_speak_for_another_session() {
    let daemon = TestDaemon::start().await;
    let settings = json!({ "agent": "script", "sandbox": "off" });
    let session = daemon.session_with(settings.clone()).await;
    let other = daemon.session_with(settings).await;
    other.run_script(&[say("x")]).await;
    let workers = daemon.client().get("/v1/workers").await.list();
    let agent = &workers.iter().find(|worker| worker["session_id"] == other.id).unwrap()["processes"][0];
    let environ = std::fs::read_to_string(format!("/proc/{}/environ", agent["pid"])).unwrap();
    let mark = environ.split('\0').find(|item| item.starts_with("QD_MARK=")).unwrap();
    let work = daemon.home.project_dir();
    let at = |path: &str| {
        format!(
            "curl -s -o /dev/null -w '%{{http_code}} ' --unix-socket {} http://localhost{path}",
            daemon.home.socket().display()
        )
    };
    let line = format!("{{ {}; {}; }} >new; mv new tried", at(&session.path("")), at(&other.path("")));
    let path = format!("PATH={}", std::env::var("PATH").unwrap());
    session.prompt_script(&[spawn(&["env", mark, &path, "sh", "-c", &line]), sleep_forever()]).await;
    let tried = poll_until("the attempts", async || std::fs::read_to_string(work.join("tried")).ok()).await;
    assert_eq!(tried, "200 403 ");
}

#[tokio::test]
async fn a_home_whose_path_is_long_serves_the_sockets_of_its_sessions() {
    let daemon = TestDaemon::start().await;
    let home = daemon.home.sibling_path(&"h".repeat(60));
    let mut serve = daemon.home.command(&["serve"]);
    serve.env("QD_HOME", &home);
    let mut second = qd_testkit::home::TestCommand::spawn(serve);
    second.wait_for_stdout("listening on").await;
    let client = TestClient::unix(home.join("qd.sock"));
    let workspace = client.workspace(&daemon.home.project_dir()).await;
    let session = workspace.session("script").await;
    let run = session.run_script(&[mcp("status", json!({}))]).await;
    assert_eq!(run["finish_reason"], "end_turn", "{run}");
    let shown: Value = client.get(&session.path("")).await.expect(200);
    let worker = process_of(&session).await;
    assert!(shown["sandbox"]["level"].is_string(), "{shown}");
    second.signal(Signal::KILL);
    signal(worker.pid, Signal::KILL);
}
