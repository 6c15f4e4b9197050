//! `qd adopt`, and sessions that continue a conversation that was begun elsewhere.

use std::path::{Path, PathBuf};

use qd_testkit::{TestDaemon, TestSession, script::*};
use serde_json::{Value, json};

use crate::workers_loss::remembering;

/// A daemon whose agent `scribe` is the scripted agent with a memory, and a conversation of it that no session has.
struct AdoptableConversation {
    daemon: TestDaemon,
    id: String,
    workspace: String,
}

impl AdoptableConversation {
    async fn new() -> Self {
        let daemon = TestDaemon::start().await;
        let settings = remembering(&daemon);
        let memory = settings["env"]["QD_SCRIPT_STATE"].as_str().unwrap().to_owned();
        let manifest = format!(
            "[agent]\nname = 'scribe'\ndriver = 'acp'\n\
             [startup]\ncommand = ['{{qd}}', '__script']\nenv = {{ QD_SCRIPT_STATE = '{memory}' }}\n\
             [conversations]\nroots = ['$SCRIBE_HOME', '~/.scribe']\nfiles = 'notes/{{id}}.jsonl'\n\
             directory = '/cwd'\ntitles = ['/title']\n\
             prompts = [{{ where = {{ '/by' = 'user' }}, text = '/text' }}]\n"
        );
        std::fs::create_dir_all(daemon.home.path().join("agents")).unwrap();
        std::fs::write(daemon.home.path().join("agents/scribe.toml"), manifest).unwrap();
        let session = daemon.session_with(settings).await;
        assert_eq!(session.run_script(&[say("the first answer")]).await["text"], "the first answer");
        let id = session.show().await["agent_session_id"].as_str().unwrap().to_owned();
        close(&session).await;
        let found = Self { daemon, id, workspace: session.workspace };
        found.write(&found.id, &found.daemon.home.project_dir(), "Fix the login page");
        found
    }

    fn notes(&self) -> PathBuf {
        self.daemon.home.sibling_path("user").join(".scribe/notes")
    }

    fn write(&self, id: &str, directory: &Path, prompt: &str) {
        std::fs::create_dir_all(self.notes()).unwrap();
        let line = json!({ "by": "user", "cwd": directory, "text": prompt });
        std::fs::write(self.notes().join(format!("{id}.jsonl")), format!("{line}\n")).unwrap();
    }

    async fn list(&self, args: &[&str]) -> Vec<Value> {
        let args = [&["adopt", "--json"], args].concat();
        self.daemon.qd(&args).await.json().as_array().unwrap().clone()
    }

    fn session(&self, id: &str) -> TestSession {
        let workspace = self.workspace.clone();
        TestSession { client: self.daemon.client(), workspace, id: id.to_owned() }
    }
}

/// Closes a session and waits until it is closed and its agent gone.
pub(crate) async fn close(session: &TestSession) {
    session.close().await;
    session.wait_for_event("the close", |event| event.kind == "session.closed").await;
}

#[tokio::test]
async fn an_adopted_conversation_is_continued_by_the_first_prompt_also_after_a_restart() {
    let mut found = AdoptableConversation::new().await;
    let listed = found.list(&[]).await;
    assert_eq!(listed.len(), 1, "{listed:#?}");
    assert_eq!(listed[0]["title"], "Fix the login page");
    assert_eq!(listed[0]["session_id"], Value::Null);
    let adopted = found.daemon.qd(&["adopt", &found.id[..found.id.len() - 2]]).await;
    assert!(adopted.stderr.contains("qd run --session ses_") && adopted.stderr.contains("qd attach ses_"));
    let id = adopted.ok().trim().to_owned();
    found.daemon.restart().await;
    let session = found.session(&id);
    let about = session.show().await;
    assert_eq!((&about["agent"], &about["title"]), (&json!("scribe"), &json!("Fix the login page")));
    assert_eq!(about["agent_session_id"], found.id.as_str());
    assert_eq!(session.run_script(&[say("the second")]).await["text"], "the second");
    assert_eq!(session.show().await["agent_session_id"], found.id.as_str(), "the same conversation");
    let memory = found.daemon.home.sibling_path("memory").join(format!("{}.jsonl", found.id));
    let memory = std::fs::read_to_string(memory).unwrap();
    assert!(memory.contains("the first answer") && memory.contains("the second"), "{memory}");
}

#[tokio::test]
async fn a_conversation_is_adopted_once_and_again_after_its_session_was_closed() {
    let found = AdoptableConversation::new().await;
    let first = found.daemon.qd(&["adopt", &found.id]).await.ok().trim().to_owned();
    assert_eq!(found.list(&[]).await[0]["session_id"], first.as_str());
    let shown = found.daemon.qd(&["adopt"]).await.ok();
    assert!(shown.starts_with("AGENT") && shown.contains(&first), "{shown}");
    let refused = found.daemon.qd(&["adopt", &found.id]).await;
    assert!(refused.stderr.contains(&format!("qd run --session {first}")), "{refused:?}");
    refused.expect_exit(1);
    close(&found.session(&first)).await;
    let second = found.daemon.qd(&["--json", "adopt", &found.id]).await.json();
    assert_ne!(second["id"], first.as_str());
    assert_eq!(second["agent_session_id"], found.id.as_str());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_adopt_a_conversation_at_once_one_gets_it_and_the_others_are_told_who() {
    let mut found = AdoptableConversation::new().await;
    let workspace = found.daemon.workspace().await;
    let settings = json!({ "agent": "scribe", "agent_session_id": found.id });
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let (workspace, settings) = (workspace.clone(), settings.clone());
        clients.spawn(async move { workspace.try_session(settings).await });
    }
    let answers = clients.join_all().await;
    let created: Vec<Value> =
        answers.iter().filter(|answer| answer.status == 201).map(|answer| answer.json()).collect();
    assert_eq!(created.len(), 1, "{answers:?}");
    let id = created[0]["id"].as_str().unwrap().to_owned();
    for answer in answers.iter().filter(|answer| answer.status != 201) {
        answer.expect_refusal(409, "conversation_in_use");
        assert_eq!(answer.json()["error"]["details"]["session_id"], id.as_str());
    }
    found.daemon.restart().await;
    workspace.try_session(settings.clone()).await.expect_refusal(409, "conversation_in_use");
    close(&found.session(&id)).await;
    workspace.try_session(settings).await.expect(201);
}

#[tokio::test]
async fn conversations_of_other_directories_are_listed_if_asked_for_and_adopted_there() {
    let found = AdoptableConversation::new().await;
    let other = found.daemon.home.sibling_path("other");
    std::fs::create_dir_all(&other).unwrap();
    let other = other.canonicalize().unwrap();
    found.write("elsewhere1", &other, "In the other directory");
    found.write("gone1", Path::new("/no/such/directory"), "In no directory");
    assert_eq!(found.list(&[]).await.len(), 1);
    assert_eq!(found.list(&["--all"]).await.len(), 3);
    assert_eq!(found.list(&["-C", other.to_str().unwrap()]).await[0]["id"], "elsewhere1");
    assert_eq!(found.list(&["--all", "--agent", "codex"]).await, Vec::<Value>::new());
    let session = found.daemon.qd(&["--json", "adopt", "elsewhere"]).await.json();
    let workspace = session["workspace_id"].as_str().unwrap();
    let workspace = found.daemon.client().get(&format!("/v1/workspaces/{workspace}")).await.json();
    assert_eq!(workspace["path"], other.to_str().unwrap());
    assert!(found.daemon.qd(&["adopt", "gone1"]).await.stderr.contains("/no/such/directory"));
    found.daemon.qd(&["adopt", "gone1"]).await.expect_exit(2);
    found.daemon.qd(&["adopt", "-C", other.to_str().unwrap(), &found.id]).await.expect_exit(3);
    found.daemon.qd(&["adopt", "nothing-like-it"]).await.expect_exit(3);
    found.daemon.qd(&["adopt", "--agent", "scribe@gpu"]).await.expect_exit(2);
    found.daemon.qd(&["adopt", "--agent", "echo"]).await.expect_exit(2);
}

#[tokio::test]
async fn a_daemon_that_may_be_on_another_machine_is_refused() {
    let daemon = TestDaemon::start_with(|options| {
        options.tcp();
    })
    .await;
    let address = daemon.listening().iter().find(|line| line.contains("http://")).unwrap();
    let address = &address[address.find("http://").unwrap()..];
    let refused = daemon.qd(&["--host", address, "adopt"]).await;
    assert!(refused.stderr.contains("machine of the daemon"), "{refused:?}");
    refused.expect_exit(2);
}

#[tokio::test]
async fn only_agents_that_resume_take_a_conversation_and_its_id_is_checked() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let create = async |agent: &str, id: &str, worktree: bool| {
        let settings = json!({ "agent": agent, "agent_session_id": id, "worktree": worktree });
        workspace.try_session(settings).await
    };
    create("echo", "abc", false).await.expect_refusal(400, "unsupported_setting");
    create("exec:cat", "abc", false).await.expect_refusal(400, "unsupported_setting");
    create("script", "abc", true).await.expect_refusal(400, "unsupported_setting");
    for id in ["", "--model", "../up", "a b", "a\n", &"a".repeat(129)] {
        create("script", id, false).await.expect_refusal(400, "invalid_value");
    }
    let session = workspace.session_with(json!({ "agent": "script", "agent_session_id": "ses_old" })).await;
    assert_eq!(session.show().await["agent_session_id"], "ses_old");
    let events = session.events().await;
    assert_eq!(events[0].data["agent_session_id"], "ses_old");
    let tool = json!({ "agent": "echo", "prompt": "hi", "agent_session_id": "abc" });
    let spawned = daemon.client().post("/v1/tools/spawn_agent", &tool).await;
    assert_eq!(spawned.status, 400, "agents cannot choose a conversation: {spawned}");
    assert!(spawned.to_string().contains("agent_session_id"), "{spawned}");
}
