//! Workspaces: one per resolved path, removed only when nothing in it is live, created again when added again.

use std::path::Path;

use qd_testkit::{TestDaemon, script::*};
use serde_json::json;

#[tokio::test]
async fn a_workspace_is_201_when_new_and_200_when_known() {
    let daemon = TestDaemon::start().await;
    let client = daemon.client();
    let made = client.post("/v1/workspaces", &json!({ "path": "/usr", "name": "system" })).await.expect(201);
    assert!(made["id"].as_str().unwrap().starts_with("ws_"), "{made}");
    assert_eq!((&made["path"], &made["name"]), (&json!("/usr"), &json!("system")));
    assert!(made["created_at"].is_string());
    let again = client.post("/v1/workspaces", &json!({ "path": "/usr/../usr/" })).await.expect(200);
    assert_eq!(again["id"], made["id"]);
    let id = made["id"].as_str().unwrap();
    assert_eq!(client.get(&format!("/v1/workspaces/{id}")).await.expect(200), made);
    assert_eq!(client.get("/v1/workspaces").await.list(), [made]);
}

#[tokio::test]
async fn symlinks_are_followed_so_two_names_of_one_directory_are_one_workspace() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let link = daemon.home.sibling_path("link");
    std::os::unix::fs::symlink(daemon.home.project_dir(), &link).unwrap();
    let by_link = daemon.client().post("/v1/workspaces", &json!({ "path": link })).await.expect(200);
    assert_eq!(by_link["id"], workspace.id);
    assert_eq!(by_link["path"], daemon.home.project_dir().canonicalize().unwrap().to_str().unwrap());
}

#[tokio::test]
async fn what_is_no_directory_is_400_path_not_found() {
    let daemon = TestDaemon::start().await;
    for path in ["/no/such/place", "/etc/passwd"] {
        daemon
            .client()
            .post("/v1/workspaces", &json!({ "path": path }))
            .await
            .expect_refusal(400, "path_not_found");
    }
    for path in ["relative", "", "a\0b"] {
        let answer = daemon.client().post("/v1/workspaces", &json!({ "path": path })).await;
        assert_eq!(answer.status, 400, "{path:?}: {answer}");
    }
    assert!(daemon.client().get("/v1/workspaces").await.list().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_twenty_clients_add_at_once_is_one_workspace() {
    let daemon = TestDaemon::start().await;
    let mut racers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let client = daemon.client();
        racers.spawn(async move { client.post("/v1/workspaces", &json!({ "path": "/usr" })).await });
    }
    let answers = racers.join_all().await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    assert!(answers.windows(2).all(|pair| pair[0].json()["id"] == pair[1].json()["id"]));
    assert_eq!(daemon.client().get("/v1/workspaces").await.list().len(), 1);
}

#[tokio::test]
async fn a_workspace_with_a_live_run_is_409_busy_unless_forced() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let session = workspace.session("script").await;
    let mut stream = daemon.client().stream("/v1/events").await.wait_until_ready().await;
    let run = session.prompt_script(&[sleep_forever()]).await;
    session.wait_for_start(&run).await;
    daemon.client().delete(&workspace.path("")).await.expect_refusal(409, "busy");
    assert_eq!(session.run(&run).await["state"], "running");
    let forced = daemon.client().delete(&workspace.path("?force=true")).await;
    assert!(forced.status < 300, "{forced}");
    let seen = stream.until("workspace.removed", |event| event.kind == "workspace.removed").await;
    let ended = seen.iter().find(|event| event.is_of_run(&run, "run.finished")).expect("its run ends first");
    assert_eq!(ended.data["finish_reason"], "cancelled");
}

#[tokio::test]
async fn a_forgotten_workspace_is_unknown_and_its_path_makes_a_new_one() {
    let mut daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let session = workspace.session("script").await;
    session.run_script(&[say("x")]).await;
    let removed = daemon.client().delete(&workspace.path("")).await;
    assert!(removed.status < 300, "{removed}");
    daemon.client().get(&workspace.path("")).await.expect_refusal(404, "not_found");
    daemon.client().get(&workspace.path("/sessions")).await.expect_refusal(404, "not_found");
    session.try_prompt("x").await.expect_refusal(404, "not_found");
    assert!(daemon.client().get("/v1/workspaces").await.list().is_empty());
    let again = daemon.workspace().await;
    assert_ne!(again.id, workspace.id);
    assert!(daemon.client().get(&again.path("/sessions")).await.list().is_empty());
    daemon.restart().await;
    assert_eq!(daemon.workspace().await.id, again.id);
    daemon.client().get(&workspace.path("")).await.expect_refusal(404, "not_found");
}

#[tokio::test]
async fn workspaces_and_sessions_survive_a_crash() {
    let mut daemon = TestDaemon::start().await;
    let workspace = daemon.client().workspace(Path::new("/usr")).await;
    let settings = json!({ "agent": "script", "title": "kept", "policy": "deny", "max_turns": 3 });
    let session = workspace.session_with(settings).await;
    let (before, listed) = (session.show().await, daemon.client().get("/v1/workspaces").await.list());
    daemon.restart().await;
    assert_eq!(session.show().await, before);
    assert_eq!(daemon.client().get("/v1/workspaces").await.list(), listed);
}
